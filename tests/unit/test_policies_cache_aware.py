"""SGLang's cache-aware rule at its boundaries, and the tree behind it."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from policies.cache_aware import CacheAware
from policies.peer_index import OwnerTree
from policies.types import Candidates, Request

BLOCK = 10
OFFSETS = [position * BLOCK for position in range(200)]


def blocks(text: str) -> list[int]:
    return [xxh64_intdigest(text[:end]) for end in range(BLOCK, len(text) + 1, BLOCK)]


def request(text: str) -> Request:
    return Request(len(text) / 4, 100.0, block_hashes=blocks(text), block_offsets=OFFSETS, canonical_bytes=len(text))


def view(*in_flight: int, slots: Sequence[int] | None = None) -> Candidates:
    return Candidates(slots or tuple(range(len(in_flight))), in_flight=in_flight)


def tail(letter: str, length: int) -> str:
    return letter * length


def seeded(slot: int = 1) -> CacheAware:
    """Slot 1 of three owns a prompt of 30 bytes."""
    policy = CacheAware()
    loads = [1, 1, 1]
    loads[slot] = 0
    assert policy.choose(request(tail("a", 30)), view(*loads)).slot == slot
    return policy


def test_exactly_at_the_threshold_is_a_miss() -> None:
    at = tail("a", 30) + tail("b", 70)
    assert seeded().choose(request(at), view(1, 1, 0)).slot == 2
    above = tail("a", 30) + tail("b", 69)
    assert seeded().choose(request(above), view(1, 1, 0)).slot == 1


@pytest.mark.parametrize(
    ("loads", "balanced"),
    [
        ((0, 64, 0), True),  # 64 more: not more than 64
        ((0, 65, 0), False),
        ((130, 195, 130), True),  # 65 more, but exactly 1.5 times
        ((130, 196, 130), False),
        ((200, 265, 200), True),  # 65 more, 1.325 times
        ((10, 16, 10), True),  # 1.6 times, but only 6 more
    ],
)
def test_imbalance_needs_both_conditions_strictly(loads: tuple[int, int, int], balanced: bool) -> None:
    choice = seeded().choose(request(tail("a", 30)), view(*loads))
    assert (choice.slot == 1) == balanced
    assert ("out of balance" in choice.reason) != balanced


def test_a_miss_seeds_the_tree() -> None:
    policy = CacheAware()
    assert policy.choose(request(tail("x", 50)), view(3, 2, 4)).slot == 1
    assert policy.choose(request(tail("x", 50)), view(0, 60, 0)).slot == 1


def test_out_of_balance_requests_seed_the_tree_too() -> None:
    policy = CacheAware()
    assert policy.choose(request(tail("x", 50)), view(100, 100, 0)).slot == 2
    assert policy.choose(request(tail("x", 50)), view(0, 0, 60)).slot == 2


def test_the_first_owner_keeps_the_prefix_whatever_its_load() -> None:
    policy = seeded(1)
    # Another replica comes to hold the same prompt.
    assert policy.choose(request(tail("a", 30)), view(0, 65, 1)).slot == 0
    assert policy.choose(request(tail("a", 30)), view(0, 60, 0)).slot == 1


def test_a_longer_prompt_belongs_to_who_brought_the_longer_part() -> None:
    policy = seeded(1)
    longer = tail("a", 30) + tail("b", 170)
    assert policy.choose(request(longer), view(1, 1, 0)).slot == 2  # 15 % is a miss
    assert policy.choose(request(longer + tail("c", 20)), view(0, 0, 60)).slot == 2
    assert policy.choose(request(tail("a", 30) + tail("d", 10)), view(0, 5, 0)).slot == 1


def test_equal_loads_go_to_the_first() -> None:
    policy = CacheAware()
    assert [policy.choose(request(tail(letter, 30)), view(0, 0, 0)).slot for letter in "xyz"] == [0, 0, 0]


def test_an_owner_that_is_no_candidate_is_replaced_by_the_first_and_nothing_is_learned() -> None:
    policy = seeded(1)
    choice = policy.choose(request(tail("a", 30)), view(9, 0, 0, slots=(0, 2)))
    assert choice.slot == 0
    assert "no candidate" in choice.reason
    policy.forget(1)
    assert policy.choose(request(tail("a", 30)), view(9, 9, 0)).slot == 2


def test_a_forgotten_replica_owns_nothing_and_its_successor_starts_empty() -> None:
    policy = seeded(1)
    policy.forget(1)
    policy.forget(7)
    assert policy.choose(request(tail("a", 30)), view(0, 0, 0)).slot == 0
    assert policy.choose(request(tail("a", 30)), view(5, 0, 0)).slot == 0


def test_prompts_without_blocks_go_by_load() -> None:
    policy = CacheAware()
    assert policy.choose(Request(10.0, 10.0), view(2, 1, 0)).slot == 2
    assert policy.choose(request("short"), view(2, 0, 1)).slot == 1


def test_the_tree_evicts_tails_of_what_was_used_least_recently() -> None:
    tree = OwnerTree(max_bytes=60)
    tree.insert(0, blocks(tail("a", 30)), OFFSETS)
    tree.insert(0, blocks(tail("b", 30)), OFFSETS)
    tree.insert(0, blocks(tail("a", 20)), OFFSETS)  # used again, all but its tail
    tree.insert(0, blocks(tail("c", 20)), OFFSETS)
    assert tree.held_bytes(0) == 60
    assert tree.match(blocks(tail("a", 30))) == (2, 0)
    assert tree.match(blocks(tail("b", 30))) == (2, 0)
    assert tree.match(blocks(tail("c", 20))) == (2, 0)


def test_when_the_first_owner_has_evicted_a_block_another_holder_owns_it() -> None:
    tree = OwnerTree(max_bytes=30)
    tree.insert(4, blocks(tail("a", 30)), OFFSETS)
    tree.insert(2, blocks(tail("a", 30)), OFFSETS)
    assert tree.match(blocks(tail("a", 30))) == (3, 4)
    tree.insert(4, blocks(tail("b", 30)), OFFSETS)
    assert tree.match(blocks(tail("a", 30))) == (3, 2)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_tree_agrees_with_a_naive_one(seed: int) -> None:
    draw = random.Random(seed)
    limit = draw.choice([40, 80, 10_000])
    tree = OwnerTree(limit)
    # Prefix -> holders in order of arrival; per holder what it holds, least recently used first.
    holders: dict[int, list[int]] = {}
    held: dict[int, list[int]] = {}

    def lose(slot: int, block: int) -> None:
        holders[block].remove(slot)

    for _ in range(60):
        text = "".join(draw.choice("ab") * BLOCK for _ in range(draw.randint(1, 5)))
        slot = draw.randrange(4)
        if draw.random() < 0.1:
            tree.forget(slot)
            for block in held.pop(slot, []):
                lose(slot, block)
        else:
            tree.insert(slot, blocks(text), OFFSETS)
            mine = held.setdefault(slot, [])
            for block in reversed(blocks(text)):
                if block in mine:
                    mine.remove(block)
                else:
                    holders.setdefault(block, []).append(slot)
                mine.append(block)
            while len(mine) * BLOCK > limit:
                lose(slot, mine.pop(0))
        text = "".join(draw.choice("ab") * BLOCK for _ in range(draw.randint(1, 5)))
        path = blocks(text)
        depth = 0
        while depth < len(path) and holders.get(path[depth]):
            depth += 1
        assert tree.match(path) == (depth, holders[path[depth - 1]][0] if depth else None)
        assert tree.held_bytes(slot) == len(held.get(slot, [])) * BLOCK


def test_what_forgotten_replicas_left_is_freed_little_by_little() -> None:
    tree = OwnerTree(2**20)
    for letter in "abcdefgh":
        tree.insert(0, blocks(tail(letter, 300)), OFFSETS)
    tree.forget(0)
    assert tree.match(blocks(tail("a", 300))) == (0, None)
    for _ in range(10):
        tree.insert(1, blocks(tail("z", 300)), OFFSETS)
    assert len(tree._holders) == 30
