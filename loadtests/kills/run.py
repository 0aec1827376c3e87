"""The run: a redis-server, replicas and a gateway as processes, and kill -9 of one of each under load."""

import asyncio
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from signal import SIGKILL, SIGSTOP
from typing import Any

import aiohttp
import psutil

from gateway.workers.redis_server import find_server
from loadtests.kills.client import OpenLoop, Sent
from loadtests.stack.launch import GatewayOptions, gateway_program, until_answers
from loadtests.stack.ports import LOOPBACK, free_ports
from loadtests.stack.processes import Child, ChildGroup

_MODEL = "kills"
_CHUNKS = 12
_INTERVAL_MS = 20.0
_START_S = 60.0
_AWAY_S = 2.0
"""What a supervisor of Redis or of replicas takes to start one anew."""
_UNSEEN_S = 0.1
"""Within this, a client may send on a connection whose end it has not seen yet."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to do.

    Attributes:
        duration_s: of the load; something is killed after each quarter.
        rate_per_s: requests per second.
        replicas, workers: how many.
        seed: of the load.
    """

    duration_s: float = 60.0
    rate_per_s: float = 200.0
    replicas: int = 4
    workers: int = 2
    seed: int = 1


@dataclass(slots=True)
class Kill:
    """One kill -9.

    Attributes:
        what: who was killed.
        at_s: when, on the clock of the requests.
        replica: its name, if it was a replica.
        client_ports: clients' sides of the connections it had, if it was a worker.
    """

    what: str
    at_s: float
    replica: str | None = None
    client_ports: set[int] = field(default_factory=set)

    def was_running(self, request: Sent) -> bool:
        """Whether the victim was at work on a request."""
        if request.sent_s + request.seconds < self.at_s:
            return False
        if request.client_port in self.client_ports:
            return request.sent_s <= self.at_s + _UNSEEN_S
        return request.sent_s <= self.at_s and self.replica is not None and request.replica == self.replica


@dataclass(frozen=True, slots=True)
class Report:
    """What came of it.

    Attributes:
        requests: all of them.
        kills: in order.
        late_s: how late the latest request was sent.
        not_back: what had not recovered in the end.
    """

    requests: list[Sent]
    kills: list[Kill]
    late_s: float
    not_back: list[str]

    def running(self, kill: Kill) -> list[Sent]:
        """Requests the victim was at work on."""
        return [request for request in self.requests if kill.was_running(request)]

    def others(self) -> list[Sent]:
        """Failed requests that no victim was at work on."""
        return [
            request
            for request in self.requests
            if request.failed and not any(kill.was_running(request) for kill in self.kills)
        ]


