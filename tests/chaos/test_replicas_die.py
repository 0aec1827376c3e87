"""A replica that dies in the middle of an answer is a failure everybody can see, and never passes for an end."""

import asyncio
import json

import pytest
from support.gateways import CHAT, running_gateway, session
from support.raw_client import post, raw_client
from support.stub_replica import DONE, Call, MakeStub, role_event, token_event
from support.waiting import eventually

CHAT_PATH = "/v1/chat/completions"
STREAM = json.dumps({**CHAT, "stream": True}).encode()
WHOLE = json.dumps(CHAT).encode()
CHUNKED = "transfer-encoding: chunked\r\n"
UNTIL_CLOSE = "connection: close\r\n"
ENDS = {"close": Call.close, "reset": Call.reset}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("framing", [CHUNKED, UNTIL_CLOSE])
@pytest.mark.parametrize("half_an_event", [False, True])
async def test_a_stream_that_breaks_ends_with_an_error_event_and_a_cut_connection(
    end: str, framing: str, half_an_event: bool, stub: MakeStub
) -> None:
    sent = [role_event(), token_event("a"), *([token_event("b")[:9]] if half_an_event else [])]

    async def script(call: Call) -> None:
        call.stream_head(framing)
        for part in sent:
            if framing == CHUNKED:
                call.chunk(part)
            else:
                call.send(part)
        await call.drained()
        await arrived.wait()
        ENDS[end](call)

    arrived = asyncio.Event()
    replicas = [await stub(script) for _ in range(2)]
    async with running_gateway(replicas) as gateway:
        async with raw_client(gateway.port) as client:
            await client.send(post(CHAT_PATH, STREAM))
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head
            await eventually(lambda: len(client.reader._buffer) >= len(b"".join(sent)))  # type: ignore[attr-defined]
            arrived.set()
            async with asyncio.timeout(5):
                rest = await client.reader.read()
        assert not rest.endswith(b"0\r\n\r\n"), "the last chunk would say that all is well"
        assert b"[DONE]" not in rest
        body = b"".join(line for line in rest.split(b"\r\n")[1::2])
        relayed, _, last = body.rpartition(b"data: ")
        assert relayed.startswith(b"".join(sent))
        assert relayed.endswith(b"\n\n")
        error = json.loads(last)["error"]
        assert error["code"] == "replica_connection_lost"
        assert "127.0.0.1" not in error["message"]
        await gateway.until_idle()
        gateway.assert_idle()
        assert sum(replica.requests_seen for replica in replicas) == 1, "a generation must not run twice"
        assert gateway.log_lines()[0]["outcome"] == "broken"


async def test_a_stream_that_ends_properly_with_its_connection_is_whole(stub: MakeStub) -> None:
    async def script(call: Call) -> None:
        call.stream_head(UNTIL_CLOSE)
        call.send(role_event() + token_event("a") + DONE)
        await call.drained()
        call.close()

    replica = await stub(script)
    async with running_gateway([replica]) as gateway, raw_client(gateway.port) as client:
        response = await client.ask(post(CHAT_PATH, STREAM))
        assert response.complete
        assert response.body == role_event() + token_event("a") + DONE
        # The client's connection goes on, whatever became of the replica's.
        assert (await client.ask(post(CHAT_PATH, STREAM))).complete
        gateway.assert_idle()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    "framing", ["content-length: 500\r\n", "transfer-encoding: chunked\r\n", "connection: close\r\n"]
)
@pytest.mark.parametrize("replicas_dying", [1, 2])
async def test_a_json_answer_cut_short_is_replaced_or_a_502(
    end: str, framing: str, replicas_dying: int, stub: MakeStub
) -> None:
    async def script(call: Call) -> None:
        dying = sum(replica.requests_seen for replica in replicas) <= replicas_dying
        if not dying:
            call.json({"id": "whole"})
            return
        part = b'{"id":"cut'
        call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + framing.encode() + b"\r\n")
        call.send(b"%x\r\n%b\r\n" % (len(part), part) if "chunked" in framing else part)
        await call.drained()
        ENDS[end](call)

    replicas = [await stub(script) for _ in range(2)]
    async with running_gateway(replicas) as gateway, session() as client:
        async with client.post(f"{gateway.url}{CHAT_PATH}", json=CHAT) as response:
            answer = await response.json()
            if replicas_dying == 1:
                assert (response.status, answer) == (200, {"id": "whole"})
            else:
                assert (response.status, answer["error"]["code"]) == (502, "replica_connection_lost")
        gateway.assert_idle()
        assert [replica.requests_seen for replica in replicas] == [1, 1]


async def test_an_answer_too_large_to_be_held_is_cut_off_where_the_replica_died(stub: MakeStub) -> None:
    async def script(call: Call) -> None:
        call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 3000000\r\n\r\n")
        call.send(b"x" * 2_000_000)
        await call.drained()
        call.close()

    replicas = [await stub(script) for _ in range(2)]
    async with running_gateway(replicas) as gateway:
        async with raw_client(gateway.port) as client:
            response = await client.ask(post(CHAT_PATH, WHOLE))
            assert response.status == 200
            assert not response.complete
            assert len(response.body) < 3_000_000
        await gateway.until_idle()
        gateway.assert_idle()
        assert sum(replica.requests_seen for replica in replicas) == 1
