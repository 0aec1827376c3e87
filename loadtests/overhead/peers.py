"""The gateways we compare with, in a virtual environment of their own."""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

PACKAGES = {"sglang": "sglang-router", "vllm": "vllm-router"}
"""Distribution and command of each peer, by the name it has here."""

_VERSION_PROGRAM = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


class PeersError(RuntimeError):
    """The peers cannot be installed."""


def default_directory() -> Path:
    """Where the environment is kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "warmgate" / "peers"


def command(directory: Path, peer: str) -> Path:
    """Path of a peer's program."""
    return directory / "bin" / PACKAGES[peer]


async def _run(*program: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise PeersError(f"{' '.join(program)} exited with status {process.returncode}:\n{output.decode()}")
    return output.decode()


async def ensure(directory: Path, peers: Sequence[str], tell: Callable[[str], None]) -> dict[str, str]:
    """Install what is missing from the package index; returns the versions by peer.

    Args:
        directory: the virtual environment, made when it does not exist.
        peers: which, by the names of `PACKAGES`.
        tell: told before anything is installed.

    Raises:
        PeersError: a program failed; the message has its output.
    """
    python = str(directory / "bin" / "python")
    missing = [PACKAGES[peer] for peer in peers if not command(directory, peer).exists()]
    if missing:
        tell(f"Installing {' and '.join(missing)} into {directory}")
        if not command(directory, peers[0]).with_name("python").exists():
            await _run(sys.executable, "-m", "venv", str(directory))
        await _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *missing)
    return {peer: (await _run(python, "-c", _VERSION_PROGRAM, PACKAGES[peer])).strip() for peer in peers}


async def nginx_version() -> str:
    """Version of the nginx on PATH.

    Raises:
        PeersError: it does not run.
    """
    return (await _run("nginx", "-v")).strip().rpartition("/")[2]
