"""What a prefix cache can serve of a trace, whatever the routing."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.trace import TraceRequest, read_trace
from loadtests.trace_facts import infinite_cache_hit_rates, random_routing_block_hit_rate


def request(input_length: int, *hash_ids: int) -> TraceRequest:
    return TraceRequest(timestamp=0, input_length=input_length, output_length=1, hash_ids=list(hash_ids))


TRACE = [
    request(1024, 0, 1),
    request(1000, 0, 2),  # block 0 is held: 512 tokens
    request(1200, 0, 2, 3),  # blocks 0 and 2 are held: 1,024 tokens
    request(100, 4),
]


def test_one_infinite_cache() -> None:
    rates = infinite_cache_hit_rates(TRACE)
    assert rates.block == 3 / 8
    assert rates.token == (512 + 1024) / (1024 + 1000 + 1200 + 100)


def test_a_partial_block_counts_its_own_tokens() -> None:
    assert infinite_cache_hit_rates([request(600, 0, 1), request(600, 0, 1)]).token == 0.5


def test_a_held_block_behind_a_new_one_is_no_hit() -> None:
    assert infinite_cache_hit_rates([request(1024, 0, 1), request(1024, 9, 1)]).block == 0.0


def test_a_repetition_inside_one_request_is_no_hit() -> None:
    assert infinite_cache_hit_rates([request(1024, 7, 7)]).block == 0.0
    assert random_routing_block_hit_rate([request(1024, 7, 7)], 2) == 0.0


def test_random_routing_worked() -> None:
    # Block 0 has 0, 1, 2 earlier occurrences, block 2 has 0, 1; the others none.
    assert random_routing_block_hit_rate(TRACE, 2) == pytest.approx((0.5 + 0.75 + 0.5) / 8)


def test_no_requests() -> None:
    assert infinite_cache_hit_rates([]).token == 0.0
    assert random_routing_block_hit_rate([], 4) == 0.0


def test_no_replicas() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        random_routing_block_hit_rate(TRACE, 0)


@st.composite
def conversations(draw: st.DrawFn) -> list[TraceRequest]:
    """Traces whose ids are chained: an id has one predecessor only."""
    paths: list[list[int]] = [[0]]
    for new_id in range(1, draw(st.integers(1, 12))):
        paths.append([*draw(st.sampled_from(paths)), new_id])
    chosen = draw(st.lists(st.sampled_from(paths), min_size=1, max_size=12))
    return [request(512 * len(path), *path) for path in chosen]


@given(conversations())
def test_one_replica_is_the_infinite_cache_and_more_replicas_hit_less(trace: list[TraceRequest]) -> None:
    rates = [random_routing_block_hit_rate(trace, replicas) for replicas in (1, 2, 5, 50)]
    assert rates[0] == pytest.approx(infinite_cache_hit_rates(trace).block)
    assert rates == sorted(rates, reverse=True)


@pytest.mark.skipif("WARMGATE_TRACE" not in os.environ, reason="WARMGATE_TRACE names no trace")
def test_the_mooncake_conversation_trace() -> None:
    trace = read_trace(Path(os.environ["WARMGATE_TRACE"]))
    rates = infinite_cache_hit_rates(trace)
    assert len(trace) == 12_031
    assert (round(rates.token, 4), round(rates.block, 4)) == (0.3736, 0.3664)
    expected = [round(random_routing_block_hit_rate(trace, replicas), 4) for replicas in (4, 8, 16)]
    assert expected == [0.1893, 0.1318, 0.0932]
