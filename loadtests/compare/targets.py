"""The targets of the default policy, applied to results.

All comparisons are of means over the seeds that both have; the worst seed stands beside. "Best peer" is the one that
ours looks worst beside on that scenario and that figure, whichever it is: the targets are against all of them at once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

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
_NEAR = 1.1
"""Tails are compared with peers within this of the least mean TTFT."""
_INFINITE_CACHE_TOKENS, _INFINITE_CACHE_BLOCKS = 0.3736, 0.3664
_RANDOM_BLOCKS = {4: 0.1893, 8: 0.1318, 16: 0.0932}
"""Of the Mooncake conversation trace: hit rates of one infinite cache, and of N behind random routing."""


def _against(
    results: Results, scenario: str, target: str, figure: Metric, limit: float, peer: str, *, at_least: bool = False
) -> Verdict:
    compared = results.ratios(scenario, figure, peer)
    ratio, seeds = compared if compared is not None else (None, [])
    worst = (min if at_least else max)(seeds, default=None)
    return Verdict(scenario, target, limit, ratio, at_least, worst)


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
    """Against the peer that ours looks worst beside."""
    target = f"{what} {'>=' if at_least else '<='} {limit:g} x the best peer's"
    lines = [
        (_against(results, scenario, target, figure, limit, peer, at_least=at_least), peer)
        for peer in (results.peers(scenario) if peers is None else peers)
    ]
    known = [(verdict.measured, peer, verdict) for verdict, peer in lines if verdict.measured is not None]
    if not known:
        return Verdict(scenario, target, limit, None, at_least)
    _, best, verdict = (min if at_least else max)(known, key=lambda line: line[0])
    seeds = len(results.by_seed(scenario, best, figure).keys() & results.by_seed(scenario, OURS, figure).keys())
    return replace(verdict, note=f"best: {best}, seeds: {seeds}")


def _absolute(
    results: Results, scenario: str, what: str, figure: Metric, limit: float, *, at_least: bool = False
) -> Verdict:
    values = results.by_seed(scenario, OURS, figure).values()
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
    means = {peer: mean for peer in results.peers(name) if (mean := results.mean(name, peer, TTFT_MEAN)) is not None}
    near = [peer for peer, mean in means.items() if mean <= _NEAR * min(means.values())]
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
        verdicts.append(_against(results, name, f"mean TTFT <= 1 x {_BASELINE}'s", TTFT_MEAN, 1.0, _BASELINE))
    if scenario.workload == "viral-prefix":
        verdicts.append(_absolute(results, name, "most / mean requests per replica", LOAD_SKEW, 1.25))
    return verdicts


def mixed(results: Results, scenario: Scenario) -> list[Verdict]:
    """At most 0.7 of the mean TTFT of every peer."""
    return [_against_best(results, scenario.name, "mean TTFT", TTFT_MEAN, 0.7)]


def faults(results: Results, scenario: Scenario) -> list[Verdict]:
    """Never worse than least_outstanding by more than 5 %."""
    return [_against(results, scenario.name, f"mean TTFT <= 1.05 x {_BASELINE}'s", TTFT_MEAN, 1.05, _BASELINE)]


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
        note = "" if mean is None else f"{mean:.4f} over {len(results.by_seed(name, policy, figure))} seeds"
        verdicts.append(Verdict(name, f"{what} within 1 % of {value}", 0.01, off, note=note))
    return verdicts


def over_all(results: Results, scenarios: Sequence[Scenario]) -> list[Verdict]:
    """Geometric means over all workloads against the best single peer, one that was run wherever ours was."""
    names = [scenario.name for scenario in scenarios if results.mean(scenario.name, OURS, TTFT_MEAN) is not None]
    peers = sorted({peer for name in names for peer in results.peers(name)})
    verdicts = []
    for what, figure, limit in (("mean TTFT", TTFT_MEAN, 0.85), ("p99 TTFT", TTFT_P99, 0.95)):
        ratios = {
            peer: ratio
            for peer in peers
            if (ratio := geometric_mean_of_ratios(results, names, figure, peer)) is not None
        }
        best = max(ratios, key=ratios.__getitem__, default=None)
        verdicts.append(
            Verdict(
                "all workloads",
                f"geometric mean of {what} <= {limit:g} x the best single peer's",
                limit,
                None if best is None else ratios[best],
                note=f"best: {best}, {len(names)} scenarios",
            )
        )
    return verdicts


def geometric_mean_of_ratios(results: Results, names: Sequence[str], figure: Metric, peer: str) -> float | None:
    """Geometric mean over scenarios of ours over a peer's, which is the ratio of the geometric means.

    None unless the peer was run on all of them.
    """
    compared = [results.ratios(name, figure, peer) for name in names]
    ratios = [ratio for each in compared if each is not None and (ratio := each[0]) > 0.0]
    if not names or len(ratios) < len(names):
        return None
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def stale(results: Results, scenarios: Sequence[Scenario]) -> Verdict:
    """Metrics are a second old everywhere: the worst scenario beside least_outstanding."""
    target = f"with metrics 1 s old, mean TTFT <= 1.05 x {_BASELINE}'s on every scenario"
    lines = [
        _against(results, scenario.name, target, TTFT_MEAN, 1.05, _BASELINE)
        for scenario in scenarios
        if scenario.scrape_interval_s == 1.0
    ]
    known = [(verdict.measured, verdict) for verdict in lines if verdict.measured is not None]
    if not known:
        return Verdict("all workloads", target, 1.05, None)
    _, worst = max(known, key=lambda line: line[0])
    return replace(worst, topic="all workloads", note=f"worst: {worst.topic}, {len(known)} scenarios")


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
    return [*lines, *over_all(results, together), stale(results, together)] if together else lines
