"""The listening socket over real connections."""

import asyncio
import errno
import socket
from collections.abc import Iterator

import pytest
import uvloop

from gateway.proxy.listener import Arrivals, Listener, bind, listen


class Counting(asyncio.Protocol):
    made: list[asyncio.BaseTransport]

    def __init__(self, made: list[asyncio.BaseTransport]) -> None:
        self.made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made.append(transport)


@pytest.fixture
def clients() -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    yield opened
    for client in opened:
        client.close()


def connect(port: int, clients: list[socket.socket]) -> None:
    clients.append(socket.create_connection(("127.0.0.1", port)))


async def listening(host: str, port: int, made: list[asyncio.BaseTransport]) -> Listener:
    return listen(await bind(host, port), 512, Arrivals(lambda: Counting(made), None, 1.0).take)


async def until(made: list[asyncio.BaseTransport], count: int) -> int:
    turns = 0
    async with asyncio.timeout(10):
        while len(made) < count:
            await asyncio.sleep(0)
            turns += 1
    return turns


def test_a_burst_is_accepted_in_a_few_turns_of_the_loop(clients: list[socket.socket]) -> None:
    async def run() -> None:
        made: list[asyncio.BaseTransport] = []
        listener = await listening("127.0.0.1", 0, made)
        for _ in range(200):
            connect(listener.port, clients)
        assert await until(made, 200) < 40
        for transport in made:
            raw = transport.get_extra_info("socket")
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            transport.close()
        listener.close()
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            connect(listener.port, clients)

    uvloop.run(run())


class OutOfSockets:
    """A listening socket whose first accept fails."""

    def __init__(self, real: socket.socket) -> None:
        self.real = real
        self.failures = [errno.ECONNABORTED, errno.EMFILE]

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            raise OSError(self.failures.pop(0), "no")
        return self.real.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


def test_out_of_sockets_is_a_pause_not_an_end(clients: list[socket.socket], caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        made: list[asyncio.BaseTransport] = []
        real = socket.create_server(("127.0.0.1", 0))
        real.setblocking(False)
        arrivals = Arrivals(lambda: Counting(made), None, 1.0)
        listener = Listener([OutOfSockets(real)], arrivals.take)  # type: ignore[list-item]
        connect(listener.port, clients)
        await until(made, 1)
        made[0].close()
        listener.close()

    uvloop.run(run())
    assert "cannot accept" in caplog.text


def test_a_taken_port_is_named(clients: list[socket.socket]) -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
                await listening("127.0.0.1", port, [])

    uvloop.run(run())


def test_a_name_with_two_addresses_binds_both_on_one_port(clients: list[socket.socket]) -> None:
    async def run() -> None:
        made: list[asyncio.BaseTransport] = []
        listener = await listening("localhost", 0, made)
        connect(listener.port, clients)
        await until(made, 1)
        made[0].close()
        listener.close()

    uvloop.run(run())
