"""Prefill on one replica, decode on another: whether, where, and what that holds.

Theory of operation
- The policy has chosen where a request would be served whole. `HandOffs.consider` compares that with every pair of a
  prefill replica p and a candidate d, in seconds of first token, plus the price of the prefill work, plus the price of
  the delay it puts on running answers. The prices are the same under all policies (`Prices`):

      whole = TTFT(d) + prefill_price x own prefill(d) + decode_price x delay(d)
      split = max(queue(p) + prefill on p of what p lacks + transfer of what d lacks, queue(d)) + a step of d
              + 0.75 x prefill_price x own prefill(p)

  A prefill on p delays nobody's tokens: p has no running answers. The step of d computes the last token of the prompt,
  which an engine always computes itself.
- A pair's cost grows with p's part whatever d is, so the best p is found first and then the best d for it, one pass
  over each; only among replicas that may be paired at all, as `pairing` tells. A request that is served whole for want
  of such a pair says so in its reason.
- A `HandOff` is what the first of the two requests holds on p: its place in the ledger, its promise in the prefix map.
  It gives both back exactly once. What the second holds on d is the assignment's, as for any request.
- Prefill replicas that keep to their role stand idle where hand-offs do not pay: short prompts, a slow link. So they
  serve whole requests as well (`at_rest`) while none has been worth it for a time, and while those that are save less,
  spread over all requests, than all requests lose without these replicas.
- Links are believed as configured until hand-offs have been seen; then their observed times correct the prediction.

Sources: Y. Zhong et al., "DistServe", OSDI 2024; P. Patel et al., "Splitwise", ISCA 2024; R. Qin et al., "Mooncake",
FAST 2025, Algorithm 1 (the transfer term).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.estimator.model import model
from gateway.estimator.predictor import Predictor
from gateway.estimator.transfer import LINKS
from gateway.prefixes.feedback import Promise
from gateway.replicas.breaker import Outcome as AttemptOutcome
from gateway.replicas.ejection import Attempt, Ejector
from gateway.replicas.load import LoadLedger, Ticket
from gateway.replicas.registry import Fleet, Replica
from gateway.routing.pairing import Difference, Signature, difference, same_version, signature
from gateway.routing.query import Query

logger = logging.getLogger(__name__)

Connector = Literal["nixl", "nixl_push", "shared_storage", "none"]
DecisionPolicy = Literal["predicted", "threshold", "always", "never"]

NEUTRAL_KV_BYTES_PER_TOKEN = 131_072.0
"""KV of one token of an 8B model of the Llama 3 family, 16 bit: assumed where no model shape is given."""
DEFAULT_CAPACITY_TOKENS = 200_000
"""KV memory of a replica that has not told; as the router assumes."""
NOTICED_STEPS = 10.0
"""Decode steps that the uncached part of a prompt must take to be prefilled elsewhere: what is shorter disturbs nobody,
and a second request has costs of its own that no prediction sees."""
LONG = 0.5
"""Share of an engine's step from which a prompt holds up the others."""
MEMORY_PRICE = 10.0
"""As `memory_price` of policies/predicted_ttft.py."""
ELSEWHERE = 0.85
"""Of the price of prefill work, what it costs on a prefill replica: only long prompts wait for it there."""
REST_AFTER_S = 30.0
"""Seconds without a hand-off after which prefill replicas serve whole requests: longer than most answers run, so that
roles do not change with every lull."""
WORTH_A_ROLE_S = 0.002
"""What hand-offs must save of the mean request for prefill replicas to keep to their role. In the replay of short chat
on eight replicas, two fewer that answer cost each request 0.4 ms of TTFT and 1 % of its time per token; with 1 ms a few
long prompts in a row made them keep to it for a while (seed 3), at 3 % of the mean TTFT."""
_REMEMBERED = 200
"""Requests over which that mean is taken."""
UNPAIRED_AFTER_FAILURE_S = 10.0
"""How long a prefill replica is left alone after a decode replica could not get what it held."""
_EMPTIER = 1e-3
_MOST_TOLD = 10_000
_LEARNING_RATE = 0.1
_MOST_CORRECTION = 100.0


