"""Progress of a benchmark on the terminal."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from loadtests.bench_trace import Progress

_INTERVAL_S = 0.2


class ProgressBars:
    """One bar per run, with what is in flight, the errors, and the running mean TTFT and hit rate."""

    def __init__(self, console: Console) -> None:
        """Prepare the display; without a terminal it shows nothing."""
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn(
                "in flight {task.fields[in_flight]}, errors {task.fields[errors]}, "
                "TTFT {task.fields[ttft]:,.0f} ms, hit {task.fields[hit_rate]:.3f}"
            ),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def start(self, name: str, total: int) -> "Bar":
        """Add a bar for a run of `total` requests."""
        return Bar(self._bars, name, total)


class Bar:
    """The bar of one run; call it with each change."""

    def __init__(self, bars: Bars, name: str, total: int) -> None:
        self._bars = bars
        self._task = bars.add_task(name, total=total, in_flight=0, errors=0, ttft=0.0, hit_rate=0.0)
        self._next_s = 0.0

    def __call__(self, progress: Progress) -> None:
        """Show the totals, at most a few times a second: drawing must not delay the load."""
        now_s = time.monotonic()
        if now_s < self._next_s and progress.done < progress.total:
            return
        self._next_s = now_s + _INTERVAL_S
        self._bars.update(
            self._task,
            completed=progress.done,
            in_flight=progress.in_flight,
            errors=progress.errors,
            ttft=progress.mean_ttft_ms,
            hit_rate=progress.token_hit_rate,
        )
