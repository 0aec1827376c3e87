"""Which replicas should be given one more request."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.room import Room


def test_without_reasons_everybody_has_room_and_nothing_is_copied() -> None:
    slots = (0, 1, 2)
    assert Room([9, 9, 9]).among(slots, 0.0) is slots


def test_a_limit_is_exact() -> None:
    in_flight = [1, 5, 5]
    room = Room(in_flight)
    room.limit(0, 2)
    room.limit(1, 5)
    assert list(room.among((0, 1, 2), 0.0)) == [0, 2]
    in_flight[0] = 2
    assert list(room.among((0, 1), 0.0)) == []
    room.limit(1, None)
    assert list(room.among((0, 1), 0.0)) == [1]
    room.forget(0)
    assert room.among((0, 1), 0.0) == (0, 1)


def test_who_asked_to_be_spared_is_spared_while_there_are_others() -> None:
    room = Room([0, 0])
    room.spare(0, 5.0)
    room.spare(0, 3.0)
    assert list(room.among((0, 1), 4.0)) == [1]
    assert list(room.among((0,), 4.0)) == [0]
    room.spare(1, 9.0)
    assert list(room.among((0, 1), 4.5)) == [0, 1]
    assert list(room.among((0, 1), 5.1)) == [0]
    assert list(room.among((0, 1), 9.1)) == [0, 1]
    assert not room._marked


def test_a_replica_that_comes_up_grows_to_the_share_of_the_others() -> None:
    in_flight = [40, 40, 0]
    room = Room(in_flight, slow_start_s=10.0)
    room.came_up(2)
    slots = (0, 1, 2)

    def taken(now_s: float) -> int:
        while 2 in room.among(slots, now_s):
            in_flight[2] += 1
        return in_flight[2]

    # The clock starts with the first request, not with the probe that found it.
    assert taken(100.0) == 1
    assert taken(102.5) == 10
    assert taken(105.0) == 20
    assert 2 in room.among(slots, 110.0)
    assert not room._marked


def test_a_fleet_that_comes_up_together_is_not_held_back() -> None:
    room = Room([50, 0], slow_start_s=10.0)
    room.came_up(0)
    room.came_up(1)
    assert list(room.among((0, 1), 0.0)) == [0, 1]


def test_an_idle_fleet_lets_a_newcomer_have_one_request_at_a_time() -> None:
    in_flight = [0, 0]
    room = Room(in_flight, slow_start_s=10.0)
    room.came_up(1)
    assert list(room.among((0, 1), 0.0)) == [0, 1]
    in_flight[1] = 1
    assert list(room.among((0, 1), 0.1)) == [0]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([None, 1, 3, 8])), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
    st.sets(st.integers(0, 5)),
    st.floats(0, 12),
)
def test_only_hard_limits_can_leave_nobody(
    replicas: list[tuple[int, int | None]], spared: set[int], warming: set[int], now_s: float
) -> None:
    in_flight = [load for load, _ in replicas]
    room = Room(in_flight, slow_start_s=10.0)
    for slot, (_, most) in enumerate(replicas):
        room.limit(slot, most)
        if slot in spared:
            room.spare(slot, 6.0)
        if slot in warming:
            room.came_up(slot)
    slots = tuple(range(len(replicas)))
    chosen = room.among(slots, now_s)
    below = [slot for slot, (load, most) in enumerate(replicas) if most is None or load < most]
    assert set(chosen) <= set(below)
    assert bool(chosen) == bool(below)
    assert list(chosen) == sorted(chosen)


@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "up", "spare", "forget"]), st.integers(0, 3), st.floats(0.0, 4.0)),
        max_size=40,
    ),
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
)
def test_what_is_remembered_of_a_fleet_that_warms_up_changes_nothing(
    events: list[tuple[str, int, float]], in_flight: list[int]
) -> None:
    remembering, forgetful = Room(in_flight, 10.0), Room(in_flight, 10.0)
    slots = [0, 1, 2, 3]
    now_s = 0.0
    for what, slot, later_s in events:
        now_s += later_s
        for room in (remembering, forgetful):
            if what == "up":
                room.came_up(slot)
            elif what == "spare":
                room.spare(slot, now_s + 1.0)
            elif what == "forget":
                room.forget(slot)
        forgetful._alike = ()
        assert list(remembering.among(slots, now_s)) == list(forgetful.among(slots, now_s))
