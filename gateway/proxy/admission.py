"""Where requests wait while no replica has room for them: bounded lines, first come, first served.

Rules:
- A line per model. A pool that is full must not hold up the requests of another.
- Who comes while others wait in its line goes behind them, even if there is room at this very moment.
- Entering, leaving and being served cost the same however many wait.
- Time is not looked at here; how long a request may wait is among the limits its exchange checks.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol


class Waiter(Protocol):
    """A request that waits."""

    def offer_room(self) -> bool:
        """Go to a replica; False if none has room."""


class AdmissionQueue:
    """All lines together.

    Attributes:
        max_requests: how many may wait; 0 for none.
        waiting: how many do.
        entered: how many ever have.
        turned_away: how many found it full, where any may wait.
    """

    __slots__ = ("_due", "_later", "_lines", "entered", "max_requests", "turned_away", "waiting")

    def __init__(self, max_requests: int, later: Callable[[Callable[[], None]], object] | None = None) -> None:
        """Make an empty queue.

        Args:
            max_requests: how many may wait at a time; 0 for none.
            later: calls a function soon, but not now; by default the running event loop does.
        """
        self.max_requests = max_requests
        self.waiting = 0
        self.entered = 0
        self.turned_away = 0
        # An OrderedDict finds its first key at once, however many were removed before it.
        self._lines: dict[str | None, OrderedDict[Waiter, None]] = {}
        self._later = later or _soon
        self._due = False

    def has_line(self, line: str | None) -> bool:
        """Say whether anybody waits in a line."""
        return line in self._lines

    def enter(self, line: str | None, waiter: Waiter) -> bool:
        """Join the end of a line; False if too many wait already."""
        if self.waiting >= self.max_requests:
            if self.max_requests:
                self.turned_away += 1
            return False
        waiters = self._lines.get(line)
        if waiters is None:
            waiters = self._lines[line] = OrderedDict()
        waiters[waiter] = None
        self.waiting += 1
        self.entered += 1
        return True

    def leave(self, line: str | None, waiter: Waiter) -> None:
        """Give up a place, if there is one."""
        waiters = self._lines.get(line)
        if waiters is not None and waiter in waiters:
            del waiters[waiter]
            self.waiting -= 1
            if not waiters:
                del self._lines[line]

    def room_may_be(self) -> None:
        """Something has changed that may have made room. Whoever says so is in the middle of its own affairs, so the
        waiting requests are served a moment later, once however often it is said."""
        if self.waiting and not self._due:
            self._due = True
            self._later(self.serve)

    def serve(self) -> None:
        """Offer room to the first of every line, and so on until one of the line finds none."""
        self._due = False
        for line in list(self._lines):
            waiters = self._lines.get(line)
            while waiters:
                waiter = next(iter(waiters))
                if not waiter.offer_room():
                    break
                self.leave(line, waiter)


def _soon(call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(call)
