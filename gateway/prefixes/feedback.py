"""What the engines' counts of cached tokens say about the prefix map, and what follows from it.

For each request the map promises that a replica holds some prefix of it; the engine then reports how much it found
(`usage.prompt_tokens_details.cached_tokens`). Rules:

- A promise is judged in the engine's own terms: cached tokens come in whole blocks of the engine, never the whole
  prompt (vLLM V1, `KVCacheManager.get_computed_blocks`), and where the map's blocks end in tokens is an estimate.
- One that rests on a prompt which was still to be computed when the promise was made says nothing: requests in flight
  together may each have computed what they share. Nor does one whose request was aborted or retried, or whose replica
  has restarted since.
- After a broken promise the prompt itself is there, because the engine has computed it. But in an LRU cache whatever
  was used less recently than the block that had to go has gone before it, so the map drops what is older.
- Replicas that break promises time and again hold less than is believed (answers and other clients take room), so the
  share of the capacity that the map may fill shrinks with each, and grows slowly with those that are kept.
"""

import logging

from gateway.prefixes.index import PrefixIndex, Record, Schedule

logger = logging.getLogger(__name__)

DEFAULT_ENGINE_BLOCK_TOKENS = 16
"""vLLM's block size on accelerators."""

_POSITION_ERROR = 0.05
"""Relative error of a position in tokens: text has other tokens per byte in one part of a prompt than in another."""
_SHRINK = 0.05
"""Share of the capacity that a promise costs of which nothing was there."""
_GROW = 0.002
"""Share of the capacity that a kept one brings: together they let one in 25 fail."""
_MIN_SHARE = 1.0 / 64.0
"""So little that next to nothing is promised, as is right for a replica that caches nothing."""
_ANSWER_WEIGHT = 0.05
"""Of one more in the share of answers found again: the last 20."""
_ANSWERS_OFF, _ANSWERS_ON = 0.5, 0.6
"""Below the one, answers are not counted as cached any more, above the other they are again. Clients that leave the
reasoning out of what they repeat, or templates that write an answer differently from how the model did, never find
theirs."""
_EXPIRE_SEGMENTS = 64
"""Runs of blocks dropped per broken promise; a report may be wrong, and the event loop has other things to do."""
_RECENT = 0.98
"""Weight of the past in the share of kept promises: the last 50."""
_SILENT_ANSWERS = 20
"""Answers with usage but without cached tokens after which the log says what to do."""


class _Slot:
    """What is known of one replica.

    Attributes:
        life: changes whenever what the replica had cached is gone, or another has taken the slot.
        reports: it has reported cached tokens.
        pending: first new blocks of prompts that are still to be computed.
        share: how much of its capacity the map may fill.
        kept_share: moving share of promises kept; None before the first.
        answers_share: moving share of answers found again by prompts that continue them.
        answers_count: they are counted as cached.
    """

    __slots__ = (
        "answers_count",
        "answers_share",
        "block_tokens",
        "broken",
        "capacity_bytes",
        "kept",
        "kept_share",
        "life",
        "pending",
        "reports",
        "share",
        "silent",
        "unjudged",
    )

    def __init__(self) -> None:
        self.capacity_bytes = 0
        self.life = 0
        self.kept = self.broken = self.unjudged = 0
        self.clear()

    def clear(self) -> None:
        """Another process answers here from now on."""
        self.life += 1
        self.block_tokens = DEFAULT_ENGINE_BLOCK_TOKENS
        self.reports = False
        self.silent = 0
        self.share = 1.0
        self.kept_share: float | None = None
        self.answers_share = 1.0
        self.answers_count = True
        self.pending: set[int] = set()


class Promise:
    """What the map promised for one attempt, until the engine has said what was true.

    Attributes:
        record: the insertion into the map.
        continued_bytes: canonical bytes to the end of the answer it continues; 0 if it continues none of the replica's.
    """

    __slots__ = ("_bytes", "_feedback", "_firm", "_life", "_pending", "_slot", "continued_bytes", "record")

    def __init__(
        self, feedback: "CacheFeedback", slot: _Slot, record: Record, prompt_bytes: int, continued_bytes: int
    ) -> None:
        self.record = record
        self.continued_bytes = continued_bytes if record.continues else 0
        self._feedback = feedback
        self._slot = slot
        self._life = slot.life
        self._bytes = prompt_bytes
        hashes, matched = record.hashes, record.matched_blocks
        pending = slot.pending
        self._firm = slot.reports and (not pending or pending.isdisjoint(hashes[:matched]))
        self._pending: int | None = None
        if slot.reports and matched < len(hashes):
            self._pending = hashes[matched]
            pending.add(self._pending)

    def computed(self) -> None:
        """The prompt's first token has been seen: all of it is in the cache. Idempotent."""
        if self._pending is not None:
            if self._life == self._slot.life:
                self._slot.pending.discard(self._pending)
            self._pending = None

    def ended(self, prompt_tokens: int | None, cached_tokens: int | None, *, kept: bool) -> None:
        """The attempt has ended.

        Args:
            prompt_tokens: tokens of the prompt as the engine reported them, None if it did not.
            cached_tokens: those it found in its cache.
            kept: the prompt was computed; otherwise the insertion is taken back.
        """
        self.computed()
        if not kept:
            self._feedback.index.undo(self.record)
        elif prompt_tokens is not None and self._life == self._slot.life:
            self._feedback.reported(self, prompt_tokens, cached_tokens)

    def answered(self, answer: int) -> None:
        """The prompt has been answered in full: the replica holds the answer, under this hash."""
        if self._life == self._slot.life:
            self._feedback.index.answered(self.record, answer)

    @property
    def firm(self) -> bool:
        """All that was promised had been computed before."""
        return self._firm

    @property
    def prompt_bytes(self) -> int:
        """Canonical bytes of the prompt; 0 if tokens cannot be told from bytes."""
        return self._bytes


