"""The client's half of an exchange: one answer, framed for the connection it goes out on.

Framing belongs to a connection (RFC 9112 section 6), so the replica's is taken off and this one's put on: a length
where one is known, chunks where not, and for a client of HTTP/1.0 the end of the connection.
"""

from typing import Protocol

from gateway.proxy.errors import REASONS, GatewayError
from gateway.proxy.heads import RequestHead, ResponseHead


class ClientSide(Protocol):
    """What an exchange needs of the client's connection."""

    peer: str
    """The client's address, for the log."""

    def write(self, data: bytes) -> None:
        """Send bytes."""

    def finished(self, keep_alive: bool) -> None:
        """The answer is complete."""

    def abort(self, *, reset: bool) -> None:
        """End the connection so that the answer cannot pass for complete.

        Args:
            reset: a mere close would look like a proper end (or nobody reads), so reset the connection.
        """

    def pause(self) -> None:
        """Stop reading request bytes."""

    def resume(self) -> None:
        """Read request bytes again."""


class Answer:
    """One answer.

    Attributes:
        begun: bytes of it have been sent.
        until_close: its body ends with the connection.
        bytes_out: bytes sent, head and framing included.
    """

    __slots__ = ("_chunked", "_client", "_request", "_request_id", "begun", "bytes_out", "until_close")

    def __init__(self, client: ClientSide, request: RequestHead, request_id: bytes) -> None:
        """Prepare.

        Args:
            client: where it goes.
            request: what it answers.
            request_id: told to the client.
        """
        self._client = client
        self._request = request
        self._request_id = request_id
        self._chunked = False
        self.begun = False
        self.until_close = False
        self.bytes_out = 0

    def error(self, error: GatewayError, keep_alive: bool) -> None:
        """Send an error of the gateway's own."""
        extra = b"retry-after: %d\r\n" % error.retry_after_s if error.retry_after_s is not None else b""
        if error.status == 401:
            extra += b'www-authenticate: Bearer realm="warmgate"\r\n'
        self.json(error.status, error.body(), keep_alive, extra)

    def json(self, status: int, payload: bytes, keep_alive: bool, extra: bytes = b"") -> None:
        """Send an answer of the gateway's own.

        Args:
            status: its status.
            payload: its body.
            keep_alive: the connection stays open.
            extra: further header lines, each with its line end.
        """
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%bx-request-id: %b\r\n%b\r\n"
        self._begin(
            head
            % (
                status,
                REASONS.get(status, b"Error"),
                len(payload),
                extra,
                self._request_id,
                self._connection_header(keep_alive),
            )
            + (b"" if self._request.method == b"HEAD" else payload)
        )

    def relay_head(self, head: ResponseHead, keep_alive: bool, extra: bytes) -> None:
        """Send a replica's response head; its body follows in pieces.

        Args:
            head: the replica's.
            keep_alive: the connection stays open if the body's framing allows it.
            extra: further header lines, each with its line end.
        """
        length = head.content_length
        if length is None and not head.bodiless(self._request.method):
            # RFC 9112 section 6.3 point 8: an HTTP/1.0 client cannot read chunks; its body ends with the connection.
            self.until_close = self._request.version_1_0
            self._chunked = not self.until_close
        self._relay_head(head, length, keep_alive and not self.until_close, extra, b"")

    def relay_whole(self, head: ResponseHead, body: bytes, keep_alive: bool, extra: bytes) -> None:
        """Send a replica's response with all of its body.

        Args:
            head: the replica's.
            body: its body.
            keep_alive: the connection stays open.
            extra: further header lines, each with its line end.
        """
        if head.bodiless(self._request.method):
            self._relay_head(head, head.content_length, keep_alive, extra, b"")
        else:
            self._relay_head(head, len(body), keep_alive, extra, body)

    def relay(self, data: bytes, chunk: bytes = b"") -> None:
        """Send a piece of the body.

        Args:
            data: the piece, not empty.
            chunk: the same in chunked encoding, if it is at hand.
        """
        if self._chunked:
            data = chunk or b"%x\r\n%b\r\n" % (len(data), data)
        self.bytes_out += len(data)
        self._client.write(data)

    def end(self) -> None:
        """The body is complete."""
        if self._chunked:
            self.bytes_out += 5
            self._client.write(b"0\r\n\r\n")

    def _relay_head(self, head: ResponseHead, length: int | None, keep_alive: bool, extra: bytes, body: bytes) -> None:
        if length is not None and head.status != 204:
            framing = b"content-length: %d\r\n" % length
        elif self._chunked:
            framing = b"transfer-encoding: chunked\r\n"
        else:
            framing = b""
        self._begin(
            b"HTTP/1.1 %d %b\r\n%b%bx-request-id: %b\r\n%b%b\r\n%b"
            % (
                head.status,
                head.reason,
                head.passed,
                framing,
                self._request_id,
                extra,
                self._connection_header(keep_alive),
                body,
            )
        )

    def _begin(self, data: bytes) -> None:
        self.begun = True
        self.bytes_out += len(data)
        self._client.write(data)

    def _connection_header(self, keep_alive: bool) -> bytes:
        if not keep_alive:
            return b"connection: close\r\n"
        return b"connection: keep-alive\r\n" if self._request.version_1_0 else b""
