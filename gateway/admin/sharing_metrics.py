"""The metrics of sharing through Redis."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.sharing.sharing import Sharing


class SharingCollector(Collector):
    """What a worker knows of its part in sharing. Added up over workers unless `merge` says otherwise."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        sharing = self._sharing
        counts = sharing.prefixes.counts
        yield GaugeMetricFamily("warmgate_redis_up", "1 if the last exchange with Redis was good.", value=sharing.up)
        yield GaugeMetricFamily(
            "warmgate_redis_workers", "Workers heard of through Redis, this one included.", value=sharing.loads.workers
        )
        yield GaugeMetricFamily(
            "warmgate_board_workers",
            "Workers of this gateway that see each other's load in shared memory, this one included.",
            value=sharing.loads.near_workers,
        )
        yield GaugeMetricFamily(
            "warmgate_redis_lag_seconds",
            "The longest time from the writing of an entry to its coming back through Redis, of the last 256.",
            value=max(sharing.lags_s, default=0.0),
        )
        yield GaugeMetricFamily(
            "warmgate_redis_waiting_bytes",
            "Changes of the prefix map not written yet.",
            value=sharing.prefixes.waiting_bytes,
        )
        yield CounterMetricFamily(
            "warmgate_board_records_read",
            "Changes of the prefix map read that other workers of this gateway have told in shared memory.",
            value=counts.near,
        )
        yield CounterMetricFamily(
            "warmgate_board_missed",
            "Times that another worker was ahead by more than the shared memory has; the rest came through Redis.",
            value=counts.near_missed,
        )
        for name, text, value in (
            ("errors", "Connections lost, and writes refused.", sharing.errors),
            ("records_written", "Changes of the prefix map written.", counts.written),
            ("records_read", "Changes by other workers read.", counts.applied),
            ("records_dropped", "Changes that did not fit into the buffer while Redis was down.", counts.dropped),
            ("records_orphaned", "Changes by other workers to prefixes not known here.", counts.orphans),
            ("records_retold", "Prefixes written again after a loss.", counts.retold),
            ("bad_entries", "Entries that are none.", counts.bad_entries),
        ):
            yield CounterMetricFamily(f"warmgate_redis_{name}", text, value=value)
