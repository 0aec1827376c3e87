"""Limits in size, number and time, set small: what is over them is refused or cut off, and everybody else is served."""

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any, cast

import pytest
from support.gateways import CHAT, RunningGateway, running_gateway
from support.raw_client import RawClient, chunk, chunked, get, post, raw_client
from support.stub_replica import DONE, Call, StubReplica, role_event, token_event

BODY = json.dumps(CHAT).encode()
STREAM_BODY = json.dumps({**CHAT, "stream": True}).encode()
PATH = "/v1/chat/completions"


async def never(call: Call) -> None:
    await call.gone.wait()


async def refused(client: RawClient, status: int, code: str) -> None:
    response = await client.response()
    assert (response.status, response.code, response.header("connection")) == (status, code, "close")
    assert await client.ended()


# -- size


async def test_heads(replica: StubReplica) -> None:
    limits = {"max_head_bytes": 2048, "max_headers": 20}
    async with running_gateway([replica], {"limits": limits}) as gateway:
        for data in (
            get("/v1/x", "X-A: " + "a" * 2048),
            get("/v1/" + "x" * 2048),
            get("/v1/x", *["X-A: " + "a" * 200] * 11),
            get("/v1/x", *["X: y"] * 20),
            b"GET /v1/x HTTP/1.1\r\nX-Endless: " + b"a" * 4096,
            b"GET /" + b"x" * 4096,
            get("/health") + get("/v1/x", "X-A: " + "a" * 2048),
            chunked(PATH, b"1\r\nx\r\n0\r\n" + b"X-T: y\r\n" * 100_000),
        ):
            async with raw_client(gateway.port) as client:
                # In pieces, as a large head comes.
                step = max(len(data) // 50, 100)
                with suppress(ConnectionError):
                    await client.send(*(data[at : at + step] for at in range(0, len(data), step)))
                if data.startswith(get("/health")):
                    assert (await client.response()).status == 200
                await refused(client, 431, "headers_too_large")
        async with raw_client(gateway.port) as client:
            assert (await client.ask(get("/v1/x", "X-A: " + "a" * 1900))).status == 200
            assert (await client.ask(get("/v1/x", *["X: y"] * 19))).status == 200
        assert gateway.gateway.tally.bad_requests["headers_too_large"] == 8
    assert replica.requests_seen == 2


@pytest.mark.parametrize("kind", ["application/json", "audio/wav"])
async def test_bodies(replica: StubReplica, kind: str) -> None:
    # A limit within one read, and pieces that each fit.
    async with running_gateway([replica], {"limits": {"max_body_bytes": 100_000}}) as gateway:
        declared = post(PATH, b"", content_type=kind).replace(b"Content-Length: 0", b"Content-Length: 100001")
        chunks = chunked(PATH, b"", content_type=kind)
        for segments in ([declared], [chunks, *[chunk(b"x" * 10_000)] * 11], [chunks + chunk(b"x" * 100_001)]):
            async with raw_client(gateway.port) as client:
                await client.send(*segments)
                await refused(client, 413, "body_too_large")
        fitting = BODY[:-1] + b" " * (100_000 - len(BODY)) + b"}"
        async with raw_client(gateway.port) as client:
            assert (await client.ask(post(PATH, fitting, content_type=kind))).status == 200
        await gateway.until_idle()
        gateway.assert_idle()
    assert [len(seen.body) for seen in replica.requests if len(seen.body) == 100_000] == [100_000]


async def test_a_refused_upload_can_still_read_why(replica: StubReplica) -> None:
    """The answer is not destroyed by a reset while the client is still sending."""
    options = {"limits": {"max_body_bytes": 100_000}}
    async with running_gateway([replica], options) as gateway, raw_client(gateway.port) as client:
        await client.send(post(PATH, b"x" * 5_000_000))
        assert (await client.response()).status == 413
        assert await client.ended()


# -- number


async def test_connections(replica: StubReplica) -> None:
    async with (
        running_gateway([replica], {"limits": {"max_connections": 2}}) as gateway,
        raw_client(gateway.port) as first,
        raw_client(gateway.port) as second,
    ):
        for client in (first, second):
            assert (await client.ask(get("/v1/x"))).status == 200
        async with raw_client(gateway.port) as third:
            with pytest.raises((EOFError, ConnectionError)):
                await third.ask(get("/v1/x"))
        assert gateway.gateway.tally.connections_refused == 1
        await second.close()
        await until(lambda: gateway.gateway.plane.open_connections == 1)
        async with raw_client(gateway.port) as fourth:
            assert (await fourth.ask(get("/v1/x"))).status == 200


async def test_others_are_served_beside_a_thousand_idle_connections(gateway: RunningGateway) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(1000)]
    async with raw_client(gateway.port) as client:
        assert (await client.ask(post(PATH, BODY))).status == 200
    await until(lambda: gateway.gateway.plane.open_connections == 1000)
    assert gateway.gateway.tally.in_progress == 0
    for _, writer in idle:
        writer.close()
    await until(lambda: gateway.gateway.plane.open_connections == 0)


# -- time


async def test_slow_heads(replica: StubReplica) -> None:
    async with running_gateway([replica], {"timeouts": {"head_s": 0.2}}) as gateway:
        async with (
            raw_client(gateway.port) as silent,
            raw_client(gateway.port) as slow,
            raw_client(gateway.port) as late,
        ):
            await slow.send(b"GET /v1/x HTTP/1.1\r\n")
            assert (await late.ask(get("/v1/x"))).status == 200
            await late.send(b"GET /v1/x HT")

            async def trickle() -> None:
                # A byte now and then does not help: the limit is for the whole head.
                while True:
                    await slow.send(b"X")
                    await asyncio.sleep(0.02)

            trickling = asyncio.create_task(trickle())
            response = await slow.response()
            assert (response.status, response.code) == (408, "request_timeout")
            trickling.cancel()
            assert await silent.ended()
            await refused(late, 408, "request_timeout")
        assert gateway.gateway.tally.bad_requests["request_timeout"] == 2


