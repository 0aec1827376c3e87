"""One trace against several policies, each on a fresh stack, or against a gateway that runs already."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from loadtests.bench_summary import PolicySummary, summarise
from loadtests.bench_trace import Progress, TraceLoad, TraceRun, drive
from loadtests.sse_client import ChatClient
from loadtests.stack import FleetOptions, GatewayOptions, Stack
from loadtests.trace import TraceRequest

OnStart = Callable[[str, int], Callable[[Progress], None]]
"""Called with the name and the number of requests of each run; returns what is called with its progress."""


async def bench_policy(
    trace: Sequence[TraceRequest],
    load: TraceLoad,
    fleet: FleetOptions,
    gateway: GatewayOptions,
    on_start: OnStart,
) -> PolicySummary:
    """Drive a trace through one policy on a stack of its own, so that every policy starts with cold caches.

    Raises:
        ChildFailedError: a replica or the gateway did not start or ended during the run.
    """
    policy = gateway.policy or "default"
    async with Stack(fleet, gateway) as stack, ChatClient(stack.url, keeps_alive=not load.serial) as client:
        served = replace(load, model=await client.first_model())
        driving = asyncio.create_task(drive(client, trace, served, on_start(policy, len(trace))))
        failing = asyncio.create_task(stack.first_failure())
        try:
            await asyncio.wait({driving, failing}, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                raise failing.result()
            run = driving.result()
        finally:
            driving.cancel()
            failing.cancel()
            await asyncio.wait({driving, failing})
    return summarise(run, _policy(run, policy), fleet.speedup, fleet.replicas)


async def bench_policies(
    trace: Sequence[TraceRequest],
    load: TraceLoad,
    fleet: FleetOptions,
    gateway: GatewayOptions,
    policies: Sequence[str],
    on_start: OnStart,
    on_summary: Callable[[PolicySummary], None],
) -> None:
    """Run `bench_policy` for one policy after the other; `on_summary` gets each result when it is there."""
    for policy in policies:
        on_summary(await bench_policy(trace, load, fleet, replace(gateway, policy=policy), on_start))


async def bench_running(
    trace: Sequence[TraceRequest],
    load: TraceLoad,
    url: str,
    on_start: OnStart,
    admin_url: str | None = None,
    speedup: float | None = None,
    api_key: str | None = None,
) -> PolicySummary:
    """Drive a trace through a gateway that runs already, with the policy it has.

    Args:
        trace: requests in order of arrival.
        load: how to send them; an empty model name means the first that the gateway lists.
        url: address of the gateway.
        on_start: see `OnStart`.
        admin_url: its admin side; when given, the gateway must be ready.
        speedup: engine seconds per wall second of its replicas, when known.
        api_key: sent as a bearer token.

    Raises:
        RuntimeError: the gateway does not answer, or is not ready.
    """
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    async with ChatClient(url, headers=headers, keeps_alive=not load.serial) as client:
        if admin_url is not None and (status := await client.status(f"{admin_url.rstrip('/')}/ready")) != 200:
            raise RuntimeError(f"the gateway is not ready: its admin side answers {status}")
        served = replace(load, model=load.model or await client.first_model())
        run = await drive(client, trace, served, on_start(url, len(trace)))
    return summarise(run, _policy(run, url), speedup)


def _policy(run: TraceRun, otherwise: str) -> str:
    """The policy that the responses name."""
    return next((result.policy for result in run.results if result.policy), otherwise)
