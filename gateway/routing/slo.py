"""Per-request latency targets: who asks for what, and which candidates the policy gets to see.

Theory of operation
- `SloRules` is what the configuration says. It reads the two headers and fills in defaults.
- `SloFilter.narrow` runs between the columns and the policy, for requests with targets only. The rule itself is
  `policies.slo`; here is what it needs to know: predictions, how far they are to be believed, which answers are running
  under targets of their own, and how tight targets have been lately.
- TPOT is predicted as the decode step with everything in flight that will still run by then, and this request; times
  what answers have taken longer than that lately, which is mostly the prefills that come while they decode.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush
from math import ceil, inf

from gateway.estimator.predictor import Predictor, ReplicaClass
from gateway.estimator.roofline import StepCost
from gateway.replicas.load import LoadLedger
from gateway.routing.columns import Columns
from gateway.routing.refusals import InvalidTarget, TargetsOutOfReach
from policies.slo import LOOSE, Targets, sort_out, sparing, wait_s, without_harm
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


class DelayRoom:
    """How long running answers with a TPOT target can still be held up by the prefills of others, by slot.

    Each slot has a clock that counts the seconds of prefill sent there. An answer can take so many seconds of delay,
    so it has a limit on that clock; the least limit counts. Limits of answers that have ended are dropped when they
    come to the top.

    Attributes:
        limits: by slot, a heap of limits and what they are of; without an entry where no answer has a target.
    """

    __slots__ = ("_clocks_s", "_ended", "_next", "limits")

    def __init__(self) -> None:
        self._clocks_s: dict[int, float] = {}
        self.limits: dict[int, list[tuple[float, int]]] = {}
        self._ended: set[int] = set()
        self._next = 0

    def begin(self, slot: int, slack_s: float) -> int:
        """An answer that can take so much delay is sent to a slot; return what ends it."""
        self._next += 1
        clock_s = self._clocks_s.setdefault(slot, 0.0)
        heappush(self.limits.setdefault(slot, []), (clock_s + slack_s, self._next))
        return self._next

    def end(self, slot: int, number: int) -> None:
        """It has ended."""
        limits = self.limits.get(slot)
        if limits is None:
            return
        self._ended.add(number)
        self._drop_ended(slot, limits)
        if len(self._ended) > 64 and 2 * len(self._ended) > sum(map(len, self.limits.values())):
            self._sweep()

    def held_up(self, slot: int, seconds: float) -> None:
        """A prefill is sent to a slot."""
        if slot in self._clocks_s:
            self._clocks_s[slot] += seconds

    def room_s(self, slot: int) -> float:
        """Seconds until the first running answer would miss its target; infinite if none has one."""
        limits = self.limits.get(slot)
        return limits[0][0] - self._clocks_s[slot] if limits else inf

    def forget(self, slot: int) -> None:
        """The slot's replica is gone."""
        for _, number in self.limits.pop(slot, ()):
            self._ended.discard(number)
        self._clocks_s.pop(slot, None)

    def _drop_ended(self, slot: int, limits: list[tuple[float, int]]) -> None:
        ended = self._ended
        while limits and limits[0][1] in ended:
            ended.discard(heappop(limits)[1])
        if not limits:
            del self.limits[slot]
            del self._clocks_s[slot]

    def _sweep(self) -> None:
        """Drop what has ended below the top as well, so that it does not add up."""
        for slot, limits in list(self.limits.items()):
            limits[:] = [limit for limit in limits if limit[1] not in self._ended]
            heapify(limits)
            self._drop_ended(slot, limits)
        self._ended.clear()


