"""Whether the gateway stays awake: /health while long prompts arrive, and when many large streams are dropped."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from loadtests.soak.clients import Connection, json_post
from loadtests.soak.trend import quantile

PROMPT_BYTES = 500_000
"""About 120,000 tokens."""
PROMPTS_PER_S = 20.0
DROPPED = 50
_PROBE_EVERY_S = 0.01


@dataclass(frozen=True, slots=True)
class Awake:
    """Latencies of /health in one situation.

    Attributes:
        situation: in words.
        probes: how many.
        p50_ms, p99_ms, max_ms: of their answers.
        requests: what the gateway had to do meanwhile.
    """

    situation: str
    probes: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    requests: int


class Probes:
    """GET /health on the admin port, one after the other on one connection, at a steady pace."""

    def __init__(self, admin_port: int) -> None:
        self._admin_port = admin_port
        self.latencies_s: list[float] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Probe as long as the context lasts."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self._admin_port)
        try:
            while True:
                before_s = time.perf_counter()
                status = await connection.ask(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                if status != "200":
                    raise RuntimeError(f"/health answered {status}")
                took_s = time.perf_counter() - before_s
                self.latencies_s.append(took_s)
                await asyncio.sleep(max(_PROBE_EVERY_S - took_s, 0.0))
        finally:
            connection.close()

    def result(self, situation: str, requests: int) -> Awake:
        """Return the figures so far."""
        values = self.latencies_s
        return Awake(
            situation,
            len(values),
            quantile(values, 0.5) * 1e3,
            quantile(values, 0.99) * 1e3,
            max(values, default=0.0) * 1e3,
            requests,
        )


def _long_prompt(model: str, rng: random.Random, *, stream: bool) -> bytes:
    # Nothing of it has been seen before: hashed and entered from the first block to the last.
    text = rng.randbytes(PROMPT_BYTES // 2).hex()
    return json_post("/v1/completions", {"model": model, "prompt": text, "stream": stream})


async def under_long_prompts(port: int, admin_port: int, model: str, seconds: float, seed: int) -> Awake:
    """Send prompts of 500 KB at a steady rate, and probe.

    Args:
        port: the API port.
        admin_port: the admin port.
        model: what to ask for.
        seconds: how long.
        seed: of the prompts.
    """
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    prompts = [_long_prompt(model, rng, stream=False) for _ in range(max(int(seconds * PROMPTS_PER_S), 1))]
    probes = Probes(admin_port)

    async def one(prompt: bytes) -> str:
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        try:
            return await connection.ask(prompt)
        finally:
            connection.close()

    async with probes.running():
        tasks = []
        start_s = loop.time()
        for number, prompt in enumerate(prompts):
            await asyncio.sleep(max(start_s + number / PROMPTS_PER_S - loop.time(), 0.0))
            tasks.append(asyncio.create_task(one(prompt)))
        statuses = await asyncio.gather(*tasks)
    if set(statuses) != {"200"}:
        raise RuntimeError(f"long prompts ended with {sorted(set(statuses))}")
    return probes.result(f"prompts of {PROMPT_BYTES // 1000} KB, {PROMPTS_PER_S:g} per second", len(statuses))


async def while_streams_are_dropped(port: int, admin_port: int, model: str, rounds: int, seed: int) -> Awake:
    """Open 50 streams with prompts of 500 KB, drop them all at once, and probe from the drop on.

    Args:
        port: the API port.
        admin_port: the admin port.
        model: what to ask for.
        rounds: how often.
        seed: of the prompts.
    """
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    probes = Probes(admin_port)
    for _ in range(rounds):
        connections = []
        for _ in range(DROPPED):
            _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
            connections.append(connection)
            await connection.ask_and_stay(_long_prompt(model, rng, stream=True))
        async with probes.running():
            await asyncio.sleep(5 * _PROBE_EVERY_S)
            for connection in connections:
                connection.close()
            await asyncio.sleep(20 * _PROBE_EVERY_S)
    return probes.result(f"{DROPPED} streams with such prompts dropped at once", rounds * DROPPED)
