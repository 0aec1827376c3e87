"""Several workers as real processes behind one port: spread, deaths, drain, reload, metrics."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.gateways import CHAT, running_gateway
from support.raw_client import RawClient, post, raw_client
from support.serving import Served, starting
from support.serving import serving as serving_within
from support.stub_replica import DONE, Call, StubReplica, answer, role_event, token_event
from support.waiting import eventually

from gateway.admin.merge import ACROSS_WORKERS
from gateway.config import Config
from gateway.workers import supervisor as supervisor_module
from gateway.workers.redis_server import NoServer, find_server
from gateway.workers.supervisor import Supervisor
from loadtests.replica import ReplicaConfig, start_replica

PATH = "/v1/chat/completions"
ASK = post(PATH, json.dumps(CHAT).encode())
STREAM = post(PATH, json.dumps({**CHAT, "stream": True}).encode())
NOBODY = "redis://127.0.0.1:9"
"""Workers do without Redis when it is away."""
_START_S = 60.0
"""Each worker imports everything anew, and machines that run tests are busy."""
_BUSY_S = 30.0
"""For an answer, on such a machine."""


def serving(config: dict[str, Any], directory: Path) -> AbstractAsyncContextManager[Served]:
    return serving_within(config, directory, _START_S)


class StreamsHeld:
    """Answers plain requests at once, and streams when the test says so."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        if not call.seen.json.get("stream"):
            await answer(call)
            return
        call.stream_head()
        call.chunk(role_event())
        call.chunk(token_event("a"))
        await self.end.wait()
        call.chunk(DONE)
        call.end_chunks()


@pytest.fixture
async def replica() -> AsyncIterator[StubReplica]:
    stub = await StubReplica(script=StreamsHeld()).start()
    yield stub
    await stub.stop()


def document(*replicas: StubReplica, workers: int = 2, **sections: Any) -> dict[str, Any]:
    return {
        "listen": {"host": "127.0.0.1", "port": 0, "workers": workers},
        "replicas": [{"url": replica.url} for replica in replicas],
        "redis": NOBODY,
        **sections,
    }


def end(replica: StubReplica) -> None:
    assert isinstance(replica.script, StreamsHeld)
    replica.script.end.set()


async def workers(served: Served) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((await served.admin("/admin/workers"))[1])["workers"]
    return found


T = TypeVar("T")


async def repeated(ask: Callable[[], Awaitable[T]], wanted: Callable[[T], object], within_s: float = 60.0) -> T:
    """Ask again and again until the answer is as wanted; nothing announces it."""
    async with asyncio.timeout(within_s):
        while not wanted(found := await ask()):  # noqa: ASYNC110 - there is no event, that is the point
            await asyncio.sleep(0.02)
    return found


async def until_workers(served: Served, wanted: Callable[[list[dict[str, Any]]], object]) -> list[dict[str, Any]]:
    return await repeated(lambda: workers(served), wanted)


def all_serving(found: list[dict[str, Any]]) -> bool:
    return len(found) == 2 and all(worker["state"] == "serving" for worker in found)


async def metrics(served: Served) -> dict[str, float]:
    status, page = await served.admin("/metrics")
    assert status == 200
    lines = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def total(found: dict[str, float], name: str) -> float:
    return sum(value for key, value in found.items() if key.partition("{")[0] == name)


async def connected(stack: AsyncExitStack, served: Served, count: int) -> list[RawClient]:
    return [await stack.enter_async_context(raw_client(served.port)) for _ in range(count)]


async def begin_streams(clients: list[RawClient]) -> None:
    for client in clients:
        await client.send(STREAM)
    for client in clients:
        async with asyncio.timeout(_BUSY_S):
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            await client.reader.readuntil(b'"a"')