class _Scene:
    """The processes."""

    def __init__(self, children: ChildGroup, directory: str, options: Options) -> None:
        self._children = children
        self._directory = directory
        self._options = options
        self._redis_port, self.port, self.admin_port, *self._replica_ports = free_ports(3 + options.replicas)
        self._replicas: list[Child] = []

    async def start(self) -> None:
        """Start all; return when the gateway is ready and shares.

        Raises:
            ChildFailedError: something does not start.
        """
        self._redis = await self._start_redis()
        self._replicas = [await self._start_replica(number) for number in range(self._options.replicas)]
        urls = [f"http://{LOOPBACK}:{port}" for port in self._replica_ports]
        redis_url = f"redis://{LOOPBACK}:{self._redis_port}"
        extra = ("--workers", str(self._options.workers), "--redis", redis_url)
        program = gateway_program(GatewayOptions(extra=extra), urls, self.port, self.admin_port)
        await self._children.start("gateway", program)
        await self._children.until("the gateway's start", until_answers(self._admin("/ready")), _START_S)
        await self._children.until("sharing", self._until_well(), _START_S)

    async def kill_redis(self) -> Kill:
        """Kill Redis, and start it anew a little later."""
        self._redis.send(SIGKILL)
        kill = Kill("redis", _now_s())
        await asyncio.sleep(_AWAY_S)
        self._redis = await self._start_redis()
        return kill

    async def kill_replica(self) -> Kill:
        """Kill the second replica, and start it anew a little later."""
        self._replicas[1].send(SIGKILL)
        kill = Kill("replica", _now_s(), replica="replica-2")
        await asyncio.sleep(_AWAY_S)
        self._replicas[1] = await self._start_replica(1)
        return kill

    async def kill_worker(self) -> Kill:
        """Kill a worker; the gateway starts another."""
        worker = psutil.Process((await self._workers())[0]["pid"])
        # Stopped first, so that what it has does not change any more.
        worker.send_signal(SIGSTOP)
        while worker.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 - another process' state
            await asyncio.sleep(0)
        ports = {
            connection.raddr.port
            for connection in worker.net_connections("tcp")
            if connection.raddr and connection.laddr.port == self.port
        }
        worker.kill()
        return Kill("worker", _now_s(), client_ports=ports)

    async def not_back(self) -> list[str]:
        """Return what is not as it was in the beginning, after some time to get there."""
        try:
            async with asyncio.timeout(_START_S):
                await self._until_well()
        except TimeoutError:
            return await self._missing()
        return []

    async def _until_well(self) -> None:
        while await self._missing():  # noqa: ASYNC110 - another process' state
            await asyncio.sleep(0.1)

    async def _missing(self) -> list[str]:
        serving = sum(worker["state"] == "serving" for worker in await self._workers())
        async with aiohttp.ClientSession() as session, session.get(self._admin("/metrics")) as response:
            page = await response.text()
        up = sum(replica["up"] for replica in (await self._ask("/admin/replicas"))["replicas"])
        missing = []
        if serving < self._options.workers:
            missing.append(f"{serving} workers serve")
        if "\nwarmgate_redis_up 1" not in page:
            missing.append("the workers do not share")
        if up < self._options.replicas:
            missing.append(f"{up} replicas are up")
        return missing

    async def _workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = (await self._ask("/admin/workers"))["workers"]
        return workers

    async def _ask(self, path: str) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(self._admin(path)) as response:
            answer: dict[str, Any] = await response.json()
            return answer

    def _admin(self, path: str) -> str:
        return f"http://{LOOPBACK}:{self.admin_port}{path}"

    async def _start_redis(self) -> Child:
        words = ["--port", str(self._redis_port), "--bind", LOOPBACK, "--save", "", "--dir", self._directory]
        return await self._children.start("redis", [str(find_server()), *words])

    async def _start_replica(self, number: int) -> Child:
        words = ["--port", str(self._replica_ports[number]), "--model", _MODEL]
        words += ["--chunks", str(_CHUNKS), "--interval-ms", str(_INTERVAL_MS)]
        child = await self._children.start(
            f"replica-{number + 1}", [sys.executable, "-m", "loadtests.overhead.stub", *words], ready_line="ready"
        )
        await child.ready()
        return child


async def run(options: Options, say: Callable[[str], None]) -> Report:
    """Run it.

    Args:
        options: what to do.
        say: told what happens.

    Raises:
        ChildFailedError: something did not start.
        NoServer: there is no redis-server here.
    """
    with tempfile.TemporaryDirectory() as directory:
        async with ChildGroup() as children:
            scene = _Scene(children, directory, options)
            await scene.start()
            load = OpenLoop(scene.port, _MODEL, options.rate_per_s, options.seed)
            loading = asyncio.create_task(load.run(options.duration_s))
            kills = []
            begun_s = _now_s()
            for turn, kill in enumerate((scene.kill_redis, scene.kill_worker, scene.kill_replica), 1):
                await asyncio.sleep(begun_s + turn * options.duration_s / 4 - _now_s())
                kills.append(await kill())
                say(f"{kills[-1].what} killed")
            await loading
            return Report(load.requests, kills, load.late_s, await scene.not_back())


def _now_s() -> float:
    return asyncio.get_running_loop().time()
