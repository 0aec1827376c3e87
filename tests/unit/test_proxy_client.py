"""The client's connection, driven with bytes: real llhttp, a fake transport, a fake plane and scripted exchanges.

A test reads as the wire does: `wire.sends(...)` is what the client puts on it, `wire.log` what the exchanges are told
of it, `wire.takes()` what the client gets.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.proxy import client as client_module
from gateway.proxy import errors
from gateway.proxy.client import ClientConnection, refusal
from gateway.proxy.failures import Phase
from gateway.proxy.heads import RequestHead
from gateway.proxy.outbox import Outbox

pytestmark = pytest.mark.interpreted

LIMITS = SimpleNamespace(
    max_head_bytes=1024,
    max_headers=16,
    write_buffer_bytes=4096,
    head_timeout_s=10.0,
    idle_timeout_s=75.0,
    client_stall_timeout_s=300.0,
)


class Transport(asyncio.Transport):
    """Keeps what is done to it."""

    def __init__(self, tls: bool = False) -> None:
        super().__init__({"peername": ("192.0.2.1", 40000)})
        self.written = b""
        self.reading = True
        self.ended: str | None = None
        self.tls = tls
        self.linger: bytes | None = None

    def write(self, data: Any) -> None:
        assert self.ended is None, "written after the end"
        self.written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == LIMITS.write_buffer_bytes

    def can_write_eof(self) -> bool:
        return not self.tls

    def write_eof(self) -> None:
        self.ended = "eof"

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"

    def is_closing(self) -> bool:
        return self.ended in ("closed", "aborted")

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext":
            return object() if self.tls else None
        return self if name == "socket" else super().get_extra_info(name, default)

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_LINGER)
        self.linger = value


class ScriptedExchange:
    """Notes what it is told, and answers when the test says so, or at once when the target says so."""

    wire: "Wire"

    def __init__(self, plane: Any, connection: ClientConnection, head: RequestHead) -> None:
        self.head = head
        self.name = head.path.decode()
        self.connection = connection
        self.request_complete = False
        self.phase: Phase | None = None
        self.begun = False
        self.wire.exchanges[self.name] = self

    def note(self, *what: object) -> None:
        self.wire.log.append((self.name, *what))

    def begin(self) -> None:
        assert not self.begun
        self.begun = True
        self.note("begin")
        if self.name == "/bug":
            raise ZeroDivisionError("on purpose")
        if self.name == "/refused" or self.head.error is not None:
            self.answer()
        elif self.request_complete:
            self._complete()

    def request_body(self, data: bytes) -> None:
        self.note("body", data)

    def request_end(self) -> None:
        self.request_complete = True
        self.note("end")
        if self.begun:
            self._complete()

    def _complete(self) -> None:
        if self.name.startswith("/now"):
            self.answer()
        else:
            self.phase = Phase.WAITING

    def client_gone(self) -> None:
        self.note("gone")

    def client_writable(self, writable: bool) -> None:
        self.note("writable", writable)

    def stream(self, data: bytes = b"<head>") -> None:
        """A part of the answer."""
        self.phase = Phase.STREAMING
        self.connection.write(data)

    def answer(self) -> None:
        self.connection.write(f"<{self.name}>".encode())
        self.connection.finished(self.head.keep_alive and self.request_complete and self.head.error is None)


class Wire:
    """One connection and both its ends."""

    def __init__(self, tls: bool = False, **limits: float) -> None:
        self.clock = 1000.0
        self.exchanges: dict[str, ScriptedExchange] = {}
        self.log: list[tuple[object, ...]] = []
        self.refused: list[str] = []
        self.disconnected = 0
        self.accepting = True
        plane = SimpleNamespace(
            limits=SimpleNamespace(**{**vars(LIMITS), **limits}),
            now=lambda: self.clock,
            draining=False,
            outbox=Outbox(),
            client_connected=lambda client: self.accepting,
            client_disconnected=lambda client: setattr(self, "disconnected", self.disconnected + 1),
            refused_bytes=lambda error: self.refused.append(error.code),
        )
        self.plane = plane
        self.transport = Transport(tls)
        self.connection = ClientConnection(cast(Any, plane))

    def connect(self) -> "Wire":
        self.connection.connection_made(self.transport)
        return self

    def sends(self, *segments: bytes) -> None:
        for segment in segments:
            self.connection.data_received(segment)

    def takes(self) -> bytes:
        written, self.transport.written = self.transport.written, b""
        return written

    def told(self) -> list[tuple[object, ...]]:
        log, self.log = self.log, []
        return log

    def ended(self) -> str | None:
        """How the connection has been ended: not, "eof" (the sending side only), "closed" or "aborted"."""
        return self.transport.ended

    def passes(self, seconds: float) -> None:
        """Time passes, and the plane looks at its connections as its tick does."""
        self.clock += seconds
        deadline_s = self.connection.deadline_s
        if deadline_s is not None and deadline_s < self.clock:
            self.connection.expired(self.clock)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    made = Wire()
    use(monkeypatch, made)
    return made.connect()


def use(monkeypatch: pytest.MonkeyPatch, wire: Wire) -> Wire:
    monkeypatch.setattr(ScriptedExchange, "wire", wire, raising=False)
    monkeypatch.setattr(client_module, "Exchange", ScriptedExchange)
    return wire


def get(path: str, *headers: str, version: str = "HTTP/1.1") -> bytes:
    return "\r\n".join([f"GET {path} {version}", "Host: a", *headers, "", ""]).encode()


def post(path: str, body: bytes = b"", *headers: str) -> bytes:
    return (
        "\r\n".join([f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {len(body)}", *headers, "", ""]).encode()
        + body
    )


def chunked(path: str, data: bytes = b"", *headers: str) -> bytes:
    return (
        "\r\n".join([f"POST {path} HTTP/1.1", "Host: a", "Transfer-Encoding: chunked", *headers, "", ""]).encode()
        + data
    )


# -- one request


def test_a_request_without_a_body_is_complete_when_it_begins(wire: Wire) -> None:
    wire.sends(get("/now"))
    assert wire.told() == [("/now", "end"), ("/now", "begin")]
    assert wire.takes() == b"</now>"
    assert wire.ended() is None


def test_a_body_in_the_same_segment(wire: Wire) -> None:
    wire.sends(post("/a", b"hello"))
    assert wire.told() == [("/a", "begin"), ("/a", "body", b"hello"), ("/a", "end")]
    assert wire.connection.deadline_s is None
    wire.exchanges["/a"].answer()
    assert wire.takes() == b"</a>"


def test_a_body_in_pieces(wire: Wire) -> None:
    data = post("/a", b"hello")
    wire.sends(data[:-5], data[-5:-3], data[-3:])
    assert wire.told() == [("/a", "begin"), ("/a", "body", b"he"), ("/a", "body", b"llo"), ("/a", "end")]


def test_any_segmentation_of_a_head_is_the_same_head(wire: Wire) -> None:
    data = post("/now", b"hello", "X-Empty:", "X-A: b ")
    for cut in range(1, len(data)):
        wire.sends(data[:cut], data[cut:])
        assert wire.takes() == b"</now>"
        assert wire.exchanges["/now"].head.passed == b"X-Empty: \r\nX-A: b \r\n"
        assert b"".join(cast(bytes, what[2]) for what in wire.told() if what[1] == "body") == b"hello"


def test_a_read_full_of_tiny_chunks_is_one_piece(wire: Wire) -> None:
    wire.sends(chunked("/a"), b"2\r\nab\r\n" * 30000, b"0\r\n\r\n")
    assert wire.told() == [("/a", "begin"), ("/a", "body", b"ab" * 30000), ("/a", "end")]


def test_the_address_of_the_client(wire: Wire) -> None:
    assert wire.connection.peer == "192.0.2.1"


# -- keep-alive and pipelining


def test_requests_follow_each_other_on_one_connection(wire: Wire) -> None:
    for _ in range(3):
        wire.sends(post("/now", b"x"))
    assert wire.takes() == b"</now></now></now>"
    wire.sends(b"\r\n" + get("/now"))
    assert wire.takes() == b"</now>"


# RFC 9112 section 9.3.2: a server "MUST send the corresponding responses in the same order that the requests were
# received".
def test_pipelined_requests_are_answered_in_order(wire: Wire) -> None:
    wire.sends(get("/1") + post("/now2", b"two") + get("/3") + get("/now4"))
    assert [what for what in wire.told() if what[1] == "begin"] == [("/1", "begin")]
    assert wire.takes() == b""
    wire.exchanges["/1"].answer()
    assert wire.takes() == b"</1></now2>"
    wire.exchanges["/3"].answer()
    assert wire.takes() == b"</3></now4>"
    assert wire.ended() is None


def test_thousands_of_pipelined_requests_do_not_deepen_the_stack(wire: Wire) -> None:
    wire.sends(get("/first") + get("/now") * 5000)
    assert not wire.transport.is_reading()
    wire.exchanges["/first"].answer()
    assert wire.takes() == b"</first>" + b"</now>" * 5000
    assert wire.transport.is_reading()


def test_no_more_is_read_when_many_requests_wait(wire: Wire) -> None:
    wire.sends(get("/a"), *[get("/now")] * 15)
    assert wire.transport.is_reading()
    wire.sends(get("/now"))
    assert not wire.transport.is_reading()
    wire.exchanges["/a"].answer()
    assert wire.transport.is_reading()


def test_the_body_of_a_waiting_request_does_not_pile_up(wire: Wire) -> None:
    data = post("/b", b"x" * 3000)
    wire.sends(get("/a") + data[:-2000])
    assert not wire.transport.is_reading()
    wire.exchanges["/a"].answer()
    assert wire.transport.is_reading()
    wire.sends(data[-2000:])
    assert wire.exchanges["/b"].request_complete


def test_a_bad_request_behind_good_ones_is_refused_in_its_turn(wire: Wire) -> None:
    wire.sends(get("/a") + get("/now") + b"GET nonsense\r\n\r\n" + get("/never"))
    assert wire.takes() == b""
    wire.exchanges["/a"].answer()
    assert wire.takes() == b"</a></now>" + refusal(errors.BAD_HTTP)
    assert wire.ended() == "eof"
    assert "/never" not in wire.exchanges
    assert wire.refused == ["invalid_http"]


def test_bad_framing_of_a_waiting_request_spoils_only_that(wire: Wire) -> None:
    wire.sends(get("/a") + chunked("/b", b"zz\r\n"))
    wire.exchanges["/a"].answer()
    assert wire.takes() == b"</a>" + refusal(errors.BAD_HTTP)
    assert ("/b", "gone") in wire.told()
    assert not wire.exchanges["/b"].begun


# RFC 9112 section 9.6: "A server that receives a "close" connection option MUST initiate closure of the connection
# after it sends the final response to the request that contained the "close" connection option. [...] The server MUST
# NOT process any further requests received on that connection."
@pytest.mark.parametrize(
    "last", [get("/a", "Connection: close"), get("/a", version="HTTP/1.0"), post("/a", b"x", "Connection: Close")]
)
def test_nothing_is_processed_after_close(wire: Wire, last: bytes) -> None:
    wire.sends(last + get("/b"), get("/c"))
    assert set(wire.exchanges) == {"/a"}
    wire.exchanges["/a"].answer()
    assert wire.takes() == b"</a>"
    assert wire.ended() == "closed"
    assert wire.refused == []


def test_line_ends_behind_a_last_request_do_no_harm(wire: Wire) -> None:
    wire.sends(post("/a", b"x", "Connection: close") + b"\r\n", b"\r\n")
    wire.exchanges["/a"].answer()
    assert wire.takes() == b"</a>"


def test_http_1_0_with_keep_alive(wire: Wire) -> None:
    wire.sends(get("/now", "Connection: Keep-Alive", version="HTTP/1.0"))
    assert wire.ended() is None
    wire.sends(get("/now", version="HTTP/1.0"))
    assert wire.ended() == "closed"
    assert wire.takes() == b"</now></now>"


def test_a_draining_gateway_keeps_no_connection(wire: Wire) -> None:
    wire.sends(get("/a"))
    wire.plane.draining = True
    wire.exchanges["/a"].answer()
    assert wire.ended() == "closed"


# -- upgrades


H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAM")
"""As Java's HttpClient asks for HTTP/2 with its first request, whatever its method; it then reuses the connection."""


