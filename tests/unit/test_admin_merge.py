"""Metrics pages of several workers as one."""

from collections.abc import Iterable
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gateway.admin.merge import Merged, Page, page


def over_the_wire(families: Iterable[Metric]) -> Page:
    sent: Page = orjson.loads(orjson.dumps(page(families)))
    return sent


def worker(requests: dict[str, float], seconds: list[float] | None = None, **gauges: float) -> Page:
    counter = CounterMetricFamily("warmgate_requests", "Requests.", labels=["replica"])
    for replica, number in requests.items():
        counter.add_metric([replica], number)
    histogram = HistogramMetricFamily("warmgate_ttft_seconds", "TTFT.", labels=[])
    seconds = seconds or []
    buckets = [("1.0", sum(value <= 1 for value in seconds)), ("+Inf", len(seconds))]
    histogram.add_metric([], buckets, sum(seconds))
    families: list[Metric] = [counter, histogram]
    families += [GaugeMetricFamily(name, "A gauge.", value=value) for name, value in gauges.items()]
    return over_the_wire(families)


def values(families: list[Metric]) -> dict[Any, float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples
    }


def test_counters_histograms_and_gauges() -> None:
    one = worker({"r1": 3, "r2": 1}, [0.5, 2.0], warmgate_requests_in_progress=2, warmgate_replica_up=1)
    two = worker({"r1": 4}, [0.5], warmgate_requests_in_progress=3, warmgate_replica_up=1)
    merged = values(Merged().of([one, two]))
    assert merged["warmgate_requests_total", ("replica", "r1")] == 7
    assert merged["warmgate_requests_total", ("replica", "r2")] == 1
    assert merged["warmgate_ttft_seconds_bucket", ("le", "1.0")] == 2
    assert merged["warmgate_ttft_seconds_bucket", ("le", "+Inf")] == 3
    assert merged[("warmgate_ttft_seconds_sum",)] == 3.0
    assert merged[("warmgate_requests_in_progress",)] == 5
    assert merged[("warmgate_replica_up",)] == 1


def test_shares_and_means_are_over_the_workers_that_have_them() -> None:
    pages = [worker({}, warmgate_replica_routable=value) for value in (1, 1, 0, 0)]
    pages += [worker({}, warmgate_ttft_calibration_factor=1.5)]
    merged = values(Merged().of(pages))
    assert merged[("warmgate_replica_routable",)] == 0.5
    assert merged[("warmgate_ttft_calibration_factor",)] == 1.5


def test_what_a_worker_had_counted_outlives_it_but_not_its_gauges() -> None:
    merged = Merged()
    merged.retire(worker({"r1": 5}, [2.0], warmgate_requests_in_progress=9))
    now = values(merged.of([worker({"r1": 1, "r2": 1}, warmgate_requests_in_progress=1)]))
    assert now["warmgate_requests_total", ("replica", "r1")] == 6
    assert now[("warmgate_ttft_seconds_sum",)] == 2.0
    assert now[("warmgate_requests_in_progress",)] == 1
    assert values(merged.of([]))["warmgate_requests_total", ("replica", "r1")] == 5


def test_series_of_a_replica_that_left_do_not_come_back() -> None:
    merged = Merged()
    merged.retire(worker({"r1": 5, "r2": 5, "": 1}))
    merged.forget_replicas({"r2"})
    assert values(merged.of([])) == {
        ("warmgate_requests_total", ("replica", "r2")): 5,
        ("warmgate_requests_total", ("replica", "")): 1,
        ("warmgate_ttft_seconds_bucket", ("le", "1.0")): 0,
        ("warmgate_ttft_seconds_bucket", ("le", "+Inf")): 0,
        ("warmgate_ttft_seconds_count",): 0,
        ("warmgate_ttft_seconds_sum",): 0,
    }


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["count", "die"]), st.sampled_from(["r1", "r2"])), max_size=30
    )
)
def test_no_counter_runs_backwards_whatever_dies_when(steps: list[tuple[int, str, str]]) -> None:
    merged = Merged()
    counts: list[dict[str, float]] = [{}, {}, {}]
    expected: dict[Any, float] = {}
    before: dict[Any, float] = {}
    for number, step, replica in steps:
        if step == "count":
            counts[number][replica] = counts[number].get(replica, 0) + 1
            key = "warmgate_requests_total", ("replica", replica)
            expected[key] = expected.get(key, 0) + 1
        else:
            merged.retire(worker(counts[number]))
            counts[number] = {}
        now = values(merged.of([worker(one) for one in counts]))
        assert all(now[key] >= value for key, value in before.items())
        assert {key: value for key, value in now.items() if key[0] == "warmgate_requests_total"} == expected
        before = now
