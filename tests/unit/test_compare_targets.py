"""Targets on invented results: who is compared with whom, and that a miss is called one."""

from collections.abc import Mapping
from typing import Any

import pytest

from loadtests.compare.report import MARK, below_mark, verdict_table, version_warnings
from loadtests.compare.results import HIT_RATE, TTFT_MEAN, Results
from loadtests.compare.scenario import OURS, Group, Scenario
from loadtests.compare.scenarios import SCENARIOS
from loadtests.compare.targets import geometric_mean_of_ratios, over_all, stale, trace, verdicts, workload
from loadtests.compare.verdict import Verdict, missed


def cell(
    scenario: str,
    policy: str,
    mean: float,
    seed: int = 1,
    *,
    p99: float = 1000.0,
    tpot: float = 50.0,
    hit: float = 0.95,
    skew: float = 1.0,
    rate: float = 1000.0,
    error: float = 0.01,
    **more: Any,
) -> dict[str, Any]:
    return {
        "scenario": scenario,
        "policy": policy,
        "seed": seed,
        "source": "a",
        "figures": {
            "ttft_ms": {"mean": mean, "p50": mean, "p99": p99},
            "tpot_ms": {"p99": tpot},
            "token_hit_rate": hit,
            "output_tokens_per_s": rate,
            "stage_means": {"output_tokens_per_s": rate, "ttft_mean_ms": mean},
            "load_skew": skew,
            "in_flight_skew": skew,
            "goodput": {"share": 1.0},
            "preemptions": 0,
            "errors": 0,
            "ttft_prediction": None,
        },
        "prediction_from_cold": {"median_ape": error},
        "prediction_learnt": {"median_ape": error},
        **more,
    }


def scenario(group: Group, workload_name: str = "chat") -> Scenario:
    return Scenario("s", group, workload_name)


def by_target(found: list[Verdict]) -> Mapping[str, Verdict]:
    return {verdict.target: verdict for verdict in found}


def test_at_the_limit_is_met_and_beyond_is_not() -> None:
    assert Verdict("s", "t", 1.02, 1.02).met is True
    assert Verdict("s", "t", 1.02, 1.0200001).met is False
    assert Verdict("s", "t", 0.98, 0.98, at_least=True).met is True
    assert Verdict("s", "t", 0.98, 0.979, at_least=True).met is False
    assert Verdict("s", "t", 1.0, None).met is None


def test_the_worst_miss_comes_first() -> None:
    lines = [
        Verdict("a", "t", 1.0, 0.9),
        Verdict("b", "t", 1.0, 1.1),
        Verdict("c", "t", 100.0, 250.0),
        Verdict("d", "t", 0.9, 0.45, at_least=True),
        Verdict("e", "t", 1.0, None),
    ]
    assert [(verdict.topic, round(verdict.missing_by, 3)) for verdict in missed(lines)] == [
        ("c", 1.5),
        ("d", 0.5),
        ("b", 0.1),
    ]


def test_the_best_peer_is_the_best_over_the_seeds() -> None:
    results = Results(
        [
            cell("s", "random", 10.0, 1),
            cell("s", "random", 100.0, 2),
            cell("s", "lmetric", 50.0, 1),
            cell("s", "lmetric", 50.0, 2),
            cell("s", OURS, 40.0, 1),
            cell("s", OURS, 60.0, 2),
        ]
    )
    (verdict,) = workload(results, scenario(Group.WORKLOADS))
    assert (verdict.measured, verdict.worst_seed, verdict.met) == (1.0, 1.2, True)
    assert verdict.note == "best: lmetric, seeds: 2"


def test_policies_are_compared_on_the_seeds_that_both_have() -> None:
    results = Results(
        [cell("s", "random", 10.0, 1), cell("s", "random", 99.0, 2), cell("s", OURS, 12.0, 1), cell("s", OURS, 1.0, 3)]
    )
    assert results.ratios("s", TTFT_MEAN, "random") == (1.2, [1.2])
    assert results.ratios("s", TTFT_MEAN, "lmetric") is None
    assert results.mean("s", OURS, TTFT_MEAN) == 6.5


def test_more_is_better_for_rates() -> None:
    results = Results(
        [
            cell("s", "random", 1.0, rate=1000.0),
            cell("s", "lmetric", 1.0, rate=500.0),
            cell("s", OURS, 1.0, rate=970.0),
        ]
    )
    rate = by_target(verdicts(results, [scenario(Group.LADDER)]))["output tok/s over all >= 0.98 x the best peer's"]
    assert (rate.measured, rate.met, rate.note) == (0.97, False, "best: random, seeds: 1")


