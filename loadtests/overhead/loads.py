"""Plain requests of the overhead benchmark, in a closed and in an open loop, on bare asyncio protocols."""

import asyncio
import time
from abc import ABC, abstractmethod
from array import array
from collections import Counter, deque
from collections.abc import Callable
from typing import Self, cast

import httptools

from loadtests.overhead.prompts import Requests

_RETRY_S = 0.05
_TICK_S = 0.001
_OPEN_LOOP_MAX_CONNECTIONS = 512


class Load(ABC):
    """What all loads count.

    Attributes:
        requests: what is sent.
        completed: requests answered, or events received.
        total: requests sent, or streams opened.
        reads: reads from streams.
        errors: by kind.
        latencies_s: of answered requests, since `mark`.
    """

    def __init__(self, port: int, requests: Requests) -> None:
        """Prepare a load on a port of this machine."""
        self.completed = 0
        self.total = 0
        self.reads = 0
        self.errors: Counter[str] = Counter()
        self.latencies_s = array("d")
        self._port = port
        self.requests = requests
        self._running = True
        self._tasks: set[asyncio.Task[None]] = set()

    def mark(self) -> None:
        """The warm-up is over."""
        self.latencies_s = array("d")

    def _open(self, protocol: Callable[[Self], asyncio.Protocol]) -> None:
        """Connect in the background."""
        task = asyncio.create_task(self._connect(protocol))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, protocol: Callable[[Self], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        while self._running:
            try:
                await loop.create_connection(lambda: protocol(self), "127.0.0.1", self._port)
            except OSError:
                self.errors["connect"] += 1
                await asyncio.sleep(_RETRY_S)
            else:
                return

    def _give_up_connecting(self) -> None:
        for task in self._tasks:
            task.cancel()

    @abstractmethod
    async def start(self) -> None:
        """Open the first connections."""

    @abstractmethod
    async def finish(self, timeout_s: float) -> None:
        """Send nothing more, and wait for what is under way."""


async def happens(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event; returns whether it has come in time."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True


class Exchange(asyncio.Protocol):
    """A keep-alive connection that carries one request at a time."""

    __slots__ = ("_load", "_parser", "_transport", "busy", "sent_s")

    def __init__(self, load: "RequestLoad") -> None:
        self._load = load
        self._parser = httptools.HttpResponseParser(self)
        self.busy = False
        self.sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Tell the load."""
        self._transport = cast(asyncio.Transport, transport)
        self._load.connections.add(self)
        self._load.idle(self)

    def send(self, request: tuple[bytes, bytes, bytes], started_s: float) -> None:
        """Send a request whose latency counts from `started_s`."""
        self.busy = True
        self.sent_s = started_s
        self._transport.writelines(request)

    def data_received(self, data: bytes) -> None:
        """Parse."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._load.errors["malformed"] += 1
            self.busy = False
            self._transport.abort()

    def on_message_complete(self) -> None:
        """The answer is there."""
        load, parser = self._load, self._parser
        status = parser.get_status_code()
        if status != 200:
            load.errors[f"http_{status}"] += 1
        self.busy = False
        load.answered(time.perf_counter() - self.sent_s)
        if parser.should_keep_alive():
            load.idle(self)
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the load."""
        if self.busy:
            self._load.errors["reset"] += 1
        self._load.lost(self)

    def close(self) -> None:
        """Close now."""
        self._transport.abort()


class RequestLoad(Load):
    """Plain requests on keep-alive connections."""

    def __init__(self, port: int, requests: Requests) -> None:
        super().__init__(port, requests)
        self.connections: set[Exchange] = set()
        self._settled = asyncio.Event()

    def answered(self, latency_s: float) -> None:
        """Count an answer."""
        self.completed += 1
        self.latencies_s.append(latency_s)

    @abstractmethod
    def idle(self, connection: Exchange) -> None:
        """A connection has nothing to do."""

    def lost(self, connection: Exchange) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if self._running:
            self._open(Exchange)
        self._check_settled()

    def _send(self, connection: Exchange, started_s: float) -> None:
        self.total += 1
        connection.send(next(self.requests), started_s)

    def _check_settled(self) -> None:
        if not self._running and not any(connection.busy for connection in self.connections):
            self._settled.set()

    async def finish(self, timeout_s: float) -> None:
        """Wait for the answers under way; those that do not come count as `timeout`."""
        self._running = False
        self._check_settled()
        if not await happens(self._settled, timeout_s):
            self.errors["timeout"] += sum(connection.busy for connection in self.connections)
        self._give_up_connecting()
        for connection in list(self.connections):
            connection.busy = False
            connection.close()


class ClosedLoop(RequestLoad):
    """Each connection sends its next request as soon as the last is answered."""

    def __init__(self, port: int, requests: Requests, connections: int) -> None:
        """Prepare.

        Args:
            port: of the gateway.
            requests: what to send.
            connections: requests in flight at any time.
        """
        super().__init__(port, requests)
        self._count = connections

    async def start(self) -> None:
        """Open all connections."""
        for _ in range(self._count):
            self._open(Exchange)

    def idle(self, connection: Exchange) -> None:
        """Send the next."""
        if self._running:
            self._send(connection, time.perf_counter())
        else:
            self._check_settled()


class OpenLoop(RequestLoad):
    """Requests at a fixed rate; one that finds no idle connection waits, and its latency with it."""

    def __init__(self, port: int, requests: Requests, rate_per_s: float, connections: int) -> None:
        """Prepare.

        Args:
            port: of the gateway.
            requests: what to send.
            rate_per_s: requests per second.
            connections: to open at the start; more follow when they do not suffice.
        """
        super().__init__(port, requests)
        self._rate_per_s = rate_per_s
        self._first = connections
        self._idle: deque[Exchange] = deque()
        self._waiting: deque[float] = deque()
        self._opened = 0
        self._due = 0

    async def start(self) -> None:
        """Open the first connections and start the clock."""
        for _ in range(self._first):
            self._open_one()
        loop = asyncio.get_running_loop()
        loop.call_later(_TICK_S, self._tick, loop, loop.time())

    def _open_one(self) -> None:
        self._opened += 1
        self._open(Exchange)

    def _tick(self, loop: asyncio.AbstractEventLoop, started_s: float) -> None:
        if not self._running:
            return
        due = int((loop.time() - started_s) * self._rate_per_s)
        now_s = time.perf_counter()
        for _ in range(due - self._due):
            if self._idle:
                self._send(self._idle.popleft(), now_s)
            else:
                self._waiting.append(now_s)
                if self._opened < _OPEN_LOOP_MAX_CONNECTIONS:
                    self._open_one()
        self._due = due
        loop.call_later(_TICK_S, self._tick, loop, started_s)

    def idle(self, connection: Exchange) -> None:
        """Send the longest waiting, if any."""
        if self._waiting and self._running:
            self._send(connection, self._waiting.popleft())
        else:
            self._idle.append(connection)
            self._check_settled()

    def lost(self, connection: Exchange) -> None:
        """A connection is gone; another takes its place when it is needed."""
        self._opened -= 1
        self.connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._waiting and self._running:
            self._open_one()
        self._check_settled()

    async def finish(self, timeout_s: float) -> None:
        """As ever; requests that still wait for a connection count as `timeout`."""
        if self._waiting:
            self.errors["timeout"] += len(self._waiting)
        await super().finish(timeout_s)
