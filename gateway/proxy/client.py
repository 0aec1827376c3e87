"""Client side: one connection as an asyncio protocol on llhttp.

llhttp does all parsing. This class turns its callbacks into requests, keeps pipelined requests in order, and enforces
the limits that concern a connection rather than a request: head size, idle time, time for a head to arrive.

Requests take turns. One is current: it has begun and owns the writing side until it calls `finished`. Those behind it
wait unbegun. Bytes that are no request are refused when their turn has come, so the requests before them are answered.
From then on the connection is deaf: what still arrives is thrown away, but the client's leaving is noticed.
"""

import asyncio
import logging
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools
from mypy_extensions import mypyc_attr

from gateway.proxy import errors
from gateway.proxy.errors import GatewayError
from gateway.proxy.exchange import Exchange
from gateway.proxy.failures import Phase
from gateway.proxy.heads import Header, RequestHead
from gateway.proxy.outbox import Writer

if TYPE_CHECKING:
    from gateway.proxy.plane import DataPlane

_log = logging.getLogger(__name__)

_MAX_WAITING = 16
"""Pipelined requests that may wait before the connection is read no further."""
_LINGER_S = 2.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class _Refused(Exception):
    """Stops llhttp in the middle of its input."""

    def __init__(self, error: GatewayError) -> None:
        super().__init__(error.code)
        self.error = error