def test_bounds_and_tuned_policies_are_no_peers() -> None:
    results = Results(
        [cell("s", "oracle", 1.0), cell("s", "kv_cost:temperature=1", 2.0), cell("s", "kv_cost", 9.0)], ["oracle"]
    )
    assert results.peers("s") == ["kv_cost"]


def test_a_missed_workload_says_no() -> None:
    results = Results([cell("s", "random", 100.0), cell("s", "lmetric", 50.0), cell("s", OURS, 51.5)])
    (verdict,) = workload(results, scenario(Group.WORKLOADS))
    assert verdict.measured == pytest.approx(1.03)
    assert (verdict.met, verdict.word, verdict.note) == (False, "NO", "best: lmetric, seeds: 1")
    table = "\n".join(verdict_table([verdict]))
    assert "0 targets are met, 1 are not" in table
    assert "| **NO** |" in table


def test_a_workload_within_two_percent_says_yes() -> None:
    results = Results([cell("s", "lmetric", 50.0), cell("s", OURS, 50.9)])
    (verdict,) = workload(results, scenario(Group.WORKLOADS))
    assert verdict.met is True


def test_without_reuse_nothing_may_be_lost_and_a_viral_prefix_must_not_pile_up() -> None:
    results = Results([cell("s", "least_outstanding", 100.0), cell("s", OURS, 101.0, skew=1.3)])
    best, baseline = workload(results, scenario(Group.WORKLOADS, "no-reuse"))
    assert (best.met, baseline.met) == (True, False)
    best, skew = workload(results, scenario(Group.WORKLOADS, "viral-prefix"))
    assert (best.met, skew.met, skew.measured) == (True, False, 1.3)


def test_tails_are_compared_with_peers_that_are_near_in_the_mean() -> None:
    results = Results(
        [
            cell("s", "lmetric", 100.0, p99=900.0, tpot=60.0),
            cell("s", "min_ttft", 109.0, p99=1000.0, tpot=40.0),
            # Far behind in the mean, so its tails do not count.
            cell("s", "least_outstanding", 111.0, p99=10.0, tpot=1.0),
            cell("s", OURS, 100.0, p99=910.0, tpot=41.0),
        ]
    )
    lines = by_target(trace(results, scenario(Group.TRACE)))
    ttft = lines["p99 TTFT <= 1.02 x the best peer's"]
    tpot = lines["p99 TPOT <= 1.02 x the best peer's"]
    assert (ttft.note, ttft.met) == ("best: lmetric, seeds: 1", True)
    assert (tpot.note, tpot.met) == ("best: min_ttft, seeds: 1", False)
    assert tpot.measured == pytest.approx(41.0 / 40.0)


def test_what_was_not_run_is_neither_met_nor_missed() -> None:
    found = verdicts(Results([]), SCENARIOS)
    assert {verdict.met for verdict in found} == {None}
    assert missed(found) == []


def test_geometric_means_are_against_the_best_single_peer() -> None:
    results = Results(
        [
            cell("a", "lmetric", 100.0),
            cell("a", "kv_cost", 10.0),
            cell("a", OURS, 20.0),
            cell("b", "lmetric", 16.0),
            cell("b", "kv_cost", 90.0),
            cell("b", OURS, 20.0),
        ]
    )
    rows = [Scenario("a", Group.WORKLOADS, "chat"), Scenario("b", Group.TRACE, "trace")]
    # Geometric means are 40 and 30; ours is 20.
    assert geometric_mean_of_ratios(results, ["a", "b"], TTFT_MEAN, "lmetric") == pytest.approx(20.0 / 40.0)
    assert geometric_mean_of_ratios(results, ["a", "b"], TTFT_MEAN, "kv_cost") == pytest.approx(20.0 / 30.0)
    mean, p99 = over_all(results, rows)
    assert mean.measured == pytest.approx(20.0 / 30.0)
    assert mean.note.startswith("best: kv_cost, 2 scenarios")
    assert mean.met is True
    assert (p99.measured, p99.met) == (pytest.approx(1.0), False)


def test_a_peer_that_was_not_run_everywhere_has_no_geometric_mean() -> None:
    results = Results([cell("a", "lmetric", 1.0), cell("a", OURS, 1.0), cell("b", OURS, 1.0)])
    assert geometric_mean_of_ratios(results, ["a", "b"], TTFT_MEAN, "lmetric") is None


