"""The targets of the default policy, applied to results.

All comparisons are of means over the seeds; the worst seed stands beside. "Best peer" is the peer whose mean over the
seeds is best on that scenario and that figure, whichever it is: the targets are against all of them at once.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from loadtests.compare.results import (
    BLOCK_HIT_RATE,
    ERROR_FROM_COLD,
    ERROR_LEARNT,
    HIT_RATE,
    LOAD_SKEW,
    OUTPUT_RATE,
    STAGE_OUTPUT_RATE,
    STAGE_TTFT,
    TPOT_P99,
    TTFT_MEAN,
    TTFT_P99,
    Metric,
    Results,
)
from loadtests.compare.scenario import OURS, Group, Scenario
from loadtests.compare.verdict import Verdict

_BASELINE = "least_outstanding"
_INFINITE_CACHE_TOKENS, _INFINITE_CACHE_BLOCKS = 0.3736, 0.3664
_RANDOM_BLOCKS = {4: 0.1893, 8: 0.1318, 16: 0.0932}
"""Of the Mooncake conversation trace: hit rates of one infinite cache, and of N behind random routing."""


def ratio_to(
    results: Results, scenario: str, figure: Metric, peer: str | None, *, at_least: bool = False
) -> tuple[float | None, float | None]:
    """Ours over a peer's: the ratio of the means over the seeds, and of the worst seed."""
    ours = results.by_seed(scenario, OURS, figure)
    theirs = results.by_seed(scenario, peer, figure) if peer is not None else []
    if not ours or len(ours) != len(theirs) or min(theirs) <= 0.0:
        return None, None
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    worst = min(ratios) if at_least else max(ratios)
    return sum(ours) / sum(theirs), worst


def _negated(figure: Metric) -> Metric:
    return lambda cell: None if (value := figure(cell)) is None else -value


def _against_best(
    results: Results,
    scenario: str,
    what: str,
    figure: Metric,
    limit: float,
    *,
    peers: Sequence[str] | None = None,
    at_least: bool = False,
) -> Verdict:
    best = results.best_peer(scenario, _negated(figure) if at_least else figure, peers)
    ratio, worst = ratio_to(results, scenario, figure, best, at_least=at_least)
    sign = ">=" if at_least else "<="
    return Verdict(
        scenario, f"{what} {sign} {limit:g} x the best peer's", limit, ratio, at_least, worst, f"best: {best}"
    )


def _absolute(
    results: Results, scenario: str, what: str, figure: Metric, limit: float, *, at_least: bool = False
) -> Verdict:
    values = results.by_seed(scenario, OURS, figure)
    measured = sum(values) / len(values) if values else None
    worst = (min if at_least else max)(values, default=None)
    return Verdict(scenario, f"{what} {'>=' if at_least else '<='} {limit:g}", limit, measured, at_least, worst)


def ladder(results: Results, scenario: Scenario) -> list[Verdict]:
    """Output within 2 % of the best peer's; TTFT and hit rate as the 73 % setting allows, or as the best peer's."""
    name = scenario.name
    lines = [
        _against_best(results, name, "output tok/s, mean of the stages,", STAGE_OUTPUT_RATE, 0.98, at_least=True),
        _against_best(results, name, "output tok/s over all", OUTPUT_RATE, 0.98, at_least=True),
    ]
    if scenario.workload == "b2b-saas":
        lines += [
            _absolute(results, name, "mean TTFT ms over all requests", TTFT_MEAN, 300.0),
            _absolute(results, name, "mean TTFT ms, mean of the stages,", STAGE_TTFT, 300.0),
            _absolute(results, name, "token hit rate", HIT_RATE, 0.94, at_least=True),
        ]
    else:
        lines.append(_against_best(results, name, "mean TTFT", TTFT_MEAN, 1.02))
    return [*lines, _absolute(results, name, "median error of predicted TTFT from cold", ERROR_FROM_COLD, 0.05)]


def trace(results: Results, scenario: Scenario) -> list[Verdict]:
    """Mean TTFT within 1 % of the best peer's; p99 within 2 % of the best among peers near it in the mean."""
    name = scenario.name
    best = results.best_peer(name, TTFT_MEAN)
    best_mean = results.mean(name, best, TTFT_MEAN) if best is not None else None
    near = [
        peer
        for peer in results.peers(name)
        if best_mean is not None
        and (mean := results.mean(name, peer, TTFT_MEAN)) is not None
        and mean <= 1.1 * best_mean
    ]
    return [
        _against_best(results, name, "mean TTFT", TTFT_MEAN, 1.01),
        _against_best(results, name, "p99 TTFT", TTFT_P99, 1.02, peers=near),
        _against_best(results, name, "p99 TPOT", TPOT_P99, 1.02, peers=near),
        _absolute(results, name, "median error of predicted TTFT from cold", ERROR_FROM_COLD, 0.05),
    ]


