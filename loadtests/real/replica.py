"""One vLLM server on this machine's CPU, as a child process."""

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from gateway.replicas.metrics_page import ScrapedState, read_metrics
from loadtests.stack.ports import LOOPBACK, free_ports
from loadtests.stack.processes import ChildGroup

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The worker lives in the engine's process: one process less, and 5 s less to start.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Otherwise the first request with logprobs compiles a sampler for 10 s.
    "TORCHDYNAMO_DISABLE": "1",
}
# Whole GiB only, touched at once, and stronger than --kv-cache-memory-bytes.
_UNSET = ("VLLM_CPU_KVCACHE_SPACE",)
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """How vLLM is started.

    Args:
        venv: virtual environment that has it.
        model: model directory.
        name: served model name.
        block_tokens: KV block size; on CPUs a multiple of 32.
        kv_bytes: KV cache, in vLLM's notation.
        dtype: float32 by default, because CPUs without bfloat16 instructions emulate them at a hundredth of the speed.
        max_model_len: context length in tokens.
        threads: OpenMP threads.
        kv_events: publish KV events over ZMQ, on the port above the API's second free one.
        kv_role: `kv_producer`, `kv_consumer` or `kv_both`: hand KV over through vLLM's NixlConnector; None for not.
        kv_lease_s: how long a producer keeps the KV of a prompt for a consumer that has not asked for it.
        extra: further arguments of `vllm serve`.
        start_timeout_s: until it must be healthy; 15 s when the machine is idle.
    """

    venv: Path
    model: Path
    name: str = "random"
    block_tokens: int = 32
    kv_bytes: str = "128M"
    dtype: str = "float32"
    max_model_len: int = 8192
    threads: int = 1
    kv_events: bool = False
    kv_role: str | None = None
    kv_lease_s: int = 30
    extra: tuple[str, ...] = ()
    start_timeout_s: float = 300.0


class VllmReplica:
    """A vLLM server for the length of an `async with`.

    Attributes:
        url: its address.
        events_port, replay_port: where KV events are published and can be asked for again, if they are.
    """

    def __init__(self, options: ReplicaOptions) -> None:
        """Plan a replica; entering the context starts it."""
        self.options = options
        self._port, self.events_port, self.replay_port, self._side_port = free_ports(4)
        self.url = f"http://{LOOPBACK}:{self._port}"
        self._child = ChildGroup(grace_s=_STOP_S)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._child.__aexit__(kind, error, trace)

    async def start(self) -> None:
        """Start the server and wait until it is healthy.

        Raises:
            ChildFailedError: it has ended, or takes too long.
        """
        self._child = ChildGroup(grace_s=_STOP_S)
        await self._child.start(f"vllm on port {self._port}", self._program())
        try:
            await self._child.until("the start of vLLM", self._healthy(), self.options.start_timeout_s)
        except BaseException:
            self._child.kill()
            raise

    async def stop(self) -> None:
        """End the server in an orderly way; running requests are aborted."""
        await self._child.__aexit__(None, None, None)

    async def kill(self) -> None:
        """Kill the server as a crash would."""
        self._child.kill()
        await self._child.__aexit__(None, None, None)

    async def metrics(self) -> ScrapedState:
        """What its metrics say now."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as response:
            return read_metrics(await response.read(), time.monotonic())

    def _program(self) -> list[str]:
        options = self.options
        environment = {**_ENVIRONMENT, "OMP_NUM_THREADS": str(options.threads)}
        if options.kv_role is not None:
            environment |= {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._side_port),
            }
        program = ["/usr/bin/env", *(word for name in _UNSET for word in ("-u", name))]
        program += [f"{name}={value}" for name, value in environment.items()]
        program += [str(options.venv / "bin" / "vllm"), "serve", str(options.model)]
        program += ["--host", LOOPBACK, "--port", str(self._port), "--served-model-name", options.name]
        program += ["--dtype", options.dtype, "--enforce-eager", "--enable-prefix-caching"]
        program += ["--block-size", str(options.block_tokens), "--max-model-len", str(options.max_model_len)]
        program += ["--kv-cache-memory-bytes", options.kv_bytes]
        program += ["--enable-prompt-tokens-details", "--enable-request-id-headers"]
        if options.kv_events:
            program += [
                "--kv-events-config",
                '{"enable_kv_cache_events":true,"publisher":"zmq",'
                f'"endpoint":"tcp://*:{self.events_port}","replay_endpoint":"tcp://*:{self.replay_port}",'
                f'"topic":"kv@{LOOPBACK}:{self._port}@{options.name}"}}',
            ]
        if options.kv_role is not None:
            connector = {
                "kv_connector": "NixlConnector",
                "kv_role": options.kv_role,
                "kv_connector_extra_config": {"kv_lease_duration": options.kv_lease_s},
            }
            program += ["--kv-transfer-config", json.dumps(connector)]
        return [*program, *options.extra]

    async def _healthy(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
            while True:
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.2)