@pytest.mark.parametrize(
    ("upgrade", "body"),
    [
        (get("/now1", "Connection: Upgrade", "Upgrade: websocket"), b""),
        (post("/now1", b"", *H2C), b""),
        (post("/now1", b"GET /never HTTP/1.1\r\nHost: a\r\n\r\n", *H2C), b"GET /never HTTP/1.1\r\nHost: a\r\n\r\n"),
        (chunked("/now1", b"2\r\nab\r\n1\r\nc\r\n0\r\nX-T: a\r\n\r\n", *H2C), b"abc"),
    ],
)
def test_an_upgrade_is_ignored_and_the_connection_goes_on(wire: Wire, upgrade: bytes, body: bytes) -> None:
    for segments in (
        [upgrade, get("/now2")],
        [upgrade + get("/now2")],
        [upgrade[:-1], upgrade[-1:] + get("/now2")],
        [bytes([byte]) for byte in upgrade + get("/now2")],
    ):
        wire.sends(*segments)
        assert wire.takes() == b"</now1></now2>"
        assert b"".join(cast(bytes, what[2]) for what in wire.told() if what[1] == "body") == body
        assert wire.exchanges["/now1"].head.passed == b""
    assert set(wire.exchanges) == {"/now1", "/now2"}


def test_an_upgrade_behind_another_request(wire: Wire) -> None:
    wire.sends(get("/a") + post("/b", b"hi", *H2C)[:-1])
    assert not wire.transport.is_reading()
    wire.exchanges["/a"].answer()
    wire.sends(b"i" + get("/now"))
    assert wire.told()[-4:] == [("/b", "begin"), ("/b", "body", b"i"), ("/b", "end"), ("/now", "end")]
    wire.exchanges["/b"].answer()
    assert wire.takes() == b"</a></b></now>"


