"""Exchanges without a network: the real exchange, router, ledger and replica protocol; fake sockets and a fake clock.

A test plays both ends in bytes: `bench.request(...)` is the client, `bench.replica(...)` the connection on which the
replica answers, `bench.clock` the time.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import h11

from gateway.estimator.predictor import Predictor
from gateway.prefixes.index import PrefixIndex
from gateway.prompt.blocks import DEFAULT_SCHEDULE
from gateway.prompt.tokens import TokensPerByte
from gateway.proxy.admission import AdmissionQueue
from gateway.proxy.exchange import Exchange
from gateway.proxy.failures import Cause
from gateway.proxy.heads import RequestHead
from gateway.proxy.limits import PlaneLimits
from gateway.proxy.outbox import Outbox
from gateway.proxy.plane import DataPlane
from gateway.proxy.retry_budget import RetryBudget
from gateway.proxy.routes import Routes
from gateway.proxy.tally import Tally
from gateway.proxy.upstream import Dial, ReplicaConnection, ReplicaPool, ResponseSink
from gateway.replicas.breaker import BreakerSettings, Outcome
from gateway.replicas.ejection import Attempt, Ejector
from gateway.replicas.load import LoadLedger
from gateway.replicas.registry import Fleet, Replica, ReplicaSpec
from gateway.routing.router import Router
from policies.types import Candidates, Choice, Column, Request

LIMITS = PlaneLimits(
    max_body_bytes=1 << 20,
    max_head_bytes=65536,
    max_headers=128,
    max_connections=1000,
    max_held_bytes=1 << 16,
    write_buffer_bytes=1 << 16,
    max_idle_connections=8,
    retry_after_s=2,
    head_timeout_s=10.0,
    body_timeout_s=30.0,
    idle_timeout_s=75.0,
    connect_timeout_s=3.0,
    first_byte_timeout_s=60.0,
    silence_timeout_s=30.0,
    client_stall_timeout_s=20.0,
    deadline_s=0.0,
    queue_wait_s=5.0,
    replica_keepalive_s=4.0,
    max_attempts=3,
    retry_within_s=100.0,
)


class Clock:
    """Virtual monotonic seconds."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def __iadd__(self, seconds: float) -> "Clock":
        self.now_s += seconds
        return self


class FakeTransport(asyncio.Transport):
    """Records what is done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.writes = 0
        self.paused = False
        self.ended: str | None = None
        self.when_full: Callable[[], None] | None = None

    def write(self, data: bytes) -> None:  # type: ignore[override]
        assert self.ended is None, "written after the end"
        self.sent += data
        self.writes += 1
        if self.when_full is not None:
            self.when_full()
            self.when_full = None

    def writelines(self, list_of_data: Iterable[bytes]) -> None:  # type: ignore[override]
        self.write(b"".join(list_of_data))

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return self.ended is not None

    def abort(self) -> None:
        self.ended = self.ended or "aborted"

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class FakePool(ReplicaPool):
    """The real pool of idle connections; dialling waits for the test to decide."""

    def __init__(self, replica: Replica, limits: PlaneLimits, now: Callable[[], float], outbox: Outbox) -> None:
        super().__init__(replica, limits, None, now, outbox)
        self.dialled: list[Dial] = []
        self.connections: list[ReplicaConnection] = []

    def dial(self, exchange: ResponseSink) -> Dial:
        dial = Dial(exchange)
        self.dialled.append(dial)
        return dial

    def connect(self, *, full: bool = False) -> "Peer":
        """The oldest dial succeeds.

        Args:
            full: the first write fills all buffers on the way to the replica.
        """
        dial = self.dialled.pop(0)
        connection = ReplicaConnection(self)
        transport = FakeTransport()
        connection.connection_made(transport)
        if full:
            transport.when_full = connection.pause_writing
        self.connections.append(connection)
        if dial.exchange is not None:
            dial.exchange.connected(connection)
        else:
            self.release(connection)
        return Peer(connection)

    def fail(self, cause: Cause) -> None:
        """The oldest dial fails."""
        dial = self.dialled.pop(0)
        if dial.exchange is not None:
            dial.exchange.connect_failed(cause)


class Peer:
    """The replica's end of one connection."""

    def __init__(self, connection: ReplicaConnection) -> None:
        self.connection = connection

    @property
    def transport(self) -> FakeTransport:
        transport = self.connection.transport
        assert isinstance(transport, FakeTransport)
        return transport

    @property
    def received(self) -> bytes:
        return self.transport.sent

    @property
    def ended(self) -> str | None:
        """How the gateway ended the connection; None if it has not."""
        return self.transport.ended

    def send(self, data: bytes) -> None:
        """Bytes of the replica, unless the gateway has closed or does not read."""
        if self.transport.ended is None and not self.transport.paused:
            self.connection.data_received(data)

    def lose(self, error: Exception | None = None) -> None:
        """The connection ends: a close by default, with an error a reset."""
        self.connection.connection_lost(error)


