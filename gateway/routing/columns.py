"""The candidate columns: where they live, and how each of them is filled.

Columns are lists indexed by replica slot. State columns are the load ledger's own, current at any time. Per-request
ones are scratch space, valid only while a policy chooses. Scraped ones are copied now and then.
"""

from collections.abc import Sequence
from math import inf
from operator import itemgetter
from struct import Struct

from gateway.estimator.predictor import Predictor
from gateway.prefixes.index import PrefixIndex
from gateway.prompt.blocks import BlockSchedule, PromptKey
from gateway.prompt.token_chain import TokenPrompt
from gateway.replicas.kv_memory import KvMemory
from gateway.replicas.load import LoadLedger
from gateway.replicas.registry import Fleet
from gateway.routing.decision import Copy
from gateway.routing.exact_match import Match, TokenMatch
from gateway.routing.shortlist import LoadOrder, Walk
from gateway.routing.tied import Tied
from policies.types import BoundedBelow, Candidates, Column, Policy

ENGINE_BLOCK_TOKENS = 16
"""vLLM's block size on accelerators, until its metrics say otherwise: cached tokens come in multiples of it."""

ENGINE_REFRESH_S = 0.05
"""How often what the engines' metrics say is copied for policies that read it: often against any scrape interval,
seldom against requests."""

ALL_UP_TO = 24
"""Fleets of up to so many candidates are looked at as a whole: a shortlist would cost as much."""

_FIRST_LOOK = 8
"""Candidates by load on a shortlist; each further look is at twice as many."""

LOOK_AT_MOST = 56
"""Candidates by load that are looked at in all, 8 + 16 + 32. Where so many are alike that none of the rest can be ruled
out, one of the best so far will do."""

_MOST_MATCHED = 32
"""Holders of the longest prefixes that are looked at in any case."""

_ENGINES_AT_ONCE = 64

_COPIED_AT_MOST = 64
"""Replicas up to which columns are copied as a whole, and candidates of a larger fleet that are."""

_ENGINE_COLUMNS = frozenset({Column.ENGINE_WAITING, Column.ENGINE_RUNNING, Column.ENGINE_KV_USAGE})
_PREDICTED_COLUMNS = frozenset(
    {
        Column.PREDICTED_TTFT_S,
        Column.OWN_PREFILL_S,
        Column.DECODE_DELAY_S,
        Column.DECODE_STEP_S,
        Column.BATCH_COST_S,
        Column.MEMORY_WAIT_S,
    }
)


