from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gateway.replicas.load import Load, LoadLedger, Ticket

SLOTS = 3


def ledger() -> LoadLedger:
    made = LoadLedger()
    made.open(SLOTS - 1)
    return made


def columns(of: LoadLedger, slot: int) -> tuple[float, ...]:
    return (
        of.in_flight[slot],
        of.prefill_tokens[slot],
        of.prefill_work_s[slot],
        of.decodes[slot],
        of.kv_tokens[slot],
    )


EMPTY = (0, 0.0, 0.0, 0, 0.0)


def test_a_request_moves_from_prefill_to_decode_to_nothing() -> None:
    load = ledger()
    ticket = load.start(1, 0.0, prompt_tokens=1000, uncached_tokens=400, prefill_s=0.2, output_tokens=50)
    assert columns(load, 1) == (1, 400, 0.2, 0, 1050)
    ticket.first_token(0.3)
    assert columns(load, 1) == (1, 0.0, 0.0, 1, 1050)
    ticket.finish()
    assert columns(load, 1) == EMPTY
    assert columns(load, 0) == EMPTY


def test_each_release_happens_once() -> None:
    load = ledger()
    other = load.start(0, 0.0, 10, 10, 0.1, 10)
    ticket = load.start(0, 0.0, 10, 10, 0.1, 10)
    for _ in range(3):
        ticket.first_token(0.1)
    assert columns(load, 0) == (2, 10, 0.1, 1, 40)
    for _ in range(3):
        ticket.finish()
        ticket.first_token(0.2)
    assert columns(load, 0) == (1, 10, 0.1, 0, 20)
    other.finish()
    assert columns(load, 0) == EMPTY


def test_columns_are_the_same_objects_for_ever_and_grow_for_new_slots() -> None:
    load = LoadLedger()

    def all_columns() -> list[list[int] | list[float]]:
        return [load.in_flight, load.prefill_tokens, load.prefill_work_s, load.decodes, load.kv_tokens]

    kept = all_columns()
    load.open(0)
    load.start(0, 0.0, 1, 1, 1.0, 1)
    load.open(5)
    load.open(2)
    load.retire(0)
    load.retire(99)
    assert all(a is b and len(a) == 6 for a, b in zip(kept, all_columns(), strict=True))


def test_tickets_of_a_retired_slot_release_nothing() -> None:
    load = ledger()
    waiting = load.start(0, 0.0, 10, 10, 0.1, 10)
    decoding = load.start(0, 0.0, 10, 10, 0.1, 10)
    decoding.first_token(0.1)
    load.retire(0)
    assert columns(load, 0) == EMPTY
    fresh = load.start(0, 1.0, 7, 5, 0.5, 3)
    waiting.first_token(1.1)
    waiting.finish()
    decoding.finish()
    assert columns(load, 0) == (1, 5, 0.5, 0, 10)
    assert load.prefill_ahead_s(0, 1.0) == 0.5
    fresh.finish()
    assert columns(load, 0) == EMPTY


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_prediction_that_is_no_number_does_not_poison_the_columns(bad: float) -> None:
    load = ledger()
    good = load.start(0, 0.0, 10, 10, 0.5, 10)
    load.start(0, 0.0, bad, bad, bad, 0.0).finish()
    assert columns(load, 0) == (1, 10, 0.5, 0, 20)
    good.finish()


class TestPrefillAhead:
    def test_nothing_ahead_of_an_idle_replica(self) -> None:
        assert ledger().prefill_ahead_s(0, 123.0) == 0.0

    def test_the_head_progresses_with_time_but_not_past_its_own_work(self) -> None:
        load = ledger()
        load.start(0, 10.0, 0, 0, 2.0, 0)
        load.start(0, 10.5, 0, 0, 3.0, 0)
        assert load.prefill_ahead_s(0, 10.5) == pytest.approx(4.5)
        assert load.prefill_ahead_s(0, 12.0) == pytest.approx(3.0)
        # Two seconds were predicted; the third it takes is not taken off the next request's work.
        assert load.prefill_ahead_s(0, 13.0) == pytest.approx(3.0)

    def test_the_next_head_progresses_from_the_first_token_before_it(self) -> None:
        load = ledger()
        first = load.start(0, 0.0, 0, 0, 2.0, 0)
        load.start(0, 0.0, 0, 0, 3.0, 0)
        first.first_token(2.5)
        assert load.prefill_ahead_s(0, 2.5) == pytest.approx(3.0)
        assert load.prefill_ahead_s(0, 3.5) == pytest.approx(2.0)

    def test_a_head_that_leaves_hands_the_engine_on_when_it_leaves(self) -> None:
        load = ledger()
        first = load.start(0, 0.0, 0, 0, 5.0, 0)
        load.start(0, 0.0, 0, 0, 3.0, 0)
        first.finish(now_s=1.0)
        assert load.prefill_ahead_s(0, 1.0) == pytest.approx(3.0)
        assert load.prefill_ahead_s(0, 2.0) == pytest.approx(2.0)

    def test_the_next_head_has_not_progressed_before_it_was_sent(self) -> None:
        load = ledger()
        first = load.start(0, 0.0, 0, 0, 5.0, 0)
        load.start(0, 2.0, 0, 0, 3.0, 0)
        first.finish()
        assert load.prefill_ahead_s(0, 3.0) == pytest.approx(2.0)

    def test_one_that_leaves_from_the_middle_changes_only_the_sum(self) -> None:
        load = ledger()
        load.start(0, 0.0, 0, 0, 5.0, 0)
        middle = load.start(0, 0.0, 0, 0, 3.0, 0)
        middle.finish(now_s=1.0)
        assert load.prefill_ahead_s(0, 1.0) == pytest.approx(4.0)

    def test_a_clock_that_runs_backwards_adds_nothing(self) -> None:
        load = ledger()
        load.start(0, 10.0, 0, 0, 2.0, 0)
        assert load.prefill_ahead_s(0, 5.0) == 2.0


