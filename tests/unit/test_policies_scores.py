"""Policies that weigh prefix against load: llm-d's, Dynamo's, LMetric, Mooncake's, and prefix alone."""

from collections import Counter
from collections.abc import Sequence
from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from policies.kv_cost import KvCost, LMetric
from policies.min_ttft import MinTTFT
from policies.peer_blocks import ActiveBlocks
from policies.peer_index import BlockLru
from policies.prefix_only import PrefixOnly
from policies.sticky_until_saturated import StickyUntilSaturated
from policies.types import Candidates, Column, Policy, Request
from policies.weighted_score import WeightedScore

REQUEST = Request(prompt_tokens=1000.0, expected_output_tokens=100.0)
BLOCK = 256
OFFSETS = [position * BLOCK for position in range(1000)]


def view(count: int, slots: Sequence[int] | None = None, **columns: Sequence[float]) -> Candidates:
    """Make candidates; columns that are not given are zero."""
    filled: dict[str, Sequence[float]] = {column.value: [0.0] * count for column in Column}
    filled |= columns
    return Candidates(slots or tuple(range(count)), **filled)  # type: ignore[arg-type]


def chosen(policy: Policy, candidates: Candidates, request: Request = REQUEST, times: int = 200) -> set[int]:
    return {policy.choose(request, candidates).slot for _ in range(times)}


def prompt(*parts: str) -> Request:
    """A prompt of one block of 64 tokens per part."""
    hashes = [xxh64_intdigest("/".join(parts[: end + 1])) for end in range(len(parts))]
    return Request(
        len(parts) * 64.0, 100.0, block_hashes=hashes, block_offsets=OFFSETS, canonical_bytes=len(parts) * BLOCK
    )


# --- all of them

ALIKE = [WeightedScore, StickyUntilSaturated, KvCost, LMetric, MinTTFT, PrefixOnly]


@pytest.mark.parametrize("make", ALIKE)
def test_equals_are_drawn_evenly_and_the_same_way_under_the_same_seed(make: type) -> None:
    candidates = view(6, slots=(1, 2, 5))
    first, second = make(seed=3), make(seed=3)
    draws = [first.choose(REQUEST, candidates).slot for _ in range(600)]
    assert draws == [second.choose(REQUEST, candidates).slot for _ in range(600)]
    counts = Counter(draws)
    assert set(counts) == {1, 2, 5}
    assert min(counts.values()) > 150


@pytest.mark.parametrize("make", ALIKE)
def test_a_single_candidate_is_chosen(make: type) -> None:
    assert make().choose(REQUEST, view(4, slots=(3,), prefill_tokens=[0.0, 0.0, 0.0, 1e9])).slot == 3


@pytest.mark.parametrize("make", ALIKE)
def test_requests_without_a_prompt_are_routed(make: type) -> None:
    empty = Request(prompt_tokens=0.0, expected_output_tokens=0.0)
    assert make().choose(empty, view(3)).slot in (0, 1, 2)


@pytest.mark.parametrize("make", [WeightedScore, StickyUntilSaturated])
def test_requests_without_a_prompt_leave_the_approximate_index_alone(make: type) -> None:
    policy = make(index="approximate")
    empty = Request(prompt_tokens=0.0, expected_output_tokens=0.0)
    policy.choose(prompt("a"), view(3))
    assert [policy.choose(empty, view(3)).terms["cached_share"] for _ in range(3)] == [0.0, 0.0, 0.0]


# --- weighted_score


def test_weighted_score_adds_three_two_and_two() -> None:
    candidates = view(3, matched_tokens=[800.0, 0.0, 400.0], engine_waiting=[4, 0, 2], engine_kv_usage=[0.5, 0.25, 0.0])
    # 3 x 0.8 + 0 + 1 = 3.4; 0 + 2 + 1.5 = 3.5; 1.2 + 1 + 2 = 4.2
    choice = WeightedScore().choose(REQUEST, candidates)
    assert choice.slot == 2
    assert choice.terms["score"] == pytest.approx(4.2)
    # 1, 1, 1: 0.8 + 0 + 0.5; 0 + 1 + 0.75; 0.4 + 0.5 + 1
    ones = WeightedScore(prefix_weight=1.0, queue_weight=1.0, memory_weight=1.0)
    assert ones.choose(REQUEST, candidates).terms["score"] == pytest.approx(1.9)