class SloFilter:
    """Narrows the candidates of requests with targets, and keeps what that needs to know.

    Attributes:
        rules: the configuration in force.
        delay_room: running answers with TPOT targets.
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
        self.delay_room = DelayRoom()
        self._tightest = Tightest()
        # All by slot.
        self._classes: list[ReplicaClass] = []
        self._costs: list[StepCost] = []
        self._tpot_s: list[float] = []
        self._room_s: list[float] = []
        self._stretch: list[float] = []
        self._doubt: list[float] = []
        self._doubt_at: list[int] = []
        self.use(SloRules())

    def use(self, rules: SloRules) -> None:
        """Put other rules in force; requests already read keep their targets."""
        self.rules = rules
        self.has_defaults = rules.has_defaults

    def configure(self, slot: int, replica_class: ReplicaClass) -> None:
        """Say what the replica in a slot is; forget what the slot's earlier replica did."""
        while len(self._costs) <= slot:
            self._classes.append(replica_class)
            self._costs.append(replica_class.cost())
            self._tpot_s.append(0.0)
            self._room_s.append(inf)
            self._stretch.append(1.0)
            self._doubt.append(1.0)
            self._doubt_at.append(-1)
        self._classes[slot] = replica_class
        self._costs[slot] = replica_class.cost()
        self._stretch[slot] = 1.0
        self._doubt_at[slot] = -1

    def forget(self, slot: int) -> None:
        """The slot's replica has left or restarted."""
        self.delay_room.forget(slot)

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
                self._tpot_s[slot] = self.predicted_tpot_s(slot, request)
        left_s = targets.ttft_left_s(now_s)
        keep, perhaps = sort_out(slots, ttft_s, self._tpot_s, self._doubt, left_s, tpot_target_s)
        if targets.ttft_s is not None and targets.ttft_s >= min(map(own_s.__getitem__, slots)):
            tight_s = self._tightest.see(pool, targets.ttft_s, now_s)
        else:
            # What no replica could keep even if it were idle is nothing to be spared for.
            tight_s = inf
        if not keep:
            if perhaps:
                candidates.slots = perhaps
                return Outlook.POSSIBLE
            if targets.refuse:
                raise TargetsOutOfReach(self._retry_after_s(slots, targets, request))
            return Outlook.BEST_EFFORT
        kept: Sequence[int] = keep
        if len(keep) > 1:
            if self.delay_room.limits:
                for slot in keep:
                    self._room_s[slot] = self.delay_room.room_s(slot)
                kept = without_harm(kept, own_s, self._room_s)
            if targets.ttft_s is not None and targets.ttft_s >= LOOSE * tight_s:
                kept = sparing(kept, ttft_s, own_s, tight_s)
        candidates.slots = kept
        return Outlook.EXPECTED

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
        elif outlook is Outlook.POSSIBLE:
            did = f"of {seen} of {candidates} perhaps within the targets, predictions being unsure"
        else:
            did = f"best effort: none of {candidates} within the targets"
        choice.reason = f"{choice.reason}; {did}"
        terms = dict(choice.terms)
        if targets.ttft_s is not None:
            terms["ttft_left_s"] = targets.ttft_left_s(now_s)
        if targets.tpot_s is not None:
            terms["tpot_s"] = self._tpot_s[choice.slot]
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

    def begin(self, slot: int, targets: Targets, request: Request) -> tuple[float, int] | None:
        """A request goes to a slot: return its predicted TPOT in seconds and what ends it; None without a target."""
        if targets.tpot_s is None:
            return None
        tpot_s = self._tpot_s[slot]
        slack_s = (targets.tpot_s - tpot_s) * max(request.expected_output_tokens, 1.0)
        # One that misses its target anyway is nothing to be considerate of.
        return tpot_s, self.delay_room.begin(slot, slack_s) if slack_s >= 0.0 else 0

    def end(self, slot: int, begun: tuple[float, int], observed_tpot_s: float | None) -> None:
        """It has ended.

        Args:
            slot: where it was.
            begun: what `begin` returned.
            observed_tpot_s: its seconds per output token; None if they cannot be told.
        """
        predicted_s, number = begun
        if number:
            self.delay_room.end(slot, number)
        if observed_tpot_s is not None and predicted_s > 0.0:
            stretch = self._stretch[slot]
            seen = stretch * observed_tpot_s / predicted_s
            stretch += _STRETCH_STEP * (min(max(seen, _LEAST_STRETCH), _MOST_STRETCH) - stretch)
            self._stretch[slot] = stretch

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
            self._tpot_s,
            self._ledger.decodes,
            request.expected_output_tokens,
            targets,
        )
        return max(ceil(min(seconds, self.rules.max_retry_after_s)), 1)
