"""Progress of a replay on the terminal."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtests.replay.record import RequestRecord

_INTERVAL_S = 0.2
_LOOK_EVERY = 64


def progress_bars(console: Console) -> Progress:
    """Bars for a console; without a terminal they show nothing."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("at {task.fields[clock]:,.0f} s"),
        TextColumn("TTFT {task.fields[ttft]:,.0f} ms"),
        TextColumn("errors {task.fields[errors]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class PolicyBar:
    """The bar of one policy; call it with each request that has ended."""

    def __init__(self, bars: Progress, policy: str, total: int) -> None:
        self._bars = bars
        self._task = bars.add_task(policy, total=total, clock=0.0, ttft=0.0, errors=0)
        self._total = total
        self._done = 0
        self._errors = 0
        self._ttft_s = 0.0
        self._next_s = 0.0

    def __call__(self, record: RequestRecord) -> None:
        """Count a request."""
        self._done += 1
        self._errors += record.error is not None
        if record.first_token_s is not None:
            self._ttft_s += record.first_token_s - record.arrival_s
        if self._done % _LOOK_EVERY and self._done < self._total:
            return
        now_s = time.monotonic()
        if now_s < self._next_s and self._done < self._total:
            return
        self._next_s = now_s + _INTERVAL_S
        self._bars.update(
            self._task,
            completed=self._done,
            clock=record.ended_s or 0.0,
            ttft=1000.0 * self._ttft_s / self._done,
            errors=self._errors,
        )