def test_equal_queues_count_fully_for_everybody() -> None:
    choice = WeightedScore().choose(REQUEST, view(2, matched_tokens=[500.0, 0.0], engine_waiting=[7, 7]))
    assert choice.slot == 0
    assert choice.terms["score"] == pytest.approx(1.5 + 2.0 + 2.0)


def test_only_the_candidates_set_the_range_of_the_queues() -> None:
    candidates = view(3, slots=(0, 2), engine_waiting=[1, 1000, 3], engine_kv_usage=[0.9, 0.0, 0.0])
    # 2 + 0.2 against 0 + 2
    assert WeightedScore().choose(REQUEST, candidates).terms["score"] == pytest.approx(2.2)


def test_range_scores_are_relative_to_the_holders() -> None:
    policy = WeightedScore(prefix_score="range")
    # The least of the holders gets as much as who holds nothing.
    choice = policy.choose(REQUEST, view(3, matched_tokens=[200.0, 600.0, 0.0], engine_kv_usage=[0.0, 1.0, 0.0]))
    assert choice.slot == 1
    assert choice.terms["score"] == pytest.approx(3.0 + 2.0)
    candidates = view(3, matched_tokens=[200.0, 600.0, 0.0], engine_waiting=[0, 8, 0], engine_kv_usage=[0.0, 1.0, 0.0])
    assert chosen(policy, candidates) == {0, 2}
    # Equal holders all get the full score, however short their match.
    choice = policy.choose(REQUEST, view(3, matched_tokens=[16.0, 16.0, 0.0], engine_waiting=[5, 9, 0]))
    assert choice.slot == 0
    assert choice.terms["score"] == pytest.approx(3.0 + 2.0 * 4 / 9 + 2.0)


def test_weighted_score_reads_what_its_index_needs() -> None:
    assert Column.MATCHED_TOKENS in WeightedScore().reads
    assert Column.MATCHED_TOKENS not in WeightedScore(index="approximate").reads
    for options in ({"index": "exact"}, {"prefix_score": "best"}, {"index": "approximate", "lru_blocks": 0}):
        with pytest.raises(ValueError, match="must be"):
            WeightedScore(**options)


@pytest.mark.parametrize("make", [WeightedScore, StickyUntilSaturated])
def test_the_approximate_index_believes_in_what_was_sent_and_forgets_on_demand(make: type) -> None:
    policy = make(seed=2, index="approximate")
    first = policy.choose(prompt("s", "a", "b", "c", "d"), view(8)).slot
    again = prompt("s", "a", "b", "c", "d")
    assert chosen(policy, view(8), again, times=20) == {first}
    assert policy.choose(again, view(8)).terms["cached_share"] == 1.0
    policy.forget(first)
    assert policy.choose(again, view(8)).terms["cached_share"] == 0.0


# --- llm-d's index


def test_block_lru_matches_leading_blocks_and_drops_roots_first() -> None:
    index = BlockLru(lru_blocks=4, block_tokens=64)
    a, b = prompt("s", "a", "b"), prompt("s", "x")
    index.insert(0, a.block_hashes, OFFSETS, 0.25)
    index.insert(3, b.block_hashes, OFFSETS, 0.25)
    assert index.match(a.block_hashes, OFFSETS) == {0: 3 * BLOCK, 3: BLOCK}
    index.insert(0, prompt("y", "z").block_hashes, OFFSETS, 0.25)
    assert index.held_tokens(0) == 4 * 64
    # Slot 0 has lost the root, and is credited with what comes after it all the same, as long as somebody has the root.
    assert index.match(a.block_hashes, OFFSETS) == {0: 2 * BLOCK, 3: BLOCK}
    index.forget(3)
    assert index.match(a.block_hashes, OFFSETS) == {}


