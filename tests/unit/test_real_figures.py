"""Figures of a comparison on real replicas, without any."""

from pathlib import Path

import pytest

from loadtests.real.__main__ import Run, figures, run_of
from loadtests.real.conversations import Turn
from loadtests.real.replica import ReplicaOptions, VllmReplica
from loadtests.sse_stream import ChatResult


def turn(number: int, sent_s: float, ttft_s: float, prompt: int, cached: int) -> Turn:
    result = ChatResult(sent_s=sent_s, first_token_s=sent_s + ttft_s, ended_s=sent_s + 1.0)
    result.prompt_tokens, result.cached_tokens = prompt, cached
    return Turn(number, result)


def line(predicted_ms: float, observed_ms: float, expected: int = 0) -> dict[str, object]:
    return {"predicted_ttft_ms": predicted_ms, "ttft_ms": observed_ms, "expected_cached_tokens": expected}


def test_first_turns_are_told_from_later_ones() -> None:
    turns = [turn(0, 0.0, 0.1, 1000, 0), turn(1, 1.0, 0.02, 1100, 960), turn(2, 2.0, 0.04, 1200, 1088)]
    run = run_of("p", turns, [line(100, 100), line(30, 20, 900), line(30, 40, 1100)])
    assert run.first_ttft_ms == pytest.approx(100.0)
    assert run.later_ttft_ms == pytest.approx(30.0)
    assert run.cached_share == pytest.approx(2048 / 3300)
    assert run.promised_share == pytest.approx(2000 / 3300)
    assert run.prediction_errors == pytest.approx((0.0, 0.5, -0.25))
    assert run.duration_s == pytest.approx(3.0)


def test_predictions_are_judged_after_the_warm_up_of_each_gateway() -> None:
    runs = [
        Run("p", 3, 0.7, 0.7, 100.0, later, 1.0, errors)
        for later, errors in ((30.0, (9.0, -0.1, 0.2)), (50.0, (9.0, 0.3)))
    ]
    row = figures("p", runs, warm_up=1)
    assert row.prediction_median_ape == pytest.approx(0.2)
    assert row.later_turns_ttft_mean_ms == pytest.approx(40.0)
    assert row.later_turns_ttft_mean_ms_by_run == (30.0, 50.0)
    assert figures("p", runs, warm_up=5).prediction_median_ape is None


def test_how_a_replica_is_started() -> None:
    replica = VllmReplica(ReplicaOptions(Path("/venv"), Path("/model"), kv_events=True, extra=("--seed", "1")))
    program = replica._program()
    at = program.index("/venv/bin/vllm")
    assert program[0] == "/usr/bin/env"
    assert all("=" in word for word in program[3:at])
    assert program[at : at + 3] == ["/venv/bin/vllm", "serve", "/model"]
    assert "--enable-prompt-tokens-details" in program
    assert program[-2:] == ["--seed", "1"]
    (events,) = (word for word in program if word.startswith("{"))
    assert f"tcp://*:{replica.events_port}" in events
