"""Cost and speed of the shared prefix map: `python -m loadtests.bench_redis`.

Starts a Redis of its own and prints

- propagation: from an insertion in one worker process to the same blocks being known in each other one, and Redis' CPU,
  with prompts of 8 k tokens at 500 requests per second over all workers: once where nine tenths of each prompt are
  known (turns of conversations), once where nothing is.
  "late" is the 99th percentile of how much later than asked for a worker wakes up: what the machine adds by itself;
- memory: bytes of Redis memory per block alive, for prompts that grow by so many blocks at a time;
- loading: how long a cold worker takes to load so many blocks, the share of the warm worker's hits it then has, and the
  longest time its event loop stood still.

Workers here have no HTTP: what is measured is the map.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import subprocess
import tempfile
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import uvloop
from rich.console import Console
from rich.table import Table

from gateway.prefixes.shared import SharedIndex
from gateway.prompt.blocks import BlockSchedule
from gateway.replicas.load import LoadLedger
from gateway.replicas.registry import Fleet, ReplicaSpec
from gateway.sharing.connection import RedisTarget
from gateway.sharing.sharing import Sharing
from gateway.workers.redis_server import find_server
from loadtests.stack.ports import free_ports

PROMPT_BYTES = 32_000
"""8 k tokens of four bytes."""
UNBOUNDED = 1 << 60
LOADED_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.001


@dataclass
class Server:
    """A Redis of the benchmark's own."""

    url: str
    pid: int
    client: Any

    def cpu_s(self) -> float:
        """CPU seconds used so far, in and out of the kernel."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def used_bytes(self) -> int:
        """Memory of the data, without what connections need."""
        stats = self.client.memory_stats()
        return int(stats["dataset.bytes"] + stats["overhead.total"] - stats["clients.normal"])


@contextmanager
def server() -> Any:
    """Start a server on a free port."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        words = [str(find_server()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        client = redis.Redis(port=port)
        try:
            until_s = time.monotonic() + 10.0
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    if time.monotonic() > until_s:
                        raise
                    time.sleep(0.05)
            yield Server(f"redis://127.0.0.1:{port}", process.pid, client)
        finally:
            client.close()
            process.kill()
            process.wait()


class Worker:
    """The map's part of a worker."""

    def __init__(self, url: str, replicas: int) -> None:
        schedule = BlockSchedule()
        self.index = SharedIndex(schedule, UNBOUNDED)
        self.fleet = Fleet()
        ledger = LoadLedger()
        for number in range(replicas):
            self.fleet.add(ReplicaSpec(f"http://replica-{number}:8000"))
            ledger.open(number)
        self.sharing = Sharing(RedisTarget(url), self.fleet, self.index, ledger, schedule)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Worker"]:
        """Share until the end."""
        self.sharing.start()
        try:
            async with asyncio.timeout(LOADED_WITHIN_S):
                while self.sharing.loaded_s is None or not self.sharing.up:  # noqa: ASYNC110 - a benchmark may look
                    await asyncio.sleep(0.001)
            yield self
        finally:
            await self.sharing.stop()

    async def written(self) -> None:
        """Wait until nothing waits."""
        while self.sharing.prefixes.waiting_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)


class Stalls:
    """The longest time an event loop did not come round, and CPU time, to which other programs do not add."""

    def __init__(self) -> None:
        self.longest_s = self.longest_cpu_s = 0.0

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            before_s, cpu_s = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_LOOK_EVERY_S)
            self.longest_cpu_s = max(self.longest_cpu_s, time.thread_time() - cpu_s)
            self.longest_s = max(self.longest_s, time.perf_counter() - before_s - _LOOK_EVERY_S)


# -- propagation


