"""A filter before any policy: which candidates keep a request's latency targets, and which of those it should leave.

Rule, for a request with a target for its time to first token (TTFT), its time per output token (TPOT), or both:

1. Candidates predicted to keep all its targets are kept, the others dropped. "Exactly at the target" keeps it.
2. Of those kept, the ones whose running answers have targets of their own that this prompt's prefill would break are
   left out, as long as others remain.
3. Of those, a request with a loose target leaves out the replicas it would spoil for tight ones: those whose queue is
   short enough now for the tightest target seen lately, and would not be with this prompt in it. Again as long as
   others remain: replicas that are too busy for tight requests anyway, or have room for both.
4. The policy chooses among the rest by its own rule; so a cached prefix still counts, and the least cost wins.
5. If no candidate keeps the targets, the caller serves the request all the same, or refuses it.

A prediction that has often been wrong is a range, not a number: `prediction / doubt` to `prediction x doubt`. A replica
surely keeps a target if all of the range does, and surely misses it if nothing of the range does. Between the two it
comes after those that surely keep it, and is no reason to refuse a request.

Sources:
- llm-d-router, plugins `slo-headroom-tier-filter` (positive tier: predicted TTFT and TPOT headroom both >= 0; replicas
  without predictions come last; without any, all stay), `latency-scorer` (strategy `least`, its default: of the
  positive tier the least headroom, "bin-packing", so that others stay lightly loaded) and `latency-slo-admitter`
  (refuses what no replica can serve in time, if it is sheddable).
- R. Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", arXiv 2407.00079,
  Algorithm 1: if the best predicted TTFT or TBT is over its SLO, the request is refused with 429, before any work is
  spent on it.
Differences: points 2 and 3 are ours. Least headroom puts every request on the brink of its target, even where all have
the same target and nobody gains; here replicas are spared only as far as there are tighter targets to spare them for.
llm-d's 1 % of requests sent to replicas that miss is left out: it is for a model that learns only of what it serves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

ROOM_FOR_TIGHT = 0.5
"""Share of a tight target that must be left of it after the queue, for the request's own prefill."""
LOOSE = 2.0
"""A target this many times the tightest one is loose."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What one request asks for.

    Attributes:
        ttft_s: seconds to the first token, from the arrival of the request; None for any.
        tpot_s: seconds per output token after the first, on average; None for any.
        received_s: when the request came, on the clock of `Request.now_s`.
        refuse: refuse the request if no replica can keep the targets, instead of serving it late.
    """

    ttft_s: float | None
    tpot_s: float | None
    received_s: float
    refuse: bool = False

    def ttft_left_s(self, now_s: float) -> float:
        """Return what is left of the time to the first token: of the target, less what was lost in queues and on
        replicas that failed; infinite without a target."""
        return inf if self.ttft_s is None else self.ttft_s - (now_s - self.received_s)

    def overdue(self, now_s: float) -> bool:
        """Say whether a request that is to be refused rather than late is late already."""
        return self.refuse and self.ttft_left_s(now_s) <= 0.0


def sort_out(
    slots: Sequence[int],
    ttft_s: Sequence[float],
    tpot_s: Sequence[float],
    doubt: Sequence[float],
    ttft_left_s: float,
    tpot_target_s: float,
) -> tuple[list[int], list[int]]:
    """Sort the candidates by whether they keep the targets.

    Args:
        slots: the candidates.
        ttft_s: predicted seconds from now to the first token, by slot.
        tpot_s: predicted seconds per output token, by slot; not read without a target.
        doubt: by slot, how many times too large or too small a prediction may be, at least 1.
        ttft_left_s: what is left of the TTFT target; infinite without one.
        tpot_target_s: the TPOT target; infinite without one.

    Returns:
        Those that surely keep the targets, and those that may.
    """
    surely: list[int] = []
    perhaps: list[int] = []
    any_tpot = tpot_target_s == inf
    for slot in slots:
        factor = doubt[slot]
        first_s = ttft_s[slot]
        if first_s > ttft_left_s * factor:
            continue
        token_s = 0.0 if any_tpot else tpot_s[slot]
        if token_s > tpot_target_s * factor:
            continue
        if first_s * factor <= ttft_left_s and token_s * factor <= tpot_target_s:
            surely.append(slot)
        else:
            perhaps.append(slot)
    return surely, perhaps


def without_harm(slots: Sequence[int], own_prefill_s: Sequence[float], room_s: Sequence[float]) -> Sequence[int]:
    """Leave out the replicas on which this prefill would break the targets of running answers, unless all are such.

    Args:
        slots: the candidates.
        own_prefill_s: by slot, seconds this prompt's prefill holds up running decodes.
        room_s: by slot, seconds they can be held up.
    """
    kept = [slot for slot in slots if own_prefill_s[slot] <= room_s[slot]]
    return kept or slots


def sparing(
    slots: Sequence[int], ttft_s: Sequence[float], own_prefill_s: Sequence[float], tight_s: float
) -> Sequence[int]:
    """Leave out the replicas that this request would spoil for tight ones, unless all are such.

    Args:
        slots: the candidates.
        ttft_s: predicted seconds to the first token, by slot: what a request after this one would have to wait.
        own_prefill_s: predicted seconds of own prefill, by slot.
        tight_s: the tightest TTFT target to be spared for.
    """
    room_s = ROOM_FOR_TIGHT * tight_s
    kept = [slot for slot in slots if ttft_s[slot] <= room_s or ttft_s[slot] - own_prefill_s[slot] > room_s]
    return kept or slots


def wait_s(
    slots: Sequence[int],
    ttft_s: Sequence[float],
    ahead_s: Sequence[float],
    tpot_s: Sequence[float],
    decodes: Sequence[int],
    output_tokens: float,
    targets: Targets,
) -> float:
    """Return seconds until some replica would keep the targets if nothing else came; infinite if waiting is no help.

    A queue drains by a second per second, down to what the request needs on an idle replica. Running answers have half
    of their tokens to come on average, so the share of them that is too many ends in that share of a whole answer's
    time.

    Args:
        slots: the candidates.
        ttft_s: predicted seconds to the first token, by slot.
        ahead_s: predicted seconds of prefill in the queue, by slot.
        tpot_s: predicted seconds per output token, by slot; not read without a target.
        decodes: running decodes, by slot.
        output_tokens: expected tokens of an answer.
        targets: what the request asks for.
    """
    least_s = inf
    for slot in slots:
        first_s = 0.0
        if targets.ttft_s is not None:
            first_s = max(ttft_s[slot] - targets.ttft_s, 0.0)
            if first_s > ahead_s[slot]:
                continue
        token_s = 0.0
        if targets.tpot_s is not None and tpot_s[slot] > targets.tpot_s:
            if not decodes[slot]:
                continue
            token_s = (1.0 - targets.tpot_s / tpot_s[slot]) * output_tokens * tpot_s[slot]
        least_s = min(least_s, max(first_s, token_s))
    return least_s