_REASONS: Mapping[DecisionPolicy, str] = {
    "predicted": "prefill elsewhere costs less",
    "threshold": "more uncached tokens than the threshold",
    "always": "prefill always elsewhere",
    "never": "",
}


@dataclass(frozen=True, slots=True)
class HandOffSettings:
    """How one model's prompts move; see `gateway.config.ModelDisaggregation`."""

    connector: Connector = "nixl"
    policy: DecisionPolicy = "predicted"
    threshold_tokens: int = 4096
    link_bytes_per_s: float = LINKS["100g"]
    link_latency_s: float = 0.002
    kv_lease_s: float = 30.0
    answer_whole: bool = True

    @property
    def active(self) -> bool:
        """Hand-offs may happen at all."""
        return self.connector != "none" and self.policy != "never"


@dataclass(frozen=True, slots=True)
class HandOffRules:
    """The settings of all models."""

    common: HandOffSettings = field(default_factory=HandOffSettings)
    models: Mapping[str, HandOffSettings] = field(default_factory=dict)
    """Of models that have their own, by base model."""

    def of(self, pool: str) -> HandOffSettings:
        """Return the settings of a base model."""
        return self.models.get(pool, self.common)


@dataclass(slots=True)
class Plan:
    """The best pair for one request, and what was weighed.

    Attributes:
        prefill_slot, decode_slot: the pair.
        prefill_s: predicted seconds until p has computed the prompt.
        own_prefill_s: of those, this prompt's own.
        transfer_s: predicted seconds of the hand-off.
        transfer_bytes: KV that moves.
        ttft_s: predicted seconds from now to the first token.
        cost_s, whole_cost_s: what was compared.
        matched_tokens: prompt tokens that p holds.
        lacking_tokens: prompt tokens that d does not.
        prefill_tokens: prompt tokens that p computes.
        reason: why, in words.
        taken: the prompt is handed over. If not, it would be if prefill replicas kept to their role.
    """

    prefill_slot: int
    decode_slot: int
    prefill_s: float
    own_prefill_s: float
    transfer_s: float
    transfer_bytes: float
    ttft_s: float
    cost_s: float
    whole_cost_s: float
    matched_tokens: float
    lacking_tokens: float
    prefill_tokens: float
    reason: str
    taken: bool = True

    @property
    def saved_s(self) -> float:
        """What it costs less than the request served whole."""
        return max(self.whole_cost_s - self.cost_s, 0.0)

    def terms(self) -> dict[str, float]:
        """Return the numbers behind the decision."""
        return {
            "cost_s": self.cost_s,
            "whole_cost_s": self.whole_cost_s,
            "ttft_s": self.ttft_s,
            "prefill_s": self.prefill_s,
            "own_prefill_s": self.own_prefill_s,
            "transfer_s": self.transfer_s,
            "transfer_bytes": self.transfer_bytes,
            "matched_tokens": self.matched_tokens,
            "lacking_tokens": self.lacking_tokens,
        }


@dataclass(slots=True)
class Prices:
    """Seconds of cost per second of own prefill, and per second of delay summed over running answers.

    The latter is more than that of predicted_ttft (`decode_price`): keeping prompts away from answers is what hand-offs
    are for. In the replay of a fleet whose prefill replicas cannot compute all long prompts (`mixed-lengths` as in
    docs/operations.md, 22 requests per second, seeds 1 to 3), the p99 between the tokens of chats was 19, 57 and 18 ms
    with 0.02, 17 with 0.04 and 0.05, 16 with 0.1; the mean TTFT was 5, 8, 10 and 16 to 20 % above that of mixed
    replicas.
    """

    prefill: float = 1.0
    decode: float = 0.04

    @property
    def prefill_elsewhere(self) -> float:
        """Price of a second of a prefill replica: less than of others, because only long prompts go there."""
        return ELSEWHERE * self.prefill


