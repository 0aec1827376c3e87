"""What the admin port shows: the questions it asks, and the answers of a gateway that is one process."""

import asyncio
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, GCCollector, Metric, PlatformCollector, ProcessCollector
from prometheus_client.registry import Collector

from gateway.admin.explain import Explainer
from gateway.admin.merge import Merged, Page, gathered, rendered
from gateway.admin.metrics import GatewayCollector, WorkerCollector
from gateway.proxy.plane import DataPlane
from gateway.replicas.ejection import Ejector

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = resource.getpagesize()


class AdminView(Protocol):
    """Answers for the admin port; everything is JSON's own types."""

    async def metrics(self) -> bytes:
        """Return the page of /metrics."""

    def readiness(self) -> str:
        """Return `ready`, or why not."""

    async def replicas(self) -> dict[str, Any]:
        """Return the policy and the replicas with their load."""

    async def workers(self) -> list[dict[str, Any]]:
        """Return the worker processes."""

    async def explain(self, request_id: str) -> dict[str, Any]:
        """Return why a request went where it did, see `gateway.admin.explain`."""

    async def rehearse(self, path: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
        """Return where a request would go now, see `gateway.admin.explain`."""


def resident_bytes() -> int:
    """Return the memory this process has in RAM; where the system does not tell, the most it ever had."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class GatewayView:
    """The view of one process.

    Attributes:
        explainer: explains its decisions.
    """

    def __init__(self, plane: DataPlane, ejector: Ejector, worker: int = 1) -> None:
        """Look at a gateway.

        Args:
            plane: its data plane.
            ejector: the breakers' states.
            worker: number of this process among the workers.
        """
        self._plane = plane
        self._ejector = ejector
        self._worker = worker
        self.explainer = Explainer(plane, worker)
        self._started_s = time.monotonic()
        self._registry = process_registry()
        self._registry.register(WorkerCollector(worker, plane, resident_bytes))
        self._collector = GatewayCollector(plane, ejector)

    def register(self, collector: Collector) -> None:
        """Add to the page of /metrics."""
        self._registry.register(collector)

    async def metrics(self) -> bytes:
        """Return the page of /metrics."""
        pages: list[Page] = []
        await gathered(self.families(), pages.append)
        found = [family for page in pages for family in page]
        if len(pages) == 1:
            return rendered(Merged().of([found]))
        return await asyncio.to_thread(lambda: rendered(Merged().of([found])))

    def families(self) -> Iterator[Metric]:
        """Yield the metrics in pieces, see `gateway.admin.metrics`."""
        yield from self._registry.collect()
        yield from self._collector.pieces()

    def readiness(self) -> str:
        """Return `ready`, or why not."""
        plane = self._plane
        if plane.draining:
            return "draining"
        if not plane.listening:
            return "starting"
        return "ready" if plane.router.fleet.any_routable else "no replica can take requests"

    async def replicas(self) -> dict[str, Any]:
        """Return the policy and the replicas with their load."""
        return self.replicas_now()

    def replicas_now(self) -> dict[str, Any]:
        """Return the policy and the replicas with their load."""
        router = self._plane.router
        ledger, predictor = router.ledger, router.predictor
        replicas = []
        for replica in router.fleet.replicas.values():
            slot = replica.slot
            errors, own = predictor.errors[slot], ledger.own(slot)
            replicas.append(
                {
                    "name": replica.name,
                    "url": replica.spec.url,
                    "role": replica.role,
                    "version": replica.version,
                    "models": sorted(replica.served),
                    "up": replica.up,
                    "routable": replica.routable,
                    "draining": replica.draining,
                    "breaker": self._ejector.state(replica),
                    "epoch": replica.epoch,
                    "in_flight": own.in_flight,
                    "decodes": own.decodes,
                    "prefill_tokens": own.prefill_tokens,
                    "kv_tokens": own.kv_tokens,
                    "kv_capacity_tokens": replica.kv.kv_capacity_tokens,
                    "prefix_map_blocks": router.index.blocks(slot),
                    "ttft_prediction": {
                        "bias": errors.bias(),
                        "median_ape": errors.absolute_quantile(0.5),
                        "p90_ape": errors.absolute_quantile(0.9),
                        "count": errors.count,
                    },
                }
            )
        return {"policy": router.policy.name, "replicas": replicas}

    async def workers(self) -> list[dict[str, Any]]:
        """Return this process as the only worker."""
        return [{**self.worker_now(), "state": self.readiness(), "restarts": 0}]

    async def explain(self, request_id: str) -> dict[str, Any]:
        """Return why a request went where it did."""
        return self.explainer.explain(request_id)

    async def rehearse(self, path: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
        """Return where a request would go now."""
        return await self.explainer.rehearse(path, headers, body)

    def worker_now(self) -> dict[str, Any]:
        """Return what this process says of itself."""
        return {
            "worker": self._worker,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "connections": self._plane.open_connections,
            "requests_in_progress": self._plane.tally.in_progress,
            "resident_memory_bytes": resident_bytes(),
        }


def process_registry() -> CollectorRegistry:
    """Return a registry with the figures of this process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
