"""From a request to an assigned replica: candidates -> policy -> decision.

Theory of operation
- `query` reads a request once: model, prompt key, token estimates. `assign` may then be called once per attempt.
- `assign` builds the candidates, asks the policy, and charges the chosen replica at once: the load ledger, and the
  prefix map on the assumption that the prompt will be computed there.
- The returned `Assignment` gives all of it back exactly once, and learns from what was observed.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakSet

from gateway.estimator.fallback import PredictionFallback
from gateway.estimator.predictor import Predictor, ReplicaClass
from gateway.prefixes.feedback import CacheFeedback, Promise
from gateway.prefixes.index import PrefixIndex
from gateway.prompt.blocks import DEFAULT_SCHEDULE, BlockSchedule, PromptKey
from gateway.prompt.body import RequestBody
from gateway.prompt.token_chain import TokenPrompt
from gateway.prompt.tokens import TokensPerByte
from gateway.replicas.ejection import Ejector
from gateway.replicas.kv_memory import KvMemory
from gateway.replicas.load import LoadLedger
from gateway.replicas.registry import Change, Fleet, Replica
from gateway.routing.assignment import Assignment
from gateway.routing.columns import ENGINE_BLOCK_TOKENS, Columns
from gateway.routing.decision import Decision, Standing
from gateway.routing.exact_match import TokenMatch
from gateway.routing.hand_off import HandOff, HandOffs, Plan
from gateway.routing.pairing import Difference
from gateway.routing.query import Query
from gateway.routing.refusals import NoReplica, Saturated, UnknownModel
from gateway.routing.room import Room
from gateway.routing.slo import SloFilter
from policies.kv_cost import LMetric
from policies.types import Candidates, Choice, Column, Policy, RemembersReplicas, Request
from policies.understudy import understudy

logger = logging.getLogger(__name__)

DEFAULT_OUTPUT_TOKENS = 256.0
DEFAULT_CAPACITY_TOKENS = 200_000.0
"""KV capacity assumed until the engine or the hardware says; small, because believing in more than the engine holds is
what makes approximate routing collapse."""

_RESIZE_RATIO = 1.03
"""Learned tokens per byte may move this far before the prefix map's capacity, which counts bytes, follows."""


