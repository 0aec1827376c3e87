"""Probes over real sockets, against a server that answers in raw bytes and counts its connections."""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
import trustme

from gateway.replicas.probe import ProbeClient, ProbeError, ProbeFailure
from gateway.replicas.registry import Fleet, Replica, ReplicaSpec

PATIENCE_S = 20.0
SOON_S = 0.05
OK = b"HTTP/1.1 200 OK\r\n"
PLAIN = OK + b"Content-Length: 5\r\n\r\nhello"


class Call:
    """One request the server has got, to be answered."""

    def __init__(self, server: "Server", connection: int, head: bytes, writer: asyncio.StreamWriter) -> None:
        self.connection = connection
        self.head = head
        self.writer = writer
        self._server = server

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def hang_up(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def client_left(self) -> None:
        """Wait until the client has closed this connection."""
        async with asyncio.timeout(PATIENCE_S):
            await self._server.ends[self.connection].wait()


class Server:
    """Accepts connections and hands out their requests."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[Call] = asyncio.Queue()
        self.ends: list[asyncio.Event] = []
        self.answer: bytes | None = None
        self.port = 0

    @property
    def connections(self) -> int:
        """How many there have been."""
        return len(self.ends)

    async def listen(self, stack: AsyncExitStack, tls: ssl.SSLContext | None = None) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        stack.callback(server.close)

    async def call(self) -> Call:
        async with asyncio.timeout(PATIENCE_S):
            return await self.calls.get()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, end = self.connections, asyncio.Event()
        self.ends.append(end)
        try:
            while True:
                call = Call(self, connection, await reader.readuntil(b"\r\n\r\n"), writer)
                if self.answer is None:
                    self.calls.put_nowait(call)
                else:
                    writer.write(self.answer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            end.set()
            writer.close()


class Scene:
    """A client, a server and replicas at its address."""

    def __init__(self, client: ProbeClient, server: Server, scheme: str = "http") -> None:
        self.client = client
        self.server = server
        self.scheme = scheme
        self.fleet = Fleet()

    def replica(self, base: str = "", api_key: str | None = None) -> Replica:
        url = f"{self.scheme}://127.0.0.1:{self.server.port}{base}"
        return self.fleet.add(ReplicaSpec(url, api_key=api_key))

    def get(
        self, replica: Replica, path: str = "/health", timeout_s: float = PATIENCE_S, limit_bytes: int = 1000
    ) -> "asyncio.Task[bytes]":
        return asyncio.create_task(self.client.get(replica, path, timeout_s, limit_bytes))

    async def warm(self, replica: Replica) -> Call:
        """Have a connection to a replica that has served once and is idle."""
        probe = self.get(replica)
        call = await self.server.call()
        call.send(PLAIN)
        assert await probe == b"hello"
        return call


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        server = Server()
        await server.listen(stack)
        client = await stack.enter_async_context(ProbeClient())
        yield Scene(client, server)


async def failure(probe: Awaitable[bytes]) -> ProbeFailure:
    with pytest.raises(ProbeError) as caught:
        await probe
    return caught.value.failure


class TestKeepAlive:
    async def test_a_hundred_probes_use_one_connection(self, scene: Scene) -> None:
        scene.server.answer = PLAIN
        replica = scene.replica()
        for _ in range(100):
            assert await scene.client.get(replica, "/health", PATIENCE_S, 1000) == b"hello"
        assert scene.server.connections == 1

    async def test_probes_that_overlap_have_connections_of_their_own_and_both_are_kept(self, scene: Scene) -> None:
        replica = scene.replica()
        for _ in range(3):
            health, metrics = scene.get(replica, "/health"), scene.get(replica, "/metrics")
            for call in (await scene.server.call(), await scene.server.call()):
                call.send(OK + b"Content-Length: 2\r\n\r\n" + (b"he" if b"/health" in call.head else b"me"))
            assert (await health, await metrics) == (b"he", b"me")
        assert scene.server.connections == 2

    async def test_replicas_at_one_address_do_not_share_connections(self, scene: Scene) -> None:
        scene.server.answer = PLAIN
        for base in ("/a", "/b"):
            await scene.get(scene.replica(base))
        assert scene.server.connections == 2

    @pytest.mark.parametrize("ending", [Call.hang_up, Call.reset])
    async def test_a_connection_that_went_stale_is_replaced_once(
        self, scene: Scene, ending: Callable[[Call], None]
    ) -> None:
        replica = scene.replica()
        await scene.warm(replica)
        probe = scene.get(replica)
        again = await scene.server.call()
        assert again.connection == 0
        ending(again)
        fresh = await scene.server.call()
        assert fresh.connection == 1
        fresh.send(PLAIN)
        assert await probe == b"hello"

    async def test_the_replacement_is_not_replaced(self, scene: Scene) -> None:
        replica = scene.replica()
        await scene.warm(replica)
        probe = scene.get(replica)
        for _ in range(2):
            (await scene.server.call()).hang_up()
        assert await failure(probe) is ProbeFailure.ERROR
        assert scene.server.connections == 2

    async def test_an_answer_that_has_begun_is_not_asked_for_again(self, scene: Scene) -> None:
        replica = scene.replica()
        await scene.warm(replica)
        probe = scene.get(replica)
        call = await scene.server.call()
        call.send(b"HTTP/1.1")
        call.hang_up()
        assert await failure(probe) is ProbeFailure.ERROR
        assert scene.server.connections == 1

    async def test_a_connection_closed_while_idle_is_replaced(self, scene: Scene) -> None:
        replica = scene.replica()
        call = await scene.warm(replica)
        call.hang_up()
        await call.client_left()
        await scene.warm(replica)
        assert scene.server.connections == 2

    async def test_a_server_that_stopped_listening_refuses_although_a_connection_was_idle(self, scene: Scene) -> None:
        async with AsyncExitStack() as stack:
            gone = Server()
            await gone.listen(stack)
            replica = scene.fleet.add(ReplicaSpec(f"http://127.0.0.1:{gone.port}"))
            probe = scene.get(replica)
            call = await gone.call()
            call.send(PLAIN)
            await probe
        probe = scene.get(replica)
        (await gone.call()).hang_up()
        assert await failure(probe) is ProbeFailure.REFUSED

    async def test_old_connections_are_not_used_again(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gateway.replicas.probe._KEEPALIVE_S", -1.0)
        replica = scene.replica()
        first = await scene.warm(replica)
        await scene.warm(replica)
        await first.client_left()
        assert scene.server.connections == 2


class TestEnds:
    async def test_connections_of_a_replica_that_is_forgotten_are_closed(self, scene: Scene) -> None:
        gone, stays = scene.replica("/a"), scene.replica("/b")
        idle = await scene.warm(gone)
        await scene.warm(stays)
        scene.client.forget(gone)
        await idle.client_left()
        await scene.warm(stays)
        assert scene.server.connections == 2

    async def test_a_probe_under_way_while_its_replica_is_forgotten_leaves_no_connection(self, scene: Scene) -> None:
        replica = scene.replica()
        probe = scene.get(replica)
        call = await scene.server.call()
        scene.client.forget(replica)
        call.send(PLAIN)
        assert await probe == b"hello"
        await call.client_left()

    async def test_closing_the_client_closes_its_connections(self, scene: Scene) -> None:
        calls = [await scene.warm(scene.replica(base)) for base in ("/a", "/b")]
        await scene.client.close()
        for call in calls:
            await call.client_left()

    async def test_a_cancelled_probe_lets_go_of_the_replica(self, scene: Scene) -> None:
        probe = scene.get(scene.replica())
        call = await scene.server.call()
        probe.cancel()
        await call.client_left()


class TestRequest:
    async def test_what_is_sent(self, scene: Scene) -> None:
        probe = scene.get(scene.replica("/base", api_key="sk-1"), "/a path?x=é")
        call = await scene.server.call()
        call.send(PLAIN)
        await probe
        assert (
            call.head
            == (
                b"GET /base/a%%20path?x=%%C3%%A9 HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept: */*\r\n"
                b"Accept-Encoding: identity\r\nUser-Agent: warmgate\r\nAuthorization: Bearer sk-1\r\n\r\n"
            )
            % scene.server.port
        )

    async def test_no_key_no_header(self, scene: Scene) -> None:
        assert b"authorization" not in (await scene.warm(scene.replica())).head.lower()

    @pytest.mark.parametrize("key", ["sk-1\n", "sk\r\nX-Other: 1", "sk\0"])
    async def test_a_key_with_a_line_end_is_never_sent(self, scene: Scene, key: str) -> None:
        assert await failure(scene.get(scene.replica(api_key=key))) is ProbeFailure.ERROR
        assert scene.server.connections == 0


class TestAnswers:
    @pytest.mark.parametrize(
        ("pieces", "ends"),
        [
            ((OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n", b"3\r\nllo\r\n0\r\n\r\n"), False),
            ((b"HTTP/1.0 200 OK\r\n\r\nhel", b"lo"), True),
        ],
    )
    async def test_bodies_without_content_length(self, scene: Scene, pieces: tuple[bytes, ...], ends: bool) -> None:
        probe = scene.get(scene.replica())
        call = await scene.server.call()
        for piece in pieces:
            call.send(piece)
        if ends:
            call.hang_up()
        assert await probe == b"hello"

    async def test_a_long_body_in_many_reads(self, scene: Scene) -> None:
        body = bytes(range(256)) * 20_000
        scene.server.answer = OK + b"Content-Length: %d\r\n\r\n" % len(body) + body
        replica = scene.replica()
        for _ in range(2):
            assert await scene.get(replica, limit_bytes=len(body)) == body
        assert scene.server.connections == 1
        assert await failure(scene.get(replica, limit_bytes=len(body) - 1)) is ProbeFailure.ERROR

    async def test_a_body_that_never_ends_is_left_at_the_limit(self, scene: Scene) -> None:
        probe = scene.get(scene.replica())
        call = await scene.server.call()
        call.send(OK + b"\r\n" + b"x" * 1001)
        assert await failure(probe) is ProbeFailure.ERROR
        await call.client_left()

    @pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", PLAIN[:-1], OK + b"\r\nhello"])
    @pytest.mark.parametrize("warm", [False, True])
    async def test_a_slow_head_or_body_ends_at_the_time_limit(self, scene: Scene, sent: bytes, warm: bool) -> None:
        replica = scene.replica()
        if warm:
            await scene.warm(replica)
        probe = scene.get(replica, timeout_s=SOON_S)
        call = await scene.server.call()
        call.send(sent)
        assert await failure(probe) is ProbeFailure.TIMEOUT
        await call.client_left()
        assert scene.server.connections == 1

    async def test_bytes_that_trickle_in_do_not_move_the_time_limit(self, scene: Scene) -> None:
        probe = scene.get(scene.replica(), timeout_s=SOON_S)
        call = await scene.server.call()
        call.send(OK + b"\r\n")
        while not probe.done():
            call.send(b"x")
            await asyncio.sleep(SOON_S / 10)
        assert await failure(probe) is ProbeFailure.TIMEOUT

    async def test_a_reset_within_the_body(self, scene: Scene) -> None:
        probe = scene.get(scene.replica())
        call = await scene.server.call()
        call.send(PLAIN[:-1])
        call.reset()
        assert await failure(probe) is ProbeFailure.ERROR

    async def test_a_host_that_cannot_be_a_name(self, scene: Scene) -> None:
        replica = scene.fleet.add(ReplicaSpec(f"http://{'a' * 64}.invalid:1"))
        assert await failure(scene.get(replica)) is ProbeFailure.ERROR


class TestTls:
    @pytest.fixture
    def authority(self) -> trustme.CA:
        return trustme.CA(key_type=trustme.KeyType.ECDSA)

    @staticmethod
    def served_by(authority: trustme.CA, name: str) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert(name).configure_cert(context)
        return context

    @staticmethod
    def trusting(authority: trustme.CA) -> ssl.SSLContext:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        return context

    async def test_one_connection_with_the_given_authorities(self, authority: trustme.CA) -> None:
        async with AsyncExitStack() as stack:
            server = Server()
            await server.listen(stack, self.served_by(authority, "127.0.0.1"))
            client = await stack.enter_async_context(ProbeClient(tls=self.trusting(authority)))
            scene = Scene(client, server, "https")
            replica = scene.replica()
            for _ in range(3):
                await scene.warm(replica)
            assert server.connections == 1

    async def test_authorities_that_change(self, authority: trustme.CA) -> None:
        async with AsyncExitStack() as stack:
            server = Server()
            await server.listen(stack, self.served_by(authority, "127.0.0.1"))
            client = await stack.enter_async_context(ProbeClient(tls=self.trusting(authority)))
            scene = Scene(client, server, "https")
            replica = scene.replica()
            await scene.warm(replica)
            client.use_tls(self.trusting(trustme.CA()))
            assert await failure(scene.get(replica)) is ProbeFailure.ERROR
            client.use_tls(self.trusting(authority))
            await scene.warm(replica)

    async def test_certificates_nobody_vouches_for_or_of_another_host(self, authority: trustme.CA) -> None:
        async with AsyncExitStack() as stack:
            for name, tls in (("127.0.0.1", None), ("127.0.0.2", self.trusting(authority))):
                server = Server()
                await server.listen(stack, self.served_by(authority, name))
                client = await stack.enter_async_context(ProbeClient(tls=tls))
                scene = Scene(client, server, "https")
                assert await failure(scene.get(scene.replica())) is ProbeFailure.ERROR
                assert server.calls.empty()

    async def test_a_handshake_that_nobody_answers_ends_at_the_time_limit(self, authority: trustme.CA) -> None:
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            async with ProbeClient(tls=self.trusting(authority)) as client:
                replica = Fleet().add(ReplicaSpec(f"https://127.0.0.1:{deaf.getsockname()[1]}"))
                assert await failure(client.get(replica, "/health", SOON_S, 1000)) is ProbeFailure.TIMEOUT
