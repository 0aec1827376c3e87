"""The engine in real time: whatever the loop does, the engine's clock is exact."""

from __future__ import annotations

import asyncio

import pytest

from gateway.estimator.roofline import StepCost
from loadtests.engine import Engine, EngineLimits, EngineRequest
from loadtests.replica.driver import Driver, Generation
from loadtests.replica.metrics import ReplicaMetrics

COST = StepCost(prefill_s_per_token=1e-4, attention_s_per_pair=0, weights_s=0.1, kv_s_per_token=0, overhead_s=0)


def make(speedup: float = 20) -> tuple[Driver, Engine, ReplicaMetrics]:
    engine = Engine(COST, EngineLimits(kv_capacity_tokens=100_000))
    metrics = ReplicaMetrics()
    return Driver(engine, speedup, metrics), engine, metrics


def request(name: str, prompt: int = 100, output: int = 5) -> EngineRequest:
    return EngineRequest(name, prompt, output)


async def test_times_are_the_engines_however_late_the_loop_is() -> None:
    driver, _, metrics = make()
    generation = driver.submit(request("a", 5000, 11))
    await generation.done
    assert metrics.ttft.count == 1
    assert metrics.ttft.total == pytest.approx(0.5 / 20)
    assert metrics.itl.total == pytest.approx(10 * 0.1 / 20)
    assert metrics.histograms["e2e_request_latency_seconds"].total == pytest.approx(1.5 / 20)
    assert metrics.histograms["request_queue_time_seconds"].total == 0
    assert metrics.finished["length"] == 1


async def test_it_takes_at_least_the_engines_time() -> None:
    driver, _, _ = make()
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    await driver.submit(request("a", 100, 5)).done
    assert loop.time() - start_s >= 5 * 0.1 / 20 - 0.002


async def test_progress_tells_every_token_once_and_in_order() -> None:
    for speedup in (20, 100_000):
        driver, _, _ = make(speedup)
        told: list[int] = []
        await driver.submit(request("a", 100, 40), on_progress=told.append).done
        assert told == sorted(set(told))
        assert told[-1] == 40


async def test_an_arrival_during_a_step_joins_the_next() -> None:
    driver, engine, _ = make()
    first = driver.submit(request("first", 100, 3))
    late: list[Generation] = []
    second: list[int] = []

    def progress(emitted: int) -> None:
        if emitted == 1:
            late.append(driver.submit(request("late", 100, 2), on_progress=second.append))

    first.on_progress = progress
    await first.done
    await late[0].done
    assert second == [1, 2]
    # Prompt of the first; its decode and the late one's prompt; a decode of each.
    assert engine.steps == 3


async def test_prompts_submitted_together_share_a_step() -> None:
    driver, engine, _ = make()
    generations = [driver.submit(request(str(i), 100, 1)) for i in range(5)]
    for generation in generations:
        await generation.done
    assert engine.steps == 1


async def test_idle_driver_sleeps() -> None:
    driver, engine, _ = make(speedup=1000)
    await driver.submit(request("a")).done
    await asyncio.sleep(0)
    assert driver.idle
    steps = engine.steps
    await driver.submit(request("b")).done
    assert engine.steps == steps + 5


async def test_short_steps_are_told_several_at_a_time() -> None:
    driver, engine, metrics = make(speedup=10_000)
    told: list[int] = []
    await driver.submit(request("a", 100, 2000), on_progress=told.append).done
    assert engine.steps == 2000
    # A step takes 10 microseconds of wall time, a wake-up covers a millisecond.
    assert len(told) <= 200
    assert metrics.itl.count == 1999
    assert metrics.itl.total == pytest.approx(1999 * 0.1 / 10_000)


async def test_abort_is_counted_and_final() -> None:
    driver, engine, metrics = make()
    generation = driver.submit(request("a", 100, 1000))
    assert driver.abort(generation)
    assert not driver.abort(generation)
    assert generation.done.cancelled()
    assert (engine.aborted, metrics.finished["abort"], driver.in_flight) == (1, 1, 0)


async def test_abort_between_the_last_step_and_its_end() -> None:
    driver, engine, metrics = make(speedup=1)
    generation = driver.submit(request("a", 100, 1))
    while engine.completed == 0:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert not generation.done.done()
    assert driver.abort(generation)
    assert metrics.finished["abort"] == 1
    assert metrics.finished["length"] == 0
    driver.close()
