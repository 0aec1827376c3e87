"""The loads of the overhead benchmark, on bare asyncio protocols: no object and no parsing per streamed chunk."""

import asyncio
import time
from array import array
from collections import Counter, deque
from typing import cast

import httptools

from loadtests.overhead.prompts import Requests

_RETRY_S = 0.05
_TICK_S = 0.001
_OPEN_LOOP_MAX_CONNECTIONS = 512
_STREAMS_PER_BATCH = 16
_LAST_CHUNK = b"0\r\n\r\n"
_END_OF_BODY = b"\r\n" + _LAST_CHUNK  # with the end of the line before, which no head ends with
_EVENT = b"data: "
_END_OF_EVENT = b"\n\r\n"


class Load:
    """What all loads count.

    Attributes:
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
        self._requests = requests
        self._running = True
        self._tasks: set[asyncio.Task[None]] = set()

    def mark(self) -> None:
        """The warm-up is over."""
        self.latencies_s = array("d")

    def _open(self, protocol: type["Exchange"] | type["Stream"]) -> None:
        """Connect in the background."""
        task = asyncio.create_task(self._connect(protocol))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, protocol: "type[Exchange] | type[Stream]") -> None:
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

    async def start(self) -> None:
        """Open the first connections."""
        raise NotImplementedError

    async def finish(self, timeout_s: float) -> None:
        """Send nothing more, and wait for what is under way."""
        raise NotImplementedError

    async def _wait_until(self, condition: "asyncio.Event", timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(condition.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


class Exchange(asyncio.Protocol):
    """A keep-alive connection that carries one request at a time."""

    __slots__ = ("_load", "_parser", "_transport", "busy", "sent_s")

    def __init__(self, load: Load) -> None:
        self._load = cast(RequestLoad, load)
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

    def idle(self, connection: Exchange) -> None:
        """A connection has nothing to do."""
        raise NotImplementedError

    def lost(self, connection: Exchange) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if self._running:
            self._open(Exchange)
        self._check_settled()

    def _send(self, connection: Exchange, started_s: float) -> None:
        self.total += 1
        connection.send(next(self._requests), started_s)

    def _check_settled(self) -> None:
        if not self._running and not any(connection.busy for connection in self.connections):
            self._settled.set()

    async def finish(self, timeout_s: float) -> None:
        """Wait for the answers under way; those that do not come count as `timeout`."""
        self._running = False
        self._check_settled()
        if not await self._wait_until(self._settled, timeout_s):
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


class Stream(asyncio.Protocol):
    """A connection with one streamed answer, of which only the events are counted."""

    __slots__ = ("_load", "_rest", "_started", "_transport", "done")

    def __init__(self, load: Load) -> None:
        self._load = cast(Streams, load)
        self._rest = b""
        self._started = False
        self.done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast(asyncio.Transport, transport)
        self._load.opened(self)
        self._transport.writelines(next(self._load.requests))

    def data_received(self, data: bytes) -> None:
        """Count."""
        load = self._load
        load.reads += 1
        rest = self._rest
        if rest:
            data = rest + data
            load.completed -= rest.count(_EVENT)
        load.completed += data.count(_EVENT)
        # Reads end with an event as a rule. Where they do not, a mark or the end of the body may be cut in two.
        self._rest = b"" if data.endswith(_END_OF_EVENT) else data[1 - len(_END_OF_BODY) :]
        if not self._started:
            self._begin(data)
        if data.endswith(_END_OF_BODY) or data == _LAST_CHUNK:
            self.done = True
            self._transport.close()

    def _begin(self, data: bytes) -> None:
        self._started = True
        status = data[9:12]
        if status == b"200":
            self._load.started()
        else:
            self._load.errors[f"http_{status.decode(errors='replace')}"] += 1
            self.done = True
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the load."""
        if not self.done:
            self._load.errors["stream_cut"] += 1
        self._load.ended(self)

    def close(self) -> None:
        """Close now."""
        self.done = True
        self._transport.abort()


class Streams(Load):
    """Many streams at once, each on its connection."""

    def __init__(self, port: int, requests: Requests, streams: int) -> None:
        """Prepare.

        Args:
            port: of the gateway.
            requests: what to send; they must ask for streams.
            streams: how many.
        """
        super().__init__(port, requests)
        self.requests = requests
        self._count = streams
        self._open_streams: set[Stream] = set()
        self._begun = 0
        self._ended = 0
        self._all_begun = asyncio.Event()
        self._all_ended = asyncio.Event()

    async def start(self) -> None:
        """Open all streams and wait for the first bytes of each; those that send none count as `no_first_byte`."""
        for number in range(self._count):
            self._open(Stream)
            if number % _STREAMS_PER_BATCH == _STREAMS_PER_BATCH - 1:
                await asyncio.sleep(2 * _TICK_S)
        if not await self._wait_until(self._all_begun, 15.0):
            self.errors["no_first_byte"] += self._count - self._begun - self._ended

    def opened(self, stream: Stream) -> None:
        """A stream has a connection."""
        self.total += 1
        self._open_streams.add(stream)

    def started(self) -> None:
        """A stream has sent its first bytes."""
        self._begun += 1
        if self._begun + self._ended >= self._count:
            self._all_begun.set()

    def ended(self, stream: Stream) -> None:
        """A stream is over."""
        self._open_streams.discard(stream)
        self._ended += 1
        if self._ended >= self._count:
            self._all_begun.set()
            self._all_ended.set()

    @property
    def open_streams(self) -> int:
        """Streams under way."""
        return len(self._open_streams)

    async def finish(self, timeout_s: float) -> None:
        """Wait for the ends of all streams; those that do not come count as `no_end`."""
        self._running = False
        if not await self._wait_until(self._all_ended, timeout_s):
            self.errors["no_end"] += len(self._open_streams)
        self._give_up_connecting()
        for stream in list(self._open_streams):
            stream.close()
