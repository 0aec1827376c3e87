"""When memory counts as growing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.soak.trend import Sample, Trend, quantile, second_half

MB = 1 << 20


def samples(rss: list[float]) -> list[Sample]:
    return [Sample(1000 * number, int(value)) for number, value in enumerate(rss)]


def test_a_start_that_grows_and_then_stays_is_steady() -> None:
    trend = second_half(samples([50 * MB + 10 * MB * min(n, 5) for n in range(11)]))
    assert trend.growth_bytes == pytest.approx(0.0)
    assert trend.rss_bytes == 100 * MB
    assert trend.steady()


def test_a_leak_of_a_kilobyte_per_request_is_seen() -> None:
    trend = second_half(samples([60 * MB + 1024 * 1000 * n for n in range(200)]))
    assert trend.slope_bytes_per_request == pytest.approx(1024.0)
    assert trend.growth_bytes == pytest.approx(1024 * 99_000, rel=0.02)
    assert not trend.steady()


def test_what_is_allowed() -> None:
    assert Trend(100 * MB, 2.0 * MB, 1.0).steady()
    assert not Trend(100 * MB, 2.1 * MB, 1.0).steady()
    assert Trend(200 * MB, 3.9 * MB, 1.0).steady()
    assert Trend(100 * MB, -9.0 * MB, -1.0).steady()


@pytest.mark.parametrize("short", [[], [Sample(0, 1)], [Sample(5, 1), Sample(5, 2)]])
def test_too_few_samples_tell_nothing(short: list[Sample]) -> None:
    with pytest.raises(ValueError):
        second_half(short)


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0, 1))
def test_a_quantile_is_one_of_the_values_and_grows_with_its_share(values: list[float], share: float) -> None:
    assert quantile(values, share) in values
    assert quantile(values, 0.0) == min(values)
    assert quantile(values, 1.0) == max(values)
    assert quantile(values, share / 2) <= quantile(values, share)
