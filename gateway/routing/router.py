"""From a request to an assigned replica: candidates -> policy -> decision, and the release of what it reserved.

Theory of operation
- `query` reads a request once: model, prompt key, token estimates. `assign` may then be called once per attempt.
- `assign` builds the candidates, asks the policy, and charges the chosen replica at once: the load ledger, and the
  prefix map on the assumption that the prompt will be computed there.
- The returned `Assignment` gives all of it back exactly once, and learns from what was observed.
- Columns are shared lists indexed by slot. State columns belong to the ledger and are current; the per-request ones
  are scratch space of the router, valid only while `choose` runs; scraped ones are copied now and then.
"""

import logging
from collections.abc import Mapping, Sequence
from weakref import WeakSet

from gateway.estimator.predictor import Predictor, ReplicaClass
from gateway.prefixes.index import PrefixIndex, Record
from gateway.prompt.blocks import DEFAULT_SCHEDULE, BlockSchedule, PromptKey
from gateway.prompt.body import RequestBody
from gateway.prompt.rewrite import replace_model
from gateway.prompt.tokens import TokensPerByte
from gateway.replicas.breaker import Outcome as AttemptOutcome
from gateway.replicas.ejection import Attempt, Ejector
from gateway.replicas.load import LoadLedger, Ticket
from gateway.replicas.registry import Change, Fleet, Replica
from gateway.routing.room import Room
from policies.types import Candidates, Choice, Column, Policy, RemembersReplicas, Request

logger = logging.getLogger(__name__)

ENGINE_BLOCK_TOKENS = 16
"""vLLM's block size on accelerators: cached tokens come in multiples of it."""

DEFAULT_OUTPUT_TOKENS = 256.0
DEFAULT_CAPACITY_TOKENS = 200_000.0
"""KV capacity assumed until the engine or the hardware says; small, because believing in more than the engine holds is
what makes approximate routing collapse."""

ENGINE_REFRESH_S = 0.05
"""How often what the engines' metrics say is copied for policies that read it: often against any scrape interval,
seldom against requests."""

_ENGINE_COLUMNS = frozenset({Column.ENGINE_WAITING, Column.ENGINE_RUNNING, Column.ENGINE_KV_USAGE})


class UnknownModel(LookupError):
    """No replica has ever listed the model."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.model = model


class NoReplica(LookupError):
    """The model is known, but no replica can take the request now."""


class Saturated(NoReplica):
    """Replicas could, but each has as many requests as it may have."""


class Query:
    """One request as the router sees it.

    Attributes:
        model: the name to route by, aliases resolved; None for requests that name none.
        pool: base model, for metrics and for what is learned per model.
        key: the prompt key; None when the body has no canonical prompt.
        request: what the policy may know.
        stream: the client asked for a stream.
        rewritten_model: the name that must replace an alias in the body; None to forward the body as it is.
    """

    __slots__ = ("key", "max_tokens", "model", "pool", "request", "rewritten_model", "stream")

    def __init__(
        self,
        model: str | None,
        pool: str,
        key: PromptKey | None,
        request: Request,
        stream: bool,
        max_tokens: int | None,
        rewritten_model: str | None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.key = key
        self.request = request
        self.stream = stream
        self.max_tokens = max_tokens
        self.rewritten_model = rewritten_model

    def rewritten_body(self, body: bytes) -> bytes:
        """Return the body with the alias replaced by the model's own name."""
        return body if self.rewritten_model is None else replace_model(body, self.rewritten_model)


