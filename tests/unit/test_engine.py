"""Worked examples of the engine model."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from gateway.estimator.roofline import StepCost
from loadtests.engine import Engine, EngineLimits, EngineRequest, Phase, StepResult

COST = StepCost(
    prefill_s_per_token=1e-5, attention_s_per_pair=1e-10, weights_s=5e-3, kv_s_per_token=2e-8, overhead_s=1e-3
)


def make_engine(kv_tokens: int = 1_000_000, events: bool = False, **limits: int | bool) -> Engine:
    return Engine(COST, EngineLimits(kv_tokens, **limits), collect_events=events)  # type: ignore[arg-type]


def request(name: str, prompt: int, output: int, family: int = 0) -> EngineRequest:
    """Requests of one family share their tokens as far as they reach."""
    hashes = [family * 1_000_000 + block for block in range((prompt + output) // 16)]
    return EngineRequest(name, prompt, output, hashes)


def step(engine: Engine, max_steps: int = 1, max_duration_s: float = math.inf) -> StepResult:
    result = engine.step(max_steps, max_duration_s)
    assert result is not None
    return result


def run(engine: Engine) -> list[StepResult]:
    results = []
    while (result := engine.step()) is not None:
        results.append(result)
    return results


def test_idle_engine_has_no_step() -> None:
    assert make_engine().step() is None


def test_long_prompt_is_prefilled_in_chunks_of_the_budget() -> None:
    engine = make_engine()
    long = request("long", 20_000, 1)
    engine.add(long)
    results = run(engine)
    assert [result.prefill_tokens for result in results] == [8192, 8192, 3616]
    assert [list(result.first_tokens) for result in results] == [[], [], [long]]
    assert results[-1].finished == [long]
    # new x (cached + new/2) adds up to half the square of the whole.
    assert sum(result.duration_s for result in results) == pytest.approx(
        20_000 * 1e-5 + 20_000**2 / 2 * 1e-10 + 3 * 1e-3
    )


def test_short_prompt_costs_one_read_of_the_weights() -> None:
    engine = make_engine()
    engine.add(request("short", 10, 1))
    assert step(engine).duration_s == pytest.approx(5e-3 + 1e-3)


def test_mixed_step_computes_the_chunk_and_reads_the_decodes_history() -> None:
    engine = make_engine()
    engine.add(request("old", 1000, 10, family=1))
    step(engine)
    engine.add(request("new", 2000, 10, family=2))
    mixed = step(engine)
    assert (mixed.prefill_tokens, mixed.decodes) == (2000, 1)
    compute_s = 2001 * 1e-5 + 2000 * 1000 * 1e-10
    assert mixed.duration_s == pytest.approx(compute_s + 1000 * 2e-8 + 1e-3)


def test_decodes_come_first_and_leave_the_rest_of_the_budget() -> None:
    engine = make_engine(max_batched_tokens=100)
    for name in "ab":
        engine.add(request(name, 20, 50, family=ord(name)))
    step(engine)
    engine.add(request("c", 500, 50, family=3))
    assert [step(engine).prefill_tokens for _ in range(6)] == [98, 98, 98, 98, 98, 10]


def test_one_step_admits_until_the_budget_is_spent() -> None:
    engine = make_engine(max_batched_tokens=100)
    requests = [request(str(i), 40, 2, family=i) for i in range(4)]
    for item in requests:
        engine.add(item)
    first = step(engine)
    assert first.admitted == requests[:3]
    assert first.first_tokens == requests[:2]
    assert (engine.running, engine.waiting) == (3, 1)
    second = step(engine)
    assert second.admitted == requests[3:]
    assert second.first_tokens == requests[2:]
    assert second.finished == requests[:2]


def test_no_more_than_max_sequences_run() -> None:
    engine = make_engine(max_sequences=2)
    for i in range(3):
        engine.add(request(str(i), 16, 3, family=i))
    step(engine)
    assert (engine.running, engine.waiting) == (2, 1)
    run(engine)
    assert engine.completed == 3


def test_repeated_prompt_hits_all_but_the_last_block() -> None:
    engine = make_engine()
    engine.add(request("cold", 1600, 1))
    run(engine)
    warm = request("warm", 1600, 1)
    engine.add(warm)
    assert step(engine).prefill_tokens == 16
    assert warm.cached_tokens == 1584
    assert engine.prefix_hit_tokens == 1584
    assert engine.prefix_queried_tokens == 3200


def test_next_turn_hits_the_answers_blocks() -> None:
    engine = make_engine()
    engine.add(request("turn 1", 100, 100))
    run(engine)
    turn_2 = request("turn 2", 300, 10)
    engine.add(turn_2)
    run(engine)
    # 199 tokens are in the cache: the last of the answer was never computed. 12 full blocks.
    assert turn_2.cached_tokens == 192


def test_without_prefix_caching_nothing_hits() -> None:
    engine = make_engine(enable_prefix_caching=False, events=True)
    for name in ("one", "two"):
        engine.add(request(name, 160, 20))
        results = run(engine)
        assert not any(result.stored for result in results)
    assert engine.prefix_hit_tokens == 0
    assert engine.pool.used_blocks == 0


def test_blocks_of_a_running_step_are_not_found_before_its_end() -> None:
    engine = make_engine(events=True)
    twins = [request("a", 32, 3), request("b", 32, 3)]
    for twin in twins:
        engine.add(twin)
    result = step(engine)
    assert result.prefill_tokens == 64
    assert [list(stored.hashes) for stored in result.stored] == [[0, 1], [0, 1]]
    assert engine.pool.used_blocks == 4


def test_stored_blocks_name_their_parent() -> None:
    engine = make_engine(events=True, max_batched_tokens=32)
    engine.add(request("a", 60, 10, family=7))
    stored = [(list(s.hashes), s.parent_hash) for result in run(engine) for s in result.stored]
    assert stored == [
        ([7_000_000, 7_000_001], None),
        ([7_000_002], 7_000_001),
        ([7_000_003], 7_000_002),
    ]


def test_eviction_takes_the_oldest_prefix_and_its_tail_first() -> None:
    engine = make_engine(kv_tokens=10 * 16, events=True)
    for family in (1, 2):
        engine.add(request(str(family), 64, 1, family))
        run(engine)
    engine.add(request("3", 64, 1, family=3))
    assert [h for result in run(engine) for h in result.removed] == [1_000_003, 1_000_002]
    engine.add(request("1 again", 64, 1, family=1))
    result = step(engine)
    assert result.admitted[0].cached_tokens == 32
    assert list(result.removed) == [2_000_003, 2_000_002]


def test_a_hit_makes_its_prefix_the_youngest() -> None:
    engine = make_engine(kv_tokens=8 * 16, events=True)
    for family in (1, 2, 1):
        engine.add(request(f"{family} {engine.injected}", 64, 1, family))
        run(engine)
    engine.add(request("3", 16, 1, family=3))
    # The repeat computed the last block of family 1 anew, in place of its old copy; family 2 is the oldest
    # now.
    removed = [h for result in run(engine) for h in result.removed]
    assert removed == [2_000_003]


def test_shared_root_outlives_the_branches() -> None:
    engine = make_engine(kv_tokens=6 * 16, events=True)
    root = [1, 2]
    for leaf in (10, 20):
        engine.add(EngineRequest(f"leaf {leaf}", 48, 1, [*root, leaf]))
        run(engine)
    engine.add(EngineRequest("other", 64, 1, [90, 91, 92, 93]))
    assert [h for result in run(engine) for h in result.removed] == [10, 20]
    assert engine.pool.match([1, 2, 10], 3) == 2


def test_head_of_the_queue_that_does_not_fit_stops_the_admission() -> None:
    engine = make_engine(kv_tokens=10 * 16)
    engine.add(request("running", 90, 40, family=1))
    step(engine)
    engine.add(request("large", 100, 2, family=2))
    engine.add(request("small", 10, 2, family=3))
    result = step(engine)
    assert not result.admitted
    assert engine.waiting == 2
    run(engine)
    assert engine.completed == 3


def test_last_running_request_is_preempted_when_memory_runs_out() -> None:
    engine = make_engine(kv_tokens=8 * 16)
    first, last = request("first", 60, 40, family=1), request("last", 60, 20, family=2)
    engine.add(first)
    engine.add(last)
    assert step(engine).admitted == [first, last]
    results = [step(engine) for _ in range(5)]
    # Both hold 4 blocks with 64 tokens; the fifth decode step needs two more.
    assert [list(result.preempted) for result in results] == [[], [], [], [], [last]]
    assert results[-1].decodes == 1
    assert last.phase is Phase.WAITING
    assert engine.emitted_tokens(last) == 5
    results = run(engine)
    assert engine.completed == 2
    resumed = [result for result in results if result.resumed]
    assert [list(result.resumed) for result in resumed] == [[last]]
    # Four blocks of it were cached when it went; `first` evicted three of them.
    assert resumed[0].prefill_tokens == 60 + 5 - 16
    assert last.preemptions == engine.preemptions == 1
    assert last.cached_tokens == 0
    assert engine.generated_tokens == 60


def test_finish_frees_everything_but_keeps_it_cached() -> None:
    engine = make_engine(kv_tokens=100 * 16)
    engine.add(request("a", 100, 30))
    run(engine)
    assert engine.kv_usage == 0
    assert engine.pool.cached_hashes == 129 // 16
    engine.reset_prefix_cache()
    assert engine.pool.cached_hashes == 0
    assert engine.pool.free_blocks == 100


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_abort_frees_blocks_and_the_batch_slot(steps: int) -> None:
    engine = make_engine(kv_tokens=1000 * 16, max_batched_tokens=100, max_sequences=1)
    engine.add(request("victim", 300, 50, family=1))
    engine.add(request("next", 30, 5, family=2))
    for _ in range(steps):
        step(engine)
    assert engine.abort("victim")
    assert not engine.abort("victim")
    assert engine.pool.used_blocks == 0
    assert [r.id for r in step(engine).admitted] == ["next"]
    run(engine)
    assert (engine.completed, engine.aborted, engine.injected) == (1, 1, 2)


def test_many_decode_steps_in_one_call_equal_single_ones() -> None:
    def engine() -> Engine:
        engine = make_engine(kv_tokens=200 * 16, events=True)
        for i in range(5):
            engine.add(request(str(i), 100 + 7 * i, 100 + 13 * i, family=i))
        return engine

    one, many = engine(), engine()
    singles = run(one)
    bulk = []
    while (result := many.step(max_steps=1000)) is not None:
        bulk.append(result)
    assert sum(r.steps for r in bulk) == len(singles)
    assert len(bulk) < len(singles) / 10
    assert sum(r.duration_s for r in bulk) == pytest.approx(sum(r.duration_s for r in singles))
    finishes = [[r.id for r in result.finished] for results in (singles, bulk) for result in results if result.finished]
    assert finishes[:5] == finishes[5:]
    assert one.pool.cached_hashes == many.pool.cached_hashes


def test_bulk_ends_with_the_first_step_at_or_after_the_horizon() -> None:
    engine = make_engine()
    engine.add(request("a", 100, 1000))
    step(engine)
    result = step(engine, 1000, 0.1)
    single_s = 6e-3
    assert result.steps == math.ceil(0.1 / single_s)
    assert result.duration_s >= 0.1
    assert result.duration_s - single_s < 0.1


def test_same_input_same_results() -> None:
    def results() -> list[str]:
        engine = make_engine(kv_tokens=60 * 16, events=True)
        for i in range(12):
            engine.add(request(str(i), 50 + 31 * i % 97, 40 + i, family=i % 3))
        return [repr(result) for result in run(engine)]

    assert results() == results()


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0), (100, 100)])
def test_impossible_requests_are_refused(prompt: int, output: int) -> None:
    engine = make_engine(kv_tokens=10 * 16)
    with pytest.raises(ValueError, match="request"):
        engine.add(request("a", prompt, output))
    assert engine.step() is None
    assert engine.injected == 0


def test_an_id_is_used_once_at_a_time() -> None:
    engine = make_engine()
    engine.add(request("a", 10, 1))
    with pytest.raises(ValueError, match="already known"):
        engine.add(request("a", 10, 1))
    run(engine)
    engine.add(request("a", 10, 1))


def test_context_grows_by_one_token_per_decode_and_step() -> None:
    engine = make_engine()
    for i in range(3):
        engine.add(request(str(i), 10, 20, family=i))
    contexts = []
    for _ in range(10):
        step(engine)
        contexts.append(engine.context_tokens)
    assert contexts[0] == 30
    assert {later - earlier for earlier, later in pairwise(contexts)} == {3}


def test_kv_from_elsewhere_leaves_the_last_token_to_compute_and_is_cached() -> None:
    engine = make_engine()
    fetched = request("fetched", 1000, 3)
    fetched.external_tokens = 1000
    engine.add(fetched)
    first = step(engine)
    assert (first.prefill_tokens, first.first_tokens) == (1, [fetched])
    # One token that attends to the 999 before it, and a read of the weights.
    assert first.duration_s == pytest.approx(COST.step_s(1, 999.5, 0))
    run(engine)
    assert engine.pool.cached_hashes == 62
    again = request("again", 1000, 1)
    engine.add(again)
    run(engine)
    assert again.cached_tokens == 992


def test_what_is_cached_here_need_not_have_come() -> None:
    engine = make_engine()
    engine.add(request("before", 512, 1))
    run(engine)
    used = engine.pool.used_blocks
    fetched = request("fetched", 1000, 5)
    fetched.external_tokens = 1000
    engine.add(fetched)
    step(engine)
    assert fetched.cached_tokens == 512
    assert engine.pool.used_blocks - used == 63
    run(engine)
    assert engine.pool.used_blocks == 0


def test_a_held_prompt_keeps_its_blocks_until_it_is_released() -> None:
    engine = make_engine(kv_tokens=16 * 70)
    held = EngineRequest("held", 1000, 1, list(range(62)), hold=True)
    engine.add(held)
    (result,) = run(engine)
    assert result.finished == [held]
    assert (engine.held, engine.pool.used_blocks) == (1, 63)
    waiting = request("waiting", 500, 1, family=1)
    engine.add(waiting)
    assert step(engine).admitted == []
    assert engine.release(held)
    assert not engine.release(held)
    assert step(engine).admitted == [waiting]
    run(engine)
    assert engine.pool.used_blocks == 0


def test_kv_from_elsewhere_is_lost_with_a_preemption() -> None:
    engine = make_engine(kv_tokens=16 * 40)
    first, second = request("first", 300, 200), request("second", 300, 200, family=1)
    for each in (first, second):
        each.external_tokens = 300
        engine.add(each)
    results = run(engine)
    assert second.preemptions
    assert second.external_tokens == 0
    # More than the last token of each: what was not cached of the second has been computed here.
    assert sum(result.prefill_tokens for result in results) > 100
    assert engine.completed == 2
