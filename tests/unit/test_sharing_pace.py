"""A token bucket: at once after a pause, evenly where there is always something."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sharing.pace import Pace


def test_as_often_as_was_saved_and_then_one_after_the_other() -> None:
    pace = Pace(3.0)
    assert [pace.pause_s(5.0, 0.5) for _ in range(5)] == pytest.approx([0.0, 0.0, 0.0, 0.5, 1.0])
    # What was done too early is taken off what a pause saves up.
    assert pace.pause_s(6.5, 0.5) == 0.0
    assert pace.pause_s(6.5, 0.5) == pytest.approx(0.5)


def test_what_is_not_due_is_not_noted() -> None:
    pace = Pace(2.0)
    assert [pace.is_due(1.0, 0.5) for _ in range(4)] == [True, True, False, False]
    assert not pace.is_due(1.4, 0.5)
    assert pace.is_due(1.5, 0.5)
    assert not pace.is_due(1.5, 0.5)


@given(st.floats(1.0, 20.0), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=200))
def test_never_more_often_than_the_average_and_what_was_saved(saved: float, idle_s: list[float]) -> None:
    every_s = 0.05
    pace = Pace(saved)
    times_s = []
    now_s = 0.0
    for wait_s in idle_s:
        now_s += wait_s
        times_s.append(now_s)
        now_s += pace.pause_s(now_s, every_s)
    for begin, begun_s in enumerate(times_s):
        for end in range(begin, len(times_s)):
            assert end - begin + 1 <= saved + (times_s[end] - begun_s) / every_s + 1.0 + 1e-6
