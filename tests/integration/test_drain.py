"""Stopping a real process: what signals do to requests, to readiness and to the exit code."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.gateways import CHAT
from support.raw_client import RawClient, Response, post, raw_client
from support.serving import Served, serving, starting
from support.stub_replica import DONE, Call, StubReplica, role_event, token_event
from support.waiting import eventually

BODY = json.dumps({**CHAT, "stream": True}).encode()
STREAM = post("/v1/chat/completions", BODY)


class Streams:
    """Answers with a stream that ends when the test says so."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        call.stream_head()
        call.chunk(role_event())
        call.chunk(token_event("a"))
        await self.end.wait()
        call.chunk(DONE)
        call.end_chunks()


@pytest.fixture
async def replica() -> AsyncIterator[StubReplica]:
    stub = await StubReplica(script=Streams()).start()
    yield stub
    await stub.stop()


def end(replica: StubReplica) -> None:
    assert isinstance(replica.script, Streams)
    replica.script.end.set()


def document(replica: StubReplica, grace_s: float = 0.0, drain_s: float = 60.0) -> dict[str, object]:
    return {"replicas": [{"url": replica.url}], "timeouts": {"drain_grace_s": grace_s, "drain_s": drain_s}}


async def begin_stream(client: RawClient) -> None:
    await client.send(STREAM)
    async with asyncio.timeout(5):
        await client.reader.readuntil(b'"a"')


async def rest(client: RawClient) -> bytes:
    async with asyncio.timeout(10):
        return await client.reader.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_gateway_stops_at_once(number: signal.Signals, replica: StubReplica, tmp_path: Path) -> None:
    async with serving(document(replica), tmp_path) as served, raw_client(served.port) as idle:
        served.signal(number)
        assert await served.exit_code(5) == 0
        assert await idle.ended()


async def test_a_stream_ends_in_its_own_time(replica: StubReplica, tmp_path: Path) -> None:
    async with serving(document(replica), tmp_path) as served:
        async with raw_client(served.port) as client:
            await begin_stream(client)
            served.signal()
            await served.until_said("draining 1 request")
            await refused(served)
            assert (await served.admin("/ready"))[0] == 503
            assert (await served.admin("/health"))[0] == 200
            end(replica)
            assert (await rest(client)).endswith(DONE + b"\r\n0\r\n\r\n")
        assert await served.exit_code() == 0


async def test_ready_says_no_at_once_and_requests_are_taken_for_the_grace_time(
    replica: StubReplica, tmp_path: Path
) -> None:
    async with serving(document(replica, grace_s=1.5), tmp_path) as served:
        assert (await served.admin("/ready"))[0] == 200
        served.signal()
        await served.until_said("stopping")
        assert (await served.admin("/ready"))[0] == 503
        end(replica)
        # Load balancers need a moment to see it; who comes until then is served, and told not to come back this way.
        async with raw_client(served.port) as client:
            response: Response = await client.ask(STREAM)
            assert response.complete
            assert response.header("connection") == "close"
            assert await client.ended()
        assert await served.exit_code() == 0


async def test_what_still_runs_at_the_limit_is_cut_and_told_so(replica: StubReplica, tmp_path: Path) -> None:
    async with serving(document(replica, drain_s=0.3), tmp_path) as served:
        async with raw_client(served.port) as client, raw_client(served.port) as reading:
            await begin_stream(client)
            await reading.send(STREAM[:-10])
            served.signal()
            tail = await rest(client)
            assert b'"code":"gateway_stopping"' in tail
            assert b"[DONE]" not in tail
            assert not tail.endswith(b"0\r\n\r\n")
            response = await reading.response("POST")
            assert (response.status, response.code) == (503, "gateway_stopping")
            assert response.header("retry-after") is not None
        assert await served.exit_code() == 0
        await replica.until(lambda: replica.aborted_seen == 1)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_exits_at_once(second: signal.Signals, replica: StubReplica, tmp_path: Path) -> None:
    async with serving(document(replica, grace_s=0.2, drain_s=600), tmp_path) as served:
        async with raw_client(served.port) as client:
            await begin_stream(client)
            served.signal()
            await served.until_said("stopping")
            served.signal(second)
            assert await served.exit_code(5) == 0
            # Cut, and not ended: a client must not take it for the whole answer.
            assert b"0\r\n\r\n" not in await rest(client)
        await replica.until(lambda: replica.aborted_seen == 1)


async def test_a_signal_during_the_start_stops_it(tmp_path: Path) -> None:
    silent = await StubReplica().start()
    silent.health_hangs = True
    config = {
        "replicas": [{"url": silent.url}],
        "health": {"startup_wait_s": 60, "timeout_s": 60},
    }
    async with starting(config, tmp_path) as served:
        await silent.until(lambda: silent.heads_seen > 0, 20)
        served.signal()
        assert await served.exit_code(5) == 0
    await silent.stop()


async def test_a_port_that_is_taken_is_said_and_is_a_failure(replica: StubReplica, tmp_path: Path) -> None:
    config = {"replicas": [{"url": replica.url}], "listen": {"host": "127.0.0.1", "port": replica.port}}
    async with starting(config, tmp_path) as served:
        assert await served.exit_code() == 1
        await served.until_said("cannot listen")


async def refused(served: Served) -> None:
    """Wait until nobody is let in any more."""

    async def knock() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        except ConnectionRefusedError:
            return True
        writer.close()
        return False

    outcome = [False]

    async def knocking() -> None:
        while not outcome[0]:
            outcome[0] = await knock()

    task = asyncio.get_running_loop().create_task(knocking())
    await eventually(lambda: outcome[0])
    await task
