from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from gateway.prompt.blocks import HASH_MASK, BlockSchedule, prompt_key

# Speed is measured elsewhere; a busy machine must not fail a property.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

schedules = st.builds(
    BlockSchedule,
    block_bytes=st.integers(1, 16),
    growth=st.integers(0, 8),
    max_block_bytes=st.integers(1, 128),
)


def test_hashes_are_chained_xxh3_of_full_blocks() -> None:
    schedule = BlockSchedule(block_bytes=4, growth=0)
    first = xxh3_64_intdigest(b"abcd", 7) & HASH_MASK
    second = xxh3_64_intdigest(b"efgh", first) & HASH_MASK
    assert schedule.hashes(b"abcdefghi", 7) == [first, second]


def test_default_blocks_double_at_fixed_depths() -> None:
    schedule = BlockSchedule()
    schedule.hashes(bytes(512 * 1024), 0)
    offsets = schedule.offsets
    first_of_size: dict[int, int] = {}
    for start, end in pairwise(offsets):
        first_of_size.setdefault(end - start, start)
    assert first_of_size == {256: 0, 512: 16 << 10, 1024: 32 << 10, 2048: 64 << 10, 4096: 128 << 10}


def test_without_growth_blocks_are_equal() -> None:
    schedule = BlockSchedule(block_bytes=256, growth=0)
    assert len(schedule.hashes(bytes(128 * 1024), 0)) == 512
    assert schedule.covered_bytes(512) == 128 * 1024


@untimed
@given(schedules, st.integers(0, 3000))
def test_no_block_exceeds_its_bounds(schedule: BlockSchedule, length: int) -> None:
    schedule.hashes(bytes(length), 0)
    growth = schedule._growth
    for start, end in pairwise(schedule.offsets):
        size = end - start
        assert size == schedule.block_bytes or size <= schedule.max_block_bytes
        assert size == schedule.block_bytes or size * growth <= start


@untimed
@given(schedules, st.binary(max_size=600), st.binary(max_size=600), st.integers(0, HASH_MASK))
def test_longer_data_keeps_the_hashes_of_shorter(schedule: BlockSchedule, data: bytes, more: bytes, seed: int) -> None:
    short = schedule.hashes(data, seed)
    long = schedule.hashes(data + more, seed)
    assert long[: len(short)] == short
    assert schedule.covered_bytes(len(short)) <= len(data) < schedule.covered_bytes(len(short) + 1)


@untimed
@given(st.binary(min_size=64, max_size=200), st.integers(0, 63))
def test_nothing_is_shared_from_a_changed_byte_on(data: bytes, position: int) -> None:
    schedule = BlockSchedule(block_bytes=8, growth=0)
    changed = bytearray(data)
    changed[position] ^= 1
    before, after = schedule.hashes(data, 1), schedule.hashes(bytes(changed), 1)
    same = position // 8
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


def test_another_seed_shares_nothing() -> None:
    schedule = BlockSchedule(block_bytes=8, growth=0)
    assert not set(schedule.hashes(bytes(80), 1)) & set(schedule.hashes(bytes(80), 2))


def test_covered_bytes_reaches_beyond_what_was_hashed() -> None:
    assert BlockSchedule(block_bytes=10, growth=0).covered_bytes(7) == 70


def test_head_hash_of_a_prompt_shorter_than_a_block() -> None:
    short, other = prompt_key(b"short", 1), prompt_key(b"other", 1)
    assert short.hashes == other.hashes == []
    assert 0 < short.head_hash <= HASH_MASK
    assert short.head_hash != other.head_hash
    long = prompt_key(bytes(1000), 1)
    assert long.head_hash == long.hashes[0]


@pytest.mark.parametrize(
    "arguments", [{"block_bytes": 0}, {"max_block_bytes": 0}, {"growth": -1}], ids=lambda value: str(value)
)
def test_impossible_schedules_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="block_bytes"):
        BlockSchedule(**arguments)
