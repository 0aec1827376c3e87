"""A client that leaves, at any time, gives back its blocks and its place in the batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest

from loadtests.replica import ReplicaConfig, RunningReplica, start_replica

LONG = "x" * 400_000
"""100,000 tokens: two seconds of prefill on the default card."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.fixture
async def replica() -> AsyncIterator[RunningReplica]:
    async with await start_replica(ReplicaConfig(max_num_seqs=1)) as replica:
        yield replica


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def assert_nothing_left(replica: RunningReplica) -> None:
    state = replica.state()
    assert state["in_flight"] == state["generations"] == 0
    assert state["engine"]["running"] == state["engine"]["waiting"] == 0
    assert state["engine"]["used_blocks"] == 0
    assert state["engine"]["injected"] == state["engine"]["completed"] + state["engine"]["aborted"]


def aborts(replica: RunningReplica) -> int:
    return replica.replica.metrics.finished["abort"]


@pytest.mark.parametrize("stream", [True, False])
async def test_during_prefill(replica: RunningReplica, session: aiohttp.ClientSession, stream: bool) -> None:
    body = {"prompt": LONG, "max_tokens": 5, "stream": stream}
    request = asyncio.ensure_future(session.post(replica.url + "/v1/completions", json=body))
    await until(lambda: replica.engine.running == 1)
    assert replica.engine.pool.used_blocks > 0
    if stream:
        response = await request
        assert response.status == 200
        response.close()
    else:
        request.cancel()
    await until(lambda: replica.engine.aborted == 1)
    await until(lambda: replica.replica.traffic.in_flight == 0)
    assert_nothing_left(replica)
    assert aborts(replica) == replica.replica.traffic.aborted_seen == 1
    assert replica.engine.generated_tokens == 0


async def test_in_the_middle_of_a_stream(replica: RunningReplica, session: aiohttp.ClientSession) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10_000, "stream": True}
    async with session.post(replica.url + "/v1/chat/completions", json=body) as response:
        for _ in range(3):
            assert (await response.content.readuntil(b"\n\n")).startswith(b"data: ")
        assert replica.engine.decoding == 1
        response.close()
    await until(lambda: replica.replica.traffic.in_flight == 0)
    assert_nothing_left(replica)
    assert aborts(replica) == 1
    assert replica.engine.generated_tokens < 10_000


async def test_while_a_whole_answer_decodes(replica: RunningReplica, session: aiohttp.ClientSession) -> None:
    body = {"prompt": "hi", "max_tokens": 10_000}
    request = asyncio.ensure_future(session.post(replica.url + "/v1/completions", json=body))
    await until(lambda: replica.engine.decoding == 1)
    request.cancel()
    await until(lambda: replica.replica.traffic.in_flight == 0)
    assert_nothing_left(replica)
    assert aborts(replica) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_in_the_queue(replica: RunningReplica, session: aiohttp.ClientSession, stream: bool) -> None:
    first = asyncio.ensure_future(
        session.post(replica.url + "/v1/completions", json={"prompt": "a", "max_tokens": 10_000})
    )
    await until(lambda: replica.engine.running == 1)
    body = {"prompt": "b", "max_tokens": 5, "stream": stream}
    second = asyncio.ensure_future(session.post(replica.url + "/v1/completions", json=body))
    await until(lambda: replica.engine.waiting == 1)
    if stream:
        (await second).close()
    else:
        second.cancel()
    await until(lambda: replica.engine.waiting == 0)
    assert replica.engine.running == 1
    first.cancel()
    await until(lambda: replica.replica.traffic.in_flight == 0)
    assert_nothing_left(replica)


async def test_the_place_goes_to_the_next_in_the_queue(replica: RunningReplica, session: aiohttp.ClientSession) -> None:
    first = asyncio.ensure_future(
        session.post(replica.url + "/v1/completions", json={"prompt": "a", "max_tokens": 100_000})
    )
    await until(lambda: replica.engine.running == 1)
    second = asyncio.ensure_future(session.post(replica.url + "/v1/completions", json={"prompt": "b", "max_tokens": 2}))
    await until(lambda: replica.engine.waiting == 1)
    first.cancel()
    async with await second as response:
        assert (await response.json())["usage"]["completion_tokens"] == 2
    assert_nothing_left(replica)


async def test_all_choices_of_a_request_end_with_it(session: aiohttp.ClientSession) -> None:
    async with await start_replica() as replica:
        body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 10_000, "stream": True}
        async with session.post(replica.url + "/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            assert replica.engine.decoding == 6
            response.close()
        await until(lambda: replica.replica.traffic.in_flight == 0)
        assert_nothing_left(replica)
        assert aborts(replica) == 6


async def test_close_ends_what_runs(session: aiohttp.ClientSession) -> None:
    replica = await start_replica()
    body = {"prompt": "a", "max_tokens": 100_000, "stream": True}
    async with session.post(replica.url + "/v1/completions", json=body) as response:
        await response.content.readuntil(b"\n\n")
        await replica.close()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    assert replica.engine.running == 0
