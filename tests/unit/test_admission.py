"""Requests that wait for room: the queue alone, then exchanges in it."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exchanges import OK_JSON, Bench, chunk

from gateway.proxy.admission import AdmissionQueue
from gateway.proxy.exchange import Outcome
from gateway.proxy.failures import Phase
from gateway.replicas.registry import ReplicaSpec


class Guest:
    """Waits for rooms of a house."""

    def __init__(self, name: int, house: list[int]) -> None:
        self.name = name
        self.house = house
        self.served = False

    def offer_room(self) -> bool:
        if self.house[0] == 0:
            return False
        self.house[0] -= 1
        self.served = True
        return True


def test_first_come_first_served_as_far_as_room_reaches() -> None:
    later: list[Callable[[], None]] = []
    house = [0]
    queue = AdmissionQueue(3, later.append)
    guests = [Guest(n, house) for n in range(4)]
    assert [queue.enter("a", guest) for guest in guests] == [True, True, True, False]
    assert (queue.waiting, queue.entered, queue.turned_away) == (3, 3, 1)
    house[0] = 2
    queue.room_may_be()
    queue.room_may_be()
    assert len(later) == 1, "served once however often it is said"
    assert not guests[0].served, "and not in the middle of somebody else's affairs"
    later.pop()()
    assert [guest.served for guest in guests] == [True, True, False, False]
    queue.leave("a", guests[2])
    queue.leave("a", guests[2])
    assert queue.waiting == 0
    assert not queue.has_line("a")
    queue.room_may_be()
    assert later == [], "nobody waits, nothing to do"


def test_a_full_pool_holds_up_no_other_line() -> None:
    queue = AdmissionQueue(10, lambda call: None)
    full, free = [0], [1]
    first, second = Guest(1, full), Guest(2, free)
    queue.enter("full", first)
    queue.enter("free", second)
    queue.serve()
    assert (first.served, second.served) == (False, True)
    assert (queue.has_line("full"), queue.has_line("free")) == (True, False)


@given(st.lists(st.one_of(st.sampled_from(["enter a", "enter b", "room", "serve"]), st.integers(0, 30)), max_size=60))
def test_whatever_happens_the_line_keeps_its_order_and_its_count(acts: list[str | int]) -> None:
    queue = AdmissionQueue(5, lambda call: None)
    houses = {"a": [0], "b": [0]}
    waiting: dict[str, list[Guest]] = {"a": [], "b": []}
    everybody: list[tuple[str, Guest]] = []
    for act in acts:
        if isinstance(act, int):
            if act < len(everybody):
                line, guest = everybody[act]
                queue.leave(line, guest)
                if guest in waiting[line]:
                    waiting[line].remove(guest)
        elif act.startswith("enter"):
            line = act[-1]
            guest = Guest(len(everybody), houses[line])
            everybody.append((line, guest))
            if queue.enter(line, guest):
                waiting[line].append(guest)
        elif act == "room":
            for house in houses.values():
                house[0] += 1
        else:
            rooms = {line: house[0] for line, house in houses.items()}
            queue.serve()
            for line, guests in waiting.items():
                assert [guest.served for guest in guests] == [n < rooms[line] for n in range(len(guests))]
                waiting[line] = guests[rooms[line] :]
        assert queue.waiting == sum(map(len, waiting.values())) <= 5
        assert queue.has_line("a") == bool(waiting["a"])


def limited(models: tuple[str, ...] = ("m",), number: int = 1) -> ReplicaSpec:
    return ReplicaSpec(f"http://replica-{number}.test", models=models, max_in_flight=1)


def test_a_request_waits_for_a_slot_and_takes_the_connection_that_became_free() -> None:
    bench = Bench(specs=[limited()], queue=8)
    _, first = bench.request()
    peer = bench.connect()
    second_exchange, second = bench.request()
    third_exchange, third = bench.request()
    assert second_exchange.phase is Phase.QUEUED
    assert bench.ledger.in_flight == [1]
    peer.send(OK_JSON)
    assert first.answer().complete
    bench.turn()
    assert (second_exchange.phase, third_exchange.phase) == (Phase.WAITING, Phase.QUEUED)
    assert bench.ledger.in_flight == [1]
    peer.send(OK_JSON)
    bench.turn()
    peer.send(OK_JSON)
    bench.turn()
    assert second.answer().complete
    assert third.answer().complete
    assert bench.attempts() == {1: 3}
    assert len(bench.pool().connections) == 1
    bench.assert_idle()


def test_a_newcomer_does_not_jump_the_line() -> None:
    bench = Bench(specs=[limited()], queue=8)
    bench.request()
    peer = bench.connect()
    early, _ = bench.request()
    peer.send(OK_JSON)
    # There is room now, but the one who waited has not been called yet.
    late, _ = bench.request()
    assert (early.phase, late.phase) == (Phase.QUEUED, Phase.QUEUED)
    bench.turn()
    assert (early.phase, late.phase) == (Phase.WAITING, Phase.QUEUED)


def test_without_a_queue_a_saturated_pool_answers_429_at_once() -> None:
    bench = Bench(specs=[limited()])
    bench.request()
    bench.connect()
    exchange, client = bench.request()
    answer = client.answer()
    assert (answer.status, answer.error["code"]) == (429, "replicas_saturated")
    assert answer.headers["retry-after"] == "2"
    assert exchange.outcome is Outcome.REFUSED
    assert exchange.attempts == 0


def test_a_full_queue_answers_at_once() -> None:
    bench = Bench(specs=[limited()], queue=1)
    bench.request()
    bench.connect()
    bench.request()
    _, client = bench.request()
    assert client.answer().status == 429
    assert bench.plane.queue.turned_away == 1


def test_an_empty_pool_is_waited_for_until_it_is_back() -> None:
    bench = Bench(replicas=1, queue=8)
    replica = bench.fleet.replicas["replica-1"]
    bench.fleet.set_up(replica, False)
    exchange, client = bench.request()
    assert exchange.phase is Phase.QUEUED
    bench.tick(4)
    bench.fleet.set_up(replica, True)
    bench.turn()
    bench.connect().send(OK_JSON)
    assert client.answer().status == 200
    bench.assert_idle()


@pytest.mark.parametrize(("up", "status"), [(True, 429), (False, 503)])
def test_the_answer_at_the_deadline_says_what_is_lacking(up: bool, status: int) -> None:
    bench = Bench(specs=[limited()], queue=8, limits={"first_byte_timeout_s": 100.0})
    bench.request()
    bench.connect()
    _, client = bench.request()
    if not up:
        bench.fleet.set_up(bench.fleet.replicas["replica-1"], False)
        bench.turn()
    bench.tick(5.1)
    assert client.answer().status == status
    assert "retry-after" in client.answer().headers
    assert bench.plane.queue.waiting == 0


def test_a_client_that_leaves_gives_up_its_place() -> None:
    bench = Bench(specs=[limited()], queue=8)
    bench.request()
    peer = bench.connect()
    leaving, _ = bench.request()
    staying, _ = bench.request()
    leaving.client_gone()
    assert leaving.outcome is Outcome.CANCELLED
    assert bench.plane.queue.waiting == 1
    peer.send(OK_JSON)
    bench.turn()
    assert staying.phase is Phase.WAITING
    assert bench.attempts() == {1: 2}


def test_models_do_not_wait_for_each_other() -> None:
    bench = Bench(specs=[limited(("m",), 1), limited(("other",), 2)], queue=8)
    bench.request()
    bench.connect(1)
    waiting, _ = bench.request()
    body = b'{"model":"other","messages":[{"role":"user","content":"x"}]}'
    exchange, client = bench.start((("content-type", "application/json"), ("content-length", str(len(body)))))
    exchange.request_body(body)
    exchange.request_end()
    bench.connect(2).send(OK_JSON)
    assert client.answer().complete
    bench.turn()
    assert waiting.phase is Phase.QUEUED


def test_an_upload_that_waits_is_read_no_further() -> None:
    bench = Bench(specs=[limited()], queue=8)
    bench.request()
    peer = bench.connect()
    # A request without a model waits in a line of its own.
    exchange, client = bench.upload()
    exchange.request_body(b"part")
    assert exchange.phase is Phase.QUEUED
    assert client.paused
    peer.send(OK_JSON)
    bench.turn()
    second = bench.connect()
    assert not client.paused
    exchange.request_end()
    assert second.received.endswith(chunk(b"part") + chunk(b""))
    second.send(OK_JSON)
    assert client.answer().complete
    bench.assert_idle()


@pytest.mark.interpreted
def test_a_policy_that_raises_does_not_stop_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(specs=[limited()], queue=8)
    bench.request()
    peer = bench.connect()
    _, unlucky = bench.request()
    _, lucky = bench.request()
    assign, calls = bench.router.assign, []

    def failing(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 1:
            raise ZeroDivisionError
        return assign(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.router, "assign", failing)
    peer.send(OK_JSON)
    bench.turn()
    assert unlucky.answer().status == 500
    peer.send(OK_JSON)
    assert lucky.answer().status == 200
    bench.assert_idle()
