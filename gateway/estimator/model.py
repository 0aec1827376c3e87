"""Model shapes: the few numbers of a transformer that decide how fast it serves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gateway.estimator.hf_config import count_parameters, read_shape


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer as the roofline sees it.

    Args:
        name: how users call it.
        parameters: all parameters.
        active_parameters: parameters that work on one token (not all of them in a mixture of experts).
        layers: transformer layers.
        hidden: width of the residual stream.
        kv_heads: key-value heads of a layer (1 for multi-query attention and for a compressed latent).
        head_dim: elements of one head.
        bytes_per_parameter: mean over all parameters.
        bytes_per_kv_element: 2 for 16 bit, 1 for FP8.
        attention_width: query heads x head elements, where that is not `hidden`; 0 means `hidden`.
        kv_elements_per_layer: elements one token keeps in one layer, where that is not
            2 x kv_heads x head_dim; 0 means it is. Latent attention keeps a latent and a rotary key.
        experts: routed experts of a mixture-of-experts layer; 0 for a dense model.
        experts_per_token: routed experts that work on one token.
        expert_parameters: parameters of all routed experts of all layers.

    Raises:
        ValueError: a size that must be positive is not, or the experts contradict each other.
    """

    name: str
    parameters: float
    active_parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    bytes_per_parameter: float = 2.0
    bytes_per_kv_element: float = 2.0
    attention_width: float = 0.0
    kv_elements_per_layer: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_parameters: float = 0.0

    def __post_init__(self) -> None:
        for field in (
            "parameters", "active_parameters", "layers", "hidden", "kv_heads", "head_dim",
            "bytes_per_parameter", "bytes_per_kv_element",
        ):  # fmt: skip
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field} of model {self.name!r} must be positive, not {value!r}")
        if self.active_parameters > self.parameters or self.expert_parameters > self.parameters:
            raise ValueError(f"model {self.name!r} has more active or expert parameters than parameters")
        if not 0 <= self.experts_per_token <= self.experts:
            raise ValueError(f"model {self.name!r} has {self.experts} experts, {self.experts_per_token} per token")

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.parameters * self.bytes_per_parameter

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values that one token keeps: 2 x layers x kv_heads x head_dim x element size."""
        elements = self.kv_elements_per_layer or 2 * self.kv_heads * self.head_dim
        return self.layers * elements * self.bytes_per_kv_element

    @property
    def attention_flops_per_pair(self) -> float:
        """FLOPs per pair of a new token and one it attends to: 4 x layers x attention width.

        Two for the multiply-add of q.k, two for that of probability x v, per element and layer.
        """
        return 4.0 * self.layers * (self.attention_width or self.hidden)

    @property
    def idle_expert_share(self) -> float:
        """Share of a layer's routed experts that do not work on one given token; 0 for a dense model."""
        return 1.0 - self.experts_per_token / self.experts if self.experts else 0.0

    def weight_bytes_read(self, tokens: float) -> float:
        """Expected bytes of weights a step over so many tokens reads.

        A dense model reads all. With E routed experts of which k work on each token, and routing taken as
        even and independent, t tokens miss a given expert with probability (1 - k/E)^t.
        """
        if not self.experts:
            return self.weight_bytes
        unread = self.expert_parameters * math.pow(self.idle_expert_share, tokens)
        return (self.parameters - unread) * self.bytes_per_parameter


# Sources: config.json of meta-llama/Llama-3.1-8B, meta-llama/Llama-3.1-70B, Qwen/Qwen3-32B (Hugging Face).
_PRESETS = (
    # 8.0e9 is the nominal size (8.03e9 counted): published roofline examples for this model use it.
    ModelShape("llama-3.1-8b", 8.0e9, 8.0e9, layers=32, hidden=4096, kv_heads=8, head_dim=128),
    ModelShape("llama-3.1-70b", 70.554e9, 70.554e9, layers=80, hidden=8192, kv_heads=8, head_dim=128),
    ModelShape(
        "qwen3-32b",
        32.762e9,
        32.762e9,
        layers=64,
        hidden=5120,
        kv_heads=8,
        head_dim=128,
        attention_width=64 * 128,
    ),
)

MODELS: Mapping[str, ModelShape] = MappingProxyType({preset.name: preset for preset in _PRESETS})
"""The presets by name."""


def model(name_or_config_json_path: str) -> ModelShape:
    """The preset of that name, or the shape in a Hugging Face config.json.

    Args:
        name_or_config_json_path: a key of `MODELS` in any case, or the path of a config.json or of a
            directory that holds one.

    Raises:
        ValueError: neither a known name (the message lists them) nor a readable config.json.
    """
    text = name_or_config_json_path.strip()
    preset = MODELS.get(text.lower())
    if preset is not None:
        return preset
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(
            f"unknown model {name_or_config_json_path!r}; known: {', '.join(MODELS)}; "
            "or the path of a Hugging Face config.json"
        )
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {str(path)!r} as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{str(path)!r} is not a JSON object")
    name = config.get("_name_or_path") or (path.parent.name if path.name == "config.json" else path.stem)
    return from_hf_config(config, str(name) or str(path))


def from_hf_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a Hugging Face config.json describes, parameters counted from it.

    Understands dense models, grouped and multi-query attention, mixtures of experts (Mixtral, Qwen-MoE,
    DeepSeek with shared experts), multi-head latent attention and quantised weights. Sliding-window and
    linear-attention layers are taken as full attention; the vision part of a multi-modal model is left out.

    Raises:
        ValueError: a size the shape needs is missing or not a positive number.
    """
    shape = read_shape(config)
    count = count_parameters(shape)
    return ModelShape(
        name=name,
        parameters=float(count.total),
        active_parameters=float(count.active),
        layers=shape.layers,
        hidden=shape.hidden,
        kv_heads=shape.cached_kv_heads,
        head_dim=shape.cached_head_dim,
        bytes_per_parameter=shape.weights_bytes(count) / count.total,
        bytes_per_kv_element=shape.kv_element_bytes,
        attention_width=shape.attention_width,
        kv_elements_per_layer=shape.latent_kv_elements,
        experts=shape.experts if count.routed_experts else 0,
        experts_per_token=shape.experts_per_token if count.routed_experts else 0,
        expert_parameters=float(count.routed_experts),
    )
