"""`warmgate serve` as a process of its own, as operators run it."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

_SERVING = re.compile(r"serving on [^:]+:(\d+), admin on [^:]+:(\d+)")


class Served:
    """A running gateway process.

    Attributes:
        config: its gateway.yaml.
        log: lines of its standard error so far.
    """

    def __init__(self, process: asyncio.subprocess.Process, config: Path) -> None:
        self.process = process
        self.config = config
        self.port = 0
        self.admin_port = 0
        self.log: list[str] = []
        self._said = asyncio.Condition()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            async with self._said:
                self.log.append(line.decode().rstrip())
                self._said.notify_all()
        async with self._said:
            self._said.notify_all()

    async def until_said(self, pattern: str, times: int = 1, within_s: float = 20.0) -> str:
        """Wait for a line on standard error; return the last that matches."""

        def found() -> list[str]:
            return [line for line in self.log if re.search(pattern, line)]

        async with asyncio.timeout(within_s), self._said:
            await self._said.wait_for(lambda: len(found()) >= times)
        return found()[-1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def exit_code(self, within_s: float = 15.0) -> int:
        async with asyncio.timeout(within_s):
            return await self.process.wait()

    async def admin(self, path: str) -> tuple[int, str]:
        """GET from the admin port."""
        async with aiohttp.ClientSession() as session, session.get(self.admin_url + path) as response:
            return response.status, await response.text()


@asynccontextmanager
async def starting(document: dict[str, Any], directory: Path) -> AsyncIterator[Served]:
    """Start a gateway from a configuration; ports are picked unless it names them."""
    config = directory / "gateway.yaml"
    whole = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"port": 0},
        "scrape": {"interval_s": 0},
        "health": {"interval_s": 0.05},
        **document,
    }
    # JSON is YAML.
    config.write_text(json.dumps(whole))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway.cli",
        "serve",
        "-c",
        str(config),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    served = Served(process, config)
    try:
        yield served
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await served._reader


@asynccontextmanager
async def serving(document: dict[str, Any], directory: Path, within_s: float = 20.0) -> AsyncIterator[Served]:
    """Start a gateway and wait until it is ready."""
    async with starting(document, directory) as served:
        match = _SERVING.search(await served.until_said(_SERVING.pattern, within_s=within_s))
        assert match is not None
        served.port, served.admin_port = int(match[1]), int(match[2])
        yield served
