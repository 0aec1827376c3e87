"""The engine against a plain block-by-block, token-by-token transcription of the same rules."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.estimator.roofline import StepCost
from loadtests.engine import Engine, EngineLimits, EngineRequest

COST = StepCost(
    prefill_s_per_token=1e-4, attention_s_per_pair=1e-9, weights_s=5e-3, kv_s_per_token=1e-7, overhead_s=1e-4
)


@dataclass(eq=False)
class Block:
    hash: int | None = None
    parent: Block | None = None
    references: int = 0


@dataclass(eq=False)
class Sequence:
    id: str
    prompt_tokens: int
    max_tokens: int
    hashes: list[int]
    emitted: int = 0
    computed: int = 0
    target: int = 0
    decoding: bool = False
    preemptions: int = 0
    cached_tokens: int = 0
    blocks: list[Block] = field(default_factory=list)


class Reference:
    """One object per block, one token per sequence and step, nothing clever."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.blank = limits.total_blocks
        self.queue: OrderedDict[Block, None] = OrderedDict()
        self.cache: dict[int, list[Block]] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.removed: list[int] = []

    @property
    def free(self) -> int:
        return self.blank + len(self.queue)

    def take(self) -> Block:
        if self.blank:
            self.blank -= 1
            return Block(references=1)
        block, _ = self.queue.popitem(last=False)
        assert block.hash is not None
        self.removed.append(block.hash)
        copies = self.cache[block.hash]
        copies.remove(block)
        if not copies:
            del self.cache[block.hash]
        return Block(references=1)

    def release(self, sequence: Sequence) -> None:
        for block in reversed(sequence.blocks):
            block.references -= 1
            if block.references == 0:
                if block.hash is None:
                    self.blank += 1
                else:
                    self.queue[block] = None
        sequence.blocks = []

    def chain(self, sequence: Sequence, limit: int) -> list[Block]:
        hits = 0
        while hits < min(limit, len(sequence.hashes)) and sequence.hashes[hits] in self.cache:
            hits += 1
        chain: list[Block] = []
        block = self.cache[sequence.hashes[hits - 1]][0] if hits else None
        while block is not None:
            chain.append(block)
            block = block.parent
        assert len(chain) == hits
        return chain[::-1]

    def preempt(self) -> Sequence:
        victim = self.running.pop()
        self.release(victim)
        victim.computed = 0
        victim.decoding = False
        victim.preemptions += 1
        self.waiting.insert(0, victim)
        return victim

    def grow(self, sequence: Sequence, tokens: int) -> None:
        while len(sequence.blocks) * self.limits.block_size_tokens < tokens:
            sequence.blocks.append(self.take())

    def missing(self, sequence: Sequence, tokens: int) -> int:
        return max(0, -(-tokens // self.limits.block_size_tokens) - len(sequence.blocks))

    def step(self) -> dict[str, object]:
        size = self.limits.block_size_tokens
        budget = self.limits.max_batched_tokens
        self.removed = []
        stored: list[int] = []
        preempted: list[str] = []
        scheduled: list[tuple[Sequence, int]] = []
        for sequence in list(self.running):
            if sequence not in self.running:
                break
            assert budget > 0
            chunk = 1 if sequence.decoding else min(sequence.target - sequence.computed, budget)
            while sequence in self.running and self.missing(sequence, sequence.computed + chunk) > self.free:
                preempted.append(self.preempt().id)
            if sequence not in self.running:
                break
            self.grow(sequence, sequence.computed + chunk)
            budget -= chunk
            scheduled.append((sequence, chunk))
        admitted: list[str] = []
        while self.waiting and not preempted and budget and len(self.running) < self.limits.max_sequences:
            sequence = self.waiting[0]
            sequence.target = sequence.prompt_tokens + sequence.emitted
            chain = self.chain(sequence, (sequence.target - 1) // size) if self.limits.enable_prefix_caching else []
            chunk = min(sequence.target - len(chain) * size, budget)
            needed = -(-(len(chain) * size + chunk) // size) - len(chain)
            if needed + sum(block in self.queue for block in chain) > self.free:
                break
            self.waiting.pop(0)
            self.running.append(sequence)
            for block in chain:
                self.queue.pop(block, None)
                block.references += 1
            sequence.blocks = chain
            sequence.computed = len(chain) * size
            if not sequence.preemptions:
                sequence.cached_tokens = sequence.computed
            self.grow(sequence, sequence.computed + chunk)
            budget -= chunk
            scheduled.append((sequence, chunk))
            admitted.append(sequence.id)
        assert scheduled, "idle with work"
        tokens = sum(chunk for _, chunk in scheduled)
        pairs = sum(c * (s.computed + c / 2) for s, c in scheduled if not s.decoding)
        history = sum(s.computed for s, _ in scheduled if s.decoding)
        prefill_tokens = sum(c for s, c in scheduled if not s.decoding)
        first: list[str] = []
        resumed: list[str] = []
        finished: list[str] = []
        finished_of_prefill: list[str] = []
        for sequence, chunk in sorted(scheduled, key=lambda item: not item[0].decoding):
            sequence.computed += chunk
            if self.limits.enable_prefix_caching:
                for i in range(min(sequence.computed // size, len(sequence.hashes))):
                    block = sequence.blocks[i]
                    if block.hash is None:
                        block.hash = sequence.hashes[i]
                        block.parent = sequence.blocks[i - 1] if i else None
                        self.cache.setdefault(block.hash, []).append(block)
                        stored.append(block.hash)
        for sequence, _ in scheduled:
            was_decoding = sequence.decoding
            if not was_decoding:
                if sequence.computed < sequence.target:
                    continue
                sequence.decoding = True
                (resumed if sequence.emitted else first).append(sequence.id)
            sequence.emitted += 1
            if sequence.emitted == sequence.max_tokens:
                (finished if was_decoding else finished_of_prefill).append(sequence.id)
                self.running.remove(sequence)
                self.release(sequence)
        return {
            "duration_s": COST.step_s(tokens, pairs, history),
            "prefill_tokens": prefill_tokens,
            "admitted": admitted,
            "first_tokens": first,
            "resumed": resumed,
            "finished": finished + finished_of_prefill,
            "preempted": preempted,
            "stored": sorted(stored),
            "removed": list(self.removed),
        }

    def abort(self, request_id: str) -> None:
        for sequence in self.waiting + self.running:
            if sequence.id == request_id:
                if sequence in self.running:
                    self.running.remove(sequence)
                    self.release(sequence)
                else:
                    self.waiting.remove(sequence)


LIMITS = st.builds(
    EngineLimits,
    kv_capacity_tokens=st.integers(24, 160),
    block_size_tokens=st.sampled_from([1, 2, 4, 5]),
    max_batched_tokens=st.integers(3, 40),
    max_sequences=st.integers(1, 6),
    enable_prefix_caching=st.sampled_from([True, True, True, False]),
)


class Scenario:
    """Random requests over a tree of prompts, some of which go on where an earlier answer ended."""

    def __init__(self, limits: EngineLimits, seed: int) -> None:
        self.limits = limits
        self.rng = random.Random(seed)
        self.engine = Engine(COST, limits, collect_events=True)
        self.reference = Reference(limits)
        self.alive: dict[str, tuple[EngineRequest, Sequence]] = {}
        self.histories: list[list[int]] = [[]]
        self.count = 0

    def tokens_to_hashes(self, tokens: list[int]) -> list[int]:
        size = self.limits.block_size_tokens
        return [hash(tuple(tokens[: end + size])) for end in range(0, len(tokens) - size + 1, size)]

    def add(self) -> None:
        rng = self.rng
        history = rng.choice(self.histories)
        room = self.limits.total_blocks * self.limits.block_size_tokens
        tokens = history[: rng.randint(0, len(history))] + [rng.randint(0, 1) for _ in range(rng.randint(0, 12))]
        tokens = tokens[: room - 1] or [0]
        max_tokens = rng.randint(1, min(room - len(tokens), rng.choice([1, 4, 30])))
        self.count += 1
        request_id = f"r{self.count}"
        everything = tokens + [rng.randint(2, 1 << 60) for _ in range(max_tokens)]
        hashes = self.tokens_to_hashes(everything)
        if rng.random() < 0.1:
            hashes = hashes[: rng.randint(0, len(hashes))]
        request = EngineRequest(request_id, len(tokens), max_tokens, hashes)
        self.engine.add(request)
        sequence = Sequence(request_id, len(tokens), max_tokens, hashes)
        self.reference.waiting.append(sequence)
        self.alive[request_id] = request, sequence
        # Prompts may branch off this one at once, but go on from its answer only when it is complete.
        self.histories.append(tokens)
        sequence_history[request] = everything

    def abort(self) -> None:
        if self.alive:
            request_id = self.rng.choice(sorted(self.alive))
            assert self.engine.abort(request_id)
            self.reference.abort(request_id)
            del self.alive[request_id]

    def step(self) -> None:
        many = self.rng.choice([1, 1, 2, 7, 1000])
        result = self.engine.step(max_steps=many)
        if not self.alive:
            assert result is None
            return
        assert result is not None
        assert 1 <= result.steps <= many
        expected = [self.reference.step() for _ in range(result.steps)]
        last = expected[-1]
        duration_s = sum(step["duration_s"] for step in expected)  # type: ignore[misc]
        assert result.duration_s == pytest.approx(duration_s, rel=1e-9)
        assert result.prefill_tokens == last["prefill_tokens"]
        for name in ("admitted", "first_tokens", "resumed", "finished", "preempted"):
            assert [request.id for request in getattr(result, name)] == last[name]
            assert not any(step[name] for step in expected[:-1])
        assert sorted(h for stored in result.stored for h in stored.hashes) == sorted(
            h
            for step in expected
            for h in step["stored"]  # type: ignore[attr-defined]
        )
        assert list(result.removed) == [h for step in expected for h in step["removed"]]  # type: ignore[attr-defined]
        for request in result.finished:
            del self.alive[request.id]
            self.histories.append(sequence_history.pop(request))

    def compare(self) -> None:
        engine, reference = self.engine, self.reference
        assert engine.pool.free_blocks == reference.free
        assert engine.pool.cached_hashes == len(reference.cache)
        assert [r.id for r in engine.waiting_requests()] == [s.id for s in reference.waiting]
        assert [r.id for r in engine.running_requests()] == [s.id for s in reference.running]
        assert engine.context_tokens == sum(s.computed for s in reference.running if s.decoding)
        for request, sequence in self.alive.values():
            assert engine.emitted_tokens(request) == sequence.emitted
            assert request.cached_tokens == sequence.cached_tokens
            assert request.preemptions == sequence.preemptions
        assert engine.injected == engine.completed + engine.aborted + engine.waiting + engine.running
        used = {id(block) for sequence in reference.running for block in sequence.blocks}
        assert engine.pool.used_blocks == len(used)


sequence_history: dict[EngineRequest, list[int]] = {}


_TWO_COPIES = EngineLimits(
    kv_capacity_tokens=24, block_size_tokens=1, max_batched_tokens=15, max_sequences=2, enable_prefix_caching=True
)


@settings(max_examples=150, deadline=None)
@example(limits=_TWO_COPIES, seed=49216, actions="aaxxssaaaa")  # evictions let the first in line in
@given(limits=LIMITS, seed=st.integers(0, 1 << 30), actions=st.text("aaassssssssx", min_size=10, max_size=120))
def test_engine_does_what_the_plain_rules_say(limits: EngineLimits, seed: int, actions: str) -> None:
    sequence_history.clear()
    scenario = Scenario(limits, seed)
    for action in actions:
        {"a": scenario.add, "s": scenario.step, "x": scenario.abort}[action]()
        scenario.compare()
    while scenario.alive:
        scenario.step()
        scenario.compare()
    assert scenario.engine.pool.used_blocks == 0
    assert scenario.engine.step() is None
