"""Laws that step costs keep whatever the card and the model."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.estimator.hardware import HARDWARE
from gateway.estimator.model import MODELS, ModelShape
from gateway.estimator.report import Workload, chunk_effect
from gateway.estimator.roofline import (
    StepCost,
    achievable_ridge_flop_per_byte,
    attention_pairs,
    decode_intensity_flop_per_byte,
    kv_capacity_bytes,
    kv_capacity_tokens,
    kv_copies,
    prefill_intensity_flop_per_byte,
    step_cost,
)

H100 = HARDWARE["h100-sxm"]
LLAMA = MODELS["llama-3.1-8b"]
MIXTURE = ModelShape(
    "mixture", 46.7e9, 12.9e9, layers=32, hidden=4096, kv_heads=8, head_dim=128,
    experts=8, experts_per_token=2, expert_parameters=45.1e9,
)  # fmt: skip

costs = st.builds(
    step_cost,
    st.sampled_from(list(HARDWARE.values())),
    st.sampled_from([*MODELS.values(), MIXTURE]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([0.0, 0.0015]),
)
token_counts = st.integers(0, 200_000)
batches = st.integers(1, 512)


@settings(deadline=None)
@given(costs, st.integers(1, 50_000), token_counts, st.integers(50, 10_000))
def test_chunks_cost_at_least_the_linear_part_of_the_whole(cost: StepCost, new: int, cached: int, chunk: int) -> None:
    chunked = math.fsum(cost.prefill_s(min(chunk, new - start), cached + start) for start in range(0, new, chunk))
    assert chunked >= new * cost.prefill_s_per_token * (1 - 1e-12)
    assert chunked >= cost.prefill_s(new, cached) * (1 - 1e-12)


@settings(deadline=None)
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=50), token_counts)
def test_attention_pairs_add_up_over_chunks(chunks: list[int], cached: int) -> None:
    whole = attention_pairs(sum(chunks), cached)
    parts, before = 0.0, cached
    for chunk in chunks:
        parts += attention_pairs(chunk, before)
        before += chunk
    # Halves of integers below 2^53 are exact, so this is too.
    assert parts == whole


@settings(deadline=None)
@given(costs, token_counts, token_counts, st.integers(1, 1000))
def test_a_longer_prompt_or_prefix_never_takes_less(cost: StepCost, new: int, cached: int, more: int) -> None:
    assert cost.prefill_s(new + more, cached) >= cost.prefill_s(new, cached)
    assert cost.prefill_s(new, cached + more) >= cost.prefill_s(new, cached)
    # Of the same prompt, a part that is cached is never dearer than one that is computed.
    assert cost.prefill_s(new, cached + more) <= cost.prefill_s(new + more, cached) * (1 + 1e-12)


@settings(deadline=None)
@given(costs, batches, token_counts, st.integers(1, 1000))
def test_more_decodes_or_more_history_never_take_less(cost: StepCost, batch: int, kv: int, more: int) -> None:
    assert cost.decode_step_s(batch + more, kv) >= cost.decode_step_s(batch, kv)
    assert cost.decode_step_s(batch, kv + more) > cost.decode_step_s(batch, kv)


@settings(deadline=None)
@given(costs, token_counts, token_counts, batches, token_counts)
def test_serial_accounting_bounds_the_fused_one(cost: StepCost, chunk: int, cached: int, batch: int, kv: int) -> None:
    fused = cost.step_s(chunk + batch, attention_pairs(chunk, cached), kv)
    serial = cost.mixed_step_s(chunk, cached, batch, kv)
    assert cost.decode_step_s(batch, kv) <= fused <= serial * (1 + 1e-12)


@settings(deadline=None)
@given(costs, st.integers(1, 200_000), token_counts)
def test_a_prompt_alone_takes_one_step(cost: StepCost, new: int, cached: int) -> None:
    step = cost.step_s(new, attention_pairs(new, cached), 0)
    # Prefill counts every expert; a step of few tokens does not hit them all.
    assert cost.prefill_s(new, cached) >= step * (1 - 1e-12)
    if not cost.expert_weights_s or new >= 100:
        assert cost.prefill_s(new, cached) == pytest.approx(step)


@settings(deadline=None)
@given(
    st.sampled_from([*MODELS.values(), MIXTURE]),
    st.sampled_from([2, 4, 8]),
    token_counts,
    token_counts,
    batches,
)
def test_tensor_parallelism_divides_every_part(
    model: ModelShape, degree: int, new: int, cached: int, batch: int
) -> None:
    one, many = step_cost(H100, model), step_cost(H100, model, degree)
    assert many.prefill_s(new, cached) * degree == pytest.approx(one.prefill_s(new, cached))
    assert many.decode_step_s(batch, cached) * degree == pytest.approx(one.decode_step_s(batch, cached))


def test_kv_heads_fewer_than_cards_are_held_more_than_once() -> None:
    two_heads = replace(LLAMA, kv_heads=2)
    assert [kv_copies(two_heads, degree) for degree in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert step_cost(H100, two_heads, 8).kv_s_per_token == pytest.approx(step_cost(H100, two_heads, 2).kv_s_per_token)
    assert step_cost(H100, two_heads, 8).weights_s == pytest.approx(step_cost(H100, two_heads, 2).weights_s / 4)
    # Each card holds one head: its own memory decides, whatever the number of cards.
    of_a_head = two_heads.kv_bytes_per_token / 2
    assert kv_capacity_tokens(H100, two_heads, 8) == int((72e9 - two_heads.weight_bytes / 8) / of_a_head)


def test_kv_capacity_counts_the_memory_of_all_cards() -> None:
    assert kv_capacity_tokens(H100, LLAMA) == int((0.9 * 80e9 - 16e9) / 131_072)
    assert kv_capacity_tokens(H100, LLAMA, tensor_parallel=2) == int((0.9 * 160e9 - 16e9) / 131_072)
    assert kv_capacity_tokens(H100, LLAMA, memory_utilization=0.5) == int((40e9 - 16e9) / 131_072)


def test_weights_that_do_not_fit_leave_no_kv() -> None:
    assert kv_capacity_bytes(H100, MODELS["llama-3.1-70b"]) == 0
    assert kv_capacity_tokens(H100, MODELS["llama-3.1-70b"]) == 0
    assert kv_capacity_tokens(H100, MODELS["llama-3.1-70b"], tensor_parallel=4) > 0


def test_a_step_is_bound_by_weights_then_by_compute() -> None:
    cost = step_cost(H100, LLAMA)
    # 221 tokens of compute take as long as one read of the weights: the ridge at the rates reached.
    ridge = achievable_ridge_flop_per_byte(H100)
    assert cost.step_s(ridge - 1, 0, 0) == cost.weights_s
    assert cost.step_s(ridge + 1, 0, 0) == pytest.approx((ridge + 1) * cost.prefill_s_per_token)
    assert cost.step_s(1, 0, 1000) == pytest.approx(cost.weights_s + 1000 * cost.kv_s_per_token)


def test_overhead_is_paid_once_per_step() -> None:
    free, dear = step_cost(H100, LLAMA), step_cost(H100, LLAMA, overhead_s=0.0015)
    for name, arguments in (
        ("step_s", (512, 0, 0)), ("prefill_s", (8000,)), ("decode_step_s", (30, 60_000)),
        ("mixed_step_s", (512, 0, 30, 60_000)),
    ):  # fmt: skip
        assert getattr(dear, name)(*arguments) - getattr(free, name)(*arguments) == pytest.approx(0.0015)


def test_experts_are_read_as_the_batch_hits_them() -> None:
    cost = step_cost(H100, MIXTURE)
    read = [cost.decode_step_s(batch, 0) for batch in (1, 2, 4, 8, 64)]
    assert read == sorted(read)
    assert read[0] == pytest.approx(MIXTURE.weight_bytes_read(1) / (0.8 * 3.35e12))
    assert read[-1] == pytest.approx(cost.weights_s)
    assert cost.prefill_s(1) == cost.weights_s


def test_intensity_of_a_mixture_counts_active_flops_and_bytes_read() -> None:
    assert decode_intensity_flop_per_byte(MIXTURE, 1, 0) == pytest.approx(2 * 12.9e9 / MIXTURE.weight_bytes_read(1))
    assert prefill_intensity_flop_per_byte(MIXTURE, 1000) == pytest.approx(1000 * 12.9 / 46.7)


@settings(deadline=None)
@given(costs, batches, st.integers(1, 20_000), st.integers(16, 8192))
def test_smaller_chunks_trade_ttft_for_itl(cost: StepCost, batch: int, prompt: int, chunk: int) -> None:
    workload = Workload(prompt, 100, batch)
    chunked, whole = chunk_effect(cost, workload, chunk), chunk_effect(cost, workload, prompt)
    assert chunked.steps == -(-prompt // chunk)
    assert chunked.ttft_s >= whole.ttft_s * (1 - 1e-12)
    assert chunked.itl_max_s <= whole.itl_max_s * (1 + 1e-12)
    assert chunked.itl_mean_s <= chunked.itl_max_s * (1 + 1e-12)
    assert chunked.itl_max_s <= chunked.itl_max_serial_s * (1 + 1e-12)


@pytest.mark.parametrize("degree", [0, -1])
def test_a_degree_below_one(degree: int) -> None:
    for refuse in (step_cost, kv_capacity_tokens, kv_capacity_bytes):
        with pytest.raises(ValueError, match="tensor_parallel"):
            refuse(H100, LLAMA, degree)


@pytest.mark.parametrize("utilization", [0.0, -0.1, 1.1, math.nan])
def test_a_utilization_out_of_range(utilization: float) -> None:
    with pytest.raises(ValueError, match="memory_utilization"):
        kv_capacity_tokens(H100, LLAMA, memory_utilization=utilization)


@pytest.mark.parametrize("overhead_s", [-1e-3, math.nan])
def test_a_negative_overhead(overhead_s: float) -> None:
    with pytest.raises(ValueError, match="overhead_s"):
        step_cost(H100, LLAMA, overhead_s=overhead_s)
