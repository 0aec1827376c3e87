"""The exchange without a network: bytes in, bytes out, a clock that is told what time it is."""

import json

import pytest
from support.exchanges import (
    DONE,
    LIMITS,
    OK_JSON,
    SSE_HEAD,
    SSE_UNTIL_CLOSE,
    TOKEN,
    Bench,
    FakeClient,
    Peer,
    chunk,
    status_json,
)

from gateway.proxy.exchange import Outcome
from gateway.proxy.failures import Cause
from gateway.proxy.retry_budget import RetryBudget
from gateway.replicas.breaker import BreakerSettings
from gateway.replicas.breaker import Outcome as Verdict
from gateway.routing.assignment import Assignment
from policies.types import Candidates, Choice, Column, Request


def test_a_request_is_charged_at_selection_and_released_at_its_end() -> None:
    bench = Bench()
    exchange, client = bench.request(stream=True)
    assert bench.ledger.in_flight[0] == 1
    assert bench.ledger.prefill_tokens[0] > 0
    peer = bench.connect()
    peer.send(SSE_HEAD)
    assert bench.ledger.decodes[0] == 0
    bench.clock += 0.5
    peer.send(chunk(TOKEN))
    assert bench.ledger.decodes[0] == 1
    assert bench.ledger.prefill_tokens[0] == 0
    assert exchange.first_token_s == bench.clock.now_s
    peer.send(chunk(DONE) + chunk(b""))
    bench.assert_idle()
    answer = client.answer()
    assert answer.complete
    assert answer.body == TOKEN + DONE
    assert client.end == "kept"
    assert exchange.outcome is Outcome.OK


def test_nothing_is_spent_on_a_retry_that_has_nowhere_to_go() -> None:
    budget = RetryBudget(0.0, 0.2, lambda: 0.0)
    bench = Bench(replicas=1, budget=budget)
    for _ in range(5):
        bench.request()
        bench.connect().lose(ConnectionResetError())
    # The budget is worth two retries, and five failures without another replica have not touched it.
    assert budget.withdraw()
    assert budget.withdraw()
    assert bench.tally.retries_denied == 0


def test_a_connection_paused_in_its_last_read_serves_the_next_request() -> None:
    class Unread(FakeClient):
        def write(self, data: bytes) -> None:
            super().write(data)
            exchange.client_writable(False)

    bench = Bench()
    client = Unread()
    exchange, _ = bench.start(
        (("content-type", "application/json"), ("content-length", "13")), client=client, target="/v1/x"
    )
    exchange.request_body(b'{"model":"m"}')
    exchange.request_end()
    peer = bench.connect()
    # Head, body and end in one read: the pause comes in the middle of it.
    peer.send(SSE_HEAD + chunk(TOKEN) + chunk(DONE) + chunk(b""))
    assert client.answer().complete
    _, second = bench.request()
    assert not peer.transport.paused
    peer.send(OK_JSON)
    assert second.answer().complete
    bench.assert_idle()


def test_pressure_of_a_slow_client_reaches_the_replica_and_is_taken_off_again() -> None:
    bench = Bench()
    exchange, client = bench.request(stream=True)
    peer = bench.connect()
    peer.send(SSE_HEAD + chunk(TOKEN))
    exchange.client_writable(False)
    assert peer.transport.paused
    bench.tick(15)
    exchange.client_writable(True)
    assert not peer.transport.paused
    # The silence was the client's.
    bench.tick(29)
    peer.send(chunk(DONE) + chunk(b""))
    assert client.answer().complete
    bench.assert_idle()


def test_a_client_that_was_slow_before_the_answer_began_is_not_overrun() -> None:
    bench = Bench()
    exchange, _ = bench.request(stream=True)
    exchange.client_writable(False)
    peer = bench.connect()
    peer.send(SSE_HEAD + chunk(TOKEN))
    assert peer.transport.paused


def test_an_upload_waits_for_a_replica_that_does_not_read() -> None:
    bench = Bench()
    exchange, client = bench.upload()
    exchange.request_body(b"a" * 1000)
    # Not connected yet: one read is held, no more is read.
    assert client.paused
    peer = bench.connect()
    assert not client.paused
    peer.connection.pause_writing()
    assert client.paused
    bench.tick(45)
    assert exchange.outcome is None, "the client may not be blamed for a replica that does not read"
    peer.connection.resume_writing()
    assert not client.paused
    exchange.request_body(b"b" * 10)
    exchange.request_end()
    assert peer.received.endswith(chunk(b"a" * 1000) + chunk(b"b" * 10) + chunk(b""))
    peer.send(OK_JSON)
    assert client.answer().complete
    bench.assert_idle()


