"""Limits in time: which of them a request has passed, and whether its replica hangs.

Every limit counts for one side only. While the client does not read, or still sends a body that is wanted, the time is
the client's; otherwise it is the replica's.
"""

from typing import TYPE_CHECKING

from gateway.proxy.failures import HUNG_AFTER_PREDICTIONS, HUNG_AFTER_S, Cause, Phase
from gateway.proxy.limits import PlaneLimits

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange


def limit_passed(exchange: "Exchange", limits: PlaneLimits, now_s: float) -> Cause | None:
    """Return the failure that a passed limit is; None if all are kept.

    Args:
        exchange: a request that has begun and not ended.
        limits: what is allowed.
        now_s: monotonic seconds.
    """
    phase = exchange.phase
    idle_s = now_s - exchange.last_byte_s
    if limits.deadline_s and now_s - exchange.started_s > limits.deadline_s:
        return Cause.DEADLINE
    if exchange.paused_since_s is not None:
        return Cause.CLIENT_STALLED if now_s - exchange.paused_since_s > limits.client_stall_timeout_s else None
    if phase is Phase.READING or (phase is Phase.WAITING and exchange.uploading):
        return Cause.UPLOAD_STALLED if idle_s > limits.body_timeout_s else None
    if phase is Phase.QUEUED:
        if now_s - exchange.queued_s > limits.queue_wait_s:
            return exchange.lacking
        query = exchange.query
        overdue = query is not None and query.targets is not None and query.targets.overdue(now_s)
        return Cause.OUT_OF_REACH if overdue else None
    if phase is Phase.CONNECTING or phase is Phase.PREFILL:
        # They have limits of their own, in `upstream` and `prefill_leg`.
        return None
    if phase is Phase.WAITING:
        return Cause.FIRST_BYTE_TIMEOUT if idle_s > limits.first_byte_timeout_s else None
    return Cause.SILENCE if idle_s > limits.silence_timeout_s else None


def hung(exchange: "Exchange", now_s: float) -> bool:
    """Say whether the replica has shown no sign of life since it got this stream, for too long; see `failures`.

    Args:
        exchange: a request that is being given up.
        now_s: monotonic seconds.
    """
    assignment, query = exchange.assignment, exchange.query
    if assignment is None or query is None or not query.stream or exchange.first_token_s is not None:
        return False
    if exchange.phase is not Phase.WAITING and exchange.phase is not Phase.STREAMING:
        return False
    longest_s = max(HUNG_AFTER_S, HUNG_AFTER_PREDICTIONS * assignment.predicted_ttft_s)
    return now_s - exchange.sent_s > longest_s and assignment.step_seen_s[assignment.slot] < exchange.sent_s