def test_block_lru_counts_tokens_not_blocks() -> None:
    index = BlockLru(lru_blocks=1, block_tokens=64)
    index.insert(0, [1, 2], [0, 128, 256], 0.25)
    assert index.match([1, 2], [0, 128, 256]) == {0: 256}
    index.insert(0, [3], [0, 4], 0.25)
    assert index.match([1, 2], [0, 128, 256]) == {}
    assert index.match([3], [0, 4]) == {0: 4}


@settings(deadline=None)
@given(
    paths=st.lists(st.tuples(st.integers(0, 3), st.lists(st.sampled_from("ab"), min_size=1, max_size=6)), max_size=30),
    capacity=st.integers(3, 30),
)
def test_block_lru_agrees_with_one_list_per_replica(paths: list[tuple[int, list[str]]], capacity: int) -> None:
    index = BlockLru(lru_blocks=capacity)
    lists: dict[int, list[int]] = {slot: [] for slot in range(4)}
    for slot, parts in paths:
        hashes = list(prompt(*parts).block_hashes)
        index.insert(slot, hashes, OFFSETS, 0.25)
        for block in hashes:
            if block in lists[slot]:
                lists[slot].remove(block)
            lists[slot].append(block)
        del lists[slot][: -capacity or None]
        expected: dict[int, int] = {}
        for block in hashes:
            having = [one for one in lists if block in lists[one]]
            if not having:
                break
            for one in having:
                expected[one] = expected.get(one, 0) + BLOCK
        assert index.match(hashes, OFFSETS) == expected


# --- sticky_until_saturated


def test_sticky_threshold_is_inclusive() -> None:
    candidates = view(2, matched_tokens=[800.0, 799.0], prefill_tokens=[5000.0, 0.0])
    assert StickyUntilSaturated().choose(REQUEST, candidates).slot == 0
    candidates = view(2, matched_tokens=[799.0, 0.0], prefill_tokens=[5000.0, 0.0])
    assert StickyUntilSaturated().choose(REQUEST, candidates).slot == 1


def test_saturation_is_strict_and_measured_without_the_request() -> None:
    at = view(3, matched_tokens=[900.0, 900.0, 0.0], prefill_tokens=[286_720.0, 300_000.0, 0.0])
    assert StickyUntilSaturated().choose(REQUEST, at).slot == 0
    above = view(3, matched_tokens=[900.0, 900.0, 0.0], prefill_tokens=[286_721.0, 300_000.0, 0.0])
    choice = StickyUntilSaturated().choose(REQUEST, above)
    assert choice.slot == 2
    assert "saturated" in choice.reason


def test_once_saturated_all_compete_and_a_warm_one_may_still_win() -> None:
    candidates = view(2, matched_tokens=[1000.0, 0.0], prefill_tokens=[150.0, 0.0])
    assert StickyUntilSaturated(saturation_tokens=100.0).choose(REQUEST, candidates).slot == 0


def test_within_the_warm_set_work_decides() -> None:
    candidates = view(3, matched_tokens=[1000.0, 800.0, 0.0], prefill_tokens=[300.0, 0.0, 0.0])
    # 300 + 0 against 0 + 200
    choice = StickyUntilSaturated().choose(REQUEST, candidates)
    assert choice.slot == 1
    assert choice.terms["own_uncached_tokens"] == pytest.approx(200.0)


def test_a_penalty_of_zero_sticks_for_ever() -> None:
    candidates = view(2, matched_tokens=[900.0, 0.0], prefill_tokens=[1e9, 0.0])
    assert StickyUntilSaturated(saturation_tokens=0.0).choose(REQUEST, candidates).slot == 0


def test_replicas_beyond_the_queue_limit_are_alike() -> None:
    candidates = view(2, prefill_tokens=[4_194_304.0, 9e9])
    assert chosen(StickyUntilSaturated(), candidates) == {0, 1}


# --- kv_cost and lmetric