class FakeClient:
    """The client's connection as an exchange sees it."""

    def __init__(self) -> None:
        self.peer = "192.0.2.1"
        self.sent = b""
        self.end: str | None = None
        """kept, closed, aborted or reset."""
        self.paused = False

    def write(self, data: bytes) -> None:
        assert self.end is None, "written after the end"
        assert data, "an empty write would be an empty chunk"
        self.sent += data

    def finished(self, keep_alive: bool) -> None:
        assert self.end is None
        self.end = "kept" if keep_alive else "closed"

    def abort(self, *, reset: bool) -> None:
        assert self.end is None
        self.end = "reset" if reset else "aborted"

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def answer(self, method: str = "POST") -> "Answer":
        return Answer(self, method)


class Answer:
    """What a client that knows HTTP makes of the bytes."""

    def __init__(self, client: FakeClient, method: str) -> None:
        http = h11.Connection(h11.CLIENT)
        http.send(h11.Request(method=method, target="/", headers=[("host", "x"), ("content-length", "0")]))
        http.send(h11.EndOfMessage())
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False
        http.receive_data(client.sent)
        if client.end not in (None, "kept"):
            http.receive_data(b"")
        try:
            while True:
                event = http.next_event()
                if isinstance(event, h11.Response):
                    self.status = event.status_code
                    self.headers = {k.decode(): v.decode("latin-1") for k, v in event.headers}
                elif isinstance(event, h11.Data):
                    self.body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    # For a body that ends with the connection, a reset is no end.
                    self.complete = client.end != "reset"
                    break
                elif isinstance(event, h11.InformationalResponse):
                    continue
                else:
                    break
        except h11.RemoteProtocolError:
            self.complete = False
        self.trailing = http.trailing_data[0]

    @property
    def error(self) -> dict[str, Any]:
        """The error object of a JSON answer."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)

    @property
    def events(self) -> list[bytes]:
        """The payloads of the server-sent events."""
        return [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]


class InOrder:
    """The lowest slot: tests know where an attempt goes."""

    name = "in_order"
    reads: frozenset[Column] = frozenset()

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        return Choice(candidates.slots[0], "lowest slot")


class CountingLedger(LoadLedger):
    """The load ledger, watched: no column may ever be below zero."""

    def check(self) -> None:
        for column in (self.in_flight, self.decodes, self.prefill_tokens, self.prefill_work_s, self.kv_tokens):
            assert all(value >= 0 for value in column), "a counter is negative"

    def idle(self) -> bool:
        columns = (self.in_flight, self.decodes, self.prefill_tokens, self.prefill_work_s, self.kv_tokens)
        return all(value == 0 for column in columns for value in column)


class WatchedEjector(Ejector):
    """The real one; remembers what was said of whom."""

    def __init__(self, fleet: Fleet, settings: BreakerSettings, call_later: Any) -> None:
        super().__init__(fleet, settings, call_later)
        self.verdicts: list[tuple[str, Outcome]] = []

    def record(self, attempt: Attempt, outcome: Outcome, now_s: float) -> None:
        self.verdicts.append((attempt.replica.name, outcome))
        super().record(attempt, outcome, now_s)


class Bench:
    """A data plane on a virtual clock with fake connections."""

    def __init__(
        self,
        replicas: int = 2,
        *,
        budget: RetryBudget | None = None,
        limits: Mapping[str, Any] | None = None,
        specs: Sequence[ReplicaSpec] | None = None,
        breaker: BreakerSettings | None = None,
        queue: int = 0,
        slow_start_s: float = 0.0,
    ) -> None:
        self.clock = Clock()
        self.fleet = Fleet()
        specs = specs or [ReplicaSpec(f"http://replica-{n}.test:8000", models=("m",)) for n in range(1, replicas + 1)]
        for spec in specs:
            self.fleet.set_up(self.fleet.add(spec), True)
        self.ledger = CountingLedger()
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.soon: list[Callable[[], None]] = []
        self.ejector = WatchedEjector(self.fleet, breaker or BreakerSettings(), self._call_later)
        self.router = Router(
            self.fleet,
            self.ledger,
            self.ejector,
            PrefixIndex(DEFAULT_SCHEDULE),
            TokensPerByte(),
            Predictor(),
            InOrder(),
            slow_start_s=slow_start_s,
        )
        self.tally = Tally()
        self.plane = _BenchPlane(
            self.router,
            Routes(),
            replace(LIMITS, **(limits or {})),
            self.tally,
            budget or RetryBudget(0.2, 10.0, self.clock),
            AdmissionQueue(queue, self.soon.append),
            now=self.clock,
        )
        self.exchanges: list[Exchange] = []

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> "_Timer":
        self.timers.append((self.clock.now_s + delay_s, call))
        return _Timer()

    def pool(self, number: int = 1) -> FakePool:
        """Connections to the n-th replica."""
        pool = self.plane.pool(self.fleet.replicas[f"replica-{number}"])
        assert isinstance(pool, FakePool)
        return pool

    def connect(self, number: int = 1) -> Peer:
        """The n-th replica accepts the oldest connection attempt."""
        return self.pool(number).connect()

    def start(
        self,
        headers: Sequence[tuple[str, str]] = (),
        *,
        method: str = "POST",
        target: str = "/v1/chat/completions",
        version_1_0: bool = False,
        keep_alive: bool = True,
        client: FakeClient | None = None,
    ) -> tuple[Exchange, FakeClient]:
        """The head of a request arrives."""
        client = client or FakeClient()
        lines = [(b"Host", b"gateway"), *((k.encode(), v.encode()) for k, v in headers)]
        head = RequestHead(method.encode(), target.encode(), lines, version_1_0, keep_alive)
        exchange = Exchange(self.plane, client, head)
        self.exchanges.append(exchange)
        exchange.begin()
        return exchange, client

    def request(self, *, stream: bool = False, version_1_0: bool = False) -> tuple[Exchange, FakeClient]:
        """A whole chat request arrives."""
        content = {"model": "m", "messages": [{"role": "user", "content": "Hello " * 100}], "stream": stream}
        body = json.dumps(content).encode()
        headers = (("content-type", "application/json"), ("content-length", str(len(body))))
        exchange, client = self.start(headers, version_1_0=version_1_0, keep_alive=not version_1_0)
        exchange.request_body(body)
        exchange.request_end()
        return exchange, client

    def upload(self, *, chunked: bool = True) -> tuple[Exchange, FakeClient]:
        """The head of an upload arrives."""
        framing = ("transfer-encoding", "chunked") if chunked else ("content-length", "1000")
        return self.start(
            (("content-type", "multipart/form-data; boundary=x"), framing), target="/v1/audio/transcriptions"
        )

    def tick(self, seconds: float) -> None:
        """Time passes, and limits are looked at."""
        self.clock += seconds
        self.plane.check_limits(self.clock.now_s)

    def turn(self) -> None:
        """One turn of the event loop: what was put off happens."""
        due, self.soon[:] = list(self.soon), []
        for call in due:
            call()

    def attempts(self) -> dict[int, int]:
        """Requests written to each replica's connections, by number."""
        seen: dict[int, int] = {}
        for number in range(1, len(self.fleet.replicas) + 1):
            pool = self.pool(number)
            requests = sum(_requests_in(connection) for connection in pool.connections)
            if requests:
                seen[number] = requests
        return seen

    def assert_idle(self) -> None:
        """Nothing is held any more."""
        self.ledger.check()
        assert self.ledger.idle()
        assert self.tally.in_progress == 0
        assert not self.plane._exchanges


def _requests_in(connection: ReplicaConnection) -> int:
    transport = connection.transport
    assert isinstance(transport, FakeTransport)
    return transport.sent.count(b" HTTP/1.1\r\n")


class _Timer:
    def cancel(self) -> None:
        return None


class _BenchPlane(DataPlane):
    def _new_pool(self, replica: Replica) -> ReplicaPool:
        return FakePool(replica, self.limits, self.now, self.outbox)


OK_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 12\r\n\r\n" + b'{"answer":1}'
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SSE_UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; of b"" the last."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def status_json(status: int, headers: str = "") -> bytes:
    """A whole JSON error answer of a replica."""
    body = b'{"error":{"message":"no","type":"x","param":null,"code":%d}}' % status
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body
