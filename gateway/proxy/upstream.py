"""Replica side: one connection as an asyncio protocol on llhttp, and the pool of idle ones.

The protocol turns bytes into at most three calls on the exchange per read: head, body, end. It decides nothing about
failures; it says what happened.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import httptools
from mypy_extensions import mypyc_attr

from gateway.proxy.failures import Cause
from gateway.proxy.heads import Header, ResponseHead
from gateway.proxy.limits import PlaneLimits
from gateway.proxy.outbox import Outbox, Writer

if TYPE_CHECKING:
    from gateway.replicas.registry import Replica

_log = logging.getLogger(__name__)

# Nothing left on this machine to connect with; says nothing about the replica.
_OUT_OF_SOCKETS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})

_MAX_HEADERS = 1000
"""Of a response. A replica that never comes to the end of its head must not fill the memory."""
_MAX_SIZE_LINE_BYTES = 8
"""Of chunks that are recognised without a parser."""
_DEAD_AFTER_S = 60
# A machine that lost power or network sends no FIN and no RST, and a stream may be silent for minutes. The kernel can
# tell the difference: it probes an idle connection, and bounds how long bytes may stay unacknowledged.
_LIVENESS = tuple(
    (level, getattr(socket, name), value)
    for level, name, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 15),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", _DEAD_AFTER_S * 1000),
    )
    if hasattr(socket, name)
)


def chunk_begin(data: bytes) -> int:
    """Say where the content of a chunk begins, in bytes that may be just that chunk.

    Args:
        data: bytes behind a chunk's end, or a response's head.

    Returns:
        0 if they are anything else, or its size is not written as servers do: in lower case, without leading zeros or
        extensions (RFC 9112 section 7.1).
    """
    begin = data.find(b"\r\n", 0, _MAX_SIZE_LINE_BYTES) + 2
    size = len(data) - begin - 2
    if begin > 2 and size > 0 and data.endswith(b"\r\n") and data.startswith(b"%x\r\n" % size):
        return begin
    return 0


class ResponseSink(Protocol):
    """What a connection needs of an exchange."""

    method: bytes

    @property
    def request_complete(self) -> bool:
        """The whole request has been sent."""

    def connected(self, connection: "ReplicaConnection") -> None:
        """A new connection is ready for the request."""

    def connect_failed(self, cause: Cause) -> None:
        """No connection could be made."""

    def response_head(self, head: ResponseHead) -> None:
        """The head of the response has arrived."""

    def response_body(self, data: bytes, chunk: bytes = b"") -> None:
        """Body bytes have arrived.

        Args:
            data: the bytes.
            chunk: the same in chunked encoding, where they came as just one chunk.
        """

    def response_end(self) -> None:
        """The response is complete."""

    def replica_failed(self, cause: Cause) -> None:
        """The connection failed before the response was complete."""

    def replica_writable(self, writable: bool) -> None:
        """The connection can, or cannot, take more request bytes."""


class ReplicaConnection(asyncio.Protocol):
    """One HTTP/1.1 connection to a replica, used by one exchange at a time."""

    __slots__ = (
        "_between_chunks",
        "_chunk_ended",
        "_complete",
        "_excess",
        "_head",
        "_headers",
        "_informational",
        "_parser",
        "_paused",
        "_pieces",
        "_reason",
        "_reusable",
        "_until_close",
        "_writer",
        "closed",
        "exchange",
        "idle_since_s",
        "pool",
        "responding",
        "reused",
        "transport",
    )

    def __init__(self, pool: "ReplicaPool") -> None:
        self.pool = pool
        self.exchange: ResponseSink | None = None
        self.idle_since_s = 0.0
        self.reused = False
        self.closed = False
        self.responding = False
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[Header] = []
        self._pieces: list[bytes] = []
        self._reason = b""
        self._reusable = False
        self._paused = False
        self._chunk_ended = False
        self._between_chunks = False
        self._head: ResponseHead | None = None
        self._complete = False
        self._excess = False
        self._informational = False
        self._until_close = False

    # -- commands of the exchange

    def send(self, exchange: ResponseSink, head: bytes, body: bytes = b"") -> None:
        """Begin an exchange by writing the request's head, and its body if that is known as a whole."""
        self.exchange = exchange
        self.responding = False
        self._complete = False
        self._until_close = False
        self._chunk_ended = self._between_chunks = False
        self._writer.write(head)
        if body:
            self._writer.write(body)

    def write(self, data: bytes) -> None:
        """Write more request bytes."""
        self._writer.write(data)

    def pause(self) -> None:
        """Read no further: the client does not keep up."""
        if not self._paused and not self.closed:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused:
            self._paused = False
            if not self.closed:
                self.transport.resume_reading()

    def abandon(self) -> None:
        """End the exchange here and now: the replica sees its client leave and aborts the work."""
        self.exchange = None
        self._writer.drop()
        if not self.closed:
            self.transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, and have the kernel watch whether the other machine is alive."""
        self.transport = cast(asyncio.Transport, transport)
        self._writer = Writer(self.pool.outbox, self.transport)
        raw = transport.get_extra_info("socket")
        if raw is not None:
            with contextlib.suppress(OSError):
                for level, option, value in _LIVENESS:
                    raw.setsockopt(level, option, value)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the exchange, if one is running, what the loss means for it."""
        self.closed = True
        self._writer.drop()
        self.pool.lost(self)
        exchange = self.exchange
        if exchange is None:
            return
        if self._until_close and exc is None:
            self.exchange = None
            exchange.response_end()
        elif self.reused and not self.responding:
            self.exchange = None
            exchange.replica_failed(Cause.STALE)
        else:
            self.exchange = None
            exchange.replica_failed(Cause.RESET)

    def pause_writing(self) -> None:
        """Hold back an upload."""
        if self.exchange is not None:
            self.exchange.replica_writable(False)

    def resume_writing(self) -> None:
        """Let an upload go on."""
        if self.exchange is not None:
            self.exchange.replica_writable(True)

    def data_received(self, data: bytes) -> None:
        """Parse, then report head, body and end, in that order, at most once each."""
        exchange = self.exchange
        if exchange is None:
            # Bytes nobody asked for: whatever they are, they must not become the next request's response.
            self.transport.abort()
            return
        if self._between_chunks:
            # Engines send an event as one chunk. The parser is where a chunk begins, and will be there again.
            begin = chunk_begin(data)
            if begin:
                exchange.response_body(data[begin:-2], data)
                return
        self.responding = True
        failed = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            failed = True
        except httptools.HttpParserError:
            failed = not self._complete
            self._excess = True
        # Without a line's end, part of the next chunk's size may have been read.
        self._between_chunks = self._chunk_ended and data.endswith(b"\r\n")
        head = self._head
        if head is not None:
            self._head = None
            exchange.response_head(head)
            if self.exchange is not exchange:
                self._pieces.clear()
                return
        pieces = self._pieces
        if pieces:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self._pieces = []
            exchange.response_body(body)
            if self.exchange is not exchange:
                return
        if self._complete:
            self.exchange = None
            # A connection with half a request on it cannot carry another.
            if self._excess or not exchange.request_complete or not self._reusable:
                self.transport.abort()
            else:
                self.pool.release(self)
            exchange.response_end()
        elif failed:
            self.exchange = None
            self.transport.abort()
            exchange.replica_failed(Cause.BAD_RESPONSE)

    # -- llhttp callbacks

    def on_message_begin(self) -> None:
        """A status line follows."""
        if self._complete:
            self._excess = True
        self._headers = []
        self._reason = b""

    def on_status(self, status: bytes) -> None:
        """Reason phrase, possibly in parts."""
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; after the body, one trailer."""
        if len(self._headers) >= _MAX_HEADERS:
            raise ValueError("too many headers")
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Head is complete; note how the body is delimited."""
        if self._complete or self.exchange is None:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self._informational = True
            return
        head = ResponseHead(status, self._reason, self._headers, self.pool.origin)
        self._head = head
        if self.exchange.method == b"HEAD":
            # llhttp cannot know that no body follows here; do not reuse a connection whose parser waits for one.
            self._complete = True
            self._excess = True
        elif head.content_length is None and not head.chunked and not head.bodiless(self.exchange.method):
            self._until_close = True

    def on_body(self, data: bytes) -> None:
        """Body bytes."""
        if not self._complete:
            self._pieces.append(data)

    def on_chunk_header(self) -> None:
        """A chunk's size is known."""
        self._chunk_ended = False

    def on_chunk_complete(self) -> None:
        """A chunk has ended."""
        self._chunk_ended = True

    def on_message_complete(self) -> None:
        """The response is complete, unless it was an interim one."""
        if self._informational:
            self._informational = False
        else:
            self._complete = True
            self._chunk_ended = False
            # Asked here and not later: llhttp clears the flags it answers from when the next message may begin.
            self._reusable = self._parser.should_keep_alive()


