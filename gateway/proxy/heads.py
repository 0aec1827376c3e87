"""Message heads on both sides: what is dropped, what is ours, what passes.

RFC 9110 section 7.6.1: an intermediary removes the Connection header, every header that it names, and the known
hop-by-hop headers before forwarding. RFC 9112 section 6: framing (Content-Length, Transfer-Encoding) belongs to the
connection, so both are made anew. Everything else passes byte for byte, names in their own case.
"""

import re
from collections.abc import Sequence

from gateway.proxy import errors
from gateway.proxy.errors import GatewayError

Header = tuple[bytes, bytes]

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
_REQUEST_OURS = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"authorization",
    b"x-api-key",
    b"x-request-id",
}
_RESPONSE_OURS = _HOP_BY_HOP | {b"content-length", b"x-request-id"}

# What may stand in an id that ends up in logs, headers and the engine's own ids.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@=+/-]{1,128}")
# RFC 3986 section 3.2.2, loosely: what a Host header may hold; llhttp has refused control bytes already.
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]*")
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)([^#]*)", re.IGNORECASE)
_DOT_SEGMENT = re.compile(rb"/(?:\.|%2e){1,2}(?:/|$)", re.IGNORECASE)
# A fragment is never sent (RFC 9110 section 7.1); control bytes and spaces would end the request line early.
_TARGET = re.compile(rb"/[^\x00-\x20\x7f#]*")


class RequestHead:
    """One request's head, read once.

    Attributes:
        method: as sent, upper case.
        target: origin-form target, with the query.
        path: target without the query.
        passed: the header lines that go on to the replica, ready to send.
        expect_continue: the client waits for 100 Continue.
        content_type, content_encoding, authorization, api_key, request_id: special headers, b"" if absent.
        content_length: declared length; None when absent.
        chunked: a Transfer-Encoding is present (llhttp has checked that it is chunked).
        headers: all headers by lower-case name (last value), for policies and options.
        error: the reason to refuse the request, None when it is well formed.
    """

    __slots__ = (
        "api_key",
        "authorization",
        "chunked",
        "content_encoding",
        "content_length",
        "content_type",
        "error",
        "expect_continue",
        "headers",
        "keep_alive",
        "method",
        "passed",
        "path",
        "request_id",
        "target",
        "version_1_0",
    )

    def __init__(
        self, method: bytes, url: bytes, headers: Sequence[Header], version_1_0: bool, keep_alive: bool
    ) -> None:
        self.method = method
        self.version_1_0 = version_1_0
        self.keep_alive = keep_alive
        self.error: GatewayError | None = None
        self.content_length: int | None = None
        self.chunked = False
        by_name: dict[bytes, bytes] = {}
        passed: list[bytes] = []
        named: bytes | None = None
        hosts = 0
        for name, value in headers:
            lower = name.lower()
            by_name[lower] = value
            if lower in _REQUEST_OURS:
                if lower == b"host":
                    hosts += 1
                elif lower == b"content-length":
                    self.content_length = int(value)
                elif lower == b"transfer-encoding":
                    self.chunked = True
                elif lower == b"connection":
                    named = value if named is None else named + b"," + value
                continue
            passed += (name, b": ", value, b"\r\n")
        self.headers = by_name
        get = by_name.get
        self.content_type = get(b"content-type", b"")
        self.content_encoding = get(b"content-encoding", b"")
        self.authorization = get(b"authorization", b"")
        self.api_key = get(b"x-api-key", b"")
        self.request_id = get(b"x-request-id", b"")
        self.expect_continue = b"expect" in by_name and get(b"expect", b"").lower() == b"100-continue"
        if named is not None and named.lower() not in (b"keep-alive", b"close"):
            passed = _without_named(passed, named)
        self.passed = b"".join(passed)
        if not url.startswith(b"/"):
            # RFC 9112 section 3.2.2: a server accepts the absolute form, and its authority replaces Host.
            absolute = _ABSOLUTE.fullmatch(url)
            if absolute is None or not absolute[1]:
                url = b""
            else:
                rest = absolute[2]
                url = rest if rest.startswith(b"/") else b"/" + rest
        self.target = url
        self.path = url.partition(b"?")[0]
        if not _TARGET.fullmatch(url) or _DOT_SEGMENT.search(self.path):
            self.error = errors.BAD_TARGET
        # RFC 9112 section 3.2: 400 to any HTTP/1.1 request that lacks Host, or has more than one, or an invalid one.
        elif hosts > 1 or (hosts == 0 and not version_1_0) or (hosts and not _HOST.fullmatch(by_name[b"host"])):
            self.error = errors.BAD_HOST

    def valid_request_id(self) -> bool:
        """Say whether the client's x-request-id may be kept: short, and free of anything a log or header minds."""
        return _REQUEST_ID.fullmatch(self.request_id) is not None


def _without_named(passed: list[bytes], named: bytes) -> list[bytes]:
    names = {token.strip().lower() for token in named.split(b",")}
    kept: list[bytes] = []
    for i in range(0, len(passed), 4):
        if passed[i].lower() not in names:
            kept += passed[i : i + 4]
    return kept


def replica_request_head(
    head: RequestHead,
    host: bytes,
    base_path: bytes,
    credentials: bytes,
    request_id: bytes,
    body_bytes: int | None,
) -> bytes:
    """Return the head sent to a replica.

    Args:
        head: the client's head.
        host: Host value of the replica.
        base_path: path prefix of the replica's URL, b"" for none.
        credentials: header lines that authenticate, b"" for none.
        request_id: the request's id.
        body_bytes: length of the body; None when it is streamed in chunks; ignored for bodiless requests.
    """
    lines = [
        head.method,
        b" ",
        base_path,
        head.target,
        b" HTTP/1.1\r\nhost: ",
        host,
        b"\r\n",
        head.passed,
        credentials,
        b"x-request-id: ",
        request_id,
    ]
    if body_bytes is None:
        lines.append(b"\r\ntransfer-encoding: chunked\r\n\r\n")
    elif body_bytes or head.content_length is not None or head.chunked or head.method == b"POST":
        lines += (b"\r\ncontent-length: ", str(body_bytes).encode(), b"\r\n\r\n")
    else:
        lines.append(b"\r\n\r\n")
    return b"".join(lines)


class ResponseHead:
    """One response's head from a replica, read once."""

    __slots__ = ("chunked", "content_length", "content_type", "passed", "reason", "retry_after", "status")

    def __init__(self, status: int, reason: bytes, headers: Sequence[Header]) -> None:
        self.status = status
        self.reason = reason
        self.content_length: int | None = None
        self.chunked = False
        self.content_type = b""
        self.retry_after = b""
        passed: list[bytes] = []
        named: bytes | None = None
        for name, value in headers:
            lower = name.lower()
            if lower in _RESPONSE_OURS:
                if lower == b"content-length":
                    self.content_length = int(value)
                elif lower == b"transfer-encoding":
                    self.chunked = True
                elif lower == b"connection":
                    named = value
                continue
            if lower == b"content-type":
                self.content_type = value
            elif lower == b"retry-after":
                self.retry_after = value
            passed += (name, b": ", value, b"\r\n")
        if named is not None and named.lower() not in (b"keep-alive", b"close"):
            passed = _without_named(passed, named)
        self.passed = b"".join(passed)

    def bodiless(self, method: bytes) -> bool:
        """RFC 9112 section 6.3: no body after HEAD, 1xx, 204 and 304, whatever the headers say."""
        return method == b"HEAD" or self.status in (204, 304) or self.status < 200

    @property
    def event_stream(self) -> bool:
        """Say whether the body is server-sent events."""
        return self.content_type.startswith(b"text/event-stream")