@mypyc_attr(allow_interpreted_subclasses=True)
class ClientConnection(asyncio.Protocol):
    """One connection of a client.

    Attributes:
        peer: address of the client, for the log.
        deadline_s: when the connection is closed for inactivity; None while an exchange has its own limits.
        write: sends bytes to the client.
    """

    __slots__ = (
        "_advancing",
        "_closing",
        "_current",
        "_deaf",
        "_head_bytes",
        "_headers",
        "_in_message",
        "_parser",
        "_paused",
        "_pieces",
        "_pipelined",
        "_plane",
        "_receiving",
        "_refused",
        "_transport",
        "_upgrading",
        "_url",
        "_waiting",
        "_writable",
        "_writer",
        "deadline_s",
        "peer",
        "write",
    )

    def __init__(self, plane: "DataPlane") -> None:
        self._plane = plane
        self._parser = httptools.HttpRequestParser(self)
        self._current: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._receiving: Exchange | None = None
        self._upgrading: Exchange | None = None
        self._headers: list[Header] = []
        self._url = b""
        self._pieces: list[bytes] = []
        # Bytes read since the last body byte or end of a message: what heads, trailers and chunk framing have taken.
        self._head_bytes = 0
        self._in_message = False
        # The message began behind another one in the same read, so that `_head_bytes` does not tell its size.
        self._pipelined = False
        self._refused: GatewayError | None = None
        self._deaf = False
        self._closing = False
        self._advancing = False
        self._writable = True
        self._paused = False
        self.peer = ""
        self.deadline_s: float | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or turn it away if there are too many."""
        self._transport = cast(asyncio.Transport, transport)
        self._writer = Writer(self._plane.outbox, self._transport)
        self.write = self._writer.write
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if isinstance(peer, tuple) and peer else ""
        self._transport.set_write_buffer_limits(high=self._plane.limits.write_buffer_bytes)
        self.deadline_s = self._plane.now() + self._plane.limits.head_timeout_s
        if not self._plane.client_connected(self):
            self._closing = self._deaf = True
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: every request it had under way ends here."""
        self._closing = self._deaf = True
        self._writer.drop()
        self._plane.client_disconnected(self)
        self._drop_requests()

    def eof_received(self) -> bool:
        """Take an end of file for the client's leaving.

        A half-closed connection cannot be told from a closed one until something is written, and a client that left
        in a silent gap must free the replica at once.
        """
        # What has been answered is answered: the transport closes when this returns.
        self._writer.flush()
        self._closing = self._deaf = True
        self.deadline_s = self._plane.now() + _LINGER_S
        self._drop_requests()
        return False

    def pause_writing(self) -> None:
        """The client reads more slowly than the replica sends."""
        self._writable = False
        if self._current is not None:
            self._current.client_writable(False)

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._writable = True
        if self._current is not None:
            self._current.client_writable(True)
        elif self._waiting:
            self._advance()

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        if self._deaf:
            return
        if not self._in_message:
            self._pipelined = False
        self._head_bytes += len(data)
        try:
            while data:
                try:
                    self._parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    data = data[upgrade.args[0] :]
                    self._ignore_upgrade()
            self._deliver()
        except httptools.HttpParserCallbackError as stopped:
            self._stopped(stopped.__context__)
        except httptools.HttpParserError:
            self._bad(errors.BAD_HTTP)
        else:
            if self._head_bytes > self._plane.limits.max_head_bytes:
                self._bad(errors.HEAD_TOO_LARGE)

    def _ignore_upgrade(self) -> None:
        """Go on in HTTP/1.1 behind the head of a request that asks for another protocol.

        RFC 9110 section 7.8: "A server MAY ignore a received Upgrade header field if it wishes to continue using the
        current protocol on that connection." httptools declares such a message complete at the end of its head. Its
        body is not a request, so a new parser is told, by a head of its own, that it is in front of a body.
        """
        exchange = self._upgrading
        if exchange is None:
            return
        self._upgrading = None
        if self._deaf:
            return
        self._receiving = exchange
        self._parser = httptools.HttpRequestParser(self)
        length = exchange.head.content_length
        framing = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing)

    # -- llhttp callbacks

    def on_message_begin(self) -> None:
        """A request line follows."""
        self._in_message = True
        if self._current is None and not self._waiting:
            self.deadline_s = self._plane.now() + self._plane.limits.head_timeout_s
        self._headers = []
        self._url = b""

    def on_url(self, url: bytes) -> None:
        """Request target, possibly in parts."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; after the body, one trailer."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is complete: open an exchange, or queue it behind those before it."""
        if self._receiving is not None:
            # The head by which `_ignore_upgrade` has told the parser where it is.
            return
        if self._deaf:
            raise _Refused(errors.BAD_HTTP)
        parser = self._parser
        limits = self._plane.limits
        headers = self._headers
        # Trailers are read and dropped: RFC 9110 section 6.5.1 allows an intermediary to discard them.
        self._headers = []
        if self._head_bytes > limits.max_head_bytes or self._pipelined:
            size = len(self._url)
            for name, value in headers:
                size += len(name) + len(value) + 4
            if size > limits.max_head_bytes:
                raise _Refused(errors.HEAD_TOO_LARGE)
        if len(headers) > limits.max_headers:
            raise _Refused(errors.HEAD_TOO_LARGE)
        self._head_bytes = 0
        version = parser.get_http_version()
        if version != "1.1" and version != "1.0":
            raise _Refused(errors.BAD_HTTP if version[0] == "0" else errors.UNSUPPORTED_VERSION)
        head = RequestHead(parser.get_method(), self._url, headers, version == "1.0", parser.should_keep_alive())
        exchange = self._receiving = Exchange(self._plane, self, head)
        self._waiting.append(exchange)
        if not head.has_body:
            # Complete already: it begins in on_message_complete, which llhttp calls next.
            return
        if head.upgrade and parser.should_upgrade():
            # Not complete, although llhttp calls on_message_complete next.
            self._upgrading, self._receiving = exchange, None
        if self._current is None:
            self._advance()
        if self._current is not exchange:
            # The body of a request whose turn has not come would pile up unchecked.
            self.pause()

    def on_body(self, data: bytes) -> None:
        """Body bytes, after chunk framing has been taken off: kept until the read has been parsed.

        A read may hold thousands of tiny chunks; the exchange gets them as one piece.
        """
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        """One request is complete."""
        self._deliver()
        self._head_bytes = 0
        self._in_message = False
        self._pipelined = True
        exchange = self._receiving
        if exchange is None:
            return
        self._receiving = None
        exchange.request_end()
        if not exchange.head.keep_alive:
            # RFC 9112 section 9.6: after a request with the close option, what follows is not processed.
            self._deaf = True
        if self._current is None:
            self._advance()
        elif len(self._waiting) >= _MAX_WAITING:
            self.pause()

    # -- commands of the exchange

    def finished(self, keep_alive: bool) -> None:
        """Go on with the next request, or close."""
        exchange = self._current
        if exchange is None:
            return
        self._current = None
        if self._closing:
            return
        if not keep_alive or self._plane.draining:
            self._drop_requests()
            if exchange.request_complete:
                self._shut(self._plane.limits.client_stall_timeout_s)
            else:
                self._linger()
        elif not self._advancing:
            self._advance()

    def abort(self, *, reset: bool) -> None:
        """Cut the connection off after what has been written.

        Args:
            reset: end it with a reset (a mere close would look like a proper end, or nobody reads).
        """
        self._current = None
        if not reset:
            self._shut(self._plane.limits.client_stall_timeout_s)
            return
        raw = self._transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        if self._transport.get_extra_info("sslcontext") is None:
            self._shut(_LINGER_S)
        else:
            # Closing TLS says that all is well, so what has been written gets until the next tick, and then it is cut.
            self._writer.flush()
            self._give_up(0.0)

    def pause(self) -> None:
        """Stop reading."""
        if not self._paused and not self._closing:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    # -- turns

    def _advance(self) -> None:
        """Begin requests whose turn has come; many may be answered at once, hence a loop and no recursion."""
        self._advancing = True
        try:
            while self._current is None and self._waiting and self._writable and not self._closing:
                self.deadline_s = None
                exchange = self._current = self._waiting.popleft()
                if not self._waiting:
                    self.resume()
                exchange.begin()
        except Exception as fault:  # noqa: BLE001 - whatever it is, this client gets a 500 and all others go on
            self._fault(fault)
        finally:
            self._advancing = False
        if self._current is not None or self._closing:
            return
        limits = self._plane.limits
        if self._waiting:
            # The last answer has not been taken yet, and no exchange looks after that.
            self.deadline_s = self._plane.now() + limits.client_stall_timeout_s
            return
        self.resume()
        if self._refused is not None:
            self._refuse(self._refused)
        else:
            self.deadline_s = self._plane.now() + (limits.head_timeout_s if self._in_message else limits.idle_timeout_s)

    def _deliver(self) -> None:
        """Pass on the body bytes of this read."""
        pieces = self._pieces
        if not pieces:
            return
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._head_bytes = 0
        if self._receiving is not None:
            self._receiving.request_body(body)

    def _drop_requests(self) -> None:
        """End all requests without an answer."""
        self._receiving = None
        current, self._current = self._current, None
        if current is not None:
            current.client_gone()
        while self._waiting:
            self._waiting.popleft().client_gone()

    # -- ends

    def expired(self, now_s: float) -> None:
        """The deadline has passed: close an idle connection, answer 408 to half a request."""
        if self._closing or self._waiting:
            self._transport.abort()
        elif self._in_message:
            self._bad(errors.HEAD_TIMEOUT)
        else:
            self._shut(_LINGER_S)

    def close_if_idle(self) -> None:
        """Close the connection unless a request is under way (drain)."""
        if self._current is None and not self._waiting and not self._closing:
            self._shut(_LINGER_S)

    def _stopped(self, cause: BaseException | None) -> None:
        """A callback has raised: on purpose, or because of a fault of ours."""
        if not isinstance(cause, _Refused):
            self._fault(cause)
        else:
            self._bad(cause.error)

    def _fault(self, cause: BaseException | None) -> None:
        """Something here is broken: end this connection with a 500, if an answer can still be given."""
        _log.error("a request of %s failed", self.peer, exc_info=cause)
        if self._closing:
            return
        answering = self._current is not None and self._current.phase is Phase.STREAMING
        self._drop_requests()
        if answering:
            self._closing = self._deaf = True
            self._transport.abort()
        else:
            self._refuse(errors.INTERNAL)

    def _bad(self, error: GatewayError) -> None:
        """Refuse bytes that are not a request, when those before them have been answered."""
        if self._deaf:
            return
        self._deaf = True
        self._pieces.clear()
        spoiled, self._receiving = self._receiving, None
        current = self._current
        if spoiled is not None and spoiled is current:
            if current.phase is Phase.STREAMING:
                # Its answer is being written already; a second head must not appear inside it.
                self._drop_requests()
                self._closing = True
                self._transport.abort()
                return
            self._current = None
            current.client_gone()
        elif spoiled is not None and self._waiting and self._waiting[-1] is spoiled:
            self._waiting.pop().client_gone()
        if self._current is None and not self._waiting:
            self._refuse(error)
        else:
            self._refused = error

    def _refuse(self, error: GatewayError) -> None:
        self._plane.refused_bytes(error)
        self.write(refusal(error))
        self._linger()

    def _shut(self, within_s: float) -> None:
        """Close when all that has been written is sent; cut the connection off if that takes too long."""
        self._give_up(within_s)
        self._writer.flush()
        self._transport.close()

    def _give_up(self, within_s: float) -> None:
        """Take nothing more, and cut the connection off at the latest after a time."""
        self._closing = self._deaf = True
        self._receiving = None
        self._waiting.clear()
        self.deadline_s = self._plane.now() + within_s

    def _linger(self) -> None:
        """Close in a way that lets the answer be read.

        Closing a socket with unread bytes resets the connection and may destroy the answer on its way
        (RFC 9112 section 9.6), so the sending side is closed first and what still comes is thrown away for a while.
        """
        if not self._transport.can_write_eof():
            self._shut(_LINGER_S)
            return
        self._closing = self._deaf = True
        self._receiving = None
        self.resume()
        self.deadline_s = self._plane.now() + _LINGER_S
        self._writer.flush()
        self._transport.write_eof()


def refusal(error: GatewayError) -> bytes:
    """Return a whole response for an error met before there was a request."""
    body = error.body()
    return b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        error.status,
        errors.REASONS.get(error.status, b"Error"),
        len(body),
        body,
    )
