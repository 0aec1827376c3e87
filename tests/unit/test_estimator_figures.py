"""The published figures of the roofline, row by row, from the estimator's public functions."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.estimator import roofline
from gateway.estimator.hardware import HARDWARE
from gateway.estimator.model import MODELS
from gateway.estimator.report import Workload, chunk_effect
from gateway.estimator.roofline import step_cost
from gateway.estimator.speculative import draft_step_s, speculative_round
from gateway.estimator.transfer import transfer_s

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "estimator_figures.json").read_text())
ROWS: dict[str, dict[str, Any]] = {row["id"]: row for row in DATA["figures"]}

H100 = HARDWARE["h100-sxm"]
MODEL = MODELS["llama-3.1-8b"]
COST = step_cost(H100, MODEL)
# Compute is ideal, too: at 60 % of its peak, a batch of 200 computes longer than the weights take to read.
IDEAL = step_cost(replace(H100, prefill_efficiency=1.0, decode_efficiency=1.0), MODEL)

# The rows name no history, which verification reads once. This one is the prompt of the other rows.
SPECULATIVE = speculative_round(
    COST, draft_step_s(H100, 2e9), draft_tokens=4, accepted_tokens=2, batch=1, kv_tokens=8000
)


def tokens_per_s_per_user(batch: int) -> float:
    return 1 / IDEAL.decode_step_s(batch, batch * 2000)


def attention_share(tokens: int) -> float:
    return roofline.attention_flops(MODEL, tokens) / roofline.linear_flops(MODEL, tokens)


COMPUTED: dict[str, Callable[[], float]] = {
    "ridge_point_h100": lambda: roofline.ridge_point_flop_per_byte(H100),
    "intensity_prefill_2000_tokens": lambda: roofline.prefill_intensity_flop_per_byte(MODEL, 2000),
    "intensity_decode_1_token": lambda: roofline.decode_intensity_flop_per_byte(MODEL, 1, 0),
    "kv_bytes_per_token_llama31_8b": lambda: MODEL.kv_bytes_per_token,
    "kv_bytes_per_token_llama31_70b": lambda: MODELS["llama-3.1-70b"].kv_bytes_per_token,
    "kv_bytes_2000_tokens_8b": lambda: 2000 * MODEL.kv_bytes_per_token,
    "decode_step_weights_only": lambda: COST.decode_step_s(1, 0) * 1e3,
    "decode_tokens_per_s_batch_1_history_2000_ideal_bandwidth": lambda: tokens_per_s_per_user(1),
    "decode_tokens_per_s_per_user_batch_200_history_2000_ideal_bandwidth": lambda: tokens_per_s_per_user(200),
    "decode_throughput_gain_batch_200_over_1": lambda: 200 * tokens_per_s_per_user(200) / tokens_per_s_per_user(1),
    "decode_intensity_batch_200_history_2000": lambda: roofline.decode_intensity_flop_per_byte(MODEL, 200, 2000),
    "kv_memory_left_after_weights_at_90_percent": lambda: roofline.kv_capacity_bytes(H100, MODEL),
    "max_sequences_of_2000_tokens": lambda: roofline.kv_capacity_tokens(H100, MODEL) // 2000,
    "prefill_8000_tokens_linear_flop": lambda: roofline.linear_flops(MODEL, 8000),
    "prefill_8000_tokens_linear_time": lambda: 8000 * COST.prefill_s_per_token * 1e3,
    "attention_share_8000_tokens": lambda: attention_share(8000),
    "chunk_512_tokens_linear_time": lambda: 512 * COST.prefill_s_per_token * 1e3,
    # The serial accounting: the chunk's compute, then the decode step of one stream.
    "mixed_step_chunk_512_plus_decode": lambda: COST.mixed_step_s(512, 0, 1, 2000) * 1e3,
    "chunks_of_512_in_8000_tokens": lambda: chunk_effect(COST, Workload(8000, 1, 1), 512).steps,
    "two_prompts_of_2000_over_one": lambda: (
        COST.step_s(4000, 2 * roofline.attention_pairs(2000, 0), 0) / COST.prefill_s(2000)
    ),
    "attention_factor_128000_tokens": lambda: COST.prefill_s(128_000) / (128_000 * COST.prefill_s_per_token),
    "time_per_token_factor_128000_history": lambda: COST.decode_step_s(1, 128_000) / COST.decode_step_s(1, 0),
    "prefill_30000_tokens": lambda: COST.prefill_s(30_000),
    "kv_bytes_30000_tokens": lambda: 30_000 * MODEL.kv_bytes_per_token,
    "agents_of_30000_tokens_per_h100": lambda: roofline.kv_capacity_tokens(H100, MODEL) // 30_000,
    "speculative_four_draft_tokens_1b": lambda: SPECULATIVE.draft_s * 1e3,
    "speculative_verify_four_positions": lambda: SPECULATIVE.verify_s * 1e3,
    "speculative_round_tokens": lambda: SPECULATIVE.tokens,
    "speculative_time_per_token": lambda: SPECULATIVE.s_per_token * 1e3,
}

LINK_OF_ROW = {
    "nvlink4_450GBps": "nvlink",
    "pcie5x16_64GBps": "pcie5",
    "400Gbps": "400g",
    "100Gbps": "100g",
    "25Gbps": "25g",
    "10Gbps": "10g",
}
TRANSFERS = {size: rows for size, rows in DATA["kv_transfer_2000_tokens_ms"].items() if size != "about"}


def test_no_published_figure_is_left_out() -> None:
    assert set(COMPUTED) == set(ROWS)


@pytest.mark.parametrize("row_id", ROWS)
def test_published_figure(row_id: str) -> None:
    row = ROWS[row_id]
    # pytest.approx would add an absolute tolerance of 1e-12 to rows that allow none.
    tolerance = row["abs_tol"] if "abs_tol" in row else row["rel_tol"] * row["value"]
    assert abs(COMPUTED[row_id]() - row["value"]) <= tolerance


@pytest.mark.parametrize("size", TRANSFERS)
@pytest.mark.parametrize("row_link", LINK_OF_ROW)
def test_published_kv_transfer_of_2000_tokens(size: str, row_link: str) -> None:
    model = MODELS[f"llama-3.1-{size}"]
    moved_ms = transfer_s(2000 * model.kv_bytes_per_token, LINK_OF_ROW[row_link]) * 1e3
    # Three significant digits are published.
    assert moved_ms == pytest.approx(TRANSFERS[size][row_link], rel=5e-3)


def test_no_published_link_is_left_out() -> None:
    assert all(set(rows) == set(LINK_OF_ROW) for rows in TRANSFERS.values())
    assert set(TRANSFERS) == {"8b", "70b"}


@pytest.mark.parametrize("name", DATA["hardware"])
def test_published_hardware(name: str) -> None:
    card, row = HARDWARE[name], DATA["hardware"][name]
    assert (card.bf16_flops, card.bandwidth_bytes_per_s, card.memory_bytes) == (
        row["bf16_flops"],
        row["bandwidth"],
        row["memory"],
    )
