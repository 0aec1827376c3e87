"""`warmgate estimate`: figures, tables and JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.estimate_command import estimate, seconds, size
from gateway.estimator import report
from gateway.estimator.hardware import HARDWARE
from gateway.estimator.model import MODELS
from gateway.estimator.report import Workload
from gateway.estimator.roofline import step_cost
from gateway.estimator.transfer import LINKS

BASE = {
    "--model": "llama-3.1-8b",
    "--hardware": "h100-sxm",
    "--prompt": "8000",
    "--output": "300",
    "--batch": "30",
}

SMALL_CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def run(*flags: str, **changed: str) -> Result:
    options = {**BASE, **{f"--{name.replace('_', '-')}": value for name, value in changed.items()}}
    words = [word for pair in options.items() for word in pair]
    return CliRunner(env={"COLUMNS": "160"}).invoke(estimate, [*words, *flags])


def run_json(*flags: str, **changed: str) -> dict[str, Any]:
    result = run("--json", *flags, **changed)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert isinstance(figures, dict)
    return figures


def test_json_is_the_figures() -> None:
    figures = report.estimate(HARDWARE["h100-sxm"], MODELS["llama-3.1-8b"], Workload(8000, 300, 30))
    assert run_json() == json.loads(json.dumps(asdict(figures)))


def test_figures_of_the_worked_example() -> None:
    figures = run_json()
    cost = step_cost(HARDWARE["h100-sxm"], MODELS["llama-3.1-8b"])
    assert figures["prefill_linear_s"] == pytest.approx(0.216, rel=0.005)
    assert figures["prefill_attention_s"] == pytest.approx(0.13 * 0.216, rel=0.02)
    assert figures["prefill_s"] == pytest.approx(cost.prefill_s(8000))
    # One step holds the whole prompt and 30 decodes, each with 8,150 tokens behind it.
    assert figures["ttft_s"] == pytest.approx(cost.step_s(8030, 8000 * 4000, 30 * 8150))
    assert figures["tpot_s"] == pytest.approx((16e9 + 30 * 8150 * 131072) / (0.8 * 3.35e12))
    assert figures["end_to_end_s"] == pytest.approx(figures["ttft_s"] + 299 * figures["tpot_s"])
    assert figures["output_tokens_per_s"] == pytest.approx(30 / figures["tpot_s"])
    assert figures["ridge_point_flop_per_byte"] == pytest.approx(295, rel=0.005)
    assert (figures["prefill_limit"], figures["decode_limit"]) == ("compute", "bandwidth")
    assert figures["kv_bytes_per_request"] == 8300 * 131072
    assert figures["kv_bytes_batch"] == 30 * 8300 * 131072
    assert figures["kv_batch_share_of_memory"] == pytest.approx(30 * 8300 * 131072 / 80e9)
    assert figures["max_sequences"] == 427_246 // 8300
    assert figures["batch_fits"]


def test_chunks_and_links_are_lists_of_objects() -> None:
    figures = run_json()
    assert [(row["chunk_tokens"], row["steps"]) for row in figures["chunking"]] == [
        (512, 16),
        (2048, 4),
        (8192, 1),
    ]
    assert figures["chunking"][-1]["ttft_s"] == figures["ttft_s"]
    assert [row["link"] for row in figures["transfer"]] == list(LINKS)
    by_link = {row["link"]: row for row in figures["transfer"]}
    assert by_link["100g"]["transfer_s"] == pytest.approx(8000 * 131072 / 12.5e9)
    assert by_link["100g"]["share_of_prefill"] == pytest.approx(
        by_link["100g"]["transfer_s"] / figures["whole_prompt_prefill_s"]
    )


def test_given_chunks_replace_the_list_and_set_ttft() -> None:
    figures = run_json("--chunk", "1024", "--chunk", "256", "--chunk", "1024")
    assert [row["chunk_tokens"] for row in figures["chunking"]] == [256, 1024]
    assert figures["ttft_chunk_tokens"] == 1024


def test_cached_tokens_are_not_computed_but_attended_to() -> None:
    cold, warm = run_json(), run_json(cached="6000")
    assert warm["prefill_linear_s"] == pytest.approx(cold["prefill_linear_s"] / 4)
    assert warm["prefill_attention_s"] == pytest.approx(cold["prefill_attention_s"] * (2000 * 7000) / (8000 * 4000))
    assert warm["ttft_s"] < cold["ttft_s"]
    assert warm["tpot_s"] == cold["tpot_s"]
    assert warm["whole_prompt_prefill_s"] == cold["prefill_s"]


def test_tensor_parallel_and_kv_dtype() -> None:
    one, two = run_json(), run_json(tensor_parallel="2")
    assert two["tpot_s"] == pytest.approx(one["tpot_s"] / 2)
    assert two["memory_bytes"] == 160e9
    assert run_json(kv_dtype_bytes="1")["kv_bytes_per_token"] == 65536
    spread = run_json(tensor_parallel="16")
    assert spread["kv_copies"] == 2
    assert spread["kv_bytes_per_request"] == 2 * one["kv_bytes_per_request"]
    assert spread["whole_prompt_kv_bytes"] == one["whole_prompt_kv_bytes"]


def test_a_large_batch_is_bound_by_compute() -> None:
    assert run_json(prompt="1", output="1", batch="1000")["decode_limit"] == "compute"
    assert run_json(prompt="100")["prefill_limit"] == "bandwidth"


def test_own_card_and_own_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL_CONFIG))
    figures = run_json(model=str(config), hardware="flops=1e12,bandwidth=1e11,memory=1e9")
    assert figures["ridge_point_flop_per_byte"] == 10
    assert figures["kv_bytes_per_token"] == 2 * 2 * 64 * 2


def test_tables_say_what_json_says() -> None:
    result = run()
    assert result.exit_code == 0
    for text in (
        "215.7 ms", "244.0 ms", "256.7 ms", "17.9 ms", "5.62 s", "295 FLOP/byte", "compute", "bandwidth",
        "131.1 kB", "427,246 tokens", "51", "448.2 ms", "35.1 ms", "nvlink", "83.9 ms", "34.4%",
    ):  # fmt: skip
        assert text in result.stdout
    assert "does not fit" not in result.stdout


def test_what_does_not_fit_is_said() -> None:
    assert "A batch of 52 does not fit: 51 sequences do." in run(batch="52").stdout
    assert "The weights do not fit" in run(model="llama-3.1-70b").stdout
    figures = run_json(model="llama-3.1-70b")
    assert (figures["weights_fit"], figures["batch_fits"], figures["max_sequences"]) == (False, False, 0)


def test_names_are_no_markup(tmp_path: Path) -> None:
    directory = tmp_path / "[bold]model[/nonsense]"
    directory.mkdir(parents=True)
    config = {**SMALL_CONFIG, "_name_or_path": "[/x]"}
    (directory / "config.json").write_text(json.dumps(config))
    result = run(model=str(directory))
    assert result.exit_code == 0
    assert "[/x] on h100-sxm" in result.stdout


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"model": "llama-4"}, "known: llama-3.1-8b, llama-3.1-70b, qwen3-32b"),
        ({"hardware": "h100"}, "known: h100-sxm, h200-sxm, b200, a100-80g, l40s, l4"),
        ({"prompt": "0"}, "--prompt"),
        ({"batch": "none"}, "--batch"),
        ({"cached": "8000"}, "cached_tokens"),
        ({"tensor_parallel": "0"}, "--tensor-parallel"),
        ({"chunk": "0"}, "--chunk"),
        ({"memory_utilization": "1.5"}, "--memory-utilization"),
        ({"kv_dtype_bytes": "0"}, "--kv-dtype-bytes"),
    ],
)
def test_wrong_arguments_exit_with_2_and_a_sentence(changed: dict[str, str], complaint: str) -> None:
    result = run(**changed)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("value_s", "text"),
    [(1234.5, "1,234.50 s"), (1, "1.00 s"), (0.0179, "17.9 ms"), (0.00597, "5.97 ms"), (4.2e-6, "4.2 us")],
)
def test_seconds(value_s: float, text: str) -> None:
    assert seconds(value_s) == text


@pytest.mark.parametrize(
    ("value_bytes", "text"), [(12, "12 B"), (131_072, "131.1 kB"), (16e9, "16.0 GB"), (1.5e12, "1.5 TB")]
)
def test_size(value_bytes: float, text: str) -> None:
    assert size(value_bytes) == text


@pytest.mark.parametrize("chunks", [(), (0,), (512, -1)])
def test_figures_refuse_chunks_of_nothing(chunks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="chunk sizes"):
        report.estimate(HARDWARE["l4"], MODELS["llama-3.1-8b"], Workload(10, 10, 1), chunk_tokens=chunks)


@pytest.mark.parametrize("arguments", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (5, 1, 1, 5), (5, 1, 1, -1)])
def test_what_is_no_workload(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Workload(*arguments)
