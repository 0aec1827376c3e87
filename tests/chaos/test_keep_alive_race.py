"""Replicas close idle connections just when the next request is on its way (uvicorn, thus vLLM: after 5 s)."""

import asyncio
import json
import random

import pytest
from support.gateways import CHAT, running_gateway
from support.raw_client import post, raw_client, request
from support.stub_replica import MakeStub

REQUESTS = 150
IDLE_S = 0.02


@pytest.mark.parametrize("kept_longer_by_us", [True, False])
async def test_no_request_fails_and_none_is_seen_twice(kept_longer_by_us: bool, stub: MakeStub) -> None:
    """500 requests 5.0 s +- 50 ms apart, at a scale where it takes a few seconds.

    A limit of ours below the replica's avoids most of the race; with one far above it, every request is in it.
    """
    rng = random.Random(7)
    replica = await stub()
    replica.keepalive_s = IDLE_S
    keepalive_s = 10.0 if kept_longer_by_us else IDLE_S * 0.8
    body = json.dumps(CHAT).encode()
    options = {"timeouts": {"replica_keepalive_s": keepalive_s}, "health": {"interval_s": 60}}
    async with running_gateway([replica], options) as gateway, raw_client(gateway.port) as client:
        connections = replica.connections
        for _ in range(REQUESTS):
            response = await client.ask(post("/v1/chat/completions", body))
            assert response.status == 200
            await asyncio.sleep(IDLE_S * rng.uniform(0.9, 1.1))
        assert replica.requests_seen == REQUESTS
        assert gateway.gateway.tally.retries == {}
        dialled = replica.connections - connections
        # Connections were lost; where we are the ones who close, all of them, and in the race some were used again.
        assert REQUESTS // 10 < dialled <= (REQUESTS - 1 if kept_longer_by_us else REQUESTS)
        gateway.assert_idle()


async def test_uploads_cannot_be_sent_twice_and_fail_no_more_often(stub: MakeStub) -> None:
    rng = random.Random(7)
    replica = await stub()
    replica.keepalive_s = IDLE_S
    options = {"timeouts": {"replica_keepalive_s": 10.0}, "health": {"interval_s": 60}}
    part = b"--x\r\n\r\nsound\r\n--x--\r\n"
    head = request(
        "POST",
        "/v1/audio/transcriptions",
        "Content-Type: multipart/form-data; boundary=x",
        f"Content-Length: {len(part)}",
    )
    async with running_gateway([replica], options) as gateway, raw_client(gateway.port) as client:
        for _ in range(REQUESTS // 3):
            response = await client.ask(head + part)
            assert response.status == 200
            await asyncio.sleep(IDLE_S * rng.uniform(0.9, 1.1))
        assert replica.requests_seen == REQUESTS // 3
        gateway.assert_idle()
