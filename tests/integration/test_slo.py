"""Latency targets as clients and operators meet them: the openai package, gateway.yaml, metrics and the request log."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from support.gateways import CHAT, RunningGateway, running_gateway, session
from support.stub_replica import Call, Script, StubReplica, answer

from gateway.app import Gateway
from gateway.config import Config

KNOWN = {"hardware": "h100-sxm", "model": "llama-3.1-8b"}
"""So that predictions say something from the first request."""


@asynccontextmanager
async def stub(script: Script = answer) -> AsyncIterator[StubReplica]:
    replica = await StubReplica(script=script).start()
    try:
        yield replica
    finally:
        await replica.stop()


def client_of(gateway: RunningGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="sk-test", max_retries=0)


async def chat(api: openai.AsyncOpenAI, content: str = "Hello", **headers: str) -> Any:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return await api.chat.completions.with_raw_response.create(
        model="m", messages=[{"role": "user", "content": content}], extra_headers=names
    )


async def metrics(gateway: RunningGateway) -> list[str]:
    async with session() as http, http.get(f"{gateway.admin_url}/metrics") as response:
        return (await response.text()).splitlines()


async def test_a_refusal_reaches_the_openai_client_as_a_rate_limit_with_a_computed_wait() -> None:
    released = asyncio.Event()

    async def held(call: Call) -> None:
        await released.wait()
        await answer(call)

    async with stub(held) as replica, running_gateway([replica], {**KNOWN, "slo": {"on_miss": "refuse"}}) as gateway:
        async with client_of(gateway) as api:
            # About 100,000 tokens, which take an H100 seconds.
            long = asyncio.create_task(chat(api, "many words " * 36_000))
            await replica.until(lambda: bool(replica.requests))
            with pytest.raises(openai.RateLimitError) as refused:
                await chat(api, x_slo_ttft_ms="500")
            error = refused.value
            assert error.status_code == 429
            assert error.code == "slo_out_of_reach"
            assert error.type == "rate_limit_error"
            assert error.param is None
            assert "latency targets" in error.message
            assert 1 < int(error.response.headers["retry-after"]) < 60
            # Who has the time is served, and nothing of the refused one has come to the replica.
            patient = asyncio.create_task(chat(api, x_slo_ttft_ms="60000"))
            released.set()
            assert (await patient).headers["x-warmgate-slo"] == "expected"
            await long
            assert len(replica.requests) == 2
        lines = await metrics(gateway)
        assert 'warmgate_slo_requests_total{model="m"} 2.0' in lines
        assert 'warmgate_slo_refused_total{model="m"} 1.0' in lines
        assert 'warmgate_slo_targets_total{model="m",result="met",target="ttft"} 1.0' in lines
        refusal = next(line for line in gateway.log_lines() if line["status"] == 429)
        assert refusal["slo"] == {"ttft_ms": 500, "refused": True}
        assert refusal["outcome"] == "refused"
        gateway.assert_idle()


async def test_an_invalid_header_reaches_the_openai_client_as_a_bad_request() -> None:
    async with stub() as replica, running_gateway([replica]) as gateway, client_of(gateway) as api:
        with pytest.raises(openai.BadRequestError) as refused:
            await chat(api, x_slo_tpot_ms="fast")
        assert refused.value.param == "x-slo-tpot-ms"
        assert refused.value.code == "invalid_header"
        assert not replica.requests


async def test_the_replica_sees_the_headers_and_the_log_the_targets() -> None:
    async with stub() as replica, running_gateway([replica], KNOWN) as gateway, client_of(gateway) as api:
        stream = await api.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Hello"}],
            stream=True,
            extra_headers={"x-slo-ttft-ms": "20000", "x-slo-tpot-ms": "12.5"},
        )
        async for _ in stream:
            pass
        await gateway.until_idle()
        assert replica.requests[0].header("x-slo-ttft-ms") == "20000"
        assert replica.requests[0].header("x-slo-tpot-ms") == "12.5"
        (line,) = gateway.log_lines()
        assert line["slo"]["ttft_ms"] == 20000
        assert line["slo"]["tpot_ms"] == 12.5
        assert line["slo"]["ttft_met"] is True
        assert line["slo"]["tpot_met"] in (True, False)
        assert "of 1 of 1 within the targets" in line["reason"]


def config(gateway: Gateway, **slo: Any) -> Config:
    return Config.model_validate({**gateway.config.model_dump(exclude={"slo"}), "slo": slo})


async def test_defaults_are_reloaded() -> None:
    async with stub() as replica, running_gateway([replica], KNOWN) as gateway, session() as http:

        async def status(**headers: str) -> tuple[int, str | None]:
            async with http.post(f"{gateway.url}/v1/chat/completions", json=CHAT, headers=headers) as response:
                await response.read()
                return response.status, response.headers.get("x-warmgate-slo")

        inside = gateway.gateway
        assert await status() == (200, None)
        await inside.reload(config(inside, ttft_ms=0.001))
        assert await status() == (200, "best-effort")
        await inside.reload(config(inside, ttft_ms=0.001, on_miss="refuse", max_retry_after_s=9))
        assert (await status())[0] == 429
        async with http.post(f"{gateway.url}/v1/chat/completions", json=CHAT) as response:
            assert response.headers["retry-after"] == "9"
        # A header wins over the default, a model's own entry over that of all.
        assert await status(**{"x-slo-ttft-ms": "60000"}) == (200, "expected")
        await inside.reload(config(inside, ttft_ms=0.001, on_miss="refuse", models={"m": {"ttft_ms": None}}))
        assert await status() == (200, None)
        await inside.reload(config(inside))
        assert await status() == (200, None)
        assert inside.tally.slo_refused == {"m": 2}
