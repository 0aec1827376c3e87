"""Faults on demand, and the admin paths that switch them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from loadtests.replica import ReplicaConfig, RunningReplica, start_replica

STREAM = {"prompt": "hello", "max_tokens": 6, "stream": True}
WHOLE = {"prompt": "hello", "max_tokens": 6}


@pytest.fixture
async def replica() -> AsyncIterator[RunningReplica]:
    async with await start_replica(ReplicaConfig(speedup=100)) as replica:
        yield replica


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Client:
    def __init__(self, session: aiohttp.ClientSession, replica: RunningReplica) -> None:
        self.session = session
        self.url = replica.url

    async def faults(self, **faults: Any) -> dict[str, Any]:
        async with self.session.post(self.url + "/sim/faults", json=faults) as response:
            assert response.status == 200, await response.text()
            body: dict[str, Any] = await response.json()
            return body

    def complete(self, body: dict[str, Any]) -> Any:
        return self.session.post(self.url + "/v1/completions", json=body)

    async def status(self, body: dict[str, Any] | None = None) -> int:
        async with self.complete(body or WHOLE) as response:
            await response.read()
            status: int = response.status
            return status


@pytest.fixture
def client(session: aiohttp.ClientSession, replica: RunningReplica) -> Client:
    return Client(session, replica)


async def test_status_with_retry_after_for_two_requests(client: Client) -> None:
    assert await client.faults(status=503, retry_after_s=1.5, count=2) == {
        "status": 503,
        "retry_after_s": 1.5,
        "count": 2,
    }
    async with client.complete(WHOLE) as response:
        assert response.status == 503
        assert response.headers["retry-after"] == "1.5"
        assert (await response.json())["error"]["code"] == 503
    assert await client.status() == 503
    assert await client.status() == 200
    assert await client.faults() == {}


async def test_null_takes_a_fault_back(client: Client) -> None:
    await client.faults(status=500, health_status=503)
    assert await client.faults(status=None) == {"health_status": 503}
    assert await client.status() == 200
    async with client.session.post(client.url + "/sim/faults", data=b"null") as response:
        assert await response.json() == {}


@pytest.mark.parametrize(
    "faults",
    [{"stat": 500}, {"status": 42}, {"count": 0}, {"cut_at": [5, 3]}, {"silence": "yes"}, {"die_mode": "x"}, []],
)
async def test_nonsense_is_refused_and_changes_nothing(client: Client, replica: RunningReplica, faults: Any) -> None:
    async with client.session.post(client.url + "/sim/faults", json=faults) as response:
        assert response.status == 400
        assert "message" in (await response.json())["error"]
    assert replica.faults.current.as_json() == {}


async def test_delay_comes_before_the_head(client: Client) -> None:
    await client.faults(delay_headers_s=30)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await client.status(STREAM)
    await client.faults(delay_headers_s=0.01)
    assert await client.status(STREAM) == 200


async def test_silence(client: Client, replica: RunningReplica) -> None:
    await client.faults(silence=True, count=1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await client.status()
    assert replica.engine.injected == 0
    assert await client.status() == 200


async def test_silence_in_the_middle_of_a_stream(client: Client, replica: RunningReplica) -> None:
    await client.faults(silence_after_chunks=2)
    async with client.complete(STREAM) as response:
        for _ in range(2):
            assert (await response.content.readuntil(b"\n\n")).startswith(b"data: {")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await response.content.read(1)
    assert replica.state()["requests_seen"] == 1


async def read_until_it_breaks(response: aiohttp.ClientResponse) -> tuple[bytes, Exception | None]:
    data = b""
    try:
        async for chunk in response.content.iter_any():
            data += chunk
    except (aiohttp.ClientError, ConnectionResetError) as error:
        return data, error
    return data, None


@pytest.mark.parametrize("chunks", [0, 3])
@pytest.mark.parametrize("mode", ["reset", "close", "eof"])
async def test_death_in_the_middle_of_a_stream(client: Client, replica: RunningReplica, mode: str, chunks: int) -> None:
    await client.faults(die_after_chunks=chunks, die_mode=mode, count=1)
    async with client.complete(STREAM | {"max_tokens": 5000}) as response:
        data, error = await read_until_it_breaks(response)
    assert data.count(b"\n\n") == chunks
    assert b"[DONE]" not in data
    assert (error is None) == (mode == "eof")
    assert await client.status(STREAM) == 200
    assert replica.engine.aborted == 1
    assert replica.engine.pool.used_blocks == 0


async def test_reset_is_a_reset(replica: RunningReplica, client: Client) -> None:
    await client.faults(die_after_chunks=1)
    reader, writer = await asyncio.open_connection(replica.host, replica.port)
    body = json.dumps(STREAM).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()


async def test_death_in_the_middle_of_a_whole_answer(client: Client) -> None:
    await client.faults(die_after_chunks=1, die_mode="close")
    async with client.complete(WHOLE) as response:
        assert response.status == 200
        data, error = await read_until_it_breaks(response)
    assert 0 < len(data) < int(response.headers["content-length"])
    assert error is not None


async def test_error_event(client: Client, replica: RunningReplica) -> None:
    await client.faults(error_event_after_chunks=2)
    async with client.complete(STREAM | {"max_tokens": 5000}) as response:
        text = await response.text()
    events = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
    assert len(events) == 4
    assert json.loads(events[2])["error"]["code"] == 500
    assert events[3] == "[DONE]"
    assert replica.engine.aborted == 1


async def test_cuts_change_the_pieces_and_not_the_bytes(client: Client) -> None:
    async with client.complete(STREAM) as response:
        whole = await response.read()
    await client.faults(cut_at=[1, 7, 300, 303], cut_pause_s=0)
    async with client.complete(STREAM) as response:
        pieces = []
        piece = b""
        async for data, end in response.content.iter_chunks():
            piece += data
            if end:
                pieces.append(piece)
                piece = b""
    text = b"".join(pieces)
    assert len(text) == len(whole)
    boundaries = {sum(map(len, pieces[:i])) for i in range(len(pieces))}
    assert {1, 7, 300, 303} <= boundaries
    assert text.endswith(b"data: [DONE]\n\n")


async def test_health_faults_leave_the_api_alone(client: Client) -> None:
    async def health() -> int:
        async with client.session.get(client.url + "/health") as response:
            return response.status

    await client.faults(health_status=503)
    assert await health() == 503
    await client.faults(health_status=None, hang_health=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await health()
    assert await client.status() == 200
    await client.faults(hang_health=None)
    assert await health() == 200


async def test_refusal_without_a_control_port_resets_all_but_the_admin_paths(client: Client) -> None:
    await client.faults(refuse=True)
    with pytest.raises(aiohttp.ClientError):
        await client.status()
    with pytest.raises(aiohttp.ClientError):
        await client.session.get(client.url + "/health")
    await client.faults(refuse=None)
    assert await client.status() == 200


async def test_refusal_by_not_listening(replica: RunningReplica, client: Client) -> None:
    replica.refuse_by_not_listening()
    replica.faults.merge({"refuse": True})
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection(replica.host, replica.port)
            except ConnectionRefusedError:
                break
            except ConnectionResetError:
                continue  # It stood in the queue of the listener when that was closed.
            writer.close()
    replica.faults.merge({"refuse": False})
    async with asyncio.timeout(10):
        while True:
            try:
                assert await client.status() == 200
            except aiohttp.ClientConnectorError:
                continue
            break


async def test_state_counts_requests(client: Client, replica: RunningReplica) -> None:
    assert await client.status() == 200
    assert await client.status({"prompt": ""}) == 400
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await client.status({"prompt": "x", "max_tokens": 100_000})
    async with client.session.get(client.url + "/sim/state") as response:
        state = await response.json()
    assert state["requests_seen"] == 3
    assert state["completed"] == 2
    assert state["in_flight_max"] == 1
    assert state["engine"]["total_blocks"] == replica.engine.pool.total_blocks
    async with client.session.post(client.url + "/sim/reset") as response:
        state = await response.json()
    assert state["requests_seen"] == state["completed"] == 0


async def test_reset_empties_the_prefix_cache(client: Client) -> None:
    async def cached() -> int:
        async with client.complete({"prompt": "y" * 4000, "max_tokens": 1}) as response:
            usage = (await response.json())["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [await cached(), await cached()] == [0, 992]
    async with client.session.post(client.url + "/sim/reset"):
        pass
    assert await cached() == 0