@dataclass(eq=False)
class Sent:
    """What the reference model knows of a ticket."""

    ticket: Ticket
    slot: int
    started_s: float
    tokens: float
    prefill_s: float
    kv_tokens: float
    phase: str = "waiting"
    retired: bool = False


class LedgerMachine(RuleBasedStateMachine):
    """Any interleaving against the definition, computed from scratch after every step."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.load = ledger()
        self.now_s = 0.0
        self.sent: list[Sent] = []
        self.last_first_token_s = [float("-inf")] * SLOTS

    @rule(step_s=st.floats(0.001, 5.0))
    def pass_time(self, step_s: float) -> None:
        self.now_s += step_s

    @rule(
        target=tickets,
        slot=st.integers(0, SLOTS - 1),
        tokens=st.floats(0, 1e5),
        prefill_s=st.sampled_from([0.0, 0.1, 0.2, 0.3, 1e-9, 1e3]),
        output=st.integers(0, 4000),
    )
    def start(self, slot: int, tokens: float, prefill_s: float, output: int) -> Sent:
        ticket = self.load.start(slot, self.now_s, tokens, tokens, prefill_s, output)
        sent = Sent(ticket, slot, self.now_s, tokens, prefill_s, tokens + output)
        self.sent.append(sent)
        return sent

    @rule(sent=tickets)
    def first_token(self, sent: Sent) -> None:
        sent.ticket.first_token(self.now_s)
        if sent.phase == "waiting":
            sent.phase = "decoding"
            if not sent.retired:
                self.last_first_token_s[sent.slot] = self.now_s

    @rule(sent=tickets)
    def finish(self, sent: Sent) -> None:
        sent.ticket.finish()
        sent.phase = "finished"

    @rule(sent=consumes(tickets))
    def finish_and_forget(self, sent: Sent) -> None:
        sent.ticket.finish()
        sent.phase = "finished"

    @rule(slot=st.integers(0, SLOTS - 1))
    def retire(self, slot: int) -> None:
        self.load.retire(slot)
        self.last_first_token_s[slot] = float("-inf")
        for sent in self.sent:
            if sent.slot == slot:
                sent.retired = True

    @invariant()
    def columns_are_what_is_outstanding(self) -> None:
        ahead_column = [-1.0] * SLOTS
        self.load.fill_prefill_ahead_s(range(SLOTS), self.now_s, ahead_column)
        for slot in range(SLOTS):
            live = [s for s in self.sent if s.slot == slot and not s.retired and s.phase != "finished"]
            waiting = [s for s in live if s.phase == "waiting"]
            assert self.load.in_flight[slot] == len(live)
            assert self.load.decodes[slot] == len(live) - len(waiting)
            found = columns(self.load, slot)
            assert min(found) >= 0
            assert found[1] == pytest.approx(sum(s.tokens for s in waiting), abs=1e-6)
            assert found[2] == pytest.approx(sum(s.prefill_s for s in waiting), abs=1e-6)
            assert found[4] == pytest.approx(sum(s.kv_tokens for s in live), abs=1e-6)
            if not waiting:
                assert found[1] == found[2] == 0.0
            if not live:
                assert found == EMPTY
            expected_s = 0.0
            if waiting:
                head = waiting[0]
                busy_s = self.now_s - max(head.started_s, self.last_first_token_s[slot])
                expected_s = sum(s.prefill_s for s in waiting) - min(head.prefill_s, busy_s)
            ahead_s = self.load.prefill_ahead_s(slot, self.now_s)
            assert ahead_s >= 0.0
            assert ahead_s == pytest.approx(expected_s, abs=1e-6)
            assert ahead_column[slot] == ahead_s

    def teardown(self) -> None:
        for sent in self.sent:
            sent.ticket.finish()
        assert [columns(self.load, slot) for slot in range(SLOTS)] == [EMPTY] * SLOTS


TestLedger = LedgerMachine.TestCase


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_no_dust_is_left_in_whatever_order_floats_are_released(amounts: list[float], rng: object) -> None:
    load = ledger()
    tickets = [load.start(0, 0.0, amount, amount, amount, 0) for amount in amounts]
    rng.shuffle(tickets)  # type: ignore[attr-defined]
    for ticket in tickets:
        ticket.finish()
    assert columns(load, 0) == EMPTY


def test_less_in_flight_elsewhere_is_announced() -> None:
    load, announced = ledger(), []
    load.on_room = lambda: announced.append(load.in_flight[0])
    load.start(0, 0.0, 10, 0.1, 10, 0)
    for others in (2, 2, 1, 3, 0):
        load.set_others(0, Load(in_flight=others))
    assert announced == [2, 1], "as it is by then, the own request included"
    assert load.own(0).in_flight == 1