def test_an_upload_that_fills_the_connection_at_once_stays_held() -> None:
    bench = Bench()
    exchange, client = bench.upload()
    exchange.request_body(b"a" * 1000)
    bench.pool().connect(full=True)
    assert client.paused, "what the replica has not taken must not be followed by more"


def test_an_upload_gets_a_fresh_connection_because_it_cannot_be_sent_twice() -> None:
    bench = Bench()
    bench.request()
    bench.connect().send(OK_JSON)
    assert bench.pool().idle_count == 1
    bench.upload()
    assert len(bench.pool().dialled) == 1


def test_an_upload_is_not_retried_once_it_has_begun() -> None:
    bench = Bench()
    exchange, client = bench.upload(chunked=False)
    peer = bench.connect()
    exchange.request_body(b"a" * 10)
    peer.lose(ConnectionResetError())
    assert client.answer().status == 502
    assert bench.attempts() == {1: 1}
    bench.assert_idle()


def test_a_connection_lost_late_was_not_stale() -> None:
    bench = Bench()
    bench.request()
    peer = bench.connect()
    peer.send(OK_JSON)
    exchange, client = bench.request()
    bench.clock += 1.5
    peer.lose()
    # It had the request for 1.5 s, so the request moves on instead of being tried there again.
    assert exchange.attempts == 2
    bench.connect(2).send(OK_JSON)
    assert client.answer().complete
    assert bench.attempts() == {1: 2, 2: 1}
    assert ("replica-1", Verdict.CUT) in bench.ejector.verdicts


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (400, Verdict.CLIENT_ERROR),
        (404, Verdict.CLIENT_ERROR),
        (422, Verdict.CLIENT_ERROR),
        (429, Verdict.BACKPRESSURE),
        (500, Verdict.SERVER_ERROR),
        (501, Verdict.CLIENT_ERROR),
        (502, Verdict.SERVER_ERROR),
        (503, Verdict.BACKPRESSURE),
        (504, Verdict.SERVER_ERROR),
        (505, Verdict.CLIENT_ERROR),
    ],
)
def test_what_a_status_says_about_the_replica(status: int, verdict: Verdict) -> None:
    bench = Bench(replicas=1)
    _, client = bench.request()
    bench.connect().send(status_json(status))
    assert client.answer().status == status
    assert bench.ejector.verdicts == [("replica-1", verdict)]
    bench.assert_idle()


@pytest.mark.parametrize(
    ("code", "verdict"), [(500, Verdict.SERVER_ERROR), (503, Verdict.SERVER_ERROR), (400, Verdict.CLIENT_ERROR)]
)
@pytest.mark.parametrize("tokens_before", [0, 3])
def test_an_error_event_inside_a_200_is_no_success(code: int, verdict: Verdict, tokens_before: int) -> None:
    bench = Bench()
    exchange, client = bench.request(stream=True)
    error = b'data: {"error": {"message": "engine", "type": "x", "param": null, "code": %d}}\n\n' % code
    peer = bench.connect()
    peer.send(SSE_HEAD)
    for part in [TOKEN] * tokens_before + [error, DONE, b""]:
        peer.send(chunk(part))
    answer = client.answer()
    assert answer.complete
    assert answer.body == TOKEN * tokens_before + error + DONE
    assert exchange.outcome is Outcome.BROKEN
    assert bench.ejector.verdicts == [("replica-1", verdict)]


def test_words_about_errors_in_generated_text_are_no_errors() -> None:
    bench = Bench()
    exchange, _ = bench.request(stream=True)
    text = json.dumps({"choices": [{"delta": {"content": 'data: {"error": {"code": 500}}'}}]}).encode()
    peer = bench.connect()
    peer.send(SSE_HEAD + chunk(b"data: " + text + b"\n\n") + chunk(DONE) + chunk(b""))
    assert exchange.outcome is Outcome.OK
    assert bench.ejector.verdicts == [("replica-1", Verdict.OK)]


def test_a_stream_that_ends_with_the_connection_and_its_last_event_is_complete() -> None:
    bench = Bench()
    _, client = bench.request(stream=True)
    peer = bench.connect()
    peer.send(SSE_UNTIL_CLOSE + TOKEN + DONE)
    peer.lose()
    answer = client.answer()
    assert answer.complete
    assert answer.body == TOKEN + DONE
    bench.assert_idle()