async def ends_well(client: RawClient) -> bool:
    async with asyncio.timeout(_BUSY_S):
        try:
            rest = await client.reader.readuntil(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
    return DONE in rest


async def test_a_worker_that_is_killed_costs_what_ran_on_it_and_is_replaced(
    replica: StubReplica, tmp_path: Path
) -> None:
    async with serving(document(replica), tmp_path) as served, AsyncExitStack() as stack:
        clients = await connected(stack, served, 64)
        await begin_streams(clients)
        before = await until_workers(served, lambda found: sum(worker["connections"] or 0 for worker in found) == 64)
        assert [worker["connections"] for worker in before] == [32, 32]
        assert all(worker["resident_memory_bytes"] > 1 << 20 for worker in before)

        ids = set()
        for _ in range(10):
            async with raw_client(served.port) as client:
                response = await client.ask(ASK)
                assert response.status == 200
                ids.add(response.header("x-request-id"))
        assert len(ids) == 10
        counted = await metrics(served)
        assert total(counted, "warmgate_requests_total") == 10
        assert counted["warmgate_requests_in_progress"] == 64
        assert counted["warmgate_workers_serving"] == 2

        os.kill(before[0]["pid"], signal.SIGKILL)
        # From this moment on nobody else may notice.
        statuses = []
        for _ in range(40):
            async with raw_client(served.port) as client:
                statuses.append((await client.ask(ASK)).status)
        assert statuses == [200] * 40
        await served.until_said(r"worker 1 \(pid \d+\) was killed by SIGKILL")
        after = await until_workers(served, all_serving)
        assert after[0]["pid"] != before[0]["pid"]
        assert (after[0]["restarts"], after[1]) == (1, {**after[1], "pid": before[1]["pid"], "restarts": 0})

        end(replica)
        assert sum([await ends_well(client) for client in clients]) == 32
        async with raw_client(served.port) as client:
            assert (await client.ask(ASK)).status == 200
        now = await repeated(
            lambda: metrics(served), lambda found: total(found, "warmgate_requests_total") >= 10 + 40 + 32 + 1
        )
        assert total(now, "warmgate_requests_total") == 83
        assert now['warmgate_worker_restarts_total{worker="1"}'] == 1
        backwards = [
            name for name, value in counted.items()
            if re.search(r"_(total|bucket|count|sum)(\{|$)", name) and now.get(name, 0.0) < value
        ]  # fmt: skip
        assert backwards == []
        served.signal()
        assert await served.exit_code() == 0


async def test_streams_of_all_workers_end_in_their_own_time(replica: StubReplica, tmp_path: Path) -> None:
    async with serving(document(replica), tmp_path) as served, AsyncExitStack() as stack:
        assert (await served.admin("/ready"))[0] == 200
        clients = await connected(stack, served, 4)
        await begin_streams(clients)
        served.signal()
        await served.until_said("stopping: draining 2 requests", times=2)
        assert (await served.admin("/ready")) == (503, '{"status": "draining"}')
        assert (await served.admin("/health"))[0] == 200
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", served.port)
        end(replica)
        assert [await ends_well(client) for client in clients] == [True] * 4
        assert await served.exit_code() == 0
        assert not re.search("ERROR|Traceback", "\n".join(served.log))


async def test_a_second_signal_stops_all_at_once(replica: StubReplica, tmp_path: Path) -> None:
    config = document(replica, timeouts={"drain_s": 600})
    async with serving(config, tmp_path) as served, AsyncExitStack() as stack:
        clients = await connected(stack, served, 4)
        await begin_streams(clients)
        served.signal()
        await served.until_said("stopping: draining 2 requests", times=2)
        served.signal()
        assert await served.exit_code() == 0
        assert [await ends_well(client) for client in clients] == [False] * 4


async def test_a_changed_configuration_reaches_all_workers_and_later_ones(replica: StubReplica, tmp_path: Path) -> None:
    policy: dict[str, Any] = {"routing": {"policy": "round_robin"}}
    second = await StubReplica().start()
    async with serving(document(replica, **policy), tmp_path) as served, AsyncExitStack() as stack:
        clients = await connected(stack, served, 2)

        async def replicas_used() -> list[set[str | None]]:
            return [{(await client.ask(ASK)).header("x-warmgate-replica") for _ in range(4)} for client in clients]

        def change(*replicas: StubReplica) -> None:
            served.config.write_text(json.dumps({**document(*replicas, **policy), "admin": {"port": 0}}))
            served.signal(signal.SIGHUP)

        served.config.write_text("replicas: [")
        served.signal(signal.SIGHUP)
        await served.until_said("refused, the old one stays in force")
        assert await replicas_used() == [{"replica-1"}] * 2

        change(replica, second)
        await served.until_said("configuration is in force: 2 replicas")
        await repeated(replicas_used, lambda used: used == [{"replica-1", "replica-2"}] * 2)

        change(second)
        await served.until_said("configuration is in force: 1 replicas")
        assert await replicas_used() == [{"replica-2"}] * 2

        # A worker started now must not count replicas from one again.
        old = await workers(served)
        os.kill(old[0]["pid"], signal.SIGTERM)
        await until_workers(served, lambda found: all_serving(found) and found[0]["pid"] != old[0]["pid"])
        clients.extend(await connected(stack, served, 4))
        clients[:] = clients[2:]
        assert await replicas_used() == [{"replica-2"}] * 4
        found = await metrics(served)
        assert not [name for name in found if 'replica="replica-1"' in name]
        assert total(found, "warmgate_worker_restarts_total") == 0
        served.signal()
        assert await served.exit_code() == 0
    await second.stop()


async def test_workers_do_not_outlive_the_supervisor(replica: StubReplica, tmp_path: Path) -> None:
    async with serving(document(replica), tmp_path) as served, AsyncExitStack() as stack:
        clients = await connected(stack, served, 2)
        await begin_streams(clients)
        served.signal(signal.SIGKILL)
        await served.until_said("the supervisor has gone", times=2)
        # Not `wait`: that waits for the workers, too, which have its standard error.
        await eventually(lambda: served.process.returncode == -signal.SIGKILL)
        # The port is free for another gateway while they end what runs.
        with socket.create_server(("127.0.0.1", served.port)):
            end(replica)
        assert [await ends_well(client) for client in clients] == [True] * 2
        # Standard error ends when nobody has it open any more.
        async with asyncio.timeout(15):
            await served._reader


async def test_the_first_request_finds_what_was_found_out_last(
    replica: StubReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than the test takes: facts do not go out by themselves.
    monkeypatch.setattr(supervisor_module, "_FACTS_S", 3600.0)
    supervisor = Supervisor(Config.model_validate({**document(replica), "admin": {"port": 0}}))
    check = supervisor._health.start

    async def start_late(within_s: float | None = None) -> None:
        await eventually(lambda: sum(worker.serving for worker in supervisor.running) == 2, _START_S)
        await check(within_s)

    monkeypatch.setattr(supervisor._health, "start", start_late)
    await supervisor.start()
    try:
        listener = supervisor._handover._listener
        assert listener is not None
        for _ in range(2):
            async with raw_client(listener.port) as client:
                assert (await client.ask(ASK)).status == 200
    finally:
        await supervisor.close()


async def test_all_workers_know_which_versions_replicas_run(tmp_path: Path) -> None:
    long = post(PATH, json.dumps({"model": "m", "messages": [{"role": "user", "content": "Long. " * 3000}]}).encode())
    async with AsyncExitStack() as stack:
        replicas = []
        for role, version in (("prefill", "0.33.0"), ("decode", "0.32.0")):
            config = ReplicaConfig(served_model_names=("m",), speedup=20.0, kv_connector="nixl", engine_version=version)
            running = await stack.enter_async_context(await start_replica(config))
            replicas.append({"url": running.url, "role": role})
        wanted = {**document(disaggregation={"policy": "always"}), "replicas": replicas}
        served = await stack.enter_async_context(serving(wanted, tmp_path))
        await until_workers(served, all_serving)
        clients = await connected(stack, served, 2)
        assert [worker["connections"] for worker in await until_workers(served, all_serving)] == [1, 1]
        for client in clients:
            reply = await client.ask(long)
            assert (reply.status, reply.header("x-warmgate-prefill-replica")) == (200, None)
        found = await metrics(served)
        assert found['warmgate_unpaired_prompts_total{difference="version",model="m"}'] == 2.0
        listed = json.loads((await served.admin("/admin/replicas"))[1])["replicas"]
        assert [replica["version"] for replica in listed] == ["0.33.0", "0.32.0"]


async def test_a_port_that_is_taken_is_said_and_is_a_failure(replica: StubReplica, tmp_path: Path) -> None:
    config = document(replica)
    config["listen"]["port"] = replica.port
    async with starting(config, tmp_path) as served:
        assert await served.exit_code() == 1
        await served.until_said(f"cannot listen: .*127.0.0.1:{replica.port}")


def has_server() -> bool:
    with contextlib.suppress(NoServer):
        find_server()
        return True
    return False


async def test_workers_see_each_others_load_without_redis_and_that_of_a_dead_one_is_gone(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        replicas = [await StubReplica(script=StreamsHeld()).start() for _ in range(8)]
        for replica in replicas:
            stack.push_async_callback(replica.stop)
            stack.callback(end, replica)
        config = document(*replicas, routing={"policy": "least_outstanding"})
        served = await stack.enter_async_context(serving(config, tmp_path))
        clients = await connected(stack, served, 8)
        found = await until_workers(served, lambda found: sum(worker["connections"] or 0 for worker in found) == 8)
        assert [worker["connections"] for worker in found] == [4, 4]
        # One after the other: two workers may well decide at the same moment.
        for client in clients:
            await begin_streams([client])
        assert [len(replica.requests) for replica in replicas] == [1] * 8
        assert (await metrics(served))["warmgate_board_workers"] == 2

        os.kill(found[0]["pid"], signal.SIGKILL)
        await served.until_said(r"worker 1 \(pid \d+\) was killed by SIGKILL")
        await until_workers(served, all_serving)

        # The four whose streams broke have nothing to do.
        async def idle_now() -> list[int]:
            return [number for number, replica in enumerate(replicas) if not replica.in_flight]

        idle = await repeated(idle_now, lambda idle: len(idle) >= 4)
        assert len(idle) == 4
        for client in await connected(stack, served, 4):
            await begin_streams([client])
        assert [len(replica.requests) for replica in replicas] == [1 + (number in idle) for number in range(8)]


async def test_a_worker_knows_at_the_next_request_what_another_sent_and_what_has_ended_without_redis(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        replicas = [await StubReplica().start() for _ in range(4)]
        for replica in replicas:
            stack.push_async_callback(replica.stop)
        # Were the first request believed to be still computed, the second would go to another replica.
        config = document(*replicas, routing={"policy": "predicted_ttft"})
        served = await stack.enter_async_context(serving(config, tmp_path))
        clients = await connected(stack, served, 2)
        assert [worker["connections"] for worker in await until_workers(served, all_serving)] == [1, 1]
        # Two posts a request, and as many as a worker may make at once: faster machines are no matter.
        for number in range(12):
            message = {"role": "user", "content": f"Number {number}. " * 500}
            ask = post(PATH, json.dumps({**CHAT, "messages": [message]}).encode())
            for expects, client in zip((False, True), (clients[number % 2], clients[1 - number % 2]), strict=True):
                promised = (await client.ask(ask)).header("x-warmgate-expected-cached-tokens")
                assert (int(promised or 0) > 1000) is expects


@pytest.mark.skipif(not has_server(), reason="no redis-server on this machine")
async def test_workers_share_their_map_through_a_server_of_their_own(replica: StubReplica, tmp_path: Path) -> None:
    config = document(replica)
    del config["redis"]
    long = post(PATH, json.dumps({"model": "m", "messages": [{"role": "user", "content": "Long. " * 3000}]}).encode())
    async with serving(config, tmp_path) as served, AsyncExitStack() as stack:
        await served.until_said("shared through Redis", times=2)
        one, other = await connected(stack, served, 2)
        assert [worker["connections"] for worker in await until_workers(served, all_serving)] == [1, 1]

        async def expected(client: RawClient) -> int:
            return int((await client.ask(long)).header("x-warmgate-expected-cached-tokens") or 0)

        assert await expected(one) == 0
        assert await expected(other) > 0 or await expected(other) > 0
        (server,) = [pid for pid in children(served.process.pid) if "redis" in command(pid)]
        os.kill(server, signal.SIGKILL)
        await served.until_said("redis-server of this gateway has ended")
        assert (await other.ask(ASK)).status == 200
        await served.until_said("Redis is back", times=2)
        served.signal()
        assert await served.exit_code() == 0
        assert "Traceback" not in "\n".join(served.log)


async def test_rules_for_gauges_are_for_gauges_that_exist(replica: StubReplica) -> None:
    async with running_gateway([replica]) as gateway:
        kinds = {family.name: family.type for family in gateway.gateway.view.families()}
    # These are there when Redis is used and events are followed.
    optional = ("warmgate_redis_", "warmgate_board_", "warmgate_kv_events_")
    rules = {name for name in ACROSS_WORKERS if not name.startswith(optional)}
    assert {kinds.get(name) for name in rules} == {"gauge"}


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
