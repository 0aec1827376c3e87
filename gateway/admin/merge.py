"""One metrics page out of several workers' pages. Pure.

Counters and histograms are added up. What a worker that has gone had counted stays in the sum, so no series ever runs
backwards; only the series of replicas that have left vanish, as they do in one process. Gauges are added up, too,
unless `ACROSS_WORKERS` says otherwise: three workers with five requests each are fifteen requests, but the same
replica seen up by three workers is one replica.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

_STRETCH_S = 0.002
_ADDED = frozenset({"counter", "histogram", "summary"})


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


ACROSS_WORKERS: dict[str, Callable[[Sequence[float]], float]] = {
    # All workers say the same of these.
    "warmgate_build_info": max,
    "warmgate_replica_up": max,
    "warmgate_replica_engine_running": max,
    "warmgate_replica_engine_waiting": max,
    "warmgate_replica_engine_kv_usage": max,
    "python_info": max,
    "process_max_fds": max,
    "process_start_time_seconds": min,
    # As bad as the worst of them.
    "warmgate_redis_up": min,
    "warmgate_redis_lag_seconds": max,
    "warmgate_redis_workers": max,
    "warmgate_board_workers": max,
    # Copies of one map.
    "warmgate_prefix_map_blocks": max,
    "warmgate_prefix_map_bytes": max,
    # Each worker follows the engines itself, and all hear the same.
    "warmgate_kv_events_blocks": max,
    "warmgate_kv_events_lag_seconds": max,
    "warmgate_kv_events_last_event_age_seconds": max,
    "warmgate_kv_events_live": _mean,
    "warmgate_kv_events_complete": _mean,
    # Each worker has its own breakers: the share of workers.
    "warmgate_replica_routable": _mean,
    "warmgate_replica_breaker": _mean,
    # Each worker has its own predictor, and its own experience with the map.
    "warmgate_prefix_promises_kept_ratio": _mean,
    "warmgate_prefix_map_capacity_ratio": _mean,
    "warmgate_ttft_prediction_absolute_error": _mean,
    "warmgate_ttft_prediction_class_absolute_error": _mean,
    "warmgate_ttft_prediction_bias": _mean,
    # The share of workers that have fallen back.
    "warmgate_prediction_fallback": _mean,
    "warmgate_ttft_calibration_factor": _mean,
    "warmgate_ttft_calibration_constant_seconds": _mean,
}
"""How gauges are put together that are not added up, by name."""

Page = list[list[Any]]
"""Families as [name, help, type, [[sample name, labels, value], ...]], which JSON can carry."""
_Key = tuple[str, tuple[tuple[str, str], ...]]


def page(families: Iterable[Metric]) -> Page:
    """Return metric families in a form that JSON can carry."""
    return [
        [
            family.name,
            family.documentation,
            family.type,
            [[sample.name, sample.labels, sample.value] for sample in family.samples],
        ]
        for family in families
    ]


async def gathered(families: Iterable[Metric], take: Callable[[Page], None]) -> None:
    """Collect families without keeping the event loop from others for more than a few milliseconds.

    Args:
        families: an iterator that makes them one by one.
        take: called with a page whenever it is time for a pause, and at the end.
    """
    found: list[Metric] = []
    until_s = time.monotonic() + _STRETCH_S
    for family in families:
        found.append(family)
        if time.monotonic() >= until_s:
            take(page(found))
            found = []
            await asyncio.sleep(0)
            until_s = time.monotonic() + _STRETCH_S
    take(page(found))


def rendered(families: list[Metric]) -> bytes:
    """Return families as the text of a metrics page."""

    class Once:
        def collect(self) -> list[Metric]:
            return families

    return generate_latest(Once())


class _Family:
    def __init__(self, name: str, documentation: str, kind: str) -> None:
        self.name = name
        self.documentation = documentation
        self.kind = kind
        self.values: dict[_Key, list[float]] = {}

    def metric(self) -> Metric:
        metric = Metric(self.name, self.documentation, self.kind)
        put_together = math.fsum if self.kind in _ADDED else ACROSS_WORKERS.get(self.name, math.fsum)
        for (name, labels), values in self.values.items():
            metric.samples.append(Sample(name, dict(labels), put_together(values)))
        return metric


class Merged:
    """Pages added up, and the counts of workers that have gone.

    Attributes:
        families: after `of`, for a registry's `collect`.
    """

    def __init__(self) -> None:
        self._gone: dict[str, _Family] = {}

    def retire(self, last: Page) -> None:
        """Keep what a worker that has gone had counted.

        Args:
            last: its last page.
        """
        for name, documentation, kind, samples in last:
            if kind not in _ADDED:
                continue
            family = self._gone.setdefault(name, _Family(name, documentation, kind))
            for sample_name, labels, value in samples:
                key = sample_name, tuple(labels.items())
                kept = family.values.setdefault(key, [0.0])
                kept[0] += value

    def forget_replicas(self, staying: Collection[str]) -> None:
        """Drop what is kept of replicas that have left the fleet.

        Args:
            staying: names of the others.
        """
        for family in self._gone.values():
            for key in [key for key in family.values if dict(key[1]).get("replica", "") not in ("", *staying)]:
                del family.values[key]

    def of(self, pages: Iterable[Page]) -> list[Metric]:
        """Return the families of all pages put together with what is kept.

        Args:
            pages: of the workers there are.
        """
        families: dict[str, _Family] = {}
        for name, documentation, kind, samples in (entry for one in pages for entry in one):
            family = families.get(name)
            if family is None:
                family = families[name] = _Family(name, documentation, kind)
            values = family.values
            for sample_name, labels, value in samples:
                values.setdefault((sample_name, tuple(labels.items())), []).append(value)
        for name, kept in self._gone.items():
            family = families.setdefault(name, _Family(name, kept.documentation, kept.kind))
            for key, value in kept.values.items():
                family.values.setdefault(key, []).extend(value)
        return [family.metric() for family in families.values()]
