"""These tests run on the event loop that `warmgate serve` runs on; its transports differ from asyncio's own."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest
import uvloop
from support.gateways import RunningGateway, running_gateway
from support.stub_replica import StubReplica


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop}


StartReplica = Callable[..., Awaitable[StubReplica]]


@pytest.fixture
async def start_replica() -> AsyncIterator[StartReplica]:
    """Starts stubs, and stops them however the test ends: uvloop does not close beside an open server."""
    started: list[StubReplica] = []

    async def start(context: ssl.SSLContext | None = None, port: int = 0) -> StubReplica:
        stub = await StubReplica().start(port, ssl=context)
        started.append(stub)
        return stub

    yield start
    for stub in started:
        await stub.stop()


@pytest.fixture
async def replica(start_replica: StartReplica) -> StubReplica:
    """One stub."""
    return await start_replica()


@pytest.fixture
async def gateway(replica: StubReplica) -> AsyncIterator[RunningGateway]:
    """A gateway in front of one stub, with its defaults."""
    async with running_gateway([replica]) as running:
        yield running
        await running.until_idle()
        running.assert_idle()
