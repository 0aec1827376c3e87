"""Slow clients, and many of them: memory is bounded, others are unaffected, and there is no hidden limit."""

import asyncio
import json
from typing import Any

import pytest
from support.gateways import CHAT, RunningGateway, running_gateway, session
from support.raw_client import post
from support.stub_replica import DONE, Call, MakeStub, answer, role_event, token_event
from support.waiting import eventually

CHAT_PATH = "/v1/chat/completions"
STREAM = post(CHAT_PATH, json.dumps({**CHAT, "stream": True}).encode())
MEBIBYTE = 1 << 20
PIECE = b"data: " + b"x" * 65_530 + b"\n\n"


class Flood:
    """A stream as long as the connection takes it, at most 100 MB."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.blocked = asyncio.Event()
        self.end = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        if not call.seen.json.get("stream"):
            await answer(call)
            return
        call.stream_head()
        call.chunk(token_event("a"))
        while self.sent_bytes < 100 * MEBIBYTE and not self.end.is_set():
            call.chunk(PIECE)
            self.sent_bytes += len(PIECE)
            if not call.connection.writable.is_set():
                self.blocked.set()
            await call.drained()
            await asyncio.sleep(0)
        call.chunk(DONE)
        call.end_chunks()


def held_bytes(gateway: RunningGateway) -> int:
    """What the gateway has in its own memory for its clients."""
    return sum(client._transport.get_write_buffer_size() for client in gateway.gateway.plane._clients)


async def stalled(flood: Flood) -> None:
    """Wait until the replica cannot send any more for a while."""
    async with asyncio.timeout(10):
        await flood.blocked.wait()
        before = -1
        while before != flood.sent_bytes:
            before = flood.sent_bytes
            await asyncio.sleep(0.1)


async def test_a_client_that_reads_nothing_is_held_a_mebibyte_at_most_and_gets_everything_in_the_end(
    stub: MakeStub,
) -> None:
    flood = Flood()
    replica = await stub(flood)
    async with running_gateway([replica]) as gateway, session() as other:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        writer.write(STREAM)
        await stalled(flood)
        assert 0 < held_bytes(gateway) <= MEBIBYTE
        # What is on its way beyond that lies in the kernel's buffers, of a few megabytes each.
        assert flood.sent_bytes < 40 * MEBIBYTE
        for _ in range(5):
            async with other.post(f"{gateway.url}{CHAT_PATH}", json=CHAT) as response:
                assert response.status == 200
        flood.end.set()
        received = 0
        async with asyncio.timeout(20):
            while data := await reader.read(1 << 20):
                received += data.count(b"x" * 1000)
                if data.endswith(b"0\r\n\r\n"):
                    break
        assert held_bytes(gateway) == 0
        await gateway.until_idle()
        gateway.assert_idle()
        assert gateway.log_lines()[-1]["outcome"] == "ok"
        writer.close()


async def test_a_client_that_never_reads_again_is_cut_off(stub: MakeStub) -> None:
    flood = Flood()
    replica = await stub(flood)
    async with running_gateway([replica], {"timeouts": {"client_stall_s": 0.3}}) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        writer.write(STREAM)
        await replica.until(lambda: replica.aborted_seen == 1)
        await gateway.until_idle()
        gateway.assert_idle()
        assert gateway.log_lines()[0]["outcome"] == "cancelled"
        assert gateway.log_lines()[0]["error"] == "client_stalled"
        await eventually(lambda: not (gateway.gateway.plane.open_connections))
        writer.close()


async def test_a_client_that_reads_nothing_and_leaves_frees_the_replica(stub: MakeStub) -> None:
    flood = Flood()
    replica = await stub(flood)
    async with running_gateway([replica]) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        writer.write(STREAM)
        await stalled(flood)
        writer.transport.abort()
        await replica.until(lambda: replica.aborted_seen == 1, 1.0)
        gateway.assert_idle()


async def test_many_unread_answers_are_held_no_more_than_their_limits(stub: MakeStub) -> None:
    flood = Flood()
    replica = await stub(flood)
    async with running_gateway([replica]) as gateway:
        writers = []
        for _ in range(10):
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
            writer.write(STREAM)
            writers.append(writer)
        await stalled(flood)
        for client in gateway.gateway.plane._clients:
            assert client._transport.get_write_buffer_size() <= MEBIBYTE
        for writer in writers:
            writer.transport.abort()
        await replica.until(lambda: replica.aborted_seen == 10, 2.0)
        gateway.assert_idle()


async def test_an_upload_that_the_replica_does_not_read_is_held_back() -> None:
    """The replica stops reading in the middle of 64 MB; the client must feel it, and not the gateway's memory."""
    taken = asyncio.Event()

    async def not_reading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await taken.wait()
        else:
            body = b'{"data":[{"id":"m"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
        writer.close()

    server = await asyncio.start_server(not_reading, "127.0.0.1", 0, limit=1024)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with running_gateway([url]) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=x\r\n"
            b"content-length: 60000000\r\n\r\n"
        )
        sent = 0
        try:
            while sent < 60_000_000:
                writer.write(b"x" * 100_000)
                sent += 100_000
                async with asyncio.timeout(0.5):
                    await writer.drain()
        except TimeoutError:
            pass
        assert sent < 40_000_000
        (exchange,) = gateway.gateway.plane._exchanges
        connection = exchange._connection
        assert connection is not None
        assert connection.transport.get_write_buffer_size() <= MEBIBYTE  # type: ignore[attr-defined]
        writer.transport.abort()
        taken.set()
        await gateway.until_idle()
        gateway.assert_idle()
    server.close()


