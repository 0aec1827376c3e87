"""What one attempt holds on one replica, and how it gives that back."""

from collections.abc import Mapping
from typing import Protocol

from gateway.estimator.fallback import PredictionFallback
from gateway.estimator.predictor import Predictor, Work
from gateway.prefixes.feedback import Promise
from gateway.prefixes.index import PrefixIndex
from gateway.replicas.breaker import Outcome as AttemptOutcome
from gateway.replicas.ejection import Attempt, Ejector
from gateway.replicas.kv_memory import Holding, KvMemory
from gateway.replicas.load import LoadLedger, Ticket
from gateway.replicas.registry import Fleet, Replica
from gateway.routing.decision import Decision
from gateway.routing.hand_off import HandOff, HandOffs
from gateway.routing.query import Query
from gateway.routing.slo import SloFilter


class Releases(Protocol):
    """What an assignment needs of the router to give back what it holds, and to pass on what was learned."""

    fleet: Fleet
    ejector: Ejector
    index: PrefixIndex
    ledger: LoadLedger
    memory: KvMemory
    predictor: Predictor
    slo: SloFilter
    hand_offs: HandOffs
    fallback: PredictionFallback

    def learn(self, query: Query, prompt_tokens: int | None, completion_tokens: int | None) -> None:
        """The engine has said how long prompt and answer were."""


