"""The index against a plain model: every block with the time of its last use, evicted one by one."""

import gc
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.prefixes.index import DEFAULT_CAPACITY_BYTES, PrefixIndex, Record
from gateway.prompt.blocks import BlockSchedule, prompt_key

UNBOUNDED = 1 << 60


def growing() -> BlockSchedule:
    """Blocks of 1, 1, 2, 4, 4, ... bytes."""
    return BlockSchedule(block_bytes=1, growth=1, max_block_bytes=4)


def tens() -> BlockSchedule:
    return BlockSchedule(block_bytes=10, growth=0)


def matches(index: PrefixIndex, hashes: Sequence[int]) -> dict[int, int]:
    found = index.match(list(hashes))
    assert len(dict(found)) == len(found)
    return dict(found)


def assert_empty(index: PrefixIndex, slots: int) -> None:
    """Nothing is left of any prompt, inside either."""
    while index.sweep(3):
        pass
    assert index._roots == {}
    for replica in index._replicas[:slots]:
        assert (replica.blocks, dict(replica.segments), replica.held_bytes) == ({}, {}, 0)


def test_longest_prefix_per_replica() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    index.insert(0, [1, 2, 3, 4])
    index.insert(1, [1, 2, 9])
    index.insert(5, [1])
    index.insert(3, [7, 8])
    assert matches(index, [1, 2, 3, 4, 5]) == {0: 4, 1: 2, 5: 1}
    assert matches(index, [1, 2]) == {0: 2, 1: 2, 5: 1}
    assert matches(index, [6]) == matches(index, []) == {}
    assert (index.blocks(0), index.held_bytes(0)) == (4, 40)
    assert (index.blocks(4), index.blocks(99), index.held_bytes(99)) == (0, 0, 0)


def test_record_says_what_was_believed_before() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    assert index.insert(0, [1, 2, 3]).matched_blocks == 0
    assert index.insert(0, [1, 2, 3, 4]).matched_blocks == 3
    assert index.insert(0, [1, 2, 9]).matched_blocks == 2
    assert index.insert(0, [1, 2]).matched_blocks == 2
    assert index.insert(0, []).matched_blocks == 0


def test_least_recently_used_goes_first_and_tails_before_roots() -> None:
    index = PrefixIndex(tens(), 60)
    index.insert(0, [1, 2, 3])
    index.insert(0, [4, 5, 6])
    index.insert(0, [1, 2])
    index.insert(0, [7])
    assert matches(index, [1, 2, 3]) == {0: 2}
    assert matches(index, [4, 5, 6]) == {0: 3}
    index.insert(0, [8, 9])
    assert matches(index, [4, 5, 6]) == {0: 1}
    assert matches(index, [1, 2]) == {0: 2}


def test_a_prompt_larger_than_the_replica_keeps_its_head() -> None:
    index = PrefixIndex(tens(), 30)
    index.insert(0, [9])
    index.insert(0, [1, 2, 3, 4, 5])
    assert matches(index, [1, 2, 3, 4, 5]) == {0: 3}
    assert matches(index, [9]) == {}


def test_default_capacity_bounds_a_slot_nobody_described() -> None:
    index = PrefixIndex(BlockSchedule(growth=0))
    for start in range(0, 6000, 100):
        index.insert(0, list(range(start, start + 100)))
    assert index.held_bytes(0) == DEFAULT_CAPACITY_BYTES
    index.set_capacity(0, 2560)
    assert index.blocks(0) == 10


def test_a_growing_conversation_is_one_segment() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    for length in range(1, 50):
        index.insert(0, list(range(length)))
    assert len(index._replicas[0].segments) == 1


def test_undo_takes_back_what_was_added() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    index.insert(0, [1, 2])
    record = index.insert(0, [1, 2, 3, 4])
    other = index.insert(1, [1])
    index.undo(record)
    index.undo(other)
    assert matches(index, [1, 2, 3, 4]) == {0: 2}
    assert (index.held_bytes(0), index.held_bytes(1)) == (20, 0)


