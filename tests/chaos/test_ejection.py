"""What takes a replica out of routing, and what does not."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.gateways import CHAT, RunningGateway, running_gateway, session
from support.stub_replica import Call, MakeStub, answer, role_event, token_event
from support.waiting import eventually

from gateway.replicas.ejection import State

CHAT_PATH = "/v1/chat/completions"
QUICK: dict[str, Any] = {
    "routing": {"policy": "round_robin"},
    "breaker": {"consecutive_failures": 3, "base_ejection_s": 0.1},
    "retries": {"max_attempts": 1},
    "timeouts": {"first_byte_s": 0.05},
}


def status(code: int) -> Callable[[Call], Awaitable[None]]:
    async def script(call: Call) -> None:
        call.json({"error": {"message": "no", "code": code}}, code)

    return script


async def resets(call: Call) -> None:
    call.reset()


async def hangs(call: Call) -> None:
    await call.gone.wait()


async def ask(client: Any, gateway: RunningGateway) -> tuple[int, str | None]:
    async with client.post(f"{gateway.url}{CHAT_PATH}", json=CHAT) as response:
        await response.read()
        return response.status, response.headers.get("x-warmgate-replica")


def state(gateway: RunningGateway, name: str = "replica-1") -> State:
    return gateway.gateway._ejector.state(gateway.gateway.fleet.replicas[name])


@pytest.mark.parametrize("code", [400, 401, 404, 413, 422, 429, 501, 503])
async def test_what_ejects_nobody(code: int, stub: MakeStub) -> None:
    bad, good = await stub(status(code)), await stub()
    async with running_gateway([bad, good], QUICK) as gateway, session() as client:
        for _ in range(40):
            await ask(client, gateway)
        assert state(gateway) is State.CLOSED
        assert gateway.gateway.fleet.replicas["replica-1"].routable
        gateway.assert_idle()


@pytest.mark.parametrize("script", [status(500), status(502), status(504), resets, hangs])
async def test_who_answers_probes_and_fails_requests_is_ejected(
    script: Callable[[Call], Awaitable[None]], stub: MakeStub
) -> None:
    bad, good = await stub(script), await stub()
    options = {**QUICK, "breaker": {"consecutive_failures": 3, "base_ejection_s": 60}}
    async with running_gateway([bad, good], options) as gateway, session() as client:
        failed = [(await ask(client, gateway))[0] for _ in range(6)].count(200)
        assert failed == 3
        assert state(gateway) is State.EJECTED
        assert gateway.gateway.fleet.replicas["replica-1"].up
        for _ in range(10):
            assert await ask(client, gateway) == (200, "replica-2")
        assert bad.requests_seen == 3
        gateway.assert_idle()


async def test_connections_that_are_refused_eject(stub: MakeStub) -> None:
    bad, good = await stub(), await stub()
    options = {
        **QUICK,
        "breaker": {"consecutive_failures": 3, "base_ejection_s": 60},
        "health": {"interval_s": 60},
        "retries": {"max_attempts": 3},
    }
    async with running_gateway([bad, good], options) as gateway, session() as client:
        await bad.stop()
        for _ in range(10):
            assert await ask(client, gateway) == (200, "replica-2")
        assert state(gateway) is State.EJECTED


async def test_a_trial_decides_and_a_client_error_is_no_decision(stub: MakeStub) -> None:
    bad, good = await stub(status(500)), await stub()
    async with running_gateway([bad, good], QUICK) as gateway, session() as client:
        while state(gateway) is not State.EJECTED:
            await ask(client, gateway)
        seen = bad.requests_seen
        bad.script = status(400)
        await eventually(lambda: not (state(gateway) is not State.HALF_OPEN))
        outcomes = [await ask(client, gateway) for _ in range(4)]
        # One trial in each turn of the round, and the replica is as far as before.
        assert bad.requests_seen - seen == outcomes.count((400, "replica-1")) == 2
        assert state(gateway) is State.HALF_OPEN
        bad.script = answer
        await ask(client, gateway)
        await ask(client, gateway)
        assert state(gateway) is State.CLOSED
        gateway.assert_idle()


@pytest.mark.interpreted
async def test_a_busy_replica_whose_probes_time_out_stays_while_its_streams_flow(stub: MakeStub) -> None:
    flowing = asyncio.Event()

    async def streams(call: Call) -> None:
        call.stream_head()
        call.chunk(role_event())
        while not flowing.is_set():
            call.chunk(token_event("a"))
            await asyncio.sleep(0.01)
        await call.gone.wait()

    busy = await stub(streams)
    options = {"health": {"interval_s": 0.02, "timeout_s": 0.05, "fall": 2}}
    async with running_gateway([busy], options) as gateway, session() as client:
        async with client.post(f"{gateway.url}{CHAT_PATH}", json={**CHAT, "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            busy.health_hangs = True
            probes = busy.heads_seen
            await busy.until(lambda: busy.heads_seen >= probes + 6)
            replica = gateway.gateway.fleet.replicas["replica-1"]
            assert replica.up
            # Without the stream there is nothing left that speaks for it.
            gateway.gateway.plane.replica_active = lambda slot: False  # type: ignore[method-assign, assignment]
            gateway.gateway._health._is_active = lambda slot: False
            await eventually(lambda: not (replica.up))
        flowing.set()
        await gateway.until_idle()
        gateway.assert_idle()
