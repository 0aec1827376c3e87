"""The Prometheus page, made from the plain counters of the data plane when it is asked for.

A thousand replicas are a hundred thousand lines, and requests must not wait until all are made: so the families come in
pieces, of some replicas each, which `gateway.admin.merge` puts together.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.proxy.plane import DataPlane
from gateway.proxy.tally import Histogram, Series
from gateway.replicas.ejection import Ejector
from gateway.replicas.replica import Replica
from gateway.version import VERSION, compiled

REPLICAS_AT_ONCE = 8
"""Replicas of a piece: about four milliseconds."""
T = TypeVar("T")


def _batches(items: Sequence[T], at_once: int) -> Iterator[Sequence[T]]:
    """Yield parts of a sequence; of an empty one, an empty part."""
    for start in range(0, len(items) or 1, at_once):
        yield items[start : start + at_once]


def add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    """Add a histogram under its labels' values to a family."""
    running = 0
    buckets: list[tuple[str, float]] = []
    for bound, number in zip(histogram.bounds, histogram.counts, strict=False):
        running += number
        buckets.append((repr(float(bound)), running))
    buckets.append(("+Inf", histogram.count))
    family.add_metric(labels, buckets, histogram.total)


class WorkerCollector(Collector):
    """What one worker process is and uses, by its number."""

    def __init__(self, worker: int, plane: DataPlane, resident_bytes: Callable[[], int]) -> None:
        self._worker = str(worker)
        self._plane = plane
        self._resident_bytes = resident_bytes

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        gauges = (
            ("resident_memory_bytes", "Memory of the worker in RAM.", self._resident_bytes()),
            ("client_connections", "Open client connections of the worker.", self._plane.open_connections),
            ("requests_in_progress", "Requests under way in the worker.", self._plane.tally.in_progress),
        )
        for name, documentation, value in gauges:
            gauge = GaugeMetricFamily(f"warmgate_worker_{name}", documentation, labels=["worker"])
            gauge.add_metric([self._worker], value)
            yield gauge
        cpu = CounterMetricFamily("warmgate_worker_cpu_seconds", "CPU time of the worker.", labels=["worker"])
        cpu.add_metric([self._worker], time.process_time())
        yield cpu


