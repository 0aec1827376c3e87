"""Figures of a benchmark run of one policy.

Times are wall-clock. Against simulated replicas that run faster than real time (`speedup`), the same
figures are also given in engine time, that is multiplied back to what the engine would have shown at its
own pace.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from loadtests.bench_trace import TraceRun
from loadtests.sse_stream import ChatResult


def percentile(ordered: Sequence[float], share: float) -> float:
    """Value at `share` (0 to 1) of an ascending sequence, linear between neighbours; 0 when it is empty."""
    if not ordered:
        return 0.0
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of one quantity, in the unit of what it was made from."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution":
        """Summarise values in any order; all zero when there are none."""
        ordered = sorted(values)
        mean = sum(ordered) / len(ordered) if ordered else 0.0
        return cls(mean, *(percentile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99)))

    def scaled(self, factor: float) -> "Distribution":
        """The same distribution with every value multiplied by `factor`."""
        return Distribution(
            self.mean * factor, self.p50 * factor, self.p90 * factor, self.p95 * factor, self.p99 * factor
        )


@dataclass(frozen=True, slots=True)
class TtftPrediction:
    """The gateway's predicted TTFT against the observed one, over requests that have both."""

    requests: int
    mean_predicted_ms: float
    mean_observed_ms: float
    ratio_of_means: float
    """Mean predicted over mean observed."""
    bias: float
    """Ratio of the means minus 1: above 0 the gateway promises later first tokens than come."""
    median_ape: float
    """Median of |predicted - observed| / observed."""
    p90_ape: float

    @classmethod
    def of(cls, pairs_ms: Sequence[tuple[float, float]]) -> "TtftPrediction | None":
        """Summarise (predicted, observed) pairs in ms; None when there are none."""
        if not pairs_ms:
            return None
        predicted = sum(pair[0] for pair in pairs_ms) / len(pairs_ms)
        observed = sum(pair[1] for pair in pairs_ms) / len(pairs_ms)
        errors = sorted(abs(guess - truth) / truth for guess, truth in pairs_ms)
        ratio = predicted / observed
        return cls(
            requests=len(pairs_ms),
            mean_predicted_ms=predicted,
            mean_observed_ms=observed,
            ratio_of_means=ratio,
            bias=ratio - 1.0,
            median_ape=percentile(errors, 0.5),
            p90_ape=percentile(errors, 0.9),
        )


@dataclass(frozen=True, slots=True)
class Times:
    """The time-dependent figures of a run, in one time base."""

    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    """Gaps between arrivals of streamed chunks, after the first token."""
    e2e_ms: Distribution
    output_tokens_per_s: float

    def scaled(self, factor: float) -> "Times":
        """The same figures on a clock that runs `factor` times as long."""
        return Times(
            self.ttft_ms.scaled(factor),
            self.tpot_ms.scaled(factor),
            self.itl_ms.scaled(factor),
            self.e2e_ms.scaled(factor),
            self.output_tokens_per_s / factor,
        )


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """All figures of one policy's run."""

    policy: str
    requests: int
    errors: int
    errors_by_kind: dict[str, int]
    wall: Times
    speedup: float | None
    """Engine seconds per wall second of simulated replicas; None for replicas whose pace is not known."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    token_hit_rate: float
    """Cached over prompt tokens, both from the replicas' usage."""
    requests_per_replica: dict[str, int]
    load_skew: float
    """Requests of the busiest replica over the mean."""
    ttft_prediction: TtftPrediction | None
    wall_s: float
    dispatch_lag_ms: Distribution
    """How late the load generator sent its requests. Near the TTFT it would make the figures worthless."""

    @property
    def engine(self) -> Times | None:
        """The times at the engine's own pace, when that is known."""
        return None if self.speedup is None else self.wall.scaled(self.speedup)

    def as_json(self) -> dict[str, Any]:
        """One flat object: wall times at the top, engine times under `engine`."""
        fields = asdict(self)
        times = fields.pop("wall")
        engine = self.engine
        return {
            "policy": fields.pop("policy"),
            "requests": fields.pop("requests"),
            "errors": fields.pop("errors"),
            "time_base": "wall",
            **times,
            **fields,
            "engine": None if engine is None else asdict(engine),
        }


def _times(results: Sequence[ChatResult], completion_tokens: int, wall_s: float) -> Times:
    gaps_ms = array("d")
    for result in results:
        arrivals = result.chunk_times_s
        gaps_ms.extend(1000 * (later - earlier) for earlier, later in pairwise(arrivals))
    return Times(
        ttft_ms=Distribution.of([1000 * result.ttft_s for result in results if result.ttft_s is not None]),
        tpot_ms=Distribution.of([1000 * result.tpot_s for result in results if result.tpot_s is not None]),
        itl_ms=Distribution.of(gaps_ms),
        e2e_ms=Distribution.of([1000 * (result.ended_s - result.sent_s) for result in results]),
        output_tokens_per_s=completion_tokens / wall_s if wall_s > 0 else 0.0,
    )


def _requests_per_replica(results: Sequence[ChatResult]) -> dict[str, int]:
    counts = Counter(result.replica for result in results if result.replica is not None)
    return dict(sorted(counts.items()))


def summarise(run: TraceRun, policy: str, speedup: float | None = None, replicas: int | None = None) -> PolicySummary:
    """Compute all figures of a run.

    Failed requests count in `errors` and nowhere else.

    Args:
        run: what `drive` returned. policy: name of the policy in force. speedup: engine seconds per wall
        second, when known. replicas: size of the fleet, so that replicas without a request count in the
        skew; those seen when None.
    """
    good = [result for result in run.results if result.error is None]
    kinds = Counter(result.error for result in run.results if result.error is not None)
    prompt_tokens = sum(result.prompt_tokens for result in good)
    cached_tokens = sum(result.cached_tokens for result in good)
    completion_tokens = sum(result.completion_tokens for result in good)
    per_replica = _requests_per_replica(good)
    fleet = max(replicas or 0, len(per_replica))
    pairs_ms = [
        (result.predicted_ttft_ms, 1000 * result.ttft_s)
        for result in good
        if result.predicted_ttft_ms is not None and result.ttft_s
    ]
    return PolicySummary(
        policy=policy,
        requests=len(run.results),
        errors=sum(kinds.values()),
        errors_by_kind=dict(sorted(kinds.items())),
        wall=_times(good, completion_tokens, run.wall_s),
        speedup=speedup,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=completion_tokens,
        token_hit_rate=cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        requests_per_replica=per_replica,
        load_skew=max(per_replica.values()) * fleet / sum(per_replica.values()) if per_replica else 0.0,
        ttft_prediction=TtftPrediction.of(pairs_ms),
        wall_s=run.wall_s,
        dispatch_lag_ms=Distribution.of([1000 * lag_s for lag_s in run.dispatch_lags_s]),
    )
