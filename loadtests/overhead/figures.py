"""From runs to figures: one value per metric, gateway and round; medians, ranges, ratios and verdicts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from loadtests.overhead.gateways import FLOOR, WARMGATE
from loadtests.overhead.plan import SHORT_PROMPT_KB, Run, RunKind

Values = dict[str, dict[int, float]]
"""By gateway and round."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table."""

    key: str
    title: str
    kind: RunKind
    size: int
    value: Callable[[Run], float | None]
    digits: int = 1
    higher_is_better: bool = False
    compared: bool = True
    """Is there a best peer?"""
    max_ratio: float | None = None
    """Target: at most this much of the best peer's."""
    goal_ratio: float | None = None
    max_value: float | None = None
    """Target: at most this."""
    minus: RunKind | None = None
    """Kind of the run whose value is taken off."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Line:
    """A metric with its figures."""

    metric: Metric
    cells: dict[str, Spread]
    """By gateway."""
    errors: dict[str, int]
    """Errors in the runs behind the cells, by gateway."""
    best_peer: str | None
    ratio: Spread | None
    """Ours to the best peer's, each within a round."""
    met: bool | None
    """Is the target reached? None without target or figures."""


def _cpu_us(run: Run) -> float | None:
    outcome = run.outcome
    return 1e6 * outcome.cpu_s["gateway"] / outcome.completed if outcome.completed else None


def _rate(run: Run) -> float | None:
    return run.outcome.completed / run.outcome.window_s if run.outcome.completed else None


def _rss_mb(run: Run) -> float | None:
    return run.outcome.peak_rss_bytes / 1e6 or None


def _p50(run: Run) -> float | None:
    return run.outcome.p50_ms if run.outcome.completed else None


def _p99(run: Run) -> float | None:
    return run.outcome.p99_ms if run.outcome.completed else None


def _idle(run: Run) -> float | None:
    return 1000 * run.outcome.cpu_s["gateway"] / run.outcome.window_s if run.outcome.window_s else None


def _calls(run: Run) -> float | None:
    return sum(run.calls.values()) / run.outcome.total if run.outcome.total else None


def _request_target(size_kb: int) -> tuple[float | None, float | None]:
    """Highest CPU time per request in terms of the best peer's, and the goal beyond it."""
    if size_kb == SHORT_PROMPT_KB:
        return 1.0, 0.7
    return {32: (0.7, None)}.get(size_kb, (0.6, None) if size_kb >= 128 else (None, None))


def metrics(runs: Sequence[Run]) -> list[Metric]:
    """The metrics that the runs have values for, in the order of the table."""
    sizes = sorted({run.size for run in runs if run.kind == "requests"})
    streams = sorted({run.size for run in runs if run.kind == "streams"})
    result = []
    for size in sizes:
        target, goal = _request_target(size)
        key, title = f"cpu_us_per_request_{size}kb", f"CPU µs/request, {size} KB"
        result.append(Metric(key, title, "requests", size, _cpu_us, max_ratio=target, goal_ratio=goal))
    for size in streams:
        key, title = f"cpu_us_per_chunk_{size}_streams", f"CPU µs/SSE chunk, {size} streams"
        result.append(Metric(key, title, "streams", size, _cpu_us, digits=2, max_ratio=0.8))
    if SHORT_PROMPT_KB in sizes:
        title = f"requests/s, {SHORT_PROMPT_KB} KB"
        result.append(
            Metric("requests_per_s", title, "requests", SHORT_PROMPT_KB, _rate, digits=0, higher_is_better=True)
        )
    if any(run.kind == "latency" for run in runs):
        for key, title, value, target in (
            ("added_p50_ms", "added p50 ms, half load", _p50, None),
            ("added_p99_ms", "added p99 ms, half load", _p99, 1.0),
        ):
            size = SHORT_PROMPT_KB
            result.append(Metric(key, title, "latency", size, value, digits=2, minus="direct", max_ratio=target))
    for size in streams:
        limit = 150.0 if size == 512 else None
        title = f"peak RSS MB, {size} streams"
        result.append(Metric(f"peak_rss_mb_{size}_streams", title, "streams", size, _rss_mb, max_value=limit))
    if any(run.kind == "idle" for run in runs):
        result.append(Metric("idle_cpu_ms_per_s", "CPU ms/s, idle", "idle", 0, _idle, compared=False))
    if SHORT_PROMPT_KB in sizes:
        title = "replica calls/request"
        result.append(Metric("calls_per_request", title, "requests", SHORT_PROMPT_KB, _calls, digits=2, compared=False))
    return result