class Assignment:
    """One attempt's place on one replica: what it was promised, what it holds, and how it gives that back.

    Attributes:
        replica, slot: where.
        policy: who decided.
        reason, terms: why.
        expected_cached_tokens: prompt tokens the prefix map says are there.
        predicted_ttft_s: seconds from assignment to the first token.
        predicted_tpot_s: seconds per output token after it; None without a target for them.
        decision: what it was decided from.
        assigned_s: when.
        observed_ttft_s: what it was in the end; None before.
        outlook: whether the latency targets were predicted to be kept; None without targets.
        hand_off: what it holds on the replica that computes its prompt; None if that is this one.
        step_seen_s: the ledger's column; whoever sees a token writes the time at `slot`.
    """

    __slots__ = (
        "_attempt",
        "_crowded",
        "_first",
        "_holding",
        "_own_prefill_s",
        "_parts",
        "_promise",
        "_query",
        "_started_s",
        "_ticket",
        "_work",
        "assigned_s",
        "decision",
        "expected_cached_tokens",
        "finished",
        "hand_off",
        "observed_ttft_s",
        "outlook",
        "policy",
        "predicted_tpot_s",
        "predicted_ttft_s",
        "reason",
        "replica",
        "slot",
        "step_seen_s",
        "terms",
    )

    def __init__(
        self,
        parts: "Releases",
        query: Query,
        replica: Replica,
        decision: Decision,
        policy: str,
        expected_cached_tokens: int,
        predicted_ttft_s: float,
        own_prefill_s: float,
        work: Work | None,
        ticket: Ticket,
        promise: Promise | None,
        holding: Holding,
        attempt: Attempt,
        predicted_tpot_s: float | None = None,
        hand_off: HandOff | None = None,
    ) -> None:
        self._parts = parts
        self._query = query
        self.replica = replica
        choice = decision.final
        self.decision = decision
        self.slot = choice.slot
        self.reason = choice.reason
        self.terms: Mapping[str, float] = choice.terms
        self.policy = policy
        self.assigned_s = decision.now_s
        self.expected_cached_tokens = expected_cached_tokens
        self.predicted_ttft_s = predicted_ttft_s
        self.observed_ttft_s: float | None = None
        self.finished = False
        self.step_seen_s = parts.ledger.step_seen_s
        self._own_prefill_s = own_prefill_s
        self._started_s = parts.ledger.prefill_started_s[self.slot]
        self._work = work
        self._ticket = ticket
        self._promise = promise
        self._holding = holding
        self._crowded = self.slot in parts.memory.crowded
        self._attempt = attempt
        self._first = not decision.tried
        self.outlook = decision.outlook
        self.predicted_tpot_s = predicted_tpot_s
        self.hand_off = hand_off

    def first_token(self, now_s: float) -> None:
        """The first token has been seen: its prefill is done, and the prediction can be judged."""
        if self.observed_ttft_s is not None or self.finished:
            return
        self.observed_ttft_s = now_s - self.assigned_s
        self._decodes(now_s)
        if self._promise is not None:
            self._promise.computed()
        self._parts.ejector.answered(self._attempt)
        hand_off = self.hand_off
        if hand_off is not None:
            if hand_off.fetching_s is not None and hand_off.returned_s is not None:
                self._parts.hand_offs.observed(self._query.pool, hand_off, now_s - hand_off.fetching_s)
            return
        # The slot may belong to another replica by now.
        if self._first and self._query.key is not None and self._parts.fleet.has(self.replica):
            # Behind a queue, when it was computed and with whom is not known; and there a step is a small part.
            joined_s = 0.0
            if not self.decision.ahead_s:
                joined_s = self._parts.ledger.prefill_started_s[self.slot] - self._started_s
            self._parts.predictor.observe(self.slot, self._work, self.predicted_ttft_s, self.observed_ttft_s, joined_s)
            if self._work is not None:
                # Waits for memory are guesses, and priced as such.
                self._parts.fallback.observe(self._query.pool, self.predicted_ttft_s, self.observed_ttft_s)

    def presume(self, now_s: float) -> None:
        """A request that is not streamed shows no first token: count it as decoding once it should be."""
        if not self._query.stream and now_s - self.assigned_s > self.predicted_ttft_s:
            self._decodes(now_s)

    def _decodes(self, now_s: float) -> None:
        """Its prefill is done: it decodes from now on."""
        self._ticket.first_token(now_s)
        predictor, slot = self._parts.predictor, self.slot
        excess_s = predictor.excess_s(slot, self._own_prefill_s)
        self._parts.memory.first_token(self._holding, now_s, self._step_s(), predictor.memory_factor(slot), excess_s)

    def _step_s(self) -> float:
        parts, slot = self._parts, self.slot
        context_tokens = parts.ledger.context_tokens[slot] + parts.memory.context_shift_tokens[slot]
        return parts.predictor.uncorrected_step_s(slot, parts.ledger.decodes[slot], context_tokens)

    def finish(
        self,
        now_s: float,
        outcome: AttemptOutcome,
        prompt_tokens: int | None,
        completion_tokens: int | None,
        *,
        keep_prefix: bool,
        cached_tokens: int | None = None,
    ) -> None:
        """Give back everything that is still held; only the first call counts.

        Args:
            now_s: monotonic seconds.
            outcome: what the end says about the replica.
            prompt_tokens: as the engine reported them, if it did.
            completion_tokens: as the engine reported them, if it did.
            keep_prefix: the prompt was computed there, so the prefix map is right to say so.
            cached_tokens: prompt tokens the engine found in its cache, if it told.
        """
        if self.finished:
            return
        self.finished = True
        parts = self._parts
        self._ticket.finish(now_s)
        if self.hand_off is not None:
            self.hand_off.ended(now_s, AttemptOutcome.CANCELLED)
        parts.ejector.record(self._attempt, outcome, now_s)
        if self._promise is not None:
            parts.index.release(self._promise.record)
        predictor, slot = parts.predictor, self.slot
        factor = parts.memory.finish(
            self._holding, now_s, self._step_s(), predictor.memory_factor(slot), completion_tokens
        )
        if factor is not None and self._first and self.observed_ttft_s is not None and outcome is AttemptOutcome.OK:
            predictor.observe_steps(slot, factor)
        if self._promise is not None:
            # After a hand-off, what the engine calls cached is what the other replica found in its own cache.
            # Where answers have grown into the cache, what is missing says nothing of how much a replica can hold.
            told = prompt_tokens if self.hand_off is None and not self._crowded else None
            self._promise.ended(told, cached_tokens, kept=keep_prefix)
            key = self._query.key
            if key is not None and key.end_hash and keep_prefix and outcome is AttemptOutcome.OK:
                self._promise.answered(key.end_hash)
        parts.learn(self._query, prompt_tokens, completion_tokens)
        if self.predicted_tpot_s is not None:
            self._learn_tpot(now_s, outcome, completion_tokens)

    def _learn_tpot(self, now_s: float, outcome: AttemptOutcome, completion_tokens: int | None) -> None:
        if outcome is not AttemptOutcome.OK or self.observed_ttft_s is None or self.predicted_tpot_s is None:
            return
        # The slot may belong to another replica by now.
        if completion_tokens is not None and completion_tokens > 1 and self._parts.fleet.has(self.replica):
            decoded_s = now_s - self.assigned_s - self.observed_ttft_s
            self._parts.slo.ended(self.slot, self.predicted_tpot_s, decoded_s / (completion_tokens - 1))
