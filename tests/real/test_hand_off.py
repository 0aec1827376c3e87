"""Prefill on one real vLLM replica, decode on another, through the gateway: NixlConnector (pull)."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from support.gateways import RunningGateway, running_gateway

from loadtests.real.replica import ReplicaOptions, VllmReplica

pytestmark = pytest.mark.asyncio(loop_scope="session")

LEASE_S = 6
PATIENT = aiohttp.ClientTimeout(total=600)
"""A wrong engine id costs the decode replica most of a minute, and a busy machine computes 8,000 tokens in as long."""
Tamper = Callable[[dict[str, Any]], None]


def prompt(tokens: int, seed: int) -> list[int]:
    return [(number * 7919 + 13 + seed * 37) % 2000 + 10 for number in range(tokens)]


async def local_tokens(replica: VllmReplica) -> float:
    """Prompt tokens that a replica has computed itself."""
    async with aiohttp.ClientSession(timeout=PATIENT) as client, client.get(f"{replica.url}/metrics") as response:
        text = await response.text()
    found = re.search(r'vllm:prompt_tokens_by_source_total\{[^}]*source="local_compute"[^}]*\} (\S+)', text)
    assert found is not None, "no such metric"
    return float(found[1])


async def until_empty(replica: VllmReplica, within_s: float) -> None:
    """Wait until a replica runs nothing and holds no blocks."""
    async with asyncio.timeout(within_s):
        while (state := await replica.metrics()).running or state.kv_usage:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.1)


class Pair:
    """A prefill and a decode replica, and something between gateway and prefill replica that changes answers."""

    def __init__(self, prefill: VllmReplica, decode: VllmReplica) -> None:
        self.prefill = prefill
        self.decode = decode
        self.front = ""
        self.tamper: Tamper | None = None
        self.after_answer: Callable[[], Any] | None = None

    async def relay(self, request: web.Request) -> web.Response:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in ("host", "connection")}
        try:
            async with (
                aiohttp.ClientSession(timeout=PATIENT) as client,
                client.request(
                    request.method, self.prefill.url + request.path_qs, data=body or None, headers=headers
                ) as response,
            ):
                if request.method != "POST" or response.status != 200:
                    return web.Response(
                        status=response.status, body=await response.read(), content_type=response.content_type
                    )
                document = await response.json()
        except aiohttp.ClientError:
            return web.Response(status=503)
        if self.tamper is not None:
            self.tamper(document["kv_transfer_params"])
        if self.after_answer is not None:
            await self.after_answer()
        return web.json_response(document)

    def gateway(self, through_front: bool = False) -> Any:
        url = self.front if through_front else self.prefill.url
        return running_gateway(
            [],
            {
                "replicas": [
                    {"url": url, "name": "p", "role": "prefill"},
                    {"url": self.decode.url, "name": "d", "role": "decode"},
                ],
                "disaggregation": {"policy": "always", "kv_lease_s": LEASE_S},
                "scrape": {"interval_s": 0.2, "timeout_s": 30},
                # The engine's process answers nothing while it computes.
                "health": {"timeout_s": 30},
            },
        )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(options: ReplicaOptions) -> AsyncIterator[Pair]:
    options = replace(options, kv_events=False, kv_lease_s=LEASE_S)
    async with AsyncExitStack() as started:
        prefill = await started.enter_async_context(VllmReplica(replace(options, kv_role="kv_producer")))
        decode = await started.enter_async_context(VllmReplica(replace(options, kv_role="kv_consumer")))
        pair = Pair(prefill, decode)
        application = web.Application(client_max_size=1 << 26)
        application.router.add_route("*", "/{path:.*}", pair.relay)
        runner = web.AppRunner(application)
        await runner.setup()
        started.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        pair.front = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield pair


@pytest.fixture(autouse=True)
def untampered(pair: Pair) -> None:
    pair.tamper = pair.after_answer = None


async def ready(gateway: RunningGateway) -> None:
    """Wait until both replicas are up and have told their block size."""
    replicas = gateway.gateway.fleet.replicas.values()
    async with asyncio.timeout(120):
        while not all(replica.up and replica.kv.block_size_tokens for replica in replicas):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def complete(url: str, tokens: list[int], **fields: Any) -> tuple[int, Any, Any]:
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 16, "temperature": 0, "return_token_ids": True, **fields}
    async with (
        aiohttp.ClientSession(timeout=PATIENT) as client,
        client.post(f"{url}/v1/completions", json=body) as response,
    ):
        return response.status, await response.json(), response.headers


async def check_answer(pair: Pair, gateway: RunningGateway, tokens: list[int]) -> Any:
    """Ask the gateway; the answer must be the one that the decode replica gives alone. Returns its headers."""
    status, document, headers = await complete(gateway.url, tokens)
    assert status == 200, document
    status, alone, _ = await complete(pair.decode.url, tokens)
    assert status == 200, alone
    assert document["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    return headers


async def test_the_decode_replica_computes_nothing(pair: Pair) -> None:
    async with pair.gateway() as gateway:
        await ready(gateway)
        before = await local_tokens(pair.decode)
        status, document, headers = await complete(gateway.url, prompt(4000, 1))
        assert status == 200
        assert headers["x-warmgate-prefill-replica"] == "p"
        assert await local_tokens(pair.decode) == before
        # The prefill replica has computed the prompt itself and is the reference.
        _, alone, _ = await complete(pair.prefill.url, prompt(4000, 1))
        assert document["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
        await until_empty(pair.prefill, 30)
        gateway.assert_idle()


async def test_params_of_clients_are_refused(pair: Pair) -> None:
    async with pair.gateway() as gateway:
        await ready(gateway)
        params = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1]]}
        status, document, _ = await complete(gateway.url, prompt(100, 2), kv_transfer_params=params)
        assert (status, document["error"]["param"]) == (400, "kv_transfer_params")
        await check_answer(pair, gateway, prompt(100, 2))


async def test_what_the_decode_replica_refuses_is_refused_and_the_blocks_are_given_back(pair: Pair) -> None:
    async with pair.gateway() as gateway:
        await ready(gateway)
        status, document, _ = await complete(gateway.url, prompt(1000, 3), max_tokens=100_000)
        assert status == 400, document
        await until_empty(pair.prefill, 10 * LEASE_S)
        await check_answer(pair, gateway, prompt(1000, 3))


async def test_a_client_that_leaves_during_prefill_leaves_nothing_behind(pair: Pair) -> None:
    async with pair.gateway() as gateway:
        await ready(gateway)
        asking = asyncio.create_task(complete(gateway.url, prompt(8000, 4)))
        async with asyncio.timeout(300):
            while not (await pair.prefill.metrics()).running:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await gateway.until_idle()
        gateway.assert_idle()
        await until_empty(pair.prefill, 30)
        await check_answer(pair, gateway, prompt(100, 4))


def wrong_port(params: dict[str, Any]) -> None:
    params["remote_port"] = 5999


def wrong_engine(params: dict[str, Any]) -> None:
    params["remote_engine_id"] = "00000000-0000-0000-0000-000000000000"


def no_request_id(params: dict[str, Any]) -> None:
    del params["remote_request_id"]


@pytest.mark.parametrize("tamper", [wrong_port, wrong_engine, no_request_id])
async def test_params_that_lead_nowhere_end_in_the_right_answer(pair: Pair, tamper: Tamper) -> None:
    pair.tamper = tamper
    async with pair.gateway(through_front=True) as gateway:
        await ready(gateway)
        await check_answer(pair, gateway, prompt(1000, 5 + len(tamper.__name__)))
        await gateway.until_idle()
        gateway.assert_idle()
    await until_empty(pair.prefill, 10 * LEASE_S)


async def test_a_prefill_replica_that_dies_is_done_without(pair: Pair) -> None:
    async with pair.gateway(through_front=True) as gateway:
        await ready(gateway)
        # After the prompt is computed and before its KV is fetched,
        pair.after_answer = pair.prefill.kill
        await check_answer(pair, gateway, prompt(1000, 30))
        # and altogether.
        await check_answer(pair, gateway, prompt(1000, 31))
        await gateway.until_idle()
        gateway.assert_idle()
    pair.after_answer = None
    await pair.prefill.start()
    async with pair.gateway() as gateway:
        await ready(gateway)
        headers = await check_answer(pair, gateway, prompt(1000, 32))
        assert headers["x-warmgate-prefill-replica"] == "p"
