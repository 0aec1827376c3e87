"""The replicas of a soak, in this process: they break down, come back, and are exchanged for others."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from loadtests.overhead.stub import Answers, Stub
from loadtests.stack.ports import free_ports

MODEL = "soak"
_CHUNKS = 12
_INTERVAL_S = 0.004


class Churn:
    """Stub replicas and the gateway.yaml that names them.

    Attributes:
        restarts: replicas that went away and came back.
        exchanges: replicas that were taken out of the configuration for another.
    """

    def __init__(self, config: Path, replicas: int, seed: int) -> None:
        """Prepare.

        Args:
            config: the gateway's configuration, rewritten when replicas are exchanged.
            replicas: how many at a time.
            seed: of what happens to whom.
        """
        self._config = config
        self._rng = random.Random(seed)
        self._answers = Answers(MODEL, _CHUNKS)
        self._ports = list(free_ports(replicas))
        self._named = 0
        self._stubs: dict[int, Stub] = {}
        self._names: dict[int, str] = {}
        self.restarts = 0
        self.exchanges = 0
        self._leaving: list[Stub] = []

    @property
    def names(self) -> set[str]:
        """Names of the replicas that the configuration has now."""
        return set(self._names.values())

    async def start(self, sections: dict[str, Any]) -> None:
        """Start all replicas and write the configuration.

        Args:
            sections: everything but the replicas.
        """
        self._sections = sections
        for port in self._ports:
            await self._open(port)
            self._name(port)
        self._write()

    async def run(self, every_s: float) -> None:
        """Restart a replica every so often, and exchange one every fourth time, until cancelled."""
        turn = 0
        while True:
            await asyncio.sleep(every_s)
            turn += 1
            if turn % 4:
                await self.restart(every_s / 2)
            else:
                await self.exchange()

    async def restart(self, away_s: float) -> None:
        """One replica goes away for a while: its connections break, and new ones are refused."""
        port = self._rng.choice(self._ports)
        self._stubs.pop(port).close()
        await asyncio.sleep(away_s)
        await self._open(port)
        self.restarts += 1

    async def exchange(self) -> None:
        """One replica is taken out of the configuration, another comes in under a name never used before."""
        leaving = self._rng.choice(self._ports)
        (coming,) = free_ports(1)
        await self._open(coming)
        self._ports[self._ports.index(leaving)] = coming
        self._name(coming)
        del self._names[leaving]
        self._write()
        self.exchanges += 1
        # The old one serves on until the gateway has read the file; later it is gone.
        stub = self._stubs.pop(leaving)
        self._leaving.append(stub)
        asyncio.get_running_loop().call_later(4.0, stub.close)

    def close(self) -> None:
        """Stop all replicas."""
        for stub in (*self._stubs.values(), *self._leaving):
            stub.close()

    async def _open(self, port: int) -> None:
        stub = self._stubs[port] = Stub(self._answers, [port], _INTERVAL_S)
        await stub.start()

    def _name(self, port: int) -> None:
        self._named += 1
        self._names[port] = f"soak-{self._named}"

    def _write(self) -> None:
        replicas = [{"url": f"http://127.0.0.1:{port}", "name": name} for port, name in self._names.items()]
        aside = self._config.with_suffix(".new")
        # JSON is YAML.
        aside.write_text(json.dumps({**self._sections, "replicas": replicas}), encoding="utf-8")
        aside.replace(self._config)
