"""A gateway in front of simulated prefill and decode replicas, over real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from support.gateways import RunningGateway, running_gateway
from support.waiting import eventually

from gateway.config import Config
from gateway.replicas.registry import Replica
from loadtests.replica import ReplicaConfig, RunningReplica, start_replica

PROMPT = "the quick brown fox jumps over the lazy dog " * 400


class Fleet:
    """One prefill and two decode replicas, one that does everything, and a gateway in front of the first three."""

    def __init__(self, gateway: RunningGateway, replicas: list[RunningReplica], single: RunningReplica) -> None:
        self.gateway = gateway
        self.prefill, *self.decodes = replicas
        self.single = single
        self.session = aiohttp.ClientSession()

    async def ask(self, url: str, **fields: Any) -> tuple[int, Any, dict[str, str]]:
        body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, **fields}
        async with self.session.post(f"{url}/v1/chat/completions", json=body) as response:
            data = await response.read()
            return response.status, data if body.get("stream") else json.loads(data), dict(response.headers)

    async def text(self, **fields: Any) -> str:
        """The gateway's answer, after a check that it is that of a replica alone."""
        status, body, _ = await self.ask(self.gateway.url, **fields)
        assert status == 200, body
        _, alone, _ = await self.ask(self.single.url, **fields)
        text: str = body["choices"][0]["message"]["content"]
        assert text == alone["choices"][0]["message"]["content"]
        return text

    async def metrics(self) -> str:
        async with self.session.get(f"{self.gateway.admin_url}/metrics") as response:
            return await response.text()

    @property
    def computed(self) -> list[int]:
        return [replica.engine.computed_prompt_tokens for replica in (self.prefill, *self.decodes)]


def replica_config(**changes: Any) -> ReplicaConfig:
    return ReplicaConfig(served_model_names=("m",), speedup=20.0, kv_connector="nixl", **changes)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    replicas = [await start_replica(replica_config()) for _ in range(3)]
    single = await start_replica(replica_config())
    roles = ("prefill", "decode", "decode")
    options = {
        "replicas": [
            {"url": replica.url, "role": role, "models": ["m"]} for replica, role in zip(replicas, roles, strict=True)
        ],
        "scrape": {"interval_s": 0.2},
        "health": {"interval_s": 0.1},
        "disaggregation": {"policy": "threshold", "threshold_tokens": 1000, "link": "400g"},
    }
    async with running_gateway([], options) as gateway:
        fleet = Fleet(gateway, replicas, single)
        known = gateway.gateway.fleet.replicas.values()
        await eventually(lambda: all(replica.kv.block_size_tokens for replica in known))
        try:
            yield fleet
        finally:
            await fleet.session.close()
            for replica in (*replicas, single):
                await replica.close()


async def test_the_decode_replica_computes_nothing_of_the_prompt_and_the_answer_is_the_same(fleet: Fleet) -> None:
    await fleet.text()
    prefilled, *decoded = fleet.computed
    assert prefilled > 4000
    # The last token of the prompt, which gives the first of the answer, is always computed.
    assert sorted(decoded) == [0, 1]
    assert [replica.state()["kv_transfer"]["received"] for replica in fleet.decodes].count(1) == 1
    assert fleet.prefill.state()["kv_transfer"] == {"holding": 0, "expired": 0, "sent": 1, "received": 0}
    await fleet.gateway.until_idle()
    fleet.gateway.assert_idle()
    line = fleet.gateway.log_lines()[-1]
    assert line["prefill_replica"] == "replica-1"
    assert line["reason"] == "more uncached tokens than the threshold"
    assert line["terms"]["transfer_bytes"] > 1e8
    page = await fleet.metrics()
    assert 'warmgate_prefill_requests_total{replica="replica-1"} 1.0' in page
    assert 'warmgate_disaggregated_requests_total{model="m"} 1.0' in page


async def test_a_stream_is_the_same_as_from_one_replica(fleet: Fleet) -> None:
    _, parts, headers = await fleet.ask(fleet.gateway.url, stream=True)
    _, alone, _ = await fleet.ask(fleet.single.url, stream=True)

    def content(stream: bytes) -> str:
        events = [json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: {")]
        return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])

    assert content(parts) == content(alone) != ""
    assert headers["x-warmgate-prefill-replica"] == "replica-1"
    page = await fleet.metrics()
    assert "warmgate_hand_off_seconds_count 1.0" in page


async def test_a_short_prompt_stays_where_it_is(fleet: Fleet) -> None:
    await fleet.text(messages=[{"role": "user", "content": "short"}])
    assert fleet.computed[0] == 0


async def test_a_prompt_that_the_decode_replica_holds_stays_there(fleet: Fleet) -> None:
    await fleet.text()
    computed = fleet.computed
    await fleet.text()
    assert fleet.computed[0] == computed[0]


