"""Figures from records: weighted gaps, skew, goodput, predictions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.estimator.roofline import StepCost
from loadtests.bench_summary import Distribution
from loadtests.engine import EngineLimits, EngineRequest
from loadtests.replay.figures import figures, weighted_distribution
from loadtests.replay.record import TokenGaps
from loadtests.replay.replay import Replay, ReplayResult
from loadtests.replay.settings import ReplaySettings, ReplicaModel, Slo
from loadtests.workloads.prompt import Part, Prompt
from loadtests.workloads.types import Load, Session, Stage, Turn
from policies.catalog import make_policy

# 1 ms per prompt token and 10 ms per decode step: times that can be added up in the head.
COST = StepCost(prefill_s_per_token=0.001, attention_s_per_pair=0.0, weights_s=0.01, kv_s_per_token=0.0)


def replay(*requests: tuple[float, int, int], replicas: int = 1) -> ReplayResult:
    """Replay (arrival_s, prompt tokens, output tokens) in turn over the replicas."""
    sessions = [
        Session(arrival_s, (Turn(Prompt([Part(number, prompt_tokens)]), output_tokens, 1000 + number),))
        for number, (arrival_s, prompt_tokens, output_tokens) in enumerate(requests)
    ]
    settings = ReplaySettings([ReplicaModel(COST, EngineLimits(100_000))] * replicas)
    return Replay(Load("test", (Stage("all", sessions),)), make_policy("round_robin"), settings).run()


@given(st.lists(st.tuples(st.floats(0.001, 100.0), st.integers(1, 5)), min_size=1, max_size=30))
def test_weighted_values_are_summed_up_like_their_expansion(pairs: list[tuple[float, int]]) -> None:
    expanded = Distribution.of([10.0 * value for value, count in pairs for _ in range(count)])
    weighted = weighted_distribution(sorted(pairs), 10.0)
    for name in ("mean", "p50", "p90", "p95", "p99"):
        assert getattr(weighted, name) == pytest.approx(getattr(expanded, name), rel=1e-9)


def test_no_gaps() -> None:
    assert weighted_distribution([], 1.0) == Distribution.of([])


def test_one_request() -> None:
    report = figures(replay((0.0, 100, 11)))
    assert report.ttft_ms.mean == pytest.approx(100.0)
    assert report.tpot_ms.mean == pytest.approx(10.0)
    assert report.itl_ms.p99 == pytest.approx(10.0)
    assert report.e2e_ms.mean == pytest.approx(200.0)
    assert report.makespan_s == pytest.approx(0.2)
    assert report.output_tokens_per_s == pytest.approx(55.0)


def test_a_prompt_among_decodes_is_one_long_gap() -> None:
    # The second prompt shares a step with the first request's decode: 301 tokens of compute.
    report = figures(replay((0.0, 100, 101), (0.105, 300, 1)))
    assert report.itl_ms.mean == pytest.approx((99 * 10.0 + 301.0) / 100)
    assert report.itl_ms.p50 == pytest.approx(10.0)
    assert report.tpot_ms.mean == pytest.approx(report.itl_ms.mean)
    assert report.tpot_ms.p50 == report.tpot_ms.mean, "an answer of one token has no time per output token"


def test_a_pause_by_preemption_is_a_gap_from_token_to_token() -> None:
    gaps = TokenGaps()
    request = EngineRequest("a", 10, 10)
    gaps.add(0.01, 3)
    gaps.preempted(request, 1.0)
    gaps.preempted(request, 1.5)
    gaps.resumed(request, 3.0)
    gaps.resumed(request, 9.0)
    assert gaps.weighted() == [(0.01, 3), (2.0, 1)]


def test_skew_is_most_over_mean() -> None:
    report = figures(replay((0.0, 100, 1), (1.0, 300, 1), (2.0, 100, 1), replicas=2))
    assert report.requests_per_replica == [2, 1]
    assert report.load_skew == pytest.approx(2 / 1.5)
    # Seconds in flight: 0.1 and 0.1 on one, 0.3 on the other.
    assert report.in_flight_skew == pytest.approx(0.3 / 0.25)


def test_goodput_counts_what_keeps_both_limits() -> None:
    result = replay((0.0, 100, 11), (1.0, 500, 11), (2.0, 100, 21), (2.105, 400, 1))
    both = figures(result, Slo(ttft_ms=450.0, tpot_ms=15.0)).goodput
    # The second comes too late, the third is slowed down by the fourth.
    assert both.share == pytest.approx(0.5)
    assert both.requests_per_s == pytest.approx(2 / figures(result).makespan_s)
    assert figures(result, Slo(ttft_ms=1000.0, tpot_ms=1000.0)).goodput.share == 1.0


def test_hit_rates() -> None:
    sessions = [Session(float(number), (Turn(Prompt([Part(1, 1001)]), 1, 10 + number),)) for number in range(2)]
    settings = ReplaySettings([ReplicaModel(COST, EngineLimits(100_000))])
    load = Load("test", (Stage("all", sessions),))
    report = figures(Replay(load, make_policy("round_robin"), settings).run())
    assert report.token_hit_rate == pytest.approx(992 / 2002)
    # The map's blocks are of 64 tokens here.
    assert report.expected_hit_rate == pytest.approx(960 / 2002)