def test_undo_leaves_what_a_later_request_used() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    first = index.insert(0, [1, 2, 3, 4])
    index.insert(0, [1, 2, 9])
    index.undo(first)
    assert matches(index, [1, 2, 3, 4]) == {0: 2}
    assert matches(index, [1, 2, 9]) == {0: 3}


def test_a_prefix_outlives_what_it_was_extended_to() -> None:
    index = PrefixIndex(tens(), 50)
    index.insert(0, [1, 2])
    index.insert(0, [1, 2, 3])
    index.insert(0, [1, 2, 4])
    index.insert(0, [1, 2, 5])
    index.insert(0, [6])
    assert matches(index, [1, 2, 3]) == {0: 2}
    assert matches(index, [1, 2, 4]) == {0: 3}
    assert matches(index, [1, 2, 5]) == {0: 3}


def test_undo_of_a_prompt_whose_continuation_is_gone() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    index.insert(0, [1, 2, 3])
    index.truncate(0, [1, 2, 3], 2)
    record = index.insert(0, [1, 2, 4])
    branch = index.insert(0, [1, 2, 5])
    index.undo(branch)
    again = index.insert(0, [1, 2])
    index.undo(record)
    index.undo(again)
    assert matches(index, [1, 2, 4]) == {0: 2}
    assert len(index._replicas[0].segments) == 1
    assert index._replicas[0].segments.popitem()[1].children is None


def test_undo_has_no_effect_twice_or_after_forget() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    first = index.insert(0, [1, 2])
    index.undo(first)
    index.insert(0, [1, 2])
    index.undo(first)
    assert matches(index, [1, 2]) == {0: 2}
    second = index.insert(0, [5, 6])
    index.forget(0)
    index.insert(0, [5, 6])
    index.undo(second)
    assert matches(index, [5, 6]) == {0: 2}


def test_failed_attempts_do_not_wear_the_index_out() -> None:
    """A replica that answers 503 all the time keeps, but for one prompt's worth, what it is known to hold."""
    index = PrefixIndex(tens(), 200)
    index.insert(0, list(range(20)))
    for attempt in range(100):
        index.undo(index.insert(0, [1000 + attempt, 2000 + attempt]))
    assert matches(index, list(range(20))) == {0: 18}


def test_truncate_drops_every_continuation() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    index.insert(0, [1, 2, 3, 4])
    index.insert(0, [1, 2, 3, 9, 10])
    index.insert(0, [1, 2, 7])
    index.insert(0, [8])
    index.insert(1, [1, 2, 3])
    index.truncate(0, [1, 2, 3, 4], 2)
    assert matches(index, [1, 2, 3, 4]) == {0: 2, 1: 3}
    assert matches(index, [1, 2, 7]) == {0: 3, 1: 2}
    index.truncate(0, [1, 2, 3], 3)
    index.truncate(0, [1, 2, 3], 2)
    index.truncate(7, [1, 2, 3], 0)
    assert index.blocks(0) == 4
    index.truncate(0, [1], 0)
    assert matches(index, [1, 2, 7]) == {1: 2}
    assert (index.blocks(0), index.held_bytes(0)) == (1, 10)


def test_a_forgotten_replica_is_gone_at_once_and_its_slot_is_free() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    index.set_capacity(0, 1000)
    for prompt in ([1, 2], [3, 4], [5, 6]):
        index.insert(0, prompt)
        index.insert(1, prompt)
    index.forget(0)
    assert matches(index, [1, 2]) == {1: 2}
    assert (index.blocks(0), index.held_bytes(0)) == (0, 0)
    index.insert(0, [1])
    assert matches(index, [1, 2]) == {0: 1, 1: 2}
    index.insert(0, list(range(10, 300)))
    assert index.held_bytes(0) == 2910
    while index.sweep(1):
        pass
    assert matches(index, [1, 2]) == {0: 1, 1: 2}
    index.forget(9)
    index.forget(0)
    index.forget(1)
    assert_empty(index, 2)


