"""Anything may happen to exchanges in any order: hypothesis plays clients, replicas, the clock and the operator.

Whatever it does, no counter goes below zero, all end at exactly zero, no request is sent again after a byte of its
answer has reached the client, and no client takes a cut answer for a whole one.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.exchanges import (
    DONE,
    OK_JSON,
    SSE_HEAD,
    SSE_UNTIL_CLOSE,
    TOKEN,
    Bench,
    FakeClient,
    FakePool,
    Peer,
    chunk,
    status_json,
)

from gateway.proxy.exchange import Exchange, Outcome
from gateway.proxy.failures import Cause
from gateway.proxy.retry_budget import RetryBudget
from gateway.replicas.breaker import BreakerSettings
from gateway.replicas.registry import ReplicaSpec

T = TypeVar("T")

_JSON_CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
RESPONSES = [
    OK_JSON,
    _JSON_CHUNKED + chunk(b'{"answer"') + chunk(b":1}") + chunk(b""),
    _JSON_CHUNKED + chunk(b"x" * 50) + chunk(b"yy" * 20) + chunk(b""),
    SSE_HEAD + chunk(TOKEN) + chunk(TOKEN) + chunk(DONE) + chunk(b""),
    SSE_HEAD + chunk(b'data: {"error":{"code":500}}\n\n') + chunk(b""),
    SSE_UNTIL_CLOSE + TOKEN + DONE,
    SSE_UNTIL_CLOSE + TOKEN,
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + b'{"answer":1}',
    b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nhello",
    b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
    status_json(400),
    status_json(429),
    status_json(429, "retry-after: 3\r\n"),
    status_json(500),
    status_json(503),
    b"HTTP/1.1 503 X\r\nconnection: close\r\n\r\nbusy",
    b"garbage\r\n\r\n",
    SSE_HEAD + chunk(TOKEN) + b"no chunk\r\n",
    _JSON_CHUNKED + chunk(b'{"answer"') + b"no chunk\r\n",
]

WHICH = st.integers(0, 9)


def _pick(items: Sequence[T], which: int) -> T:
    return items[which % len(items)]


class AnyOrder(RuleBasedStateMachine):
    """See the module."""

    @initialize(
        replicas=st.integers(1, 3),
        most=st.sampled_from([None, None, 1, 2]),
        budget_per_s=st.sampled_from([0.0, 0.1, 10.0]),
        deadline_s=st.sampled_from([0.0, 0.0, 50.0]),
        queue=st.sampled_from([0, 1, 10]),
        attempts=st.integers(1, 3),
        held=st.booleans(),
    )
    def begin(
        self,
        replicas: int,
        most: int | None,
        budget_per_s: float,
        deadline_s: float,
        queue: int,
        attempts: int,
        held: bool,
    ) -> None:
        specs = [ReplicaSpec(f"http://r{n}.test", models=("m",), max_in_flight=most) for n in range(replicas)]
        self.bench = Bench(
            specs=specs,
            limits={"deadline_s": deadline_s, "max_attempts": attempts, "max_held_bytes": 64},
            queue=queue,
            slow_start_s=5.0,
            breaker=BreakerSettings(consecutive_failures=2, base_ejection_s=5.0),
        )
        bench = self.bench
        if held:
            # Writes wait for the end of the event loop's turn, as they do live.
            bench.plane.outbox.open(bench.soon.append)
        bench.plane._budget = RetryBudget(0.2, budget_per_s, bench.clock)
        self.added = replicas
        self.pools: list[FakePool] = []
        self.pending: dict[Any, bytes] = {}
        self.answered: dict[Any, Any] = {}
        self.clients: dict[Exchange, FakeClient] = {}
        self.methods: dict[Exchange, str] = {}
        for replica in bench.fleet.replicas.values():
            self._follow(replica)

    def _follow(self, replica: Any) -> None:
        pool = self.bench.plane.pool(replica)
        assert isinstance(pool, FakePool)
        self.pools.append(pool)

    # -- clients

    @rule(stream=st.booleans(), version_1_0=st.booleans(), accepted=st.booleans())
    def chat(self, stream: bool, version_1_0: bool, accepted: bool) -> None:
        exchange, client = self.bench.request(stream=stream, version_1_0=version_1_0)
        self.clients[exchange], self.methods[exchange] = client, "POST"
        if accepted:
            for pool in self.dials():
                pool.connect()

    @rule(chunked=st.booleans())
    def upload(self, chunked: bool) -> None:
        exchange, client = self.bench.upload(chunked=chunked)
        self.clients[exchange], self.methods[exchange] = client, "POST"

    @rule(method=st.sampled_from(["GET", "HEAD"]))
    def bodiless(self, method: str) -> None:
        exchange, client = self.bench.start(method=method, target="/v1/files")
        exchange.request_end()
        self.clients[exchange], self.methods[exchange] = client, method

    @rule()
    def half_a_body(self) -> None:
        exchange, client = self.bench.start((("content-type", "application/json"), ("content-length", "1000")))
        exchange.request_body(b"{")
        self.clients[exchange], self.methods[exchange] = client, "POST"

    @precondition(lambda self: self.running())
    @rule(which=WHICH, size=st.sampled_from([1, 1000, 1 << 21]))
    def more_body(self, which: int, size: int) -> None:
        exchange = _pick(self.running(), which)
        if not exchange.request_complete and not self.clients[exchange].paused:
            exchange.request_body(b"x" * size)

    @precondition(lambda self: self.running())
    @rule(which=WHICH)
    def end_of_body(self, which: int) -> None:
        exchange = _pick(self.running(), which)
        if not exchange.request_complete and not self.clients[exchange].paused:
            exchange.request_end()

    @precondition(lambda self: len(self.running()) > 2)
    @rule(which=WHICH)
    def client_leaves(self, which: int) -> None:
        _pick(self.running(), which).client_gone()

    @precondition(lambda self: self.running())
    @rule(which=WHICH, writable=st.booleans())
    def client_reads(self, which: int, writable: bool) -> None:
        _pick(self.running(), which).client_writable(writable)

    # -- replicas

    def dials(self) -> list[FakePool]:
        return [pool for pool in self.pools if pool.dialled]

    def peers(self) -> list[Peer]:
        return [
            Peer(connection)
            for pool in self.pools
            for connection in pool.connections
            if not connection.closed and connection.transport.ended is None  # type: ignore[attr-defined]
        ]

    @precondition(lambda self: self.dials())
    @rule(which=WHICH)
    def accept(self, which: int) -> None:
        _pick(self.dials(), which).connect()

    @precondition(lambda self: self.dials())
    @rule(which=WHICH, cause=st.sampled_from([Cause.REFUSED, Cause.CONNECT_TIMEOUT, Cause.NO_SOCKET]))
    def refuse(self, which: int, cause: Cause) -> None:
        _pick(self.dials(), which).fail(cause)

    def busy(self) -> list[Peer]:
        return [peer for peer in self.peers() if peer.connection.exchange and not peer.transport.paused]

    @precondition(lambda self: self.busy())
    @rule(which=WHICH, response=st.sampled_from(RESPONSES), share=st.sampled_from([0.1, 0.5, 0.8, 1.0]))
    def respond(self, which: int, response: bytes, share: float) -> None:
        connection = _pick(self.busy(), which).connection
        if connection not in self.pending and self.answered.get(connection) is connection.exchange:
            # All has been said, and the end is the connection's.
            return
        self.answered[connection] = connection.exchange
        rest = self.pending.pop(connection, response)
        cut = max(1, int(len(rest) * share))
        if rest[cut:]:
            self.pending[connection] = rest[cut:]
        connection.data_received(rest[:cut])
        if connection.exchange is None:
            self.pending.pop(connection, None)

    @precondition(lambda self: self.busy())
    @rule(which=WHICH, response=st.sampled_from(RESPONSES))
    def respond_and_go_on(self, which: int, response: bytes) -> None:
        self.respond(which, response, 0.9)

    @precondition(lambda self: self.pending)
    @rule()
    def say_the_rest(self) -> None:
        connection, rest = self.pending.popitem()
        if connection.exchange is not None and not connection.transport.paused:
            connection.data_received(rest)

    @precondition(lambda self: self.peers())
    @rule(which=WHICH, error=st.sampled_from([None, ConnectionResetError()]))
    def connection_ends(self, which: int, error: Exception | None) -> None:
        _pick(self.peers(), which).lose(error)

    @precondition(lambda self: self.peers())
    @rule(which=WHICH, writable=st.booleans())
    def replica_reads(self, which: int, writable: bool) -> None:
        connection = _pick(self.peers(), which).connection
        if writable:
            connection.resume_writing()
        else:
            connection.pause_writing()

    # -- time and operators

    @rule(seconds=st.sampled_from([0.1, 2.0, 6.0, 25.0, 31.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        bench = self.bench
        bench.tick(seconds)
        due = [timer for timer in bench.timers if timer[0] <= bench.clock.now_s]
        bench.timers[:] = [timer for timer in bench.timers if timer[0] > bench.clock.now_s]
        for _, call in due:
            call()

    @rule()
    def turn(self) -> None:
        self.bench.turn()

    @precondition(lambda self: len(self.running()) > 2)
    @rule(which=WHICH)
    def drained(self, which: int) -> None:
        _pick(self.running(), which).cut()

    @precondition(lambda self: self.bench.fleet.replicas)
    @rule(which=WHICH, act=st.sampled_from(["down", "up", "restarted", "draining", "remove"]))
    def replica_changes(self, which: int, act: str) -> None:
        fleet = self.bench.fleet
        replica = fleet.replicas[_pick(sorted(fleet.replicas), which)]
        if act == "remove":
            fleet.remove(replica.name)
        elif act == "restarted":
            fleet.restarted(replica)
        elif act == "draining":
            fleet.set_draining(replica, not replica.draining)
        else:
            fleet.set_up(replica, act == "up")

    @rule()
    def replica_joins(self) -> None:
        if len(self.bench.fleet.replicas) < 3:
            self.added += 1
            replica = self.bench.fleet.add(ReplicaSpec(f"http://r{self.added}.test", models=("m",)))
            self.bench.fleet.set_up(replica, True)
            self._follow(replica)

    # -- what must hold

    def running(self) -> list[Exchange]:
        return [exchange for exchange in self.clients if exchange.outcome is None]

    @invariant()
    def no_counter_is_negative(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.ledger.check()
        assert self.bench.tally.in_progress == len(self.running()) == len(self.bench.plane._exchanges)
        # Charged to the ledger is exactly what has a replica and runs.
        charged = [exchange for exchange in self.running() if exchange.assignment is not None]
        present = [e for e in charged if e.assignment and self.bench.fleet.has(e.assignment.replica)]
        assert sum(self.bench.ledger.in_flight) == len(present)
        assert self.bench.plane.queue.waiting == len(self.running()) - len(charged) - self._reading()

    def _reading(self) -> int:
        return sum(exchange.phase == "reading" for exchange in self.running())

    @invariant()
    def nothing_is_sent_again_after_a_byte_of_an_answer(self) -> None:
        if not hasattr(self, "bench"):
            return
        for exchange, client in self.clients.items():
            if b"\r\n\r\n" in client.sent.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b""):
                assert exchange._dial is None
                assert exchange.outcome is not None or exchange.phase == "streaming"
            assert exchange.attempts <= self.bench.plane.limits.max_attempts

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for exchange in self.running():
            exchange.client_gone()
        self.bench.turn()
        self.bench.assert_idle()
        for exchange, client in self.clients.items():
            self._understood(exchange, client)

    def _understood(self, exchange: Exchange, client: FakeClient) -> None:
        """The bytes make sense to a client that knows HTTP, and a whole answer looks whole only if it is."""
        if client.end is None:
            assert exchange.outcome is Outcome.CANCELLED
            return
        if client.end == "reset" and not client.sent:
            return
        answer = client.answer(self.methods[exchange])
        assert answer.trailing == b""
        if client.end in ("kept", "closed"):
            assert answer.complete
        else:
            assert exchange.outcome in (Outcome.BROKEN, Outcome.CANCELLED)
            assert not answer.complete
            if exchange.outcome is Outcome.BROKEN and "event-stream" in answer.headers.get("content-type", ""):
                assert answer.events[-1].startswith(b'{"error"')


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("gateway")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def play(seed: int, steps: int, seen: Counter[str]) -> None:
    """The same machine with the common things common: most requests are served, few replicas change."""
    rng = random.Random(seed)
    machine = AnyOrder()
    machine.begin(
        rng.randint(1, 3),
        rng.choice([None, None, 1, 2]),
        rng.choice([0.0, 1.0, 10.0]),
        rng.choice([0.0, 50.0]),
        rng.choice([0, 2, 10]),
        rng.randint(1, 3),
        seed % 2 == 1,
    )

    def n() -> int:
        return rng.randrange(100)

    acts: list[tuple[int, Callable[[], object]]] = [
        (30, lambda: machine.chat(rng.random() < 0.5, rng.random() < 0.1, rng.random() < 0.8)),
        (3, lambda: machine.upload(rng.random() < 0.5)),
        (2, lambda: machine.bodiless(rng.choice(["GET", "HEAD"]))),
        (2, machine.half_a_body),
        (3, lambda: machine.running() and machine.more_body(n(), rng.choice([1, 1000, 1 << 21]))),
        (5, lambda: machine.running() and machine.end_of_body(n())),
        (3, lambda: machine.running() and machine.client_leaves(n())),
        (5, lambda: machine.running() and machine.client_reads(n(), rng.random() < 0.6)),
        (20, lambda: machine.dials() and machine.accept(n())),
        (3, lambda: machine.dials() and machine.refuse(n(), rng.choice([Cause.REFUSED, Cause.CONNECT_TIMEOUT]))),
        (60, lambda: machine.busy() and machine.respond(n(), rng.choice(RESPONSES), rng.choice([0.3, 0.8, 0.97, 1.0]))),
        (25, lambda: machine.pending and machine.say_the_rest()),
        (4, lambda: machine.peers() and machine.connection_ends(n(), rng.choice([None, ConnectionResetError()]))),
        (2, lambda: machine.peers() and machine.replica_reads(n(), rng.random() < 0.6)),
        (6, lambda: machine.time_passes(rng.choice([0.1, 2.0, 6.0, 31.0]))),
        (20, machine.turn),
        (1, lambda: machine.running() and machine.drained(n())),
        (
            2,
            lambda: machine.bench.fleet.replicas and machine.replica_changes(n(), rng.choice(["down", "up", "remove"])),
        ),
        (2, machine.replica_joins),
    ]
    weights = [weight for weight, _ in acts]
    for _, act in rng.choices(acts, weights, k=steps):
        act()
        machine.no_counter_is_negative()
        machine.nothing_is_sent_again_after_a_byte_of_an_answer()
    machine.teardown()
    seen.update(str(exchange.outcome) for exchange in machine.clients)


def test_long_days() -> None:
    seen: Counter[str] = Counter()
    for seed in range(25):
        play(seed, 300, seen)
    # It was no quiet day: everything that can come of a request has come of some.
    assert {outcome for outcome in Outcome if outcome is not Outcome.LOCAL} <= seen.keys()
    assert seen["ok"] > 100
