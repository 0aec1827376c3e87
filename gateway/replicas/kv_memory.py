"""KV memory of each replica: what is held, what answers in flight will still need, and when enough will be free.

Theory of operation
- Prompts in flight hold what the prefix map says is in use, shared prefixes once. Each answer holds the tokens it has
  emitted so far, and will hold all it is expected to emit.
- Answers of one replica grow by one token per engine step, so how far they are follows from one clock of steps per
  slot. The clock runs on predicted decode steps and stands still for prefills; the lengths of answers that have ended
  tell how many steps of the clock one step of the engine is.
- vLLM V1 admits first come, first served: a request whose blocks do not fit keeps all behind it waiting; when running
  answers find no block the last admitted is preempted, and goes to the head of the queue. So whoever comes when what is
  in flight does not fit beside it waits until enough of that has ended (`wait_s`); of a long queue, generation after
  generation of those before it.
- `room_tokens` is the fast answer: what would be left if everything in flight were at its full length. Only requests
  that need more than that have to ask when.

Time is passed in; there is no clock and no I/O here.
"""

from collections.abc import Sequence

_CROWDED_SHARE = 0.25
"""Share of the memory below which the room left is looked at per request."""

_LEAST_LEFT_SHARE = 0.1
"""Answers that are longer than expected are expected to go on for this share of an expected answer."""

_MOST_OVERCOUNTED_SHARE = 0.1
"""Share of the memory by which what is counted here may be too much."""

_LEAST_STEPS = 16
"""Answers shorter than this do not tell how long steps take."""

_FULL_SHARE = 0.97
"""Share of the memory in use from which on running answers may be preempted."""


class Holding:
    """What one request in flight has and expects on one replica, beside its prompt in the prefix map."""

    __slots__ = ("generation", "output_tokens", "since", "slot", "tail_tokens")

    def __init__(self, slot: int, generation: int, tail_tokens: float, output_tokens: float) -> None:
        self.slot = slot
        self.generation = generation
        self.tail_tokens = tail_tokens
        """Of its prompt, what is in no block of the prefix map."""
        self.output_tokens = output_tokens
        """Expected length of its answer."""
        self.since = -1.0
        """The slot's clock at its first token; -1 before."""