def test_sweep_works_in_slices() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    for prompt in range(10):
        index.insert(0, [prompt])
    index.forget(0)
    assert index.sweep(9)
    assert not index.sweep(9)


def test_insertions_sweep_too() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    for prompt in range(100):
        index.insert(0, [prompt])
    index.forget(0)
    for _ in range(2):
        index.insert(1, [1000])
    assert not index._forgotten
    assert len(index._roots) == 1


def test_sweeping_spares_what_the_slot_has_learned_since() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    for prompt in range(200):
        index.insert(0, [prompt])
    index.forget(0)
    index.insert(0, [0])
    assert index._forgotten
    assert matches(index, [0]) == {0: 1}
    assert not index.sweep(1000)
    assert matches(index, [0]) == {0: 1}
    assert len(index._roots) == 1


def test_blocks_do_not_burden_the_cycle_collector() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    index.insert(0, list(range(1000)))
    index.insert(0, list(range(500)))
    replica = index._replicas[0]
    assert not any(gc.is_tracked(value) for item in replica.blocks.items() for value in item)
    for segment in replica.segments.values():
        assert len(segment.hashes) == 500
        assert len(gc.get_referents(segment.hashes)) <= 1  # its type


def test_real_prompts() -> None:
    cuts = BlockSchedule()
    index = PrefixIndex(cuts, UNBOUNDED)
    conversation = [prompt_key(bytes(length), 1, schedule=cuts).hashes for length in (5_000, 20_000, 90_000)]
    index.insert(2, conversation[0])
    index.insert(2, conversation[1])
    assert matches(index, conversation[2]) == {2: len(conversation[1])}
    assert index.held_bytes(2) == cuts.covered_bytes(len(conversation[1]))


def test_an_answer_is_held_until_it_is_continued() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    record = index.insert(0, [1, 2])
    assert not index.holds(0, 77)
    index.answered(record, 77)
    assert index.holds(0, 77)
    assert (index.blocks(0), index.held_bytes(0)) == (3, 30)
    # Another replica has not given the answer, and another prompt does not continue it.
    assert not index.insert(1, [1, 2, 3], 77).continues
    assert not index.insert(0, [1, 2, 8], 78).continues
    assert index.holds(0, 77)
    following = index.insert(0, [1, 2, 3, 4], 77)
    assert (following.continues, following.matched_blocks) == (True, 2)
    assert not index.holds(0, 77)
    assert matches(index, [1, 2, 3, 4]) == {0: 4, 1: 3}


def test_a_conversation_stays_one_run_of_blocks() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    hashes: list[int] = []
    answer = 0
    for turn in range(10):
        hashes = [*hashes, 100 + 2 * turn, 101 + 2 * turn]
        record = index.insert(0, hashes, answer)
        assert record.continues == (turn > 0)
        answer = 1000 + turn
        index.answered(record, answer)
    assert len(index._replicas[0].segments) == 1
    assert index.blocks(0) == 21


def test_an_answer_is_the_first_to_be_evicted_of_its_conversation() -> None:
    index = PrefixIndex(tens(), 40)
    index.answered(index.insert(0, [1, 2]), 77)
    index.insert(0, [8, 9])
    assert not index.holds(0, 77)
    assert matches(index, [1, 2]) == {0: 2}


def test_answers_of_prompts_in_flight_are_in_use() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    first, second = index.insert(0, [1, 2]), index.insert(0, [1, 2])
    index.hold(first)
    index.hold(second)
    index.answered(first, 77)
    index.release(first)
    assert index.in_use_bytes[0] == 30
    # Its block goes, and the prompt's own goes where it was.
    third = index.insert(0, [1, 2, 3, 4], 77)
    assert index.in_use_bytes[0] == 40
    index.hold(third)
    for record in (second, third):
        index.release(record)
    assert index.in_use_bytes[0] == 0


