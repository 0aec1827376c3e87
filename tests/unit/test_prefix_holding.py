"""What requests in flight hold: counted once, spared by eviction, and given back whatever happens in between."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prefixes.index import PrefixIndex, Record
from gateway.prompt.blocks import BlockSchedule

BLOCK = 256
SCHEDULE = BlockSchedule(BLOCK, growth=0)


def chain(*parts: str) -> list[int]:
    """Hashes of a prompt of blocks with these contents."""
    hashes, name = [], ""
    for part in parts:
        name += f"/{part}"
        hashes.append(hash(name) & ((1 << 60) - 1))
    return hashes


def held(index: PrefixIndex, slot: int) -> int:
    """`in_use_bytes` from first principles."""
    segments = index._replicas[slot].segments.values()
    assert all(segment.holders >= 0 for segment in segments)
    return sum(BLOCK * len(segment.hashes) for segment in segments if segment.holders)


def index(capacity_blocks: int = 1000) -> PrefixIndex:
    made = PrefixIndex(SCHEDULE, capacity_blocks * BLOCK)
    made.set_capacity(0, capacity_blocks * BLOCK)
    return made


def test_a_shared_prefix_is_held_once() -> None:
    prefixes = index()
    first = prefixes.insert(0, chain("s", "t", "a"))
    assert not prefixes.hold(first)
    second = prefixes.insert(0, chain("s", "t", "b"))
    assert not prefixes.hold(second)
    assert prefixes.in_use_bytes[0] == 4 * BLOCK
    third = prefixes.insert(0, chain("s", "t", "b"))
    assert prefixes.hold(third)
    assert prefixes.in_use_bytes[0] == 4 * BLOCK
    prefixes.release(second)
    assert prefixes.in_use_bytes[0] == 4 * BLOCK
    prefixes.release(third)
    assert prefixes.in_use_bytes[0] == 3 * BLOCK
    assert prefixes.in_use_blocks(0, chain("s", "t", "b"), 3) == 2
    prefixes.release(first)
    prefixes.release(first)
    assert prefixes.in_use_bytes[0] == 0
    assert prefixes.in_use_blocks(0, chain("s", "t", "b"), 3) == 0


def test_what_is_held_is_not_evicted() -> None:
    prefixes = index(capacity_blocks=4)
    old = prefixes.insert(0, chain("a", "b"))
    prefixes.hold(old)
    for name in "cdefg":
        prefixes.insert(0, chain(name, name))
    assert prefixes.match(chain("a", "b")) == [(0, 2)]
    prefixes.release(old)
    for name in "hij":
        prefixes.insert(0, chain(name, name))
    assert prefixes.match(chain("a", "b")) == []


def test_letting_go_is_use() -> None:
    prefixes = index(capacity_blocks=4)
    long = prefixes.insert(0, chain("a", "b"))
    prefixes.hold(long)
    prefixes.insert(0, chain("c", "d"))
    prefixes.release(long)
    prefixes.insert(0, chain("e", "f"))
    assert prefixes.match(chain("a", "b")) == [(0, 2)]
    assert prefixes.match(chain("c", "d")) == []


def test_what_does_not_fit_is_evicted_when_it_is_let_go() -> None:
    prefixes = index(capacity_blocks=3)
    record = prefixes.insert(0, chain("a"))
    prefixes.hold(record)
    prefixes.insert(0, chain("a", "b", "c", "d"))
    assert prefixes.held_bytes(0) == 4 * BLOCK
    prefixes.release(record)
    assert prefixes.match(chain("a", "b", "c", "d")) == [(0, 3)]


def test_what_is_let_go_with_a_dropped_block_is_evicted_if_it_does_not_fit() -> None:
    prefixes = index(capacity_blocks=3)
    prefixes.hold(prefixes.insert(0, chain("a")))
    prefixes.insert(0, chain("a", "b", "c", "d", "e"))
    prefixes.insert(0, chain("a", "b", "c", "d", "f"))
    assert prefixes.in_use_bytes[0] == prefixes.held_bytes(0) == 5 * BLOCK
    prefixes.truncate(0, chain("a", "b", "c", "d", "e"), 4)
    assert (prefixes.in_use_bytes[0], prefixes.held_bytes(0)) == (0, 3 * BLOCK)


operations = st.lists(
    st.tuples(
        st.sampled_from(("insert", "hold", "release", "undo", "truncate", "expire", "forget")),
        st.integers(0, 30),
        st.lists(st.sampled_from("abc"), min_size=1, max_size=5),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(operations, st.integers(3, 12))
def test_nothing_leaks_in_any_order(steps: list[tuple[str, int, list[str]]], capacity_blocks: int) -> None:
    prefixes = index(capacity_blocks)
    records: list[Record] = []
    for kind, number, parts in steps:
        if kind in ("insert", "hold"):
            record = prefixes.insert(0, chain(*parts))
            if kind == "hold":
                prefixes.hold(record)
                records.append(record)
        elif kind == "release" and records:
            prefixes.release(records[number % len(records)])
        elif kind == "undo" and records:
            record = records[number % len(records)]
            prefixes.release(record)
            prefixes.undo(record)
        elif kind == "truncate":
            prefixes.truncate(0, chain(*parts), number % len(parts))
        elif kind == "expire" and records:
            prefixes.expire(0, records[number % len(records)].used_before, number)
        elif kind == "forget":
            prefixes.forget(0)
            prefixes.set_capacity(0, capacity_blocks * BLOCK)
        assert prefixes.in_use_bytes[0] == held(prefixes, 0)
        assert prefixes.held_bytes(0) <= max(capacity_blocks * BLOCK, prefixes.in_use_bytes[0])
    for record in records:
        prefixes.release(record)
    assert prefixes.in_use_bytes[0] == held(prefixes, 0) == 0
