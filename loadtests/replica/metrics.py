"""What a replica counts, and its /metrics page under vLLM's names.

The names, labels and buckets are those of vLLM 0.32. All times are wall seconds, as an observer would
measure them: engine seconds divided by the speed-up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from loadtests.engine import Engine
from loadtests.replica.config import ReplicaConfig

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

_SUBSECOND = (0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, *_SUBSECOND, 160.0, 640.0, 2560.0)
_TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *_SUBSECOND[2:])
_MINUTES = (10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, *_MINUTES)
_FEW = (1.0, 2.0, 5.0, 10.0, 20.0)
# vLLM stops at the model's context; here the same rows for every context.
_TOKENS = (*_FEW, *(scale * step for scale in (50.0, 500.0, 5000.0, 50000.0) for step in (1, 2, 4)))
_ITERATION = (1.0, *(float(1 << power) for power in range(3, 15)))
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


class Histogram:
    """A Prometheus histogram that takes many equal observations at once."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def observe(self, value: float, count: int = 1) -> None:
        """Count `count` observations of `value`."""
        self.total += value * count
        self._counts[bisect_left(self.bounds, value)] += count

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound."""
        cumulative = 0
        rows = []
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            cumulative += count
            rows.append((str(bound) if bound != float("inf") else "+Inf", float(cumulative)))
        return rows


class ReplicaMetrics:
    """Counters of one replica that the engine does not keep itself."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.external_prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.histograms = {
            name: Histogram(bounds)
            for name, bounds in (
                ("request_prompt_tokens", _TOKENS),
                ("request_generation_tokens", _TOKENS),
                ("iteration_tokens_total", _ITERATION),
                ("request_params_n", _FEW),
                ("request_params_max_tokens", _TOKENS),
                ("time_to_first_token_seconds", _TTFT),
                ("inter_token_latency_seconds", _TPOT),
                ("request_time_per_output_token_seconds", _TPOT),
                ("e2e_request_latency_seconds", _LATENCY),
                ("request_queue_time_seconds", _LATENCY),
                ("request_inference_time_seconds", _LATENCY),
                ("request_prefill_time_seconds", _LATENCY),
                ("request_decode_time_seconds", _LATENCY),
                ("request_num_preemptions", _PREEMPTIONS),
                ("request_prefill_kv_computed_tokens", _TOKENS),
            )
        }
        self.iteration_tokens = self.histograms["iteration_tokens_total"]
        self.ttft = self.histograms["time_to_first_token_seconds"]
        self.itl = self.histograms["inter_token_latency_seconds"]

    def observe(self, name: str, value: float) -> None:
        """One observation of a histogram."""
        self.histograms[name].observe(value)


class MetricsPage(Collector):
    """Renders /metrics of one replica from its plain counters, in a registry of its own.

    Args:
        config: names and limits.
        engine: queue, memory and prefix cache.
        metrics: the other counters.
    """

    def __init__(self, config: ReplicaConfig, engine: Engine, metrics: ReplicaMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._labels = {"engine": "0", "model_name": config.model_names[0]}
        self._cache_config = _cache_config(config, engine)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not render the page to know its names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metric families."""
        engine, metrics = self._engine, self._metrics
        yield self._gauge("num_requests_running", "Number of requests in model execution batches.", engine.running)
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", engine.waiting)
        yield self._gauges(
            "num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            "reason",
            {"capacity": engine.waiting, "deferred": 0},
        )
        yield self._gauges(
            "engine_sleep_state",
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake.",
            "sleep_state",
            {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
        )
        yield self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", engine.kv_usage)
        yield from self._counters()
        for name, histogram in metrics.histograms.items():
            yield self._histogram(name, histogram)
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=list(self._cache_config),
        )
        config.add_metric(list(self._cache_config.values()), 1.0)
        yield config

    def _counters(self) -> Iterator[Metric]:
        engine, metrics = self._engine, self._metrics
        external = metrics.external_prompt_tokens
        cached = metrics.cached_prompt_tokens + external
        for name, text, value in (
            (
                "prefix_cache_queries",
                "Prefix cache queries, in terms of number of queried tokens.",
                engine.prefix_queried_tokens,
            ),
            (
                "prefix_cache_hits",
                "Prefix cache hits, in terms of number of cached tokens.",
                engine.prefix_hit_tokens,
            ),
            ("external_prefix_cache_queries", "External prefix cache queries, in tokens.", external),
            ("external_prefix_cache_hits", "External prefix cache hits, in tokens.", external),
            ("mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items.", 0),
            ("mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items.", 0),
            ("num_preemptions", "Cumulative number of preemption from the engine.", engine.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", metrics.prompt_tokens),
            ("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", cached),
            ("generation_tokens", "Number of generation tokens processed.", metrics.generation_tokens),
        ):
            yield self._counter(name, text, value)
        by_source = {
            "local_compute": metrics.prompt_tokens - cached,
            "local_cache_hit": cached,
            "external_kv_transfer": external,
        }
        yield self._labelled_counter(
            "prompt_tokens_by_source", "Number of prompt tokens by source.", "source", by_source
        )
        yield self._labelled_counter(
            "request_success",
            "Count of successfully processed requests.",
            "finished_reason",
            metrics.finished,
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _gauges(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _labelled_counter(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(
            f"vllm:{name}", f"Histogram of {name.replace('_', ' ')}.", labels=list(self._labels)
        )
        family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.total)
        return family


def _cache_config(config: ReplicaConfig, engine: Engine) -> dict[str, str]:
    limits = engine.limits
    tokens = limits.total_blocks * limits.block_size_tokens
    return {
        "block_size": str(limits.block_size_tokens),
        "cache_dtype": "auto",
        "effective_attention_block_size": str(limits.block_size_tokens),
        "enable_prefix_caching": str(limits.enable_prefix_caching),
        "engine": "0",
        "gpu_memory_utilization": "0.9",
        "is_attention_free": "False",
        "kv_cache_max_concurrency": str(tokens / config.max_model_len),
        "kv_cache_memory_bytes": "None",
        "kv_cache_size_tokens": str(tokens),
        "num_cpu_blocks": "None",
        "num_gpu_blocks": str(limits.total_blocks),
        "num_gpu_blocks_override": "None",
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": "None",
        "user_specified_block_size": "True",
    }
