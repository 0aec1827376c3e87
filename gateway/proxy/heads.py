"""Message heads on both sides: what is dropped, what is ours, what passes.

RFC 9110 section 7.6.1: an intermediary removes the Connection header, every header that it names, and the known
hop-by-hop headers before forwarding. RFC 9112 section 6: framing (Content-Length, Transfer-Encoding) belongs to the
connection, so both are made anew. Everything else passes byte for byte, names in their own case.

llhttp has parsed the heads and refused what is no header. It leaves white space at the end of values.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import unquote_to_bytes

from gateway.proxy import errors
from gateway.proxy.errors import GatewayError

Header = tuple[bytes, bytes]

# Kinds of headers. Those below _OURS are looked at and pass on; the others are dropped or made anew.
_PASSED = 0
_CONTENT_TYPE = 1
_CONTENT_ENCODING = 2
_RETRY_AFTER = 3
_LOCATION = 4
_SLO_TTFT = 5
_SLO_TPOT = 6
_OURS = 10
_HOST = 11
_CONTENT_LENGTH = 12
_TRANSFER_ENCODING = 13
_CONNECTION = 14
_EXPECT = 15
_AUTHORIZATION = 16
_API_KEY = 17
_REQUEST_ID = 18
_UPGRADE = 19

_HOP_BY_HOP = {
    b"connection": _CONNECTION,
    b"content-length": _CONTENT_LENGTH,
    b"http2-settings": _OURS,
    b"keep-alive": _OURS,
    b"proxy-authenticate": _OURS,
    b"proxy-authorization": _OURS,
    b"proxy-connection": _OURS,
    b"te": _OURS,
    b"trailer": _OURS,
    b"transfer-encoding": _TRANSFER_ENCODING,
    b"upgrade": _UPGRADE,
}


class _Kinds:
    """Kinds of headers by their names as spelled.

    Spellings are few, so that each is put into lower case once and is then a matter of one look-up. Clients choose
    them, though, so what is learned is bounded; further spellings are only slower.

    Attributes:
        passing: spellings of headers that pass unseen.
        special: kinds of all other known spellings.
    """

    _MAX_SPELLINGS = 2048
    _MAX_NAME_BYTES = 64

    def __init__(self, by_name: Mapping[bytes, int]) -> None:
        self._by_name = by_name
        self.passing: set[bytes] = set()
        self.special: dict[bytes, int] = dict(by_name)

    def learn(self, name: bytes) -> int:
        """Return the kind of a spelling that is not known yet."""
        kind = self._by_name.get(name.lower(), _PASSED)
        if len(name) <= self._MAX_NAME_BYTES and len(self.passing) + len(self.special) < self._MAX_SPELLINGS:
            if kind:
                self.special[name] = kind
            else:
                self.passing.add(name)
        return kind


_IN_REQUESTS = _Kinds(
    _HOP_BY_HOP
    | {
        b"authorization": _AUTHORIZATION,
        b"content-encoding": _CONTENT_ENCODING,
        b"content-type": _CONTENT_TYPE,
        b"expect": _EXPECT,
        b"host": _HOST,
        b"x-api-key": _API_KEY,
        b"x-request-id": _REQUEST_ID,
        b"x-slo-tpot-ms": _SLO_TPOT,
        b"x-slo-ttft-ms": _SLO_TTFT,
    }
)
_IN_RESPONSES = _Kinds(
    _HOP_BY_HOP
    | {
        b"content-encoding": _CONTENT_ENCODING,
        b"content-type": _CONTENT_TYPE,
        b"location": _LOCATION,
        b"retry-after": _RETRY_AFTER,
        b"x-request-id": _OURS,
        # A replica may be a gateway itself; the client is told of this one's decision.
        b"x-warmgate-expected-cached-tokens": _OURS,
        b"x-warmgate-policy": _OURS,
        b"x-warmgate-predicted-ttft-ms": _OURS,
        b"x-warmgate-replica": _OURS,
        b"x-warmgate-slo": _OURS,
    }
)

# RFC 9110 section 9.1 leaves open which methods a server implements. CONNECT and TRACE must not pass to a replica.
_METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})
# Connection headers that name no other header, as nearly all are.
_NAMES_NONE = frozenset({b"keep-alive", b"Keep-Alive", b"close", b"Close"})

# What may stand in an id that ends up in logs, headers and the engine's own ids.
_REQUEST_ID_FORM = re.compile(rb"[A-Za-z0-9._:@=+/-]{1,128}")
# RFC 3986 section 3.2.2, loosely, without user information: what a Host header may hold.
_HOST_BYTES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._~!$&'()*+,;=:%[]-"
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)([^#]*)", re.IGNORECASE)
_DOT_SEGMENT = re.compile(rb"/\.{1,2}(?:/|\Z)")
# A fragment is never sent (RFC 9110 section 7.1); control bytes and spaces would end the request line early.
_TARGET = re.compile(rb"/[\x21\x22\x24-\x7e]*")

_KNOWN_GOOD_TARGETS = frozenset(
    {
        b"/v1/chat/completions",
        b"/v1/completions",
        b"/v1/embeddings",
        b"/v1/messages",
        b"/v1/models",
        b"/v1/responses",
    }
)


class _HeaderLookup(Mapping[bytes, bytes]):
    """Headers by lower-case name, the last of equals; indexed when first asked, as most requests are not."""

    __slots__ = ("_by_name", "_headers")

    def __init__(self, headers: Sequence[Header]) -> None:
        self._headers = headers
        self._by_name: dict[bytes, bytes] | None = None

    def _index(self) -> dict[bytes, bytes]:
        index = self._by_name
        if index is None:
            index = self._by_name = {name.lower(): value.rstrip(b" \t") for name, value in self._headers}
        return index

    def __getitem__(self, name: bytes) -> bytes:
        return self._index()[name]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._index())

    def __len__(self) -> int:
        return len(self._index())


class RequestHead:
    """One request's head, read once.

    Attributes:
        method: as sent, upper case.
        target: origin-form target, with the query, as sent.
        path: target without the query, percent-encoding resolved: what the replica will see it as.
        passed: the header lines that go on to the replica, ready to send.
        keep_alive: the client wants the connection to stay open.
        expect_continue: the client waits for 100 Continue.
        content_type, content_encoding, authorization, api_key, request_id: special headers, b"" if absent; lines of the
            same name are joined with commas (RFC 9110 section 5.3).
        targets: values of the latency targets' headers, TTFT and TPOT, each None if absent; None if both are.
        content_length: declared length; None when absent.
        chunked: the body comes in chunks.
        has_body: a body follows the head.
        upgrade: the client offers another protocol, which is ignored.
        headers: all headers by lower-case name (last value), for policies and options.
        error: the reason to refuse the request, None when it is well formed.
    """

    __slots__ = (
        "_headers",
        "api_key",
        "authorization",
        "chunked",
        "content_encoding",
        "content_length",
        "content_type",
        "error",
        "expect_continue",
        "has_body",
        "keep_alive",
        "method",
        "passed",
        "path",
        "request_id",
        "target",
        "targets",
        "upgrade",
        "version_1_0",
    )

    def __init__(
        self, method: bytes, url: bytes, headers: Sequence[Header], version_1_0: bool, keep_alive: bool
    ) -> None:
        self.method = method
        self.version_1_0 = version_1_0
        self.keep_alive = keep_alive
        self.error: GatewayError | None = None
        self._headers = headers
        passing = _IN_REQUESTS.passing
        special = _IN_REQUESTS.special
        passed: list[bytes] = []
        found: dict[int, bytes] = {}
        repeated_host = False
        for header in headers:
            name = header[0]
            if name in passing:
                passed.append(b": ".join(header))
                continue
            kind = special.get(name) or _IN_REQUESTS.learn(name)
            if kind < _OURS:
                passed.append(b": ".join(header))
                if not kind:
                    continue
            if kind in found:
                repeated_host = repeated_host or kind == _HOST
                found[kind] = found[kind] + b", " + header[1]
            else:
                found[kind] = header[1]
        get = found.get
        self.content_type = get(_CONTENT_TYPE, b"")
        self.content_encoding = get(_CONTENT_ENCODING, b"")
        self.authorization = get(_AUTHORIZATION, b"")
        self.api_key = get(_API_KEY, b"")
        self.request_id = get(_REQUEST_ID, b"").rstrip(b" \t")
        self.targets: tuple[bytes | None, bytes | None] | None = None
        if _SLO_TTFT in found or _SLO_TPOT in found:
            self.targets = get(_SLO_TTFT), get(_SLO_TPOT)
        self.expect_continue = _EXPECT in found and found[_EXPECT].strip().lower() == b"100-continue"
        if _CONNECTION in found and found[_CONNECTION] not in _NAMES_NONE:
            passed = _without_named(passed, found[_CONNECTION])
        if passed:
            passed.append(b"")
        self.passed = b"\r\n".join(passed)
        self.content_length: int | None = None
        self.chunked = False
        if _CONTENT_LENGTH in found:
            self.content_length = _length(found[_CONTENT_LENGTH])
            if self.content_length is None:
                self.error = errors.BAD_HTTP
        elif _TRANSFER_ENCODING in found:
            self.chunked = True
            self._check_transfer_encoding(found[_TRANSFER_ENCODING])
        self.has_body = self.chunked or bool(self.content_length)
        self.upgrade = _UPGRADE in found
        if url in _KNOWN_GOOD_TARGETS:
            self.target = self.path = url
        else:
            self._read_target(url)
        # RFC 9112 section 3.2: "A server MUST respond with a 400 (Bad Request) status code to any HTTP/1.1 request
        # message that lacks a Host header field and to any request message that contains more than one Host header
        # field line or a Host header field with an invalid field value."
        host = get(_HOST)
        if host is None:
            if not version_1_0:
                self.error = errors.BAD_HOST
        elif repeated_host or host.rstrip(b" \t").translate(None, _HOST_BYTES):
            self.error = errors.BAD_HOST
        if method not in _METHODS:
            self.error = errors.UNKNOWN_METHOD

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """All headers by lower-case name."""
        return _HeaderLookup(self._headers)

    def valid_request_id(self) -> bool:
        """Say whether the client's x-request-id may be kept: short, and free of anything a log or header minds."""
        return bool(self.request_id) and _REQUEST_ID_FORM.fullmatch(self.request_id) is not None

    def _check_transfer_encoding(self, codings: bytes) -> None:
        # RFC 9112 section 6.1: "A server or client that receives an HTTP/1.0 message containing a Transfer-Encoding
        # header field MUST treat the message as if the framing is faulty". Section 6.3: if "the chunked transfer coding
        # is not the final encoding [...] the server MUST respond with the 400 (Bad Request) status code". Section 6.1:
        # "A server that receives a request message with a transfer coding it does not understand SHOULD respond with
        # 501". A coding below `chunked` would stay on the body while the header that tells of it is dropped.
        below, _, final = codings.lower().rpartition(b",")
        if self.version_1_0 or final.strip() != b"chunked":
            self.error = errors.BAD_HTTP
        elif below:
            self.error = errors.UNKNOWN_CODING

    def _read_target(self, url: bytes) -> None:
        if not url.startswith(b"/"):
            # RFC 9112 section 3.2.2: "a server MUST accept the absolute-form in requests". Its authority replaces Host.
            absolute = _ABSOLUTE.fullmatch(url)
            if absolute is None or not absolute[1] or absolute[1].translate(None, _HOST_BYTES):
                url = b""
            else:
                rest = absolute[2]
                url = rest if rest.startswith(b"/") else b"/" + rest
        self.target = url
        path = url.partition(b"?")[0]
        if b"%" in path:
            # The replica resolves the encoding before it looks for a route, so rules about paths must hold after it.
            path = unquote_to_bytes(path)
        self.path = path
        if not _TARGET.fullmatch(url) or _DOT_SEGMENT.search(path):
            self.error = errors.BAD_TARGET


