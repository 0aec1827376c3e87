"""Predicted TTFT against hand-computed steps of the engine, and what calibration makes of wrong constants."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.estimator.calibration import Calibration, PredictionErrors
from gateway.estimator.predictor import NEUTRAL_COST, Predictor, ReplicaClass

H100_8B = ReplicaClass("h100-sxm", "llama-3.1-8b")


def predict(
    predictor: Predictor,
    prompt: float,
    matched: float = 0.0,
    ahead_s: float = 0.0,
    ahead_tokens: float = 0.0,
    decodes: int = 0,
    kv_tokens: float = 0.0,
    now_s: float = 1e6,
) -> tuple[float, float, float]:
    own, ttft, delay, step = [0.0], [0.0], [0.0], [0.0]
    load = [matched], [ahead_s], [ahead_tokens], [decodes], [kv_tokens], [0.0], [0.0]
    predictor.fill([0], now_s, prompt, *load, own, ttft, delay, step, [0.0], [0.0])
    return own[0], ttft[0], delay[0]


@pytest.fixture
def predictor() -> Predictor:
    predictor = Predictor()
    predictor.configure(0, H100_8B)
    predictor.classes[H100_8B].constant_s = 0.0
    predictor.forget(0)
    return predictor


def test_a_prompt_alone_takes_its_prefill(predictor: Predictor) -> None:
    own, ttft, delay = predict(predictor, 30_000)
    # 30,000 tokens on an H100 with an 8B model: 1.2 s.
    assert own == pytest.approx(1.2, rel=0.01)
    assert ttft == pytest.approx(own)
    assert delay == 0.0


def test_little_to_compute_still_reads_the_weights(predictor: Predictor) -> None:
    own, ttft, _ = predict(predictor, 16)
    assert own < 0.001
    assert ttft == pytest.approx(NEUTRAL_COST.weights_s)
    # A short queue shares the same step.
    _, behind, _ = predict(predictor, 16, ahead_s=0.001, ahead_tokens=32)
    assert behind == pytest.approx(NEUTRAL_COST.weights_s)


def test_cached_tokens_are_not_computed_but_attended_to(predictor: Predictor) -> None:
    cold, _, _ = predict(predictor, 8192)
    warm, _, _ = predict(predictor, 8192, matched=4096)
    assert cold / 2 < warm < cold
    assert warm == pytest.approx(NEUTRAL_COST.prefill_compute_s(4096, 4096))


def test_the_queue_comes_first_and_decodes_share_its_steps(predictor: Predictor) -> None:
    own, alone, _ = predict(predictor, 4000)
    _, queued, _ = predict(predictor, 4000, ahead_s=0.5, ahead_tokens=12_000)
    assert queued == pytest.approx(alone + 0.5)
    _, busy, delay = predict(predictor, 4000, ahead_s=0.5, ahead_tokens=12_000, decodes=50, kv_tokens=100_000)
    shared = 100_000 * NEUTRAL_COST.kv_s_per_token + 50 * NEUTRAL_COST.prefill_s_per_token  # decodes compute as well
    # 16,000 tokens are two steps of 8,192, and both read the decodes' KV.
    assert busy == pytest.approx(queued + 2 * shared)
    assert delay == pytest.approx(50 * own)


@given(prompt=st.floats(1, 200_000), share=st.floats(0, 0.99), ahead=st.floats(0, 10), decodes=st.integers(0, 256))
def test_predictions_are_positive_and_grow_with_the_load(
    prompt: float, share: float, ahead: float, decodes: int
) -> None:
    predictor = Predictor()
    predictor.configure(0, H100_8B)
    own, ttft, delay = predict(predictor, prompt, prompt * share, ahead, ahead * 1e4, decodes, decodes * 1000.0)
    more = predict(predictor, prompt, prompt * share, ahead + 1, ahead * 1e4 + 1e4, decodes, decodes * 1000.0)
    assert own > 0
    assert ttft > 0
    assert delay >= 0
    assert more[1] >= ttft
    work = predictor.work(0, own, ttft)
    assert predictor.classes[H100_8B].predict(*work) == pytest.approx(max(ttft, own + 0.002))


@pytest.mark.parametrize(("constant_s", "factor"), [(0.003, 1.3), (0.02, 0.7), (0.001, 1.0)])
def test_calibration_finds_the_truth(constant_s: float, factor: float) -> None:
    calibration = Calibration(known_hardware=True)
    random = Random(7)
    for _ in range(200):
        work_s = random.choice((0.006, 0.05, 0.2, 0.6, 1.5))
        calibration.observe(work_s, constant_s + factor * work_s * random.gauss(1.0, 0.03))
    assert calibration.factor == pytest.approx(factor, rel=0.05)
    assert calibration.constant_s == pytest.approx(constant_s, abs=0.004)


def test_unknown_hardware_is_learned_within_a_few_requests() -> None:
    calibration = Calibration(known_hardware=False)
    random = Random(7)
    for _ in range(20):
        work_s = random.uniform(0.02, 1.0)
        calibration.observe(work_s, 0.004 + 12.0 * work_s)
    assert calibration.factor == pytest.approx(12.0, rel=0.05)


def test_a_slow_beginning_is_forgotten_within_a_hundred_noisy_requests() -> None:
    """Of unknown hardware, while it warms up and another process starts beside it; a quarter of prompts are new."""
    long, short = [], []
    for seed in range(20):
        rng = Random(seed)
        calibration = Calibration(known_hardware=False)
        for number in range(100):
            compute_s = 0.035 if rng.random() < 0.25 else 0.002
            slowness = 1.3 if number < 16 else 1.0
            calibration.observe(compute_s, (0.08 + 20 * compute_s) * slowness * rng.lognormvariate(0.0, 0.15))
        long.append(calibration.predict(0.035) / 0.78)
        short.append(calibration.predict(0.002) / 0.12)
    for ratios in (long, short):
        assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.05)
        assert max(ratios) < 1.15


def test_outliers_do_not_move_it_much() -> None:
    calibration = Calibration(known_hardware=True)
    random = Random(7)
    for i in range(400):
        work_s = random.uniform(0.02, 1.0)
        observed_s = 0.002 + work_s if i % 20 else 30.0
        calibration.observe(work_s, observed_s)
    assert calibration.factor == pytest.approx(1.0, abs=0.15)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1000)), max_size=60))
def test_calibration_stays_finite_and_positive(pairs: list[tuple[float, float]]) -> None:
    calibration = Calibration(known_hardware=False)
    for work_s, observed_s in pairs:
        calibration.observe(work_s, observed_s)
        assert 0.0 < calibration.factor <= 1e3
        assert 0.0 <= calibration.constant_s <= 5.0


def test_errors_are_quantiles_of_the_window() -> None:
    errors = PredictionErrors(window=4)
    assert errors.bias() is None
    assert errors.absolute_quantile(0.5) is None
    for predicted_s in (1.1, 0.8, 1.3, 0.6, 1.0):
        errors.add(predicted_s, 1.0)
    # 1.1 has left the window.
    assert errors.bias() == pytest.approx((-0.2 + 0.3 - 0.4 + 0.0) / 4)
    assert errors.absolute_quantile(0.9) == pytest.approx(0.4)
    assert errors.count == 5


def test_what_others_may_have_prolonged_teaches_nothing_of_the_hardware(predictor: Predictor) -> None:
    """Half of the short prompts share their step with a long one that came after them."""
    random = Random(1)
    for _ in range(400):
        own, ttft, _ = predict(predictor, 500)
        joined_s = 0.3 if random.random() < 0.5 else 0.0
        observed_s = NEUTRAL_COST.weights_s + joined_s
        predictor.observe(0, predictor.work(0, own, ttft), ttft, observed_s, joined_s)
    calibration = predictor.classes[H100_8B]
    assert calibration.samples < 250
    assert predict(predictor, 500)[1] == pytest.approx(NEUTRAL_COST.weights_s, rel=0.02)
    # They were predicted wrongly all the same.
    assert calibration.errors.count == 400
    assert calibration.errors.absolute_quantile(0.9) == pytest.approx(0.95, abs=0.05)


def test_what_no_step_has_room_for_prolongs_nothing(predictor: Predictor) -> None:
    """Under overload there is always somebody behind, but a step takes no more than its budget."""
    own, ttft, _ = predict(predictor, 100_000)
    for joined_s in (0.0, 0.1, 1000.0):
        predictor.observe(0, predictor.work(0, own, ttft), ttft, 1.3 * ttft, joined_s)
    assert predictor.classes[H100_8B].samples == 3


def test_steps_are_as_large_as_each_replicas_own() -> None:
    predictor = Predictor(8192)
    times = []
    for budget in (None, 8192, 2048):
        predictor.configure(0, H100_8B, token_budget=budget)
        times.append(predict(predictor, 4000, 0.0, 0.5, 12_000.0, 50, 100_000.0)[1])
        assert predictor.budget(0) == (budget or 8192)
    shared = 100_000 * NEUTRAL_COST.kv_s_per_token + 50 * NEUTRAL_COST.prefill_s_per_token
    # 16,000 tokens are eight steps of 2,048, and each reads the decodes' KV.
    assert times[0] == times[1]
    assert times[2] == pytest.approx(times[0] + 6 * shared)
    ahead_s = predictor.prefill_only_s(0, 16_000, 0.0, 0.0, 0.0)
    predictor.configure(0, H100_8B)
    assert ahead_s >= predictor.prefill_only_s(0, 16_000, 0.0, 0.0, 0.0)
