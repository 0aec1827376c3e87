"""The simulated clock: what happens next, in order of time."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any

ARRIVAL, REPORT, STEP = 0, 1, 2
"""Order of events of the same moment: requests come in, news is told, and only then do idle engines begin a step, so
that requests of one moment share it."""


class Timer:
    """A call that has been scheduled and may be cancelled."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Do not call."""
        self.call = None


class Events:
    """A heap of calls by time.

    Attributes:
        now_s: the time of the event that is being handled.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, order: int, call: Callable[..., None], *arguments: Any) -> None:
        """Call at a time; a time that has passed means now."""
        heapq.heappush(self._heap, (max(time_s, self.now_s), order, next(self._numbers), call, arguments))

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call after a delay: what the gateway's breakers ask of an event loop."""
        timer = Timer(call)
        self.at(self.now_s + delay_s, REPORT, _fire, timer)
        return timer

    def run(self) -> None:
        """Handle events until none is left."""
        heap = self._heap
        pop = heapq.heappop
        while heap:
            self.now_s, _, _, call, arguments = pop(heap)
            call(*arguments)


def _fire(timer: Timer) -> None:
    if timer.call is not None:
        timer.call()