def test_an_upgrade_that_is_refused(wire: Wire) -> None:
    wire.sends(post("/refused", b"GET /never HTTP/1.1\r\nHost: a\r\n\r\n", *H2C), get("/never"))
    assert wire.takes() == b"</refused>"
    assert set(wire.exchanges) == {"/refused"}


def test_thousands_of_pipelined_upgrades_do_not_deepen_the_stack(wire: Wire) -> None:
    wire.sends(get("/now", "Connection: Upgrade", "Upgrade: websocket") * 3000)
    assert wire.takes() == b"</now>" * 3000


@pytest.mark.parametrize("framing", [b"", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_bytes_behind_connect_are_no_requests(wire: Wire, framing: bytes) -> None:
    wire.sends(b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n" + framing + b"\r\n" + get("/never"), get("/never"))
    ((name, exchange),) = wire.exchanges.items()
    assert exchange.head.error is errors.UNKNOWN_METHOD
    assert [what for what in wire.told() if what[1] == "begin"] == [(name, "begin")]
    assert wire.ended() in ("closed", "eof")


# -- refusals


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", errors.BAD_HTTP),
        (b"GET /\r\n\r\n", errors.BAD_HTTP),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", errors.UNSUPPORTED_VERSION),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", errors.BAD_HTTP),
        (get("/", "X: " + "x" * 1100), errors.HEAD_TOO_LARGE),
        (get("/", *["X: x"] * 16), errors.HEAD_TOO_LARGE),
        (get("/" + "x" * 1100), errors.HEAD_TOO_LARGE),
    ],
)
def test_bytes_that_are_refused(wire: Wire, data: bytes, error: errors.GatewayError) -> None:
    wire.sends(data)
    assert wire.takes() == refusal(error)
    assert wire.exchanges == {}
    assert wire.ended() == "eof"
    assert wire.refused == [error.code]