class Assignment:
    """One attempt's place on one replica: what it was promised, what it holds, and how it gives that back.

    Attributes:
        replica, slot: where.
        policy: who decided.
        reason, terms: why.
        expected_cached_tokens: prompt tokens the prefix map says are there.
        predicted_ttft_s: seconds from assignment to the first token.
        assigned_s: when.
        observed_ttft_s: what it was in the end; None before.
    """

    __slots__ = (
        "_attempt",
        "_first",
        "_query",
        "_record",
        "_router",
        "_ticket",
        "_work_s",
        "assigned_s",
        "expected_cached_tokens",
        "finished",
        "observed_ttft_s",
        "policy",
        "predicted_ttft_s",
        "reason",
        "replica",
        "slot",
        "terms",
    )

    def __init__(
        self,
        router: "Router",
        query: Query,
        replica: Replica,
        choice: Choice,
        policy: str,
        now_s: float,
        expected_cached_tokens: int,
        predicted_ttft_s: float,
        work_s: float,
        ticket: Ticket,
        record: Record | None,
        attempt: Attempt,
        first: bool,
    ) -> None:
        self._router = router
        self._query = query
        self.replica = replica
        self.slot = choice.slot
        self.reason = choice.reason
        self.terms: Mapping[str, float] = choice.terms
        self.policy = policy
        self.assigned_s = now_s
        self.expected_cached_tokens = expected_cached_tokens
        self.predicted_ttft_s = predicted_ttft_s
        self.observed_ttft_s: float | None = None
        self.finished = False
        self._work_s = work_s
        self._ticket = ticket
        self._record = record
        self._attempt = attempt
        self._first = first

    def first_token(self, now_s: float) -> None:
        """The first token has been seen: its prefill is done, and the prediction can be judged."""
        if self.observed_ttft_s is not None or self.finished:
            return
        self.observed_ttft_s = now_s - self.assigned_s
        self._ticket.first_token(now_s)
        self._router.ejector.answered(self._attempt)
        # The slot may belong to another replica by now.
        if self._first and self._query.key is not None and self._router.fleet.has(self.replica):
            self._router.predictor.observe(self.slot, self._work_s, self.predicted_ttft_s, self.observed_ttft_s)

    def presume(self, now_s: float) -> None:
        """A request that is not streamed shows no first token: count it as decoding once it should be."""
        if not self._query.stream and now_s - self.assigned_s > self.predicted_ttft_s:
            self._ticket.first_token(now_s)

    def finish(
        self,
        now_s: float,
        outcome: AttemptOutcome,
        prompt_tokens: int | None,
        completion_tokens: int | None,
        *,
        keep_prefix: bool,
    ) -> None:
        """Give back everything that is still held; only the first call counts.

        Args:
            now_s: monotonic seconds.
            outcome: what the end says about the replica.
            prompt_tokens: as the engine reported them, if it did.
            completion_tokens: as the engine reported them, if it did.
            keep_prefix: the prompt was computed there, so the prefix map is right to say so.
        """
        if self.finished:
            return
        self.finished = True
        router = self._router
        self._ticket.finish(now_s)
        router.ejector.record(self._attempt, outcome, now_s)
        if not keep_prefix and self._record is not None:
            router.index.undo(self._record)
        query = self._query
        if prompt_tokens is not None and query.key is not None:
            router.tokens.learn(query.pool, query.key, prompt_tokens)
        if completion_tokens:
            router.learn_output(query.pool, completion_tokens)


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
        """
        self.fleet = fleet
        self.ledger = ledger
        self.room = Room(ledger.in_flight, slow_start_s)
        self.ejector = ejector
        self.index = index
        self.tokens = tokens
        self.predictor = predictor
        self._schedule = schedule
        self._session_header = session_header.lower().encode() if session_header else None
        self._output_tokens: dict[str, float] = {}
        self._capacity_tokens: list[float] = []
        self._matched_tokens: list[float] = []
        self._ahead_s: list[float] = []
        self._own_s: list[float] = []
        self._ttft_s: list[float] = []
        self._delay_s: list[float] = []
        self._step_s: list[float] = []
        self._names: list[str] = []
        self._waiting: list[int] = []
        self._running: list[int] = []
        self._kv_usage: list[float] = []
        self._engine_read_s = float("-inf")
        self._remembering: WeakSet[RemembersReplicas] = WeakSet()
        self._candidates = Candidates(
            slots=(),
            names=self._names,
            in_flight=ledger.in_flight,
            prefill_tokens=ledger.prefill_tokens,
            prefill_s=self._ahead_s,
            decodes=ledger.decodes,
            kv_tokens=ledger.kv_tokens,
            kv_own_tokens=ledger.kv_own_tokens,
            kv_capacity_tokens=self._capacity_tokens,
            matched_tokens=self._matched_tokens,
            own_prefill_s=self._own_s,
            predicted_ttft_s=self._ttft_s,
            decode_delay_s=self._delay_s,
            decode_step_s=self._step_s,
            engine_waiting=self._waiting,
            engine_running=self._running,
            engine_kv_usage=self._kv_usage,
        )
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
        self._reads_engine = not _ENGINE_COLUMNS.isdisjoint(policy.reads)
        self._engine_read_s = float("-inf")
        if isinstance(policy, RemembersReplicas):
            self._remembering.add(policy)

    # -- the life of a request

    def query(self, body: RequestBody | None, headers: Mapping[bytes, bytes]) -> Query:
        """Read a request.

        Args:
            body: the parsed body; None for requests without a JSON body.
            headers: the request's headers by lower-case name.

        Raises:
            UnknownModel: the body names a model that no replica has ever listed.
        """
        fleet = self.fleet
        name = body.model if body is not None else None
        model: str | None = None
        if name is not None:
            model = fleet.resolve(name)
            if not fleet.knows(model):
                raise UnknownModel(name)
        pool = fleet.pool(model)
        key = body.prompt if body is not None else None
        prompt_tokens = self.tokens.estimate(pool, key) if key is not None else 0.0
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
            block_offsets=self._schedule.offsets,
            canonical_bytes=key.canonical_bytes if key is not None else 0,
        )
        stream = body.stream if body is not None else False
        return Query(model, pool, key, request, stream, max_tokens, model if model != name else None)

    def assign(self, query: Query, tried: Sequence[int], now_s: float) -> Assignment:
        """Choose a replica for an attempt and charge it.

        Args:
            query: the request.
            tried: slots that must not be chosen again.
            now_s: monotonic seconds.

        Raises:
            NoReplica: there is no candidate.
            Saturated: there are, and all are at their limit.
        """
        fleet = self.fleet
        slots = fleet.route_slots(query.model)
        if tried:
            slots = [slot for slot in slots if slot not in tried]
        if not slots:
            raise NoReplica
        slots = self.room.among(slots, now_s)
        if not slots:
            raise Saturated
        candidates = self._candidates
        candidates.slots = slots
        policy = self._policy
        reads = policy.reads
        ahead_s = self._ahead_s
        ledger = self.ledger
        key = query.key
        matched = self._match(key, query.request.prompt_tokens)
        predicts = Column.PREDICTED_TTFT_S in reads or Column.OWN_PREFILL_S in reads
        if predicts or Column.PREFILL_S in reads:
            ledger.fill_prefill_ahead_s(slots, now_s, ahead_s)
        if predicts:
            self._predict(slots, query.request.prompt_tokens)
        if self._reads_engine and now_s - self._engine_read_s >= ENGINE_REFRESH_S:
            self._read_engines(now_s)
        query.request.now_s = now_s
        choice = policy.choose(query.request, candidates)
        slot = choice.slot
        replica = fleet.by_slot[slot]
        assert replica is not None, "a policy chose a slot that is not a candidate"
        if not predicts:
            one = (slot,)
            ledger.fill_prefill_ahead_s(one, now_s, ahead_s)
            self._predict(one, query.request.prompt_tokens)
        cached_tokens = self._matched_tokens[slot]
        own_s = self._own_s[slot]
        ttft_s = self._ttft_s[slot]
        for touched, _ in matched:
            self._matched_tokens[touched] = 0.0
        request = query.request
        ticket = ledger.start(
            slot,
            now_s,
            request.prompt_tokens,
            request.prompt_tokens - cached_tokens,
            own_s,
            request.expected_output_tokens,
        )
        record = self.index.insert(slot, key.hashes) if key is not None and key.hashes else None
        return Assignment(
            self,
            query,
            replica,
            choice,
            policy.name,
            now_s,
            int(cached_tokens),
            ttft_s,
            self.predictor.work_s(slot, ttft_s),
            ticket,
            record,
            self.ejector.begin(replica),
            not tried,
        )

    def learn_output(self, pool: str, completion_tokens: int) -> None:
        """Follow the mean answer length of a pool, in tokens."""
        before = self._output_tokens.get(pool, DEFAULT_OUTPUT_TOKENS)
        self._output_tokens[pool] = before + 0.02 * (completion_tokens - before)

    # -- inside

    def _match(self, key: PromptKey | None, prompt_tokens: float) -> Sequence[tuple[int, int]]:
        """Fill `matched_tokens` for the replicas that hold a prefix; return their slots and matched blocks."""
        if key is None:
            return ()
        matched = self.index.match(key.hashes)
        if matched:
            per_byte = prompt_tokens / key.canonical_bytes
            # The engine computes at least the last token itself, and caches whole blocks only.
            most = ((int(prompt_tokens) - 1) // ENGINE_BLOCK_TOKENS) * ENGINE_BLOCK_TOKENS
            offsets, tokens = self._schedule.offsets, self._matched_tokens
            for slot, blocks in matched:
                held = int(offsets[blocks] * per_byte) // ENGINE_BLOCK_TOKENS * ENGINE_BLOCK_TOKENS
                tokens[slot] = float(max(min(held, most), 0))
        return matched

    def _predict(self, slots: Sequence[int], prompt_tokens: float) -> None:
        ledger = self.ledger
        self.predictor.fill(
            slots,
            prompt_tokens,
            self._matched_tokens,
            self._ahead_s,
            ledger.prefill_tokens,
            ledger.decodes,
            ledger.context_tokens,
            self._own_s,
            self._ttft_s,
            self._delay_s,
            self._step_s,
        )

    def _read_engines(self, now_s: float) -> None:
        """Copy what the engines' metrics last said."""
        self._engine_read_s = now_s
        for slot, replica in enumerate(self.fleet.by_slot):
            if replica is not None:
                kv = replica.kv
                self._waiting[slot] = kv.waiting or 0
                self._running[slot] = kv.running or 0
                self._kv_usage[slot] = kv.kv_usage or 0.0

    # -- the fleet changes

    def _changed(self, change: Change, replica: Replica) -> None:
        if change is Change.ADDED:
            self._open(replica)
        elif change is Change.REMOVED:
            self.ledger.retire(replica.slot)
            self.index.forget(replica.slot)
            self.room.forget(replica.slot)
            self._forget(replica.slot)
        elif change is Change.RESTARTED:
            self.index.forget(replica.slot)
            self._forget(replica.slot)
        elif change is Change.MODELS:
            self._configure(replica)
        if change in (Change.UP, Change.RESTARTED, Change.RESTORED):
            self.room.came_up(replica.slot)
        if change in (Change.CAPACITY, Change.MODELS, Change.ADDED, Change.RESTARTED):
            self.set_capacity(replica)

    def _open(self, replica: Replica) -> None:
        slot = replica.slot
        self.ledger.open(slot)
        self.room.limit(slot, replica.spec.max_in_flight)
        while len(self._capacity_tokens) <= slot:
            self._capacity_tokens.append(DEFAULT_CAPACITY_TOKENS)
            self._matched_tokens.append(0.0)
            for column in (
                self._ahead_s,
                self._own_s,
                self._ttft_s,
                self._delay_s,
                self._step_s,
                self._kv_usage,
            ):
                column.append(0.0)
            self._waiting.append(0)
            self._running.append(0)
            self._names.append("")
        self._names[slot] = replica.name
        self._waiting[slot], self._running[slot], self._kv_usage[slot] = 0, 0, 0.0
        self._configure(replica)
        self.set_capacity(replica)

    def _forget(self, slot: int) -> None:
        for policy in self._remembering:
            policy.forget(slot)

    def _configure(self, replica: Replica) -> None:
        self.predictor.configure(replica.slot, self._class_of(replica))

    def _class_of(self, replica: Replica) -> ReplicaClass:
        spec = replica.spec
        served = min(replica.base_models, default="")
        return ReplicaClass(spec.hardware, spec.model_shape, spec.tensor_parallel, served)

    def set_capacity(self, replica: Replica) -> None:
        """Bound what the prefix map believes of a replica by what its engine can hold."""
        scraped = replica.kv.kv_capacity_tokens
        capacity = scraped or self._class_of(replica).kv_capacity_tokens() or DEFAULT_CAPACITY_TOKENS
        self._capacity_tokens[replica.slot] = float(capacity)
        per_byte = self.tokens.ratio(self.fleet.pool(min(replica.base_models, default=None)))
        self.index.set_capacity(replica.slot, int(capacity / per_byte))