class GatewayCollector(Collector):
    """Everything the gateway knows of itself and of its replicas."""

    def __init__(self, plane: DataPlane, ejector: Ejector) -> None:
        self._plane = plane
        self._ejector = ejector

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        return self.pieces(len(self._plane.router.fleet.replicas) + len(self._plane.tally.series) + 1)

    def pieces(self, at_once: int = REPLICAS_AT_ONCE) -> Iterator[Metric]:
        """Yield the metric families, those about replicas again and again, with some replicas each.

        Args:
            at_once: replicas of a piece.
        """
        yield from self._requests()
        yield from self._slo()
        yield from self._connections()
        yield from self._classes()
        yield from self._fallback()
        for series in _batches(list(self._plane.tally.series.items()), at_once):
            yield from self._series(series)
        fleet = self._plane.router.fleet
        for batch in _batches(list(fleet.replicas.values()), at_once):
            # Replicas may leave between two pieces.
            replicas = [replica for replica in batch if fleet.has(replica)]
            yield from self._replicas(replicas)
            yield from self._promises(replicas)
            yield from self._prediction(replicas)

    def _requests(self) -> Iterator[Metric]:
        tally = self._plane.tally
        build = GaugeMetricFamily("warmgate_build_info", "Version of the gateway.", labels=["version", "compiled"])
        build.add_metric([VERSION, str(compiled()).lower()], 1)
        yield build
        requests = CounterMetricFamily(
            "warmgate_requests",
            "Requests that have ended, by replica of the last attempt, policy, outcome and status.",
            labels=["replica", "policy", "outcome", "status"],
        )
        for (replica, policy, outcome, status), number in tally.requests.items():
            requests.add_metric([replica, policy, outcome, str(status)], number)
        yield requests
        durations = HistogramMetricFamily(
            "warmgate_request_duration_seconds", "From the request's head to its end, by outcome.", labels=["outcome"]
        )
        for outcome, histogram in tally.durations.items():
            add_histogram(durations, [outcome], histogram)
        yield durations
        retries = CounterMetricFamily("warmgate_retries", "Retries, by the replica that was left.", labels=["replica"])
        for replica, number in tally.retries.items():
            retries.add_metric([replica], number)
        yield retries
        yield CounterMetricFamily(
            "warmgate_retries_denied", "Retries that the retry budget did not allow.", value=tally.retries_denied
        )
        queue = self._plane.queue
        yield GaugeMetricFamily("warmgate_queue_requests", "Requests waiting for a replica.", value=queue.waiting)
        yield CounterMetricFamily("warmgate_queue_entered", "Requests that had to wait.", value=queue.entered)
        yield CounterMetricFamily(
            "warmgate_queue_turned_away", "Requests that found the queue full.", value=queue.turned_away
        )
        waits = HistogramMetricFamily(
            "warmgate_queue_wait_seconds", "Time in the queue, of requests that got a replica.", labels=[]
        )
        add_histogram(waits, [], tally.queue_wait_s)
        yield waits
        yield GaugeMetricFamily("warmgate_requests_in_progress", "Requests under way.", value=tally.in_progress)

    def _slo(self) -> Iterator[Metric]:
        tally = self._plane.tally
        requests = CounterMetricFamily(
            "warmgate_slo_requests", "Requests with latency targets that have ended.", labels=["model"]
        )
        refused = CounterMetricFamily(
            "warmgate_slo_refused", "Of these, refused because no replica could keep the targets.", labels=["model"]
        )
        results = CounterMetricFamily(
            "warmgate_slo_targets",
            "Targets of the requests that were not refused, by whether they were met; unknown where it does not show.",
            labels=["model", "target", "result"],
        )
        for model, number in tally.slo_requests.items():
            requests.add_metric([model], number)
        for model, number in tally.slo_refused.items():
            refused.add_metric([model], number)
        for labels, number in tally.slo_results.items():
            results.add_metric(list(labels), number)
        yield from (requests, refused, results)

    def _series(self, items: Sequence[tuple[tuple[str, str], Series]]) -> Iterator[Metric]:
        labels = ["replica", "policy"]
        ttft = HistogramMetricFamily(
            "warmgate_ttft_seconds", "Time to first token of streams, from the request's head.", labels=labels
        )
        predicted = HistogramMetricFamily(
            "warmgate_predicted_ttft_seconds", "Predicted time to first token of the same streams.", labels=labels
        )
        error = HistogramMetricFamily(
            "warmgate_ttft_prediction_error_ratio", "Absolute relative error of the predicted TTFT.", labels=labels
        )
        tpot = HistogramMetricFamily(
            "warmgate_tpot_seconds", "Seconds per output token after the first, where usage is known.", labels=labels
        )
        prompt = CounterMetricFamily("warmgate_prompt_tokens", "Prompt tokens the engines reported.", labels=labels)
        output = CounterMetricFamily("warmgate_completion_tokens", "Output tokens they reported.", labels=labels)
        expected = CounterMetricFamily(
            "warmgate_expected_cached_tokens",
            "Cached tokens the prefix map promised, where both are known.",
            labels=labels,
        )
        actual = CounterMetricFamily(
            "warmgate_actual_cached_tokens", "Cached tokens the engines reported for the same requests.", labels=labels
        )
        for key, series in items:
            names = list(key)
            add_histogram(ttft, names, series.ttft_s)
            add_histogram(predicted, names, series.predicted_ttft_s)
            add_histogram(error, names, series.prediction_error)
            add_histogram(tpot, names, series.tpot_s)
            prompt.add_metric(names, series.prompt_tokens)
            output.add_metric(names, series.completion_tokens)
            expected.add_metric(names, series.expected_cached_tokens)
            actual.add_metric(names, series.actual_cached_tokens)
        yield from (ttft, predicted, error, tpot, prompt, output, expected, actual)

    def _connections(self) -> Iterator[Metric]:
        plane = self._plane
        tally = plane.tally
        yield GaugeMetricFamily("warmgate_client_connections", "Open client connections.", value=plane.open_connections)
        yield CounterMetricFamily("warmgate_client_connections_accepted", "Accepted.", value=tally.connections)
        yield CounterMetricFamily(
            "warmgate_client_connections_refused", "Refused at the limit.", value=tally.connections_refused
        )
        bad = CounterMetricFamily("warmgate_bad_requests", "Bytes that were no request, by code.", labels=["code"])
        for code, number in tally.bad_requests.items():
            bad.add_metric([code], number)
        yield bad
        yield CounterMetricFamily("warmgate_request_bytes", "Request body bytes.", value=tally.bytes_in)
        yield CounterMetricFamily("warmgate_response_bytes", "Response bytes, heads included.", value=tally.bytes_out)
        yield CounterMetricFamily(
            "warmgate_log_lines_dropped", "Request log lines lost to a slow reader.", value=plane.log_lines_dropped
        )

    def _replicas(self, replicas: Sequence[Replica]) -> Iterator[Metric]:
        labels = ["replica"]
        router = self._plane.router
        ledger = router.ledger
        columns = {
            "up": GaugeMetricFamily("warmgate_replica_up", "1 if health probes succeed.", labels=labels),
            "routable": GaugeMetricFamily("warmgate_replica_routable", "1 if it may get requests.", labels=labels),
            "in_flight": GaugeMetricFamily("warmgate_replica_in_flight", "Requests sent and not ended.", labels=labels),
            "decodes": GaugeMetricFamily(
                "warmgate_replica_decodes", "Of those, past their first token.", labels=labels
            ),
            "prefill": GaugeMetricFamily(
                "warmgate_replica_prefill_tokens", "Uncached prompt tokens before their first token.", labels=labels
            ),
            "kv": GaugeMetricFamily("warmgate_replica_kv_tokens", "KV tokens of requests in flight.", labels=labels),
            "blocks": GaugeMetricFamily(
                "warmgate_prefix_map_blocks", "Blocks the prefix map credits it with.", labels=labels
            ),
            "bytes": GaugeMetricFamily("warmgate_prefix_map_bytes", "Prompt bytes of those blocks.", labels=labels),
            "idle": GaugeMetricFamily("warmgate_replica_idle_connections", "Idle connections to it.", labels=labels),
            "running": GaugeMetricFamily(
                "warmgate_replica_engine_running", "Running, by its own metrics.", labels=labels
            ),
            "waiting": GaugeMetricFamily(
                "warmgate_replica_engine_waiting", "Waiting, by its own metrics.", labels=labels
            ),
            "usage": GaugeMetricFamily(
                "warmgate_replica_engine_kv_usage", "KV usage, by its own metrics.", labels=labels
            ),
        }
        breaker = GaugeMetricFamily(
            "warmgate_replica_breaker", "1 for the breaker's state.", labels=["replica", "state"]
        )
        for replica in replicas:
            slot, name = replica.slot, [replica.name]
            columns["up"].add_metric(name, replica.up)
            columns["routable"].add_metric(name, replica.routable)
            own = ledger.own(slot)  # others tell theirs themselves
            columns["in_flight"].add_metric(name, own.in_flight)
            columns["decodes"].add_metric(name, own.decodes)
            columns["prefill"].add_metric(name, own.prefill_tokens)
            columns["kv"].add_metric(name, own.kv_tokens)
            columns["blocks"].add_metric(name, router.index.blocks(slot))
            columns["bytes"].add_metric(name, router.index.held_bytes(slot))
            columns["idle"].add_metric(name, self._plane.pool(replica).idle_count)
            kv = replica.kv
            for column, value in (("running", kv.running), ("waiting", kv.waiting), ("usage", kv.kv_usage)):
                if value is not None:
                    columns[column].add_metric(name, value)
            breaker.add_metric([replica.name, self._ejector.state(replica)], 1)
        yield from columns.values()
        yield breaker

    def _promises(self, replicas: Sequence[Replica]) -> Iterator[Metric]:
        """What engines' counts of cached tokens said about the prefix map, see `gateway.prefixes.feedback`."""
        router = self._plane.router
        feedback = router.feedback
        results = CounterMetricFamily(
            "warmgate_prefix_promises",
            "Prefixes the map promised, by what the engine found: kept, broken, or unjudged where it does not tell.",
            labels=["replica", "result"],
        )
        kept_ratio = GaugeMetricFamily(
            "warmgate_prefix_promises_kept_ratio", "Share of the last promises that were kept.", labels=["replica"]
        )
        capacity_ratio = GaugeMetricFamily(
            "warmgate_prefix_map_capacity_ratio",
            "Share of the replica's KV memory that the map may fill; broken promises lower it.",
            labels=["replica"],
        )
        for replica in replicas:
            slot = replica.slot
            for result, number in zip(("kept", "broken", "unjudged"), feedback.promises(slot), strict=True):
                results.add_metric([replica.name, result], number)
            share = feedback.kept_share(slot)
            if share is not None:
                kept_ratio.add_metric([replica.name], share)
            capacity_ratio.add_metric([replica.name], feedback.capacity_share(slot))
        yield from (results, kept_ratio, capacity_ratio)

    def _prediction(self, replicas: Sequence[Replica]) -> Iterator[Metric]:
        router = self._plane.router
        predictor = router.predictor
        errors = GaugeMetricFamily(
            "warmgate_ttft_prediction_absolute_error",
            "Quantile of the absolute relative error of the last predictions, by replica.",
            labels=["replica", "quantile"],
        )
        bias = GaugeMetricFamily(
            "warmgate_ttft_prediction_bias", "Mean signed relative error of the last predictions.", labels=["replica"]
        )
        for replica in replicas:
            recent = predictor.errors[replica.slot]
            for quantile, label in ((0.5, "0.5"), (0.9, "0.9")):
                value = recent.absolute_quantile(quantile)
                if value is not None:
                    errors.add_metric([replica.name, label], value)
            mean = recent.bias()
            if mean is not None:
                bias.add_metric([replica.name], mean)
        yield from (errors, bias)

    def _fallback(self) -> Iterator[Metric]:
        active = GaugeMetricFamily(
            "warmgate_prediction_fallback",
            "1 while TTFT predictions for the model are too wrong to be followed, and load decides.",
            labels=["model"],
        )
        decisions = CounterMetricFamily(
            "warmgate_prediction_fallback_decisions", "Requests that load decided for that reason.", labels=["model"]
        )
        for model, fallen, number in self._plane.router.fallback.pools():
            active.add_metric([model], fallen)
            decisions.add_metric([model], number)
        yield from (active, decisions)

    def _classes(self) -> Iterator[Metric]:
        predictor = self._plane.router.predictor
        factor = GaugeMetricFamily(
            "warmgate_ttft_calibration_factor", "Observed seconds per predicted second of work.", labels=["class"]
        )
        constant = GaugeMetricFamily(
            "warmgate_ttft_calibration_constant_seconds", "Seconds every request takes.", labels=["class"]
        )
        class_error = GaugeMetricFamily(
            "warmgate_ttft_prediction_class_absolute_error",
            "Quantile of the absolute relative error of the last predictions, by class of replicas.",
            labels=["class", "quantile"],
        )
        for replica_class, calibration in predictor.classes.items():
            name = replica_class.label()
            factor.add_metric([name], calibration.factor)
            constant.add_metric([name], calibration.constant_s)
            for quantile, label in ((0.5, "0.5"), (0.9, "0.9")):
                value = calibration.errors.absolute_quantile(quantile)
                if value is not None:
                    class_error.add_metric([name, label], value)
        yield from (factor, constant, class_error)
