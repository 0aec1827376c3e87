"""Cached tokens as the engine reports them, through a whole gateway in front of simulated replicas."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from support.gateways import RunningGateway, running_gateway, session

from loadtests.replica import ReplicaConfig, RunningReplica, start_replica

# 64 blocks of 16 tokens: two conversations of 400 tokens fit, three do not.
SMALL = ReplicaConfig(speedup=1000, served_model_names=("m",), kv_tokens=1024)


@pytest.fixture
async def replica() -> AsyncIterator[RunningReplica]:
    async with await start_replica(SMALL) as replica:
        yield replica


async def ask(client: aiohttp.ClientSession, url: str, name: str, **fields: Any) -> bytes:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": f"{name} " * 400}],
        "max_tokens": 2,
        "stream": True,
        **fields,
    }
    async with client.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        return await response.read()


async def metric(client: aiohttp.ClientSession, gateway: RunningGateway, name: str) -> float:
    async with client.get(f"{gateway.admin_url}/metrics") as response:
        lines = (await response.text()).splitlines()
    (value,) = (line.rpartition(" ")[2] for line in lines if line.startswith(name))
    return float(value)


async def test_promises_are_held_against_what_the_engine_found(replica: RunningReplica) -> None:
    async with running_gateway([replica.url], {"prefixes": {"ask_usage": True}}) as gateway, session() as client:
        for name in ("one", "two", "two", "one"):
            body = await ask(client, gateway.url, name)
            assert b'"usage"' not in body
            assert body.endswith(b"data: [DONE]\n\n")
        # Others use the replica too, and the gateway does not see it.
        for name in ("six", "ten", "red"):
            await ask(client, replica.url, name)
        await ask(client, gateway.url, "one")
        await gateway.until_idle()
        *_, before, last = gateway.log_lines()
        assert before["cached_tokens"] >= before["expected_cached_tokens"] > 300
        assert last["expected_cached_tokens"] > 300
        assert last["cached_tokens"] == 0
        labels = '{replica="replica-1",result='
        assert await metric(client, gateway, f'warmgate_prefix_promises_total{labels}"kept"') == 2
        assert await metric(client, gateway, f'warmgate_prefix_promises_total{labels}"broken"') == 1
        assert await metric(client, gateway, "warmgate_prefix_map_capacity_ratio") < 1
        assert await metric(client, gateway, "warmgate_prefix_promises_kept_ratio") < 1
        # "two" was used before "one", so that it has gone too.
        await ask(client, gateway.url, "two")
        assert gateway.log_lines()[-1]["expected_cached_tokens"] == 0


async def test_without_being_asked_a_stream_tells_nothing(replica: RunningReplica) -> None:
    async with running_gateway([replica.url]) as gateway, session() as client:
        for _ in range(3):
            await ask(client, gateway.url, "one")
        await gateway.until_idle()
        assert "cached_tokens" not in gateway.log_lines()[-1]
        assert await metric(client, gateway, 'warmgate_prefix_promises_total{replica="replica-1",result="kept"}') == 0


async def test_the_clients_own_usage_is_left_to_it(replica: RunningReplica) -> None:
    async with running_gateway([replica.url], {"prefixes": {"ask_usage": True}}) as gateway, session() as client:
        body = await ask(client, gateway.url, "one", stream_options={"include_usage": True})
        assert body.count(b'"usage":{') == 1
        body = await ask(client, gateway.url, "one", stream=False)
        assert body.count(b'"usage":{') == 1


async def test_switched_off(replica: RunningReplica) -> None:
    options = {"prefixes": {"ask_usage": True, "feedback": False}}
    async with running_gateway([replica.url], options) as gateway, session() as client:
        for _ in range(2):
            await ask(client, gateway.url, "one")
        for name in ("six", "ten", "red"):
            await ask(client, replica.url, name)
        await ask(client, gateway.url, "one")
        await gateway.until_idle()
        assert gateway.log_lines()[-1]["cached_tokens"] == 0
        assert await metric(client, gateway, "warmgate_prefix_map_capacity_ratio") == 1
