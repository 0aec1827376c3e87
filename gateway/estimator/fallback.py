"""Whether predictions of the time to first token (TTFT) are good enough to route by, per pool of replicas.

Rule: a prediction is off by max(predicted, observed) / min(predicted, observed) - 1, so that a fifth of what was
observed is as bad as five times that. (The absolute percentage error of the former is at most 100 %, however wrong it
is.) What is off by less than `NOTICED_S` is not wrong: a short prompt that has to share its step with a long one takes
four times as long as predicted, and no replica is worse for it. Predicted waits for KV memory are not judged.

The pool falls back when more than half of its last `WINDOW` predictions are off by more than the limit, `samples` of
them at least, and recovers when three quarters of `WINDOW` predictions are off by less than `RECOVERY` of the limit.
Half would not do for that: where replicas are now fast and now slow, predictions are right half of the time. What was
observed before a change does not count: the next judgement is on what has been predicted since.

Predictions go on being made and compared while nobody routes by them. One replica that is mispredicted among many does
not turn a pool around: its own deviation from its class is learned, and what latency targets hold of it widened.
"""

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

WINDOW = 64
"""Predictions that are judged together."""

RECOVERY = 0.6
"""Share of the limit that three quarters of the errors must come down to."""

NOTICED_S = 0.1
"""Seconds by which a prediction may be off in any case."""

_LEAST_S = 1e-4


@dataclass(frozen=True, slots=True)
class FallbackRules:
    """When predictions are no longer followed.

    Attributes:
        error: median error from which they are not: 2.0 is off by a factor of three. None to follow them always.
        samples: predictions that must have been compared before.
    """

    error: float | None = 2.0
    samples: int = 32


class _Pool:
    """One pool's predictions of late.

    Attributes:
        fallen: they are not followed.
        decisions: made without them.
    """

    __slots__ = ("_errors", "_off", "_off_still", "decisions", "fallen")

    def __init__(self) -> None:
        self.fallen = False
        self.decisions = 0
        self.clear()

    def clear(self) -> None:
        """Forget what was compared."""
        self._errors: deque[float] = deque()
        self._off = self._off_still = 0

    def add(self, error: float, limit: float, samples: int) -> bool:
        """Take in one error; say whether it is time for a change."""
        errors = self._errors
        errors.append(error)
        self._off += error > limit
        self._off_still += error > RECOVERY * limit
        if len(errors) > WINDOW:
            first = errors.popleft()
            self._off -= first > limit
            self._off_still -= first > RECOVERY * limit
        if self.fallen:
            return len(errors) == WINDOW and 4 * self._off_still <= WINDOW
        return len(errors) >= samples and 2 * self._off > len(errors)

    def median(self) -> float | None:
        """Return the median error; None before there are any."""
        return sorted(self._errors)[len(self._errors) // 2] if self._errors else None


class PredictionFallback:
    """Follows how good predictions are, per pool.

    Attributes:
        rules: when they are no longer followed.
        fallen: pools whose predictions are not, and by what these were off, in the median, when that began.
    """

    def __init__(self, rules: FallbackRules = FallbackRules()) -> None:
        self.rules = rules
        self.fallen: dict[str, float] = {}
        self._pools: dict[str, _Pool] = {}

    def use(self, rules: FallbackRules) -> None:
        """Change the rules; what was observed under others does not count."""
        if rules != self.rules:
            self.rules = rules
            for pool in self._pools.values():
                pool.clear()
                pool.fallen = False
            self.fallen.clear()

    def observe(self, pool: str, predicted_s: float, observed_s: float) -> None:
        """Compare a prediction with what came of it.

        Args:
            pool: base model.
            predicted_s: predicted seconds to the first token.
            observed_s: observed ones.
        """
        limit = self.rules.error
        if limit is None:
            return
        state = self._pools.get(pool)
        if state is None:
            state = self._pools[pool] = _Pool()
        error = 0.0
        if abs(predicted_s - observed_s) > NOTICED_S:
            error = max(predicted_s, observed_s) / max(min(predicted_s, observed_s), _LEAST_S) - 1.0
        if state.add(error, limit, min(self.rules.samples, WINDOW)):
            self._turn(pool, state)

    def decided(self, pool: str) -> None:
        """A request has been routed without predictions."""
        self._pools[pool].decisions += 1

    def pools(self) -> Iterable[tuple[str, bool, int]]:
        """Return all pools, whether they have fallen back, and how many requests were routed without predictions."""
        return [(name, state.fallen, state.decisions) for name, state in self._pools.items()]

    def _turn(self, pool: str, state: _Pool) -> None:
        median = state.median() or 0.0
        state.fallen = not state.fallen
        state.clear()
        if state.fallen:
            self.fallen[pool] = median
            logger.warning(
                "TTFT predictions for %s are off by %.0f %% in the median: it is routed by load until they are better",
                pool or "all models",
                100.0 * median,
            )
        else:
            del self.fallen[pool]
            logger.info(
                "TTFT predictions for %s are off by %.0f %% in the median: they are followed again",
                pool or "all models",
                100.0 * median,
            )