def test_what_goes_next_was_last_used_when() -> None:
    index = PrefixIndex(tens(), 100)
    index.insert(0, [1, 2])
    assert index.oldest_use == [pytest.approx(-0.8)]
    index.insert(1, [1, 2, 3, 4, 5])
    index.insert(1, [6, 7, 8, 9, 10])
    assert index.oldest_use[1] == 2.0
    index.insert(1, [1, 2, 3, 4, 5])
    assert index.oldest_use[1] == 3.0
    index.insert(1, [11])
    # Half of what was used third is gone, and the other half goes next.
    assert index.oldest_use[1] == 3.0
    index.forget(1)
    assert index.oldest_use[1] == -1.0


def test_answers_may_not_count() -> None:
    index = PrefixIndex(tens(), UNBOUNDED)
    index.answered(index.insert(0, [1, 2]), 77)
    index.count_answers(0, False)
    assert not index.holds(0, 77)
    # What they would have been worth can be judged all the same.
    assert index.insert(0, [1, 2, 3], 77).continues
    index.answered(index.insert(0, [1, 2]), 77)
    index.count_answers(0, True)
    assert index.holds(0, 77)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 4), max_size=5)), min_size=2, max_size=20))
def test_forged_collisions_break_nothing(prompts: list[tuple[int, list[int]]]) -> None:
    """Hashes that are no chains at all: answers may be wrong, but the index stays whole and empties."""
    index = PrefixIndex(growing(), 8)
    records = []
    for slot, hashes in prompts:
        index.match(hashes)
        records.append(index.insert(slot, hashes, len(hashes)))
        assert index.held_bytes(slot) <= 8
        if len(hashes) % 2:
            index.answered(records[-1], hashes[0] + 1)
            assert index.held_bytes(slot) <= 8
        index.truncate(slot, hashes[::-1], 1)
    for record in records:
        index.undo(record)
    for slot in (0, 1):
        index.set_capacity(slot, 0)
    assert_empty(index, 2)


Prompt = tuple[int, ...]
ANSWER = 2
"""Stands for an answer behind a prompt."""


class Model:
    """One replica: each block (a prefix of prompts) with the time of its last use."""

    def __init__(self, capacity: int) -> None:
        self.used: dict[Prompt, int] = {}
        self.capacity = capacity

    def held(self, prompt: Prompt) -> int:
        return max((n for n in range(1, len(prompt) + 1) if prompt[:n] in self.used), default=0)

    def size(self, cuts: BlockSchedule) -> int:
        return sum(cuts.covered_bytes(len(block)) - cuts.covered_bytes(len(block) - 1) for block in self.used)

    def evict(self, cuts: BlockSchedule) -> None:
        while self.size(cuts) > self.capacity:
            del self.used[min(self.used, key=lambda block: (self.used[block], -len(block)))]


