"""Requests a second, by pool."""

import pytest

from gateway.routing.arrivals import Arrivals


def test_the_rate_of_a_pool_is_that_of_its_last_requests() -> None:
    arrivals = Arrivals()
    assert arrivals.per_s("unknown") == 1.0
    for number in range(400):
        arrivals.note("busy", 5.0 + 0.01 * number)
        if number % 100 == 0:
            arrivals.note("idle", 5.0 + 0.01 * number)
    assert arrivals.per_s("busy") == pytest.approx(100.0, rel=0.05)
    assert arrivals.per_s("idle") == pytest.approx(1.0, rel=0.05)


def test_bursts_count_with_the_pauses_between_them() -> None:
    arrivals = Arrivals()
    for number in range(900):
        arrivals.note("m", 3.0 * (number // 9))
    assert arrivals.per_s("m") == pytest.approx(3.0, rel=0.25)


def test_a_night_without_requests_is_forgotten_in_a_while() -> None:
    arrivals = Arrivals()
    for number in range(600):
        arrivals.note("m", 0.1 * number)
    arrivals.note("m", 50_000.0)
    assert arrivals.per_s("m") > 0.5
    for number in range(600):
        arrivals.note("m", 50_000.0 + 0.1 * number)
    assert arrivals.per_s("m") == pytest.approx(10.0, rel=0.05)
