"""From the records of a replay to its figures."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtests.bench_summary import Distribution, TtftPrediction
from loadtests.replay.record import RequestRecord
from loadtests.replay.replay import REFUSED, ReplayResult
from loadtests.replay.settings import Slo

SHARES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that kept their SLO. Its limits are None where they differ between requests."""

    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    requests_per_s: float
    share: float


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage of a ladder."""

    name: str
    rate_per_s: float | None
    warm_up: bool
    requests: int
    errors: int
    ttft_ms: Distribution
    tpot_ms: Distribution
    token_hit_rate: float
    output_tokens_per_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """One class of the requests of a mixture."""

    requests: int
    errors: int
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution


@dataclass(frozen=True, slots=True)
class StageMeans:
    """Unweighted means over the measured stages, which is how llm-d's reports sum up a ladder."""

    output_tokens_per_s: float
    ttft_mean_ms: float
    ttft_p90_ms: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy on one load. Warm-up stages are in nothing but `stages`."""

    policy: str
    workload: str
    replicas: int
    seed: int
    speed: float
    requests: int
    errors: int
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    token_hit_rate: float
    """Prompt tokens the engines found cached, of all."""
    expected_hit_rate: float
    """Prompt tokens the prefix map promised, of all."""
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    goodput: Goodput
    goodput_by_slo: list[Goodput]
    """Empty where all requests have the same."""
    refused: int
    """Of the errors, requests refused because no replica could keep their SLO."""
    disaggregated: int
    """Requests whose prompt was computed on another replica than the one that answered."""
    preemptions: int
    load_skew: float
    """Most over mean requests per replica."""
    in_flight_skew: float
    """Most over mean of the requests in flight per replica, averaged over time."""
    requests_per_replica: list[int]
    ttft_prediction: TtftPrediction | None
    fallback_decisions: int
    """Requests that load decided, because predictions were too wrong."""
    makespan_s: float
    stages: list[StageFigures]
    """Empty for loads of one stage."""
    stage_means: StageMeans | None
    classes: dict[str, ClassFigures]
    """By name; empty where the workload names none."""

    def as_json(self) -> dict[str, Any]:
        """The object of the JSON report."""
        return asdict(self)


def figures(result: ReplayResult, slo: Slo | None = None) -> Figures:
    """Compute all figures of a replay; failed requests count in `errors` and nowhere else.

    Args:
        result: what `Replay.run` returned.
        slo: what goodput asks for of all requests; what each of them asked for if None.
    """
    stages = result.load.stages
    measured = [record for record in result.records if not stages[record.stage].warm_up]
    good = [record for record in measured if record.error is None]
    spans = [span for span, stage in zip(result.spans, stages, strict=True) if not stage.warm_up]
    makespan_s = sum(span.ended_s - span.started_s for span in spans)
    prompt_tokens = sum(record.turn.prompt.tokens for record in good)
    output_tokens = sum(record.turn.output_tokens for record in good)
    counts = [0] * len(result.replicas)
    in_flight_s = [0.0] * len(result.replicas)
    for record in measured:
        if record.slot >= 0 and record.ended_s is not None:
            counts[record.slot] += 1
            in_flight_s[record.slot] += record.ended_s - record.assigned_s
    staged = [_stage(result, number) for number in range(len(stages))] if len(stages) > 1 else []
    return Figures(
        policy=result.policy,
        workload=result.load.name,
        replicas=len(result.replicas),
        seed=result.settings.seed,
        speed=result.settings.speed,
        requests=len(measured),
        errors=len(measured) - len(good),
        ttft_ms=_ttft_ms(good),
        tpot_ms=_tpot_ms(good),
        itl_ms=weighted_distribution(result.gaps.weighted(), 1000.0),
        e2e_ms=Distribution.of([1000.0 * ((record.ended_s or 0.0) - record.arrival_s) for record in good]),
        token_hit_rate=_ratio(sum(record.cached_tokens for record in good), prompt_tokens),
        expected_hit_rate=_ratio(sum(record.expected_cached_tokens for record in good), prompt_tokens),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tokens_per_s=_ratio(output_tokens, makespan_s),
        goodput=_goodput(measured, slo, makespan_s),
        goodput_by_slo=_goodput_by_slo(measured, makespan_s) if slo is None else [],
        refused=sum(record.error == REFUSED for record in measured),
        disaggregated=sum(record.disaggregated for record in good),
        preemptions=sum(replica.preemptions for replica in result.replicas),
        load_skew=_skew(counts),
        in_flight_skew=_skew(in_flight_s),
        requests_per_replica=counts,
        ttft_prediction=TtftPrediction.of(
            [
                (1000.0 * record.predicted_ttft_s, 1000.0 * (record.first_token_s - record.arrival_s))
                for record in good
                if record.predicted_ttft_s is not None
                and record.attempts == 1
                and record.first_token_s is not None
                and record.first_token_s > record.arrival_s
            ]
        ),
        fallback_decisions=result.fallback_decisions,
        makespan_s=makespan_s,
        stages=staged,
        stage_means=_stage_means([stage for stage in staged if not stage.warm_up]),
        classes={name: _class(name, measured, result) for name in result.load.request_classes},
    )


def ttfts_ms(result: ReplayResult) -> list[float]:
    """TTFT of every measured request that succeeded."""
    stages = result.load.stages
    return [
        1000.0 * (record.first_token_s - record.arrival_s)
        for record in result.records
        if record.error is None and record.first_token_s is not None and not stages[record.stage].warm_up
    ]


def weighted_distribution(pairs: Sequence[tuple[float, int]], scale: float) -> Distribution:
    """Summarise values that occur many times each, as `Distribution.of` would their expansion.

    Args:
        pairs: (value, how often), values ascending.
        scale: multiplies the values.
    """
    total = sum(count for _, count in pairs)
    if not total:
        return Distribution.of(())
    mean = sum(value * count for value, count in pairs) / total
    wanted = [share * (total - 1) for share in SHARES]
    ranks = sorted({rank for position in wanted for rank in (int(position), min(int(position) + 1, total - 1))})
    values: dict[int, float] = {}
    seen = 0
    following = iter(ranks)
    rank = next(following, None)
    for value, count in pairs:
        seen += count
        while rank is not None and rank < seen:
            values[rank] = value
            rank = next(following, None)
        if rank is None:
            break
    quantiles = []
    for position in wanted:
        below = int(position)
        low, high = values[below], values[min(below + 1, total - 1)]
        quantiles.append(scale * (low + (high - low) * (position - below)))
    return Distribution(scale * mean, *quantiles)


def _ttft_ms(records: Iterable[RequestRecord]) -> Distribution:
    return Distribution.of(
        [1000.0 * (record.first_token_s - record.arrival_s) for record in records if record.first_token_s is not None]
    )


def _tpot_s(record: RequestRecord) -> float | None:
    """Mean seconds per token after the first; None for answers of one token."""
    if record.turn.output_tokens < 2 or record.first_token_s is None or record.ended_s is None:
        return None
    return (record.ended_s - record.first_token_s) / (record.turn.output_tokens - 1)


def _tpot_ms(records: Iterable[RequestRecord]) -> Distribution:
    return Distribution.of([1000.0 * tpot_s for record in records if (tpot_s := _tpot_s(record)) is not None])


def _goodput(records: Sequence[RequestRecord], slo: Slo | None, makespan_s: float) -> Goodput:
    kept = sum(_keeps(record, slo or record.slo) for record in records)
    limits = {slo} if slo is not None else {record.slo for record in records} or {Slo()}
    ttfts_ms, tpots_ms = {each.ttft_ms for each in limits}, {each.tpot_ms for each in limits}
    return Goodput(
        ttfts_ms.pop() if len(ttfts_ms) == 1 else None,
        tpots_ms.pop() if len(tpots_ms) == 1 else None,
        _ratio(kept, makespan_s),
        _ratio(kept, len(records)),
    )


def _goodput_by_slo(records: Sequence[RequestRecord], makespan_s: float) -> list[Goodput]:
    slos = sorted({record.slo for record in records}, key=lambda slo: (slo.ttft_ms, slo.tpot_ms))
    if len(slos) < 2:
        return []
    return [_goodput([record for record in records if record.slo == slo], slo, makespan_s) for slo in slos]


def _keeps(record: RequestRecord, slo: Slo) -> bool:
    if record.error is not None or record.first_token_s is None:
        return False
    ttft_ms = 1000.0 * (record.first_token_s - record.arrival_s)
    return ttft_ms <= slo.ttft_ms and 1000.0 * (_tpot_s(record) or 0.0) <= slo.tpot_ms


def _stage(result: ReplayResult, number: int) -> StageFigures:
    stage, span = result.load.stages[number], result.spans[number]
    records = [record for record in result.records if record.stage == number]
    good = [record for record in records if record.error is None]
    duration_s = span.ended_s - span.started_s
    return StageFigures(
        name=stage.name,
        rate_per_s=stage.rate_per_s,
        warm_up=stage.warm_up,
        requests=len(records),
        errors=len(records) - len(good),
        ttft_ms=_ttft_ms(good),
        tpot_ms=_tpot_ms(good),
        token_hit_rate=_ratio(
            sum(record.cached_tokens for record in good), sum(record.turn.prompt.tokens for record in good)
        ),
        output_tokens_per_s=_ratio(sum(record.turn.output_tokens for record in good), duration_s),
        duration_s=duration_s,
    )


def _class(name: str, measured: Sequence[RequestRecord], result: ReplayResult) -> ClassFigures:
    records = [record for record in measured if record.turn.request_class == name]
    good = [record for record in records if record.error is None]
    gaps = result.class_gaps.get(name)
    return ClassFigures(
        requests=len(records),
        errors=len(records) - len(good),
        ttft_ms=_ttft_ms(good),
        tpot_ms=_tpot_ms(good),
        itl_ms=weighted_distribution(gaps.weighted() if gaps is not None else (), 1000.0),
    )


def _stage_means(stages: Sequence[StageFigures]) -> StageMeans | None:
    if not stages:
        return None
    count = len(stages)
    return StageMeans(
        output_tokens_per_s=sum(stage.output_tokens_per_s for stage in stages) / count,
        ttft_mean_ms=sum(stage.ttft_ms.mean for stage in stages) / count,
        ttft_p90_ms=sum(stage.ttft_ms.p90 for stage in stages) / count,
    )


def _skew(values: Sequence[float]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
