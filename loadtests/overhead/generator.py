"""`python -m loadtests.overhead.generator`: the load generator, a process of its own.

Reads a `Job` as JSON from standard input, drives the load, and writes the `Outcome` as JSON. It also takes the CPU time
of the processes under test, so that both ends of a window are the same moment for work and cost.
"""

import asyncio
import sys
import time
from dataclasses import asdict
from statistics import quantiles
from typing import NamedTuple
from urllib.request import urlopen

import orjson
import uvloop

from loadtests.overhead.job import Job, Outcome
from loadtests.overhead.loads import ClosedLoop, Load, OpenLoop
from loadtests.overhead.process_tree import ProcessTree
from loadtests.overhead.prompts import Requests
from loadtests.overhead.streams import Streams

_FINISH_TIMEOUT_S = 10.0
_RSS_INTERVAL_S = 0.1


class _Moment(NamedTuple):
    time_s: float
    completed: int
    reads: int
    cpu_s: dict[str, float]


def _moment(load: Load, trees: dict[str, ProcessTree]) -> _Moment:
    cpu_s = {name: tree.cpu_s() for name, tree in trees.items()}
    cpu_s["generator"] = time.process_time()
    return _Moment(time.perf_counter(), load.completed, load.reads, cpu_s)


def _load(job: Job) -> Load:
    requests = Requests(job.size_bytes, f"127.0.0.1:{job.port}", stream=job.load == "streams")
    requests.skip_to(job.first_request)
    if job.load == "closed":
        return ClosedLoop(job.port, requests, job.connections)
    if job.load == "open":
        return OpenLoop(job.port, requests, job.rate_per_s, job.connections)
    return Streams(job.port, requests, job.connections)


def percentiles_ms(latencies_s: "list[float]") -> tuple[float, float]:
    """Median and 99th percentile in milliseconds; zero without values."""
    if len(latencies_s) < 2:
        return (1000 * sum(latencies_s),) * 2
    cuts = quantiles(latencies_s, n=100, method="inclusive")
    return 1000 * cuts[49], 1000 * cuts[98]


async def _end_all_streams(stub_port: int) -> int:
    """End all streams at the stub; return how many events it has sent since the last time."""
    address = f"http://127.0.0.1:{stub_port}/stub/finish"
    sent = orjson.loads(await asyncio.to_thread(lambda: urlopen(address, timeout=_FINISH_TIMEOUT_S).read()))
    return int(sent["events"])


async def _finish_streams(load: Streams, stub_port: int) -> None:
    """End all streams at the stub and compare what it has sent with what came."""
    if not load.open_streams:
        load.errors["ended_early"] += load.total
    events = await _end_all_streams(stub_port)
    await load.finish(_FINISH_TIMEOUT_S)
    if not load.errors and (missing := events - load.completed):
        load.errors["events_missing"] += missing


async def _peak_rss(tree: ProcessTree, peak: list[int]) -> None:
    while True:
        peak[0] = max(peak[0], tree.rss_bytes())
        await asyncio.sleep(_RSS_INTERVAL_S)


async def drive(job: Job) -> Outcome:
    """Run one load to its end.

    Raises:
        ProcessGoneError: a watched process ended.
    """
    trees = {name: ProcessTree(pid) for name, pid in job.watched.items()}
    load = _load(job)
    peak = [0]
    memory = asyncio.create_task(_peak_rss(trees["gateway"], peak)) if "gateway" in trees else None
    if isinstance(load, Streams):
        # One that another gateway forgot would go on, and its events would be missed here.
        await _end_all_streams(job.stub_port)
    await load.start()
    await asyncio.sleep(job.warmup_s)
    load.mark()
    before = _moment(load, trees)
    await asyncio.sleep(job.seconds)
    after = _moment(load, trees)
    latencies_s = load.latencies_s.tolist()
    if memory is not None:
        memory.cancel()
    if isinstance(load, Streams):
        await _finish_streams(load, job.stub_port)
    else:
        await load.finish(_FINISH_TIMEOUT_S)
    p50_ms, p99_ms = percentiles_ms(latencies_s)
    return Outcome(
        window_s=after.time_s - before.time_s,
        completed=after.completed - before.completed,
        total=load.total,
        cpu_s={name: after.cpu_s[name] - used_s for name, used_s in before.cpu_s.items()},
        peak_rss_bytes=peak[0],
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        reads=after.reads - before.reads,
        errors={kind: count for kind, count in load.errors.items() if count},
    )


def main() -> None:
    """Read the job, write the outcome."""
    job = Job(**orjson.loads(sys.stdin.buffer.read()))
    outcome = uvloop.run(drive(job))
    sys.stdout.buffer.write(orjson.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
