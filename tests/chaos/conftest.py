"""These tests run on the event loop that `warmgate serve` runs on; its transports differ from asyncio's own."""

import resource
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
import uvloop
from support.stub_replica import MakeStub, Script, StubReplica, answer


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def _enough_file_descriptors() -> None:
    """Clients, gateway and replicas share this process: four descriptors per request."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192 if hard == resource.RLIM_INFINITY else min(hard, 8192)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@pytest.fixture
async def stub() -> AsyncIterator[MakeStub]:
    """Starts stub replicas, and stops them at the end of the test, however it ends."""
    made: list[StubReplica] = []

    async def make(script: Script = answer, port: int = 0) -> StubReplica:
        replica = await StubReplica(script=script).start(port)
        made.append(replica)
        return replica

    yield make
    for replica in made:
        await replica.stop()
