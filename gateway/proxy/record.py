"""What is kept of a request when it has ended: the counts and the log line."""

from typing import Any

from gateway.proxy.exchange import Exchange
from gateway.proxy.failures import TABLE, Cause, Phase
from gateway.proxy.outcome import Outcome
from gateway.proxy.tally import Tally
from policies.slo import Targets

_REFUSED_CODE = TABLE[Phase.QUEUED, Cause.OUT_OF_REACH].code


def tpot_s(exchange: Exchange) -> float | None:
    """Return seconds per output token after the first; None if it cannot be told."""
    usage, first_s = exchange.usage, exchange.first_token_s
    if usage is None or first_s is None or usage.completion_tokens < 2:
        return None
    return (exchange.last_token_s - first_s) / (usage.completion_tokens - 1)


def ttft_met(exchange: Exchange, target_s: float, now_s: float) -> bool | None:
    """Say whether the first token came in time, counted from the request's head; None if it cannot be told.

    Args:
        exchange: a request that has ended.
        target_s: seconds to the first token.
        now_s: when it ended.
    """
    if exchange.first_token_s is not None:
        return exchange.first_token_s - exchange.started_s <= target_s
    in_time = now_s - exchange.started_s <= target_s
    outcome = exchange.outcome
    if outcome is Outcome.OK:
        # A whole answer comes after its first token.
        return True if in_time else None
    if outcome is Outcome.CLIENT_ERROR or (outcome is Outcome.CANCELLED and in_time):
        return None
    return False


def tpot_met(exchange: Exchange, target_s: float) -> bool | None:
    """Say whether tokens came fast enough on average; None if it cannot be told.

    Args:
        exchange: a request that has ended.
        target_s: seconds per output token after the first.
    """
    per_token_s = tpot_s(exchange)
    return None if per_token_s is None else per_token_s <= target_s


def slo_results(exchange: Exchange, targets: Targets, now_s: float) -> dict[str, bool | None]:
    """Return which of a request's targets were met, by name; nothing for a request that was refused for them."""
    results: dict[str, bool | None] = {}
    if exchange.error_code != _REFUSED_CODE:
        if targets.ttft_s is not None:
            results["ttft"] = ttft_met(exchange, targets.ttft_s, now_s)
        if targets.tpot_s is not None:
            results["tpot"] = tpot_met(exchange, targets.tpot_s)
    return results


def _count_slo(exchange: Exchange, tally: Tally, pool: str, targets: Targets, now_s: float) -> None:
    tally.slo_requests[pool] += 1
    if exchange.error_code == _REFUSED_CODE:
        tally.slo_refused[pool] += 1
    for target, met in slo_results(exchange, targets, now_s).items():
        tally.slo_results[pool, target, _RESULTS[met]] += 1


_RESULTS = {True: "met", False: "missed", None: "unknown"}


def count(exchange: Exchange, tally: Tally, now_s: float, replica: str) -> None:
    """Add a request that has ended to the counts.

    Args:
        exchange: the request.
        tally: the counts.
        now_s: monotonic seconds.
        replica: label of the replica of its last attempt; "" for none, or for one that has left.
    """
    outcome = exchange.outcome
    assert outcome is not None
    tally.bytes_in += exchange.bytes_in
    tally.bytes_out += exchange.bytes_out
    tally.duration(outcome, now_s - exchange.started_s)
    query = exchange.query
    if query is not None and query.targets is not None:
        _count_slo(exchange, tally, query.pool, query.targets, now_s)
    assignment = exchange.assignment
    if assignment is None:
        tally.requests["", "", outcome, exchange.status] += 1
        return
    policy = assignment.policy
    if assignment.hand_off is not None and outcome == Outcome.OK and query is not None:
        tally.disaggregated[query.pool] += 1
    tally.requests[replica, policy, outcome, exchange.status] += 1
    if not replica:
        return
    series = tally.of(replica, policy)
    usage = exchange.usage
    if usage is not None:
        series.prompt_tokens += usage.prompt_tokens
        series.completion_tokens += usage.completion_tokens
        if usage.cached_tokens is not None:
            series.reported += 1
            series.expected_cached_tokens += assignment.expected_cached_tokens
            series.actual_cached_tokens += usage.cached_tokens
    observed_s = assignment.observed_ttft_s
    if observed_s is not None and exchange.first_token_s is not None:
        series.ttft_s.add(exchange.first_token_s - exchange.started_s)
        series.predicted_ttft_s.add(assignment.predicted_ttft_s)
        series.prediction_error.add(abs(assignment.predicted_ttft_s - observed_s) / max(observed_s, 1e-4))
    per_token_s = tpot_s(exchange)
    if per_token_s is not None:
        series.tpot_s.add(per_token_s)


