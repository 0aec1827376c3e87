"""How evenly a burst is spread: `python -m loadtests.burst`.

A burst of requests with prompts of their own, at random moments, to one gateway with one worker, and to several
gateways with several workers each, that share what they know through a Redis of the benchmark's own. Stub replicas hold
all streams until the end. What counts is the number of requests on the replica that has most, over the mean, from the
moment on when there are ten for each: the 99th percentile of all looks, and the last.
"""

import asyncio
import contextlib
import random
import sys
from collections import Counter
from dataclasses import dataclass

import aiohttp
import click
import uvloop
from rich.console import Console
from rich.table import Table

from loadtests.bench_redis import server
from loadtests.soak.clients import Connection, json_post
from loadtests.stack import GatewayOptions, Stack
from loadtests.stack.ports import LOOPBACK, free_ports
from loadtests.stack.processes import ChildGroup

_MODEL = "burst"
_PATH = "/v1/chat/completions"
_CHUNKS = 1000
_START_S = 60.0
_LOOK_EVERY_S = 0.02
_SETTLE_S = 3.0
"""After the start: workers hear of each other."""


@dataclass(frozen=True, slots=True)
class Burst:
    """What is sent.

    Attributes:
        requests: how many.
        seconds: within this time.
        prompt_bytes: of each.
        first_token_s: until a replica's first token, at most.
        seed: of the moments.
    """

    requests: int
    seconds: float
    prompt_bytes: int
    first_token_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Most requests on one replica over the mean.

    Attributes:
        p99: of all looks.
        last: when all had been sent.
        arrived: requests that have reached a replica.
    """

    p99: float
    last: float
    arrived: int


async def spread(gateways: int, workers: int, replicas: int, burst: Burst) -> Spread:
    """Send a burst.

    Args:
        gateways: how many; requests go to each in turn.
        workers: of each gateway.
        replicas: how many.
        burst: what to send.

    Raises:
        ChildFailedError: something does not start.
    """
    ports = free_ports(replicas)
    words = [word for port in ports for word in ("--port", str(port))]
    words += ["--model", _MODEL, "--chunks", str(_CHUNKS), "--interval-ms", str(burst.first_token_s * 1000)]
    with server() as redis:
        async with contextlib.AsyncExitStack() as stack:
            children = await stack.enter_async_context(ChildGroup(grace_s=1.0))
            stub = await children.start(
                "replicas", [sys.executable, "-m", "loadtests.overhead.stub", *words], ready_line="ready"
            )
            await children.until("the start of the replicas", stub.ready(), _START_S)
            urls = tuple(f"http://{LOOPBACK}:{port}" for port in ports)
            extra = ("--workers", str(workers), "--redis", redis.url)
            options = GatewayOptions(hardware="h100-sxm", model="llama-3.1-8b", extra=extra)
            stacks = [await stack.enter_async_context(Stack(urls, options)) for _ in range(gateways)]
            await asyncio.sleep(_SETTLE_S)
            return await _send([int(one.url.rpartition(":")[2]) for one in stacks], ports, burst)


async def _send(gateway_ports: list[int], replica_ports: list[int], burst: Burst) -> Spread:
    loop = asyncio.get_running_loop()
    rng = random.Random(burst.seed)
    bodies = [
        json_post(
            _PATH,
            {
                "model": _MODEL,
                "stream": True,
                "messages": [{"role": "user", "content": f"{number:08d}" * (burst.prompt_bytes // 8)}],
            },
        )
        for number in range(burst.requests)
    ]
    connections: list[Connection] = []

    async def send(number: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        port = gateway_ports[number % len(gateway_ports)]
        _, connection = await loop.create_connection(Connection, LOOPBACK, port)
        connections.append(connection)
        await connection.ask_and_stay(bodies[number])

    sending = asyncio.gather(*(send(number, rng.uniform(0.0, burst.seconds)) for number in range(burst.requests)))
    ratios: list[float] = []
    async with aiohttp.ClientSession() as session:
        while True:
            done = sending.done()
            counts = await _counts(session, replica_ports)
            mean = sum(counts.values()) / len(replica_ports)
            if mean >= 10:
                ratios.append(max(counts.values()) / mean)
            if done:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
    await sending
    for connection in connections:
        connection.close()
    return Spread(sorted(ratios)[int(0.99 * (len(ratios) - 1))], ratios[-1], sum(counts.values()))


async def _counts(session: aiohttp.ClientSession, replica_ports: list[int]) -> Counter[str]:
    async with session.get(f"http://{LOOPBACK}:{replica_ports[0]}/stub/calls") as response:
        calls: dict[str, dict[str, int]] = await response.json()
    return Counter({port: paths.get(_PATH, 0) for port, paths in calls.items()})


@click.command(help=__doc__)
@click.option("--gateways", type=click.IntRange(1), default=2, show_default=True)
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True, help="Of each gateway.")
@click.option("--replicas", type=click.IntRange(2), default=8, show_default=True)
@click.option("--requests", type=click.IntRange(1), default=400, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.01), default=2.0, show_default=True, help="In which they come.")
@click.option("--prompt-bytes", type=click.IntRange(8), default=16_000, show_default=True)
@click.option("--first-token-s", type=click.FloatRange(0.001), default=0.25, show_default=True, help="At most.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Each with other moments.")
def main(
    gateways: int,
    workers: int,
    replicas: int,
    requests: int,
    seconds: float,
    prompt_bytes: int,
    first_token_s: float,
    rounds: int,
) -> None:
    """Run it and print a table."""
    table = Table(title=f"{requests} requests of {prompt_bytes} bytes in {seconds:g} s on {replicas} replicas")
    for column in ("gateways x workers", "round", "max/mean p99", "last", "arrived"):
        table.add_column(column, justify="right")
    for count, each in ((1, 1), (gateways, workers)):
        for turn in range(rounds):
            burst = Burst(requests, seconds, prompt_bytes, first_token_s, turn + 1)
            found = uvloop.run(spread(count, each, replicas, burst))
            table.add_row(
                f"{count} x {each}", str(turn + 1), f"{found.p99:.3f}", f"{found.last:.3f}", str(found.arrived)
            )
    Console().print(table)


if __name__ == "__main__":
    main()