class Columns:
    """All columns, and what the policy in force reads of them.

    Attributes:
        candidates: the view that policies get; its `slots` are set per request.
        matched_tokens, own_prefill_s, predicted_ttft_s: per-request columns the router reads as well.
        memory_wait_s: by slot, the part of the predicted TTFT that is waiting for KV memory; per request.
        block_tokens: the engines' block sizes by slot.
        token_match: what the engines themselves have told; None without KV events.
        all_up_to, look_at_most: see `ALL_UP_TO` and `LOOK_AT_MOST`.
    """

    def __init__(
        self,
        fleet: Fleet,
        ledger: LoadLedger,
        memory: KvMemory,
        index: PrefixIndex,
        predictor: Predictor,
        schedule: BlockSchedule,
        seed: int = 0,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._memory = memory
        self._index = index
        self._predictor = predictor
        self._offsets = schedule.offsets
        self.block_tokens: list[int] = []
        self.matched_tokens: list[float] = []
        self.own_prefill_s: list[float] = []
        self.predicted_ttft_s: list[float] = []
        self.memory_wait_s: list[float] = []
        self._ahead_s: list[float] = []
        self._delay_s: list[float] = []
        self._step_s: list[float] = []
        self._batch_cost_s: list[float] = []
        self.tied = Tied()
        self._names: list[str] = []
        self._waiting: list[int] = []
        self._running: list[int] = []
        self._kv_usage: list[float] = []
        self._cache_full: list[bool] = []
        self._waits: list[int] = []
        self._key: PromptKey | None = None
        self._scraped_at_s: list[float | None] = []
        self._matched: Sequence[tuple[int, int]] = ()
        self.token_match: TokenMatch | None = None
        self._matched_by_tokens: Sequence[Match] = ()
        self._engine_read_s = float("-inf")
        self._reads_engine = self._reads_ahead = self._reads_predictions = self._reads_scraped = False
        self._predicted = False
        self._next_engine = 0
        self.all_up_to = ALL_UP_TO
        self.look_at_most = LOOK_AT_MOST
        self._order = LoadOrder(ledger, memory, predictor, self._cache_full, seed)
        self._bounded: BoundedBelow | None = None
        self._walk: Walk | None = None
        self._look = 0
        self._looked_at: list[int] = []
        self._pack = Struct("")
        self._among: tuple[Sequence[int], frozenset[int]] = ((), frozenset())
        self._prompt_tokens = self._now_s = 0.0
        self.candidates = Candidates(
            slots=(),
            names=self._names,
            in_flight=ledger.in_flight,
            prefill_tokens=ledger.prefill_tokens,
            prefill_s=self._ahead_s,
            decodes=ledger.decodes,
            kv_tokens=ledger.kv_tokens,
            kv_own_tokens=ledger.kv_own_tokens,
            kv_capacity_tokens=memory.capacity_tokens,
            kv_room_tokens=memory.room_tokens,
            cache_full=self._cache_full,
            cache_oldest_use=index.oldest_use,
            preferred=ledger.preferred,
            matched_tokens=self.matched_tokens,
            own_prefill_s=self.own_prefill_s,
            predicted_ttft_s=self.predicted_ttft_s,
            decode_delay_s=self._delay_s,
            memory_wait_s=self.memory_wait_s,
            batch_cost_s=self._batch_cost_s,
            tied_per_s=self.tied.per_s,
            tied_saved=self.tied.saved,
            decode_step_s=self._step_s,
            engine_waiting=self._waiting,
            engine_running=self._running,
            engine_kv_usage=self._kv_usage,
        )

    def open(self, slot: int, name: str) -> None:
        """Make room for a slot, and set what is known of its replica."""
        self.tied.open(slot)
        while len(self._names) <= slot:
            for column in (
                self.memory_wait_s,
                self.matched_tokens,
                self.own_prefill_s,
                self.predicted_ttft_s,
                self._ahead_s,
                self._delay_s,
                self._step_s,
                self._batch_cost_s,
                self._kv_usage,
            ):
                column.append(0.0)
            self._waiting.append(0)
            self._running.append(0)
            self._scraped_at_s.append(None)
            self._cache_full.append(False)
            self.block_tokens.append(ENGINE_BLOCK_TOKENS)
            self._names.append("")
        self._names[slot] = name
        self._waiting[slot], self._running[slot], self._kv_usage[slot] = 0, 0, 0.0

    def follow(self, slot: int) -> None:
        """The slot's replica is configured: keep its place in the order of loads from now on."""
        self._order.open(slot)

    def retire(self, slot: int) -> None:
        """The slot's replica is gone."""
        self._order.retire(slot)

    def serve(self, policy: Policy) -> None:
        """Compute from now on what a policy declares that it reads, and nothing else."""
        reads = policy.reads
        self._bounded = policy if isinstance(policy, BoundedBelow) else None
        self._reads_engine = self._reads_scraped = not _ENGINE_COLUMNS.isdisjoint(reads)
        self._reads_predictions = not _PREDICTED_COLUMNS.isdisjoint(reads)
        # Predictions of waiting for memory are set right by what engines say they hold.
        self._reads_engine = self._reads_engine or self._reads_predictions
        self._reads_ahead = self._reads_predictions or Column.PREFILL_S in reads
        self._engine_read_s = float("-inf")

    def fill(
        self,
        slots: Sequence[int],
        key: PromptKey | None,
        prompt_tokens: float,
        now_s: float,
        tokens: TokenPrompt | None = None,
        *,
        whole: bool = True,
        predict: bool = True,
    ) -> Candidates:
        """Fill the columns the policy reads, for one request.

        Args:
            slots: the candidates.
            key: the prompt; None when there is none.
            prompt_tokens: its tokens.
            now_s: monotonic seconds.
            tokens: the prompt as the engine will see it, if known.
            whole: all candidates must be in the view, however many they are.
            predict: fill the predictions, too, if the policy reads any.

        Returns:
            The view for the policy. Call `clear` when it is not needed any more.
        """
        self._key = key
        if key is not None and not key.computed_anew:
            self._match(key, prompt_tokens)
            if tokens is not None and self.token_match is not None:
                self._match_tokens(self.token_match.match(tokens))
        candidates = self.candidates
        self.tied.fade(now_s)
        if self._reads_engine and now_s - self._engine_read_s >= ENGINE_REFRESH_S:
            self._read_engines(now_s)
        if not whole and self._bounded is not None and len(slots) > self.all_up_to:
            candidates.total, candidates.more = len(slots), self._more
            slots = self._shortlist(slots, prompt_tokens, now_s, self._bounded)
        self._predicted = self._reads_predictions and predict
        if self._reads_ahead:
            self._ledger.fill_prefill_ahead_s(slots, now_s, self._ahead_s)
        if self._predicted:
            self._predict(slots, prompt_tokens, now_s)
        candidates.slots = slots
        return candidates

    def _shortlist(
        self, slots: Sequence[int], prompt_tokens: float, now_s: float, bounded: BoundedBelow
    ) -> Sequence[int]:
        """Begin with those that hold most of the prompt, and the least loaded."""
        of, among = self._among
        if of is not slots:
            among = frozenset(slots)
            self._among = (slots, among)
        tokens = self.matched_tokens
        holders = [slot for slot, _ in self._matched]
        if self._matched_by_tokens:
            holders.extend([slot for slot, _, _ in self._matched_by_tokens])
        most = 0.0
        if len(holders) > _MOST_MATCHED:
            # What all hold, a system prompt, tells nobody apart.
            most = sorted([tokens[slot] for slot in holders])[-_MOST_MATCHED]
        matched = {slot for slot in holders if tokens[slot] > most and slot in among}
        self._prompt_tokens, self._now_s = prompt_tokens, now_s
        self._walk = self._order.walk(prompt_tokens, most, bounded.floor_prices(), among, matched)
        self._look = _FIRST_LOOK
        first = self._walk.further(inf, _FIRST_LOOK)
        first.extend(matched)
        first.sort()
        self._looked_at = list(first)
        return first

    def _more(self, below_s: float) -> Sequence[int]:
        """What policies call as `Candidates.more`."""
        walk = self._walk
        assert walk is not None
        self._look *= 2
        if 2 * self._look - _FIRST_LOOK > self.look_at_most:
            return ()
        slots = walk.further(below_s, self._look)
        if slots:
            slots.sort()
            self._looked_at.extend(slots)
            self._ledger.fill_prefill_ahead_s(slots, self._now_s, self._ahead_s)
            self._predict(slots, self._prompt_tokens, self._now_s)
        return slots

    def predict_chosen(self, slot: int, prompt_tokens: float, now_s: float) -> None:
        """Make sure there is a prediction for the chosen slot, whatever the policy reads."""
        if not self._predicted:
            one = (slot,)
            self._ledger.fill_prefill_ahead_s(one, now_s, self._ahead_s)
            self._predict(one, prompt_tokens, now_s)

    def predict_all(self, slots: Sequence[int], prompt_tokens: float, now_s: float) -> None:
        """Make sure there are predictions for all of these slots, whatever the policy reads, and it chose from."""
        if not self._predicted or not set(slots).issubset(self.candidates.slots):
            self._ledger.fill_prefill_ahead_s(slots, now_s, self._ahead_s)
            self._predict(slots, prompt_tokens, now_s)

    @property
    def predicted(self) -> bool:
        """The candidates' predictions are of this request."""
        return self._predicted

    def copied(self, chosen: int) -> Copy:
        """Copy what a decision was made from, before it is charged.

        Args:
            chosen: the slot that was chosen; of a large fleet, it is among those whose columns are copied.
        """
        ledger, memory, slots = self._ledger, self._memory, self.candidates.slots
        columns: tuple[Sequence[float], ...] = (
            ledger.in_flight,
            ledger.decodes,
            ledger.prefill_tokens,
            memory.room_tokens,
            self._cache_full,
            self._kv_usage,
            self.tied.per_s,
            self.tied.saved,
            self.matched_tokens,
            self.memory_wait_s,
            self._ahead_s,
            self.own_prefill_s,
            self.predicted_ttft_s,
            self._delay_s,
            self._batch_cost_s,
        )
        values: list[float] = []
        if self._walk is not None:
            slots = self._looked_at
        whole = len(self._names) <= _COPIED_AT_MOST
        if whole:
            for column in columns:
                values.extend(column)
        else:
            if len(slots) > _COPIED_AT_MOST:
                slots = [*slots[: _COPIED_AT_MOST - 1], chosen]
            # One more, because of one item alone no tuple would be made.
            take = itemgetter(*slots, chosen)
            for column in columns:
                values.extend(take(column))
        if self._pack.size != 8 * len(values):
            self._pack = Struct(f"{len(values)}d")
        # Half of what an array would cost.
        return Copy(slots, whole, self._pack.pack(*values), self._reads_ahead, self._predicted)

    def clear(self) -> None:
        """Forget the matches of the last request."""
        tokens = self.matched_tokens
        for slot, _ in self._matched:
            tokens[slot] = 0.0
        self._matched = ()
        if self._walk is not None:
            self._walk, self.candidates.more, self.candidates.total = None, None, 0
        if self._waits:
            for slot in self._waits:
                self.memory_wait_s[slot] = 0.0
            self._waits.clear()
        for slot, _, _ in self._matched_by_tokens:
            tokens[slot] = 0.0
        self._matched_by_tokens = ()

    def _match_tokens(self, matches: Sequence[Match]) -> None:
        """Put what the engines have told in place of what the byte map believes."""
        self._matched_by_tokens = matches
        tokens = self.matched_tokens
        for slot, held, sure in matches:
            if sure or held > tokens[slot]:
                tokens[slot] = held

    def _match(self, key: PromptKey, prompt_tokens: float) -> None:
        matched = self._matched = self._index.match(key.hashes)
        if matched:
            per_byte = prompt_tokens / key.canonical_bytes
            # The engine computes at least the last token itself, and caches whole blocks only.
            most = max(int(prompt_tokens) - 1, 0)
            offsets, tokens, sizes = self._offsets, self.matched_tokens, self.block_tokens
            before = held = 0
            for slot, blocks in matched:
                if blocks != before:
                    before, held = blocks, min(int(offsets[blocks] * per_byte), most)
                tokens[slot] = float(held - held % sizes[slot])
            if key.continued_hash:
                self._match_answer(key, per_byte, most)

    def _match_answer(self, key: PromptKey, per_byte: float, most: int) -> None:
        """Who has given the answer that the prompt continues holds it, too."""
        blocks, answer, holds = key.continued_blocks, key.continued_hash, self._index.holds
        held = min(int(key.continued_bytes * per_byte), most)
        tokens, sizes = self.matched_tokens, self.block_tokens
        for slot, depth in self._matched:
            if depth >= blocks and holds(slot, answer):
                tokens[slot] = max(tokens[slot], float(held - held % sizes[slot]))

    def _predict(self, slots: Sequence[int], prompt_tokens: float, now_s: float) -> None:
        ledger = self._ledger
        self._predictor.fill(
            slots,
            now_s,
            prompt_tokens,
            self.matched_tokens,
            self._ahead_s,
            ledger.prefill_tokens,
            ledger.decodes,
            ledger.context_tokens,
            self._memory.context_shift_tokens,
            ledger.step_seen_s,
            self.own_prefill_s,
            self.predicted_ttft_s,
            self._delay_s,
            self._step_s,
            self._batch_cost_s,
            ledger.kv_tokens,
        )
        memory = self._memory
        if memory.crowded or prompt_tokens >= memory.look_from_tokens:
            room = memory.room_tokens
            for slot in slots:
                if room[slot] < prompt_tokens:
                    self._wait_for_memory(slot, prompt_tokens, now_s)

    def _wait_for_memory(self, slot: int, prompt_tokens: float, now_s: float) -> None:
        in_use_tokens, key = 0.0, self._key
        if self._matched and key is not None:
            depth = next((blocks for holder, blocks in self._matched if holder == slot), 0)
            blocks = self._index.in_use_blocks(slot, key.hashes, depth)
            in_use_tokens = self._offsets[blocks] * prompt_tokens / key.canonical_bytes
        wait_s = self._memory.wait_s(slot, prompt_tokens - in_use_tokens, now_s)
        if wait_s > 0.0:
            self.memory_wait_s[slot] = wait_s
            self.predicted_ttft_s[slot] += wait_s
            self._waits.append(slot)

    def _read_engines(self, now_s: float) -> None:
        """Copy what the engines' metrics last said."""
        self._engine_read_s = now_s
        by_slot = self._fleet.by_slot
        first, last = 0, len(by_slot)
        # Where only the wait for memory is set right by it, a large fleet has time.
        if last > _ENGINES_AT_ONCE and not self._reads_scraped:
            first = self._next_engine if self._next_engine < last else 0
            last = self._next_engine = min(first + _ENGINES_AT_ONCE, last)
        for slot in range(first, last):
            replica = by_slot[slot]
            if replica is not None:
                kv = replica.kv
                self._waiting[slot] = kv.waiting or 0
                self._running[slot] = kv.running or 0
                self._kv_usage[slot] = kv.kv_usage or 0.0
                full = self._index.full(slot)
                if full is not self._cache_full[slot]:
                    self._cache_full[slot] = full
                    self._order.touched.add(slot)
                if kv.scraped_at_s != self._scraped_at_s[slot]:
                    self._scraped_at_s[slot] = kv.scraped_at_s
                    if kv.kv_usage is not None and kv.waiting == 0:
                        self._memory.saw_usage(slot, kv.kv_usage, now_s)
