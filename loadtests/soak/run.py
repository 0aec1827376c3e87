"""One soak from beginning to end: replicas here, the gateway as a process of its own, users, samples, verdict."""

import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from loadtests.overhead.process_tree import ProcessTree
from loadtests.soak.awake import Awake, under_long_prompts, while_streams_are_dropped
from loadtests.soak.clients import Progress, User
from loadtests.soak.replicas import MODEL, Churn
from loadtests.soak.trend import Sample, Trend, second_half
from loadtests.stack.ports import LOOPBACK, free_ports
from loadtests.stack.processes import ChildGroup

_READY_S = 30.0
_SAMPLE_EVERY_S = 0.25
_IDLE_WITHIN_S = 20.0
_AT_WORK = re.compile(
    r"^(warmgate_(?:requests_in_progress|queue_requests|replica_(?:in_flight|decodes|prefill_tokens|kv_tokens))"
    r"(?:\{[^}]*\})?) (\S+)$",
    re.MULTILINE,
)
_LABEL = re.compile(r'replica="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Options:
    """What to do.

    Attributes:
        requests: how many in all.
        users: how many at a time.
        replicas: how many at a time.
        churn_s: between two things that happen to replicas.
        awake_s: how long long prompts arrive afterwards; 0 to leave that out.
        seed: of everything that is drawn.
    """

    requests: int
    users: int = 32
    replicas: int = 4
    churn_s: float = 1.0
    awake_s: float = 0.0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Report:
    """What came of it.

    Attributes:
        progress: requests and how they ended.
        seconds: the users took.
        restarts, exchanges: of replicas.
        samples: of memory.
        trend: of the second half; None for a soak too short to tell.
        left_over: metrics of work under way that were not zero at the end.
        stale_names: replicas that have left and still have series on the metrics page.
        awake: latencies of /health.
    """

    progress: Progress
    seconds: float
    restarts: int
    exchanges: int
    samples: list[Sample]
    trend: Trend | None
    left_over: dict[str, float]
    stale_names: set[str]
    awake: list[Awake]

    def faults(self) -> list[str]:
        """Return what is wrong, in words."""
        faults = [f"{number} x {kind}: {outcome}" for (kind, outcome), number in self.progress.unexpected().items()]
        faults += [f"{name} is {value:g} when nothing is under way" for name, value in self.left_over.items()]
        faults += [f"{name} has left and is still on the metrics page" for name in sorted(self.stale_names)]
        if self.trend is not None and not self.trend.steady():
            faults.append(f"memory grew by {self.trend.growth_bytes / 1e6:.1f} MB in the second half")
        return faults


async def soak(options: Options, say: Callable[[str], None]) -> Report:
    """Run it.

    Args:
        options: what to do.
        say: told how far it is.

    Raises:
        ChildFailedError: the gateway did not start, or ended on its own.
    """
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "gateway.yaml"
        churn = Churn(config, options.replicas, options.seed)
        port, admin_port = free_ports(2)
        await churn.start(_sections(port, admin_port))
        try:
            async with ChildGroup() as children:
                program = [sys.executable, "-m", "gateway.cli", "serve", "-c", str(config)]
                gateway = await children.start("gateway", program)
                await children.until("the gateway's start", _ready(admin_port), _READY_S)
                working = _work(options, churn, port, admin_port, gateway.process.pid, say)
                return await children.until("the soak", working, float("inf"))
        finally:
            churn.close()


def _sections(port: int, admin_port: int) -> dict[str, Any]:
    return {
        "listen": {"host": LOOPBACK, "port": port},
        "admin": {"port": admin_port},
        "hardware": "h100-sxm",
        "model": "llama-3.1-8b",
        "health": {"interval_s": 0.2},
        "breaker": {"base_ejection_s": 0.5},
        "timeouts": {"drain_s": 1.0},
    }


async def _ready(admin_port: int) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://{LOOPBACK}:{admin_port}/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


async def _work(
    options: Options, churn: Churn, port: int, admin_port: int, pid: int, say: Callable[[str], None]
) -> Report:
    progress = Progress(options.requests)
    samples: list[Sample] = []
    memory = ProcessTree(pid)
    beside = [
        asyncio.create_task(churn.run(options.churn_s)),
        asyncio.create_task(_sample(memory, progress, samples, say)),
    ]
    users = [
        User(port, progress, random.Random(options.seed * 1000 + number), MODEL) for number in range(options.users)
    ]
    start_s = time.perf_counter()
    try:
        await asyncio.gather(*(user.run() for user in users))
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    seconds = time.perf_counter() - start_s
    samples.append(Sample(progress.finished, memory.rss_bytes()))
    page = await _settled_page(admin_port, churn.names)
    left_over = {name: float(value) for name, value in _AT_WORK.findall(page) if float(value)}
    stale = set(_LABEL.findall(page)) - churn.names
    awake = []
    if options.awake_s:
        say("long prompts")
        awake.append(await under_long_prompts(port, admin_port, MODEL, options.awake_s, options.seed))
        say("streams that are dropped")
        rounds = max(int(options.awake_s / 2), 1)
        awake.append(await while_streams_are_dropped(port, admin_port, MODEL, rounds, options.seed))
    try:
        trend = second_half(samples)
    except ValueError:
        trend = None
    return Report(progress, seconds, churn.restarts, churn.exchanges, samples, trend, left_over, stale, awake)


async def _sample(memory: ProcessTree, progress: Progress, samples: list[Sample], say: Callable[[str], None]) -> None:
    while True:
        samples.append(Sample(progress.finished, memory.rss_bytes()))
        say(f"{progress.finished:,} of {progress.wanted:,} requests, {samples[-1].rss_bytes / 1e6:.1f} MB")
        await asyncio.sleep(_SAMPLE_EVERY_S)


async def _settled_page(admin_port: int, names: set[str]) -> str:
    """Return the metrics page once nothing is under way and the last change of the configuration has been read.

    If that does not come, the page as it is in the end.
    """
    deadline_s = time.monotonic() + _IDLE_WITHIN_S
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"http://{LOOPBACK}:{admin_port}/metrics") as response:
                page = await response.text()
            idle = not any(float(value) for _, value in _AT_WORK.findall(page))
            if (idle and set(_LABEL.findall(page)) == names) or time.monotonic() > deadline_s:
                return page
            await asyncio.sleep(0.1)


def as_json(report: Report, options: Options) -> str:
    """Return a report as one JSON object."""
    trend = report.trend
    return json.dumps(
        {
            "requests": report.progress.finished,
            "users": options.users,
            "replicas": options.replicas,
            "seed": options.seed,
            "seconds": round(report.seconds, 1),
            "outcomes": {f"{kind}: {outcome}": n for (kind, outcome), n in sorted(report.progress.outcomes.items())},
            "restarts": report.restarts,
            "exchanges": report.exchanges,
            "rss_mb": [round(sample.rss_bytes / 1e6, 2) for sample in report.samples],
            "second_half": None
            if trend is None
            else {
                "rss_mb": round(trend.rss_bytes / 1e6, 2),
                "growth_mb": round(trend.growth_bytes / 1e6, 3),
                "bytes_per_request": round(trend.slope_bytes_per_request, 3),
            },
            "health_ms": [
                {
                    "situation": one.situation,
                    "probes": one.probes,
                    "p50": round(one.p50_ms, 2),
                    "p99": round(one.p99_ms, 2),
                    "max": round(one.max_ms, 2),
                    "requests": one.requests,
                }
                for one in report.awake
            ],
            "faults": report.faults(),
        },
        indent=2,
    )
