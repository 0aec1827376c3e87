"""Per-request latency targets: who asks for what, and which candidates the policy gets to see.

Theory of operation
- `SloRules` is what the configuration says. It reads the two headers and fills in defaults.
- `SloFilter.narrow` runs between the columns and the policy, for requests with targets only. The rule itself is
  `policies.slo`; here is what it needs to know: predictions, how far they are to be believed, and how tight targets
  have been lately.
- A prediction that has often been wrong is a range, not a number: from `prediction / doubt` to `prediction x doubt`. A
  replica keeps a target for certain if all of the range does, and might if some of it does. Those that might come after
  those that do for certain, and as long as there are any, nothing is refused.
- TPOT is predicted as the decode step with everything in flight that will still run by then, and this request; times
  what answers have taken longer than that lately, which is mostly the prefills that come while they decode.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, inf

from gateway.estimator.predictor import Predictor, ReplicaClass
from gateway.estimator.roofline import StepCost
from gateway.replicas.load import LoadLedger
from gateway.routing.columns import Columns
from gateway.routing.refusals import InvalidTarget, TargetsOutOfReach
from policies.slo import LOOSE, Targets, keeping, sparing, wait_s
from policies.types import Choice, Request

TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"

# Up to 2.7 hours, to the microsecond. No sign, no exponent, no white space inside.
_MILLISECONDS = re.compile(rb"\d{1,7}(?:\.\d{1,3})?")

TIGHTEST_WITHIN_S = 60.0
"""Targets this old are no longer spared for; at least half as long they are."""

DOUBTED_FROM = 0.5
"""Median absolute relative error of the TTFT predictions from which they are a range instead of a number."""
_DOUBT_SAMPLES = 16
_DOUBT_EVERY = 16
_MOST_DOUBT = 20.0
_NOTHING_KNOWN = 1e9
"""Doubt under which no prediction says anything."""

_STRETCH_STEP = 0.05
_LEAST_STRETCH, _MOST_STRETCH = 0.5, 4.0


class Outlook(StrEnum):
    """What the predictions say of a request's targets at the replica it goes to."""

    EXPECTED = "expected"
    """They will be kept."""
    TTFT_ONLY = "ttft-only"
    """The TTFT will be kept. The TPOT would be elsewhere, but only by computing what is cached here."""
    POSSIBLE = "possible"
    """Predictions there are too unsure to tell."""
    BEST_EFFORT = "best-effort"
    """No replica keeps them."""


