"""Two vLLM replicas for all tests here; `make test-real` says where vLLM and the model are."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from loadtests.real.replica import ReplicaOptions, VllmReplica

BLOCKS = 640
"""KV blocks of each replica, of 32 tokens."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.real)
            # A replica takes 15 s to start on an idle machine, and minutes on a busy one.
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def options() -> ReplicaOptions:
    venv, model = os.environ.get("VLLM_VENV"), os.environ.get("MODEL")
    if not venv or not model:
        pytest.skip("VLLM_VENV and MODEL name no vLLM and no model; loadtests/real/setup.sh makes both")
    return ReplicaOptions(
        Path(venv).absolute(),
        Path(model).absolute(),
        # The name under which vLLM's recorded answers were made,
        name="tiny",
        kv_events=True,
        # the switch without which /inference/v1/generate and .../render answer 403, and a cache that a test can fill.
        extra=("--enable-scale-out", "--num-gpu-blocks-override", str(BLOCKS)),
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def replicas(options: ReplicaOptions) -> AsyncIterator[list[VllmReplica]]:
    fleet = [VllmReplica(options) for _ in range(2)]
    async with AsyncExitStack() as started:
        # One after the other: two at once take longer than twice one on two cores.
        for replica in fleet:
            await started.enter_async_context(replica)
        yield fleet