def _ms(seconds: float) -> float:
    """Milliseconds to two places; `round` to places goes through decimal text and costs four times as much."""
    return int(seconds * 1e5) / 1e2


def log_record(exchange: Exchange, now_s: float) -> dict[str, Any]:
    """Return the fields of a request's log line. Times in milliseconds; no bodies, no keys, no addresses of replicas.

    Args:
        exchange: the request.
        now_s: monotonic seconds.
    """
    record: dict[str, Any] = {
        "event": "request",
        "id": exchange.request_id.decode("latin-1"),
        "client": exchange.client_address,
        "method": exchange.method.decode("latin-1"),
        "path": exchange.head.path.decode("latin-1")[:256],
        "status": exchange.status,
        "outcome": exchange.outcome,
        "duration_ms": _ms(now_s - exchange.started_s),
        "attempts": exchange.attempts,
        "bytes_in": exchange.bytes_in,
        "bytes_out": exchange.bytes_out,
    }
    if exchange.error_code is not None:
        record["error"] = exchange.error_code
    query = exchange.query
    if query is not None:
        record["model"] = query.pool
        record["stream"] = query.stream
        record["prompt_tokens"] = round(query.request.prompt_tokens)
        if query.targets is not None:
            record["slo"] = _slo_record(exchange, query.targets, now_s)
    assignment = exchange.assignment
    if assignment is not None:
        record["replica"] = assignment.replica.name
        record["policy"] = assignment.policy
        record["reason"] = assignment.reason
        record["terms"] = {name: int(value * 1e5) / 1e5 for name, value in assignment.terms.items()}
        record["expected_cached_tokens"] = assignment.expected_cached_tokens
        record["predicted_ttft_ms"] = _ms(assignment.predicted_ttft_s)
        hand_off = assignment.hand_off
        if hand_off is not None:
            record["prefill_replica"] = hand_off.replica.name
            if hand_off.observed_s is not None:
                record["prefill_ms"] = _ms(hand_off.observed_s)
            if hand_off.fetching_s is not None and exchange.first_token_s is not None:
                record["hand_off_ms"] = _ms(exchange.first_token_s - hand_off.fetching_s)
        if assignment.observed_ttft_s is not None:
            record["ttft_ms"] = _ms(assignment.observed_ttft_s)
    usage = exchange.usage
    if usage is not None:
        record["prompt_tokens"] = usage.prompt_tokens
        record["completion_tokens"] = usage.completion_tokens
        record["cached_tokens"] = usage.cached_tokens
    return record


def _slo_record(exchange: Exchange, targets: Targets, now_s: float) -> dict[str, Any]:
    record: dict[str, Any] = {}
    if targets.ttft_s is not None:
        record["ttft_ms"] = _ms(targets.ttft_s)
    if targets.tpot_s is not None:
        record["tpot_ms"] = _ms(targets.tpot_s)
    for target, met in slo_results(exchange, targets, now_s).items():
        record[f"{target}_met"] = met
    if exchange.error_code == _REFUSED_CODE:
        record["refused"] = True
    elif exchange.assignment is not None:
        record["outlook"] = exchange.assignment.outlook
    return record