class TimedIndex(SharedIndex):
    """Notes when what others have told became known."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.known_s: dict[int, float] = {}

    def graft(self, slot: int, depth: int, parent: int, tail: "array[int]") -> bool:
        """Note the time of the last block."""
        learned = super().graft(slot, depth, parent, tail)
        if learned and tail:
            self.known_s[tail[-1]] = time.monotonic()
        return learned


def propagating_worker(
    url: str, number: int, replicas: int, rate_per_s: float, duration_s: float, known: float, results: Any
) -> None:
    """Insert prompts at a rate; put what was inserted and what was heard, with times, into the queue."""

    async def run() -> None:
        rng = random.Random(number)
        worker = Worker(url, replicas)
        worker.index.__class__ = TimedIndex
        index = worker.index
        assert isinstance(index, TimedIndex)
        index.known_s = {}
        for slot in range(replicas):
            index.set_capacity(slot, 800_000)
        blocks = len(BlockSchedule().hashes(bytes(PROMPT_BYTES), 1))
        sessions = [[rng.getrandbits(60) for _ in range(blocks)] for _ in range(24)]
        sent: dict[int, float] = {}
        late_s: list[float] = []
        cpu_s = time.process_time()
        async with worker.running():
            begun_s = time.monotonic()
            next_s = begun_s + rng.random() / rate_per_s
            while next_s < begun_s + duration_s:
                await asyncio.sleep(max(next_s - time.monotonic(), 0.0))
                late_s.append(time.monotonic() - next_s)
                session = rng.randrange(len(sessions))
                keep = int(known * blocks)
                prompt = sessions[session][:keep] + [rng.getrandbits(60) for _ in range(blocks - keep)]
                index.insert(session % replicas, prompt)
                sent[prompt[-1]] = time.monotonic()
                next_s += rng.expovariate(rate_per_s)
            await worker.written()
            await asyncio.sleep(0.5)
            counts = worker.sharing.prefixes.counts
            results.put(
                (number, sent, index.known_s, (time.process_time() - cpu_s) / duration_s, counts.orphans, late_s)
            )

    uvloop.run(run())


def propagation(workers: int, replicas: int, rate_per_s: float, duration_s: float) -> Table:
    """Milliseconds to other workers, and CPU."""
    table = Table(
        title=f"{rate_per_s:.0f} requests/s, {PROMPT_BYTES} bytes each, {workers} workers, {replicas} replicas"
    )
    for column in (
        "known",
        "requests",
        "heard",
        "p50 ms",
        "p99 ms",
        "max ms",
        "Redis CPU",
        "worker CPU",
        "orphans",
        "late ms",
    ):
        table.add_column(column, justify="right")
    context = multiprocessing.get_context("spawn")
    for known in (0.9, 0.0):
        with server() as redis_server:
            results = context.Queue()
            processes = [
                context.Process(
                    target=propagating_worker,
                    args=(redis_server.url, n, replicas, rate_per_s / workers, duration_s, known, results),
                )
                for n in range(workers)
            ]
            for process in processes:
                process.start()
            time.sleep(3.0)
            before_s, at_s = redis_server.cpu_s(), time.monotonic()
            time.sleep(duration_s - 4.0)
            cpu = (redis_server.cpu_s() - before_s) / (time.monotonic() - at_s)
            parts = [results.get() for _ in processes]
            for process in processes:
                process.join()
        delays_s = sorted(
            heard_s - sent_s
            for number, sent, *_ in parts
            for block, sent_s in sent.items()
            for other, _, known_s, *_ in parts
            if other != number and (heard_s := known_s.get(block)) is not None
        )
        requests = sum(len(part[1]) for part in parts)

        def at(quantile: float, values: list[float] = delays_s) -> str:
            return f"{values[int(quantile * (len(values) - 1))] * 1000:.1f}"

        table.add_row(
            f"{known:.0%}",
            str(requests),
            f"{len(delays_s) / (requests * (workers - 1)):.2%}",
            at(0.5),
            at(0.99),
            at(1.0),
            f"{cpu:.1%}",
            f"{sum(part[3] for part in parts) / workers:.1%}",
            str(sum(part[4] for part in parts)),
            at(0.99, sorted(late_s for part in parts for late_s in part[5])),
        )
    return table


# -- memory and loading


async def fill(worker: Worker, blocks: int, growth: int, turns: int, replicas: int) -> list[tuple[int, list[int]]]:
    """Have conversations until the map holds so many blocks; return all last turns."""
    rng = random.Random(7)
    last: list[tuple[int, list[int]]] = []
    held = 0
    while held < blocks:
        slot = len(last) % replicas
        prompt = [slot + 1]  # a system prompt that all of a replica's conversations share
        for _ in range(turns):
            # A list may not change once it has been inserted.
            prompt = prompt + [rng.getrandbits(60) for _ in range(growth)]
            worker.index.insert(slot, prompt)
            held += growth
        last.append((slot, prompt))
        while worker.sharing.prefixes.waiting_bytes > 1 << 20:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)
    await worker.written()
    return last


def hits(worker: Worker, prompts: list[tuple[int, list[int]]]) -> int:
    """Blocks found of these prompts."""
    return sum(dict(worker.index.match(prompt)).get(slot, 0) for slot, prompt in prompts)


async def loading_row(blocks: int, growth: int, turns: int, replicas: int) -> list[str]:
    """Fill a map, and load it cold."""
    with server() as redis_server:
        empty = redis_server.used_bytes()
        async with Worker(redis_server.url, replicas).running() as warm:
            prompts = await fill(warm, blocks, growth, turns, replicas)
            alive = sum(warm.index.blocks(slot) for slot in range(replicas))
            used = redis_server.used_bytes() - empty
            cold = Worker(redis_server.url, replicas)
            stalls = Stalls()
            watching = asyncio.get_running_loop().create_task(stalls.watch())
            await asyncio.sleep(0.1)
            stalls.longest_s = stalls.longest_cpu_s = 0.0
            cpu_s = time.process_time()
            async with cold.running():
                cpu_s = time.process_time() - cpu_s
                seconds = cold.sharing.loaded_s
                watching.cancel()
                share = hits(cold, prompts) / hits(warm, prompts)
    assert seconds is not None
    return [
        f"{growth} x {turns}",
        f"{alive:,}",
        f"{used / 1e6:.1f}",
        f"{used / alive:.1f}",
        f"{seconds:.2f}",
        f"{cpu_s:.2f}",
        f"{share:.2%}",
        f"{stalls.longest_s * 1000:.1f}",
        f"{stalls.longest_cpu_s * 1000:.1f}",
    ]


def loading(blocks: int, replicas: int) -> Table:
    """Memory and loading, for several shapes of conversations."""
    table = Table(title=f"{blocks:,} blocks on {replicas} replicas")
    for column in (
        "blocks x turns",
        "alive",
        "Redis MB",
        "bytes/block",
        "load s",
        "CPU s",
        "hits",
        "stall ms",
        "of it CPU",
    ):
        table.add_column(column, justify="right")
    for growth, turns in ((96, 1), (10, 8), (3, 10), (1, 10)):
        table.add_row(*uvloop.run(loading_row(blocks, growth, turns, replicas)))
    return table


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rate", type=float, default=500.0, help="requests per second, all workers together")
    parser.add_argument("--duration", type=float, default=15.0, help="seconds")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--only", choices=["propagation", "loading"])
    arguments = parser.parse_args()
    console = Console(width=120)
    if arguments.only != "loading":
        console.print(propagation(arguments.workers, arguments.replicas, arguments.rate, arguments.duration))
    if arguments.only != "propagation":
        console.print(loading(arguments.blocks, arguments.replicas))


if __name__ == "__main__":
    main()
