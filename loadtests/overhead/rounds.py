"""Runs the benchmark: the stub, fresh gateways in every round, and one load after the other through each of them."""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aiohttp
import orjson

from loadtests.overhead import gateways as known
from loadtests.overhead import wrk
from loadtests.overhead.job import Job, LoadKind, Outcome
from loadtests.overhead.plan import LOAD_SHARE, REPLICAS, SHORT_PROMPT_KB, Run, Settings, Step, order, steps
from loadtests.overhead.process_tree import ProcessGoneError, ProcessTree
from loadtests.overhead.prompts import MODEL
from loadtests.stack.ports import LOOPBACK, free_ports
from loadtests.stack.processes import ChildFailedError, ChildGroup

_START_TIMEOUT_S = 60.0
_POLL_S = 0.1
_SETTLE_S = 1.0  # routers go on asking replicas about themselves after the first answers
_LOG_TAIL_BYTES = 4000
_NO_END_OF_STREAM = 1_000_000_000
_PROBE = {"model": MODEL, "messages": [{"role": "user", "content": "Are you there?"}], "max_tokens": 16}


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway that serves."""

    name: str
    pid: int
    port: int
    stub_ports: tuple[int, ...]
    """Replicas of its own, so that what it asks them is known."""


class Benchmark:
    """One benchmark; `run` yields every finished load."""

    def __init__(self, settings: Settings, peers_venv: Path, directory: Path, on_run: Callable[[str], None]) -> None:
        """Prepare.

        Args:
            settings: what to measure.
            peers_venv: where the peers are installed.
            directory: an existing one, for logs and files of the gateways.
            on_run: called with what is about to be measured.
        """
        self._settings = settings
        self._peers_venv = peers_venv
        self._directory = directory
        self._on_run = on_run
        self._stub_pid = 0
        self._stub_ports: dict[str, tuple[int, ...]] = {}

    async def run(self) -> AsyncGenerator[list[Run]]:
        """Measure; yields the runs of each round.

        Raises:
            ChildFailedError: the stub or a gateway did not start.
            ProcessGoneError: a gateway ended while it was idle.
        """
        async with ChildGroup() as group:
            await self._start_stub(group)
            for number in range(self._settings.rounds):
                yield await self._round(number)

    async def _start_stub(self, group: ChildGroup) -> None:
        ports = free_ports(REPLICAS * len(self._settings.gateways))
        for index, name in enumerate(self._settings.gateways):
            self._stub_ports[name] = tuple(ports[index * REPLICAS : (index + 1) * REPLICAS])
        program = [sys.executable, "-m", "loadtests.overhead.stub", "--model", MODEL]
        program += ["--chunks", str(_NO_END_OF_STREAM), "--interval-ms", f"{self._settings.interval_ms:g}"]
        for port in ports:
            program += ["--port", str(port)]
        stub = await group.start("stub", program, ready_line="ready")
        await group.until("the start of the stub upstream", stub.ready(), _START_TIMEOUT_S)
        self._stub_pid = stub.process.pid

    async def _round(self, number: int) -> list[Run]:
        runs: list[Run] = []
        async with self._gateways(number) as running:
            for step in steps(self._settings):
                if step.kind == "idle":
                    self._on_run(f"round {number + 1}: all idle")
                    runs += await self._idle(number, list(running.values()))
                    continue
                for name in order(self._settings.gateways, number):
                    unit = "streams" if step.kind == "streams" else "KB"
                    self._on_run(f"round {number + 1}: {name}, {step.kind}, {step.size} {unit}")
                    runs += await self._measure(number, running[name], step, runs)
        return runs

    @asynccontextmanager
    async def _gateways(self, number: int) -> AsyncIterator[dict[str, Running]]:
        """Fresh gateways, all serving."""
        async with ChildGroup() as group, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
            running: dict[str, Running] = {}
            for name in order(self._settings.gateways, number):
                self._on_run(f"round {number + 1}: start of {name}")
                port, admin_port = free_ports(2)
                place = known.Place(
                    tuple(f"http://{LOOPBACK}:{stub_port}" for stub_port in self._stub_ports[name]),
                    port,
                    admin_port,
                    self._directory,
                    self._peers_venv,
                )
                log = self._directory / f"{name}-{number + 1}.log"
                child = await group.start(name, known.program(name, place, log))
                running[name] = Running(name, child.process.pid, port, self._stub_ports[name])
                try:
                    await group.until(f"the start of {name}", self._serves(session, running[name]), _START_TIMEOUT_S)
                except ChildFailedError as error:
                    tail = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace") if log.exists() else ""
                    raise ChildFailedError(f"{error}\n{log.name} ends with:\n{tail}") from None
            await asyncio.sleep(_SETTLE_S)
            yield running

    async def _serves(self, session: aiohttp.ClientSession, gateway: Running) -> None:
        """Ask until the answer is 200 and, of those who look after replicas, every replica has been asked something."""
        url = f"http://{LOOPBACK}:{gateway.port}/v1/chat/completions"
        while True:
            try:
                async with session.post(url, json=_PROBE) as response:
                    await response.read()
                    if response.status == 200 and (
                        gateway.name == known.FLOOR or all(await self._calls_by_port(session, gateway.stub_ports))
                    ):
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(_POLL_S)

    async def _calls_by_port(self, session: aiohttp.ClientSession, ports: tuple[int, ...]) -> list[dict[str, int]]:
        async with session.get(f"http://{LOOPBACK}:{ports[0]}/stub/calls") as response:
            calls = await response.json()
        return [calls[str(port)] for port in ports]

    async def _calls(self, ports: tuple[int, ...]) -> dict[str, int]:
        """Calls of all paths at some ports, summed."""
        total: dict[str, int] = {}
        async with aiohttp.ClientSession() as session:
            for calls in await self._calls_by_port(session, ports):
                for path, count in calls.items():
                    total[path] = total.get(path, 0) + count
        return total

    async def _idle(self, number: int, running: list[Running]) -> list[Run]:
        """CPU time that gateways use without any load: probes, scrapes, timers."""
        await asyncio.sleep(self._settings.warmup_s)
        trees = {gateway.name: ProcessTree(gateway.pid) for gateway in running}
        before = {name: tree.cpu_s() for name, tree in trees.items()}
        started_s = time.perf_counter()
        await asyncio.sleep(self._settings.seconds)
        window_s = time.perf_counter() - started_s
        used_s = {name: tree.cpu_s() - before[name] for name, tree in trees.items()}
        return [
            Run(number, name, "idle", 0, Outcome(window_s=window_s, cpu_s={"gateway": cpu_s}))
            for name, cpu_s in used_s.items()
        ]

    async def _measure(self, number: int, gateway: Running, step: Step, earlier: list[Run]) -> list[Run]:
        if step.kind == "streams":
            job = self._job(gateway, step, "streams", SHORT_PROMPT_KB, step.size)
            return [await self._counted(number, gateway, step, job)]
        if step.kind == "requests":
            job = self._job(gateway, step, "closed", step.size, self._settings.connections)
            return [await self._counted(number, gateway, step, job)]
        saturation = next(
            run.outcome
            for run in earlier
            if run.gateway == gateway.name and run.kind == "requests" and run.size == SHORT_PROMPT_KB
        )
        if not saturation.completed:
            return [Run(number, gateway.name, "latency", step.size, Outcome(errors={"no_saturation": 1}))]
        rate_per_s = LOAD_SHARE * saturation.completed / saturation.window_s
        job = self._job(gateway, step, "open", step.size, self._settings.connections, rate_per_s)
        direct = replace(job, port=gateway.stub_ports[0], watched={"stub": self._stub_pid})
        return [
            Run(number, gateway.name, "direct", step.size, await self._generate(direct)),
            await self._counted(number, gateway, step, job),
        ]

    def _job(
        self, gateway: Running, step: Step, load: LoadKind, size_kb: int, connections: int, rate_per_s: float = 0.0
    ) -> Job:
        return Job(
            load=load,
            port=gateway.port,
            size_bytes=size_kb * 1024,
            seconds=self._settings.seconds,
            warmup_s=self._settings.warmup_s,
            connections=connections,
            first_request=step.first_request,
            rate_per_s=rate_per_s,
            stub_port=gateway.stub_ports[0],
            watched={"gateway": gateway.pid, "stub": self._stub_pid},
        )

    async def _counted(self, number: int, gateway: Running, step: Step, job: Job) -> Run:
        """Run a job and see what the replicas are asked meanwhile."""
        before = await self._calls(gateway.stub_ports)
        if self._settings.use_wrk and job.load == "closed":
            with tempfile.TemporaryDirectory() as directory:
                try:
                    outcome = await wrk.closed_loop(job, Path(directory))
                except (wrk.WrkError, ProcessGoneError) as error:
                    outcome = Outcome(errors={str(error).strip().splitlines()[-1]: 1})
        else:
            outcome = await self._generate(job)
        after = await self._calls(gateway.stub_ports)
        calls = {path: count - before.get(path, 0) for path, count in after.items()}
        calls = {path: count for path, count in sorted(calls.items()) if count}
        return Run(number, gateway.name, step.kind, step.size, outcome, calls)

    async def _generate(self, job: Job) -> Outcome:
        """Run a job in a process of its own. One that fails counts as an error and ends no benchmark."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loadtests.overhead.generator"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await process.communicate(orjson.dumps(asdict(job)))
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            lines = errors.decode(errors="replace").strip().splitlines() or ["the load generator failed"]
            return Outcome(errors={lines[-1]: 1})
        return Outcome(**orjson.loads(output))
