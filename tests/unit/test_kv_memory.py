"""KV memory in flight: counted against worked cases, and never leaking whatever the order of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.replicas.kv_memory import Holding, KvMemory

STEP_S = 0.01


def memory(capacity: float = 10_000.0, prompt_bytes: int = 0, slots: int = 1) -> tuple[KvMemory, list[int]]:
    in_use = [prompt_bytes] * slots
    kv = KvMemory(in_use)
    for slot in range(slots):
        kv.open(slot)
        kv.set_capacity(slot, capacity, 0.25)
    return kv, in_use


def run(kv: KvMemory, slot: int, output: float, now_s: float) -> Holding:
    holding = kv.start(slot, 0.0, output)
    kv.first_token(holding, now_s, STEP_S, 1.0, 0.0)
    return holding


def test_room_is_what_full_answers_leave() -> None:
    kv, in_use = memory()
    assert kv.room_tokens[0] == 10_000.0
    in_use[0] = 8_000
    holding = kv.start(0, 50.0, 300.0)
    assert kv.room_tokens[0] == 10_000 - 2_000 - 50 - 300
    assert not kv.crowded
    in_use[0] = 0
    kv.finish(holding, 1.0, STEP_S, 1.0, 300)
    assert kv.room_tokens[0] == 10_000.0


def test_answers_grow_by_a_token_per_step() -> None:
    kv, _ = memory()
    run(kv, 0, 500.0, 0.0)
    run(kv, 0, 500.0, 1.0)
    assert kv.held_tokens(0, 2.0) == pytest.approx(200 + 100)
    assert kv.context_shift_tokens[0] == pytest.approx(100 - 500)


def test_prefills_of_others_stop_the_clock() -> None:
    kv, _ = memory()
    run(kv, 0, 500.0, 0.0)
    late = kv.start(0, 0.0, 500.0)
    kv.first_token(late, 1.0, STEP_S, 1.0, 0.4)
    assert kv.held_tokens(0, 1.0) == pytest.approx(60)


def test_answers_tell_how_long_steps_are() -> None:
    kv, _ = memory()
    holding = run(kv, 0, 500.0, 0.0)
    # 200 predicted steps, and 100 tokens after the first.
    assert kv.finish(holding, 2.0, STEP_S, 1.0, 101) == pytest.approx(2.0)
    assert kv.finish(holding, 2.0, STEP_S, 1.0, 101) is None
    short = run(kv, 0, 500.0, 0.0)
    assert kv.finish(short, 0.02, STEP_S, 1.0, 3) is None


def test_answers_that_may_have_been_preempted_tell_nothing() -> None:
    kv, _ = memory(capacity=400.0)
    holding = run(kv, 0, 500.0, 0.0)
    other = run(kv, 0, 500.0, 0.0)
    kv.finish(other, 3.0, STEP_S, 1.0, None)
    assert kv.finish(holding, 3.1, STEP_S, 1.0, 150) is None


def test_there_is_no_wait_while_it_fits() -> None:
    kv, _ = memory(capacity=1_000.0)
    run(kv, 0, 900.0, 0.0)
    assert kv.wait_s(0, 900.0, 1.0) == 0.0
    assert kv.wait_s(0, 901.0, 1.0) > 0.0


def test_the_wait_ends_when_enough_has_ended() -> None:
    kv, in_use = memory(capacity=1_000.0)
    in_use[0] = 4 * 600
    # 600 tokens of prompts; after 1.5 s answers of 150 and 100 tokens, with 50 and 100 to go.
    run(kv, 0, 200.0, 0.0)
    run(kv, 0, 200.0, 0.5)
    assert kv.held_tokens(0, 1.5) == pytest.approx(850)
    # The first ends after 50 steps: 850 + 2 x 50 - 200 - half of the prompts leaves 550.
    assert kv.wait_s(0, 400.0, 1.5) == pytest.approx(0.5)
    # The second after 100.
    assert kv.wait_s(0, 600.0, 1.5) == pytest.approx(1.0)


def test_a_long_queue_comes_first_generation_after_generation() -> None:
    kv, in_use = memory(capacity=1_000.0)
    run(kv, 0, 200.0, 0.0)
    for _ in range(4):
        kv.start(0, 0.0, 200.0)
    # Prompts of 200 tokens. When the one that answers has ended, four of them and this one fit.
    in_use[0] = 5 * 800
    assert kv.wait_s(0, 200.0, 0.0) == pytest.approx(2.0)
    # Of nine in the queue five have to end before, and take as long as answers do.
    for _ in range(5):
        kv.start(0, 0.0, 200.0)
    in_use[0] = 10 * 800
    assert kv.wait_s(0, 200.0, 0.0) == pytest.approx(2.0 + 2.0)


@given(answers=st.integers(1, 20), queued=st.integers(0, 200), more=st.integers(1, 200), needed=st.floats(1.0, 1_000.0))
def test_a_longer_queue_is_a_longer_wait(answers: int, queued: int, more: int, needed: float) -> None:
    def wait_s(queued: int) -> float:
        kv, in_use = memory()
        for _ in range(answers):
            run(kv, 0, 200.0, 0.0)
        for _ in range(queued):
            kv.start(0, 0.0, 200.0)
        in_use[0] = (answers + queued) * 4 * 300
        return kv.wait_s(0, needed, 0.0)

    assert wait_s(queued + more) >= wait_s(queued)


def test_traffic_of_others_takes_room() -> None:
    kv, _ = memory(capacity=1_000.0)
    run(kv, 0, 200.0, 0.0)
    kv.saw_usage(0, 0.5, 1.0)
    assert kv.held_tokens(0, 1.0) == pytest.approx(500.0)
    assert kv.room_tokens[0] == pytest.approx(1_000 - 200 - 400)
    kv.saw_usage(0, 0.5, 1.0)
    assert kv.held_tokens(0, 1.0) == pytest.approx(500.0)


def test_a_restart_forgets_what_was_in_flight() -> None:
    kv, _ = memory()
    waiting, running = kv.start(0, 10.0, 300.0), run(kv, 0, 300.0, 0.0)
    kv.retire(0)
    assert kv.room_tokens[0] == 10_000.0
    for holding in (waiting, running):
        kv.first_token(holding, 1.0, STEP_S, 1.0, 0.0)
        assert kv.finish(holding, 2.0, STEP_S, 1.0, 300) is None
    assert kv.room_tokens[0] == 10_000.0
    assert kv.held_tokens(0, 3.0) == 0.0


@given(
    st.lists(
        st.tuples(st.sampled_from(("start", "token", "finish", "retire")), st.integers(0, 5), st.floats(0.0, 5.0)),
        max_size=60,
    )
)
def test_nothing_leaks(events: list[tuple[str, int, float]]) -> None:
    kv, _ = memory(slots=2)
    holdings: list[Holding] = []
    now_s = 0.0
    for kind, number, passed_s in events:
        now_s += passed_s
        slot = number % 2
        if kind == "start":
            holdings.append(kv.start(slot, float(number), 100.0 * number))
        elif kind == "retire":
            kv.retire(slot)
        elif holdings:
            holding = holdings[number % len(holdings)]
            if kind == "token":
                kv.first_token(holding, now_s, STEP_S, 1.5, 0.01 * number)
            else:
                kv.finish(holding, now_s, STEP_S, 1.5, 40)
        for each in (0, 1):
            assert kv.held_tokens(each, now_s) >= -1e-6
            assert kv.wait_s(each, 500.0, now_s) >= 0.0
    for holding in holdings:
        kv.finish(holding, now_s, STEP_S, 1.0, None)
    for each in (0, 1):
        assert kv.room_tokens[each] == pytest.approx(10_000.0)
        assert kv.held_tokens(each, now_s) == pytest.approx(0.0)
