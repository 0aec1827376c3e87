"""When a split pays, against sums done by hand."""

import pytest

from gateway.estimator.hardware import HARDWARE
from gateway.estimator.model import MODELS
from gateway.estimator.report import Estimate, Workload, estimate
from gateway.estimator.roofline import step_cost
from gateway.estimator.splitting import shortest_tokens, split_saves_s

CARD, SHAPE = HARDWARE["h100-sxm"], MODELS["llama-3.1-8b"]
COST = step_cost(CARD, SHAPE)


def test_a_split_saves_the_delay_of_the_batch_and_pays_the_transfer_and_a_step() -> None:
    # 32,000 tokens in four chunks beside 10 streams of 1,000 tokens each.
    own_s = COST.prefill_compute_s(32_000)
    beside_s = 4 * 10 * (COST.prefill_s_per_token + 1000 * COST.kv_s_per_token)
    step_s = COST.weights_s + 10 * 1000 * COST.kv_s_per_token
    expected = beside_s + 0.02 * 10 * own_s - 0.1 - step_s
    assert split_saves_s(COST, 32_000, 0.1, 10, 1000, 8192) == pytest.approx(expected)


def test_without_a_batch_a_split_saves_nothing() -> None:
    assert split_saves_s(COST, 32_000, 0.0, 0, 0, 8192) <= 0


def test_the_shortest_prompt_is_found_to_a_twentieth() -> None:
    assert shortest_tokens(lambda tokens: True) == 16
    assert shortest_tokens(lambda tokens: False) is None
    found = shortest_tokens(lambda tokens: tokens >= 10_000)
    assert found is not None
    assert 10_000 <= found <= 10_500
    # What holds for short prompts only is no break-even.
    assert shortest_tokens(lambda tokens: tokens < 1000) is None


def figures(prompt: int, batch: int, **options: float) -> Estimate:
    return estimate(CARD, SHAPE, Workload(prompt, 250, batch), **options)  # type: ignore[arg-type]


def test_the_break_even_of_a_slow_link_is_where_attention_outgrows_the_wire() -> None:
    by_link = {row.link: row for row in figures(32_000, 8).transfer}
    # 131,072 bytes per token at 1.25 GB/s against the roofline's prefill.
    tokens = by_link["10g"].break_even_tokens
    assert tokens is not None
    assert COST.prefill_s(tokens) >= tokens * 131_072 / 1.25e9
    assert COST.prefill_s(int(tokens / 1.06)) < int(tokens / 1.06) * 131_072 / 1.25e9
    assert by_link["400g"].break_even_tokens == 16


def test_advice() -> None:
    long = {row.link: row.advice for row in figures(32_000, 8).transfer}
    assert (long["nvlink"], long["400g"], long["10g"]) == ("split", "split", "stay")
    short = figures(200, 8, link_latency_s=0.002).transfer
    assert {row.advice for row in short} == {"stay"}
    for row in figures(32_000, 8).transfer:
        assert (row.advice == "split") == (row.split_saves_s > 0)
