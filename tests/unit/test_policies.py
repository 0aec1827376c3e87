"""The baseline policies and predicted_ttft on worked cases."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalog import POLICIES, make_policy
from policies.predicted_ttft import PredictedTTFT
from policies.types import Candidates, Column, Request

COUNTS = ("in_flight", "decodes", "engine_waiting", "engine_running")
REQUEST = Request(prompt_tokens=1000.0, expected_output_tokens=100.0)


def candidates(slots: list[int], **columns: list[float] | list[int]) -> Candidates:
    size = max(slots) + 1
    filled: dict[str, list[float]] = {column.value: [0.0] * size for column in Column}
    filled |= {name: [0] * size for name in COUNTS}
    full = [bool(value) for value in columns.pop("cache_full", [0] * size)]
    filled["cache_oldest_use"] = [-1.0] * size
    filled["kv_capacity_tokens"] = filled["kv_room_tokens"] = [1e6] * size
    for name, values in columns.items():
        filled[name] = list(values) if name in COUNTS else [float(value) for value in values]
    del filled["cache_full"]
    return Candidates(slots=slots, cache_full=full, **filled)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(deadline=None)
@given(
    slots=st.sets(st.integers(0, 11), min_size=1).map(sorted),
    loads=st.lists(st.integers(0, 9), min_size=12, max_size=12),
    seed=st.integers(0, 5),
)
def test_every_policy_chooses_a_candidate_and_is_deterministic(
    name: str, slots: list[int], loads: list[int], seed: int
) -> None:
    view = candidates(slots, in_flight=loads[: max(slots) + 1], predicted_ttft_s=loads[: max(slots) + 1])
    first, second = make_policy(name, seed), make_policy(name, seed)
    for _ in range(5):
        choice = first.choose(REQUEST, view)
        assert choice.slot in slots
        assert choice.reason
        assert second.choose(REQUEST, view).slot == choice.slot


def test_round_robin_takes_turns_and_survives_changes() -> None:
    policy = make_policy("round_robin")
    assert [policy.choose(REQUEST, candidates([0, 1, 2])).slot for _ in range(4)] == [0, 1, 2, 0]
    assert policy.choose(REQUEST, candidates([0, 2])).slot == 2
    assert policy.choose(REQUEST, candidates([1, 3])).slot == 3
    assert policy.choose(REQUEST, candidates([1, 3])).slot == 1


def test_least_outstanding_breaks_ties_at_random() -> None:
    policy = make_policy("least_outstanding", seed=1)
    view = candidates([0, 1, 2, 3], in_flight=[2, 1, 1, 5])
    chosen = Counter(policy.choose(REQUEST, view).slot for _ in range(200))
    assert set(chosen) == {1, 2}
    assert min(chosen.values()) > 60


def test_power_of_two_never_takes_the_worst_of_many() -> None:
    policy = make_policy("power_of_two", seed=1)
    view = candidates([0, 1, 2], in_flight=[9, 0, 0])
    assert {policy.choose(REQUEST, view).slot for _ in range(200)} == {1, 2}


def test_random_reaches_every_candidate() -> None:
    policy = make_policy("random", seed=1)
    assert {policy.choose(REQUEST, candidates([1, 4, 6])).slot for _ in range(200)} == {1, 4, 6}


def test_unknown_policy_and_option_are_named() -> None:
    with pytest.raises(ValueError, match="known: random"):
        make_policy("nope")
    with pytest.raises(ValueError, match="bogus"):
        make_policy("predicted_ttft", 0, {"bogus": 1})


def test_predicted_ttft_prefers_the_soonest() -> None:
    choice = PredictedTTFT().choose(REQUEST, candidates([0, 1], predicted_ttft_s=[0.3, 0.2]))
    assert choice.slot == 1
    assert choice.terms["ttft_s"] == 0.2


def test_work_has_a_price_beyond_the_wait() -> None:
    # Slot 0 holds the prefix behind a queue of 0.25 s; slot 1 is idle and would compute 0.2 s anew.
    view = candidates([0, 1], predicted_ttft_s=[0.26, 0.2], own_prefill_s=[0.01, 0.2])
    assert PredictedTTFT(prefill_price=0.0).choose(REQUEST, view).slot == 1
    assert PredictedTTFT(prefill_price=1.0).choose(REQUEST, view).slot == 0
    # A queue longer than the work it saves twice over is left.
    view = candidates([0, 1], predicted_ttft_s=[0.50, 0.2], own_prefill_s=[0.01, 0.2])
    assert PredictedTTFT(prefill_price=1.0).choose(REQUEST, view).slot == 1


def test_delay_of_running_decodes_counts() -> None:
    view = candidates([0, 1], predicted_ttft_s=[0.2, 0.21], decode_delay_s=[3.0, 0.0])
    assert PredictedTTFT(decode_price=0.0).choose(REQUEST, view).slot == 0
    assert PredictedTTFT(decode_price=0.02).choose(REQUEST, view).slot == 1


def test_overcommitted_memory_counts() -> None:
    view = candidates(
        [0, 1],
        predicted_ttft_s=[0.2, 0.25],
        kv_capacity_tokens=[100_000, 100_000],
        kv_room_tokens=[500, 50_000],
    )
    choice = PredictedTTFT().choose(REQUEST, view)
    assert choice.slot == 1
    assert choice.terms["cost_s"] == 0.25
    # 1,100 tokens needed and 500 left: 600 too many, at 10 s per 100 %.
    alone = PredictedTTFT().choose(
        REQUEST, candidates([0], predicted_ttft_s=[0.2], kv_capacity_tokens=[100_000], kv_room_tokens=[500])
    )
    assert alone.terms["cost_s"] == pytest.approx(0.2 + 10 * 600 / 100_000)


def test_waiting_for_memory_counts_as_little_as_its_price() -> None:
    view = candidates(
        [0], predicted_ttft_s=[20.2], memory_wait_s=[20.0], kv_capacity_tokens=[100_000], kv_room_tokens=[1_099]
    )
    choice = PredictedTTFT(memory_price=0.0, wait_price=0.1).choose(REQUEST, view)
    assert choice.terms["cost_s"] == pytest.approx(0.2 + 0.1 * 20.0)
    assert choice.terms["ttft_s"] == 20.2
    assert choice.terms["memory_wait_s"] == 20.0


def test_driving_out_what_is_used_again_counts_where_memory_is_full() -> None:
    policy = PredictedTTFT(prefill_price=1.0, eviction_price=1.0)
    cached = candidates([0], matched_tokens=[1000])
    for _ in range(2000):
        policy.choose(REQUEST, cached)
    # Everything is reused by now: 0.2 s once more on top of it and of its shadow price.
    view = candidates([0], predicted_ttft_s=[0.2], own_prefill_s=[0.2], cache_full=[1])
    assert policy.choose(REQUEST, view).terms["cost_s"] == pytest.approx(0.2 + 0.2 + 0.2)
    fresh = PredictedTTFT(prefill_price=1.0)
    assert fresh.choose(REQUEST, view).terms["cost_s"] == pytest.approx(0.2 + 0.2)


def test_those_who_are_tied_to_a_replica_wait_for_what_is_computed_there_meanwhile() -> None:
    policy = PredictedTTFT(prefill_price=0.5, tied_price=2.0)
    # Ten come a second, two of them during the prefill, and each waits for half of it.
    tied: dict[str, list[float]] = {"tied_per_s": [10.0], "tied_saved": [5.0]}
    view = candidates([0], predicted_ttft_s=[0.3], own_prefill_s=[0.2], **tied)
    assert policy.choose(REQUEST, view).terms["cost_s"] == pytest.approx(0.3 + 0.5 * 0.2)  # it has to be computed
    view.least_own_prefill_s = 0.0
    assert policy.choose(REQUEST, view).terms["cost_s"] == pytest.approx(0.3 + 0.5 * 0.2 + 2.0 * 10.0 * 0.2**2)
    # For a long one they do not wait: their prefixes save half a second each.
    view = candidates([0], predicted_ttft_s=[7.1], own_prefill_s=[7.0], **tied)
    view.least_own_prefill_s = 0.0
    assert policy.choose(REQUEST, view).terms["cost_s"] == pytest.approx(7.1 + 0.5 * 7.0 + 2.0 * 5.0 * 7.0)
    # A conversation that would wait stays where it is: others live on the idle replica, too.
    view = candidates([0, 1], predicted_ttft_s=[0.5, 0.3], own_prefill_s=[0.01, 0.25], tied_per_s=[4.0, 4.0])
    view.tied_saved = [2.0, 2.0]
    assert policy.choose(REQUEST, view).slot == 0
    view = candidates([0, 1], predicted_ttft_s=[0.5, 0.3], own_prefill_s=[0.01, 0.25], tied_per_s=[4.0, 0.0])
    view.tied_saved = [2.0, 0.0]
    assert policy.choose(REQUEST, view).slot == 1


def test_own_prefill_costs_as_much_more_as_requests_are_expected_behind_it() -> None:
    policy = PredictedTTFT(prefill_price=0.0, queue_price=0.5)
    # Two of five in flight wait for their first token.
    view = candidates([0], predicted_ttft_s=[0.3], own_prefill_s=[0.1], in_flight=[5], decodes=[3])
    assert policy.choose(REQUEST, view).terms["cost_s"] == pytest.approx(0.3 + 0.5 * 2 * 0.1)


def test_long_prompts_keep_away_from_queues_of_many_short_ones() -> None:
    # Both queues take 10 s: a hundred short prompts, or ten long ones. A short one may go anywhere.
    queues: dict[str, list[float] | list[int]] = {
        "predicted_ttft_s": [10.0, 10.1],
        "in_flight": [100, 10],
        "decodes": [0, 0],
    }
    long = candidates([0, 1], own_prefill_s=[1.0, 1.0], **queues)
    assert {PredictedTTFT(seed).choose(REQUEST, long).slot for seed in range(20)} == {1}
    short = candidates([0, 1], own_prefill_s=[0.001, 0.001], **queues)
    assert {PredictedTTFT(seed).choose(REQUEST, short).slot for seed in range(20)} == {0, 1}


@settings(deadline=None)
@given(
    own_s=st.floats(0.001, 10.0),
    ttft_s=st.floats(0.001, 100.0),
    waiting=st.integers(0, 500),
    more=st.integers(1, 500),
    decodes=st.integers(0, 200),
)
def test_the_price_of_own_prefill_rises_with_the_load(
    own_s: float, ttft_s: float, waiting: int, more: int, decodes: int
) -> None:
    def price(waiting: int, decodes: int) -> float:
        # What a second of own prefill costs, the same TTFT given.
        costs = []
        for own in (own_s, 0.0):
            view = candidates(
                [0],
                predicted_ttft_s=[ttft_s],
                own_prefill_s=[own],
                decode_delay_s=[own * decodes],
                in_flight=[waiting + decodes],
                decodes=[decodes],
            )
            costs.append(PredictedTTFT().choose(REQUEST, view).terms["cost_s"])
        return (costs[0] - costs[1]) / own_s

    idle = price(0, 0)
    assert idle > 0.0
    assert price(waiting, decodes) >= idle - 1e-6
    assert price(waiting + more, decodes) > price(waiting, decodes)
    assert price(waiting, decodes + more) > price(waiting, decodes)


def test_a_large_batch_is_left_for_a_copy_of_the_prefix() -> None:
    # A batch that makes steps long against 0.05 s of prefill.
    view = candidates([0, 1], predicted_ttft_s=[0.09, 0.06], own_prefill_s=[0.0, 0.05], batch_cost_s=[0.06, 0.01])
    assert PredictedTTFT(prefill_price=1.0, batch_price=0.0).choose(REQUEST, view).slot == 0
    assert PredictedTTFT(prefill_price=1.0, batch_price=5.0).choose(REQUEST, view).slot == 1


def test_ties_are_drawn_evenly() -> None:
    policy = PredictedTTFT(seed=3)
    view = candidates([0, 1, 2, 3], predicted_ttft_s=[0.2, 0.2, 0.2, 0.9])
    chosen = Counter(policy.choose(REQUEST, view).slot for _ in range(600))
    assert set(chosen) == {0, 1, 2}
    assert min(chosen.values()) > 140


def test_of_alike_a_worker_takes_its_own_first_and_only_of_alike() -> None:
    policy = PredictedTTFT(seed=3)
    view = candidates([0, 1, 2, 3], predicted_ttft_s=[0.2, 0.2, 0.2, 0.2])
    view.preferred = [False, True, False, True]
    chosen = Counter(policy.choose(REQUEST, view).slot for _ in range(600))
    assert set(chosen) == {1, 3}
    assert min(chosen.values()) > 200
    # Where none of its own is among them, any of them; a better one is taken whosoever it is.
    view = candidates([0, 1, 2, 3], predicted_ttft_s=[0.2, 0.9, 0.2, 0.9])
    view.preferred = [False, True, False, True]
    assert {policy.choose(REQUEST, view).slot for _ in range(100)} == {0, 2}
    # What it had of its own before the best was found does not count.
    view = candidates([0, 1, 2, 3], predicted_ttft_s=[0.9, 0.9, 0.2, 0.9])
    view.preferred = [True, True, False, True]
    assert {policy.choose(REQUEST, view).slot for _ in range(100)} == {2}


def test_of_two_alike_the_one_that_would_lose_the_older_is_taken_more_often() -> None:
    policy = make_policy("predicted_ttft", seed=3)
    alike = candidates([0, 1, 2], predicted_ttft_s=[0.2, 0.2, 0.5])
    alike.cache_oldest_use = [90.0, 10.0, 0.0]
    chosen = Counter(policy.choose(REQUEST, alike).slot for _ in range(2000))
    # Two draws of two: only if both are the other one does that win.
    assert set(chosen) == {0, 1}
    assert chosen[1] / 2000 == pytest.approx(0.75, abs=0.04)
    alike.cache_oldest_use = [-0.4, 10.0, 0.0]
    chosen = Counter(policy.choose(REQUEST, alike).slot for _ in range(2000))
    assert chosen[0] / 2000 == pytest.approx(0.75, abs=0.04)
