"""Wrong predictions as operators meet them: the request log, metrics and the gateway's own log."""

import asyncio
import logging
from typing import Any

import pytest
from support.gateways import CHAT, RunningGateway, running_gateway, session
from support.stub_replica import Call, StubReplica, answer

SLOW_S = 0.3


async def test_replicas_slower_than_predicted_are_routed_by_load_until_predictions_are_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "gateway.estimator.fallback")
    delay_s = SLOW_S

    async def late(call: Call) -> None:
        await asyncio.sleep(delay_s)
        await answer(call)

    async def stream(gateway: RunningGateway, http: Any) -> None:
        async with http.post(f"{gateway.url}/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            assert response.status == 200
            assert b"[DONE]" in await response.read()

    async def metrics(gateway: RunningGateway, http: Any) -> list[str]:
        async with http.get(f"{gateway.admin_url}/metrics") as response:
            return [line for line in (await response.text()).splitlines() if "prediction_fallback" in line]

    replicas = [await StubReplica(script=late).start() for _ in range(2)]
    options = {"hardware": "h100-sxm", "model": "llama-3.1-8b", "routing": {"fallback": {"samples": 8}}}
    try:
        async with running_gateway(replicas, options) as gateway, session() as http:
            await asyncio.gather(*(stream(gateway, http) for _ in range(8)))
            await gateway.until_idle()
            # A prompt of three words takes an H100 milliseconds.
            assert list(gateway.gateway.router.fallback.fallen) == ["m"]
            assert 'warmgate_prediction_fallback{model="m"} 1.0' in await metrics(gateway, http)
            await stream(gateway, http)
            await gateway.until_idle()
            line = gateway.log_lines()[-1]
            assert line["policy"] == "predicted_ttft"
            assert line["reason"].startswith("fallback to load, predictions being off by ")
            assert line["terms"]["prediction_error"] > 1.0
            assert line["predicted_ttft_ms"] > 0.0
            delay_s = 0.0
            for _ in range(300):
                await stream(gateway, http)
                if not gateway.gateway.router.fallback.fallen:
                    break
            await stream(gateway, http)
            await gateway.until_idle()
            assert "fallback" not in gateway.log_lines()[-1]["reason"]
            lines = await metrics(gateway, http)
            assert 'warmgate_prediction_fallback{model="m"} 0.0' in lines
            (counted,) = (line for line in lines if line.startswith("warmgate_prediction_fallback_decisions_total"))
            logged = sum("fallback" in line["reason"] for line in gateway.log_lines())
            assert float(counted.split()[-1]) == logged > 0
            news = [record for record in caplog.records if record.name == "gateway.estimator.fallback"]
            assert [record.levelname for record in news] == ["WARNING", "INFO"]
            gateway.assert_idle()
    finally:
        for replica in replicas:
            await replica.stop()
