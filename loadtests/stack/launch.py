"""Starting a stack: simulated replicas (or given ones) and a gateway, ready to serve."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp

from loadtests.stack.ports import LOOPBACK, check_free, free_ports
from loadtests.stack.processes import ChildFailedError, ChildGroup

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Simulated replicas to start."""

    replicas: int = 4
    first_port: int | None = None
    """Ports count up from here; free ones when None."""
    processes: int = 1
    """Processes to spread the replicas over."""
    hardware: str = "h100-sxm"
    model: str = "llama-3.1-8b"
    speedup: float = 1.0
    """Engine seconds per wall second."""
    stream_interval: int = 1
    """Tokens per streamed chunk."""
    kv_tokens: int | None = None
    """KV memory of each replica; what its card holds when None."""
    extra: tuple[str, ...] = ()
    """Further options of `python -m loadtests.replica`."""


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The gateway to start."""

    port: int | None = None
    """A free one when None."""
    admin_port: int | None = None
    policy: str | None = None
    """The gateway's default when None."""
    hardware: str | None = None
    model: str | None = None
    seed: int | None = None
    extra: tuple[str, ...] = ()
    """Further options of `warmgate serve`."""


class Stack:
    """Replicas and a gateway as child processes, for the length of an `async with`."""

    def __init__(
        self,
        fleet: FleetOptions | tuple[str, ...],
        gateway: GatewayOptions | None = None,
        echo: Callable[[str, str], None] | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        """Plan a stack; entering the context starts it.

        Args:
            fleet: simulated replicas to start, or addresses of replicas that run already.
            gateway: how to start the gateway.
            echo: called with a child's name and each line it writes.
            start_timeout_s: bound on the start of the replicas, and again on that of the gateway.
        """
        self._fleet = fleet
        self._options = gateway or GatewayOptions()
        self._start_timeout_s = start_timeout_s
        self._children = ChildGroup(echo)
        self.replica_urls: list[str] = []
        self.url = ""
        """Address of the gateway."""
        self.admin_url = ""

    async def __aenter__(self) -> Self:
        """Start everything and wait until the gateway is ready.

        Raises:
            PortTakenError: a port that was asked for is in use.
            ChildFailedError: a child ended or did not get ready in time.
        """
        self._check_ports()
        async with AsyncExitStack() as undo:
            await undo.enter_async_context(self._children)
            if isinstance(self._fleet, FleetOptions):
                self.replica_urls = await self._start_fleet(self._fleet)
            else:
                self.replica_urls = list(self._fleet)
            await self._start_gateway()
            undo.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._children.__aexit__(kind, error, trace)

    async def first_failure(self) -> ChildFailedError:
        """Wait until a replica or the gateway ends on its own; returns the error that says which and why."""
        return await self._children.first_failure()

    def kill(self) -> None:
        """Kill all children at once, for those who cannot wait for an orderly end."""
        self._children.kill()

    def _check_ports(self) -> None:
        """Fail before anything has started when a port that was asked for is taken."""
        if self._options.port is not None:
            check_free(self._options.port, "the gateway", "--port")
        if self._options.admin_port is not None:
            check_free(self._options.admin_port, "the gateway's admin side", "--admin-port")
        if isinstance(self._fleet, FleetOptions) and self._fleet.first_port is not None:
            for number in range(self._fleet.replicas):
                check_free(self._fleet.first_port + number, "a simulated replica", "--first-replica-port")

    async def _start_fleet(self, fleet: FleetOptions) -> list[str]:
        if fleet.first_port is None:
            ports = free_ports(fleet.replicas)
        else:
            ports = list(range(fleet.first_port, fleet.first_port + fleet.replicas))
        processes = min(fleet.processes, fleet.replicas)
        started = [
            await self._children.start(
                "replicas" if processes == 1 else f"replicas-{number + 1}",
                replica_program(fleet, ports[number::processes]),
                ready_line="ready",
            )
            for number in range(processes)
        ]

        async def all_ready() -> None:
            for child in started:
                await child.ready()

        await self._children.until("the start of the simulated replicas", all_ready(), self._start_timeout_s)
        return [f"http://{LOOPBACK}:{port}" for port in ports]

    async def _start_gateway(self) -> None:
        asked = (self._options.port, self._options.admin_port)
        port, admin_port = (
            given if given is not None else free for given, free in zip(asked, free_ports(2), strict=True)
        )
        self.url = f"http://{LOOPBACK}:{port}"
        self.admin_url = f"http://{LOOPBACK}:{admin_port}"
        await self._children.start("gateway", gateway_program(self._options, self.replica_urls, port, admin_port))
        await self._children.until(
            "the start of the gateway", until_answers(f"{self.admin_url}/ready"), self._start_timeout_s
        )


def replica_program(fleet: FleetOptions, ports: list[int]) -> list[str]:
    """Command line of one process of simulated replicas."""
    program = [sys.executable, "-m", "loadtests.replica"]
    for port in ports:
        program += ["--port", str(port)]
    program += ["--hardware", fleet.hardware, "--model", fleet.model, "--speedup", f"{fleet.speedup:g}"]
    if fleet.stream_interval != 1:
        program += ["--stream-interval", str(fleet.stream_interval)]
    if fleet.kv_tokens is not None:
        program += ["--kv-tokens", str(fleet.kv_tokens)]
    return [*program, *fleet.extra]


def gateway_program(options: GatewayOptions, replicas: list[str], port: int, admin_port: int) -> list[str]:
    """Command line of the gateway."""
    program = [sys.executable, "-m", "gateway.cli", "serve"]
    for url in replicas:
        program += ["--replica", url]
    program += ["--host", LOOPBACK, "--port", str(port), "--admin-host", LOOPBACK]
    program += ["--admin-port", str(admin_port)]
    for option, value in (
        ("--policy", options.policy),
        ("--hardware", options.hardware),
        ("--model", options.model),
        ("--seed", options.seed),
    ):
        if value is not None:
            program += [option, str(value)]
    return [*program, *options.extra]


async def until_answers(url: str) -> None:
    """Ask until the answer is 200."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
        while True:
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(_POLL_S)