TEN_BLOCKS = Request(prompt_tokens=160.0, expected_output_tokens=10.0)


def loaded(policy: KvCost) -> tuple[KvCost, Candidates]:
    """Prompts of 10, 5 and 9 blocks in flight; of the next 10 blocks, 2, 5 and 8 are cached."""
    for slot, tokens in enumerate((160.0, 80.0, 144.0)):
        policy.choose(Request(tokens, 10.0), view(3, slots=(slot,)))
    return policy, view(3, matched_tokens=[32.0, 80.0, 128.0], in_flight=[1, 1, 1])


def test_dynamos_worked_case() -> None:
    policy, candidates = loaded(KvCost())
    choice = policy.choose(TEN_BLOCKS, candidates)
    assert choice.slot == 1
    assert choice.terms == {"cost_blocks": 10.0, "prefill_blocks": 5.0, "decode_blocks": 5.0}
    for slot, cost in enumerate((18.0, 10.0, 11.0)):
        policy, candidates = loaded(KvCost())
        candidates.slots = (slot,)
        assert policy.choose(TEN_BLOCKS, candidates).terms["cost_blocks"] == cost


def test_prefill_scale_and_credit_move_the_choice() -> None:
    policy, candidates = loaded(KvCost(prefill_load_scale=2.0))
    assert policy.choose(TEN_BLOCKS, candidates).slot == 2  # 26, 15, 13
    # Without credit all would prefill 10 blocks.
    policy, candidates = loaded(KvCost(overlap_credit=0.0))
    assert policy.choose(TEN_BLOCKS, candidates).terms["cost_blocks"] == 15.0


def test_blocks_of_several_requests_count_once_and_the_prompts_own_not_at_all() -> None:
    policy = KvCost()
    policy.choose(prompt("s", "a"), view(2, slots=(0,)))
    policy.choose(prompt("s", "b"), view(2, slots=(0,), in_flight=[1, 0]))
    terms = policy.choose(prompt("x"), view(2, slots=(0,), in_flight=[2, 0])).terms
    assert terms["decode_blocks"] * 16 == 3 * 64
    # "s" is in use already; what is left are "a", "b" and the "x" of just now.
    terms = policy.choose(prompt("s", "c"), view(2, slots=(0,), in_flight=[3, 0])).terms
    assert terms["decode_blocks"] * 16 == 3 * 64


def test_requests_are_taken_to_end_oldest_first() -> None:
    policy = KvCost()
    policy.choose(prompt("s", "a"), view(2, slots=(0,)))
    policy.choose(prompt("s", "b", "c"), view(2, slots=(0,), in_flight=[1, 0]))
    assert policy.choose(prompt("y"), view(2, in_flight=[1, 0])).slot == 1
    # One of two has ended: "s", "b" and "c" are left.
    assert policy.choose(prompt("z"), view(2, slots=(0,), in_flight=[1, 1])).terms["decode_blocks"] * 16 == 3 * 64
    policy.forget(0)
    policy.forget(5)
    assert policy.choose(prompt("z"), view(2, slots=(0,), in_flight=[9, 1])).terms["decode_blocks"] == 0.0


def test_the_unfinished_last_block_counts() -> None:
    active = ActiveBlocks()
    active.start(0, prompt("a", "b").block_hashes, OFFSETS, 0.25, 150.0)
    assert active.keep(0, 1) == 150
    assert active.keep(0, 0) == 0
    assert active.shared(prompt("a").block_hashes, OFFSETS) == {}


def test_queued_prefill_counts_and_never_goes_below_zero() -> None:
    choice = KvCost().choose(TEN_BLOCKS, view(2, prefill_tokens=[0.0, 320.0], matched_tokens=[0.0, 160.0]))
    assert choice.slot == 0
    assert KvCost().choose(TEN_BLOCKS, view(1, matched_tokens=[500.0])).terms["cost_blocks"] == 0.0


