"""Consistent hashing, with and without a bound on load."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.bounded_hash import BoundedHash
from policies.consistent_hash import ConsistentHash
from policies.types import Candidates, Request

KEYS = 4000


def request(prefix_hash: int = 0, session: str | None = None) -> Request:
    return Request(1000.0, 100.0, prefix_hash=prefix_hash, session=session)


def owners(policy: ConsistentHash | BoundedHash, slots: tuple[int, ...], names: list[str] | None = None) -> list[int]:
    view = Candidates(slots, names=names or (), in_flight=[0] * (max(slots) + 1))
    return [policy.choose(request(prefix_hash=key + 1), view).slot for key in range(KEYS)]


@pytest.mark.parametrize("make", [ConsistentHash, BoundedHash])
@pytest.mark.parametrize("leaving", [0, 3, 7])
def test_a_replica_that_leaves_moves_only_its_own_keys(
    make: type[ConsistentHash] | type[BoundedHash], leaving: int
) -> None:
    policy = make()
    before = owners(policy, tuple(range(8)))
    policy.forget(leaving)
    after = owners(policy, tuple(slot for slot in range(8) if slot != leaving))
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {old for old, _ in moved} == {leaving}
    # They are spread over those that stay.
    assert len({new for _, new in moved}) == 7
    policy.forget(99)
    assert owners(policy, tuple(range(8))) == before


def test_an_ejected_replica_is_as_good_as_a_removed_one() -> None:
    removed, ejected = ConsistentHash(), ConsistentHash()
    owners(ejected, (0, 1, 2, 3))
    assert owners(removed, (0, 1, 3)) == owners(ejected, (0, 1, 3))


def test_shares_are_even() -> None:
    counts = Counter(owners(ConsistentHash(), tuple(range(8))))
    assert max(counts.values()) < 1.35 * KEYS / 8
    assert min(counts.values()) > 0.65 * KEYS / 8


def test_the_session_decides_and_the_prompt_does_not() -> None:
    policy = ConsistentHash()
    view = Candidates(tuple(range(8)))
    by_session = {policy.choose(request(prefix_hash=head, session="alice"), view).slot for head in range(50)}
    assert len(by_session) == 1
    assert len({policy.choose(request(session=f"user {number}"), view).slot for number in range(50)}) > 4
    # An empty session is none.
    assert len({policy.choose(request(prefix_hash=head, session=""), view).slot for head in range(1, 50)}) > 4


def test_the_whole_prompt_may_be_the_key() -> None:
    policy, view = ConsistentHash(prompt_key="whole"), Candidates(tuple(range(8)))
    same_head = [
        Request(1000.0, 100.0, prefix_hash=1, block_hashes=(1, last), block_offsets=(0, 256, 512))
        for last in range(2, 52)
    ]
    assert len({policy.choose(one, view).slot for one in same_head}) > 4
    assert len({ConsistentHash().choose(one, view).slot for one in same_head}) == 1
    with pytest.raises(ValueError, match="prompt_key"):
        ConsistentHash(prompt_key="tail")


def test_load_is_never_looked_at() -> None:
    policy = ConsistentHash()
    idle = policy.choose(request(prefix_hash=7), Candidates((0, 1, 2), in_flight=[0, 0, 0])).slot
    loads = [0, 0, 0]
    loads[idle] = 1000
    assert policy.choose(request(prefix_hash=7), Candidates((0, 1, 2), in_flight=loads)).slot == idle


def test_without_any_key_requests_are_spread() -> None:
    policy = ConsistentHash(seed=1)
    assert {policy.choose(request(), Candidates((0, 1, 2))).slot for _ in range(60)} == {0, 1, 2}


@pytest.mark.parametrize("make", [ConsistentHash, BoundedHash])
def test_names_and_not_slots_own_keys(make: type[ConsistentHash] | type[BoundedHash]) -> None:
    # Two gateways that learned of the same replicas in another order.
    one = owners(make(seed=1), (0, 1, 2), ["a", "b", "c"])
    other = owners(make(seed=2), (0, 1, 2), ["c", "a", "b"])
    assert [("a", "b", "c")[slot] for slot in one] == [("c", "a", "b")[slot] for slot in other]


def test_a_slot_given_to_another_replica_has_other_keys() -> None:
    policy = ConsistentHash()
    before = owners(policy, (0, 1, 2), ["a", "b", "c"])
    policy.forget(1)
    after = owners(policy, (0, 1, 2), ["a", "d", "c"])
    assert {old for old, new in zip(before, after, strict=True) if old != new} == {0, 1, 2}
    assert after == owners(ConsistentHash(), (0, 1, 2), ["a", "d", "c"])


@pytest.mark.parametrize("make", [ConsistentHash, BoundedHash])
def test_a_ring_without_points_is_refused(make: type[ConsistentHash] | type[BoundedHash]) -> None:
    with pytest.raises(ValueError, match="virtual_nodes"):
        make(virtual_nodes=0)


def test_the_bound_counts_the_new_request_and_is_inclusive() -> None:
    policy = BoundedHash()
    home = policy.choose(request(prefix_hash=5), Candidates((0, 1), in_flight=[0, 0])).slot
    # 7 in flight, 8 with the new one: 8 / 2 x 1.25 = 5.
    loads = [0, 0]
    loads[home], loads[1 - home] = 4, 3
    choice = policy.choose(request(prefix_hash=5), Candidates((0, 1), in_flight=loads))
    assert (choice.slot, choice.reason) == (home, "hash of the prompt's head")
    loads[home], loads[1 - home] = 5, 2
    choice = policy.choose(request(prefix_hash=5), Candidates((0, 1), in_flight=loads))
    assert choice.slot == 1 - home
    assert choice.terms == {"in_flight": 2, "limit": 5.0}


def test_with_few_requests_nobody_is_within_the_bound_and_the_first_keeps_its_keys() -> None:
    policy = BoundedHash()
    slots = tuple(range(8))
    home = policy.choose(request(prefix_hash=5), Candidates(slots, in_flight=[0] * 8)).slot
    loads = [0] * 8
    loads[home] = 1
    choice = policy.choose(request(prefix_hash=5), Candidates(slots, in_flight=loads))
    assert choice.slot == home
    assert "no replica is within the bound" in choice.reason


@settings(deadline=None)
@given(
    heads=st.lists(st.integers(1, 20), min_size=60, max_size=120),
    replicas=st.integers(2, 9),
    load_factor=st.floats(1.0, 2.0),
)
def test_the_bound_holds_once_there_is_load(heads: list[int], replicas: int, load_factor: float) -> None:
    policy = BoundedHash(load_factor=load_factor)
    slots = tuple(range(replicas))
    loads = [0] * replicas
    for head in heads:
        choice = policy.choose(request(prefix_hash=head), Candidates(slots, in_flight=loads))
        total = sum(loads)
        if min(loads) + 1 <= (total + 1) / replicas * load_factor:
            assert loads[choice.slot] + 1 <= (total + 1) / replicas * load_factor or total == 0
        loads[choice.slot] += 1


def test_one_popular_head_fills_the_fleet_in_the_order_of_the_ring() -> None:
    policy = BoundedHash()
    slots = tuple(range(4))
    loads = [0] * 4
    for _ in range(400):
        loads[policy.choose(request(prefix_hash=5), Candidates(slots, in_flight=loads)).slot] += 1
    assert max(loads) <= 125
    # The bound is all that moves anybody: the last on the ring gets the rest.
    assert min(loads) < 60


def test_a_factor_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="load_factor"):
        BoundedHash(load_factor=0.9)
