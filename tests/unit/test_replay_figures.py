"""Figures from records: weighted gaps, skew, goodput, predictions."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.estimator.roofline import StepCost
from loadtests.bench_summary import Distribution
from loadtests.engine import EngineLimits, EngineRequest
from loadtests.replay.figures import figures, weighted_distribution
from loadtests.replay.record import TokenGaps
from loadtests.replay.replay import Replay, ReplayResult
from loadtests.replay.report import classes_table
from loadtests.replay.settings import Incident, ReplaySettings, ReplicaModel, Slo
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


def mixture(
    requests: list[tuple[float, int, int, str]],
    limits: EngineLimits,
    warm_up: bool = False,
    incidents: Sequence[Incident] = (),
) -> ReplayResult:
    """Replay (arrival_s, prompt tokens, output tokens, class) on one replica."""
    sessions = [
        Session(at_s, (Turn(Prompt([Part(number, prompt)]), output, 1000 + number, request_class=name),))
        for number, (at_s, prompt, output, name) in enumerate(requests)
    ]
    stages = (Stage("all", sessions, warm_up=warm_up),)
    settings = ReplaySettings([ReplicaModel(COST, limits)], incidents=incidents)
    return Replay(Load("test", stages), make_policy("round_robin"), settings).run()


def test_classes_have_the_times_of_their_own_requests() -> None:
    # The long prompt shares a step of 301 ms with the chat's answer. Both decode together until the chat's 101st token.
    requests = [(0.0, 100, 101, "chat"), (0.105, 300, 201, "long")]
    report = figures(mixture(requests, EngineLimits(100_000)))
    chat, long = report.classes["chat"], report.classes["long"]
    assert list(report.classes) == ["chat", "long"]
    assert (chat.requests, long.requests, chat.errors, long.errors) == (1, 1, 0, 0)
    assert chat.ttft_ms.mean == pytest.approx(100.0)
    # It has waited for the end of the first decode step.
    assert long.ttft_ms.mean == pytest.approx(5.0 + 301.0)
    assert chat.itl_ms.mean == chat.tpot_ms.mean == pytest.approx((99 * 10.0 + 301.0) / 100)
    assert long.itl_ms.p99 == long.tpot_ms.p99 == pytest.approx(10.0)


def test_without_classes_there_are_no_figures_of_them() -> None:
    report = figures(replay((0.0, 100, 11)))
    assert report.classes == {}
    assert classes_table([report]) is None


def test_the_table_of_classes_has_a_row_for_each_of_several() -> None:
    two = figures(mixture([(0.0, 100, 5, "chat"), (1.0, 300, 5, "long")], EngineLimits(100_000)))
    one = figures(mixture([(0.0, 100, 5, "chat")], EngineLimits(100_000)))
    table = classes_table([two, two])
    assert table is not None
    assert (table.row_count, list(table.columns[1].cells)) == (4, ["chat", "long", "chat", "long"])
    assert classes_table([one]) is None


def test_what_happens_during_warm_up_is_in_no_class() -> None:
    chat = figures(mixture([(0.0, 100, 5, "chat")], EngineLimits(100_000), warm_up=True)).classes["chat"]
    assert (chat.requests, chat.itl_ms.p99, chat.ttft_ms.p99) == (0, 0.0, 0.0)


def test_answers_that_a_dead_replica_has_cut_make_no_more_gaps() -> None:
    incidents = [Incident(0, 0.25, starts=True)]
    report = figures(
        mixture([(0.0, 100, 1000, "cut"), (1.0, 100, 11, "later")], EngineLimits(100_000), False, incidents)
    )
    assert (report.classes["cut"].errors, report.classes["later"].errors) == (1, 0)
    # Steps that the dead engine was in the middle of have not been seen; those of the new one are all the second's.
    assert report.classes["cut"].itl_ms == Distribution.of([])
    assert report.classes["later"].itl_ms == report.itl_ms
    assert report.itl_ms.p99 == pytest.approx(10.0)


@given(
    st.lists(
        st.tuples(st.floats(0.0, 2.0), st.integers(1, 300), st.integers(1, 60), st.sampled_from(["a", "b"])),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([400, 600, 100_000]),
)
def test_the_gaps_of_the_classes_are_all_gaps(requests: list[tuple[float, int, int, str]], kv_tokens: int) -> None:
    # Little memory makes for preemptions, whose pauses are gaps as well.
    result = mixture(sorted(requests), EngineLimits(kv_tokens, max_batched_tokens=128))
    parts = Counter[float]()
    for gaps in result.class_gaps.values():
        for gap_s, count in gaps.weighted():
            parts[gap_s] += count
    whole = Counter[float]()
    for gap_s, count in result.gaps.weighted():
        whole[gap_s] += count
    assert parts == whole
    for name, gaps in result.class_gaps.items():
        tokens = sum(output - 1 for _, _, output, own in requests if own == name)
        assert sum(count for _, count in gaps.weighted()) == tokens


def test_hit_rates() -> None:
    sessions = [Session(float(number), (Turn(Prompt([Part(1, 1001)]), 1, 10 + number),)) for number in range(2)]
    settings = ReplaySettings([ReplicaModel(COST, EngineLimits(100_000))])
    load = Load("test", (Stage("all", sessions),))
    report = figures(Replay(load, make_policy("round_robin"), settings).run())
    assert report.token_hit_rate == pytest.approx(992 / 2002)
    # The map's blocks are of 64 tokens here.
    assert report.expected_hit_rate == pytest.approx(960 / 2002)
