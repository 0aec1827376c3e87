"""These tests run on the event loop that `warmgate serve` runs on; its transports differ from asyncio's own."""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
import uvloop
from support.gateways import RunningGateway, running_gateway
from support.stub_replica import StubReplica


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def replica() -> AsyncIterator[StubReplica]:
    stub = await StubReplica().start()
    yield stub
    await stub.stop()


@pytest.fixture
async def gateway(replica: StubReplica) -> AsyncIterator[RunningGateway]:
    """A gateway in front of one stub, with its defaults."""
    async with running_gateway([replica]) as running:
        yield running
        await running.until_idle()
        running.assert_idle()
