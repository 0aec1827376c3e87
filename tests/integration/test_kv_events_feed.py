"""Subscriber and simulated replicas over real ZeroMQ sockets: the map is the engine's cache."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest
import zmq
from support.waiting import eventually

from gateway.prefixes.events.sources import Source, read_sources
from gateway.prefixes.events.subscriber import Feed, Subscriber
from gateway.prompt.token_chain import TokenChain, TokenPrompt, pack
from loadtests.replica.config import ReplicaConfig
from loadtests.replica.kv_events import BlockRemoved, BlockStored, Publisher
from loadtests.replica.server import RunningReplica, start_replica

BLOCK = 16


@contextlib.contextmanager
def subscriber(**options: Any) -> Any:
    followed = Subscriber(TokenChain(), **options)
    try:
        yield followed
    finally:
        followed.close()


def config(**options: Any) -> ReplicaConfig:
    return ReplicaConfig(**{"kv_events": True, "speedup": 200.0, "kv_tokens": 4096, "max_model_len": 2048, **options})


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def sources_of(replica: RunningReplica, session: aiohttp.ClientSession, bound: int | None = None) -> list[Source]:
    async with session.get(f"{replica.url}/kv_event_sources") as response:
        return read_sources(await response.read(), replica.host, bound)


async def complete(
    session: aiohttp.ClientSession, replica: RunningReplica, tokens: list[int], max_tokens: int = 8, **fields: Any
) -> None:
    body = {"model": "llama-3.1-8b", "prompt": tokens, "max_tokens": max_tokens, **fields}
    async with session.post(f"{replica.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        await response.read()


async def cached(session: aiohttp.ClientSession, replica: RunningReplica) -> dict[int, int]:
    """The engine's block pool through its control endpoint."""
    async with session.get(f"{replica.url}/sim/kv_blocks") as response:
        return {int(name): copies for name, copies in orjson.loads(await response.read()).items()}


async def assert_map_is_the_cache(feed: Feed, session: aiohttp.ClientSession, replica: RunningReplica) -> int:
    """Wait until all has been told, and compare."""
    stream, publisher = feed.streams[0], replica.replica.kv_feed
    assert publisher is not None
    await eventually(lambda: replica.replica.driver.in_flight == 0 and replica.replica.driver.idle)
    last = publisher.publisher._sequence
    await eventually(lambda: stream.live and stream._next == last)
    pool = await cached(session, replica)
    assert stream.blocks.names() == pool
    return len(pool)


def prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * 7919 + i * 31) % 50_000 for i in range(tokens)]


async def test_after_many_requests_the_map_is_the_engines_cache() -> None:
    """Shared prefixes, evictions, concurrent equal prompts, answers, adapters, salts, clients that leave."""
    with subscriber() as followed:
        async with client() as session, await start_replica(config(loras=("ada",))) as replica:
            feed = followed.open("r", await sources_of(replica, session))
            await eventually(lambda: feed.live)
            assert feed.sure

            async def leave(tokens: list[int]) -> None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.003):
                        await complete(session, replica, tokens, 512)

            for turn in range(6):
                await asyncio.gather(
                    *(complete(session, replica, prompt(1, 320) + prompt(100 + turn, 48 * i), 20) for i in range(6)),
                    *(complete(session, replica, prompt(turn, 256)) for _ in range(4)),
                    complete(session, replica, prompt(1, 320), cache_salt=f"tenant-{turn}"),
                    complete(session, replica, prompt(1, 320), model="ada"),
                    leave(prompt(500 + turn, 700)),
                )
            assert await assert_map_is_the_cache(feed, session, replica) > 100
            blocks = feed.streams[0].blocks
            assert blocks.removed > 0
            assert (blocks.orphans, blocks.malformed, feed.streams[0].gaps) == (0, 0, 0)
            assert feed.sure
            # A prompt's tokens find what the engine finds.
            pool = replica.engine.pool
            tokenizer = replica.replica.tokenizer
            for seed in (1, 3, 5, 999):
                for lora, salt in (("", ""), ("ada", ""), ("", "tenant-5")):
                    tokens = prompt(seed, 320)
                    names = tokenizer.block_hashes(tokenizer.from_ids(tokens), b"", tokenizer.root(lora, salt))
                    hashes = TokenPrompt(pack(tokens), lora, salt).hashes(blocks.block_tokens)
                    assert blocks.match(hashes) == pool.match(names, len(names))


