"""Connections to replicas: what their bytes and ends mean, and which of them are used again."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.exchanges import DONE, LIMITS, SSE_HEAD, SSE_UNTIL_CLOSE, TOKEN, Clock, FakeTransport, chunk

from gateway.proxy.failures import Cause
from gateway.proxy.heads import ResponseHead
from gateway.proxy.upstream import ReplicaConnection, ReplicaPool, chunk_begin
from gateway.replicas.registry import Fleet, Replica, ReplicaSpec


class Sink:
    """An exchange that only writes down what it is told."""

    def __init__(self, method: bytes = b"POST", request_complete: bool = True) -> None:
        self.method = method
        self.request_complete = request_complete
        self.said: list[Any] = []
        self.body = b""
        self.whole_chunks = 0
        self.heard = asyncio.Event()

    def _say(self, what: Any) -> None:
        self.said.append(what)
        self.heard.set()

    def connected(self, connection: ReplicaConnection) -> None:
        self.connection = connection
        self._say("connected")

    def connect_failed(self, cause: Cause) -> None:
        self._say(cause)

    def response_head(self, head: ResponseHead) -> None:
        self._say(head.status)

    def response_body(self, data: bytes, chunk: bytes = b"") -> None:
        assert data
        assert not chunk or chunk == b"%x\r\n%b\r\n" % (len(data), data)
        self.body += data
        self.whole_chunks += bool(chunk)

    def response_end(self) -> None:
        self._say("end")

    def replica_failed(self, cause: Cause) -> None:
        self._say(cause)

    def replica_writable(self, writable: bool) -> None:
        self._say(writable)


def a_replica(url: str = "http://replica.test") -> Replica:
    return Fleet().add(ReplicaSpec(url, models=("m",)))


def a_pool(clock: Clock | None = None, **limits: Any) -> ReplicaPool:
    return ReplicaPool(a_replica(), replace(LIMITS, **limits), None, clock or Clock())


def a_connection(pool: ReplicaPool | None = None) -> ReplicaConnection:
    connection = ReplicaConnection(pool or a_pool())
    connection.connection_made(FakeTransport())
    return connection


def ended(connection: ReplicaConnection) -> str | None:
    assert isinstance(connection.transport, FakeTransport)
    return connection.transport.ended


SIZED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = SSE_HEAD + chunk(TOKEN) + chunk(DONE) + chunk(b"")
WITH_TRAILER = SSE_HEAD + chunk(TOKEN) + b"0\r\nx-took: 3\r\n\r\n"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nlink: <x>\r\n\r\n" + SIZED
NO_BODY = b"HTTP/1.1 204 No Content\r\n\r\n"
NOT_MODIFIED = b"HTTP/1.1 304 Not Modified\r\ncontent-length: 900\r\n\r\n"
CLOSING = SIZED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")


@pytest.mark.parametrize(
    ("response", "status", "body", "kept"),
    [
        (SIZED, 200, b"hello", True),
        (CHUNKED, 200, TOKEN + DONE, True),
        (WITH_TRAILER, 200, TOKEN, True),
        (INTERIM, 200, b"hello", True),
        (NO_BODY, 204, b"", True),
        (NOT_MODIFIED, 304, b"", True),
        (CLOSING, 200, b"hello", False),
        (SIZED.replace(b"HTTP/1.1", b"HTTP/1.0"), 200, b"hello", False),
    ],
)
def test_a_response_means_the_same_wherever_it_is_cut(response: bytes, status: int, body: bytes, kept: bool) -> None:
    for cut in range(len(response)):
        pool = a_pool()
        connection, sink = a_connection(pool), Sink()
        connection.send(sink, b"request")
        if cut:
            connection.data_received(response[:cut])
        connection.data_received(response[cut:])
        assert sink.said == [status, "end"]
        assert sink.body == body
        assert pool.idle_count == (1 if kept else 0)
        assert ended(connection) == (None if kept else "aborted")


def test_every_byte_alone() -> None:
    connection, sink = a_connection(), Sink()
    connection.send(sink, b"request")
    for byte in CHUNKED:
        connection.data_received(bytes((byte,)))
    assert (sink.said, sink.body) == ([200, "end"], TOKEN + DONE)


def test_chunks_that_come_one_by_one_are_passed_on_as_they_are() -> None:
    connection, sink = a_connection(), Sink()
    connection.send(sink, b"request")
    for piece in (SSE_HEAD, chunk(TOKEN), chunk(TOKEN), chunk(TOKEN)[:7], chunk(TOKEN)[7:], chunk(TOKEN) + chunk(DONE)):
        connection.data_received(piece)
    assert (sink.said, sink.body, sink.whole_chunks) == ([200], TOKEN * 4 + DONE, 1)
    connection.data_received(chunk(TOKEN))
    connection.data_received(chunk(b""))
    assert (sink.said, sink.body, sink.whole_chunks) == ([200, "end"], TOKEN * 4 + DONE + TOKEN, 2)
    connection.send(sink, b"the next request")
    connection.data_received(chunk(TOKEN))
    assert sink.said == [200, "end", Cause.BAD_RESPONSE]


contents = st.binary(min_size=1, max_size=20) | st.sampled_from([b"\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n", b"a" * 300])
size_lines = st.sampled_from([b"%x", b"%X", b"0%x", b"%x;name=value"])


@given(st.lists(st.tuples(contents, size_lines, st.none() | st.integers(0, 400)), max_size=8))
def test_chunks_mean_the_same_however_they_are_written_and_cut(chunks: list[tuple[bytes, bytes, int | None]]) -> None:
    connection, sink = a_connection(), Sink()
    connection.send(sink, b"request")
    connection.data_received(SSE_HEAD)
    held = b""
    for content, line, cut in chunks:
        # Whole, with what was held back of the one before; or in two pieces, the second with the next one.
        data = held + line % len(content) + b"\r\n" + content + b"\r\n"
        held = b"" if cut is None else data[cut:]
        if data[:cut]:
            connection.data_received(data[:cut])
    connection.data_received(held + b"0\r\n\r\n")
    assert (sink.said, sink.body) == ([200, "end"], b"".join(content for content, _, _ in chunks))


@given(st.from_regex(rb"[0-9a-fA-F+_x; -]{0,9}\r?\n?.{0,20}\r?\n?", fullmatch=True))
@example(b"5\r\nhello\r\n")
@example(b"0x5\r\nhello\r\n")
@example(b"6\r\nhello\r\n")
@example(b"4\r\nhello\r\n")
@example(b"\r\n\r\n")
@example(b"0\r\n\r\n")
def test_what_is_taken_for_a_chunk_is_one(data: bytes) -> None:
    begin = chunk_begin(data)
    if begin:
        size, content = data.split(b"\r\n", 1)
        assert (begin, content) == (len(size) + 2, data[begin:-2] + b"\r\n")
        assert set(size) <= set(b"0123456789abcdef")
        assert int(size, 16) == len(content) - 2 > 0


@pytest.mark.parametrize("bad", [b"6\r\nhello\r\n", b"4\r\nhello\r\n", b"g\r\nhello\r\n", b"5\r\nhellohello\r\n"])
def test_what_is_no_chunk_is_refused_between_chunks_as_well(bad: bytes) -> None:
    connection, sink = a_connection(), Sink()
    connection.send(sink, b"request")
    for piece in (SSE_HEAD, chunk(TOKEN), chunk(TOKEN), bad, chunk(TOKEN)):
        if connection.exchange is not None:
            connection.data_received(piece)
    assert sink.said == [200, Cause.BAD_RESPONSE]


def test_a_body_that_ends_with_the_connection() -> None:
    connection, sink = a_connection(), Sink()
    connection.send(sink, b"request")
    connection.data_received(SSE_UNTIL_CLOSE + TOKEN)
    assert sink.said == [200]
    connection.connection_lost(None)
    assert sink.said == [200, "end"]


def test_a_reset_is_no_end_of_such_a_body() -> None:
    connection, sink = a_connection(), Sink()
    connection.send(sink, b"request")
    connection.data_received(SSE_UNTIL_CLOSE + TOKEN)
    connection.connection_lost(ConnectionResetError())
    assert sink.said == [200, Cause.RESET]


@pytest.mark.parametrize("at", [0, 10, len(SSE_HEAD) - 1, len(SSE_HEAD), len(SSE_HEAD) + 20, len(CHUNKED) - 1])
def test_a_connection_lost_before_the_end_is_reset(at: int) -> None:
    connection, sink = a_connection(), Sink()
    connection.send(sink, b"request")
    if at:
        connection.data_received(CHUNKED[:at])
    connection.connection_lost(None)
    assert sink.said[-1] is Cause.RESET
    assert "end" not in sink.said


def test_a_reused_connection_lost_before_any_byte_is_stale_and_after_one_it_is_reset() -> None:
    for received, cause in ((b"", Cause.STALE), (b"H", Cause.RESET)):
        pool = a_pool()
        connection = a_connection(pool)
        connection.send(Sink(), b"request")
        connection.data_received(SIZED)
        assert pool.acquire() is connection
        sink = Sink()
        connection.send(sink, b"request")
        if received:
            connection.data_received(received)
        connection.connection_lost(None)
        assert sink.said == [cause]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x01\x02",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 20x OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1001 + b"content-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\nxx",
    ],
)
def test_bytes_that_are_not_http(garbage: bytes) -> None:
    pool = a_pool()
    connection, sink = a_connection(pool), Sink()
    connection.send(sink, b"request")
    connection.data_received(garbage)
    assert sink.said[-1] is Cause.BAD_RESPONSE
    assert "end" not in sink.said
    assert ended(connection) == "aborted"
    assert pool.idle_count == 0


@given(st.binary(max_size=200), st.booleans())
def test_whatever_a_replica_sends_it_is_told_once_how_it_ended(data: bytes, as_chunks: bool) -> None:
    connection, sink = a_connection(), Sink()
    connection.send(sink, b"request")
    if as_chunks:
        data = SSE_HEAD + data
    if data:
        connection.data_received(data)
    if ended(connection) is None and connection.exchange is not None:
        connection.connection_lost(None)
    ends = [said for said in sink.said if said == "end" or isinstance(said, Cause)]
    assert len(ends) == 1


@pytest.mark.parametrize("excess", [b"HTTP/1.1 200 OK\r\n", SIZED, b"\x00", b"x"])
def test_what_follows_a_response_unasked_never_becomes_the_next_one(excess: bytes) -> None:
    pool = a_pool()
    connection, sink = a_connection(pool), Sink()
    connection.send(sink, b"request")
    connection.data_received(SIZED + excess)
    assert (sink.said, sink.body) == ([200, "end"], b"hello")
    assert pool.acquire() is None
    pool = a_pool()
    connection = a_connection(pool)
    connection.send(Sink(), b"request")
    connection.data_received(SIZED)
    connection.data_received(excess)
    assert ended(connection) == "aborted"
    assert pool.acquire() is None


def test_a_response_before_the_end_of_its_request_ends_the_connection() -> None:
    pool = a_pool()
    connection, sink = a_connection(pool), Sink(request_complete=False)
    connection.send(sink, b"request")
    connection.data_received(SIZED)
    assert sink.said == [200, "end"]
    assert ended(connection) == "aborted"


def test_a_head_request_has_no_body_whatever_its_length_says() -> None:
    connection, sink = a_connection(), Sink(b"HEAD")
    connection.send(sink, b"request")
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
    assert sink.said == [200, "end"]


def test_the_newest_idle_connection_is_used_first_and_old_ones_are_closed() -> None:
    clock = Clock()
    pool = a_pool(clock)
    first, second, third = a_connection(pool), a_connection(pool), a_connection(pool)
    for connection in (first, second, third):
        pool.release(connection)
        clock += 1.0
    assert pool.acquire() is third
    pool.release(third)
    clock += 1.5  # first and second have been idle for 4.5 and 3.5 s, and the limit is 4
    pool.sweep()
    assert (ended(first), ended(second), ended(third)) == ("closed", None, None)
    clock += 4.0
    assert pool.acquire() is None
    assert ended(second) == "closed"
    assert pool.idle_count == 0


def test_a_closed_connection_is_neither_kept_nor_given() -> None:
    pool = a_pool()
    kept, closing = a_connection(pool), a_connection(pool)
    pool.release(kept)
    pool.release(closing)
    closing.transport.close()
    kept.connection_lost(None)
    assert pool.acquire() is None
    lost = a_connection(pool)
    lost.connection_lost(None)
    pool.release(lost)
    assert pool.idle_count == 0


def test_no_more_idle_connections_are_kept_than_allowed() -> None:
    pool = a_pool(max_idle_connections=2)
    connections = [a_connection(pool) for _ in range(3)]
    for connection in connections:
        pool.release(connection)
    assert [ended(connection) for connection in connections] == [None, None, "aborted"]
    pool.close()
    assert [ended(connection) for connection in connections[:2]] == ["closed", "closed"]


def test_a_paused_connection_is_resumed_before_it_is_kept() -> None:
    pool = a_pool()
    connection = a_connection(pool)
    connection.pause()
    pool.release(connection)
    assert isinstance(connection.transport, FakeTransport)
    assert not connection.transport.paused


# -- over real sockets


class Accepting(asyncio.Protocol):
    """Accepts, and says nothing."""

    def __init__(self, transports: list[asyncio.BaseTransport]) -> None:
        self._transports = transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transports.append(transport)


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    transports: list[asyncio.BaseTransport] = []
    server = await asyncio.get_running_loop().create_server(lambda: Accepting(transports), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for transport in transports:
        transport.close()
    # A transport lets go of its socket in a later turn of the loop.
    for _ in range(3):
        await asyncio.sleep(0)


def pool_to(port: int, **limits: Any) -> ReplicaPool:
    loop = asyncio.get_running_loop()
    return ReplicaPool(a_replica(f"http://127.0.0.1:{port}"), replace(LIMITS, **limits), None, loop.time)


async def heard(sink: Sink) -> list[Any]:
    async with asyncio.timeout(5):
        await sink.heard.wait()
    return sink.said


async def test_a_dial_that_succeeds_watches_over_the_other_machine() -> None:
    async with listening() as port:
        sink = Sink()
        pool_to(port).dial(sink)
        assert await heard(sink) == ["connected"]
        raw = sink.connection.transport.get_extra_info("socket")
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
        sink.connection.abandon()


async def test_a_port_where_nobody_listens_is_refused() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        sink = Sink()
        pool_to(unused.getsockname()[1]).dial(sink)
        assert await heard(sink) == [Cause.REFUSED]


async def test_a_connection_that_is_not_accepted_in_time() -> None:
    # A backlog that is full drops what comes on top.
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = []
        loop = asyncio.get_running_loop()
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            fillers.append((filler, loop.create_task(loop.sock_connect(filler, full.getsockname()))))
        await asyncio.sleep(0)
        sink = Sink()
        pool_to(full.getsockname()[1], connect_timeout_s=0.2).dial(sink)
        assert await heard(sink) == [Cause.CONNECT_TIMEOUT]
        for filler, task in fillers:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            filler.close()


async def test_running_out_of_sockets_is_not_blamed_on_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    async def none_left(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(loop, "create_connection", none_left)
    sink = Sink()
    pool_to(1).dial(sink)
    assert await heard(sink) == [Cause.NO_SOCKET]


async def test_a_connection_closed_before_it_was_handed_over_is_a_failure_and_no_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    create_connection = loop.create_connection

    async def closed_at_once(factory: Any, *arguments: Any, **options: Any) -> Any:
        transport, protocol = await create_connection(factory, *arguments, **options)
        # The loss is noticed while the task that asked for the connection waits for its turn.
        transport.abort()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert protocol.closed
        return transport, protocol

    async with listening() as port:
        monkeypatch.setattr(loop, "create_connection", closed_at_once)
        sink = Sink()
        pool_to(port).dial(sink)
        assert await heard(sink) == [Cause.REFUSED]


async def test_a_dial_that_was_called_off_leaves_its_connection_to_the_next() -> None:
    async with listening() as port:
        pool = pool_to(port)
        sink = Sink()
        pool.dial(sink).exchange = None
        await asyncio.gather(*pool._dials)
        assert pool.idle_count == 1
        assert sink.said == []
        connection = pool.acquire()
        assert connection is not None
        connection.abandon()
