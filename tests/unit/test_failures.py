"""The failure table, row by row: each pair is brought about on a real exchange, and the row's action follows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from support.exchanges import OK_JSON, SSE_HEAD, TOKEN, Bench, FakeClient, Peer, chunk, status_json

from gateway.proxy.exchange import Exchange
from gateway.proxy.failures import STATUS_CAUSES, TABLE, Action, Cause, Phase
from gateway.proxy.retry_budget import RetryBudget
from gateway.replicas.breaker import Outcome as Verdict
from gateway.replicas.registry import ReplicaSpec
from policies.slo import Targets

LIMITED = [ReplicaSpec(f"http://replica-{n}.test", models=("m",), max_in_flight=1) for n in (1, 2)]


@dataclass
class Scene:
    """An exchange that has come to a phase."""

    bench: Bench
    exchange: Exchange
    client: FakeClient
    peer: Peer | None


def _reading(bench: Bench, upload: bool) -> Scene:
    exchange, client = bench.start((("content-type", "application/json"), ("content-length", "1000")))
    exchange.request_body(b"{")
    return Scene(bench, exchange, client, None)


def _queued(bench: Bench, upload: bool) -> Scene:
    for number in range(1, len(bench.fleet.replicas) + 1):
        bench.request()
        bench.connect(number)
    exchange, client = bench.upload() if upload else bench.request()
    return Scene(bench, exchange, client, None)


def _connecting(bench: Bench, upload: bool) -> Scene:
    exchange, client = bench.upload() if upload else bench.request()
    return Scene(bench, exchange, client, None)


def _waiting(bench: Bench, upload: bool) -> Scene:
    scene = _connecting(bench, upload)
    scene.peer = bench.connect()
    if upload:
        scene.exchange.request_body(b"part")
    return scene


def _held(bench: Bench, upload: bool) -> Scene:
    scene = _waiting(bench, upload)
    assert scene.peer is not None
    scene.peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
    scene.peer.send(chunk(b'{"answer":'))
    return scene


def _streaming(bench: Bench, upload: bool) -> Scene:
    scene = _waiting(bench, upload)
    assert scene.peer is not None
    scene.peer.send(SSE_HEAD + chunk(TOKEN))
    return scene


REACH: dict[Phase, Callable[[Bench, bool], Scene]] = {
    Phase.READING: _reading,
    Phase.QUEUED: _queued,
    Phase.CONNECTING: _connecting,
    Phase.WAITING: _waiting,
    Phase.HELD: _held,
    Phase.STREAMING: _streaming,
}


def _stall(scene: Scene) -> None:
    scene.exchange.client_writable(False)
    scene.bench.tick(21)


def _too_large(scene: Scene) -> None:
    scene.exchange.request_body(b"x" * ((1 << 20) + 1))


def _overdue(scene: Scene) -> None:
    assert scene.exchange.query is not None
    scene.exchange.query.targets = Targets(4.0, None, scene.exchange.started_s, refuse=True)
    scene.bench.tick(4.5)


def _peer(act: Callable[[Peer], None]) -> Callable[[Scene], None]:
    def inflict(scene: Scene) -> None:
        assert scene.peer is not None
        act(scene.peer)

    return inflict


INFLICT: dict[Cause, Callable[[Scene], None]] = {
    Cause.SATURATED: lambda scene: scene.bench.tick(6),
    Cause.NO_REPLICA: lambda scene: scene.bench.tick(6),
    Cause.OUT_OF_REACH: _overdue,
    Cause.REFUSED: lambda scene: scene.bench.pool(1).fail(Cause.REFUSED),
    Cause.CONNECT_TIMEOUT: lambda scene: scene.bench.pool(1).fail(Cause.CONNECT_TIMEOUT),
    Cause.NO_SOCKET: lambda scene: scene.bench.pool(1).fail(Cause.NO_SOCKET),
    Cause.STALE: _peer(lambda peer: peer.lose()),
    Cause.RESET: _peer(lambda peer: peer.lose(ConnectionResetError())),
    Cause.FIRST_BYTE_TIMEOUT: lambda scene: scene.bench.tick(61),
    Cause.SILENCE: lambda scene: scene.bench.tick(31),
    Cause.DEADLINE: lambda scene: scene.bench.tick(4.5),
    Cause.BAD_RESPONSE: _peer(lambda peer: peer.send(b"no chunk and no status line\r\n\r\n")),
    Cause.SERVER_ERROR: _peer(lambda peer: peer.send(status_json(500))),
    Cause.BUSY: _peer(lambda peer: peer.send(status_json(503))),
    Cause.DRAIN: lambda scene: scene.exchange.cut(),
    Cause.UPLOAD_STALLED: lambda scene: scene.bench.tick(31),
    Cause.UPLOAD_TOO_LARGE: _too_large,
    Cause.CLIENT_LEFT: lambda scene: scene.exchange.client_gone(),
    Cause.CLIENT_STALLED: _stall,
}


def bring_about(phase: Phase, cause: Cause, bench: Bench) -> Scene:
    """Come to a phase, then have a cause happen."""
    upload = cause is Cause.UPLOAD_TOO_LARGE or (cause is Cause.UPLOAD_STALLED and phase is not Phase.READING)
    if cause in (Cause.SERVER_ERROR, Cause.BUSY):
        # The status line is what begins the phase.
        scene = _waiting(bench, upload)
    elif cause is Cause.STALE:
        bench.request()
        peer = bench.connect()
        peer.send(OK_JSON)
        exchange, client = bench.request()
        scene = Scene(bench, exchange, client, peer)
    elif cause is Cause.NO_REPLICA:
        for replica in bench.fleet.replicas.values():
            bench.fleet.set_up(replica, False)
        exchange, client = bench.request()
        scene = Scene(bench, exchange, client, None)
    else:
        scene = REACH[phase](bench, upload)
    assert scene.exchange.phase is (Phase.WAITING if cause in (Cause.SERVER_ERROR, Cause.BUSY) else phase)
    INFLICT[cause](scene)
    return scene


def a_bench(phase: Phase, cause: Cause, **options: Any) -> Bench:
    limits = dict(options.pop("limits", {}))
    if cause is Cause.DEADLINE:
        limits["deadline_s"] = 4.0
    if phase is Phase.QUEUED and "specs" not in options:
        options["specs"] = LIMITED[: options.get("replicas", 2)]
    return Bench(limits=limits, queue=10, **options)


# Rows of requests in two: tests/unit/test_prefill_leg.py plays them.
IN_TWO = (Cause.PREFILL_EXPIRED, Cause.HAND_OFF_FAILED)
ROWS = [(phase, cause) for phase, cause in TABLE if phase is not Phase.PREFILL and cause not in IN_TWO]


@pytest.mark.parametrize(("phase", "cause"), ROWS)
def test_the_action_of_the_row_is_taken(phase: Phase, cause: Cause) -> None:
    rule = TABLE[phase, cause]
    bench = a_bench(phase, cause)
    scene = bring_about(phase, cause, bench)
    check(scene, phase, rule.action, cause)


NO_RETRY: dict[str, dict[str, Any]] = {
    "no other replica": {"replicas": 1},
    "no budget": {"budget": RetryBudget(0.0, 0.0, lambda: 0.0)},
    "no attempts left": {"limits": {"max_attempts": 1}},
    "no time left": {"limits": {"retry_within_s": -1.0}},
}


RETRIED = [pair for pair, rule in TABLE.items() if rule.action is Action.RETRY_ELSEWHERE]


@pytest.mark.parametrize("why", NO_RETRY)
@pytest.mark.parametrize(("phase", "cause"), RETRIED)
def test_the_other_action_is_taken_when_no_retry_is_possible(phase: Phase, cause: Cause, why: str) -> None:
    bench = a_bench(phase, cause, **NO_RETRY[why])
    scene = bring_about(phase, cause, bench)
    check(scene, phase, TABLE[phase, cause].otherwise, cause)
    assert 2 not in bench.attempts()


def test_a_request_is_resent_once_only() -> None:
    bench = a_bench(Phase.WAITING, Cause.STALE)
    scene = bring_about(Phase.WAITING, Cause.STALE, bench)
    bench.connect()
    scene.exchange.replica_failed(Cause.STALE)
    check(scene, Phase.WAITING, TABLE[Phase.WAITING, Cause.STALE].otherwise, Cause.STALE)


def check(scene: Scene, phase: Phase, action: Action, cause: Cause) -> None:
    """The action has been taken, that one and no other."""
    bench, exchange, client = scene.bench, scene.exchange, scene.client
    rule = TABLE[phase, cause]
    # In front of a queued request are two that run; the deadline is over for them too.
    others = 2 if phase is Phase.QUEUED and cause not in (Cause.NO_REPLICA, Cause.DEADLINE) else 0
    if action is Action.RETRY_ELSEWHERE:
        assert client.sent == b""
        assert exchange.phase is Phase.CONNECTING
        assert exchange.attempts == 2
        second = bench.connect(2)
        second.send(OK_JSON)
        assert client.answer().body == b'{"answer":1}'
        assert client.end == "kept"
        assert bench.ejector.verdicts[-2:] == [("replica-1", rule.verdict), ("replica-2", Verdict.OK)]
        assert bench.tally.retries == {"replica-1": 1}
    elif action is Action.RESEND:
        assert exchange.attempts == 1
        again = bench.connect(1)
        again.send(OK_JSON)
        assert client.answer().body == b'{"answer":1}'
        assert bench.tally.retries == {}
    elif action is Action.ANSWER:
        answer = client.answer()
        assert (answer.status, answer.error["code"]) == (rule.status, rule.code)
        assert ("retry-after" in answer.headers) == (rule.status in (429, 503))
        assert answer.complete
        assert client.end == ("kept" if exchange.request_complete else "closed")
        assert "replica-" not in answer.error["message"]
    elif action is Action.PASS_THROUGH:
        answer = client.answer()
        assert STATUS_CAUSES[answer.status] is cause
        assert client.sent.endswith(b"}")
        assert answer.complete
        assert client.end == "kept"
    elif action is Action.BREAK_STREAM:
        answer = client.answer()
        assert not answer.complete
        assert client.end == "aborted"
        assert b"[DONE]" not in client.sent
        assert answer.body == TOKEN + b"data: " + answer.events[-1] + b"\n\n"
        assert b'"code":"%b"' % rule.code.encode() in answer.events[-1]
    else:
        assert action is Action.ABORT
        assert client.end == (None if cause is Cause.CLIENT_LEFT else "reset")
    if action not in (Action.RETRY_ELSEWHERE, Action.RESEND) and exchange.assignment is not None:
        assert bench.ejector.verdicts[-1] == ("replica-1", rule.verdict)
        assert (
            scene.peer is None
            or scene.peer.ended == "aborted"
            or scene.peer.connection.closed
            or (action is Action.PASS_THROUGH)
        )
    bench.ledger.check()
    assert sum(bench.ledger.in_flight) == others
    assert bench.tally.in_progress == others
    assert bench.plane.queue.waiting == 0


def test_every_cause_has_a_row_and_every_phase_ends_when_the_gateway_stops() -> None:
    assert {cause for _, cause in TABLE} == set(Cause)
    for phase in Phase:
        for cause in (Cause.DRAIN, Cause.DEADLINE, Cause.CLIENT_LEFT, Cause.CLIENT_STALLED):
            assert (phase, cause) in TABLE


def test_nothing_is_retried_once_the_client_has_bytes() -> None:
    for (phase, _), rule in TABLE.items():
        if phase is Phase.STREAMING:
            assert {rule.action, rule.otherwise} <= {Action.BREAK_STREAM, Action.ABORT}


def test_what_is_not_the_replicas_fault_is_not_held_against_it() -> None:
    innocent = {
        Cause.SATURATED,
        Cause.NO_REPLICA,
        Cause.OUT_OF_REACH,
        Cause.NO_SOCKET,
        Cause.STALE,
        Cause.DEADLINE,
        Cause.DRAIN,
        Cause.PREFILL_EXPIRED,
        Cause.HAND_OFF_FAILED,
        Cause.UPLOAD_STALLED,
        Cause.UPLOAD_TOO_LARGE,
        Cause.CLIENT_LEFT,
        Cause.CLIENT_STALLED,
    }
    for (_, cause), rule in TABLE.items():
        assert (rule.verdict is Verdict.CANCELLED) == (cause in innocent), cause