async def test_a_gateway_that_comes_later_knows_all_the_same() -> None:
    with subscriber() as followed:
        async with client() as session, await start_replica(config()) as replica:
            for seed in range(5):
                await complete(session, replica, prompt(seed, 200))
            feed = followed.open("r", await sources_of(replica, session))
            await eventually(lambda: feed.live)
            assert feed.sure
            await assert_map_is_the_cache(feed, session, replica)


async def test_lost_messages_are_replayed() -> None:
    with subscriber() as followed:
        async with client() as session, await start_replica(config()) as replica:
            feed = followed.open("r", await sources_of(replica, session))
            await eventually(lambda: feed.live)
            await complete(session, replica, prompt(1, 200))
            async with session.post(f"{replica.url}/sim/kv_events", json={"drop": 3}) as response:
                assert response.status == 200
            for seed in range(2, 6):
                await complete(session, replica, prompt(seed, 200), max_tokens=40)
            await assert_map_is_the_cache(feed, session, replica)
            assert feed.streams[0].gaps == 1
            assert feed.streams[0].clears == 0
            assert feed.sure


async def test_lost_messages_without_replay_empty_the_map() -> None:
    with subscriber() as followed:
        async with client() as session, await start_replica(config(kv_events_replay_endpoint=None)) as replica:
            assert replica.replica.kv_feed is not None
            feed = followed.open("r", await sources_of(replica, session))
            stream = feed.streams[0]
            seed = 0
            while not stream.messages:  # whatever was sent before the connection is lost
                await complete(session, replica, prompt(seed := seed + 1, 200))
            await eventually(lambda: replica.replica.driver.idle)
            replica.replica.kv_feed.publisher.drop = 1
            await complete(session, replica, prompt(seed + 1, 200), max_tokens=1)
            await complete(session, replica, prompt(seed + 2, 200), max_tokens=1)
            await eventually(lambda: stream.clears == 1)
            assert feed.live
            assert not feed.sure
            assert stream.blocks.match(TokenPrompt(pack(prompt(seed + 2, 200))).hashes(BLOCK)) == 200 // BLOCK
            assert stream.blocks.match(TokenPrompt(pack(prompt(seed + 1, 200))).hashes(BLOCK)) == 0


async def test_clearing_the_engines_cache_clears_the_map() -> None:
    with subscriber() as followed:
        async with client() as session, await start_replica(config()) as replica:
            feed = followed.open("r", await sources_of(replica, session))
            await eventually(lambda: feed.live)
            await complete(session, replica, prompt(1, 400))
            await eventually(lambda: replica.replica.driver.idle)
            async with session.post(f"{replica.url}/sim/reset") as response:
                assert response.status == 200
            await complete(session, replica, prompt(2, 100))
            assert await assert_map_is_the_cache(feed, session, replica) == (100 + 7) // BLOCK


async def test_an_engine_that_restarts_on_its_ports_starts_with_an_empty_map() -> None:
    with subscriber() as followed:
        async with client() as session:
            async with await start_replica(config()) as replica:
                publisher = replica.replica.kv_feed
                assert publisher is not None
                ports = {
                    "kv_events_endpoint": publisher.publisher.endpoint,
                    "kv_events_replay_endpoint": publisher.publisher.replay_endpoint,
                }
                port = replica.port
                feed = followed.open("r", await sources_of(replica, session))
                await eventually(lambda: feed.live)
                for seed in range(4):
                    await complete(session, replica, prompt(seed, 300))
                await assert_map_is_the_cache(feed, session, replica)
            async with await start_replica(config(**ports), port=port) as replica:
                await complete(session, replica, prompt(77, 300), max_tokens=100)
                await eventually(lambda: feed.streams[0].restarts > 0)
                await assert_map_is_the_cache(feed, session, replica)
                assert feed.sure


async def test_engines_that_connect_themselves() -> None:
    """One bound socket for all; the topic tells whose message it is."""
    with subscriber(bind="tcp://127.0.0.1:*") as followed:
        options = {"kv_events_endpoint": f"tcp://127.0.0.1:{followed.bound_port}"}
        async with (
            client() as session,
            await start_replica(config(**options)) as first,
            await start_replica(config(**options)) as second,
        ):
            replicas = (first, second)
            feeds = [
                followed.open(str(i), await sources_of(replica, session, followed.bound_port))
                for i, replica in enumerate(replicas)
            ]
            assert all(feed.sources[0].endpoint is None for feed in feeds)
            for seed, replica in enumerate(replicas):
                await complete(session, replica, prompt(seed, 200))
                await complete(session, replica, prompt(seed + 10, 200))
            for feed, replica in zip(feeds, replicas, strict=True):
                await assert_map_is_the_cache(feed, session, replica)
                assert feed.sure
            assert feeds[0].streams[0].blocks.names() != feeds[1].streams[0].blocks.names()