def _length(value: bytes) -> int | None:
    # llhttp has seen to it that these are digits and not too large a number, but not to how many zeros lead them.
    digits = value.rstrip(b" \t")
    return int(digits) if len(digits) <= 64 and digits.isdigit() else None


def _without_named(passed: list[bytes], named: bytes) -> list[bytes]:
    """Return the header lines that a Connection header does not name."""
    names = {token.strip() for token in named.lower().split(b",")}
    return [line for line in passed if line.partition(b":")[0].lower() not in names]


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
    if body_bytes is None:
        framing = b"\r\ntransfer-encoding: chunked\r\n\r\n"
    elif body_bytes or head.content_length is not None or head.chunked or head.method == b"POST":
        framing = b"\r\ncontent-length: %d\r\n\r\n" % body_bytes
    else:
        framing = b"\r\n\r\n"
    return b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b%bx-request-id: %b%b" % (
        head.method,
        base_path,
        head.target,
        host,
        head.passed,
        credentials,
        request_id,
        framing,
    )


class ResponseHead:
    """One response's head from a replica, read once.

    Attributes:
        status, reason: as sent.
        passed: the header lines that go on to the client, ready to send.
        content_length: declared length; None when absent.
        chunked: the body comes in chunks.
        encoded: the body has a Content-Encoding.
        content_type, retry_after: special headers, b"" if absent.
    """

    __slots__ = ("chunked", "content_length", "content_type", "encoded", "passed", "reason", "retry_after", "status")

    def __init__(self, status: int, reason: bytes, headers: Sequence[Header], origin: bytes = b"") -> None:
        """Read a head.

        Args:
            status: status code.
            reason: reason phrase.
            headers: all header lines.
            origin: host and base path under which the gateway knows the replica; clients are not told of it.
        """
        self.status = status
        self.reason = reason
        self.content_length: int | None = None
        self.chunked = False
        self.content_type = b""
        self.encoded = False
        self.retry_after = b""
        passing = _IN_RESPONSES.passing
        special = _IN_RESPONSES.special
        passed: list[bytes] = []
        named: bytes | None = None
        for header in headers:
            name = header[0]
            if name in passing:
                passed.append(b": ".join(header))
                continue
            kind = special.get(name) or _IN_RESPONSES.learn(name)
            value = header[1]
            if kind < _OURS:
                if kind == _CONTENT_TYPE:
                    self.content_type = value
                elif kind == _RETRY_AFTER:
                    self.retry_after = value
                elif kind == _CONTENT_ENCODING:
                    self.encoded = True
                elif kind == _LOCATION and origin:
                    header = (name, _relative(value, origin))
                passed.append(b": ".join(header))
            elif kind == _CONTENT_LENGTH:
                self.content_length = int(value)
            elif kind == _TRANSFER_ENCODING:
                self.chunked = True
            elif kind == _CONNECTION:
                named = value if named is None else named + b"," + value
        if named is not None and named not in _NAMES_NONE:
            passed = _without_named(passed, named)
        if passed:
            passed.append(b"")
        self.passed = b"\r\n".join(passed)

    def bodiless(self, method: bytes) -> bool:
        """RFC 9112 section 6.3: no body after HEAD, 1xx, 204 and 304, whatever the headers say."""
        return method == b"HEAD" or self.status in (204, 304) or self.status < 200

    @property
    def event_stream(self) -> bool:
        """Say whether the body is server-sent events."""
        return self.content_type[:17].lower() == b"text/event-stream"


def _relative(location: bytes, origin: bytes) -> bytes:
    """Return a redirection to the replica's own address as one to the same path here.

    Starlette (thus vLLM) redirects from paths with a slash too many to `http://<Host>/...`.
    """
    scheme, separator, rest = location.partition(b"://")
    if separator and scheme.lower() in (b"http", b"https") and rest.startswith(origin):
        path = rest[len(origin) :]
        if path.startswith(b"/"):
            return path
    return location