@dataclass(frozen=True, slots=True)
class ModelTargets:
    """Defaults of one model, or of all.

    Attributes:
        ttft_s, tpot_s: seconds; None for no target.
        refuse: refuse what no replica can serve within its targets.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    refuse: bool = False


@dataclass(frozen=True, slots=True)
class SloRules:
    """What the configuration says of targets.

    Attributes:
        overall: defaults for models that are not listed.
        models: defaults by name of the model or adapter.
        max_retry_after_s: longest time a refused client is told to wait.
    """

    overall: ModelTargets = ModelTargets()
    models: Mapping[str, ModelTargets] = field(default_factory=dict)
    max_retry_after_s: int = 60

    @property
    def has_defaults(self) -> bool:
        """Some requests have targets without asking for them."""
        return any(each.ttft_s is not None or each.tpot_s is not None for each in (self.overall, *self.models.values()))

    def targets(
        self, model: str | None, pool: str, asked: tuple[bytes | None, bytes | None] | None, received_s: float
    ) -> Targets | None:
        """Return the targets of a request; None if it has none.

        Args:
            model: the name it routes by.
            pool: the base model of that.
            asked: values of the TTFT and the TPOT header, each None if absent; None if both are.
            received_s: when it came.

        Raises:
            InvalidTarget: a header's value is no target.
        """
        rules = self.models.get(model) if model is not None else None
        if rules is None:
            rules = self.models.get(pool, self.overall)
        ttft_s, tpot_s = rules.ttft_s, rules.tpot_s
        if asked is not None:
            if asked[0] is not None:
                ttft_s = parse_target_s(TTFT_HEADER, asked[0])
            if asked[1] is not None:
                tpot_s = parse_target_s(TPOT_HEADER, asked[1])
        if ttft_s is None and tpot_s is None:
            return None
        return Targets(ttft_s, tpot_s, received_s, rules.refuse)


def parse_target_s(header: str, value: bytes) -> float:
    """Return the seconds that a header's milliseconds are.

    Raises:
        InvalidTarget: not a positive decimal number, too large, or the header came twice.
    """
    if _MILLISECONDS.fullmatch(value.strip(b" \t")) is None or not (milliseconds := float(value)):
        raise InvalidTarget(header)
    return milliseconds / 1000.0


class Tightest:
    """The tightest target seen lately, per pool. Two windows, so that forgetting costs nothing."""

    __slots__ = ("_pools",)

    def __init__(self) -> None:
        self._pools: dict[str, tuple[float, float, float]] = {}

    def copy(self) -> "Tightest":
        """Return another that has seen the same."""
        other = Tightest()
        other._pools.update(self._pools)
        return other

    def see(self, pool: str, target_s: float, now_s: float) -> float:
        """Take in a target; return the tightest of late, this one included."""
        began_s, now_least_s, before_s = self._pools.get(pool, (now_s, inf, inf))
        passed_s = now_s - began_s
        if passed_s >= TIGHTEST_WITHIN_S / 2:
            before_s = now_least_s if passed_s < TIGHTEST_WITHIN_S else inf
            began_s, now_least_s = now_s, inf
        now_least_s = min(now_least_s, target_s)
        self._pools[pool] = (began_s, now_least_s, before_s)
        return min(now_least_s, before_s)


SloState = tuple[Tightest, list[float], list[int]]


class SloFilter:
    """Narrows the candidates of requests with targets, and keeps what that needs to know.

    Attributes:
        rules: the configuration in force.
        has_defaults: some requests have targets without asking for them.
        tpot_s: per-request column of predicted seconds per output token, of requests with a TPOT target.
    """

    def __init__(self, ledger: LoadLedger, predictor: Predictor, columns: Columns) -> None:
        """Start without rules.

        Args:
            ledger: outstanding work.
            predictor: whose predictions the columns hold, and how good they have been.
            columns: the candidate columns.
        """
        self._ledger = ledger
        self._predictor = predictor
        self._columns = columns
        self._tightest = Tightest()
        # All by slot.
        self._classes: list[ReplicaClass] = []
        self._costs: list[StepCost] = []
        self.tpot_s: list[float] = []
        self._ttft_limits_s: list[float] = []
        self._tpot_limits_s: list[float] = []
        self._stretch: list[float] = []
        self._doubt: list[float] = []
        self._doubt_at: list[int] = []
        self.use(SloRules())

    def state(self) -> SloState:
        """Return what `narrow` changes, to put it back with `restore`."""
        return self._tightest.copy(), list(self._doubt), list(self._doubt_at)

    def restore(self, state: SloState) -> None:
        """Be as if `narrow` had not been called since `state` was."""
        self._tightest, self._doubt, self._doubt_at = state

    def use(self, rules: SloRules) -> None:
        """Put other rules in force; requests already read keep their targets."""
        self.rules = rules
        self.has_defaults = rules.has_defaults

    def configure(self, slot: int, replica_class: ReplicaClass) -> None:
        """Say what the replica in a slot is; forget what the slot's earlier replica did."""
        while len(self._costs) <= slot:
            self._classes.append(replica_class)
            self._costs.append(replica_class.cost())
            self.tpot_s.append(0.0)
            self._ttft_limits_s.append(inf)
            self._tpot_limits_s.append(inf)
            self._stretch.append(1.0)
            self._doubt.append(1.0)
            self._doubt_at.append(-1)
        self._classes[slot] = replica_class
        self._costs[slot] = replica_class.cost()
        self._stretch[slot] = 1.0
        self._doubt_at[slot] = -1

    def narrow(self, targets: Targets, pool: str, request: Request, now_s: float) -> Outlook:
        """Leave only those candidates of the filled columns among which the policy should choose.

        Args:
            targets: what the request asks for.
            pool: base model.
            request: the request.
            now_s: monotonic seconds.

        Raises:
            TargetsOutOfReach: none of them keeps the targets, and the request is to be refused then.
        """
        columns = self._columns
        candidates = columns.candidates
        slots = candidates.slots
        for slot in slots:
            columns.predict_chosen(slot, request.prompt_tokens, now_s)
            if self._doubt_at[slot] + _DOUBT_EVERY <= self._predictor.errors[slot].count or self._doubt_at[slot] < 0:
                self._update_doubt(slot)
        ttft_s, own_s = columns.predicted_ttft_s, columns.own_prefill_s
        tpot_target_s = inf
        if targets.tpot_s is not None:
            tpot_target_s = targets.tpot_s
            for slot in slots:
                self.tpot_s[slot] = self.predicted_tpot_s(slot, request)
        left_s = targets.ttft_left_s(now_s)
        # What no replica could keep even if it were idle is nothing to be spared for.
        attainable = targets.ttft_s is not None and min(map(own_s.__getitem__, slots)) <= targets.ttft_s
        tight_s = self._tightest.see(pool, targets.ttft_s if attainable and targets.ttft_s is not None else inf, now_s)
        kept = slots
        outlook = Outlook.BEST_EFFORT
        for certain in (True, False):
            both, worth = self._keeping(slots, left_s, tpot_target_s, certain=certain)
            if both:
                kept = worth
                keeps = set(worth).issubset(both)
                outlook = (Outlook.EXPECTED if keeps else Outlook.TTFT_ONLY) if certain else Outlook.POSSIBLE
                break
        else:
            if targets.refuse:
                raise TargetsOutOfReach(self._retry_after_s(slots, targets, request))
        if len(kept) > 1 and (outlook is Outlook.BEST_EFFORT or left_s >= LOOSE * tight_s):
            kept = sparing(kept, ttft_s, own_s, tight_s)
        candidates.slots = kept
        return outlook

    def _keeping(
        self, slots: Sequence[int], left_s: float, tpot_target_s: float, *, certain: bool
    ) -> tuple[list[int], list[int]]:
        """Ask which slots keep the targets for certain, or else which might."""
        for slot in slots:
            doubt = self._doubt[slot]
            factor = 1.0 / doubt if certain else doubt
            self._ttft_limits_s[slot] = left_s * factor
            self._tpot_limits_s[slot] = tpot_target_s * factor
        columns = self._columns
        return keeping(
            slots,
            columns.predicted_ttft_s,
            self.tpot_s,
            columns.own_prefill_s,
            self._ttft_limits_s,
            self._tpot_limits_s,
        )

    def explain(self, choice: Choice, outlook: Outlook, candidates: int, targets: Targets, now_s: float) -> None:
        """Add to a choice's reason and terms what the filter did.

        Args:
            choice: the policy's.
            outlook: what `narrow` returned.
            candidates: how many there were.
            targets: what the request asks for.
            now_s: monotonic seconds.
        """
        seen = len(self._columns.candidates.slots)
        if outlook is Outlook.EXPECTED:
            did = f"of {seen} of {candidates} within the targets"
        elif outlook is Outlook.TTFT_ONLY:
            did = f"of {seen} of {candidates} within the TTFT target; TPOT only with more prefill"
        elif outlook is Outlook.POSSIBLE:
            did = f"of {seen} of {candidates} perhaps within the targets, predictions being unsure"
        else:
            did = f"best effort of {seen}: none of {candidates} within the targets"
        choice.reason = f"{choice.reason}; {did}"
        terms = dict(choice.terms)
        if targets.ttft_s is not None:
            terms["ttft_left_s"] = targets.ttft_left_s(now_s)
        if targets.tpot_s is not None:
            terms["tpot_s"] = self.tpot_s[choice.slot]
        choice.terms = terms

    def predicted_tpot_s(self, slot: int, request: Request) -> float:
        """Return predicted seconds per output token of a request on a slot for which there are predictions.

        Of the answers running now, those will have ended by the first token that had less to go than that takes; the
        requests before this one will be decoding by then.
        """
        ledger, columns = self._ledger, self._columns
        candidates = columns.candidates
        running, context_tokens = ledger.decodes[slot], ledger.context_tokens[slot]
        waiting = ledger.in_flight[slot] - running
        half_output = 0.5 * request.expected_output_tokens
        step_s = candidates.decode_step_s[slot]
        answer_s = 2.0 * half_output * step_s
        staying = max(1.0 - columns.predicted_ttft_s[slot] / answer_s, 0.0) if answer_s > 0.0 else 0.0
        waiting_tokens = max(ledger.kv_tokens[slot] - context_tokens - half_output * (running + waiting), 0.0)
        cost = self._costs[slot]
        now_s = cost.decode_step_s(max(running, 1), context_tokens)
        then_s = cost.decode_step_s(
            round(running * staying) + waiting + 1,
            context_tokens * staying + waiting_tokens + request.prompt_tokens + half_output,
        )
        # The column holds what was learned of the engine's speed; the roofline only tells how the step will grow.
        return self._stretch[slot] * step_s * (then_s / now_s)

    def ended(self, slot: int, predicted_tpot_s: float, observed_tpot_s: float) -> None:
        """Learn from an answer how much longer tokens take than a decode step.

        Args:
            slot: where it was made.
            predicted_tpot_s: seconds per output token that it was predicted.
            observed_tpot_s: seconds per output token that it took.
        """
        if predicted_tpot_s > 0.0:
            stretch = self._stretch[slot]
            seen = min(max(stretch * observed_tpot_s / predicted_tpot_s, _LEAST_STRETCH), _MOST_STRETCH)
            self._stretch[slot] = stretch + _STRETCH_STEP * (seen - stretch)

    def _update_doubt(self, slot: int) -> None:
        predictor = self._predictor
        errors = predictor.errors[slot]
        self._doubt_at[slot] = errors.count
        replica_class = self._classes[slot]
        if errors.count < _DOUBT_SAMPLES:
            errors = predictor.classes[replica_class].errors
        error = errors.absolute_quantile(0.5)
        if error is None or errors.count < _DOUBT_SAMPLES:
            # From known hardware follows a time; from unknown hardware, nothing yet.
            self._doubt[slot] = 1.0 if replica_class.known else _NOTHING_KNOWN
        elif error < DOUBTED_FROM:
            self._doubt[slot] = 1.0
        elif (errors.bias() or 0.0) > 0.0:
            self._doubt[slot] = min(1.0 + error, _MOST_DOUBT)
        else:
            self._doubt[slot] = min(1.0 / max(1.0 - error, 1e-3), _MOST_DOUBT)

    def _retry_after_s(self, slots: Sequence[int], targets: Targets, request: Request) -> int:
        columns = self._columns
        seconds = wait_s(
            slots,
            columns.predicted_ttft_s,
            columns.candidates.prefill_s,
            self.tpot_s,
            self._ledger.decodes,
            request.expected_output_tokens,
            targets,
        )
        return max(ceil(min(seconds, self.rules.max_retry_after_s)), 1)
