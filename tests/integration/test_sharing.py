"""Workers that share through a real Redis: what they learn of each other, and what faults of Redis do to requests."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from support.gateways import RunningGateway, running_gateway, session
from support.redis_servers import NO_SERVER, RedisServer, find_servers, free_port, start_cluster, until_async
from support.stub_replica import DONE, Call, StubReplica, token_event
from support.waiting import eventually

from gateway.sharing.sharing import Sharing

pytestmark = pytest.mark.skipif(not find_servers(), reason=NO_SERVER)

TEXT = "a" * 4096


def sharing(gateway: RunningGateway) -> Sharing:
    assert gateway.gateway.sharing is not None
    return gateway.gateway.sharing


def chat(text: str = TEXT) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "stream": True}


async def ask(client: aiohttp.ClientSession, gateway: RunningGateway, text: str = TEXT) -> tuple[int, str, int]:
    """Status, replica and expected cached tokens of a request."""
    async with client.post(f"{gateway.url}/v1/chat/completions", json=chat(text)) as response:
        await response.read()
        headers = response.headers
        return (
            response.status,
            headers.get("x-warmgate-replica", ""),
            int(headers.get("x-warmgate-expected-cached-tokens", -1)),
        )


def known_blocks(gateway: RunningGateway) -> int:
    index = gateway.gateway.router.index
    return sum(index.blocks(slot) for slot in range(4))


class Fleet:
    """Stub replicas, gateways in front of them, and a client."""

    def __init__(self, stack: AsyncExitStack, replicas: list[StubReplica], client: aiohttp.ClientSession) -> None:
        self._stack = stack
        self.replicas = replicas
        self.client = client

    async def gateway(self, redis: Any, **options: Any) -> RunningGateway:
        return await self._stack.enter_async_context(running_gateway(self.replicas, {"redis": redis, **options}))


async def silent_on_usage(call: Call) -> None:
    """Two tokens, and no word on what was cached, which would correct the map."""
    call.stream_head()
    for part in (token_event("a"), token_event("b"), DONE):
        call.chunk(part)
    call.end_chunks()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    replicas = [await StubReplica(script=silent_on_usage).start() for _ in range(2)]
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(session())
        yield Fleet(stack, replicas, client)
    for replica in replicas:
        await replica.stop()


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    server = await RedisServer(tmp_path).start()
    yield server
    server.kill()


async def up(*gateways: RunningGateway) -> None:
    await eventually(lambda: all(sharing(gateway).up and sharing(gateway).loaded_s is not None for gateway in gateways))


@pytest.mark.parametrize(
    "binary", find_servers(), ids=lambda path: Path(path).parent.parent.name + "/" + Path(path).name
)
async def test_what_one_gateway_has_sent_the_others_know(tmp_path: Path, fleet: Fleet, binary: str) -> None:
    server = await RedisServer(tmp_path, binary=binary).start()
    try:
        one, other = [await fleet.gateway(server.url) for _ in range(2)]
        await up(one, other)
        _, where, cached = await ask(fleet.client, one)
        assert cached == 0
        await eventually(lambda: known_blocks(other))
        assert (await ask(fleet.client, other))[:2] == (200, where)
        # One that starts later reads it all.
        late = await fleet.gateway(server.url)
        await up(late)
        status, replica, cached = await ask(fleet.client, late)
        assert (status, replica) == (200, where)
        assert cached > 900
    finally:
        server.kill()


async def test_replicas_are_the_same_under_other_names_and_in_other_order(fleet: Fleet, redis: RedisServer) -> None:
    one = await fleet.gateway(redis.url)
    urls = [replica.url for replica in fleet.replicas]
    options = {"replicas": [{"url": urls[1], "name": "b"}, {"url": urls[0], "name": "a"}]}
    async with running_gateway([], {"redis": redis.url, **options}) as other:
        await up(one, other)
        _, where, _ = await ask(fleet.client, one)
        await eventually(lambda: known_blocks(other))
        name = {"replica-1": "a", "replica-2": "b"}[where]
        assert (await ask(fleet.client, other))[1] == name
        async with redis.client() as client:
            keys = await client.keys("*")
            dump = b"".join([*keys, *[await client.dump(key) for key in keys]])
        for secret in (b"127.0.0.1", str(fleet.replicas[0].port).encode(), b"replica", b"aaaa"):
            assert secret not in dump


async def test_a_replica_that_joins_later_is_known_at_once(fleet: Fleet, redis: RedisServer) -> None:
    one, other = await fleet.gateway(redis.url), await fleet.gateway(redis.url)
    await up(one, other)
    _, where, _ = await ask(fleet.client, one)
    await eventually(lambda: known_blocks(other))
    config = other.gateway.config
    index = int(where[-1]) - 1
    without = tuple(replica for number, replica in enumerate(config.replicas) if number != index)
    await other.gateway.reload(config.model_copy(update={"replicas": without}))
    assert known_blocks(other) == 0
    await other.gateway.reload(config)
    await eventually(lambda: known_blocks(other))


async def test_load_of_others_is_seen_and_ends_with_them(fleet: Fleet, redis: RedisServer) -> None:
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        call.stream_head()
        call.chunk(token_event("a"))
        await release.wait()
        call.end_chunks()

    for replica in fleet.replicas:
        replica.script = slow
    one, other = await fleet.gateway(redis.url), await fleet.gateway(redis.url)
    await up(one, other)
    tasks = [asyncio.create_task(ask(fleet.client, one, f"{n}" * 999)) for n in range(6)]
    seen, own = other.gateway.router.ledger, one.gateway.router.ledger
    await eventually(lambda: sum(seen.in_flight) == 6 and sum(seen.decodes) == 6)
    await eventually(lambda: seen.kv_tokens == pytest.approx(own.kv_tokens, rel=1e-5))
    # Requests of the other go where there is room, and each sees the sum.
    tasks += [asyncio.create_task(ask(fleet.client, other, f"b{n}" * 999)) for n in range(2)]
    await eventually(lambda: seen.in_flight == own.in_flight == [4, 4])
    release.set()
    await asyncio.gather(*tasks)
    await eventually(lambda: seen.in_flight == own.in_flight == [0, 0])
    # What each expected of the other ends a little later.
    columns = (seen.kv_tokens, own.kv_tokens, seen.prefill_work_s, own.context_tokens)
    await eventually(lambda: max(map(max, columns)) < 1e-6)


async def test_load_of_a_worker_that_dies_expires(fleet: Fleet, redis: RedisServer) -> None:
    gone = asyncio.Event()

    async def stuck(call: Call) -> None:
        await gone.wait()
        call.close()

    one, other = await fleet.gateway(redis.url), await fleet.gateway(redis.url)
    await up(one, other)
    for replica in fleet.replicas:
        replica.script = stuck
    task = asyncio.create_task(ask(fleet.client, one))
    seen = other.gateway.router.ledger
    await eventually(lambda: sum(seen.in_flight) == 1)
    own = sharing(one)
    assert own._task is not None
    own._task.cancel()  # and nothing more is heard of it
    await eventually(lambda: sum(seen.in_flight) == 0)
    gone.set()
    await task


async def test_a_restart_is_known_to_all(fleet: Fleet, redis: RedisServer) -> None:
    one, other = await fleet.gateway(redis.url), await fleet.gateway(redis.url)
    await up(one, other)
    _, where, _ = await ask(fleet.client, one)
    await eventually(lambda: known_blocks(other))
    registry = one.gateway.fleet
    registry.restarted(registry.replicas[where])
    assert known_blocks(one) == 0
    await eventually(lambda: known_blocks(other) == 0)
    await ask(fleet.client, one, "b" * 4096)
    await eventually(lambda: known_blocks(other))
    before = known_blocks(other)
    # The other notices it now, and does not forget what is true.
    other.gateway.fleet.restarted(other.gateway.fleet.replicas[where])
    assert known_blocks(other) == before


# -- faults: no request fails or waits, one line says so, and afterwards all is shared again

Fault = Callable[[RedisServer], Any]


async def killed(server: RedisServer) -> Callable[[], Any]:
    server.kill()
    return server.start


async def hung(server: RedisServer) -> Callable[[], Any]:
    server.hang()

    async def go_on() -> None:
        server.go_on()

    return go_on


async def full(server: RedisServer) -> Callable[[], Any]:
    async with server.client() as client:
        await client.config_set("maxmemory", 1)

    async def room() -> None:
        async with server.client() as client:
            await client.config_set("maxmemory", 0)

    return room


async def locked(server: RedisServer) -> Callable[[], Any]:
    async with server.client() as client:
        await client.config_set("requirepass", "secret")
        await client.execute_command("CLIENT KILL TYPE normal SKIPME yes")

    async def unlock() -> None:
        async with server.client(password="secret") as client:
            await client.config_set("requirepass", "")

    return unlock


FAULTS = {
    killed: "Redis is not usable (it cannot be reached)",
    hung: "Redis is not usable (it does not answer)",
    full: "Redis is not usable (it is full)",
    locked: "Redis is not usable (wrong user or password)",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_requests_go_on_without_redis_and_sharing_comes_back(
    fleet: Fleet, redis: RedisServer, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = {"url": redis.url, "timeout_s": 0.3}
    one, other = await fleet.gateway(settings), await fleet.gateway(settings)
    await up(one, other)
    before = "b" * 4096
    _, where, _ = await ask(fleet.client, one, before)
    await eventually(lambda: known_blocks(other))
    # Nor does it expect any more that the other sends something there, too. Sums of floats leave a trace.
    await eventually(lambda: max(one.gateway.router.ledger.prefill_work_s) < 1e-9)
    mend = await fault(redis)
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    _, replica, cached = await ask(fleet.client, one, before)
    assert (replica, cached > 900) == (where, True)
    await asyncio.gather(*(ask(fleet.client, one, f"during {n} " * 400) for n in range(10)))
    answers = [await ask(fleet.client, one, f"{n} " * 2000) for n in range(10)]
    assert {status for status, _, _ in answers} == {200}
    assert loop.time() - begun_s < 5.0  # far below one timeout per request, were they to wait
    await eventually(lambda: not sharing(one).up and not sharing(other).up)
    during = "c" * 4096
    _, where, _ = await ask(fleet.client, one, during)
    await eventually(lambda: max(one.gateway.router.ledger.prefill_work_s) < 1e-9)
    async with fleet.client.get(f"{one.admin_url}/metrics") as response:
        assert "\nwarmgate_redis_up 0.0" in await response.text()
    await eventually(lambda: caplog.text.count(FAULTS[fault]) >= 2)
    await mend()
    await eventually(lambda: sharing(one).up and sharing(other).up)
    await eventually(lambda: known_blocks(other) == known_blocks(one))
    _, replica, cached = await ask(fleet.client, other, during)
    assert (replica, cached > 900) == (where, True)
    for part in (FAULTS[fault], "Redis is back"):
        lines = [record.message for record in caplog.records if part in record.message]
        # One of each gateway, not one of each attempt; another when a busy machine makes Redis slow once more.
        assert 2 <= len(lines) <= 4, lines
    # A cold one finds what was sent in the meantime, too.
    late = await fleet.gateway(settings)
    await up(late)
    await eventually(lambda: known_blocks(late) == known_blocks(one))


async def test_what_others_do_is_forgotten_while_redis_hangs(fleet: Fleet, redis: RedisServer) -> None:
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        call.stream_head()
        call.chunk(token_event("a"))
        await release.wait()
        call.end_chunks()

    # Longer than the test waits: it is no end of a timeout that lets go of what others do.
    settings = {"url": redis.url, "timeout_s": 60}
    one, other = await fleet.gateway(settings), await fleet.gateway(settings)
    await up(one, other)
    for replica in fleet.replicas:
        replica.script = slow
    tasks = [asyncio.create_task(ask(fleet.client, other, "o" * 999))]
    seen = one.gateway.router.ledger
    await eventually(lambda: sum(seen.in_flight) == 1)
    redis.hang()
    tasks.append(asyncio.create_task(ask(fleet.client, one)))
    await eventually(lambda: sum(replica.in_flight for replica in fleet.replicas) == 2)
    # What it expects of the other, too, ends at once; what it has heard of it, when that is too old.
    await eventually(lambda: sum(seen.in_flight) == 1 and max(seen.prefill_work_s) < 1e-9)
    redis.go_on()
    await eventually(lambda: sum(seen.in_flight) == 2)
    release.set()
    await asyncio.gather(*tasks)


async def test_a_flushed_redis_is_filled_again_by_those_who_know(fleet: Fleet, redis: RedisServer) -> None:
    one, other = await fleet.gateway(redis.url), await fleet.gateway(redis.url)
    await up(one, other)
    for number in range(5):
        await ask(fleet.client, one, f"{number}" * 4096)
    await eventually(lambda: known_blocks(other) == known_blocks(one))
    async with redis.client() as client:
        await client.flushall()
    await eventually(lambda: sharing(one).prefixes.counts.retold + sharing(other).prefixes.counts.retold >= 2)
    late = await fleet.gateway(redis.url)
    await eventually(lambda: known_blocks(late) == known_blocks(one))


async def test_what_did_not_fit_into_the_buffer_is_told_afterwards(
    fleet: Fleet, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.sharing.prefixes.WAITING_BYTES", 2000)
    monkeypatch.setattr("gateway.sharing.sharing._TICK_BYTES", 500)
    monkeypatch.setattr("gateway.sharing.sharing._RETELL_BLOCKS", 100)
    settings = {"url": redis.url, "timeout_s": 0.3}
    one, other = await fleet.gateway(settings), await fleet.gateway(settings)
    await up(one, other)
    await ask(fleet.client, one)
    await eventually(lambda: known_blocks(other))
    redis.hang()
    for number in range(40):
        await ask(fleet.client, one, f"{number}" * 4096)
    assert sharing(one).prefixes.counts.dropped > 0
    assert sharing(one).prefixes.waiting_bytes <= 2000
    redis.go_on()
    await eventually(lambda: known_blocks(other) == known_blocks(one))


async def test_starting_without_redis_serves_at_once(fleet: Fleet, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    one = await fleet.gateway({"url": server.url, "timeout_s": 0.3})
    await ask(fleet.client, one)
    assert (await ask(fleet.client, one))[2] > 900
    await server.start()
    try:
        await up(one)
        other = await fleet.gateway(server.url)
        await eventually(lambda: known_blocks(other) == known_blocks(one))
    finally:
        server.kill()


# -- other ways to reach it


# redis-py forgets to close the connections to nodes when it learns the slots anew.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_cluster_with_one_node_lost(tmp_path: Path, fleet: Fleet) -> None:
    servers = await start_cluster(tmp_path)
    try:
        # Any node of it, as a plain URL.
        settings = {"url": servers[1].url, "timeout_s": 0.5}
        one, other = await fleet.gateway(settings), await fleet.gateway(settings)
        await up(one, other)
        for number in range(6):
            await ask(fleet.client, one, f"{number}" * 4096)
        await eventually(lambda: known_blocks(other) == known_blocks(one))
        held = []
        for server in servers:
            async with server.client() as client:
                held.append(await client.dbsize())
        assert all(held)
        servers[2].kill()
        answers = [await ask(fleet.client, one, f"x{n}" * 2000) for n in range(5)]
        assert {status for status, _, _ in answers} == {200}
        await eventually(lambda: not sharing(one).up)
        await servers[2].start()
        await up(one, other)
        await eventually(lambda: known_blocks(other) == known_blocks(one))
    finally:
        for server in servers:
            server.kill()


async def test_sentinel_and_a_failover(tmp_path: Path, fleet: Fleet) -> None:
    primary = await RedisServer(tmp_path).start()
    replica = await RedisServer(tmp_path, "--replicaof", "127.0.0.1", str(primary.port)).start()
    conf = tmp_path / "sentinel.conf"
    conf.write_text(
        f"sentinel monitor main 127.0.0.1 {primary.port} 1\n"
        "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 2000\n"
    )
    watcher = RedisServer(tmp_path, config=conf, port=free_port())
    try:
        await watcher.start("--sentinel")

        async def sees_replica() -> bool:
            async with watcher.client() as client:
                return bool(await client.execute_command("SENTINEL REPLICAS main"))

        await until_async(sees_replica)
        settings = {"url": f"redis+sentinel://127.0.0.1:{watcher.port}/main", "timeout_s": 0.5}
        one, other = await fleet.gateway(settings), await fleet.gateway(settings)
        await up(one, other)
        await ask(fleet.client, one)
        await eventually(lambda: known_blocks(other))
        primary.kill()
        assert (await ask(fleet.client, one, "x" * 4096))[0] == 200
        await eventually(lambda: not sharing(one).up)
        await eventually(lambda: sharing(one).up and sharing(other).up, within_s=60)
        await eventually(lambda: known_blocks(other) == known_blocks(one))
    finally:
        for server in (watcher, replica, primary):
            server.kill()


@asynccontextmanager
async def tls_in_front(port: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    """A port that speaks TLS and passes everything on: few servers from wheels are built with TLS."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        below, above = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, above), copy(below, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_tls_user_and_password(tmp_path: Path, redis: RedisServer) -> None:
    ca, clients = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = clients.issue_cert("gateway@example.org")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    clients.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    async with redis.client() as client:
        # No more than what docs/operations.md says a user needs.
        rights = ["+get", "+set", "+xadd", "+xread", "+xrange", "+xrevrange", "+expire", "+info", "+client"]
        await client.execute_command("ACL", "SETUSER", "gate", "on", ">p@ss", "~warmgate:*", *rights)
        await client.execute_command("ACL", "SETUSER", "default", "off")
    replicas = [await StubReplica(script=silent_on_usage).start() for _ in range(2)]
    async with tls_in_front(redis.port, context) as port, session() as client:
        settings = {
            "url": f"rediss://127.0.0.1:{port}",
            "username": "gate",
            "password": "p@ss",
            "tls": {name: str(tmp_path / f"{name}.pem") for name in ("ca", "cert", "key")},
        }
        options = {"redis": settings}
        async with running_gateway(replicas, options) as one, running_gateway(replicas, options) as other:
            await up(one, other)
            await ask(client, one)
            await eventually(lambda: known_blocks(other))
    for replica in replicas:
        await replica.stop()