def test_a_stream_that_ends_with_the_connection_alone_is_broken() -> None:
    bench = Bench()
    exchange, client = bench.request(stream=True)
    peer = bench.connect()
    peer.send(SSE_UNTIL_CLOSE + TOKEN + TOKEN[:7])
    peer.lose()
    answer = client.answer()
    assert not answer.complete
    assert client.end == "aborted"
    assert b"[DONE]" not in answer.body
    # The error event is not glued to the half event before it.
    assert answer.events[-1].startswith(b'{"error"')
    assert answer.body.startswith(TOKEN + TOKEN[:7] + b"\n\ndata: ")
    assert exchange.outcome is Outcome.BROKEN
    bench.assert_idle()


def test_a_json_answer_that_ends_with_the_connection_is_checked_for_its_end() -> None:
    bench = Bench()
    _, client = bench.request()
    peer = bench.connect()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    peer.send(head + b'{"answer":')
    peer.lose()
    second = bench.connect(2)
    second.send(head + b'{"answer":1}')
    second.lose()
    answer = client.answer()
    assert answer.complete
    assert answer.body == b'{"answer":1}'
    bench.assert_idle()


def test_a_broken_stream_of_a_client_of_http_1_0_is_reset_because_a_close_would_be_its_end() -> None:
    bench = Bench()
    _, client = bench.request(stream=True, version_1_0=True)
    peer = bench.connect()
    peer.send(SSE_HEAD + chunk(TOKEN))
    peer.lose()
    assert client.end == "reset"
    assert b"chunked" not in client.sent
    bench.assert_idle()


@pytest.mark.parametrize("extra", [b"content-length: 4000\r\n", b"content-encoding: gzip\r\n"])
def test_no_event_is_put_into_a_body_that_would_be_damaged_by_it(extra: bytes) -> None:
    bench = Bench()
    _, client = bench.request(stream=True)
    peer = bench.connect()
    framing = b"" if b"length" in extra else b"transfer-encoding: chunked\r\n"
    peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + extra + framing + b"\r\n")
    peer.send(TOKEN if b"length" in extra else chunk(TOKEN))
    peer.lose(ConnectionResetError())
    assert client.end == "aborted"
    answer = client.answer()
    assert not answer.complete
    assert answer.body == TOKEN


