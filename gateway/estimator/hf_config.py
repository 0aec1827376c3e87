"""Hugging Face config.json: its many spellings read into one shape, and the parameters counted from it.

Field names and defaults follow the configuration classes of huggingface/transformers
(`src/transformers/models/*/configuration_*.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Models whose feed-forward block is two plain matrices; all others have a gate and so three.
_UNGATED_MODEL_TYPES = frozenset(
    {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "nemotron", "opt", "phi"}
    | {"starcoder2"}
)
# Models that tie the embedding and the output head unless their config says otherwise.
_TIED_MODEL_TYPES = frozenset(
    {
        "bloom",
        "cohere",
        "cohere2",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
    }
    | {"mpt", "opt", "starcoder2"}
)
# Where multi-modal models keep the shape of their language model.
_TEXT_PARTS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): ranks and per-head widths, in elements."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class ConfigShape:
    """What a config.json says, in one spelling; widths in elements. `routed_layers` of `layers` route."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied_embeddings: bool
    ffn_matrices: int
    experts: int
    experts_per_token: int
    expert_intermediate: int
    shared_intermediate: int
    routed_layers: int
    latent: LatentAttention | None
    element_bytes: float
    linear_bits: float
    only_experts_quantized: bool
    kv_element_bytes: float

    @property
    def cached_kv_heads(self) -> int:
        """KV heads tensor parallelism can split: a latent is one that it cannot."""
        return 1 if self.latent else self.kv_heads

    @property
    def cached_head_dim(self) -> int:
        """Elements of one cached head; of a latent all that it keeps."""
        return self.latent_kv_elements or self.head_dim

    @property
    def latent_kv_elements(self) -> int:
        """Elements that one token keeps per layer as a latent and one rotary key; 0 for keys and values."""
        return self.latent.kv_lora_rank + self.latent.qk_rope_head_dim if self.latent else 0

    @property
    def attention_width(self) -> float:
        """Query heads x the mean width of their keys and values."""
        if self.latent:
            key_dim = self.latent.qk_nope_head_dim + self.latent.qk_rope_head_dim
            return self.heads * (key_dim + self.latent.v_head_dim) / 2
        return float(self.heads * self.head_dim)

    def weights_bytes(self, count: ParameterCount) -> float:
        """Bytes of all weights: linear layers at their quantised width, embeddings and head at full width."""
        quantized = count.routed_experts if self.only_experts_quantized else count.total - count.embeddings
        return (count.total - quantized) * self.element_bytes + quantized * self.linear_bits / 8


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of everything, of what works on one token, of all routed experts, of embeddings and head."""

    total: int
    active: int
    routed_experts: int
    embeddings: int


def read_shape(config: Mapping[str, Any]) -> ConfigShape:
    """Reads a config.json; of a multi-modal model its text part.

    Raises:
        ValueError: a size the shape needs is missing or not a positive integer.
    """
    text = next((config[key] for key in _TEXT_PARTS if key in config), None)
    # The outer object keeps what the text part leaves out (dtype, quantisation).
    merged: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
    fields = _Fields(merged)
    model_type = str(merged.get("model_type", ""))
    hidden = fields.integer("hidden_size", "n_embd", "d_model")
    layers = fields.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    heads = fields.integer("num_attention_heads", "n_head", "n_heads", "num_heads")
    intermediate = fields.integer("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", default=4 * hidden)
    experts = fields.integer("num_local_experts", "num_experts", "n_routed_experts", default=0)
    expert_intermediate = fields.integer("moe_intermediate_size", default=intermediate)
    return ConfigShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(fields, merged, heads),
        head_dim=fields.integer("head_dim", default=max(1, hidden // heads)),
        # Llama 4: the dense layers' own width; its experts and its shared expert have `intermediate_size`.
        intermediate=fields.integer("intermediate_size_mlp", default=intermediate),
        vocabulary=fields.integer("vocab_size", "padded_vocab_size"),
        tied_embeddings=_flag(merged.get("tie_word_embeddings"), model_type in _TIED_MODEL_TYPES),
        ffn_matrices=2 if model_type in _UNGATED_MODEL_TYPES else 3,
        experts=experts,
        experts_per_token=(
            fields.integer("num_experts_per_tok", "experts_per_token", "moe_topk", "top_k") if experts else 0
        ),
        expert_intermediate=expert_intermediate,
        shared_intermediate=_shared_intermediate(fields, model_type, expert_intermediate),
        routed_layers=_routed_layers(fields, merged, layers) if experts else 0,
        latent=_latent_attention(fields),
        element_bytes=(element_bytes := _element_bytes(merged)),
        linear_bits=_linear_bits(_quantization(merged), element_bytes),
        only_experts_quantized="mxfp4" in str(_quantization(merged).get("quant_method", "")),
        kv_element_bytes=_kv_element_bytes(_quantization(merged)),
    )


def count_parameters(shape: ConfigShape) -> ParameterCount:
    """Counts the matrices. Norms and biases, well under a thousandth, are left out."""
    attention = _attention_parameters(shape)
    matrix_column = shape.ffn_matrices * shape.hidden
    dense_layers = shape.layers - shape.routed_layers
    one_expert = matrix_column * shape.expert_intermediate
    every_token = (
        shape.layers * attention
        + dense_layers * matrix_column * shape.intermediate
        + shape.routed_layers * (matrix_column * shape.shared_intermediate + shape.hidden * shape.experts)
    )
    embeddings = shape.vocabulary * shape.hidden * (1 if shape.tied_embeddings else 2)
    routed_experts = shape.routed_layers * shape.experts * one_expert
    return ParameterCount(
        total=every_token + embeddings + routed_experts,
        active=every_token + embeddings + shape.routed_layers * shape.experts_per_token * one_expert,
        routed_experts=routed_experts,
        embeddings=embeddings,
    )


def _attention_parameters(shape: ConfigShape) -> int:
    latent = shape.latent
    if latent is None:
        return shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    query_width = shape.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    # Without a query rank (DeepSeek-V2-Lite) queries come from the hidden state directly.
    query = latent.q_lora_rank * (shape.hidden + query_width) if latent.q_lora_rank else shape.hidden * query_width
    down = shape.hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim)
    up = latent.kv_lora_rank * shape.heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    return query + down + up + shape.heads * latent.v_head_dim * shape.hidden


class _Fields:
    """Positive integers of a config by any of their names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def integer(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < (0 if default == 0 else 1):
                raise ValueError(f"model config: {name} must be a positive integer, not {value!r}")
            return value
        if default is None:
            raise ValueError(f"model config lacks {names[0]}")
        return default


def _flag(value: object, default: bool) -> bool:
    return default if value is None else bool(value)


def _kv_heads(fields: _Fields, config: Mapping[str, Any], heads: int) -> int:
    # Falcon ignores num_kv_heads in its first architecture, where multi_query alone decides.
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    kv_heads = fields.integer("num_key_value_heads", "num_kv_heads", "multi_query_group_num", default=heads)
    if kv_heads > heads:
        raise ValueError(f"model config: {kv_heads} key-value heads for {heads} query heads")
    return kv_heads


def _shared_intermediate(fields: _Fields, model_type: str, expert_intermediate: int) -> int:
    if model_type == "llama4_text":
        return expert_intermediate
    shared_experts = fields.integer("n_shared_experts", "num_shared_experts", default=0)
    return shared_experts * expert_intermediate or fields.integer(
        "shared_expert_intermediate_size", "shared_intermediate_size", default=0
    )


def _routed_layers(fields: _Fields, config: Mapping[str, Any], layers: int) -> int:
    dense_first = fields.integer("first_k_dense_replace", default=0)
    # DeepSeek's moe_layer_freq counts from layer 0, the steps of Qwen and Llama 4 from layer 1.
    deepseek_step = config.get("moe_layer_freq")
    deepseek_step = deepseek_step if isinstance(deepseek_step, int) and deepseek_step > 0 else 1
    qwen_step = fields.integer("decoder_sparse_step", "interleave_moe_layer_step", default=1)
    only_dense = config.get("mlp_only_layers") or ()
    return sum(
        layer >= dense_first and layer % deepseek_step == 0 and (layer + 1) % qwen_step == 0 and layer not in only_dense
        for layer in range(layers)
    )


def _latent_attention(fields: _Fields) -> LatentAttention | None:
    kv_lora_rank = fields.integer("kv_lora_rank", default=0)
    if not kv_lora_rank:
        return None
    return LatentAttention(
        q_lora_rank=fields.integer("q_lora_rank", default=0),
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
    )


def _element_bytes(config: Mapping[str, Any]) -> float:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    # vLLM's `--dtype auto` serves 32-bit checkpoints in 16 bits.
    return 1.0 if name.startswith("float8") or name == "int8" else 2.0


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    quantization = config.get("quantization_config")
    return quantization if isinstance(quantization, Mapping) else {}


def _linear_bits(quantization: Mapping[str, Any], element_bytes: float) -> float:
    # modelopt names the format beside the method, GPTQ, AWQ and compressed-tensors give a number of bits.
    method = f"{quantization.get('quant_method', '')} {quantization.get('quant_algo', '')}".lower()
    bits = quantization.get("bits", quantization.get("w_bit", _compressed_tensors_bits(quantization)))
    if isinstance(bits, int) and bits > 0:
        group = quantization.get("group_size")
        # One 16-bit scale and one zero point per group.
        return bits + (16 + bits) / group if isinstance(group, int) and group > 0 else float(bits)
    if "nvfp4" in method:
        return 4.5  # One 8-bit scale for 16 elements.
    if "mxfp4" in method:
        return 4.25  # One 8-bit scale for 32 elements (OCP Microscaling Formats, section 5).
    if quantization.get("load_in_4bit"):
        return 4.0
    if "fp8" in method or quantization.get("load_in_8bit"):
        return 8.0
    return 8 * element_bytes


def _compressed_tensors_bits(quantization: Mapping[str, Any]) -> int | None:
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and isinstance(weights.get("num_bits"), int):
            return int(weights["num_bits"])
    return None


def _kv_element_bytes(quantization: Mapping[str, Any]) -> float:
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and isinstance(scheme.get("num_bits"), int):
        return float(scheme["num_bits"]) / 8
    # KV is kept in the type of the activations, which weights of 8 bits do not change.
    return 2.0