def test_a_head_without_end_is_refused_before_it_is_complete(wire: Wire) -> None:
    wire.sends(b"GET / HTTP/1.1\r\nX: ", *[b"x" * 100] * 10)
    assert wire.takes() == b""
    wire.sends(b"x" * 100)
    assert wire.takes() == refusal(errors.HEAD_TOO_LARGE)


def test_the_size_of_a_head_behind_another_request_counts_too(wire: Wire) -> None:
    wire.sends(get("/now") + get("/big", "X: " + "x" * 1100))
    assert wire.takes() == b"</now>" + refusal(errors.HEAD_TOO_LARGE)


def test_large_bodies_are_no_large_heads(wire: Wire) -> None:
    wire.sends(post("/now", b"x" * 5000) * 3, post("/now", b"x" * 5000)[:-1], b"x")
    assert wire.takes() == b"</now>" * 4


# Trailers and chunk extensions are not kept, but neither may they go on for ever.
@pytest.mark.parametrize("filler", [b"T: " + b"x" * 200 + b"\r\n", b"x" * 200])
def test_trailers_without_end_are_refused(wire: Wire, filler: bytes) -> None:
    wire.sends(chunked("/a"), b"1\r\nx\r\n0\r\nT: ")
    wire.sends(*[filler] * 6)
    assert wire.takes() == refusal(errors.HEAD_TOO_LARGE)
    assert wire.told()[-1] == ("/a", "gone")