@pytest.mark.parametrize("policy", ["predicted_ttft", "least_outstanding", "round_robin", "power_of_two"])
async def test_64_requests_at_once_are_spread_before_any_of_them_is_answered(policy: str, stub: MakeStub) -> None:
    go = asyncio.Event()

    async def slow_headers(call: Call) -> None:
        await go.wait()
        await answer(call)

    replicas = [await stub(slow_headers) for _ in range(4)]
    async with running_gateway(replicas, {"routing": {"policy": policy}}) as gateway, session() as client:

        async def ask(number: int) -> int:
            body = {"model": "m", "messages": [{"role": "user", "content": f"Question {number}: " + "word " * 50}]}
            async with client.post(f"{gateway.url}{CHAT_PATH}", json=body) as response:
                await response.read()
                return response.status

        tasks = [asyncio.create_task(ask(number)) for number in range(64)]
        await eventually(lambda: sum(replica.requests_seen for replica in replicas) == 64)
        slack = 6 if policy == "power_of_two" else 1
        assert all(abs(replica.requests_seen - 16) <= slack for replica in replicas), [
            replica.requests_seen for replica in replicas
        ]
        go.set()
        assert set(await asyncio.gather(*tasks)) == {200}
        gateway.assert_idle()


async def test_320_streams_to_one_replica_are_all_in_flight(stub: MakeStub) -> None:
    go = asyncio.Event()

    async def long_stream(call: Call) -> None:
        call.stream_head()
        call.chunk(role_event())
        call.chunk(token_event("a"))
        await go.wait()
        call.chunk(DONE)
        call.end_chunks()

    replica = await stub(long_stream)
    async with running_gateway([replica]) as gateway:
        clients: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for _ in range(320):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(STREAM)
            clients.append((reader, writer))
        for reader, _ in clients:
            async with asyncio.timeout(10):
                await reader.readuntil(b'"a"')
        assert replica.in_flight == replica.in_flight_max == 320
        assert gateway.gateway.router.ledger.decodes[0] == 320
        assert gateway.gateway.plane.open_connections == 320
        go.set()
        for reader, writer in clients:
            async with asyncio.timeout(10):
                rest = await reader.readuntil(b"0\r\n\r\n")
            assert DONE in rest
            writer.close()
        gateway.assert_idle()


async def test_a_cap_is_exact_and_what_is_over_it_gets_a_429(stub: MakeStub) -> None:
    go = asyncio.Event()

    async def slow(call: Call) -> None:
        await go.wait()
        await answer(call)

    replica = await stub(slow)
    options: dict[str, Any] = {"replicas": [{"url": replica.url, "max_in_flight": 2}]}
    async with running_gateway([replica], options) as gateway, session() as client:

        async def ask() -> tuple[int, str | None]:
            async with client.post(f"{gateway.url}{CHAT_PATH}", json=CHAT) as response:
                await response.read()
                return response.status, response.headers.get("retry-after")

        tasks = [asyncio.create_task(ask()) for _ in range(9)]
        while sum(task.done() for task in tasks) < 7:
            await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
        go.set()
        answers = await asyncio.gather(*tasks)
        assert sorted(answers) == [(200, None)] * 2 + [(429, "2")] * 7
        assert replica.in_flight_max == 2
        gateway.assert_idle()


async def test_what_is_over_the_cap_waits_in_the_queue_and_is_served_in_order(stub: MakeStub) -> None:
    served: list[str] = []
    go = asyncio.Event()

    async def one_by_one(call: Call) -> None:
        served.append(call.seen.json["messages"][0]["content"])
        await go.wait()
        await answer(call)

    replica = await stub(one_by_one)
    options = {
        "replicas": [{"url": replica.url, "max_in_flight": 1}],
        "queue": {"max_requests": 50, "max_wait_s": 10},
    }
    async with running_gateway([replica], options) as gateway, session() as client:

        async def ask(number: int) -> int:
            body = {"model": "m", "messages": [{"role": "user", "content": str(number)}]}
            async with client.post(f"{gateway.url}{CHAT_PATH}", json=body) as response:
                return response.status

        tasks = []
        queue = gateway.gateway.plane.queue
        for number in range(20):
            tasks.append(asyncio.create_task(ask(number)))
            # The first with the replica, the others in the queue, each before the next one comes.
            await eventually(lambda sent=number + 1: len(served) + queue.waiting == sent)  # type: ignore[misc]
        go.set()
        assert set(await asyncio.gather(*tasks)) == {200}
        assert served == sorted(served, key=int)
        async with client.get(f"{gateway.admin_url}/metrics") as response:
            page = await response.text()
        assert "warmgate_queue_requests 0.0" in page
        assert "warmgate_queue_entered_total 19.0" in page
        assert "warmgate_queue_wait_seconds_count 19.0" in page
        assert replica.in_flight_max == 1
        gateway.assert_idle()


async def test_a_pool_that_was_empty_for_a_moment_costs_nobody_a_failure(stub: MakeStub) -> None:
    replica = await stub()
    options = {"health": {"interval_s": 0.02}, "queue": {"max_requests": 50, "max_wait_s": 10}}
    async with running_gateway([replica], options) as gateway, session() as client:
        await replica.stop()
        fleet = gateway.gateway.fleet
        await eventually(lambda: not (fleet.any_routable))

        async def ask() -> int:
            async with client.post(f"{gateway.url}{CHAT_PATH}", json=CHAT) as response:
                return response.status

        tasks = [asyncio.create_task(ask()) for _ in range(10)]
        await eventually(lambda: not (gateway.gateway.plane.queue.waiting < 10))
        await stub(port=replica.port)
        assert set(await asyncio.gather(*tasks)) == {200}
        gateway.assert_idle()
