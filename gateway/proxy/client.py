"""Client side: one connection as an asyncio protocol on llhttp.

llhttp does all parsing. This class turns its callbacks into requests, keeps pipelined requests in order, and enforces
the limits that concern a connection rather than a request: head size, idle time, time for a head to arrive.
"""

import asyncio
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from gateway.proxy import errors
from gateway.proxy.errors import GatewayError
from gateway.proxy.exchange import Exchange
from gateway.proxy.heads import Header, RequestHead

if TYPE_CHECKING:
    from gateway.proxy.plane import DataPlane

_MAX_PIPELINED = 16
_LINGER_S = 2.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class ClientConnection(asyncio.Protocol):
    """One connection of a client.

    Attributes:
        peer: address of the client, for the log.
        deadline_s: when the connection is closed for inactivity; None while an exchange has its own limits.
    """

    __slots__ = (
        "_closing",
        "_exchanges",
        "_head_bytes",
        "_headers",
        "_in_head",
        "_lingering",
        "_parser",
        "_paused",
        "_plane",
        "_receiving",
        "_refused",
        "_transport",
        "_url",
        "deadline_s",
        "peer",
    )

    def __init__(self, plane: "DataPlane") -> None:
        self._plane = plane
        self._parser = httptools.HttpRequestParser(self)
        self._exchanges: deque[Exchange] = deque()
        self._receiving: Exchange | None = None
        self._headers: list[Header] = []
        self._url = b""
        self._head_bytes = 0
        self._in_head = True
        self._refused: GatewayError | None = None
        self._closing = False
        self._lingering = False
        self._paused = False
        self.peer = ""
        self.deadline_s: float | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or turn it away if there are too many."""
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if isinstance(peer, tuple) and peer else ""
        self._transport.set_write_buffer_limits(high=self._plane.limits.write_buffer_bytes)
        self.deadline_s = self._plane.now() + self._plane.limits.head_timeout_s
        if not self._plane.client_connected(self):
            self._closing = True
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: every request it had under way ends here."""
        self._closing = True
        self._plane.client_disconnected(self)
        while self._exchanges:
            self._exchanges.popleft().client_gone()

    def eof_received(self) -> bool:
        """Take an end of file for the client's leaving.

        A half-closed connection cannot be told from a closed one until something is written, and a client that left
        in a silent gap must free the replica at once.
        """
        for exchange in self._exchanges:
            exchange.client_gone()
        return False

    def pause_writing(self) -> None:
        """The client reads more slowly than the replica sends."""
        if self._exchanges:
            self._exchanges[0].client_writable(False)

    def resume_writing(self) -> None:
        """The client has caught up."""
        if self._exchanges:
            self._exchanges[0].client_writable(True)

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        if self._closing:
            return
        if self._in_head:
            if self._head_bytes == 0 and not self._exchanges:
                self.deadline_s = self._plane.now() + self._plane.limits.head_timeout_s
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # RFC 9110 section 7.8: a server may ignore Upgrade. llhttp stops at the end of such a message, and what
            # follows it is no longer HTTP for llhttp, so this connection ends with the answer.
            self._in_head = True
            self._closing = True
        except httptools.HttpParserError:
            self._bad(self._refused or errors.BAD_HTTP)
            return
        if self._refused is not None:
            self._bad(self._refused)
        elif self._in_head and self._head_bytes > self._plane.limits.max_head_bytes:
            self._bad(errors.HEAD_TOO_LARGE)

    # -- llhttp callbacks

    def on_message_begin(self) -> None:
        """A request line follows."""
        self._headers = []
        self._url = b""
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        """Request target, possibly in parts."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is complete: open an exchange, or queue it behind those before it."""
        self._in_head = False
        parser = self._parser
        limits = self._plane.limits
        if self._refused is not None or self._closing:
            return
        if len(self._headers) > limits.max_headers or self._head_bytes > limits.max_head_bytes + 65536 * 4:
            self._refused = errors.HEAD_TOO_LARGE
            return
        size = len(self._url)
        for name, value in self._headers:
            size += len(name) + len(value) + 4
        if size > limits.max_head_bytes:
            self._refused = errors.HEAD_TOO_LARGE
            return
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self._refused = errors.BAD_HTTP
            return
        head = RequestHead(
            parser.get_method(), self._url, self._headers, version == "1.0", bool(parser.should_keep_alive())
        )
        exchange = Exchange(self._plane, self, head)
        self._receiving = exchange
        self._exchanges.append(exchange)
        self.deadline_s = None
        if len(self._exchanges) == 1:
            exchange.begin()
        elif len(self._exchanges) >= _MAX_PIPELINED:
            self.pause()

    def on_body(self, data: bytes) -> None:
        """Body bytes, after chunk framing has been taken off."""
        if self._receiving is not None:
            self._receiving.request_body(data)

    def on_message_complete(self) -> None:
        """One request is complete."""
        self._head_bytes = 0
        self._in_head = True
        exchange = self._receiving
        if exchange is not None:
            self._receiving = None
            exchange.request_end()

    # -- commands of the exchange

    def write(self, data: bytes) -> None:
        """Send bytes to the client."""
        self._transport.write(data)

    def finished(self, keep_alive: bool) -> None:
        """Go on with the next request, or close."""
        if not self._exchanges:
            return
        exchange = self._exchanges.popleft()
        if self._transport.is_closing():
            return
        if not keep_alive or self._closing or self._plane.draining:
            self._close_after_answer(exchange)
            return
        self.resume()
        if self._exchanges:
            # A new turn of the loop would do as well, but the answer order is the same and the stack stays flat
            # for the usual case of no pipelining.
            self._exchanges[0].begin()
        else:
            self.deadline_s = self._plane.now() + self._plane.limits.idle_timeout_s

    def abort(self, *, reset: bool) -> None:
        """Cut the connection off after what has been written."""
        self._closing = True
        self._exchanges.clear()
        if reset:
            raw = self._transport.get_extra_info("socket")
            if raw is not None:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.close()

    def pause(self) -> None:
        """Stop reading."""
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    # -- ends

    def expired(self, now_s: float) -> None:
        """The deadline has passed: close an idle connection, answer 408 to half a request."""
        if self._lingering or (not self._head_bytes and not self._exchanges):
            self._transport.abort()
        elif self._in_head:
            self._bad(errors.HEAD_TIMEOUT)

    def close_if_idle(self) -> None:
        """Close the connection unless a request is under way (drain)."""
        if not self._exchanges and not self._transport.is_closing():
            self._transport.close()

    def _bad(self, error: GatewayError) -> None:
        """Refuse bytes that are not a request; answers owed to earlier requests are given up."""
        if self._closing:
            return
        self._closing = True
        if any(exchange.phase is not None for exchange in self._exchanges):
            # The answer to an earlier request is being written; a second head must not appear inside it.
            for exchange in self._exchanges:
                exchange.client_gone()
            self._transport.abort()
            return
        for exchange in self._exchanges:
            exchange.client_gone()
        self._exchanges.clear()
        self._plane.refused_bytes(error)
        self._transport.write(refusal(error))
        self._linger()

    def _close_after_answer(self, exchange: Exchange) -> None:
        self._closing = True
        for waiting in self._exchanges:
            waiting.client_gone()
        self._exchanges.clear()
        if exchange.request_complete:
            self._transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Close in a way that lets the answer be read.

        Closing a socket with unread bytes resets the connection and may destroy the answer on its way
        (RFC 9112 section 9.6), so the sending side is closed first and what still comes is thrown away for a while.
        """
        self._lingering = True
        self._receiving = None
        self.resume()
        self.deadline_s = self._plane.now() + _LINGER_S
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()


def refusal(error: GatewayError) -> bytes:
    """Return a whole response for an error met before there was a request."""
    body = error.body()
    return b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        error.status,
        errors.REASONS.get(error.status, b"Error"),
        len(body),
        body,
    )
