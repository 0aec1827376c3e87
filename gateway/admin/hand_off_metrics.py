"""Metrics of prompts computed on one replica and answered by another."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.admin.metrics import add_histogram
from gateway.proxy.plane import DataPlane


class HandOffCollector(Collector):
    """Both legs of hand-offs, from the plain counters of the data plane."""

    def __init__(self, plane: DataPlane) -> None:
        """Read what a data plane counts."""
        self._plane = plane

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        tally, router = self._plane.tally, self._plane.router
        sent = CounterMetricFamily("warmgate_prefill_requests", "Prompts sent to prefill replicas.", labels=["replica"])
        for replica, count in tally.prefill_legs.items():
            sent.add_metric([replica], count)
        yield sent
        failed = CounterMetricFamily(
            "warmgate_prefill_failures", "Prompts that failed on prefill replicas.", labels=["replica", "cause"]
        )
        for (replica, cause), count in tally.prefill_failures.items():
            failed.add_metric([replica, cause], count)
        yield failed
        fallbacks = CounterMetricFamily(
            "warmgate_hand_off_fallbacks", "Hand-offs that came to nothing; routed again.", labels=["cause"]
        )
        for cause, count in tally.hand_off_fallbacks.items():
            fallbacks.add_metric([cause], count)
        yield fallbacks
        unpaired = CounterMetricFamily(
            "warmgate_unpaired_prompts",
            "Prompts served whole because no prefill and decode replica may be paired.",
            labels=["model", "difference"],
        )
        for (pool, kind), count in router.hand_offs.unpaired.items():
            unpaired.add_metric([pool, kind], count)
        yield unpaired
        done = CounterMetricFamily(
            "warmgate_disaggregated_requests",
            "Requests answered by another replica than the one that computed the prompt.",
            labels=["model"],
        )
        for pool, count in tally.disaggregated.items():
            done.add_metric([pool], count)
        yield done
        yield CounterMetricFamily(
            "warmgate_hand_off_bytes", "KV handed off by streams, by estimate.", value=tally.hand_off_bytes
        )
        for name, text, histogram in (
            ("prefill_seconds", "Prompts on prefill replicas, until their answer.", tally.prefill_leg_s),
            ("hand_off_seconds", "From the second request to its first token, of streams.", tally.hand_off_s),
        ):
            family = HistogramMetricFamily(f"warmgate_{name}", text, labels=[])
            add_histogram(family, [], histogram)
            yield family
        corrections = GaugeMetricFamily(
            "warmgate_link_correction", "Observed over configured time of hand-offs.", labels=["model"]
        )
        for pool in tally.disaggregated:
            corrections.add_metric([pool], router.hand_offs.correction(pool))
        yield corrections
