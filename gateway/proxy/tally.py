"""Counts of the data plane: plain numbers on the hot path, read when the metrics page is asked for.

Labels are bounded: replicas, policies, pools and outcomes all come from the gateway's own finite sets.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

TTFT_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
TPOT_BUCKETS_S = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
DURATION_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)


class Histogram:
    """A histogram: counts per bucket, the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Record one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Values recorded."""
        return sum(self.counts)


class Series:
    """What is counted per replica and policy."""

    __slots__ = (
        "actual_cached_tokens",
        "completion_tokens",
        "expected_cached_tokens",
        "predicted_ttft_s",
        "prediction_error",
        "prompt_tokens",
        "reported",
        "tpot_s",
        "ttft_s",
    )

    def __init__(self) -> None:
        self.ttft_s = Histogram(TTFT_BUCKETS_S)
        self.predicted_ttft_s = Histogram(TTFT_BUCKETS_S)
        self.prediction_error = Histogram(ERROR_BUCKETS)
        """Absolute relative error of the predicted TTFT."""
        self.tpot_s = Histogram(TPOT_BUCKETS_S)
        self.prompt_tokens = 0.0
        self.completion_tokens = 0
        self.expected_cached_tokens = 0
        self.actual_cached_tokens = 0
        self.reported = 0
        """Answers in which the engine reported cached tokens; expected and actual are counted over these."""


class Tally:
    """All counts. Names of attributes are the metrics' names without prefix."""

    def __init__(self) -> None:
        self.requests: defaultdict[tuple[str, str, str, int], int] = defaultdict(int)
        """By replica, policy, outcome and status; replica and policy are "" when none was chosen."""
        self.series: dict[tuple[str, str], Series] = {}
        self.durations: dict[str, Histogram] = {}
        """Whole requests in seconds, by outcome."""
        self.retries: defaultdict[str, int] = defaultdict(int)
        """By replica that was left."""
        self.retries_denied = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.connections = 0
        self.connections_refused = 0
        self.bad_requests: defaultdict[str, int] = defaultdict(int)
        """Bytes that were no request, by error code."""
        self.in_progress = 0
        self.queue_wait_s = Histogram(TTFT_BUCKETS_S)
        """Seconds in the queue, of requests that got a replica in the end."""
        self.prefill_legs: defaultdict[str, int] = defaultdict(int)
        """Prompts sent to prefill replicas, by replica."""
        self.prefill_failures: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Of them, those that failed, by replica and cause."""
        self.hand_off_fallbacks: defaultdict[str, int] = defaultdict(int)
        """Hand-offs that came to nothing, by cause; the requests were routed again."""
        self.prefill_leg_s = Histogram(TTFT_BUCKETS_S)
        """Seconds of prompts on prefill replicas, those that succeeded."""
        self.hand_off_s = Histogram(TTFT_BUCKETS_S)
        """Seconds from the second request to its first token, of streams."""
        self.hand_off_bytes = 0.0
        """KV that was handed off by estimate, of streams."""
        self.disaggregated: defaultdict[str, int] = defaultdict(int)
        """Requests answered with a prompt computed elsewhere, by pool."""
        self.slo_requests: defaultdict[str, int] = defaultdict(int)
        """Requests with latency targets, by pool."""
        self.slo_results: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        """Their targets, by pool, target (ttft, tpot) and result (met, missed, unknown)."""
        self.slo_refused: defaultdict[str, int] = defaultdict(int)
        """Of the requests, those refused because no replica could keep them, by pool."""

    def of(self, replica: str, policy: str) -> Series:
        """Return the series of a replica and policy."""
        series = self.series.get((replica, policy))
        if series is None:
            series = self.series[(replica, policy)] = Series()
        return series

    def handed_off(self, size_bytes: float, seconds: float) -> None:
        """Record a hand-off: its estimated size, and the time from the second request to its first token."""
        self.hand_off_bytes += size_bytes
        self.hand_off_s.add(seconds)

    def duration(self, outcome: str, seconds: float) -> None:
        """Record a request's duration."""
        histogram = self.durations.get(outcome)
        if histogram is None:
            histogram = self.durations[outcome] = Histogram(DURATION_BUCKETS_S)
        histogram.add(seconds)

    def forget_replica(self, replica: str) -> None:
        """Drop the series of a replica that has been removed."""
        for key in [key for key in self.series if key[0] == replica]:
            del self.series[key]
        for labels in [labels for labels in self.requests if labels[0] == replica]:
            del self.requests[labels]
        self.retries.pop(replica, None)