def stored(number: int, rank: int) -> BlockStored:
    return BlockStored([number], None, [number, rank], 2, None, "GPU", None)


async def test_ranks_of_a_replica_have_maps_of_their_own() -> None:
    publishers = [Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@r", rank) for rank in range(2)]
    for publisher in publishers:
        # The library tells the port a wildcard became.
        publisher.endpoint = publisher._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        publisher.replay_endpoint = publisher._router.getsockopt_string(zmq.LAST_ENDPOINT)
    answer = orjson.dumps({str(publisher.rank): publisher.source() for publisher in publishers})
    try:
        with subscriber() as followed:
            feed = followed.open("r", read_sources(answer, "127.0.0.1", None))
            await eventually(lambda: feed.live)
            publishers[0].publish([stored(1, 0)])
            publishers[1].publish([stored(1, 1), stored(2, 1)])
            publishers[1].publish([BlockRemoved([1], "GPU")])
            await eventually(lambda: [stream.messages for stream in feed.streams] == [1, 2])
            assert [stream.blocks.names() for stream in feed.streams] == [{1: 1}, {2: 1}]
    finally:
        for publisher in publishers:
            publisher.close()


async def test_ranks_that_share_a_topic_on_the_bound_socket() -> None:
    with subscriber(bind="tcp://127.0.0.1:*") as followed:
        endpoint = f"tcp://127.0.0.1:{followed.bound_port}"
        publishers = [Publisher(endpoint, None, "kv@r", rank) for rank in range(2)]
        try:
            feed = followed.open("r", [Source(rank, "kv@r", None, None) for rank in range(2)])
            other = Publisher(endpoint, None, "kv@stranger")
            publishers.append(other)
            await until_heard(publishers[0], feed.streams[0], 0)
            await until_heard(publishers[1], feed.streams[1], 1)
            while not followed.unknown_messages:
                other.publish([stored(9, 0)])
                await asyncio.sleep(0.005)
            assert [len(stream.blocks) for stream in feed.streams] == [1, 1]
        finally:
            for publisher in publishers:
                publisher.close()


async def until_heard(publisher: Publisher, stream: Any, rank: int) -> None:
    """A publisher that connects loses what it sends before the subscription has reached it."""
    async with asyncio.timeout(10):
        while not stream.messages:
            publisher.publish([stored(1, rank)])
            await asyncio.sleep(0.005)


async def test_bad_messages_are_dropped_and_counted() -> None:
    publisher = Publisher("tcp://127.0.0.1:*", None, "kv@r")
    endpoint = publisher._pub.getsockopt_string(zmq.LAST_ENDPOINT)
    try:
        with subscriber() as followed:
            feed = followed.open("r", [Source(0, "kv@r", endpoint, None)])
            stream = feed.streams[0]
            await until_heard(publisher, stream, 0)
            await asyncio.sleep(0)
            await eventually(lambda: stream._next == publisher._sequence)
            before = stream.blocks.names()
            publisher.send_raw(publisher._sequence, b"\xc1 not msgpack")
            publisher._sequence += 1
            publisher._pub.send_multipart([b"kv@r", b"short", b""])
            publisher._pub.send_multipart([b"kv@r"])
            publisher._pub.send_multipart([b"kv@r", b"\xff" * 8, b""])
            await eventually(lambda: stream.bad_messages == 4)
            assert stream.blocks.names() == before
            publisher.publish([stored(5, 0)])
            await eventually(lambda: 5 in stream.blocks.names())
            assert (stream.gaps, stream.restarts) == (0, 0)
    finally:
        publisher.close()


async def test_an_endpoint_nobody_can_read_is_refused() -> None:
    with subscriber() as followed:
        with pytest.raises(ValueError):
            followed.open("r", [Source(0, "", "tcp://nonsense", None)])
        with pytest.raises(OSError):
            Subscriber(TokenChain(), bind="tcp://203.0.113.1:5557")
