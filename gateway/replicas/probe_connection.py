"""One keep-alive connection for small GETs: an asyncio protocol on llhttp.

A general HTTP client costs several times as much per request, and probes go on as long as the gateway runs. This one
knows nothing that a probe does not need: one request at a time, whole bodies, no redirects, no proxy, no cookies.

Head, chunk framing and trailers share one bound: the bytes that have come since the last body byte.
"""

import asyncio
from typing import cast

import httptools

_MAX_HEAD_BYTES = 64 * 1024
_OK = 200


class BadAnswerError(Exception):
    """An answer that is no use: another status than 200, cut off, too long or no HTTP."""


class StaleError(Exception):
    """The other side had closed a connection that was kept alive. The request may be sent again on another one."""


class ProbeConnection(asyncio.Protocol):
    """One connection, for one request at a time.

    Attributes:
        closed: whether the connection is lost.
        idle_since_s: for its owner to note when it was last used.
    """

    __slots__ = (
        "_answer",
        "_complete",
        "_delimited",
        "_excess",
        "_framing_bytes",
        "_limit_bytes",
        "_parser",
        "_pieces",
        "_responding",
        "_reusable",
        "_reused",
        "_size_bytes",
        "_status",
        "_transport",
        "_until_close",
        "closed",
        "idle_since_s",
    )

    def __init__(self) -> None:
        self.closed = False
        self.idle_since_s = 0.0
        self._answer: asyncio.Future[bytes] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._limit_bytes = self._size_bytes = self._framing_bytes = self._status = 0
        self._complete = self._delimited = self._excess = self._until_close = False
        self._responding = self._reusable = self._reused = False

    @property
    def usable(self) -> bool:
        """Whether it can take a request now."""
        return self._answer is None and not self.closed and not self._transport.is_closing()

    async def get(self, request: bytes, deadline_s: float, limit_bytes: int) -> bytes:
        """Send a GET and wait for the answer. Whatever is raised, the connection is closed then.

        Args:
            request: the whole head.
            deadline_s: on the event loop's clock, for the last byte of the answer.
            limit_bytes: the longest body accepted.

        Returns:
            The body of a 200 answer.

        Raises:
            BadAnswerError: there was another answer, or none.
            StaleError: a connection that has served before was lost before any byte of the answer.
            TimeoutError: the deadline has passed.
        """
        loop = asyncio.get_running_loop()
        self._limit_bytes = limit_bytes
        self._size_bytes = self._framing_bytes = self._status = 0
        self._complete = self._until_close = self._responding = False
        answer: asyncio.Future[bytes] = loop.create_future()
        self._answer = answer
        if self.closed:
            self._lost(None)
        else:
            self._transport.write(request)
        timer = loop.call_at(deadline_s, self._expire)
        try:
            return await answer
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        """Cut the connection off."""
        self._answer = None
        if not self.closed:
            self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request under way, if there is one."""
        self.closed = True
        self._lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and decide whether the request is over."""
        if self._answer is None:
            # Bytes nobody asked for: whatever they are, they must not become the next request's answer.
            self._transport.abort()
            return
        self._responding = True
        self._framing_bytes += len(data)
        fault: Exception | None = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            fault = error
        if self._status not in (0, _OK):
            self._fail(BadAnswerError(f"status {self._status}"))
        elif self._size_bytes > self._limit_bytes:
            self._fail(BadAnswerError(f"answer longer than {self._limit_bytes} bytes"))
        elif self._complete:
            self._succeed(keep=self._reusable and not self._excess and fault is None)
        elif fault is not None:
            self._fail(BadAnswerError(f"{type(fault).__name__}: {fault}"))
        elif self._framing_bytes > _MAX_HEAD_BYTES:
            self._fail(BadAnswerError(f"head of the answer longer than {_MAX_HEAD_BYTES} bytes"))

    # -- llhttp callbacks

    def on_message_begin(self) -> None:
        """A status line follows."""
        if self._complete:
            self._excess = True
        else:
            self._delimited = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; after the body, one trailer."""
        size = len(name)
        if size == 14:
            self._delimited |= name.lower() == b"content-length"
        elif size == 17:
            self._delimited |= name.lower() == b"transfer-encoding" and value.rstrip().lower().endswith(b"chunked")

    def on_headers_complete(self) -> None:
        """Note the status, and whether only the end of the connection will end the body."""
        if self._complete:
            return
        status = self._parser.get_status_code()
        # Interim responses are not the answer (RFC 9110 section 15.2); after a 101 HTTP is over.
        if status >= _OK or status == 101:
            self._status = status
            self._until_close = not self._delimited

    def on_body(self, data: bytes) -> None:
        """Body bytes, after chunk framing has been taken off."""
        if not self._complete:
            self._framing_bytes = 0
            self._size_bytes += len(data)
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """The answer is complete, unless it was an interim one."""
        if self._status and not self._complete:
            self._complete = True
            # Asked here and not later: llhttp clears the flags it answers from when the next message may begin.
            self._reusable = self._parser.should_keep_alive()

    # -- ends

    def _expire(self) -> None:
        self._fail(TimeoutError())

    def _lost(self, exc: Exception | None) -> None:
        if self._answer is None:
            return
        if self._until_close and exc is None:
            # RFC 9112 section 6.3: without a length, the body ends where the connection does.
            self._succeed(keep=False)
        elif self._reused and not self._responding:
            self._fail(StaleError())
        else:
            self._fail(BadAnswerError(f"{type(exc).__name__}: {exc}" if exc else "connection closed within the answer"))

    def _succeed(self, *, keep: bool) -> None:
        answer, self._answer = self._answer, None
        body = b"".join(self._pieces)
        self._pieces.clear()
        self._reused = True
        if not keep:
            self.close()
        if answer is not None and not answer.done():
            answer.set_result(body)

    def _fail(self, error: Exception) -> None:
        answer, self._answer = self._answer, None
        self.close()
        if answer is not None and not answer.done():
            answer.set_exception(error)