class KvMemory:
    """KV memory by replica slot. Columns are the same list objects for ever.

    Args:
        prompt_bytes: by slot, canonical bytes of prompts in flight, shared ones once: the prefix map's column.
    """

    __slots__ = (
        "_answers",
        "_clock",
        "_clock_at_s",
        "_full_clock",
        "_generations",
        "_in_flight",
        "_last_clock",
        "_output_sum",
        "_output_tokens",
        "_prompt_bytes",
        "_since_sum",
        "_slowness",
        "_step_s",
        "_tail_tokens",
        "_tokens_per_byte",
        "capacity_tokens",
        "context_shift_tokens",
        "crowded",
        "look_from_tokens",
        "room_tokens",
        "unseen_tokens",
    )

    def __init__(self, prompt_bytes: Sequence[int]) -> None:
        self.capacity_tokens: list[float] = []
        """Tokens of KV memory."""
        self.room_tokens: list[float] = []
        """What would be left of it if all answers in flight were at their full length; may be negative."""
        self.unseen_tokens: list[float] = []
        """What the engine holds beyond what is counted here, as its last metrics said: traffic of others."""
        self.context_shift_tokens: list[float] = []
        """What answers past their first token have emitted, less half their expected length, as of the last event: the
        load ledger's column of the history that a decode step reads counts the latter."""
        self.crowded: set[int] = set()
        """Slots with little room."""
        self.look_from_tokens = 0.0
        """Prompts of so many tokens have to ask for room wherever they go."""
        self._prompt_bytes = prompt_bytes
        self._tokens_per_byte: list[float] = []
        self._tail_tokens: list[float] = []
        """Tails of the prompts in flight."""
        self._output_tokens: list[float] = []
        """Expected answers of the requests in flight, at their full length."""
        self._answers: list[dict[Holding, None]] = []
        """Past their first token, in that order."""
        self._since_sum: list[float] = []
        self._output_sum: list[float] = []
        """Expected lengths of the answers past their first token."""
        self._clock: list[float] = []
        self._clock_at_s: list[float] = []
        self._step_s: list[float] = []
        """Seconds of one step of the clock."""
        self._slowness: list[float] = []
        """Steps of the clock per step of the engine."""
        self._last_clock: list[float] = []
        """The clock at the last first token."""
        self._full_clock: list[float] = []
        """The clock when memory was last full."""
        self._generations: list[int] = []
        self._in_flight: list[int] = []

    def open(self, slot: int) -> None:
        """Make sure the columns have an entry for this slot."""
        while len(self.capacity_tokens) <= slot:
            self.capacity_tokens.append(0.0)
            self.room_tokens.append(0.0)
            self.unseen_tokens.append(0.0)
            self.context_shift_tokens.append(0.0)
            self._output_sum.append(0.0)
            self._tokens_per_byte.append(0.25)
            self._tail_tokens.append(0.0)
            self._output_tokens.append(0.0)
            self._answers.append({})
            self._since_sum.append(0.0)
            self._clock.append(0.0)
            self._clock_at_s.append(0.0)
            self._step_s.append(0.01)
            self._slowness.append(1.0)
            self._last_clock.append(0.0)
            self._full_clock.append(-1.0)
            self._generations.append(0)
            self._in_flight.append(0)

    def retire(self, slot: int) -> None:
        """The slot's replica is gone, or its process is a new one: nothing is held, nothing will be released."""
        if slot >= len(self.capacity_tokens):
            return
        self._generations[slot] += 1
        self._tail_tokens[slot] = self._output_tokens[slot] = 0.0
        self.unseen_tokens[slot] = self._since_sum[slot] = 0.0
        self.context_shift_tokens[slot] = self._output_sum[slot] = 0.0
        self._answers[slot] = {}
        self._in_flight[slot] = 0
        self._update_room(slot)

    def set_capacity(self, slot: int, capacity_tokens: float, tokens_per_byte: float) -> None:
        """Say how much the replica holds, and how many tokens a canonical byte is there."""
        self.capacity_tokens[slot] = capacity_tokens
        self._tokens_per_byte[slot] = tokens_per_byte
        self.look_from_tokens = _CROWDED_SHARE * min(filter(None, self.capacity_tokens), default=0.0)
        self._update_room(slot)

    def start(self, slot: int, tail_tokens: float, output_tokens: float) -> Holding:
        """A request is sent to the slot; the prefix map holds its prompt already.

        Args:
            slot: the replica's slot.
            tail_tokens: of its prompt, what is in no block of the prefix map.
            output_tokens: expected length of its answer.
        """
        holding = Holding(slot, self._generations[slot], tail_tokens, output_tokens)
        self._tail_tokens[slot] += tail_tokens
        self._output_tokens[slot] += output_tokens
        self._in_flight[slot] += 1
        self._update_room(slot)
        return holding

    def first_token(self, holding: Holding, now_s: float, step_s: float, slowness: float, excess_s: float) -> None:
        """Its first token has been seen.

        Args:
            holding: what `start` returned.
            now_s: monotonic seconds.
            step_s: predicted seconds of a decode step of the slot from now on.
            slowness: what these are to be multiplied with, as far as is known.
            excess_s: seconds by which its prefill has prolonged the steps of the others.
        """
        slot = holding.slot
        if holding.generation != self._generations[slot] or holding.since >= 0.0:
            return
        self._advance(slot, now_s, step_s, slowness)
        if excess_s > 0.0 and self._answers[slot]:
            # No further than to the step before: what was prolonged is no step of its own, but time stands still.
            self._clock[slot] -= min(excess_s / self._step_s[slot], self._clock[slot] - self._last_clock[slot])
        self._last_clock[slot] = self._clock[slot]
        holding.since = self._clock[slot]
        self._since_sum[slot] += holding.since
        self._answers[slot][holding] = None
        self._output_sum[slot] += holding.output_tokens
        self._update_context(slot)

    def finish(
        self, holding: Holding, now_s: float, step_s: float, slowness: float, completion_tokens: int | None
    ) -> float | None:
        """It has ended, and the prefix map has let go of its prompt. Only the first call counts.

        Returns:
            Observed over predicted seconds of its decode steps, before `slowness`; None if it does not tell.

        Args:
            holding: what `start` returned.
            now_s: monotonic seconds.
            step_s: predicted seconds of a decode step of the slot from now on.
            slowness: what these are to be multiplied with, as far as is known.
            completion_tokens: the length of its answer, if the engine told.
        """
        slot = holding.slot
        if holding.generation != self._generations[slot]:
            return None
        holding.generation = -1
        self._advance(slot, now_s, step_s, slowness)
        self._tail_tokens[slot] -= holding.tail_tokens
        self._output_tokens[slot] -= holding.output_tokens
        self._in_flight[slot] -= 1
        answers = self._answers[slot]
        ratio = None
        if holding.since >= 0.0:
            del answers[holding]
            if answers:
                self._since_sum[slot] -= holding.since
                self._output_sum[slot] -= holding.output_tokens
            else:
                self._since_sum[slot] = self._output_sum[slot] = 0.0
            self._update_context(slot)
            counted = self._clock[slot] - holding.since
            # An answer that was preempted, or might have been, has stood still.
            told = completion_tokens is not None and counted > 1.0 and holding.since > self._full_clock[slot]
            if told and completion_tokens is not None and completion_tokens > _LEAST_STEPS:
                ratio = counted / (completion_tokens - 1)
        self._update_room(slot)
        return ratio

    def saw_usage(self, slot: int, usage: float, now_s: float) -> None:
        """The engine has said how much it holds, all that was sent to it being admitted.

        What differs from what is counted here is traffic of others, and the coarseness of the prefix map.

        Args:
            slot: the replica's slot.
            usage: share of its KV memory in use, 0 to 1.
            now_s: monotonic seconds.
        """
        capacity = self.capacity_tokens[slot]
        unseen = usage * capacity - (self.held_tokens(slot, now_s) - self.unseen_tokens[slot])
        self.unseen_tokens[slot] = max(unseen, -_MOST_OVERCOUNTED_SHARE * capacity)
        self._update_room(slot)

    def held_tokens(self, slot: int, now_s: float) -> float:
        """Tokens in use now, those of requests included that wait to be admitted."""
        answers = self._answers[slot]
        emitted = 0.0
        if answers:
            emitted = (len(answers) * self._now(slot, now_s) - self._since_sum[slot]) / self._slowness[slot]
        return self._prompts_tokens(slot) + emitted + self.unseen_tokens[slot]

    def wait_s(self, slot: int, needed_tokens: float, now_s: float) -> float:
        """Predicted seconds until a request that is sent now finds its memory.

        Args:
            slot: the replica's slot.
            needed_tokens: tokens of its prompt that no request in flight holds.
            now_s: monotonic seconds.
        """
        capacity = self.capacity_tokens[slot]
        held = self.held_tokens(slot, now_s)
        if held + needed_tokens <= capacity:
            return 0.0
        answers = self._answers[slot]
        count = len(answers)
        if not count:
            return 0.0
        clock, slowness = self._now(slot, now_s), self._slowness[slot]
        # What ends first: emitted so far, and steps to go.
        coming = sorted(
            (
                max(
                    holding.output_tokens - (emitted := (clock - holding.since) / slowness),
                    _LEAST_LEFT_SHARE * holding.output_tokens,
                ),
                emitted,
            )
            for holding in answers
        )
        in_flight = self._in_flight[slot]
        prompt = self._prompts_tokens(slot) / in_flight
        queued = (in_flight - count) * prompt
        passed = 0.0
        mean_emitted = sum(emitted for _, emitted in coming) / count
        for left, emitted in coming:
            steps = left - passed
            # The last admitted are preempted as far as it does not fit; what they have emitted grows no more.
            paused = max(held - queued - capacity, 0.0) / max(mean_emitted + prompt, 1.0)
            running = max(count - paused, 0.25 * count)
            held += steps * running - (emitted + left) - prompt
            count -= 1
            passed = left
            if held + needed_tokens <= capacity:
                break
        else:
            # All that answer now have ended, and those in the queue do not fit beside it: as many generations of them
            # come first as the memory is too small for, and each is there for as long as its answers take.
            passed += self._output_tokens[slot] / in_flight * max(held + needed_tokens - capacity, 0.0) / capacity
        return passed * self._step_s[slot] * slowness

    def _prompts_tokens(self, slot: int) -> float:
        return self._prompt_bytes[slot] * self._tokens_per_byte[slot] + self._tail_tokens[slot]

    def _now(self, slot: int, now_s: float) -> float:
        passed_s = now_s - self._clock_at_s[slot]
        return self._clock[slot] + (passed_s / self._step_s[slot] if passed_s > 0.0 else 0.0)

    def _advance(self, slot: int, now_s: float, step_s: float, slowness: float) -> None:
        self._clock[slot] = self._now(slot, now_s)
        self._clock_at_s[slot] = now_s
        self._slowness[slot] = slowness
        if self.held_tokens(slot, now_s) > _FULL_SHARE * self.capacity_tokens[slot]:
            self._full_clock[slot] = self._clock[slot]
        if step_s > 0.0:
            self._step_s[slot] = step_s

    def _update_context(self, slot: int) -> None:
        emitted = (len(self._answers[slot]) * self._clock[slot] - self._since_sum[slot]) / self._slowness[slot]
        self.context_shift_tokens[slot] = max(emitted, 0.0) - 0.5 * self._output_sum[slot]

    def _update_room(self, slot: int) -> None:
        capacity = self.capacity_tokens[slot]
        room = capacity - self._prompts_tokens(slot) - self._output_tokens[slot] - self.unseen_tokens[slot]
        self.room_tokens[slot] = room
        if room < _CROWDED_SHARE * capacity:
            self.crowded.add(slot)
        else:
            self.crowded.discard(slot)
