"""Parameters counted from config.json files of real models, against what their makers publish."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.estimator.model import MODELS, from_hf_config, model

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
             "num_hidden_layers": 80}  # fmt: skip
LLAMA_3_2_1B = {**LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                "head_dim": 64, "tie_word_embeddings": True}  # fmt: skip
QWEN3_32B = {
    "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
    "num_hidden_layers": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
MIXTRAL_8X7B = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 32000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "vocab_size": 151936, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    **DEEPSEEK_V3, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 27, "first_k_dense_replace": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "q_lora_rank": None,
    "vocab_size": 102400,
}  # fmt: skip
QWEN1_5_MOE = {
    "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
    "num_hidden_layers": 24, "num_experts": 60, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
    "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 4, "vocab_size": 201088, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
LLAMA_4_MAVERICK = {
    "model_type": "llama4", "torch_dtype": "bfloat16", "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 2, "num_attention_heads": 40,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 128,
        "num_experts_per_tok": 1,
        "vocab_size": 202048, "tie_word_embeddings": False,
    },
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "vocab_size": 50257,
}
FALCON_7B = {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
             "multi_query": True, "vocab_size": 65024}  # fmt: skip
STARCODER2_3B = {
    "model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 24,
    "num_hidden_layers": 30, "num_key_value_heads": 2, "vocab_size": 49152,
}  # fmt: skip


# Published in the models' cards; GPT-2 without its position table (1,024 x 768), which nothing reads in full.
@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        pytest.param(LLAMA_8B, 8.03e9, 8.03e9, id="llama-3.1-8b"),
        pytest.param(LLAMA_70B, 70.6e9, 70.6e9, id="llama-3.1-70b"),
        pytest.param(LLAMA_3_2_1B, 1.24e9, 1.24e9, id="llama-3.2-1b-tied"),
        pytest.param(QWEN3_32B, 32.8e9, 32.8e9, id="qwen3-32b"),
        pytest.param(MIXTRAL_8X7B, 46.7e9, 12.9e9, id="mixtral-8x7b"),
        pytest.param(QWEN3_30B_A3B, 30.5e9, 3.3e9, id="qwen3-30b-a3b"),
        pytest.param(DEEPSEEK_V3, 671e9, 37e9, id="deepseek-v3"),
        pytest.param(QWEN1_5_MOE, 14.3e9, 2.7e9, id="qwen1.5-moe-a2.7b"),
        pytest.param(LLAMA_4_MAVERICK, 400e9, 17e9, id="llama-4-maverick"),
        pytest.param(GPT2, 124e6, 124e6, id="gpt2"),
        pytest.param(FALCON_7B, 6.92e9, 6.92e9, id="falcon-7b"),
        pytest.param(STARCODER2_3B, 3.03e9, 3.03e9, id="starcoder2-3b"),
    ],
)
def test_counted_parameters_are_the_published_ones(config: dict[str, Any], total: float, active: float) -> None:
    shape = from_hf_config(config, "m")
    assert shape.parameters == pytest.approx(total, rel=0.02)
    assert shape.active_parameters == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("config", "kv_bytes_per_token"),
    [
        pytest.param(LLAMA_8B, 131_072, id="grouped"),
        pytest.param(QWEN3_30B_A3B, 2 * 48 * 4 * 128 * 2, id="grouped-head-dim-given"),
        pytest.param(FALCON_7B, 2 * 32 * 1 * 64 * 2, id="multi-query"),
        pytest.param(GPT2, 2 * 12 * 12 * 64 * 2, id="multi-head"),
        # 61 layers x (512 latent + 64 rotary) x 2 bytes: DeepSeek-V3's 70 KB per token.
        pytest.param(DEEPSEEK_V3, 70_272, id="latent"),
    ],
)
def test_kv_bytes_per_token(config: dict[str, Any], kv_bytes_per_token: int) -> None:
    assert from_hf_config(config, "m").kv_bytes_per_token == kv_bytes_per_token


def test_fp8_kv_halves_it() -> None:
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    shape = from_hf_config({**LLAMA_8B, "quantization_config": quantization}, "m")
    assert shape.kv_bytes_per_token == 65_536


@pytest.mark.parametrize(
    ("quantization", "linear_bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
            },
            8,
        ),
        ({"quant_method": "of tomorrow"}, 16),
        ({}, 16),
    ],
)
def test_quantised_weights_leave_embeddings_at_16_bit(quantization: dict[str, Any], linear_bits: float) -> None:
    shape = from_hf_config({**LLAMA_8B, "quantization_config": quantization}, "m")
    embeddings = 2 * 128256 * 4096
    assert shape.weight_bytes == pytest.approx(
        2 * embeddings + (shape.parameters - embeddings) * linear_bits / 8, rel=1e-12
    )


def test_mxfp4_quantises_the_experts_alone() -> None:
    # The published checkpoint holds 12.8 GiB.
    assert from_hf_config(GPT_OSS_20B, "m").weight_bytes == pytest.approx(12.8 * 2**30, rel=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "torch.float32", None])
def test_32_bit_checkpoints_are_served_in_16_bits(dtype: str | None) -> None:
    assert from_hf_config({**LLAMA_8B, "torch_dtype": dtype}, "m").bytes_per_parameter == 2


def test_latent_attention_without_a_query_rank() -> None:
    assert from_hf_config(DEEPSEEK_V2_LITE, "m").parameters == pytest.approx(15.7e9, rel=0.02)


def test_attention_works_on_query_heads_not_on_the_residual_width() -> None:
    assert from_hf_config(QWEN3_32B, "m").attention_flops_per_pair == 4 * 64 * 64 * 128
    assert from_hf_config(LLAMA_8B, "m").attention_flops_per_pair == 4 * 32 * 4096
    assert from_hf_config(DEEPSEEK_V3, "m").attention_flops_per_pair == 2 * 61 * 128 * (128 + 64 + 128)


@pytest.mark.parametrize(
    ("name", "config"), [("llama-3.1-8b", LLAMA_8B), ("llama-3.1-70b", LLAMA_70B), ("qwen3-32b", QWEN3_32B)]
)
def test_presets_agree_with_their_config(name: str, config: dict[str, Any]) -> None:
    preset, counted = MODELS[name], from_hf_config(config, name)
    # The preset of 8B has its nominal size.
    assert preset.parameters == pytest.approx(counted.parameters, rel=0.005)
    assert preset.kv_bytes_per_token == counted.kv_bytes_per_token
    assert preset.attention_flops_per_pair == counted.attention_flops_per_pair
    assert (preset.layers, preset.hidden) == (counted.layers, counted.hidden)


def test_some_layers_dense_some_routed() -> None:
    every_second = from_hf_config({**QWEN3_30B_A3B, "decoder_sparse_step": 2}, "m")
    three_dense = from_hf_config({**QWEN3_30B_A3B, "mlp_only_layers": [0, 1, 2]}, "m")
    one_layer_of_experts = 128 * 3 * 2048 * 768
    assert every_second.expert_parameters == 24 * one_layer_of_experts
    assert three_dense.expert_parameters == 45 * one_layer_of_experts


def test_which_layer_a_step_of_routed_layers_starts_from() -> None:
    # Qwen: of layers 0, 1, 2 the second. DeepSeek: of layers 1 to 4, the first being dense, 2 and 4.
    qwen = from_hf_config({**QWEN3_30B_A3B, "decoder_sparse_step": 2, "num_hidden_layers": 3}, "m")
    deepseek = from_hf_config(
        {**DEEPSEEK_V2_LITE, "moe_layer_freq": 2, "num_hidden_layers": 5, "first_k_dense_replace": 1}, "m"
    )
    assert qwen.expert_parameters == 1 * 128 * 3 * 2048 * 768
    assert deepseek.expert_parameters == 2 * 64 * 3 * 2048 * 1408


def test_the_language_part_of_a_multi_modal_model() -> None:
    nested = {"model_type": "chat_vision", "llm_config": LLAMA_8B, "vision_config": {"hidden_size": 1024}}
    assert from_hf_config(nested, "m") == from_hf_config(LLAMA_8B, "m")


def test_weights_read_grow_with_the_tokens_of_a_step() -> None:
    shape = from_hf_config(MIXTRAL_8X7B, "m")
    assert shape.weight_bytes_read(1) == pytest.approx(shape.active_parameters * 2)
    # Two tokens hit 1 - (3/4)^2 of the experts: 3.5 of 8 on average.
    expert_bytes = shape.expert_parameters * 2
    assert shape.weight_bytes_read(2) == pytest.approx(shape.weight_bytes - expert_bytes + expert_bytes * 3.5 / 8)
    assert shape.weight_bytes_read(1000) == pytest.approx(shape.weight_bytes)


def test_model_reads_a_file_or_its_directory(tmp_path: Path) -> None:
    directory = tmp_path / "my-mixtral"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MIXTRAL_8X7B))
    shape = model(str(directory))
    assert shape == model(str(directory / "config.json"))
    assert shape.name == "my-mixtral"
    assert shape.experts == 8


def test_model_knows_presets_in_any_case() -> None:
    assert model(" Llama-3.1-8B ") is MODELS["llama-3.1-8b"]


def test_unknown_model_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'gpt-5'; known: llama-3\.1-8b, llama-3\.1-70b, qwen3-32b"):
        model("gpt-5")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_file_that_is_no_config(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        model(str(path))


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, "many", True])
def test_a_size_that_is_missing_or_no_positive_integer(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        from_hf_config({**LLAMA_8B, field: value}, "m")


def test_more_experts_per_token_than_experts() -> None:
    with pytest.raises(ValueError, match="more active or expert parameters"):
        from_hf_config({**MIXTRAL_8X7B, "num_experts_per_tok": 9}, "m")
