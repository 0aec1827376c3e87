"""Figures and tables of benchmark runs."""

import statistics
from array import array

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadtests.bench_report import markdown, terminal_table
from loadtests.bench_summary import Distribution, TtftPrediction, percentile, summarise
from loadtests.bench_trace import TraceRun
from loadtests.sse_stream import ChatResult


def answer(
    ttft_s: float, replica: str = "a", predicted_ms: float | None = None, error: str | None = None
) -> ChatResult:
    """A request of 100 prompt tokens, 40 cached, and 5 tokens, the last 0.4 s after the first."""
    return ChatResult(
        sent_s=10.0,
        status=200,
        error=error,
        first_token_s=10.0 + ttft_s,
        ended_s=10.5 + ttft_s,
        chunk_times_s=array("d", [10.0 + ttft_s, 10.1 + ttft_s, 10.4 + ttft_s]),
        prompt_tokens=100,
        completion_tokens=5,
        cached_tokens=40,
        replica=replica,
        predicted_ttft_ms=predicted_ms,
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40), st.integers(1, 99))
def test_percentiles_are_those_of_the_standard_library(values: list[float], percent: int) -> None:
    expected = statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
    assert percentile(sorted(values), percent / 100) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_percentiles_of_nothing_and_of_one() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([3.0], 0.99) == 3.0
    assert Distribution.of([]) == Distribution(0, 0, 0, 0, 0)


def test_ttft_prediction_worked() -> None:
    prediction = TtftPrediction.of([(110.0, 100.0), (150.0, 200.0)])
    assert prediction is not None
    assert (prediction.mean_predicted_ms, prediction.mean_observed_ms) == (130.0, 150.0)
    assert prediction.ratio_of_means == pytest.approx(130 / 150)
    assert prediction.bias == pytest.approx(-20 / 150)
    assert prediction.median_ape == pytest.approx((0.10 + 0.25) / 2)
    assert TtftPrediction.of([]) is None


def test_a_summary_worked() -> None:
    results = [
        answer(0.1, "a", predicted_ms=120.0),
        answer(0.2, "a"),
        answer(0.3, "b"),
        answer(9.0, "b", error="truncated"),
        ChatResult(sent_s=10.0, status=503, error="http_503", ended_s=10.0),
    ]
    run = TraceRun(results, dispatch_lags_s=[0.0, 0.002], wall_s=5.0)
    summary = summarise(run, "round_robin", speedup=4.0, replicas=4)
    assert (summary.requests, summary.errors) == (5, 2)
    assert summary.errors_by_kind == {"http_503": 1, "truncated": 1}
    assert summary.wall.ttft_ms.mean == pytest.approx(200.0)
    assert summary.wall.tpot_ms.p50 == pytest.approx(100.0)
    assert summary.wall.itl_ms.mean == pytest.approx(200.0)
    assert summary.wall.e2e_ms.p50 == pytest.approx(700.0)
    assert summary.wall.output_tokens_per_s == 3.0
    assert summary.token_hit_rate == 0.4
    assert summary.requests_per_replica == {"a": 2, "b": 1}
    assert summary.load_skew == pytest.approx(2 / (3 / 4))
    assert summary.dispatch_lag_ms.p50 == pytest.approx(1.0)
    assert summary.engine is not None
    assert summary.engine.ttft_ms.p99 == pytest.approx(4 * summary.wall.ttft_ms.p99)
    assert summary.engine.output_tokens_per_s == 0.75


def test_the_json_form() -> None:
    summary = summarise(TraceRun([answer(0.1, predicted_ms=80.0)], [0.0], 1.0), "p", speedup=2.0)
    loaded = orjson.loads(orjson.dumps(summary.as_json()))
    assert list(loaded)[:3] == ["policy", "requests", "errors"]
    assert set(loaded["ttft_ms"]) == {"mean", "p50", "p90", "p95", "p99"}
    assert loaded["ttft_ms"]["mean"] == pytest.approx(100.0)
    assert loaded["time_base"] == "wall"
    assert loaded["engine"]["ttft_ms"]["mean"] == pytest.approx(200.0)
    assert loaded["ttft_prediction"]["bias"] == pytest.approx(-0.2)
    assert {"tpot_ms", "itl_ms", "token_hit_rate", "output_tokens_per_s", "load_skew"} <= set(loaded)


def test_a_run_of_failures_only() -> None:
    failed = ChatResult(sent_s=0.0, error="connect", ended_s=0.1)
    summary = summarise(TraceRun([failed], [0.0], 0.1), "p")
    assert (summary.errors, summary.token_hit_rate, summary.load_skew) == (1, 0.0, 0.0)
    assert summary.engine is None
    assert orjson.loads(orjson.dumps(summary.as_json()))["ttft_prediction"] is None
    assert "| p | 1 | 1 |" in markdown([summary])


def test_tables_say_their_time_base() -> None:
    runs = [TraceRun([answer(0.1)], [0.0], 1.0), TraceRun([answer(0.2)], [0.0], 1.0)]
    fast = [summarise(run, name, speedup=3.0) for run, name in zip(runs, ("x", "y"), strict=True)]
    text = markdown(fast, notes=["`warmgate bench`"])
    lines = text.splitlines()
    assert lines[0].startswith("| policy | requests |")
    assert lines[2].startswith("| x | 1 | 0 | 300 |")
    assert lines[3].startswith("| y | 1 | 0 | 600 |")
    assert {line.count("|") for line in lines[:4]} == {lines[0].count("|")}
    assert "engine time: wall time x 3" in text
    assert text.endswith("`warmgate bench`\n")
    assert "Times are wall time" in markdown([summarise(runs[0], "x")])
    assert "| x | 1 | 0 | 100 |" in markdown([summarise(runs[0], "x", speedup=1.0)])


def test_the_terminal_table_has_the_same_cells() -> None:
    console = Console(width=250)
    summary = summarise(TraceRun([answer(0.1)], [0.0], 1.0), "predicted_ttft")
    with console.capture() as captured:
        console.print(terminal_table([summary]))
    assert "predicted_ttft" in captured.get()
    assert "token hit rate" in captured.get()
