"""Cards by name or by values, links, speculative rounds."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.estimator.hardware import HARDWARE, Hardware, hardware
from gateway.estimator.model import MODELS
from gateway.estimator.roofline import step_cost
from gateway.estimator.speculative import (
    draft_step_s,
    expected_accepted_tokens,
    speculative_round,
    verify_step_s,
)
from gateway.estimator.transfer import LINKS, transfer_s

COST = step_cost(HARDWARE["h100-sxm"], MODELS["llama-3.1-8b"])


def test_the_presets() -> None:
    assert list(HARDWARE) == ["h100-sxm", "h200-sxm", "b200", "a100-80g", "l40s", "l4"]
    assert hardware(" H100-SXM ") is HARDWARE["h100-sxm"]


def test_own_values() -> None:
    text = "flops=1e15, bandwidth=2e12, memory=64e9, decode_efficiency=0.7"
    assert hardware(text) == Hardware(text, 1e15, 2e12, 64e9, decode_efficiency=0.7)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("h100", "'h100'; known: h100-sxm, h200-sxm, b200, a100-80g, l40s, l4"),
        ("", "known: h100-sxm"),
        ("flops=1e15,bandwidth=2e12", "lacks memory"),
        ("flops=1e15,bandwidth=2e12,memory=many", "memory='many' is not a number"),
        ("flops=1e15,bandwidth=2e12,memory=1,colour=3", "'colour'; known: flops"),
        ("flops=1e15,bandwidth=2e12,memory=-1", "memory_bytes"),
        ("flops=nan,bandwidth=2e12,memory=1", "bf16_flops"),
        ("flops=1e15,bandwidth=inf,memory=1", "bandwidth_bytes_per_s"),
        ("flops=1e15,bandwidth=2e12,memory=1,prefill_efficiency=1.2", "prefill_efficiency"),
    ],
)
def test_what_is_no_card(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        hardware(text)


def test_transfer_is_latency_and_wire_time() -> None:
    assert transfer_s(12.5e9, "100g") == pytest.approx(1.0)
    assert transfer_s(12.5e9, "100g", latency_s=0.25) == pytest.approx(1.25)
    assert transfer_s(1e9, 2e9) == 0.5
    assert transfer_s(0, "10g", 0.002) == 0.002
    assert list(LINKS.values()) == sorted(LINKS.values(), reverse=True)


@pytest.mark.parametrize("arguments", [(1, "usb"), (1, 0.0), (1, math.nan), (-1, "10g"), (1, "10g", -1.0)])
def test_what_is_no_transfer(arguments: tuple[float, str | float]) -> None:
    with pytest.raises(ValueError, match=r"known: nvlink|positive|negative"):
        transfer_s(*arguments)


def test_a_round_is_all_draft_steps_and_one_step_of_the_target() -> None:
    one = speculative_round(COST, 0.001, draft_tokens=5, accepted_tokens=3, batch=2, kv_tokens=4000)
    assert one.draft_s == pytest.approx(0.005)
    assert one.verify_s == COST.step_s(10, 0, 4000) == verify_step_s(COST, 5, 2, 4000)
    assert one.round_s == one.draft_s + one.verify_s
    assert one.tokens == 4
    assert one.s_per_token == one.round_s / 4


def test_speculation_gains_nothing_once_the_batch_is_bound_by_compute() -> None:
    draft_s = draft_step_s(HARDWARE["h100-sxm"], 2e9)
    alone = speculative_round(COST, draft_s, draft_tokens=4, accepted_tokens=2)
    crowded = speculative_round(COST, draft_s, draft_tokens=4, accepted_tokens=2, batch=200)
    assert alone.s_per_token < COST.decode_step_s(1, 0)
    assert crowded.s_per_token > COST.decode_step_s(200, 0)


@pytest.mark.parametrize(("draft", "accepted"), [(0, 0), (4, 5), (4, -1), (4, math.nan)])
def test_what_is_no_round(draft: int, accepted: float) -> None:
    with pytest.raises(ValueError, match="cannot accept"):
        speculative_round(COST, 0.001, draft, accepted)


@settings(deadline=None)
@given(st.floats(0, 0.99), st.integers(1, 20))
def test_expected_tokens_of_a_round_are_those_of_the_paper(rate: float, drafts: int) -> None:
    with_the_targets_own = expected_accepted_tokens(rate, drafts) + 1
    assert with_the_targets_own == pytest.approx((1 - rate ** (drafts + 1)) / (1 - rate))


def test_acceptance_at_its_ends() -> None:
    assert expected_accepted_tokens(0, 4) == 0
    assert expected_accepted_tokens(1, 4) == 4
    with pytest.raises(ValueError, match="acceptance_rate"):
        expected_accepted_tokens(1.1, 4)
