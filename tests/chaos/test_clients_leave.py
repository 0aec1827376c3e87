"""A client that leaves, at any moment and in any way, frees the replica at once and leaves nothing behind."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.gateways import CHAT, RunningGateway, running_gateway
from support.raw_client import RawClient, chunk, post, raw_client, request
from support.stub_replica import Call, MakeStub, StubReplica, role_event, token_event
from support.waiting import eventually

CHAT_PATH = "/v1/chat/completions"
STREAM = json.dumps({**CHAT, "stream": True}).encode()
WHOLE = json.dumps(CHAT).encode()

AT_ONCE_S = 5.0
"""The replica must see it within 100 ms, and does within one; tests run on busy machines. That no timer of the gateway
takes part in it, which would be the way to be late, is made sure of by stopping the timer."""


async def for_ever(call: Call) -> None:
    await call.gone.wait()


async def before_headers(call: Call) -> None:
    await for_ever(call)


async def before_the_first_token(call: Call) -> None:
    call.stream_head()
    call.chunk(role_event())
    await for_ever(call)


async def in_a_silent_gap(call: Call) -> None:
    call.stream_head()
    for part in (role_event(), token_event("a"), token_event("b")):
        call.chunk(part)
    await for_ever(call)


async def while_tokens_flow(call: Call) -> None:
    call.stream_head()
    while True:
        call.chunk(token_event("a"))
        await call.drained()
        await asyncio.sleep(0.001)


async def in_the_middle_of_a_json_answer(call: Call) -> None:
    call.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{"id":')
    await for_ever(call)


async def in_the_middle_of_a_large_answer(call: Call) -> None:
    call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 50000000\r\n\r\n" + b"x" * 100_000)
    await for_ever(call)


def leave(client: RawClient) -> None:
    client.writer.close()


def reset(client: RawClient) -> None:
    raw = client.writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.writer.transport.abort()


def half_close(client: RawClient) -> None:
    client.writer.write_eof()


LEAVING: dict[str, Callable[[RawClient], None]] = {"close": leave, "reset": reset, "half-close": half_close}


@asynccontextmanager
async def gateway_without_a_clock(
    replica: StubReplica, options: dict[str, Any] | None = None
) -> AsyncIterator[RunningGateway]:
    """A gateway whose limits are never looked at, so that nothing here can be their doing."""
    async with running_gateway([replica], options) as gateway:
        ticker = gateway.gateway.plane._ticker
        assert ticker is not None
        ticker.cancel()
        yield gateway


async def until_nothing_is_left(gateway: RunningGateway, replica: StubReplica) -> None:
    await gateway.until_idle(AT_ONCE_S)
    gateway.assert_idle()
    await replica.until(lambda: replica.in_flight == 0, AT_ONCE_S)


@pytest.mark.parametrize("way", LEAVING)
@pytest.mark.parametrize(
    ("script", "body"),
    [
        (before_headers, STREAM),
        (before_headers, WHOLE),
        (before_the_first_token, STREAM),
        (in_a_silent_gap, STREAM),
        (while_tokens_flow, STREAM),
        (in_the_middle_of_a_json_answer, WHOLE),
        (in_the_middle_of_a_large_answer, WHOLE),
    ],
)
async def test_the_replica_is_freed_at_once(
    script: Callable[[Call], Awaitable[None]], body: bytes, way: str, stub: MakeStub
) -> None:
    replica = await stub(script)
    async with gateway_without_a_clock(replica) as gateway:
        for round_ in range(1, 4):
            async with raw_client(gateway.port) as client:
                await client.send(post(CHAT_PATH, body))
                await replica.until(lambda seen=round_: replica.requests_seen == seen)  # type: ignore[misc]
                if script not in (before_headers, in_the_middle_of_a_json_answer):
                    await client.reader.readuntil(b"a" if script is in_a_silent_gap else b"\r\n\r\n")
                LEAVING[way](client)
                await replica.until(lambda seen=round_: replica.aborted_seen == seen, AT_ONCE_S)  # type: ignore[misc]
        await until_nothing_is_left(gateway, replica)
        assert [line["outcome"] for line in gateway.log_lines()] == ["cancelled"] * 3
        counted = gateway.gateway.tally.requests
        assert {labels[:3] for labels in counted} == {("replica-1", "predicted_ttft", "cancelled")}
        assert sum(counted.values()) == 3


ENDPOINTS: dict[str, bytes] = {
    "/v1/completions": b'{"model":"m","prompt":"Once"}',
    "/v1/responses": b'{"model":"m","input":"Once","stream":true}',
    "/v1/messages": b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"Once"}],"stream":true}',
    "/v1/embeddings": b'{"model":"m","input":["Once","twice"]}',
    "/v1/rerank": b'{"model":"m","query":"Once","documents":["a"]}',
    "/v1/score": b'{"model":"m","text_1":"a","text_2":"b"}',
    "/tokenize": b'{"model":"m","prompt":"Once"}',
    "/pooling": b'{"model":"m","input":"Once"}',
    "/v1/unheard/of": b'{"model":"m","anything":1}',
}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_on_every_endpoint(path: str, stub: MakeStub) -> None:
    replica = await stub(for_ever)
    async with gateway_without_a_clock(replica) as gateway:
        async with raw_client(gateway.port) as client:
            await client.send(post(path, ENDPOINTS[path]))
            await replica.until(lambda: replica.requests_seen == 1)
        await replica.until(lambda: replica.aborted_seen == 1, AT_ONCE_S)
        await until_nothing_is_left(gateway, replica)


@pytest.mark.parametrize("way", LEAVING)
async def test_in_the_middle_of_an_upload(way: str, stub: MakeStub) -> None:
    replica = await stub()
    async with gateway_without_a_clock(replica) as gateway:
        probes = replica.heads_seen
        async with raw_client(gateway.port) as client:
            head = request(
                "POST",
                "/v1/audio/transcriptions",
                "Content-Type: multipart/form-data; boundary=x",
                "Transfer-Encoding: chunked",
            )
            await client.send(head + chunk(b"--x\r\n" * 1000))
            await replica.until(lambda: replica.heads_seen == probes + 1)
            LEAVING[way](client)
            await replica.until(lambda: replica.uploads_cut == 1, AT_ONCE_S)
        await until_nothing_is_left(gateway, replica)
        assert replica.requests_seen == 0


@pytest.mark.parametrize("way", LEAVING)
async def test_in_the_middle_of_a_prompt(way: str, stub: MakeStub) -> None:
    replica = await stub()
    async with gateway_without_a_clock(replica) as gateway:
        async with raw_client(gateway.port) as client:
            await client.send(post(CHAT_PATH, WHOLE)[:-5])
            await eventually(lambda: gateway.gateway.tally.in_progress)
            LEAVING[way](client)
            await gateway.until_idle(AT_ONCE_S)
        await until_nothing_is_left(gateway, replica)
        assert replica.requests_seen == 0


@pytest.mark.parametrize("body", [STREAM, WHOLE])
async def test_while_a_connection_is_being_made(body: bytes, stub: MakeStub) -> None:
    replica = await stub()
    options = {"health": {"interval_s": 60}, "replicas": [{"url": replica.url, "models": ["m"]}]}
    async with gateway_without_a_clock(replica, options) as gateway:
        await replica.stop()
        with socket.socket() as deaf:
            # A full backlog: the kernel neither accepts nor refuses.
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            deaf.bind(("127.0.0.1", replica.port))
            deaf.listen(0)
            fillers = [socket.socket() for _ in range(3)]
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(deaf.getsockname())
            async with raw_client(gateway.port) as client:
                await client.send(post(CHAT_PATH, body))
                await eventually(lambda: gateway.gateway.router.ledger.in_flight[0])
                leave(client)
                await gateway.until_idle(AT_ONCE_S)
            gateway.assert_idle()
            assert [line["outcome"] for line in gateway.log_lines()] == ["cancelled"]
            for filler in fillers:
                filler.close()
            for task in gateway.gateway.plane.pool(gateway.gateway.fleet.replicas["replica-1"])._dials:
                task.cancel()


async def test_fifty_large_streams_at_once(stub: MakeStub) -> None:
    replica = await stub(while_tokens_flow)
    async with gateway_without_a_clock(replica) as gateway:
        body = json.dumps({"model": "m", "stream": True, "prompt": "word " * 20_000}).encode()
        clients = []
        for _ in range(50):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(post("/v1/completions", body))
            clients.append((reader, writer))
        for reader, _ in clients:
            await reader.readuntil(b"data: ")
        for _, writer in clients:
            writer.close()
        await replica.until(lambda: replica.aborted_seen == 50, 2 * AT_ONCE_S)
        await until_nothing_is_left(gateway, replica)