def test_trailers_are_dropped(wire: Wire) -> None:
    wire.sends(chunked("/now1", b"1\r\nx\r\n0\r\nX-T: a\r\nX-U: b\r\n\r\n"), get("/now2"))
    assert wire.takes() == b"</now1></now2>"
    assert wire.exchanges["/now2"].head.passed == b""


def test_bad_framing_ends_the_request_it_belongs_to(wire: Wire) -> None:
    wire.sends(chunked("/a", b"3\r\nabc\r\n"), b"zz\r\n")
    assert wire.told() == [("/a", "begin"), ("/a", "body", b"abc"), ("/a", "gone")]
    assert wire.takes() == refusal(errors.BAD_HTTP)


def test_no_second_head_appears_inside_an_answer(wire: Wire) -> None:
    wire.sends(chunked("/a", b"3\r\nabc\r\n"))
    wire.exchanges["/a"].stream()
    wire.sends(b"zz\r\n")
    assert wire.takes() == b"<head>"
    assert wire.ended() == "aborted"
    assert wire.told()[-1] == ("/a", "gone")


def test_an_answer_before_the_end_of_the_request_ends_the_connection_gently(wire: Wire) -> None:
    wire.sends(post("/refused", b"x" * 100)[:-10])
    assert wire.takes() == b"</refused>"
    assert wire.ended() == "eof"
    wire.sends(b"x" * 10, get("/b"))
    assert wire.told() == [("/refused", "begin")]
    wire.passes(2.1)
    assert wire.ended() == "aborted"


def test_tls_cannot_be_half_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = use(monkeypatch, Wire(tls=True)).connect()
    wire.sends(b"nonsense\r\n\r\n")
    assert wire.takes() == refusal(errors.BAD_HTTP)
    assert wire.ended() == "closed"


@pytest.mark.parametrize("request_bytes", [get("/bug"), post("/bug", b"x")])
def test_a_fault_of_ours_is_a_500_and_logged(
    wire: Wire, caplog: pytest.LogCaptureFixture, request_bytes: bytes
) -> None:
    with caplog.at_level(logging.ERROR):
        wire.sends(request_bytes)
    assert wire.takes() == refusal(errors.INTERNAL)
    assert wire.ended() == "eof"
    assert ("/bug", "gone") in wire.told()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


