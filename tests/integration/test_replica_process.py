"""`python -m loadtests.replica`: several replicas in one process, its ready line, control port and end."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from contextlib import ExitStack

import aiohttp
import pytest


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def program(*options: object) -> list[str]:
    return [sys.executable, "-m", "loadtests.replica", *map(str, options)]


async def start(*options: object) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *program(*options), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_two_replicas_and_their_control_port(number: signal.Signals) -> None:
    one, other, control = free_ports(3)
    process = await start(
        *("--port", one, "--port", other, "--control-port", control),
        *("--model", "qwen3-32b", "--hardware", "h200-sxm", "--served-model-name", "a", "--lora", "b"),
    )
    try:
        async with aiohttp.ClientSession() as session:
            for port in (one, other):
                async with session.get(f"http://127.0.0.1:{port}/v1/models") as response:
                    assert [card["id"] for card in (await response.json())["data"]] == ["a", "b"]
            body = {"prompt": "x", "max_tokens": 100_000, "stream": True}
            async with session.post(f"http://127.0.0.1:{one}/v1/completions", json=body) as stream:
                await stream.content.readuntil(b"\n\n")
                async with session.get(f"http://127.0.0.1:{control}/sim/{one}/state") as response:
                    assert (await response.json())["engine"]["running"] == 1
                async with session.get(f"http://127.0.0.1:{control}/sim/{other}/state") as response:
                    assert (await response.json())["engine"]["injected"] == 0
                async with session.get(f"http://127.0.0.1:{control}/sim/1/state") as response:
                    assert response.status == 404
                faults = f"http://127.0.0.1:{control}/sim/{one}/faults"
                async with session.post(faults, json={"refuse": True}) as response:
                    assert response.status == 200
                with pytest.raises(aiohttp.ClientError):
                    await session.get(f"http://127.0.0.1:{one}/health")
                async with session.get(f"http://127.0.0.1:{other}/health") as response:
                    assert response.status == 200
                # A stream that runs does not notice that nobody listens any more.
                await stream.content.readuntil(b"\n\n")
                process.send_signal(number)
                assert await process.wait() == 0
        assert process.stderr is not None
        assert await process.stderr.read() == b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hardware", "abacus"), b"abacus"),
        (("--model", "llama-3.1-70b", "--hardware", "l4"), b"no KV memory"),
        (("--speedup", "0"), b"speedup"),
    ],
)
async def test_impossible_options_are_told_in_one_line(options: tuple[str, ...], message: bytes) -> None:
    process = await asyncio.create_subprocess_exec(
        *program("--port", free_ports(1)[0], *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await process.communicate()
    assert process.returncode == 1
    assert out == b""
    assert message in error
    assert b"Traceback" not in error