def mixed_up(**figures: float) -> list[Verdict]:
    rows = [
        Scenario("ladder", Group.LADDER, "b2b-saas"),
        Scenario("mixed", Group.MIXED, "chat"),
        Scenario("stale", Group.FAULTS, "chat"),
        Scenario("wrong", Group.WRONG, "chat"),
    ]
    cells = [
        cell(row.name, policy, value, **figures if policy == OURS else {})
        for row in rows
        for policy, value in (("least_outstanding", 200.0), (OURS, 130.0))
    ]
    return verdicts(Results(cells), rows)


def test_all_kinds_of_targets_can_be_met() -> None:
    found = mixed_up(p99=900.0)
    assert {verdict.word for verdict in found} == {"yes"}


@pytest.mark.parametrize(
    ("figures", "topics"),
    [
        ({"rate": 979.0}, ["ladder", "ladder"]),
        ({"hit": 0.93}, ["ladder"]),
        ({"error": 0.06}, ["ladder"]),
        ({"error": 0.11}, ["ladder", "wrong"]),
        ({"p99": 951.0}, ["all workloads"]),
    ],
)
def test_each_figure_can_miss_its_target(figures: dict[str, float], topics: list[str]) -> None:
    found = mixed_up(**{"p99": 900.0, **figures})
    assert sorted(verdict.topic for verdict in found if verdict.met is False) == sorted(topics)


def test_a_fault_that_costs_more_than_five_percent_is_a_miss() -> None:
    row = Scenario("stale", Group.FAULTS, "chat")
    results = Results([cell("stale", "least_outstanding", 100.0), cell("stale", OURS, 106.0)])
    (verdict,) = verdicts(results, [row])
    assert verdict.met is False
    assert verdict.missing_by == pytest.approx(1.06 / 1.05 - 1.0)


def test_one_scenario_behind_least_outstanding_is_a_miss() -> None:
    rows = [Scenario("a", Group.WORKLOADS, "chat"), Scenario("b", Group.WORKLOADS, "chat")]
    cells = [cell("a", "least_outstanding", 100.0), cell("a", OURS, 10.0)]
    cells += [cell("b", "least_outstanding", 100.0), cell("b", OURS, 106.0)]
    verdict = stale(Results(cells), rows)
    assert (verdict.measured, verdict.met, verdict.note) == (1.06, False, "worst: b, 2 scenarios")


def test_a_mixed_fleet_is_judged_against_the_best_peer() -> None:
    row = Scenario("mixed", Group.MIXED, "chat")
    results = Results([cell("mixed", "random", 200.0), cell("mixed", "lmetric", 100.0), cell("mixed", OURS, 71.0)])
    (verdict,) = verdicts(results, [row])
    assert (verdict.measured, verdict.met) == (0.71, False)


def test_facts_are_within_one_percent() -> None:
    (one,) = [row for row in SCENARIOS if row.name == "infinite-cache-1"]
    (eight,) = [row for row in SCENARIOS if row.name == "infinite-cache-8"]
    results = Results(
        [
            cell(one.name, "random", 1.0, hit=0.3736, block_hit_rate=0.36),
            cell(eight.name, "random", 1.0, block_hit_rate=0.1318),
        ]
    )
    assert results.mean(one.name, "random", HIT_RATE) == 0.3736
    assert [verdict.met for verdict in verdicts(results, [one, eight])] == [True, False, True]


def test_what_stands_above_the_mark_is_kept() -> None:
    assert below_mark("", "table") == f"{MARK}\n\ntable\n"
    first = below_mark(f"# Routing\n\n{MARK}\nold\n", "one\n\n")
    assert first == f"# Routing\n\n{MARK}\n\none\n"
    assert below_mark(first, "two") == f"# Routing\n\n{MARK}\n\ntwo\n"


def test_cells_of_several_versions_are_noticed() -> None:
    ours, theirs = cell("s", OURS, 1.0), cell("s", "random", 1.0)
    assert version_warnings([ours, theirs]) == []
    assert version_warnings([ours, {**cell("s", OURS, 1.0, 2), "source": "b"}, theirs]) == [
        f"The cells of {OURS} come from 2 versions of the code."
    ]
    (warning,) = version_warnings([ours, theirs, {**theirs, "seed": 2, "source": "b"}])
    assert warning.startswith("Cells of the other policies come from 2 versions")