def workload(results: Results, scenario: Scenario) -> list[Verdict]:
    """Never more than 2 % behind the best peer; nothing lost without reuse, and no pile on a viral prefix."""
    name = scenario.name
    verdicts = [_against_best(results, name, "mean TTFT", TTFT_MEAN, 1.02)]
    if scenario.workload == "no-reuse":
        ratio, worst = ratio_to(results, name, TTFT_MEAN, _BASELINE)
        verdicts.append(Verdict(name, f"mean TTFT <= 1 x {_BASELINE}'s", 1.0, ratio, worst_seed=worst))
    if scenario.workload == "viral-prefix":
        verdicts.append(_absolute(results, name, "most / mean requests per replica", LOAD_SKEW, 1.25))
    return verdicts


def mixed(results: Results, scenario: Scenario) -> list[Verdict]:
    """At most 0.7 of the mean TTFT of every peer."""
    return [_against_best(results, scenario.name, "mean TTFT", TTFT_MEAN, 0.7)]


def faults(results: Results, scenario: Scenario) -> list[Verdict]:
    """Never worse than least_outstanding by more than 5 %."""
    ratio, worst = ratio_to(results, scenario.name, TTFT_MEAN, _BASELINE)
    return [Verdict(scenario.name, f"mean TTFT <= 1.05 x {_BASELINE}'s", 1.05, ratio, worst_seed=worst)]


def wrong(results: Results, scenario: Scenario) -> list[Verdict]:
    """Wrong constants are corrected within 200 requests."""
    what = "median error of predicted TTFT after 200 requests"
    return [_absolute(results, scenario.name, what, ERROR_LEARNT, 0.10)]


def facts(results: Results, scenario: Scenario) -> list[Verdict]:
    """What is known of the trace comes out of the replay."""
    name, (policy,) = scenario.name, scenario.policies
    replicas = scenario.fleet.replicas or 0
    expected = (
        [("token hit rate", metric_, value) for metric_, value in ((HIT_RATE, _INFINITE_CACHE_TOKENS),)]
        + [("block hit rate", BLOCK_HIT_RATE, _INFINITE_CACHE_BLOCKS)]
        if replicas == 1
        else [("block hit rate", BLOCK_HIT_RATE, _RANDOM_BLOCKS[replicas])]
    )
    verdicts = []
    for what, figure, value in expected:
        mean = results.mean(name, policy, figure)
        off = None if mean is None else abs(mean / value - 1.0)
        note = "" if mean is None else f"{mean:.4f} over {len(results.seeds(name))} seeds"
        verdicts.append(Verdict(name, f"{what} within 1 % of {value}", 0.01, off, note=note))
    return verdicts


def over_all(results: Results, scenarios: Iterable[Scenario]) -> list[Verdict]:
    """Geometric means over all workloads, against the best single peer.

    A peer counts if it was run wherever ours was.
    """
    names = [scenario.name for scenario in scenarios if results.mean(scenario.name, OURS, TTFT_MEAN) is not None]
    verdicts = []
    for what, figure, limit in (("mean TTFT", TTFT_MEAN, 0.85), ("p99 TTFT", TTFT_P99, 0.95)):
        ours = geometric_mean(results, names, OURS, figure)
        peers = {peer for name in names for peer in results.peers(name)}
        theirs = {
            peer: mean for peer in sorted(peers) if (mean := geometric_mean(results, names, peer, figure)) is not None
        }
        best = min(theirs, key=theirs.__getitem__, default=None)
        ratio = None if ours is None or best is None else ours / theirs[best]
        verdicts.append(
            Verdict(
                "all workloads",
                f"geometric mean of {what} <= {limit:g} x the best single peer's",
                limit,
                ratio,
                note=f"best: {best}, {len(names)} scenarios",
            )
        )
    return verdicts


def geometric_mean(results: Results, names: Sequence[str], policy: str, figure: Metric) -> float | None:
    """Geometric mean over scenarios of the means over seeds; None unless all are there and positive."""
    values = [results.mean(name, policy, figure) for name in names]
    known = [value for value in values if value is not None and value > 0.0]
    if not values or len(known) < len(values):
        return None
    return math.exp(sum(math.log(value) for value in known) / len(known))


_TARGETS: dict[Group, Callable[[Results, Scenario], list[Verdict]]] = {
    Group.LADDER: ladder,
    Group.TRACE: trace,
    Group.WORKLOADS: workload,
    Group.MIXED: mixed,
    Group.FAULTS: faults,
    Group.WRONG: wrong,
    Group.FACTS: facts,
}

_TOGETHER = frozenset({Group.LADDER, Group.TRACE, Group.WORKLOADS})
"""Groups whose scenarios count in the means over all workloads."""


def verdicts(results: Results, scenarios: Sequence[Scenario]) -> list[Verdict]:
    """Every target, in the order of the scenarios, and those over all workloads at the end."""
    lines = [verdict for scenario in scenarios for verdict in _TARGETS[scenario.group](results, scenario)]
    together = [scenario for scenario in scenarios if scenario.group in _TOGETHER]
    return lines + (over_all(results, together) if together else [])