@pytest.mark.parametrize("kind", ["application/json", "audio/wav"])
async def test_slow_bodies(replica: StubReplica, kind: str) -> None:
    async with running_gateway([replica], {"timeouts": {"body_s": 0.2}}) as gateway:
        async with raw_client(gateway.port) as client:
            await client.send(post(PATH, BODY, content_type=kind)[:-1])
            await refused(client, 408, "request_timeout")
        async with raw_client(gateway.port) as client:
            # Slow, but never longer between two pieces than the limit.
            data = post(PATH, BODY, content_type=kind)
            cut = len(data) - len(BODY) + 1
            await client.send(data[:cut])
            for at in range(cut, cut + 8):
                await asyncio.sleep(0.05)
                await client.send(data[at : at + 1])
            await client.send(data[cut + 8 :])
            assert (await client.response()).status == 200
        await gateway.until_idle()
        gateway.assert_idle()


async def test_a_body_whose_turn_comes_late_is_not_slow(replica: StubReplica) -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        if replica.requests_seen == 1:
            await release.wait()
        call.json({})

    replica.script = script
    options = {"timeouts": {"body_s": 0.3}}
    async with running_gateway([replica], options) as gateway, raw_client(gateway.port) as client:
        await client.send(post(PATH, BODY) + post(PATH, BODY)[:-1])
        await replica.until(lambda: replica.in_flight == 1)
        await asyncio.sleep(0.5)
        release.set()
        assert (await client.response()).status == 200
        await asyncio.sleep(0.1)
        await client.send(BODY[-1:])
        assert (await client.response()).status == 200


async def test_idle_connections(replica: StubReplica) -> None:
    async with running_gateway([replica], {"timeouts": {"idle_s": 0.2, "head_s": 5}}) as gateway:
        async with raw_client(gateway.port) as client:
            for _ in range(3):
                assert (await client.ask(post(PATH, BODY))).status == 200
                await asyncio.sleep(0.05)
            assert await client.ended()
        async with raw_client(gateway.port) as client:
            # A request that takes longer than that is not idle.
            replica.script = never
            await client.send(post(PATH, BODY))
            await replica.until(lambda: replica.in_flight == 1)
            await asyncio.sleep(0.4)
            assert replica.in_flight == 1


# -- clients that do not read


async def flood(call: Call) -> None:
    """A stream as fast as it is taken."""
    call.stream_head()
    call.chunk(role_event())
    sent = 0
    event = token_event("x" * 16384)
    while not call.gone.is_set() and sent < 64 << 20:
        if call.connection.transport.get_write_buffer_size() < 1 << 20:
            call.chunk(event)
            sent += len(event)
        else:
            await asyncio.sleep(0.005)
    call.chunk(DONE)
    call.end_chunks()


def small_buffers(client: RawClient) -> None:
    """Read nothing, and let the kernel take little."""
    cast(asyncio.Transport, client.writer.transport).pause_reading()
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)


async def test_little_is_held_for_a_client_that_does_not_read(replica: StubReplica) -> None:
    replica.script = flood
    async with running_gateway([replica], {"timeouts": {"client_stall_s": 0.5}}) as gateway:
        async with raw_client(gateway.port) as stalled, raw_client(gateway.port) as other:
            small_buffers(stalled)
            await stalled.send(post(PATH, STREAM_BODY))
            await replica.until(lambda: replica.in_flight == 1)
            (connection,) = (client for client in gateway.gateway.plane._clients if client._current is not None)
            await until(lambda: not connection._writable)
            held = connection._transport.get_write_buffer_size()
            assert held <= 1 << 20
            # Another client is served meanwhile, and what is held does not grow.
            replica.script = answer_now
            assert (await other.ask(post(PATH, BODY))).status == 200
            assert connection._transport.get_write_buffer_size() == held
            # And the replica is freed in the end, without waiting for the client to take what is held.
            await replica.until(lambda: replica.in_flight == 0)
            await until(lambda: gateway.gateway.plane.open_connections == 1)
        await gateway.until_idle()
        gateway.assert_idle()


async def answer_now(call: Call) -> None:
    call.json({})


async def test_answers_to_pipelined_requests_do_not_pile_up(replica: StubReplica) -> None:
    big = b'{"x":"' + b"x" * 900_000 + b'"}'

    async def script(call: Call) -> None:
        call.json(big)

    replica.script = script
    options: dict[str, Any] = {"timeouts": {"client_stall_s": 0.5}, "limits": {"max_held_bytes": 1 << 20}}
    async with running_gateway([replica], options) as gateway, raw_client(gateway.port) as client:
        small_buffers(client)
        await client.send(post(PATH, BODY) * 16)
        await replica.until(lambda: replica.requests_seen >= 1)
        (connection,) = gateway.gateway.plane._clients
        await until(lambda: not connection._writable)
        assert connection._transport.get_write_buffer_size() < 2 * len(big)
        # Nobody takes the answers, so the connection is given up, and the waiting requests never ran.
        await until(lambda: gateway.gateway.plane.open_connections == 0)
        assert replica.requests_seen < 16
        await gateway.until_idle()
        gateway.assert_idle()


async def until(condition: Any, within_s: float = 10.0) -> None:
    """Wait for what no event tells of: the kernel's buffers and connections that end on their own."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