class Dial:
    """A connection attempt under way. Set `exchange` to None to call it off; the connection then joins the pool.

    Cancelling the task instead could lose a connection that was made in the same turn of the event loop.
    """

    __slots__ = ("exchange",)

    def __init__(self, exchange: ResponseSink) -> None:
        self.exchange: ResponseSink | None = exchange


@mypyc_attr(allow_interpreted_subclasses=True)
class ReplicaPool:
    """Connections to one replica: idle ones newest first, dialled when there is none."""

    def __init__(
        self,
        replica: "Replica",
        limits: PlaneLimits,
        tls: ssl.SSLContext | None,
        now: Callable[[], float],
        outbox: Outbox | None = None,
    ) -> None:
        """Make an empty pool.

        Args:
            replica: where to connect.
            limits: how long to wait for a connection, how many idle ones to keep, and for how long.
            tls: context for https replicas.
            now: monotonic clock.
            outbox: through which requests are written; by default they are at once.
        """
        self._replica = replica
        self.outbox = outbox or Outbox()
        self.origin = replica.host_header + replica.base_path.encode()
        self.limit(limits)
        self._tls = tls
        self._now = now
        # In order of release, the newest last; one that closes leaves at no cost.
        self._idle: OrderedDict[ReplicaConnection, None] = OrderedDict()
        self._dials: set[asyncio.Task[None]] = set()
        self.closed = False

    def limit(self, limits: PlaneLimits) -> None:
        """Use other limits from now on."""
        self._connect_timeout_s = limits.connect_timeout_s
        self._keepalive_s = limits.replica_keepalive_s
        self._max_idle = limits.max_idle_connections

    def use_tls(self, tls: ssl.SSLContext | None) -> None:
        """Connect with another context from now on."""
        self._tls = tls
        self.close_idle()

    def acquire(self) -> ReplicaConnection | None:
        """Return a live idle connection, or None if one must be dialled."""
        oldest = self._now() - self._keepalive_s
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.closed or connection.transport.is_closing():
                continue
            if connection.idle_since_s < oldest:
                # All others are older still.
                connection.abandon()
                self.close_idle()
                return None
            return connection
        return None

    def dial(self, exchange: ResponseSink) -> "Dial":
        """Connect in the background and report to the exchange."""
        dial = Dial(exchange)
        task = asyncio.get_running_loop().create_task(self._dial(dial))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)
        return dial

    async def _dial(self, dial: "Dial") -> None:
        loop = asyncio.get_running_loop()
        replica = self._replica
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: ReplicaConnection(self),
                    replica.host,
                    replica.port,
                    ssl=self._tls,
                    server_hostname=replica.host if self._tls is not None else None,
                )
        except TimeoutError:
            if dial.exchange is not None:
                dial.exchange.connect_failed(Cause.CONNECT_TIMEOUT)
        except OSError as error:
            _log.info("replica %s: connect failed: %s", replica.name, error)
            if dial.exchange is not None:
                dial.exchange.connect_failed(Cause.NO_SOCKET if error.errno in _OUT_OF_SOCKETS else Cause.REFUSED)
        else:
            if dial.exchange is None:
                self.release(connection)
            elif connection.closed or connection.transport.is_closing():
                # Accepted and closed at once, before this task had its turn; nobody would tell the exchange later.
                dial.exchange.connect_failed(Cause.REFUSED)
            else:
                dial.exchange.connected(connection)

    def release(self, connection: ReplicaConnection) -> None:
        """Take back a connection whose response is complete."""
        if connection.closed:
            return
        if self.closed or len(self._idle) >= self._max_idle:
            connection.abandon()
            return
        # The last bytes of a response may have paused it; the next exchange would wait for ever.
        connection.resume()
        connection.reused = True
        connection.idle_since_s = self._now()
        self._idle[connection] = None

    def lost(self, connection: ReplicaConnection) -> None:
        """Forget a closed connection."""
        self._idle.pop(connection, None)

    def close_idle(self, older_than_s: float = float("inf")) -> None:
        """Close idle connections last used before a time, all of them by default."""
        while self._idle:
            connection = next(iter(self._idle))
            if connection.idle_since_s >= older_than_s:
                return
            del self._idle[connection]
            connection.transport.close()

    def sweep(self) -> None:
        """Close connections idle for too long."""
        if self._idle:
            self.close_idle(self._now() - self._keepalive_s)

    def close(self) -> None:
        """Close what is idle and keep nothing any more; running exchanges end on their own."""
        self.closed = True
        self.close_idle()

    @property
    def idle_count(self) -> int:
        """Idle connections held."""
        return len(self._idle)