class HandOff:
    """One prompt's place on a prefill replica.

    Attributes:
        replica, slot: where.
        settings: the model's.
        transfer_bytes, transfer_s: predicted.
        prefill_s: predicted seconds until the prompt is computed.
        returned_s: when the prefill replica answered; None before.
        observed_s: seconds of the first request; None before.
        fetching_s: when the second request was sent; None before.
    """

    __slots__ = (
        "_attempt",
        "_ejector",
        "_fleet",
        "_predictor",
        "_promise",
        "_rest_s",
        "_ticket",
        "_work_s",
        "assigned_s",
        "fetching_s",
        "observed_s",
        "over",
        "prefill_s",
        "replica",
        "returned_s",
        "settings",
        "slot",
        "transfer_bytes",
        "transfer_s",
    )

    def __init__(
        self,
        fleet: Fleet,
        ejector: Ejector,
        predictor: Predictor,
        replica: Replica,
        plan: Plan,
        settings: HandOffSettings,
        ticket: Ticket,
        promise: Promise | None,
        attempt: Attempt,
        now_s: float,
    ) -> None:
        self._fleet = fleet
        self._ejector = ejector
        self._predictor = predictor
        self._ticket = ticket
        self._promise = promise
        self._attempt = attempt
        self.replica = replica
        self.slot = plan.prefill_slot
        self.settings = settings
        self.prefill_s = plan.prefill_s
        self.transfer_s = plan.transfer_s
        self.transfer_bytes = plan.transfer_bytes
        self._rest_s = max(plan.ttft_s - plan.prefill_s - plan.transfer_s, 0.0)
        self._work_s = predictor.work_s(plan.prefill_slot, plan.prefill_s)
        self.assigned_s = now_s
        self.returned_s: float | None = None
        self.observed_s: float | None = None
        self.fetching_s: float | None = None
        self.over = False

    def returned(self, now_s: float, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        """The prefill replica has answered: the prompt is computed, and its KV waits to be fetched."""
        if self.over:
            return
        self.returned_s = now_s
        self.observed_s = now_s - self.assigned_s
        self._ticket.first_token(now_s)
        self._ejector.answered(self._attempt)
        if self._fleet.has(self.replica):
            self._predictor.observe(self.slot, self._work_s, self.prefill_s, self.observed_s)
        self._end(now_s, AttemptOutcome.OK, prompt_tokens, cached_tokens, kept=True)

    def ended(self, now_s: float, outcome: AttemptOutcome) -> None:
        """The first request has failed or been given up; no effect once it has returned."""
        if not self.over:
            self._end(now_s, outcome, None, None, kept=False)

    def expired(self, now_s: float) -> bool:
        """Say whether the KV may be gone by the time a request that is sent now reaches the decode engine."""
        # A tenth of the lease is kept for the way and for the decode replica's tokenizer.
        return self.returned_s is not None and now_s - self.returned_s > 0.9 * self.settings.kv_lease_s

    def observed_transfer_s(self, first_token_s: float) -> float:
        """Return seconds of the hand-off itself, from those between the second request and its first token."""
        return max(first_token_s - self._rest_s, 0.0)

    def _end(
        self, now_s: float, outcome: AttemptOutcome, prompt_tokens: int | None, cached_tokens: int | None, *, kept: bool
    ) -> None:
        self.over = True
        self._ticket.finish(now_s)
        self._ejector.record(self._attempt, outcome, now_s)
        if self._promise is not None:
            self._promise.ended(prompt_tokens, cached_tokens, kept=kept)


class HandOffs:
    """Decides about hand-offs, and learns how long they take."""

    def __init__(self, fleet: Fleet, ledger: LoadLedger, predictor: Predictor) -> None:
        """Start with default rules.

        Args:
            fleet: the replicas.
            ledger: outstanding work.
            predictor: predicted times.
        """
        self._fleet = fleet
        self._ledger = ledger
        self._predictor = predictor
        self.rules = HandOffRules()
        self.prices = Prices()
        self.unpaired: dict[tuple[str, str], int] = {}
        """Prompts served whole because no two replicas may be paired, by base model and kind of difference."""
        self._corrections: dict[str, float] = {}
        self._planned_s: dict[str, float] = {}
        self._saved_s: dict[str, float] = {}
        """What hand-offs save of the mean request, by base model; those that are not taken at rest included."""
        self._unpaired_until_s: dict[int, float] = {}
        self._told: set[tuple[str, str, str]] = set()
        self._identities: dict[int, tuple[int, Mapping[str, Any]]] = {}
        self._kv_bytes: dict[int, tuple[Replica, str | None, float]] = {}

    def use(self, rules: HandOffRules) -> None:
        """Change the rules; what has been learned of a link is forgotten with it."""
        before, self.rules = self.rules, rules
        for pool in list(self._corrections):
            was, now = before.of(pool), rules.of(pool)
            if (was.link_bytes_per_s, was.link_latency_s) != (now.link_bytes_per_s, now.link_latency_s):
                del self._corrections[pool]

    def identity(self, replica: Replica) -> Mapping[str, Any] | None:
        """Return where a prefill replica's process can be reached by a decode replica, if it has ever told."""
        known = self._identities.get(replica.slot)
        return known[1] if known is not None and known[0] == replica.epoch else None

    def identify(self, replica: Replica, identity: Mapping[str, Any]) -> None:
        """A prefill replica has told where it can be reached."""
        self._identities[replica.slot] = (replica.epoch, identity)

    def correction(self, pool: str) -> float:
        """Return observed over configured time of a model's hand-offs."""
        return self._corrections.get(pool, 1.0)

    def observed(self, pool: str, hand_off: HandOff, first_token_s: float) -> None:
        """Learn from a hand-off.

        Args:
            pool: the base model.
            hand_off: which.
            first_token_s: seconds from the second request to its first token.
        """
        if hand_off.transfer_s <= 0.0:
            return
        before = self.correction(pool)
        # What was predicted has the correction in it already.
        ratio = hand_off.observed_transfer_s(first_token_s) / hand_off.transfer_s * before
        ratio = min(max(ratio, 1.0 / _MOST_CORRECTION), _MOST_CORRECTION)
        # In steps of at most fourfold: the first transfer of a pair carries a handshake of up to seconds.
        ratio = min(max(ratio, before / 4.0), before * 4.0)
        self._corrections[pool] = before + _LEARNING_RATE * (ratio - before)

    def failed(self, hand_off: HandOff, now_s: float) -> None:
        """A decode replica could not get what a prefill replica held: leave the latter alone for a while."""
        self._unpaired_until_s[hand_off.slot] = now_s + UNPAIRED_AFTER_FAILURE_S

    def forget(self, slot: int) -> None:
        """The slot's replica has left or restarted."""
        self._unpaired_until_s.pop(slot, None)
        self._kv_bytes.pop(slot, None)
        self._identities.pop(slot, None)

    def at_rest(self, pool: str, now_s: float) -> bool:
        """Say whether prefill replicas serve whole requests as well, because hand-offs have not been worth it lately.

        Args:
            pool: the base model.
            now_s: monotonic seconds.
        """
        settings = self.rules.of(pool)
        if settings.policy != "predicted" or not settings.answer_whole or not settings.active:
            return False
        planned_s = self._planned_s.get(pool)
        if planned_s is None or now_s - planned_s > REST_AFTER_S:
            return True
        return self._saved_s.get(pool, 0.0) < WORTH_A_ROLE_S

    def considered(self, pool: str, found: Plan | Difference | None, now_s: float) -> None:
        """A request of a base model with prefill replicas has been assigned.

        Args:
            pool: the base model.
            found: what `consider` had to say; None also if it was not asked.
            now_s: monotonic seconds.
        """
        saved_s = 0.0
        if isinstance(found, Difference):
            counted = (pool, found.kind)
            self.unpaired[counted] = self.unpaired.get(counted, 0) + 1
        elif found is not None:
            saved_s = found.saved_s
            self._planned_s[pool] = now_s
        self._saved_s[pool] = self._mean_saved_s(pool, saved_s)

    def _mean_saved_s(self, pool: str, saved_s: float) -> float:
        """Return what hand-offs save of the mean request, with one more of which they save so much."""
        before_s = self._saved_s.get(pool, 0.0)
        return before_s + (saved_s - before_s) / _REMEMBERED

    def out_of_the_way(self, slots: Sequence[int], prompt_tokens: float) -> Sequence[int]:
        """Return the candidates for a whole request that wait for no KV, if it is long and there are any.

        KV that arrives while a long prompt is computed waits for the end of it, and with it a prompt that was sent
        elsewhere so that it need not wait.

        Args:
            slots: the candidates.
            prompt_tokens: tokens of the prompt.
        """
        if prompt_tokens < self._predictor.budget(slots[0]) * LONG:
            return slots
        reserved = self._ledger.reserved
        return [slot for slot in slots if not reserved[slot]] or slots

    def consider(
        self,
        query: Query,
        prefills: Sequence[int],
        slots: Sequence[int],
        whole_slot: int,
        now_s: float,
        matched_tokens: Sequence[float],
        own_prefill_s: Sequence[float],
        predicted_ttft_s: Sequence[float],
        decode_delay_s: Sequence[float],
        decode_step_s: Sequence[float],
        prefill_ahead_s: Sequence[float],
    ) -> Plan | Difference | None:
        """Return the pair for a request, None if it is better served whole, or why no two replicas may be paired.

        Nothing changes by it: `considered` is told when the request has been assigned.

        Args:
            query: the request.
            prefills: slots of the prefill replicas that have room.
            slots: the candidates for the whole request.
            whole_slot: the policy's choice among them.
            now_s: monotonic seconds.
            matched_tokens: by slot, prompt tokens that replicas hold; also of prefill replicas.
            own_prefill_s, predicted_ttft_s, decode_delay_s, decode_step_s: the predictor's columns, of `slots`.
            prefill_ahead_s: by slot, predicted seconds of prefill ahead, of `slots`.
        """
        settings = self.rules.of(query.pool)
        if not settings.active:
            return None
        prompt_tokens = query.request.prompt_tokens
        policy = settings.policy
        if policy == "threshold" and prompt_tokens - matched_tokens[whole_slot] < settings.threshold_tokens:
            return None
        prices = self.prices
        whole_s = (
            predicted_ttft_s[whole_slot]
            + prices.prefill * own_prefill_s[whole_slot]
            + prices.decode * decode_delay_s[whole_slot]
        )
        if policy == "predicted" and own_prefill_s[whole_slot] < NOTICED_STEPS * decode_step_s[whole_slot]:
            return None
        offers = self._offers(prefills, prompt_tokens, now_s, matched_tokens)
        best_of: dict[tuple[Signature, str | None], _Offer | None] = {}
        best: Plan | None = None
        least_s = float("inf")
        kv_own, by_slot = self._ledger.kv_own_tokens, self._fleet.by_slot
        needed = prompt_tokens + query.request.expected_output_tokens
        correction = self.correction(query.pool)
        paired = False
        for slot in slots:
            replica = by_slot[slot]
            if replica is None:
                continue
            key = signature(replica), replica.version
            if key in best_of:
                offer = best_of[key]
            else:
                offer = best_of[key] = _best(offers, *key)
            if offer is None:
                continue
            paired = True
            lacking = prompt_tokens - matched_tokens[slot]
            size = lacking * self.kv_bytes_per_token(replica)
            transfer_s = correction * (settings.link_latency_s + size / settings.link_bytes_per_s)
            prefill_slot, prefill_s, own_s = offer.slot, offer.prefill_s, offer.own_s
            # What is in d's queue when the KV arrives is served first.
            ttft_s = max(prefill_s + transfer_s, prefill_ahead_s[slot]) + decode_step_s[slot]
            cost_s = ttft_s + offer.work_cost_s
            capacity = replica.kv.kv_capacity_tokens or DEFAULT_CAPACITY_TOKENS
            over = kv_own[slot] + needed - capacity
            if over > 0.0:
                # As the default policy prices memory: what does not fit waits, or others are preempted.
                cost_s += MEMORY_PRICE * over / capacity
            # Among equals the one with the most memory left.
            rank_s = cost_s + _EMPTIER * kv_own[slot] / capacity
            if rank_s < least_s:
                least_s = rank_s
                matched = matched_tokens[prefill_slot]
                best = Plan(
                    prefill_slot, slot, prefill_s, own_s, transfer_s, size, ttft_s, cost_s, whole_s, matched, lacking,
                    prompt_tokens - matched, "",
                )  # fmt: skip
        if offers and not paired:
            return self._unpaired(prefills, slots)
        if best is None or (policy == "predicted" and best.cost_s >= whole_s):
            return None
        best.reason = _REASONS[policy]
        # The one with which hand-offs become worth it is the first.
        best.taken = (
            not self.at_rest(query.pool, now_s) or self._mean_saved_s(query.pool, best.saved_s) >= WORTH_A_ROLE_S
        )
        return best

    def _offers(
        self, prefills: Sequence[int], prompt_tokens: float, now_s: float, matched_tokens: Sequence[float]
    ) -> "list[_Offer]":
        """Return what each prefill replica would take for a prompt."""
        ledger, predictor, price = self._ledger, self._predictor, self.prices.prefill_elsewhere
        offers = []
        for slot in prefills:
            replica = self._fleet.by_slot[slot]
            if replica is None or self._unpaired_until_s.get(slot, now_s) > now_s:
                continue
            matched = matched_tokens[slot]
            own_s = predictor.own_prefill_s(slot, prompt_tokens, matched)
            prefill_s = predictor.prefill_only_s(
                slot, prompt_tokens, matched, ledger.prefill_ahead_s(slot, now_s), ledger.prefill_tokens[slot]
            )
            offers.append(_Offer(signature(replica), replica.version, slot, prefill_s, own_s, price * own_s))
        return offers

    def kv_bytes_per_token(self, replica: Replica) -> float:
        """Return the bytes of keys and values of one token."""
        known = self._kv_bytes.get(replica.slot)
        shape = replica.spec.model_shape
        if known is None or known[0] is not replica or known[1] != shape:
            size = NEUTRAL_KV_BYTES_PER_TOKEN if shape is None else float(model(shape).kv_bytes_per_token)
            known = self._kv_bytes[replica.slot] = (replica, shape, size)
        return known[2]

    def _unpaired(self, prefills: Sequence[int], slots: Sequence[int]) -> Difference | None:
        """Return why no two replicas may share a prompt; to the log each pair once."""
        first: Difference | None = None
        for prefill in map(self._fleet.by_slot.__getitem__, prefills):
            for decode in map(self._fleet.by_slot.__getitem__, slots):
                why = difference(prefill, decode) if prefill is not None and decode is not None else None
                if why is None or prefill is None or decode is None:
                    continue
                first = first or why
                told = (prefill.name, decode.name, why.text)
                if told not in self._told and len(self._told) < _MOST_TOLD:
                    self._told.add(told)
                    logger.warning("%s does not prefill for %s: %s", prefill.name, decode.name, why.text)
        return first


@dataclass(frozen=True, slots=True)
class _Offer:
    """A prompt on one prefill replica.

    Attributes:
        signature, version: what the replica that decodes must agree with.
        slot: which.
        prefill_s: predicted seconds until the prompt is computed.
        own_s: of those, the prompt's own.
        work_cost_s: price of the work.
    """

    signature: Signature
    version: str | None
    slot: int
    prefill_s: float
    own_s: float
    work_cost_s: float


def _best(offers: Sequence[_Offer], wanted: Signature, version: str | None) -> _Offer | None:
    """Return the cheapest that a replica of a signature and version may be paired with."""
    best, least_s = None, float("inf")
    for offer in offers:
        cost_s = offer.prefill_s + offer.work_cost_s
        if cost_s < least_s and offer.signature == wanted and same_version(offer.version, version):
            best, least_s = offer, cost_s
    return best