def values(metric: Metric, runs: Sequence[Run]) -> Values:
    """Values of a metric by gateway and round; runs without one are left out."""
    result: Values = {}
    less: dict[tuple[str, int], float] = {}
    if metric.minus is not None:
        for run in runs:
            if run.kind == metric.minus and (value := metric.value(run)) is not None:
                less[run.gateway, run.round] = value
    for run in runs:
        if run.kind != metric.kind or run.size != metric.size or (value := metric.value(run)) is None:
            continue
        if metric.minus is not None:
            if (run.gateway, run.round) not in less:
                continue
            value -= less[run.gateway, run.round]
        result.setdefault(run.gateway, {})[run.round] = value
    return result


def line(metric: Metric, runs: Sequence[Run]) -> Line:
    """All figures of a metric.

    The best peer is the one with the best median. The floor is no peer, and neither are we.
    """
    found = values(metric, runs)
    cells = {gateway: Spread.of(list(by_round.values())) for gateway, by_round in found.items()}
    errors: dict[str, int] = {}
    for run in runs:
        if (run.kind == metric.kind and run.size == metric.size) or run.kind == metric.minus:
            errors[run.gateway] = errors.get(run.gateway, 0) + sum(run.outcome.errors.values())
    best_peer, ratio = None, None
    peers = {gateway: cell.median for gateway, cell in cells.items() if gateway not in (WARMGATE, FLOOR)}
    if metric.compared and peers:
        best_peer = (max if metric.higher_is_better else min)(peers, key=peers.__getitem__)
        theirs = found[best_peer]
        ratios = [
            value / theirs[round_] for round_, value in found.get(WARMGATE, {}).items() if theirs.get(round_, 0.0) > 0
        ]
        ratio = Spread.of(ratios) if ratios else None
    return Line(metric, cells, errors, best_peer, ratio, _met(metric, found, best_peer))


def _met(metric: Metric, found: Values, best_peer: str | None) -> bool | None:
    """Is the target reached in the median round?"""
    ours = found.get(WARMGATE, {})
    if metric.max_value is not None:
        return median(ours.values()) <= metric.max_value if ours else None
    if metric.max_ratio is None or best_peer is None:
        return None
    # Differences, not ratios: added latencies may come out below zero.
    theirs = found[best_peer]
    excess = [value - metric.max_ratio * theirs[number] for number, value in ours.items() if number in theirs]
    return median(excess) <= 0 if excess else None


def lines(runs: Sequence[Run]) -> list[Line]:
    """The whole table."""
    return [line(metric, runs) for metric in metrics(runs)]


def warnings(runs: Sequence[Run], interval_ms: float) -> list[str]:
    """What a reader must know before believing the figures: errors, streams that fell behind, hidden calls."""
    found: dict[str, None] = {}
    for run in runs:
        outcome = run.outcome
        where = f"{run.gateway}, {run.kind} {run.size}, round {run.round + 1}"
        for kind, count in outcome.errors.items():
            found[f"{where}: {count} x {kind}"] = None
        if run.kind == "streams" and outcome.completed:
            wanted = run.size * outcome.window_s * 1000 / interval_ms
            if outcome.completed < 0.9 * wanted:
                share = outcome.completed / wanted
                found[f"{where}: only {share:.0%} of the pace; this machine had no time for more"] = None
            if outcome.reads < 0.8 * outcome.completed:
                bunched = outcome.completed / outcome.reads
                found[f"{where}: chunks came {bunched:.1f} at a time, which makes each cheaper"] = None
    return list(found)


def hidden_calls(runs: Sequence[Run]) -> list[str]:
    """What gateways ask replicas besides the clients' requests, per request of the short prompt."""
    calls: dict[tuple[str, str], int] = {}
    requests: dict[str, int] = {}
    for run in runs:
        if run.kind != "requests" or run.size != SHORT_PROMPT_KB or not run.outcome.total:
            continue
        requests[run.gateway] = requests.get(run.gateway, 0) + run.outcome.total
        for path, count in run.calls.items():
            calls[run.gateway, path] = calls.get((run.gateway, path), 0) + count
    return [
        f"{gateway} called {path} of its replicas {count / requests[gateway]:.2f} times per request"
        for (gateway, path), count in calls.items()
        if path != "/v1/chat/completions" and count / requests[gateway] >= 0.01
    ]