def test_temperature_draws_by_a_softmax_over_the_range_of_costs() -> None:
    counts: Counter[int] = Counter()
    for seed in range(2000):
        policy, candidates = loaded(KvCost(seed=seed, temperature=0.5))
        counts[policy.choose(TEN_BLOCKS, candidates).slot] += 1
    weights = [exp(-(cost - 10.0) / (8.0 * 0.5)) for cost in (18.0, 10.0, 11.0)]
    for slot, weight in enumerate(weights):
        assert counts[slot] / 2000 == pytest.approx(weight / sum(weights), abs=0.04)
    assert chosen(KvCost(temperature=1.0), view(3), TEN_BLOCKS) == {0, 1, 2}


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"prefill_load_scale": -1.0}, {"overlap_credit": 1.5}])
def test_kv_cost_refuses_factors_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        KvCost(**options)  # type: ignore[arg-type]


def test_lmetric_multiplies() -> None:
    candidates = view(3, prefill_tokens=[0.0, 500.0, 0.0], matched_tokens=[0.0, 900.0, 900.0], decodes=[0, 0, 9])
    # 1000 x 1, 600 x 1, 100 x 10
    choice = LMetric().choose(REQUEST, candidates)
    assert choice.slot == 1
    assert choice.terms["product"] == 600.0


def test_lmetric_breaks_ties_by_requests_in_flight() -> None:
    empty = Request(prompt_tokens=0.0, expected_output_tokens=0.0)
    assert chosen(LMetric(), view(3, in_flight=[2, 1, 1], decodes=[2, 1, 0]), empty) == {1, 2}


# --- min_ttft


def test_min_ttft_adds_queue_and_own_prefill() -> None:
    choice = MinTTFT().choose(REQUEST, view(3, prefill_s=[0.0, 0.3, 0.1], own_prefill_s=[0.5, 0.1, 0.35]))
    assert choice.slot == 1
    assert choice.terms == {"ttft_s": pytest.approx(0.4), "queue_s": 0.3}


def test_min_ttft_fetches_the_best_match_when_that_is_possible() -> None:
    candidates = view(2, prefill_s=[1.0, 0.0], own_prefill_s=[0.1, 1.5], matched_tokens=[900.0, 100.0])
    assert MinTTFT().choose(REQUEST, candidates).slot == 0
    # 800 tokens at 0.1 ms: 0.08 + 0 + 0.1 against 1.1.
    choice = MinTTFT(transfer_s_per_token=1e-4).choose(REQUEST, candidates)
    assert choice.slot == 1
    assert choice.terms["ttft_s"] == pytest.approx(0.18)
    # Nine times longer: below a threshold of ten it computes, at nine it fetches.
    assert MinTTFT(transfer_s_per_token=1e-4, balancing_threshold=10.0).choose(REQUEST, candidates).slot == 0
    assert MinTTFT(transfer_s_per_token=1e-4, balancing_threshold=9.0).choose(REQUEST, candidates).slot == 1


def test_min_ttft_fetches_nothing_when_nobody_has_anything() -> None:
    choice = MinTTFT(transfer_s_per_token=1.0).choose(REQUEST, view(2, own_prefill_s=[0.5, 0.4]))
    assert choice.slot == 1
    assert choice.terms["ttft_s"] == 0.4
    with pytest.raises(ValueError, match="balancing_threshold"):
        MinTTFT(balancing_threshold=0.5)


# --- prefix_only


def test_prefix_only_takes_the_longest_and_then_the_least_loaded() -> None:
    candidates = view(4, matched_tokens=[300.0, 600.0, 600.0, 0.0], in_flight=[0, 9, 8, 0])
    assert PrefixOnly().choose(REQUEST, candidates).slot == 2


def test_the_trap_of_a_block_that_all_prompts_share() -> None:
    policy = PrefixOnly(seed=1)
    holding = [0.0] * 4
    served: list[int] = []
    for _ in range(50):  # one request at a time, each beginning with the same block and otherwise new
        slot = policy.choose(REQUEST, view(4, matched_tokens=holding)).slot
        holding[slot] = 16.0
        served.append(slot)
    assert len(set(served)) == 1