def test_an_answer_over_the_limit_is_held_no_longer_and_then_not_retried() -> None:
    bench = Bench()
    _, client = bench.request()
    peer = bench.connect()
    peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
    half = b'"' + b"x" * (LIMITS.max_held_bytes // 2)
    peer.send(chunk(half))
    assert client.sent == b""
    peer.send(chunk(half))
    peer.send(chunk(half))
    assert client.answer().body == half * 3
    peer.lose(ConnectionResetError())
    assert client.end == "aborted"
    assert bench.attempts() == {1: 1}
    bench.assert_idle()


def test_the_prompt_is_let_go_when_the_stream_begins() -> None:
    bench = Bench()
    exchange, _ = bench.request(stream=True)
    peer = bench.connect()
    assert exchange._whole
    peer.send(SSE_HEAD)
    assert exchange._whole == b""


def test_a_policy_that_raises_costs_one_request_its_answer_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        name = "broken"
        reads: frozenset[Column] = frozenset()

        def choose(self, request: Request, candidates: Candidates) -> Choice:
            raise ZeroDivisionError("policy")

    bench = Bench()
    good = bench.router.policy
    bench.router.use(Broken())
    exchange, client = bench.request()
    answer = client.answer()
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert exchange.outcome is Outcome.FAILED
    assert "ZeroDivisionError" in caplog.text
    bench.router.use(good)
    _, client = bench.request()
    bench.connect().send(OK_JSON)
    assert client.answer().complete
    bench.assert_idle()


@pytest.mark.interpreted
def test_a_fault_in_one_request_does_not_end_the_limits_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    faulty, first = bench.request()
    _, second = bench.request()

    def presume(assignment: Assignment, now_s: float) -> None:
        if assignment is faulty.assignment:
            raise ZeroDivisionError

    bench.connect()
    bench.connect()
    monkeypatch.setattr(
        type(faulty.assignment), "presume", lambda self, now_s: presume(now_s) if self is faulty.assignment else None
    )
    bench.tick(1)
    assert first.answer().status == 500
    bench.tick(61)
    assert second.sent == b""
    assert bench.pool(2).dialled, "the second request has timed out and moved on"


def test_while_the_gateway_drains_every_answer_says_that_the_connection_closes() -> None:
    bench = Bench()
    bench.plane.draining = True
    _, client = bench.request()
    bench.connect().send(OK_JSON)
    assert client.answer().headers["connection"] == "close"
    assert client.end == "closed"


def test_a_request_is_still_retried_while_the_gateway_drains() -> None:
    bench = Bench()
    bench.plane.draining = True
    _, client = bench.request()
    bench.pool(1).fail(Cause.REFUSED)
    bench.connect(2).send(OK_JSON)
    assert client.answer().status == 200


def test_a_policy_that_raises_at_a_retry_leaves_the_first_failure(caplog: pytest.LogCaptureFixture) -> None:
    class Once:
        name = "once"
        reads: frozenset[Column] = frozenset()

        def choose(self, request: Request, candidates: Candidates) -> Choice:
            if len(candidates.slots) < 2:
                raise ZeroDivisionError
            return Choice(0, "first")

    bench = Bench()
    bench.router.use(Once())
    _, client = bench.request()
    bench.connect().lose(ConnectionResetError())
    assert client.answer().status == 502
    assert "ZeroDivisionError" in caplog.text
    bench.assert_idle()


def test_a_retry_goes_to_an_ejected_replica_rather_than_nowhere() -> None:
    bench = Bench(breaker=BreakerSettings(consecutive_failures=1))
    _, client = bench.request()
    bench.connect(1).lose(ConnectionResetError())
    bench.connect(2).send(OK_JSON)
    assert client.answer().status == 200
    assert not bench.fleet.replicas["replica-1"].routable
    # Now the other one fails, and the first, out of routing or not, is all there is.
    _, client = bench.request()
    Peer(bench.pool(2).connections[-1]).lose(ConnectionResetError())
    bench.connect(2).lose(ConnectionResetError())
    bench.connect(1).send(OK_JSON)
    assert client.answer().status == 200
    # It has shown that it works.
    assert bench.fleet.replicas["replica-1"].routable
    bench.assert_idle()


def test_a_stream_may_live_as_long_as_its_tokens_come() -> None:
    bench = Bench()
    _, client = bench.request(stream=True)
    peer = bench.connect()
    peer.send(SSE_HEAD)
    for _ in range(200):
        bench.tick(29)
        peer.send(chunk(TOKEN))
    peer.send(chunk(DONE) + chunk(b""))
    assert client.answer().complete
    bench.assert_idle()


# -- replicas that hang


@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("deadline_s", [0.0, 40.0])
def test_an_engine_that_hangs_is_found_out_though_clients_are_more_impatient(
    with_head: bool, deadline_s: float
) -> None:
    bench = Bench(limits={"deadline_s": deadline_s, "first_byte_timeout_s": 600.0, "silence_timeout_s": 600.0})
    for _ in range(5):
        exchange, _ = bench.request(stream=True)
        peer = bench.connect()
        if with_head:
            # The server is well, and says so before the engine has said anything.
            peer.send(SSE_HEAD)
        bench.tick(41)
        exchange.client_gone()
    assert [verdict for _, verdict in bench.ejector.verdicts] == [Verdict.TIMEOUT] * 5
    assert bench.fleet.replicas["replica-1"].ejected


def test_impatience_alone_is_no_evidence() -> None:
    bench = Bench(limits={"first_byte_timeout_s": 600.0})
    # Not that long.
    exchange, _ = bench.request(stream=True)
    bench.connect()
    bench.tick(29)
    exchange.client_gone()
    # Nothing can be seen of an answer that is not streamed.
    exchange, _ = bench.request()
    bench.connect()
    bench.tick(59)
    exchange.client_gone()
    # Others get their tokens.
    exchange, _ = bench.request(stream=True)
    bench.connect()
    bench.request(stream=True)
    other = bench.connect()
    other.send(SSE_HEAD)
    bench.clock += 29
    other.send(chunk(TOKEN))
    bench.tick(28)
    exchange.client_gone()
    # Or their whole answers.
    exchange, _ = bench.request(stream=True)
    bench.connect()
    bench.clock += 5
    bench.request()
    bench.connect().send(OK_JSON)
    bench.clock += 50
    exchange.client_gone()
    # It was past its first token.
    exchange, _ = bench.request(stream=True)
    peer = bench.connect()
    peer.send(SSE_HEAD + chunk(TOKEN))
    bench.clock += 50
    exchange.client_gone()
    verdicts = [verdict for _, verdict in bench.ejector.verdicts]
    assert verdicts == [Verdict.CANCELLED] * 3 + [Verdict.OK] + [Verdict.CANCELLED] * 2


# -- replicas that leave


def test_a_stream_outlives_its_replicas_removal_and_leaves_nothing_behind() -> None:
    bench = Bench()
    replica = bench.fleet.replicas["replica-1"]
    exchange, client = bench.request(stream=True)
    peer = bench.connect()
    peer.send(SSE_HEAD + chunk(TOKEN))
    bench.fleet.remove("replica-1")
    peer.send(chunk(TOKEN) + chunk(DONE) + chunk(b""))
    assert client.answer().complete
    assert exchange.outcome is Outcome.OK
    assert peer.ended == "aborted", "a connection to a replica that left is not kept"
    assert not [labels for labels in bench.tally.requests if labels[0] == "replica-1"]
    assert not [key for key in bench.tally.series if key[0] == "replica-1"]
    assert replica not in bench.plane._pools
    bench.assert_idle()


def test_a_slot_given_to_another_replica_is_not_charged_with_the_old_ones_end() -> None:
    from gateway.replicas.registry import ReplicaSpec

    bench = Bench(replicas=1)
    exchange, _ = bench.request(stream=True)
    peer = bench.connect()
    peer.send(SSE_HEAD)
    bench.fleet.remove("replica-1")
    newcomer = bench.fleet.add(ReplicaSpec("http://new.test", models=("m",)))
    bench.fleet.set_up(newcomer, True)
    assert newcomer.slot == 0
    assert not bench.plane.replica_active(0)
    bench.request()
    assert bench.ledger.in_flight[0] == 1
    peer.send(chunk(TOKEN) + chunk(DONE) + chunk(b""))
    assert exchange.outcome is Outcome.OK
    assert bench.ledger.in_flight[0] == 1
    assert bench.ledger.decodes[0] == 0
    assert bench.router.predictor.errors[0].count == 0


def test_a_resend_to_a_replica_that_left_keeps_no_pool_for_it() -> None:
    bench = Bench(replicas=1)
    replica = bench.fleet.replicas["replica-1"]
    bench.request()
    peer = bench.connect()
    peer.send(OK_JSON)
    bench.request()
    bench.fleet.remove("replica-1")
    peer.lose()
    assert replica not in bench.plane._pools


# -- back-pressure


def test_a_replica_that_is_busy_is_spared_until_it_said() -> None:
    bench = Bench()
    _, client = bench.request()
    bench.connect(1).send(status_json(503, "Retry-After: 7\r\n"))
    bench.connect(2).send(OK_JSON)
    assert client.answer().status == 200
    for _ in range(3):
        bench.clock += 2
        _, client = bench.request()
        bench.connect(2).send(OK_JSON) if bench.pool(2).dialled else None
    assert bench.attempts()[1] == 1
    bench.clock += 2
    bench.request()
    bench.connect(1)
    assert bench.attempts()[1] == 2


def test_a_busy_replica_is_asked_nevertheless_when_it_is_the_only_one() -> None:
    bench = Bench(replicas=1)
    for expected in (1, 2):
        _, client = bench.request()
        if bench.pool().dialled:
            bench.connect()
        peer_count = bench.attempts()[1]
        assert peer_count == expected
        connection = bench.pool().connections[-1]
        connection.data_received(status_json(503, "Retry-After: 7\r\n"))
        answer = client.answer()
        assert answer.status == 503
        assert answer.headers["retry-after"] == "7"
    bench.assert_idle()


@pytest.mark.parametrize("value", ["Wed, 21 Oct 2015 07:28:00 GMT", "-1", "99999999999999999999", ""])
def test_a_retry_after_that_is_no_number_of_seconds_spares_a_replica_for_a_moment(value: str) -> None:
    bench = Bench()
    bench.request()
    bench.connect(1).send(status_json(429, f"Retry-After: {value}\r\n"))
    bench.clock += 1.1
    bench.request()
    assert bench.pool(1).dialled or bench.pool(1).connections[-1].exchange is not None