class IndexMachine(RuleBasedStateMachine):
    """Any sequence of operations, index and model side by side."""

    SLOTS = 3
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
    slots = st.integers(0, SLOTS - 1)

    def __init__(self) -> None:
        super().__init__()
        self.cuts = growing()
        self.index = PrefixIndex(self.cuts, 20)
        self.models = [Model(20) for _ in range(self.SLOTS)]
        self.names: dict[Prompt, int] = {}
        self.records: list[tuple[Record, Model, Prompt, int, int]] = []
        self.clock = 0
        self.asked: set[Prompt] = set()

    def hashes(self, prompt: Prompt) -> list[int]:
        self.asked.add(prompt)
        return [self.names.setdefault(prompt[:n], len(self.names) + 1) for n in range(1, len(prompt) + 1)]

    @rule(slot=slots, prompt=prompts)
    def insert(self, slot: int, prompt: Prompt) -> None:
        model = self.models[slot]
        self.clock += 1
        matched = model.held(prompt)
        record = self.index.insert(slot, self.hashes(prompt))
        assert record.matched_blocks == matched
        self.records.append((record, model, prompt, matched, self.clock))
        for n in range(1, len(prompt) + 1):
            model.used[prompt[:n]] = self.clock
        model.evict(self.cuts)

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def answered(self, data: st.DataObject) -> None:
        record, _, prompt, _, _ = data.draw(st.sampled_from(self.records))
        block = (*prompt, ANSWER)
        self.clock += 1
        self.index.answered(record, self.hashes(block)[-1])
        model = self.models[record.slot]
        # What is gone by now, or known already, changes nothing.
        if block not in model.used and model.held(prompt) == len(prompt):
            if any(len(other) > len(prompt) and other[: len(prompt)] == prompt for other in model.used):
                for n in range(1, len(block) + 1):
                    model.used[block[:n]] = self.clock
            else:
                model.used[block] = model.used[prompt]
            model.evict(self.cuts)

    @rule(slot=slots, prompt=prompts, data=st.data())
    def continued(self, slot: int, prompt: Prompt, data: st.DataObject) -> None:
        answer = (*prompt[: data.draw(st.integers(0, len(prompt)))], ANSWER)
        model = self.models[slot]
        self.clock += 1
        known = model.used.pop(answer, None) is not None
        matched = model.held(prompt)
        record = self.index.insert(slot, self.hashes(prompt), self.hashes(answer)[-1])
        assert (record.continues, record.matched_blocks) == (known, matched)
        self.records.append((record, model, prompt, matched, self.clock))
        for n in range(1, len(prompt) + 1):
            model.used[prompt[:n]] = self.clock
        model.evict(self.cuts)

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.records) - 1))
        record, model, prompt, matched, time = self.records[at]
        self.index.undo(record)
        for n in range(matched + 1, len(prompt) + 1):
            if model.used.get(prompt[:n]) == time:
                del model.used[prompt[:n]]
        # An answer goes with the end of its prompt.
        if prompt not in model.used:
            model.used.pop((*prompt, ANSWER), None)

    @rule(slot=slots, prompt=prompts, data=st.data())
    def truncate(self, slot: int, prompt: Prompt, data: st.DataObject) -> None:
        depth = data.draw(st.integers(0, len(prompt)))
        self.index.truncate(slot, self.hashes(prompt), depth)
        if depth < len(prompt):
            used = self.models[slot].used
            for block in [block for block in used if block[: depth + 1] == prompt[: depth + 1]]:
                del used[block]

    @rule(slot=slots)
    def forget(self, slot: int) -> None:
        self.index.forget(slot)
        self.models[slot] = Model(20)

    @rule(slot=slots, capacity=st.integers(0, 40))
    def set_capacity(self, slot: int, capacity: int) -> None:
        self.index.set_capacity(slot, capacity)
        self.models[slot].capacity = capacity
        self.models[slot].evict(self.cuts)

    @rule(budget=st.integers(1, 3))
    def sweep(self, budget: int) -> None:
        self.index.sweep(budget)

    @invariant()
    def same_contents(self) -> None:
        for slot, model in enumerate(self.models):
            assert self.index.blocks(slot) == len(model.used)
            assert self.index.held_bytes(slot) == model.size(self.cuts) <= model.capacity

    @invariant()
    def same_matches(self) -> None:
        for prompt in sorted(self.asked)[-20:]:
            held = {slot: model.held(prompt) for slot, model in enumerate(self.models)}
            assert matches(self.index, self.hashes(prompt)) == {slot: n for slot, n in held.items() if n}

    def teardown(self) -> None:
        for slot in range(self.SLOTS):
            if slot % 2:
                self.index.forget(slot)
            else:
                self.index.set_capacity(slot, 0)
        assert_empty(self.index, self.SLOTS)


TestIndexAgainstModel = IndexMachine.TestCase
TestIndexAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
