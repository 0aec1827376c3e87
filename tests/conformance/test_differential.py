"""A differential fuzz test: what the gateway accepts and forwards means what h11 says that it means.

Mutated HTTP/1.1 goes into the client's connection. What comes out for the replica is read by h11 again, and compared
with h11's reading of the original bytes: method, target, body, end-to-end headers, and where the message ends, which
shows in the messages behind it. Refusing what h11 accepts is always allowed. Accepting what h11 refuses is allowed only
where the difference has been judged harmless: see `judged`.

WARMGATE_FUZZ_EXAMPLES=100000 looks further, at random; the default is the same few hundred examples each time.
"""

import os
import re
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import h11
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.proxy import client as client_module
from gateway.proxy.client import ClientConnection
from gateway.proxy.failures import Phase
from gateway.proxy.heads import RequestHead, replica_request_head
from gateway.proxy.outbox import Outbox

pytestmark = pytest.mark.interpreted

EXAMPLES = int(os.environ.get("WARMGATE_FUZZ_EXAMPLES", "0"))

# -- two readings


@dataclass
class Reading:
    """What a sequence of bytes means: requests in order, and whether there was something that is no request."""

    requests: list[tuple[bytes, bytes, bytes, tuple[tuple[bytes, bytes], ...]]]
    refused: bool = False


def end_to_end(headers: Any) -> tuple[tuple[bytes, bytes], ...]:
    """Headers that pass a proxy: RFC 9110 section 7.6.1, written down here once more and independently."""
    named = {option.strip().lower() for name, value in headers if name == b"connection" for option in value.split(b",")}
    ours = {
        b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings", b"host", b"content-length", b"expect",
        b"authorization", b"x-api-key", b"x-request-id",
    }  # fmt: skip
    return tuple((name, value) for name, value in headers if name not in named | ours)


def h11_reads(data: bytes) -> Reading:
    """Read as h11 does, message by message."""
    reading = Reading([])
    # RFC 9112 section 2.2: "a server that is expecting to receive and parse a request-line SHOULD ignore at least one
    # empty line (CRLF) received prior to the request-line." h11 ignores none.
    while data := data.lstrip(b"\r\n"):
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        connection.receive_data(data)
        request, body = None, b""
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError:
                reading.refused = True
                return reading
            if isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                return reading  # incomplete
        assert request is not None
        target = re.sub(rb"(?i)^https?://[^/?#]+", b"", request.target)
        target = target if target.startswith(b"/") else b"/" + target
        reading.requests.append((request.method, target, body, end_to_end(request.headers)))
        options = [
            option.strip().lower()
            for name, value in request.headers
            for option in value.split(b",")
            if name == b"connection"
        ]
        # h11 does not know that HTTP/1.0 may ask for keep-alive (RFC 9112 section 9.3).
        kept_in_1_0 = request.http_version == b"1.0" and b"keep-alive" in options and b"close" not in options
        if connection.their_state is h11.MUST_CLOSE and not kept_in_1_0:
            break
        data = connection.trailing_data[0]
    return reading


class Recorder:
    """An exchange that forwards to nobody, answers at once, and keeps what a replica would have got."""

    forwarded: list[bytes]

    def __init__(self, plane: Any, connection: ClientConnection, head: RequestHead) -> None:
        self.head = head
        self.connection = connection
        self.request_complete = False
        self.phase: Phase | None = None
        self.begun = False
        self.body: list[bytes] = []

    def begin(self) -> None:
        self.begun = True
        if self.head.error is not None:
            self.connection.write(b"refused")
            self.connection.finished(False)
        elif self.request_complete:
            self.complete()

    def request_body(self, data: bytes) -> None:
        self.body.append(data)

    def request_end(self) -> None:
        self.request_complete = True
        if self.begun:
            self.complete()

    def complete(self) -> None:
        head, body = self.head, b"".join(self.body)
        whole = replica_request_head(head, b"replica", b"", b"", b"id", len(body)) + body
        # The other form, in which uploads of unknown length go on.
        pieces = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in self.body if piece) + b"0\r\n\r\n"
        chunked = replica_request_head(head, b"replica", b"", b"", b"id", None) + pieces
        reading = h11_reads(whole)
        assert h11_reads(chunked) == reading
        assert not reading.refused
        (request,) = reading.requests
        # Nothing of one request becomes another one at the replica.
        follower = b"GET /next HTTP/1.1\r\nhost: a\r\n\r\n"
        for sent in (whole, chunked):
            assert [target for _, target, _, _ in h11_reads(sent + follower).requests] == [request[1], b"/next"]
        self.connection.requests.append(request)  # type: ignore[attr-defined]
        self.connection.finished(head.keep_alive)

    def client_gone(self) -> None:
        pass

    def client_writable(self, writable: bool) -> None:
        pass


