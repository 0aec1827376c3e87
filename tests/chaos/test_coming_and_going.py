"""Replicas that go away, come back at the same address, or come up late."""

import asyncio
import json
from typing import Any

from support.gateways import CHAT, RunningGateway, running_gateway, session
from support.raw_client import post
from support.stub_replica import DONE, Call, MakeStub, answer, role_event, token_event
from support.waiting import eventually

PATH = "/v1/chat/completions"
QUICK: dict[str, Any] = {"health": {"interval_s": 0.02, "timeout_s": 1.0}}
STREAM = post(PATH, json.dumps({**CHAT, "stream": True}).encode())


def long_prompt(text: str = "Once upon a time. ") -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text * 2000}]}


async def ask(gateway: RunningGateway, body: dict[str, Any]) -> tuple[int, dict[str, str]]:
    async with session() as client, client.post(gateway.url + PATH, json=body) as response:
        await response.read()
        return response.status, dict(response.headers)


async def ready(gateway: RunningGateway) -> int:
    async with session() as client, client.get(gateway.admin_url + "/ready") as response:
        return response.status


async def test_all_down_and_back(stub: MakeStub) -> None:
    replicas = [await stub(), await stub()]
    async with running_gateway(replicas, QUICK) as gateway:
        fleet = gateway.gateway.fleet
        assert await ready(gateway) == 200
        status, headers = await ask(gateway, long_prompt())
        owner = headers["x-warmgate-replica"]
        status, headers = await ask(gateway, long_prompt())
        assert (headers["x-warmgate-replica"], headers["x-warmgate-expected-cached-tokens"] > "0") == (owner, True)
        for replica in replicas:
            await replica.stop()
        await eventually(lambda: not fleet.any_routable)
        assert await ready(gateway) == 503
        status, headers = await ask(gateway, CHAT)
        assert status == 503
        assert int(headers["Retry-After"]) >= 1
        async with session() as client, client.get(gateway.url + "/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["m"], "known, if not available"
        # The same addresses, other processes: nothing of what the old ones had in their caches is there.
        for replica in replicas:
            await replica.start(replica.port)
        await eventually(lambda: all(replica.up for replica in fleet.replicas.values()))
        assert await ready(gateway) == 200
        status, headers = await ask(gateway, long_prompt())
        assert (status, headers["x-warmgate-expected-cached-tokens"]) == (200, "0")
        gateway.assert_idle()


async def test_a_replica_that_comes_up_among_busy_ones_is_not_flooded(stub: MakeStub) -> None:
    go = asyncio.Event()

    async def holds(call: Call) -> None:
        call.stream_head()
        call.chunk(role_event())
        call.chunk(token_event("a"))
        await go.wait()
        call.chunk(DONE)
        call.end_chunks()

    busy = [await stub(holds), await stub(holds)]
    late = await stub(holds)
    late.health_status = 500
    options = {**QUICK, "routing": {"policy": "least_outstanding", "slow_start_s": 60}}
    async with running_gateway([*busy, late], options) as gateway:
        writers = []

        async def stream(count: int) -> None:
            for _ in range(count):
                reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
                writer.write(STREAM)
                await reader.readuntil(b'"a"')
                writers.append(writer)

        await stream(20)
        assert [replica.in_flight for replica in (*busy, late)] == [10, 10, 0]
        room = gateway.gateway.router.room
        for slot in (0, 1):
            room._warming_since_s[slot] = gateway.gateway.plane.now() - 61
        late.health_status = 200
        await eventually(lambda: gateway.gateway.fleet.replicas["replica-3"].up)
        await stream(8)
        # By load alone all eight would be its own, each of them uncached.
        assert late.in_flight == 1
        assert [replica.in_flight for replica in busy] in ([14, 13], [13, 14])
        # Half of the time has passed: half of what the others have.
        room._warming_since_s[2] = gateway.gateway.plane.now() - 30
        await stream(12)
        assert 6 <= late.in_flight <= 8
        room._warming_since_s[2] = gateway.gateway.plane.now() - 61
        await stream(9)
        assert late.in_flight >= 15
        go.set()
        for writer in writers:
            writer.close()
        await gateway.until_idle()
        gateway.assert_idle()


async def test_requests_under_way_survive_a_restart_of_another_replica(stub: MakeStub) -> None:
    steady, restarted = await stub(), await stub()

    async def slowly(call: Call) -> None:
        await asyncio.sleep(0.02)
        await answer(call)

    steady.script = restarted.script = slowly
    options = {**QUICK, "routing": {"policy": "round_robin"}, "breaker": {"base_ejection_s": 0.1}}
    async with running_gateway([steady, restarted], options) as gateway:
        stop = asyncio.Event()
        statuses: list[int] = []

        async def user(number: int) -> None:
            while not stop.is_set():
                statuses.append((await ask(gateway, {**CHAT, "user": str(number)}))[0])

        users = [asyncio.create_task(user(number)) for number in range(8)]
        for _ in range(4):
            seen = restarted.requests_seen
            await restarted.until(lambda seen=seen: restarted.requests_seen > seen + 3)  # type: ignore[misc]
            await restarted.stop()
            await asyncio.sleep(0.05)
            await restarted.start(restarted.port)
        stop.set()
        await asyncio.gather(*users)
        assert set(statuses) == {200}
        gateway.assert_idle()