def test_a_fault_behind_another_request(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    wire.sends(get("/a") + get("/bug") + get("/b"))
    wire.exchanges["/a"].answer()
    assert wire.takes() == b"</a>" + refusal(errors.INTERNAL)
    assert not wire.exchanges["/b"].begun


# -- a client that reads slowly


def test_back_pressure_reaches_the_current_request(wire: Wire) -> None:
    wire.sends(get("/a"))
    wire.told()
    wire.connection.pause_writing()
    wire.connection.resume_writing()
    assert wire.told() == [("/a", "writable", False), ("/a", "writable", True)]


def test_no_answer_begins_before_the_last_one_has_been_taken(wire: Wire) -> None:
    wire.sends(get("/a") + get("/now1"))
    wire.connection.pause_writing()
    wire.exchanges["/a"].answer()
    wire.sends(get("/now2"))
    assert wire.takes() == b"</a>"
    wire.connection.resume_writing()
    assert wire.takes() == b"</now1></now2>"


def test_a_body_is_not_read_before_the_last_answer_has_been_taken(wire: Wire) -> None:
    wire.sends(get("/a"))
    wire.connection.pause_writing()
    wire.exchanges["/a"].answer()
    wire.sends(post("/b", b"xy")[:-1])
    assert not wire.exchanges["/b"].begun
    assert not wire.transport.is_reading()
    wire.connection.resume_writing()
    assert wire.transport.is_reading()
    assert wire.exchanges["/b"].begun


def test_a_client_that_never_takes_its_answer_is_cut_off(wire: Wire) -> None:
    wire.sends(get("/a") + get("/b"))
    wire.connection.pause_writing()
    wire.exchanges["/a"].answer()
    wire.passes(299)
    assert wire.ended() is None
    wire.passes(2)
    assert wire.ended() == "aborted"


def test_a_closed_connection_whose_bytes_nobody_takes_is_cut_off(wire: Wire) -> None:
    wire.sends(get("/a", "Connection: close"))
    wire.exchanges["/a"].answer()
    assert wire.ended() == "closed"
    wire.passes(301)
    assert wire.ended() == "aborted"


def test_an_abort_with_reset(wire: Wire) -> None:
    wire.sends(get("/a"))
    wire.exchanges["/a"].stream()
    wire.connection.abort(reset=True)
    assert wire.ended() == "closed"
    assert wire.transport.linger == client_module._RESET_ON_CLOSE
    wire.passes(2.1)
    assert wire.ended() == "aborted"


def test_an_abort_with_reset_over_tls_does_not_close_properly(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = use(monkeypatch, Wire(tls=True)).connect()
    wire.sends(get("/a"))
    wire.exchanges["/a"].stream()
    wire.connection.abort(reset=True)
    assert wire.ended() is None
    wire.sends(get("/b"))
    wire.passes(0.01)
    assert wire.ended() == "aborted"
    assert set(wire.exchanges) == {"/a"}


def test_an_abort_without_reset(wire: Wire) -> None:
    wire.sends(get("/a") + get("/b"))
    wire.connection.abort(reset=False)
    assert wire.ended() == "closed"
    assert wire.transport.linger is None
    assert not wire.exchanges["/b"].begun


def test_uploads_are_held_back_and_let_go(wire: Wire) -> None:
    wire.sends(post("/a", b"xy")[:-1])
    wire.connection.pause()
    wire.connection.pause()
    assert not wire.transport.is_reading()
    wire.connection.resume()
    wire.connection.resume()
    assert wire.transport.is_reading()


# -- a client that leaves


@pytest.mark.parametrize("how", ["leaves", "close", "idle", "bad"])
def test_what_has_been_answered_in_this_turn_is_sent_before_the_connection_ends(wire: Wire, how: str) -> None:
    wire.plane.outbox.open(lambda flush: None)
    wire.sends(get("/now"))
    assert wire.transport.written == b""
    if how == "leaves":
        assert wire.connection.eof_received() is False
    elif how == "close":
        wire.sends(get("/now", "Connection: close"))
    elif how == "idle":
        wire.connection.close_if_idle()
    else:
        wire.sends(b"nonsense\r\n\r\n")
    assert wire.takes().startswith(b"</now>")


def test_what_is_written_to_a_client_that_is_gone_is_forgotten(wire: Wire) -> None:
    soon: list[Callable[[], None]] = []
    wire.plane.outbox.open(soon.append)
    wire.sends(get("/now"))
    wire.connection.connection_lost(None)
    for call in soon:
        call()
    assert wire.takes() == b""


@pytest.mark.parametrize("how", ["eof", "lost"])
def test_a_client_that_leaves_ends_all_its_requests(wire: Wire, how: str) -> None:
    wire.sends(get("/a") + get("/b") + post("/c", b"xy")[:-1])
    wire.told()
    if how == "eof":
        assert wire.connection.eof_received() is False
    wire.connection.connection_lost(None)
    assert wire.told() == [("/a", "gone"), ("/b", "gone"), ("/c", "gone")]
    assert wire.disconnected == 1
    wire.connection.finished(True)
    wire.sends(get("/d"))
    wire.connection.pause()
    wire.connection.resume()
    assert wire.told() == []


def test_a_connection_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = use(monkeypatch, Wire())
    wire.accepting = False
    wire.connect()
    assert wire.ended() == "aborted"
    wire.sends(get("/now"))
    assert wire.told() == []


# -- time


def test_a_head_must_arrive_in_time(wire: Wire) -> None:
    wire.passes(9)
    wire.sends(b"GET / HT")
    wire.passes(9)
    wire.sends(b"TP/1.1\r\n")
    assert wire.takes() == b""
    wire.passes(2)
    assert wire.takes() == refusal(errors.HEAD_TIMEOUT)
    assert wire.ended() == "eof"


def test_a_connection_without_a_byte_is_closed_without_a_word(wire: Wire) -> None:
    wire.passes(11)
    assert wire.takes() == b""
    assert wire.ended() == "closed"


def test_an_idle_connection_is_closed_without_a_word(wire: Wire) -> None:
    wire.sends(get("/now"))
    wire.takes()
    wire.passes(74)
    assert wire.ended() is None
    wire.passes(2)
    assert wire.ended() == "closed"
    assert wire.takes() == b""
    wire.passes(2.1)
    assert wire.ended() == "aborted"


def test_a_head_begun_behind_another_request_must_arrive_in_time_too(wire: Wire) -> None:
    wire.sends(get("/now") + b"GET / HT")
    wire.takes()
    wire.passes(11)
    assert wire.takes() == refusal(errors.HEAD_TIMEOUT)


def test_a_running_request_has_its_own_limits(wire: Wire) -> None:
    wire.sends(get("/a") + b"GET /b HT")
    wire.passes(10_000)
    assert wire.ended() is None
    wire.exchanges["/a"].answer()
    wire.passes(9)
    wire.sends(b"TP/1.1\r\nHost: a\r\n\r\n")
    assert wire.exchanges["/b"].begun


def test_drain_closes_idle_connections_only(wire: Wire) -> None:
    wire.sends(get("/a"))
    wire.connection.close_if_idle()
    assert wire.ended() is None
    wire.exchanges["/a"].answer()
    wire.connection.close_if_idle()
    assert wire.ended() == "closed"


def test_refusals_have_openais_shape() -> None:
    assert refusal(errors.HEAD_TOO_LARGE) == (
        b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\ncontent-length: 138\r\n"
        b'connection: close\r\n\r\n{"error":{"message":"The request line and headers are too large.",'
        b'"type":"invalid_request_error","param":null,"code":"headers_too_large"}}'
    )