class CacheFeedback:
    """Judges promises and corrects the map of each replica."""

    def __init__(self, index: PrefixIndex, schedule: Schedule, *, enabled: bool = True) -> None:
        """Start without replicas.

        Args:
            index: the map.
            schedule: where its blocks end.
            enabled: draw conclusions; otherwise promises are only undone when their attempt fails.
        """
        self.index = index
        self.enabled = enabled
        self._offsets = schedule.offsets
        self._slots: list[_Slot] = []
        self._told = False

    def promise(self, record: Record, prompt_bytes: int, continued_bytes: int = 0) -> Promise:
        """Remember what the map has just promised.

        Args:
            record: the insertion that goes with it.
            prompt_bytes: canonical bytes of the prompt; 0 if positions in them say nothing about tokens.
            continued_bytes: canonical bytes to the end of the answer it continues; 0 if it continues none.
        """
        return Promise(self, self._slot(record.slot), record, prompt_bytes, continued_bytes)

    def forget(self, slot: int) -> None:
        """The replica's cache is empty now, or the replica has left; promises made before are not judged."""
        self._slot(slot).clear()
        self.index.count_answers(slot, True)

    def set_capacity(self, slot: int, capacity_bytes: int, block_tokens: int | None = None) -> None:
        """Say what the replica's KV memory can hold at most.

        Args:
            slot: replica slot.
            capacity_bytes: canonical bytes of prompts.
            block_tokens: the engine's block size, None if it is not known.
        """
        state = self._slot(slot)
        state.capacity_bytes = capacity_bytes
        state.block_tokens = block_tokens or DEFAULT_ENGINE_BLOCK_TOKENS
        self._apply(slot, state)

    def reported(self, promise: Promise, prompt_tokens: int, cached_tokens: int | None) -> None:
        """Judge a promise by what the engine reported of its request."""
        slot = promise.record.slot
        state = self._slots[slot]
        if cached_tokens is None:
            self._without_report(state)
            return
        state.reports = self.enabled
        matched = promise.record.matched_blocks
        if not state.reports or not matched:
            return
        promised = 0.0
        if promise.firm and promise.prompt_bytes:
            at_most = prompt_tokens - 1
            promised = min(self._offsets[matched] * prompt_tokens / promise.prompt_bytes, at_most)
        least = promised * (1.0 - _POSITION_ERROR) - state.block_tokens
        if least <= 0.0:
            # Too short to tell a broken promise from rounding, or not to be judged at all.
            state.unjudged += 1
            return
        if cached_tokens >= least:
            state.kept += 1
            change = _GROW
            if promise.continued_bytes:
                self._judge_answer(slot, state, promise, prompt_tokens, cached_tokens, promised)
        else:
            state.broken += 1
            self.index.expire(slot, promise.record.used_before, _EXPIRE_SEGMENTS)
            change = -_SHRINK * state.share * (1.0 - cached_tokens / least)
        before = 1.0 if state.kept_share is None else state.kept_share
        state.kept_share = _RECENT * before + (1.0 - _RECENT) * (change > 0.0)
        share = min(max(state.share + change, _MIN_SHARE), 1.0)
        if share != state.share:
            state.share = share
            self._apply(slot, state)

    def _judge_answer(
        self, slot: int, state: _Slot, promise: Promise, prompt_tokens: int, cached_tokens: int, without_tokens: float
    ) -> None:
        """Judge whether an answer was found again, where the prompt before it was."""
        answer_tokens = promise.continued_bytes * prompt_tokens / promise.prompt_bytes - without_tokens
        if answer_tokens < 4 * state.block_tokens:
            return
        found = cached_tokens - without_tokens > 0.5 * answer_tokens
        state.answers_share += _ANSWER_WEIGHT * (found - state.answers_share)
        count = state.answers_share > (_ANSWERS_OFF if state.answers_count else _ANSWERS_ON)
        if count is not state.answers_count:
            state.answers_count = count
            self.index.count_answers(slot, count)

    # -- for reports

    def promises(self, slot: int) -> tuple[int, int, int]:
        """Promises of a slot so far: kept, broken, not judged."""
        state = self._slot(slot)
        return state.kept, state.broken, state.unjudged

    def kept_share(self, slot: int) -> float | None:
        """Share of the last promises that were kept; None before there was one."""
        return self._slot(slot).kept_share

    def capacity_share(self, slot: int) -> float:
        """Share of the replica's capacity that the map may fill."""
        return self._slot(slot).share

    def _slot(self, slot: int) -> _Slot:
        slots = self._slots
        while len(slots) <= slot:
            slots.append(_Slot())
        return slots[slot]

    def _apply(self, slot: int, state: _Slot) -> None:
        self.index.set_capacity(slot, int(state.capacity_bytes * state.share))

    def _without_report(self, state: _Slot) -> None:
        state.silent += 1
        if self.enabled and not self._told and state.silent >= _SILENT_ANSWERS and not state.reports:
            self._told = True
            logger.info(
                "engines do not report cached tokens, so the prefix map cannot be corrected by them; "
                "start vLLM with --enable-prompt-tokens-details"
            )
