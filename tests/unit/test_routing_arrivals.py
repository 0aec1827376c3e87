"""Requests a second, by pool."""

import pytest

from gateway.routing.arrivals import Arrivals


def test_the_rate_of_a_pool_is_that_of_its_last_requests() -> None:
    arrivals = Arrivals()
    assert arrivals.per_s("unknown", 5.0) == 0.0
    for number in range(10_000):
        arrivals.note("busy", 5.0 + 0.01 * number)
        if number % 100 == 0:
            arrivals.note("idle", 5.0 + 0.01 * number)
    assert arrivals.per_s("busy", 105.0) == pytest.approx(100.0, rel=0.01)
    assert arrivals.per_s("idle", 105.0) == pytest.approx(1.0, rel=0.1)
    # When nobody comes any more that is soon so.
    assert arrivals.per_s("busy", 115.0) == pytest.approx(100.0 / 2.718, rel=0.02)
    assert arrivals.per_s("busy", 200.0) < 0.01


def test_a_burst_counts_as_what_it_is_over_some_seconds() -> None:
    arrivals = Arrivals()
    for number in range(900):
        arrivals.note("m", 3.0 * (number // 9))
    assert 2.5 < arrivals.per_s("m", 298.5) < 3.5
    for _ in range(100):
        arrivals.note("m", 300.0)
    assert arrivals.per_s("m", 300.0) < 14.0
