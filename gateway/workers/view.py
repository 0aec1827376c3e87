"""The admin port's answers for several workers."""

import asyncio
import logging
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gateway.admin.merge import Merged, page, rendered
from gateway.admin.view import process_registry, resident_bytes
from gateway.workers.process import NoAnswer, State, WorkerProcess

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
"""How long an admin waits for a worker; for one that is late, its last page counts."""
_POLL_S = 2.0
_POLL_SHARE = 50
"""Pages are fetched also when nobody asks, so that little is lost with a worker that is killed: every two seconds, but
so seldom that it takes no more than a fiftieth of the time."""
_SILENT = {"uptime_s": None, "connections": None, "requests_in_progress": None, "resident_memory_bytes": None}
"""Of a worker that has not answered, or is still starting."""
_SUMMED = ("in_flight", "decodes", "prefill_tokens", "kv_tokens")


class Workers(Protocol):
    """What a view looks at."""

    restarts: dict[int, int]

    @property
    def running(self) -> Sequence[WorkerProcess]:
        """All workers that have not gone."""

    def readiness(self) -> str:
        """Return `ready`, or why not."""

    def replica_names(self) -> set[str]:
        """Names of the replicas in the fleet."""


class WorkersView:
    """Asks all workers and puts their answers together."""

    def __init__(self, workers: Workers, count: int) -> None:
        """Look at workers.

        Args:
            workers: the supervisor.
            count: how many there should be.
        """
        self._workers = workers
        self._count = count
        self._merged = Merged()
        self._registry = process_registry()
        self._fetching = asyncio.Lock()

    async def watch(self, stuck: Callable[[WorkerProcess], Awaitable[None]]) -> None:
        """Fetch pages now and then, until cancelled.

        Args:
            stuck: awaited with each worker that has not answered.
        """
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            for worker in await self._fetch():
                await stuck(worker)
            await asyncio.sleep(max(_POLL_S, _POLL_SHARE * (loop.time() - began_s)))

    def gone(self, worker: WorkerProcess) -> None:
        """Keep the counts of a worker that has gone."""
        self._merged.retire(worker.page)
        self._merged.forget_replicas(self._workers.replica_names())

    def replicas_changed(self) -> None:
        """Forget the counts of replicas that have left."""
        self._merged.forget_replicas(self._workers.replica_names())

    async def metrics(self) -> bytes:
        """Return the page of /metrics."""
        await self._fetch()
        pages = [worker.page for worker in self._workers.running]
        pages.append(page([*self._registry.collect(), *self._own()]))
        # Connections are accepted meanwhile.
        return await asyncio.to_thread(lambda: rendered(self._merged.of(pages)))

    def readiness(self) -> str:
        """Return `ready`, or why not."""
        return self._workers.readiness()

    async def replicas(self) -> dict[str, Any]:
        """Return the policy and the replicas with their load, all workers' taken together."""
        return merge_replicas([answer for _, answer in await self._ask("replicas")])

    async def workers(self) -> list[dict[str, Any]]:
        """Return the worker processes."""
        answers = dict(await self._ask("state"))
        return [
            {
                **_SILENT,
                **answers.get(worker, {}),
                "worker": worker.number,
                "pid": worker.pid,
                "state": worker.state,
                "restarts": self._workers.restarts.get(worker.number, 0),
            }
            for worker in sorted(self._workers.running, key=lambda worker: worker.number)
        ]

    async def explain(self, request_id: str) -> dict[str, Any]:
        """Return why a request went where it did; whichever worker knows it answers."""
        return merge_explanations([answer for _, answer in await self._ask("explain", request=request_id)])

    async def rehearse(self, path: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
        """Return where a request would go now, as the worker sees it that has the lowest number."""
        serving = [worker for worker in self._workers.running if worker.serving]
        if not serving:
            return {"attempts": [], "refused": {"status": 503, "message": "No worker is running."}}
        worker = min(serving, key=lambda one: one.number)
        encoded = b64encode(body).decode()
        try:
            answer: dict[str, Any] = await worker.ask(
                "rehearse", ANSWER_S, path=path, headers=dict(headers), body=encoded
            )
        except NoAnswer as silent:
            return {"attempts": [], "refused": {"status": 503, "message": f"{silent}."}}
        return answer

    # -- inside

    def _own(self) -> list[Metric]:
        serving = sum(worker.serving for worker in self._workers.running)
        restarts = CounterMetricFamily(
            "warmgate_worker_restarts", "Times a worker had to be started again.", labels=["worker"]
        )
        for number in range(1, self._count + 1):
            restarts.add_metric([str(number)], self._workers.restarts.get(number, 0))
        return [
            GaugeMetricFamily("warmgate_workers", "Workers there should be.", value=self._count),
            GaugeMetricFamily("warmgate_workers_serving", "Workers that take connections.", value=serving),
            GaugeMetricFamily(
                "warmgate_supervisor_resident_memory_bytes", "Memory of the supervisor in RAM.", value=resident_bytes()
            ),
            restarts,
        ]

    async def _fetch(self) -> list[WorkerProcess]:
        """Bring the workers' pages up to date; return those that have not answered."""
        # Two askers at the same time get the same pages.
        async with self._fetching:
            asked = [worker for worker in self._workers.running if worker.state is not State.STARTING]
            answers = dict(await self._ask("metrics"))
            return [worker for worker in asked if worker not in answers and worker.state is not State.GONE]

    async def _ask(self, what: str, **details: Any) -> list[tuple[WorkerProcess, Any]]:
        asked = [worker for worker in self._workers.running if worker.state in (State.SERVING, State.LEAVING)]
        answers = await asyncio.gather(
            *(worker.ask(what, ANSWER_S, **details) for worker in asked), return_exceptions=True
        )
        good = []
        for worker, answer in zip(asked, answers, strict=True):
            if isinstance(answer, NoAnswer):
                logger.warning("%s", answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                good.append((worker, answer))
        return good


def merge_replicas(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put several workers' views of the same replicas together. Pure.

    Load is added up. The prefix map is one, in as many copies. Prediction errors are means weighted by the number of
    predictions. Where breakers differ, all their states are named.

    Args:
        views: as of `GatewayView.replicas_now`.
    """
    merged: dict[str, list[dict[str, Any]]] = {}
    for view in views:
        for replica in view["replicas"]:
            merged.setdefault(replica["name"], []).append(replica)
    replicas = []
    for seen in merged.values():
        replica = dict(seen[0])
        for name in _SUMMED:
            replica[name] = sum(one[name] for one in seen)
        replica["prefix_map_blocks"] = max(one["prefix_map_blocks"] for one in seen)
        replica["up"] = any(one["up"] for one in seen)
        replica["routable"] = any(one["routable"] for one in seen)
        replica["breaker"] = ", ".join(sorted({one["breaker"] for one in seen}))
        predictions = [one["ttft_prediction"] for one in seen]
        count = sum(one["count"] for one in predictions)
        replica["ttft_prediction"] = {
            **{name: _weighted(predictions, name) for name in ("bias", "median_ape", "p90_ape")},
            "count": count,
        }
        replicas.append(replica)
    return {"policy": views[0]["policy"] if views else None, "replicas": replicas}


def merge_explanations(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the explanation of the worker that knows the request; if none does, what all of them keep. Pure.

    Args:
        answers: as of `gateway.admin.explain.Explainer.explain`.
    """
    found = [answer for answer in answers if answer["found"]]
    if found:
        return max(found, key=lambda answer: str(answer["received_at"]))
    ages_s = [answer["oldest_age_s"] for answer in answers if answer["oldest_age_s"] is not None]
    return {
        "found": False,
        "kept": sum(answer["kept"] for answer in answers),
        "capacity": sum(answer["capacity"] for answer in answers),
        "per_s": sum(answer["per_s"] or 0.0 for answer in answers),
        "oldest_age_s": max(ages_s, default=None),
    }


def _weighted(predictions: Sequence[dict[str, Any]], name: str) -> float | None:
    known = [(one[name], one["count"]) for one in predictions if one[name] is not None and one["count"]]
    total = sum(count for _, count in known)
    return sum(value * count for value, count in known) / total if total else None
