"""Replica side: one connection as an asyncio protocol on llhttp, and the pool of idle ones.

The protocol turns bytes into at most three calls on the exchange per read: head, body, end. It decides nothing about
failures; it says what happened.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from gateway.proxy.failures import Cause
from gateway.proxy.heads import Header, ResponseHead

if TYPE_CHECKING:
    from gateway.replicas.registry import Replica

_log = logging.getLogger(__name__)


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

    def response_body(self, data: bytes) -> None:
        """Body bytes have arrived."""

    def response_end(self) -> None:
        """The response is complete."""

    def replica_failed(self, cause: Cause) -> None:
        """The connection failed before the response was complete."""

    def replica_writable(self, writable: bool) -> None:
        """The connection can, or cannot, take more request bytes."""


class ReplicaConnection(asyncio.Protocol):
    """One HTTP/1.1 connection to a replica, used by one exchange at a time."""

    __slots__ = (
        "_complete",
        "_excess",
        "_head",
        "_headers",
        "_informational",
        "_parser",
        "_pieces",
        "_reason",
        "_reusable",
        "_until_close",
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
        self._head: ResponseHead | None = None
        self._complete = False
        self._excess = False
        self._informational = False
        self._until_close = False

    # -- commands of the exchange

    def send(self, exchange: ResponseSink, data: bytes) -> None:
        """Begin an exchange by writing its first bytes."""
        self.exchange = exchange
        self.responding = False
        self._complete = False
        self._until_close = False
        self.transport.write(data)

    def write(self, data: bytes) -> None:
        """Write more request bytes."""
        self.transport.write(data)

    def abandon(self) -> None:
        """End the exchange here and now: the replica sees its client leave and aborts the work."""
        self.exchange = None
        if not self.closed:
            self.transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the exchange, if one is running, what the loss means for it."""
        self.closed = True
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
        self.responding = True
        failed = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            failed = True
        except httptools.HttpParserError:
            failed = not self._complete
            self._excess = True
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
        """One header."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Head is complete; note how the body is delimited."""
        if self._complete or self.exchange is None:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self._informational = True
            return
        head = ResponseHead(status, self._reason, self._headers)
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

    def on_message_complete(self) -> None:
        """The response is complete, unless it was an interim one."""
        if self._informational:
            self._informational = False
        else:
            self._complete = True
            # Asked here and not later: llhttp clears the flags it answers from when the next message may begin.
            self._reusable = self._parser.should_keep_alive()


class Dial:
    """A connection attempt under way. Set `exchange` to None to call it off; the connection then joins the pool.

    Cancelling the task instead could lose a connection that was made in the same turn of the event loop.
    """

    __slots__ = ("exchange",)

    def __init__(self, exchange: ResponseSink) -> None:
        self.exchange: ResponseSink | None = exchange


class ReplicaPool:
    """Connections to one replica: idle ones newest first, dialled when there is none."""

    def __init__(
        self,
        replica: "Replica",
        *,
        connect_timeout_s: float,
        keepalive_s: float,
        max_idle: int,
        tls: ssl.SSLContext | None,
        now: Callable[[], float],
    ) -> None:
        """Make an empty pool.

        Args:
            replica: where to connect.
            connect_timeout_s: limit for TCP and TLS together.
            keepalive_s: how long an idle connection may be reused; below the replica's own limit (uvicorn: 5 s).
            max_idle: idle connections kept.
            tls: context for https replicas.
            now: monotonic clock.
        """
        self._replica = replica
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._max_idle = max_idle
        self._tls = tls
        self._now = now
        self._idle: list[ReplicaConnection] = []
        self._dials: set[asyncio.Task[None]] = set()
        self.closed = False

    def acquire(self) -> ReplicaConnection | None:
        """Return a live idle connection, or None if one must be dialled."""
        oldest = self._now() - self._keepalive_s
        while self._idle:
            connection = self._idle.pop()
            if connection.closed or connection.transport.is_closing():
                continue
            if connection.idle_since_s < oldest:
                # Everything below on the stack is older still.
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
                dial.exchange.connect_failed(Cause.REFUSED)
        else:
            if dial.exchange is not None:
                dial.exchange.connected(connection)
            else:
                self.release(connection)

    def release(self, connection: ReplicaConnection) -> None:
        """Take back a connection whose response is complete."""
        if self.closed or len(self._idle) >= self._max_idle:
            connection.abandon()
            return
        connection.reused = True
        connection.idle_since_s = self._now()
        self._idle.append(connection)

    def lost(self, connection: ReplicaConnection) -> None:
        """Forget a closed connection."""
        if connection.exchange is None and connection in self._idle:
            self._idle.remove(connection)

    def close_idle(self, older_than_s: float = float("inf")) -> None:
        """Close idle connections last used before a time, all of them by default."""
        keep: list[ReplicaConnection] = []
        for connection in self._idle:
            if connection.idle_since_s < older_than_s:
                connection.exchange = None
                connection.transport.close()
            else:
                keep.append(connection)
        self._idle = keep

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