@pytest.mark.parametrize("fault", [{"status": 500}, {"status": 429}, {"status": 503}, {"die_after_chunks": 0}])
async def test_a_prefill_replica_that_fails_costs_the_client_nothing(fleet: Fleet, fault: dict[str, Any]) -> None:
    fleet.prefill.faults.merge(fault)
    await fleet.text()
    assert sum(fleet.computed[1:]) > 4000
    assert "warmgate_hand_off_fallbacks_total{" in await fleet.metrics()
    await fleet.gateway.until_idle()
    fleet.gateway.assert_idle()


async def test_kv_that_cannot_be_fetched_is_computed_instead(fleet: Fleet) -> None:
    transfer = fleet.prefill.replica.kv_transfer
    assert transfer is not None
    params = transfer.hold
    # Other than those the decode replica will find behind the address.
    transfer.hold = lambda name, request: {**params(name, request), "remote_engine_id": "another"}  # type: ignore[method-assign]
    await fleet.text()
    assert sum(fleet.computed[1:]) > 4000
    assert 'warmgate_hand_off_fallbacks_total{cause="hand_off_failed"} 1.0' in await fleet.metrics()


async def prefill_on(fleet: Fleet, other: RunningReplica) -> Replica:
    """Put another replica in the prefill replica's place; return what the gateway knows of it."""
    gateway = fleet.gateway.gateway
    config = gateway.config.model_copy(deep=True).model_dump()
    config["replicas"] = [config["replicas"][0] | {"name": "other", "url": other.url}, *config["replicas"][1:]]
    await gateway.reload(Config.model_validate(config))
    added = gateway.fleet.replicas["other"]
    await eventually(lambda: added.up and added.kv.block_size_tokens)
    return added


async def test_replicas_of_different_block_sizes_are_not_paired(fleet: Fleet) -> None:
    other = await start_replica(replica_config(block_size=32))
    try:
        await prefill_on(fleet, other)
        await fleet.text()
        assert other.engine.computed_prompt_tokens == 0
    finally:
        await other.close()


async def test_replicas_of_different_versions_are_not_paired_until_a_rolling_update_is_through(
    fleet: Fleet,
) -> None:
    """The prefill replica is updated first, then one decode replica, then the other."""
    gateway = fleet.gateway
    known = list(gateway.gateway.fleet.replicas.values())
    await eventually(lambda: all(replica.version == "0.32.0" for replica in known))

    async def update(number: int) -> None:
        old = (fleet.prefill, *fleet.decodes)[number]
        await old.close()
        await eventually(lambda: not known[number].up)
        new = await start_replica(replica_config(engine_version="0.33.0"), port=old.port)
        if number:
            fleet.decodes[number - 1] = new
        else:
            fleet.prefill = new
        await eventually(lambda: known[number].up and known[number].version == "0.33.0")
        await eventually(lambda: known[number].kv.block_size_tokens)

    async def split(name: str) -> bool:
        """Whether a prompt of its own is computed by the prefill replica; the answer is right in any case."""
        await fleet.text(messages=[{"role": "user", "content": name + PROMPT}])
        await gateway.until_idle()
        return "prefill_replica" in gateway.log_lines()[-1]

    assert await split("before")
    try:
        await update(0)
        assert not await split("one of three")
        assert fleet.computed[0] == 0
        reason = gateway.log_lines()[-1]["reason"]
        assert reason.endswith("; no pair for a hand-off, versions differ: 0.33.0 for prefill, 0.32.0 for decode")
        assert 'warmgate_unpaired_prompts_total{difference="version",model="m"} 1.0' in await fleet.metrics()
        await update(1)
        assert await split("two of three")
        assert gateway.log_lines()[-1]["replica"] == "replica-2"
        await update(2)
        assert await split("three of three")
    finally:
        for replica in (fleet.prefill, *fleet.decodes):
            await replica.close()


async def test_a_replica_that_tells_no_version_is_paired(fleet: Fleet) -> None:
    other = await start_replica(replica_config(engine_version=""))
    try:
        added = await prefill_on(fleet, other)
        await fleet.text()
        assert added.version is None
        assert other.engine.computed_prompt_tokens > 4000
    finally:
        await other.close()


async def test_a_client_that_leaves_while_its_prompt_is_computed_leaves_nothing_behind(fleet: Fleet) -> None:
    fleet.prefill.faults.merge({"delay_headers_s": 30})
    task = asyncio.create_task(fleet.ask(fleet.gateway.url))
    await eventually(lambda: fleet.prefill.state()["in_flight"])
    task.cancel()
    await eventually(lambda: not fleet.prefill.state()["in_flight"])
    await fleet.gateway.until_idle()
    fleet.gateway.assert_idle()