class Connection(ClientConnection):
    """A client's connection that remembers what it has forwarded."""

    requests: list[tuple[bytes, bytes, bytes, tuple[tuple[bytes, bytes], ...]]]


class Transport:
    """Nowhere."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def is_closing(self) -> bool:
        return False


PLANE = SimpleNamespace(
    limits=SimpleNamespace(
        max_head_bytes=1 << 16,
        max_headers=128,
        write_buffer_bytes=1 << 16,
        head_timeout_s=10.0,
        idle_timeout_s=10.0,
        client_stall_timeout_s=10.0,
    ),
    now=time.monotonic,
    draining=False,
    outbox=Outbox(),
    client_connected=lambda client: True,
    client_disconnected=lambda client: None,
    refused_bytes=lambda error: None,
)


def gateway_reads(segments: list[bytes]) -> Reading:
    """Read as the gateway does; requests are what h11 makes of that which is forwarded."""
    connection = Connection(cast(Any, PLANE))
    connection.requests = []
    connection.connection_made(cast(Any, Transport()))
    for segment in segments:
        connection.data_received(segment)
    return Reading(connection.requests, connection._closing)


@pytest.fixture(scope="module", autouse=True)
def recorded() -> Any:
    patch = pytest.MonkeyPatch()
    patch.setattr(client_module, "Exchange", Recorder)
    yield
    patch.undo()


# -- where llhttp is known to accept more than h11


def judged(data: bytes) -> bytes:
    """Take away what llhttp accepts and h11 does not, where that cannot change what a message means.

    - More than one blank between method, target and version: RFC 9112 section 3 allows it ("recipients MAY instead
      parse on whitespace-delimited word boundaries"), and the forwarded line has single ones.
    - RTSP/1.0 for HTTP/1.0: nothing of the version is forwarded, and the rest is read as HTTP.
    """
    data = re.sub(rb"(?m)^([A-Z]+) +(\S+) +(HTTP/1\.[01]\r)$", rb"\1 \2 \3", data)
    return re.sub(rb"(?m) RTSP/1\.0\r$", b" HTTP/1.0\r", data)


def check(segments: list[bytes]) -> tuple[Reading, Reading]:
    """Compare both readings."""
    data = b"".join(segments)
    ours = gateway_reads(segments)
    reference = h11_reads(data)
    if reference.refused and len(ours.requests) > len(reference.requests):
        reference = h11_reads(judged(data))
    assert ours.requests == reference.requests[: len(ours.requests)]
    # Cut otherwise, the same bytes are the same requests.
    assert gateway_reads([data]) == ours
    return ours, reference


# -- mutated requests

TOKENS = [
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\n\n", b"\x00", b"\t", b" ", b"  ", b":", b",", b";", b"\x0b", b"\x7f",
    b"\xff", b"0", b"1", b"+", b"-", b"0x", b"_", b"?", b"#", b"//", b"%0d%0a", b'"', b"\\", b"HTTP/1.1", b"http://",
    b"chunked", b"identity", b"gzip, ", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b" folded\r\n",
    b"Connection: close\r\n", b"Connection: content-length\r\n", b"Host: b\r\n", b"Upgrade: h2c\r\n", b"0\r\n\r\n",
    b"3\r\nabc\r\n", b"GET /inner HTTP/1.1\r\nHost: c\r\n\r\n",
]  # fmt: skip


def mostly(usual: list[bytes], odd: list[bytes]) -> st.SearchStrategy[bytes]:
    """One of the usual values, and one time in ten an odd one."""
    return st.integers(0, 9).flatmap(lambda dice: st.sampled_from(odd if dice == 9 else usual))


METHODS = mostly([b"GET", b"POST", b"POST", b"PUT"], [b"HEAD", b"OPTIONS", b"CONNECT", b"TRACE", b"SOURCE"])
TARGETS = mostly([b"/v1/x", b"/", b"/v1/x?a=b", b"http://h/v1/x"], [b"http://h?q", b"*", b"h:80", b"/%2e./x", b"/a%20"])
VERSIONS = mostly([b"HTTP/1.1"] * 9 + [b"HTTP/1.0"], [b"HTTP/1.2", b"HTTP/0.9", b"HTTP/2.0", b"RTSP/1.0", b"http/1.1"])
HOSTS = mostly([b"a"], [b"a:80", b"", b"a b", b"a\t", b"a,b"])
NAMES = st.sampled_from([b"X-A", b"x-a", b"Accept", b"TE", b"Trailer", b"Keep-Alive", b"X_B", b"Expect", b"Cookie"])
VALUES = mostly(
    [b"a", b"", b"  a  ", b"\ta\t", b"a, b", b"trailers", b"100-continue", b"\xe9"], [b"\x00", b"a\x0bb", b"\x7f"]
)
CONNECTIONS = mostly(
    [b"keep-alive", b"x-a", b"Keep-Alive, X-A", b"te"], [b"close", b"close, x-a", b"te, Close ", b"Upgrade"]
)
LENGTHS = mostly([b"%d"], [b"%d ", b" %d", b"0%d", b"+%d", b"%d,%d", b"%x", b"-%d", b"%d\t"])
CODINGS = mostly([b"chunked", b"Chunked ", b"\tchunked"], [b"gzip, chunked", b"chunked, x", b"xchunked", b"identity"])
EXTENSIONS = mostly([b""], [b";a", b";a=b", b';a="b c"', b"; a", b" ", b";"])
TRAILERS = mostly([b"", b"X-T: a\r\n"], [b"Content-Length: 1\r\n", b"X-T:\r\nConnection: close\r\n", b"X-T\r\n"])
LINE_ENDS = st.integers(0, 29).flatmap(
    lambda dice: st.sampled_from([b"\n", b"\r", b" \r\n"] if dice == 29 else [b"\r\n"])
)
FRAMINGS = st.sampled_from(["none", "none", "length", "length", "length", "chunked", "chunked", "chunked", "both"])


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """One message, more or less valid."""
    body = draw(st.one_of(st.binary(max_size=20), st.sampled_from([b"{}", b"GET /body HTTP/1.1\r\nHost: d\r\n\r\n"])))
    headers = [(b"Host", draw(HOSTS)), *draw(st.lists(st.tuples(NAMES, VALUES), max_size=3))]
    if draw(st.booleans()):
        headers.append((b"Connection", draw(CONNECTIONS)))
    if draw(st.integers(0, 4)) == 0:
        headers += [(b"Connection", b"Upgrade"), (b"Upgrade", draw(st.sampled_from([b"h2c", b"websocket"])))]
    framing = draw(FRAMINGS)
    payload = b"" if framing == "none" else body
    if framing in ("length", "both"):
        length = draw(LENGTHS).replace(b"%d", b"%d" % len(body)).replace(b"%x", b"%x" % len(body))
        headers.append((b"Content-Length", length))
    if framing in ("chunked", "both"):
        headers.append((b"Transfer-Encoding", draw(CODINGS)))
        cuts = sorted(draw(st.sets(st.integers(0, len(body)), max_size=3)))
        pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True) if a < b]
        extension = draw(EXTENSIONS)
        payload = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
        payload += b"0%b\r\n%b\r\n" % (extension, draw(TRAILERS))
    headers = draw(st.permutations(headers))
    separator = draw(mostly([b": ", b":", b":\t"], [b" :", b"\t: ", b"\r\n :"]))
    end = draw(LINE_ENDS)
    first = draw(METHODS) + b" " + draw(TARGETS) + b" " + draw(VERSIONS)
    return end.join([first, *(name + separator + value for name, value in headers)]) + end + b"\r\n" + payload


@st.composite
def mutated(draw: st.DrawFn) -> list[bytes]:
    """A few messages on one connection, damaged here and there, in segments."""
    data = b"".join(draw(st.lists(messages(), min_size=1, max_size=3)))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2]))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["insert", "insert", "delete", "replace", "repeat"]))
        to = min(len(data), at + draw(st.integers(1, 12)))
        if kind == "insert":
            data = data[:at] + draw(st.sampled_from(TOKENS)) + data[at:]
        elif kind == "delete":
            data = data[:at] + data[to:]
        elif kind == "replace":
            data = data[:at] + draw(st.sampled_from(TOKENS)) + data[to:]
        else:
            data = data[:to] + data[at:to] + data[to:]
    if draw(st.booleans()):
        data += b"GET /last HTTP/1.1\r\nHost: z\r\n\r\n"
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=4)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]


@settings(
    max_examples=EXAMPLES or 300,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(mutated())
def test_what_is_forwarded_means_what_was_sent(segments: list[bytes]) -> None:
    check(segments)


# -- the judged differences, and what has been found


@pytest.mark.parametrize(
    "data",
    [
        b"GET   /v1/x   HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /v1/x RTSP/1.0\r\nHost: a\r\n\r\n",
    ],
)
def test_what_is_accepted_and_h11_refuses(data: bytes) -> None:
    assert h11_reads(data).refused
    ours, reference = check([data])
    assert len(ours.requests) == 1
    assert ours.requests == reference.requests


@pytest.mark.parametrize(
    "data",
    [
        # httptools ends these at the empty line; the body would have become the next request.
        b"POST /v1/x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 28\r\n\r\n"
        b"GET /b HTTP/1.1\r\nHost: b\r\n\r\nGET /v1/y HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n0\r\nX-T: y\r\n\r\nGET /v1/y HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_bodies_behind_an_upgrade(data: bytes) -> None:
    for cut in range(1, len(data)):
        ours, _ = check([data[:cut], data[cut:]])
        assert [target for _, target, _, _ in ours.requests] == [b"/v1/x", b"/v1/y"]
