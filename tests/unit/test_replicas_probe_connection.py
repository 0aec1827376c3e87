"""What a probe's connection makes of bytes, whatever pieces they come in, and of the connection's end."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exchanges import FakeTransport

from gateway.replicas.probe_connection import BadAnswerError, ProbeConnection, StaleError

REQUEST = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
PLAIN = OK + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\nTrailer: t\r\n\r\n"
UNTIL_CLOSE = OK + b"Content-Type: text/plain\r\n\r\nhello"
LIMIT_BYTES = 100
NEVER_S = 1e9


class Link:
    """A connection over a transport that only records."""

    def __init__(self) -> None:
        self.transport = FakeTransport()
        self.connection = ProbeConnection()
        self.connection.connection_made(self.transport)

    async def ask(self) -> "asyncio.Task[bytes]":
        """Begin a request."""
        task = asyncio.create_task(self.connection.get(REQUEST, NEVER_S, LIMIT_BYTES))
        await asyncio.sleep(0)
        return task

    def end(self, error: Exception | None = None) -> None:
        """What the event loop tells when the other side closes the connection, or resets it."""
        if not self.connection.closed:
            self.connection.connection_lost(error)

    async def exchange(self, *pieces: bytes, ends: bool = False) -> bytes | Exception:
        """Ask, feed the pieces of the answer, and return what comes of it."""
        task = await self.ask()
        for piece in pieces:
            if self.transport.ended is None:
                self.connection.data_received(piece)
        if ends:
            self.end()
        [outcome] = await asyncio.gather(task, return_exceptions=True)
        assert not isinstance(outcome, BaseException) or isinstance(outcome, Exception)
        return outcome


@pytest.mark.parametrize(
    ("answer", "ends", "usable"),
    [
        (PLAIN, False, True),
        (CHUNKED, False, True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + PLAIN, False, True),
        (OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello", False, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", False, False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\nhello", False, True),
        (UNTIL_CLOSE, True, False),
        (b"HTTP/1.0 200 OK\r\n\r\nhello", True, False),
        (OK + b"Transfer-Encoding: chunked, gzip\r\n\r\nhello", True, False),
    ],
)
@given(data=st.data())
def test_an_answer_is_the_same_in_whatever_pieces_it_comes(
    answer: bytes, ends: bool, usable: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(answer) - 1), max_size=6)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]

    async def play() -> None:
        link = Link()
        assert await link.exchange(*pieces, ends=ends) == b"hello"
        assert link.transport.sent == REQUEST
        assert link.connection.usable == usable
        if usable:
            assert await link.exchange(PLAIN) == b"hello"

    asyncio.run(play())


@pytest.mark.parametrize(
    ("answer", "ends", "said"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 9\r\n\r\n", False, "status 503"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, "status 204"),
        (b"HTTP/1.1 302 Found\r\nLocation: /health\r\nContent-Length: 0\r\n\r\n", False, "status 302"),
        (b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", False, "status 101"),
        (OK + b"Content-Length: 101\r\n\r\n" + b"x" * 101, False, "longer than 100 bytes"),
        (OK + b"\r\n" + b"x" * 101, False, "longer than 100 bytes"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 101, False, "longer than 100 bytes"),
        (OK + b"X: y\r\n" * 12_000, False, "head of the answer longer"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 3_000, False, "head of the answer longer"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 12_000, False, "head of the answer longer"),
        (b"220 smtp.example ready\r\n", False, "HttpParser"),
        (OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", False, "HttpParser"),
        (OK + b"Content-Length: 5\r\n\r\nhell", True, "closed within the answer"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", True, "closed within the answer"),
        (OK + b"Content-Le", True, "closed within the answer"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", True, "closed within the answer"),
        (b"", True, "closed within the answer"),
    ],
)
async def test_answers_that_are_no_use(answer: bytes, ends: bool, said: str) -> None:
    link = Link()
    pieces = [answer[at : at + 4096] for at in range(0, len(answer), 4096)]
    outcome = await link.exchange(*pieces, ends=ends)
    assert isinstance(outcome, BadAnswerError)
    assert said in str(outcome)
    assert not link.connection.usable
    assert ends or link.transport.ended == "aborted"


async def test_a_body_as_long_as_the_limit_is_accepted() -> None:
    assert await Link().exchange(OK + b"Content-Length: 100\r\n\r\n" + b"x" * LIMIT_BYTES) == b"x" * LIMIT_BYTES


async def test_a_reset_is_no_end_of_a_body_without_length() -> None:
    link = Link()
    task = await link.ask()
    link.connection.data_received(UNTIL_CLOSE)
    link.end(ConnectionResetError("reset by peer"))
    with pytest.raises(BadAnswerError, match="ConnectionResetError: reset by peer"):
        await task


@pytest.mark.parametrize("error", [None, BrokenPipeError()])
async def test_only_a_used_connection_without_a_byte_of_the_answer_is_stale(error: Exception | None) -> None:
    for first, then, stale in ((b"", b"", False), (PLAIN, b"", True), (PLAIN, b"H", False)):
        link = Link()
        if first:
            await link.exchange(first)
        task = await link.ask()
        if then:
            link.connection.data_received(then)
        link.end(error)
        with pytest.raises(StaleError if stale else BadAnswerError):
            await task


async def test_a_connection_lost_before_its_first_request_fails_at_once() -> None:
    link = Link()
    link.end()
    with pytest.raises(BadAnswerError):
        await link.connection.get(REQUEST, NEVER_S, LIMIT_BYTES)


@pytest.mark.parametrize("excess", [b"\r\nHTTP", PLAIN, b"\x00", b"x" * 200])
async def test_bytes_behind_an_answer_end_the_connection_and_not_the_answer(excess: bytes) -> None:
    link = Link()
    assert await link.exchange(PLAIN + excess) == b"hello"
    assert not link.connection.usable


async def test_bytes_that_nobody_asked_for_are_no_answer() -> None:
    link = Link()
    await link.exchange(PLAIN)
    link.connection.data_received(PLAIN)
    assert not link.connection.usable


async def test_the_deadline_ends_the_request_and_the_connection() -> None:
    link = Link()
    with pytest.raises(TimeoutError):
        await link.connection.get(REQUEST, asyncio.get_running_loop().time(), LIMIT_BYTES)
    assert link.transport.ended == "aborted"


async def test_the_deadline_of_a_request_that_was_answered_means_nothing_to_the_next() -> None:
    link = Link()
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + 0.02
    first = asyncio.create_task(link.connection.get(REQUEST, deadline_s, LIMIT_BYTES))
    await asyncio.sleep(0)
    link.connection.data_received(PLAIN)
    await first
    second = await link.ask()
    passed = asyncio.Event()
    loop.call_at(deadline_s, passed.set)
    await passed.wait()
    link.connection.data_received(PLAIN)
    assert await second == b"hello"


async def test_how_one_body_is_delimited_means_nothing_to_the_next() -> None:
    for first in (PLAIN, CHUNKED):
        link = Link()
        await link.exchange(first)
        assert await link.exchange(UNTIL_CLOSE, ends=True) == b"hello"


@pytest.mark.parametrize("answered", [False, True])
async def test_a_cancelled_request_closes_the_connection(answered: bool) -> None:
    link = Link()
    task = await link.ask()
    if answered:
        # Complete, but its task has not had its turn yet: nobody would take the connection back.
        link.connection.data_received(PLAIN)
    task.cancel()
    if not answered:
        link.connection.data_received(b"HTTP/1.1 200")
    outcome: Any = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(outcome[0], asyncio.CancelledError)
    assert link.transport.ended == "aborted"