class Router:
    """Chooses a replica for each attempt."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: LoadLedger,
        ejector: Ejector,
        index: PrefixIndex,
        tokens: TokensPerByte,
        predictor: Predictor,
        policy: Policy,
        schedule: BlockSchedule = DEFAULT_SCHEDULE,
        session_header: str | None = None,
        slow_start_s: float = 0.0,
        feedback: bool = True,
        seed: int = 0,
    ) -> None:
        """Wire the parts together and follow the fleet from now on.

        Args:
            fleet: the replicas.
            ledger: outstanding work.
            ejector: passive health.
            index: the prefix map.
            tokens: learned tokens per byte.
            predictor: predicted times.
            policy: the policy in force.
            schedule: where prompts are cut into blocks.
            session_header: lower-case name of the header that carries a session key.
            slow_start_s: how long a replica that comes up takes to its full share; 0 for none.
            feedback: correct the prefix map by what engines report of their caches.
            seed: of random choices where predictions are not followed, and of the order of equals in large fleets.
        """
        self.fleet = fleet
        self.ledger = ledger
        self.room = Room(ledger.in_flight, slow_start_s)
        self.ejector = ejector
        self.index = index
        self.feedback = CacheFeedback(index, schedule, enabled=feedback)
        self.tokens = tokens
        self.predictor = predictor
        self.memory = KvMemory(index.in_use_bytes)
        self._columns = Columns(fleet, ledger, self.memory, index, predictor, schedule, seed)
        self.slo = SloFilter(ledger, predictor, self._columns)
        self.hand_offs = HandOffs(fleet, ledger, predictor)
        self.fallback = PredictionFallback()
        # What decides where predictions do not: counts and tokens, and no times.
        self._by_load: Policy = LMetric(seed)
        self._offsets = schedule.offsets
        self._token_counted: Callable[[str, TokenPrompt, int], None] | None = None
        self._session_header = session_header.lower().encode() if session_header else None
        self._output_tokens: dict[str, float] = {}
        self._sized_at_ratio: dict[str, float] = {}
        self._remembering: WeakSet[RemembersReplicas] = WeakSet()
        self.restart_is_news: Callable[[Replica], bool] = lambda replica: True
        """Asked whether the prefix map has still to forget a replica that has restarted: another worker may have told
        of it, and of what has been sent there since."""
        self._standing: Standing | None = None
        self._put_in_force(policy)
        for replica in fleet.replicas.values():
            self._open(replica)
        fleet.on_change(self._changed)

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    def use(self, policy: Policy) -> None:
        """Change the policy; requests already assigned keep theirs.

        The ledger, the prefix map and the predictor go on, so a policy that only reads columns is at its best at
        once. One that keeps a picture of the replicas in itself starts with what it has: nothing, or what it knew
        when it was last in force, less the replicas that have left or restarted since.
        """
        self._put_in_force(policy)
        logger.info("policy %s is in force", policy.name)

    def _put_in_force(self, policy: Policy) -> None:
        self._policy = policy
        self._columns.serve(policy)
        self._predicts = Column.PREDICTED_TTFT_S in policy.reads
        if isinstance(policy, RemembersReplicas):
            self._remembering.add(policy)

    def use_token_match(self, match: TokenMatch, counted: Callable[[str, TokenPrompt, int], None]) -> None:
        """Match prompts whose tokens are known with what the engines have told.

        Args:
            match: what they have told.
            counted: told the engine's count of a prompt's tokens: base model, prompt, count.
        """
        self._columns.token_match = match
        self._token_counted = counted

    # -- the life of a request

    def query(
        self,
        body: RequestBody | None,
        headers: Mapping[bytes, bytes],
        asked: tuple[bytes | None, bytes | None] | None = None,
        received_s: float = 0.0,
        tokens: TokenPrompt | None = None,
    ) -> Query:
        """Read a request.

        Args:
            body: the parsed body; None for requests without a JSON body.
            headers: the request's headers by lower-case name.
            asked: values of its latency targets' headers, see `SloRules.targets`.
            received_s: when it came: monotonic seconds.
            tokens: its prompt as the engine will see it, if known.

        Raises:
            UnknownModel: the body names a model that no replica has ever listed.
            InvalidTarget: a latency target is not one.
        """
        fleet = self.fleet
        name = body.model if body is not None else None
        model: str | None = None
        if name is not None:
            model = fleet.resolve(name)
            # Before any replica has been heard, nothing is known to be missing: that is a 503, which clients try again.
            if not fleet.knows(model) and fleet.models():
                raise UnknownModel(name)
        pool = fleet.pool(model)
        key = body.prompt if body is not None else None
        prompt_tokens = self.tokens.estimate(pool, key) if key is not None else 0.0
        if tokens is not None:
            prompt_tokens = float(tokens.count)
        output_tokens = self._output_tokens.get(pool, DEFAULT_OUTPUT_TOKENS)
        max_tokens = body.max_tokens if body is not None else None
        if max_tokens is not None and max_tokens < output_tokens:
            output_tokens = float(max_tokens)
        session: str | None = None
        if self._session_header is not None:
            value = headers.get(self._session_header)
            session = value.decode("latin-1") if value else None
        if session is None and body is not None:
            session = body.user
        request = Request(
            prompt_tokens=prompt_tokens,
            expected_output_tokens=output_tokens if key is not None else 0.0,
            prefix_hash=key.head_hash if key is not None else 0,
            session=session,
            block_hashes=key.hashes if key is not None else (),
            block_offsets=self._offsets,
            canonical_bytes=key.canonical_bytes if key is not None else 0,
        )
        stream = body.stream if body is not None else False
        targets = None
        if asked is not None or self.slo.has_defaults:
            targets = self.slo.rules.targets(model, pool, asked, received_s)
            if key is None:
                # Without a prompt there is nothing to predict from, and mostly no token to wait for.
                targets = None
        divisible = body is not None and body.divisible
        rewritten = model if model != name else None
        return Query(model, pool, key, request, stream, max_tokens, rewritten, targets, tokens, divisible)

    def assign(self, query: Query, tried: Sequence[int], now_s: float, *, whole: bool = False) -> Assignment:
        """Choose a replica for an attempt and charge it.

        Args:
            query: the request.
            tried: slots that must not be chosen again.
            now_s: monotonic seconds.
            whole: prompt and answer must be computed by the same replica.

        Raises:
            NoReplica: there is no candidate.
            Saturated: there are, and all are at their limit.
            TargetsOutOfReach: none would keep its latency targets, and it is to be refused then.
        """
        return self._charge(query, self._decide(query, tried, now_s, whole=whole))

    def rehearse(self, query: Query, now_s: float) -> Decision:
        """Decide about a request as `assign` would now, and leave everything as it is.

        Of a large fleet all candidates are looked at, where `assign` looks at those that can be the cheapest.

        Args:
            query: the request.
            now_s: monotonic seconds.

        Raises:
            NoReplica, Saturated, TargetsOutOfReach: as `assign`.
            ValueError: the policy cannot be asked without consequences.
        """
        policy, by_load, room, targets = self._policy, self._by_load, self.room, self.slo.state()
        self._policy, self._by_load, self.room = understudy(policy), understudy(by_load), room.copy()
        try:
            return self._decide(query, (), now_s, whole=False, all_candidates=True)
        finally:
            self._policy, self._by_load, self.room = policy, by_load, room
            self.slo.restore(targets)

    def _decide(
        self, query: Query, tried: Sequence[int], now_s: float, *, whole: bool, all_candidates: bool = False
    ) -> Decision:
        """Choose a replica for an attempt; nothing is charged."""
        if self.ledger.on_look is not None:
            self.ledger.on_look(now_s)
        fleet = self.fleet
        slots = fleet.route_slots(query.model)
        prefills = fleet.prefill_slots(query.model)
        helping = bool(prefills) and self.hand_offs.at_rest(query.pool, now_s)
        if helping:
            # Where all others are down they are candidates already.
            slots = sorted({*slots, *prefills})
        if tried:
            # A replica that has been ejected may fail once more; without it the request must.
            untried = [slot for slot in slots if slot not in tried]
            slots = untried or [slot for slot in fleet.up_slots(query.model) if slot not in tried]
        if not slots:
            raise NoReplica
        routable = slots
        slots = roomy = self.room.among(slots, now_s)
        if not slots:
            raise Saturated
        columns, policy, request, key = self._columns, self._policy, query.request, query.key
        prompt_tokens = request.prompt_tokens
        decodes: Sequence[int] = [slot for slot in slots if slot not in prefills] if helping else slots
        if not query.divisible:
            prefills = ()
        if prefills:
            slots = self.hand_offs.out_of_the_way(slots, prompt_tokens)
        request.now_s = now_s
        targets, slo, outlook = query.targets, self.slo, None
        fallback, pool = self.fallback, query.pool
        error = fallback.fallen.get(pool) if fallback.fallen and self._predicts else None
        try:
            candidates = columns.fill(
                slots,
                key,
                prompt_tokens,
                now_s,
                query.tokens,
                whole=all_candidates or targets is not None or bool(prefills) or error is not None,
                predict=error is None,
            )
            if targets is not None:
                outlook = slo.narrow(targets, pool, request, now_s)
            if error is None:
                choice = policy.choose(request, candidates)
            else:
                choice = self._choose_by_load(error, request, candidates)
            slot = choice.slot
            decision = Decision(
                policy if error is None else self._by_load,
                now_s,
                query.model,
                prompt_tokens,
                request.expected_output_tokens,
                self.standing(),
                routable,
                roomy,
                () if len(roomy) == len(routable) else self.room.spared,
                candidates.slots,
                tuple(tried) if tried else (),
                columns.copied(slot),
                columns.predicted,
                choice,
                error,
                outlook,
            )
            columns.predict_chosen(slot, prompt_tokens, now_s)
            plan: Plan | None = None
            considered: Plan | Difference | None = None
            # Whether to hand off is a matter of predictions, unless a threshold or the operator says so.
            if prefills and not whole and (error is None or self.hand_offs.rules.of(pool).policy != "predicted"):
                considered = self._plan(query, prefills, decodes, slot, now_s)
                if isinstance(considered, Difference):
                    choice.reason = f"{choice.reason}; no pair for a hand-off, {considered.text}"
                elif considered is not None and considered.taken:
                    plan = considered
                    slot = plan.decode_slot
                    choice = Choice(slot, plan.reason, plan.terms())
            cached_tokens, wait_s = columns.matched_tokens[slot], columns.memory_wait_s[slot]
            if targets is not None and outlook is not None:
                slo.explain(choice, outlook, len(slots), targets, now_s)
        finally:
            columns.clear()
        decision.slot, decision.final, decision.plan, decision.considered = slot, choice, plan, considered
        decision.cached_tokens, decision.memory_wait_s = cached_tokens, wait_s
        decision.own_prefill_s, decision.ttft_s = columns.own_prefill_s[slot], columns.predicted_ttft_s[slot]
        decision.ahead_s = columns.candidates.prefill_s[slot]
        return decision

    def _charge(self, query: Query, decision: Decision) -> Assignment:
        """Enter an attempt with the replica it goes to."""
        fleet, slot, plan, now_s = self.fleet, decision.slot, decision.plan, decision.now_s
        request, key, prompt_tokens, targets = query.request, query.key, decision.prompt_tokens, query.targets
        cached_tokens, own_s, ttft_s = decision.cached_tokens, decision.own_prefill_s, decision.ttft_s
        if cached_tokens:
            saved_s = max(self.predictor.own_prefill_s(slot, prompt_tokens, 0.0) - own_s, 0.0)
            share = self.ledger.workers_share
            self._columns.tied.note(slot, share * cached_tokens / prompt_tokens, share * saved_s)
        if decision.error is not None:
            self.fallback.decided(query.pool)
        expected_cached_tokens, hand_off = cached_tokens, None
        if plan is not None:
            # What the decode engine reports as cached is what the prefill engine found.
            ttft_s, expected_cached_tokens = plan.ttft_s, plan.matched_tokens
            hand_off = self._hand_off(query, plan, now_s)
        if fleet.prefill_slots(query.model):
            self.hand_offs.considered(query.pool, decision.considered, now_s)
        replica = fleet.by_slot[slot]
        assert replica is not None, "a policy chose a slot that is not a candidate"
        ticket = self.ledger.start(
            slot,
            now_s,
            prompt_tokens,
            prompt_tokens - cached_tokens,
            own_s,
            request.expected_output_tokens,
            computed_elsewhere=hand_off is not None,
        )
        promise, tail_tokens = None, prompt_tokens
        if key is not None and key.hashes:
            promise = self._promise(slot, key)
            # Another request in flight that holds all of the prompt holds its unfinished block as well.
            if self.index.hold(promise.record):
                tail_tokens = 0.0
            elif promise.record.held:
                tail_tokens *= 1.0 - self._offsets[len(key.hashes)] / key.canonical_bytes
        # Waiting for memory says nothing of the hardware, and a hand-off has been computed elsewhere.
        work = None
        if hand_off is not None:
            own_s = 0.0
        elif not decision.memory_wait_s:
            work = self.predictor.work(slot, decision.ahead_s + own_s, ttft_s)
        return Assignment(
            self,
            query,
            replica,
            decision,
            self._policy.name,
            int(expected_cached_tokens),
            ttft_s,
            own_s,
            work,
            ticket,
            promise,
            self.memory.start(slot, tail_tokens, request.expected_output_tokens),
            self.ejector.begin(replica),
            self.slo.tpot_s[slot] if targets is not None and targets.tpot_s is not None else None,
            hand_off,
        )

    def _choose_by_load(self, error: float, request: Request, candidates: Candidates) -> Choice:
        """Choose by counts and tokens, because the pool's predictions have been wrong."""
        choice = self._by_load.choose(request, candidates)
        choice.reason = f"fallback to load, predictions being off by {100.0 * error:.0f} %; {choice.reason}"
        choice.terms = {**choice.terms, "prediction_error": error}
        return choice

    def _plan(
        self, query: Query, prefills: Sequence[int], slots: Sequence[int], whole_slot: int, now_s: float
    ) -> Plan | Difference | None:
        """Say where the prompt should be computed if not where its answer is; asked while the columns are filled."""
        prefills = self.room.among(prefills, now_s)
        if not prefills or not slots or slots[0] in prefills or not self.hand_offs.rules.of(query.pool).active:
            return None
        columns = self._columns
        columns.predict_all(slots, query.request.prompt_tokens, now_s)
        view = columns.candidates
        return self.hand_offs.consider(
            query,
            prefills,
            slots,
            whole_slot,
            now_s,
            view.matched_tokens,
            view.own_prefill_s,
            view.predicted_ttft_s,
            view.decode_delay_s,
            view.decode_step_s,
            view.prefill_s,
        )

    def _hand_off(self, query: Query, plan: Plan, now_s: float) -> HandOff:
        """Charge the prefill replica of a plan."""
        slot, key, prompt_tokens = plan.prefill_slot, query.key, query.request.prompt_tokens
        replica = self.fleet.by_slot[slot]
        assert replica is not None
        return HandOff(
            self.fleet,
            self.ejector,
            self.predictor,
            replica,
            plan,
            self.hand_offs.rules.of(query.pool),
            self.ledger.start(slot, now_s, prompt_tokens, plan.prefill_tokens, plan.own_prefill_s, 0.0),
            self._promise(slot, key) if key is not None and key.hashes else None,
            self.ejector.begin(replica),
            now_s,
        )

    def _promise(self, slot: int, key: PromptKey) -> Promise:
        """Enter a prompt into the map; the engine will tell whether what it promised was there."""
        record = self.index.insert(slot, key.hashes, key.continued_hash)
        # A medium is 16 bytes here and any number of tokens there; positions cannot be converted.
        judged = not key.media and not key.computed_anew
        return self.feedback.promise(record, key.canonical_bytes if judged else 0, key.continued_bytes)

    def learn(self, query: Query, prompt_tokens: int | None, completion_tokens: int | None) -> None:
        """Take in what the engine reported of a request.

        Args:
            query: the request.
            prompt_tokens: tokens of its prompt, None if not reported.
            completion_tokens: tokens of its answer, None if not reported.
        """
        pool = query.pool
        if prompt_tokens is not None and query.tokens is not None and self._token_counted is not None:
            self._token_counted(pool, query.tokens, prompt_tokens)
        if prompt_tokens is not None and query.key is not None:
            self.tokens.learn(pool, query.key, prompt_tokens)
            ratio, sized_at = self.tokens.ratio(pool), self._sized_at_ratio.get(pool, 0.0)
            if ratio > sized_at * _RESIZE_RATIO or ratio * _RESIZE_RATIO < sized_at:
                self._resize(pool, ratio)
        if completion_tokens:
            before = self._output_tokens.get(pool, DEFAULT_OUTPUT_TOKENS)
            self._output_tokens[pool] = before + 0.02 * (completion_tokens - before)

    # -- the fleet changes

    def standing(self) -> Standing:
        """Return what is known of the replicas; the same object until that changes."""
        if self._standing is None:
            self._standing = Standing(self.fleet, self.memory.capacity_tokens)
        return self._standing

    def _changed(self, change: Change, replica: Replica) -> None:
        self._standing = None
        if change is Change.ADDED:
            self._open(replica)
        elif change is Change.REMOVED:
            self.ledger.retire(replica.slot)
            self.memory.retire(replica.slot)
            self.index.forget(replica.slot)
            self.feedback.forget(replica.slot)
            self.room.forget(replica.slot)
            self._columns.retire(replica.slot)
            self._forget(replica.slot)
        elif change is Change.RESTARTED:
            self.memory.retire(replica.slot)
            self.predictor.forget(replica.slot)
            if self.restart_is_news(replica):
                self.index.forget(replica.slot)
            self.feedback.forget(replica.slot)
            self._forget(replica.slot)
        elif change in (Change.MODELS, Change.CONFIGURED):
            self._configure(replica)
        if change in (Change.UP, Change.RESTARTED, Change.RESTORED):
            self.room.came_up(replica.slot)
        if change is Change.CONFIGURED:
            self.room.limit(replica.slot, replica.spec.max_in_flight)
        if change in (Change.CAPACITY, Change.MODELS, Change.ADDED, Change.RESTARTED, Change.CONFIGURED):
            self.set_capacity(replica)

    def _open(self, replica: Replica) -> None:
        slot = replica.slot
        self.ledger.open(slot)
        self.memory.open(slot)
        self.room.limit(slot, replica.spec.max_in_flight)
        self._columns.open(slot, replica.name)
        self._configure(replica)
        self._columns.follow(slot)
        self.set_capacity(replica)

    def _forget(self, slot: int) -> None:
        for policy in self._remembering:
            policy.forget(slot)
        self.hand_offs.forget(slot)
        self._columns.tied.forget(slot)

    def _configure(self, replica: Replica) -> None:
        replica_class = self._class_of(replica)
        self.predictor.configure(replica.slot, replica_class, token_budget=replica.spec.max_num_batched_tokens)
        self.slo.configure(replica.slot, replica_class)

    def _class_of(self, replica: Replica) -> ReplicaClass:
        spec = replica.spec
        served = min(replica.base_models, default="")
        return ReplicaClass(spec.hardware, spec.model_shape, spec.tensor_parallel, served)

    def _resize(self, pool: str, ratio: float) -> None:
        self._sized_at_ratio[pool] = ratio
        for replica in self.fleet.replicas.values():
            if self.fleet.pool(min(replica.base_models, default=None)) == pool:
                self.set_capacity(replica)

    def set_capacity(self, replica: Replica) -> None:
        """Bound what the prefix map believes of a replica by what its engine can hold."""
        scraped = replica.kv.kv_capacity_tokens
        capacity = scraped or self._class_of(replica).kv_capacity_tokens() or DEFAULT_CAPACITY_TOKENS
        pool = self.fleet.pool(min(replica.base_models, default=None))
        block_tokens = replica.kv.block_size_tokens or ENGINE_BLOCK_TOKENS
        self._columns.block_tokens[replica.slot] = block_tokens
        ratio = self.tokens.ratio(pool)
        self.feedback.set_capacity(replica.slot, int(capacity / ratio), block_tokens)
        self.memory.set_capacity(replica.slot, float(capacity), ratio)
        self._standing = None
