"""The roofline: how long an engine's step takes, and how much KV it holds.

A step reads the weights once and computes every new token; whichever takes longer is its length. Decodes also
read the keys and values of their whole history. Sources:

- S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009.
- FLOPs of a transformer, 2 per parameter and token plus attention: J. Kaplan et al., "Scaling laws for neural
  language models", 2020, section 2.1.

A mixed step of chunked prefill (A. Agrawal et al., "Sarathi-Serve", OSDI 2024) has two accountings here:

- fused, `StepCost.step_s`: chunk and decodes share one read of the weights, so the step takes
  max(weights, compute) + KV reads. This is what one forward pass over a mixed batch does, and what the engine
  model and the predictor use.
- serial, `StepCost.mixed_step_s`: the chunk's compute and then a whole decode step, nothing overlapped. An
  upper bound, simple enough for the back of an envelope.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gateway.estimator.hardware import Hardware
from gateway.estimator.model import ModelShape


@dataclass(frozen=True, slots=True)
class StepCost:
    """Linear constants of one engine's step. All in seconds.

    Args:
        prefill_s_per_token: compute of one token through all active parameters.
        attention_s_per_pair: compute of attention per pair of a new token and a token before it.
        weights_s: one read of all weights.
        kv_s_per_token: read of the keys and values of one token.
        overhead_s: constant part of every step.
        expert_weights_s: the part of `weights_s` that reads routed experts; 0 for a dense model.
        idle_expert_share: share of the routed experts that one token leaves unread, in [0, 1).
    """

    prefill_s_per_token: float
    attention_s_per_pair: float
    weights_s: float
    kv_s_per_token: float
    overhead_s: float = 0.0
    expert_weights_s: float = 0.0
    idle_expert_share: float = 0.0

    def weights_read_s(self, tokens: float) -> float:
        """Read of the weights in a step over so many tokens: all, or only the experts they should hit.

        With E experts and k per token, a given expert stays unread with probability (1 - k/E)^tokens.
        """
        if not self.expert_weights_s:
            return self.weights_s
        return self.weights_s - self.expert_weights_s * math.pow(self.idle_expert_share, tokens)

    def step_s(self, new_tokens: float, attention_pairs: float, kv_tokens: float) -> float:
        """One step over a mixed batch, fused: max(weights, compute) + KV reads + overhead.

        Args:
            new_tokens: tokens computed in the step: of all prefill chunks, and one per decode.
            attention_pairs: pairs of the prefill chunks, from `attention_pairs()`. Decodes add none: their
                attention is bound by the KV read.
            kv_tokens: tokens of history that the decodes read, summed over the batch.
        """
        compute_s = new_tokens * self.prefill_s_per_token + attention_pairs * self.attention_s_per_pair
        weights_s = self.weights_read_s(new_tokens) if self.expert_weights_s else self.weights_s
        return max(weights_s, compute_s) + kv_tokens * self.kv_s_per_token + self.overhead_s

    def prefill_compute_s(self, new_tokens: float, cached_tokens: float = 0.0) -> float:
        """Compute of a prompt's new tokens and their attention, without floor and overhead.

        Additive over the chunks of a prompt, so it is the unit in which outstanding prefill is counted.
        """
        pairs = attention_pairs(new_tokens, cached_tokens)
        return new_tokens * self.prefill_s_per_token + pairs * self.attention_s_per_pair

    def prefill_s(self, new_tokens: float, cached_tokens: float = 0.0) -> float:
        """One prompt alone in one step, floored by one read of all weights.

        Args:
            new_tokens: tokens of the prompt to compute.
            cached_tokens: tokens before them whose keys and values are there already.
        """
        return max(self.weights_s, self.prefill_compute_s(new_tokens, cached_tokens)) + self.overhead_s

    def decode_step_s(self, batch: int, kv_tokens: float) -> float:
        """One step in which `batch` sequences decode one token each.

        Args:
            batch: sequences that decode.
            kv_tokens: their histories, summed over the batch.
        """
        return self.step_s(batch, 0.0, kv_tokens)

    def mixed_step_s(self, chunk_tokens: float, cached_tokens: float, batch: int, kv_tokens: float) -> float:
        """One step of a prefill chunk and a decoding batch, serial: the chunk's compute, then a decode step.

        An upper bound of `step_s`, which lets the two share one read of the weights.

        Args:
            chunk_tokens: prompt tokens of the chunk.
            cached_tokens: tokens of the same prompt before the chunk.
            batch: sequences that decode.
            kv_tokens: their histories, summed over the batch.
        """
        # The chunk, too, hits experts; of a dense model this is `decode_step_s`.
        decode_s = max(self.weights_read_s(chunk_tokens + batch), batch * self.prefill_s_per_token)
        chunk_s = self.prefill_compute_s(chunk_tokens, cached_tokens)
        return chunk_s + decode_s + kv_tokens * self.kv_s_per_token + self.overhead_s


def attention_pairs(new_tokens: float, cached_tokens: float) -> float:
    """Pairs of a new token and a token it attends to: new x (cached + new/2), causal.

    Adds up exactly over the chunks of a prompt, each with the tokens before it as cached.
    """
    return new_tokens * (cached_tokens + new_tokens / 2)


def step_cost(hardware: Hardware, model: ModelShape, tensor_parallel: int = 1, overhead_s: float = 0.0) -> StepCost:
    """The step constants of a model on one card, or on several as one with tensor parallelism.

    FLOP/s and bandwidth scale with the degree (communication is not modelled: it belongs into `overhead_s`).
    KV heads fewer than the degree are replicated: their read stops scaling.

    Args:
        hardware: the card.
        model: the model.
        tensor_parallel: cards that share every layer.
        overhead_s: constant part of every step.

    Raises:
        ValueError: a degree below one or a negative overhead.
    """
    copies = kv_copies(model, tensor_parallel)
    if not overhead_s >= 0:
        raise ValueError(f"overhead_s must not be negative: {overhead_s!r}")
    flops_per_s = hardware.bf16_flops * hardware.prefill_efficiency * tensor_parallel
    card_bytes_per_s = hardware.bandwidth_bytes_per_s * hardware.decode_efficiency
    return StepCost(
        prefill_s_per_token=2 * model.active_parameters / flops_per_s,
        attention_s_per_pair=model.attention_flops_per_pair / flops_per_s,
        weights_s=model.weight_bytes / (card_bytes_per_s * tensor_parallel),
        kv_s_per_token=model.kv_bytes_per_token * copies / (card_bytes_per_s * tensor_parallel),
        overhead_s=overhead_s,
        expert_weights_s=model.expert_parameters * model.bytes_per_parameter / (card_bytes_per_s * tensor_parallel),
        idle_expert_share=model.idle_expert_share,
    )


def kv_capacity_bytes(
    hardware: Hardware, model: ModelShape, tensor_parallel: int = 1, memory_utilization: float = 0.9
) -> float:
    """Bytes left for KV over all cards once the weights are loaded; 0 if they do not fit.

    Args:
        hardware: the card.
        model: the model.
        tensor_parallel: cards that share every layer.
        memory_utilization: share of the memory the engine may use, vLLM's `--gpu-memory-utilization`.

    Raises:
        ValueError: a degree below one, or a utilization outside (0, 1].
    """
    _check_degree(tensor_parallel)
    if not 0 < memory_utilization <= 1:
        raise ValueError(f"memory_utilization must be above 0 and at most 1, not {memory_utilization!r}")
    return max(0.0, hardware.memory_bytes * tensor_parallel * memory_utilization - model.weight_bytes)


def kv_capacity_tokens(
    hardware: Hardware, model: ModelShape, tensor_parallel: int = 1, memory_utilization: float = 0.9
) -> int:
    """Tokens whose keys and values fit beside the weights; 0 if the weights do not fit.

    KV heads fewer than the degree are replicated and take their memory on every card that holds one.
    Activations and CUDA graphs are not modelled: a real engine holds a little less.

    Args and errors as `kv_capacity_bytes`.
    """
    left_bytes = kv_capacity_bytes(hardware, model, tensor_parallel, memory_utilization)
    return int(left_bytes / (model.kv_bytes_per_token * kv_copies(model, tensor_parallel)))


def kv_copies(model: ModelShape, tensor_parallel: int) -> float:
    """How often the cards of a tensor-parallel group hold each KV head: once while there are enough heads."""
    _check_degree(tensor_parallel)
    return max(1.0, tensor_parallel / model.kv_heads)


def ridge_point_flop_per_byte(hardware: Hardware) -> float:
    """FLOPs per byte at which the card's peak compute and peak bandwidth take equally long."""
    return hardware.bf16_flops / hardware.bandwidth_bytes_per_s


def achievable_ridge_flop_per_byte(hardware: Hardware) -> float:
    """The ridge point at the rates the card really reaches, by its two efficiencies."""
    return ridge_point_flop_per_byte(hardware) * hardware.prefill_efficiency / hardware.decode_efficiency


def linear_flops(model: ModelShape, tokens: float) -> float:
    """FLOPs of so many tokens through the active parameters: 2 per parameter and token."""
    return 2 * model.active_parameters * tokens


def attention_flops(model: ModelShape, new_tokens: float, cached_tokens: float = 0.0) -> float:
    """FLOPs of attention: 4 x layers x attention width x new x (cached + new/2)."""
    return model.attention_flops_per_pair * attention_pairs(new_tokens, cached_tokens)


def prefill_intensity_flop_per_byte(model: ModelShape, new_tokens: float) -> float:
    """Linear FLOPs of a prompt per byte of weights read (attention and KV left out)."""
    return linear_flops(model, new_tokens) / model.weight_bytes


def decode_intensity_flop_per_byte(model: ModelShape, batch: int, history_tokens: float) -> float:
    """FLOPs per byte of a decode step, attention and KV reads included.

    Args:
        model: the model.
        batch: sequences that decode.
        history_tokens: tokens each of them has so far.
    """
    flops = linear_flops(model, batch) + batch * history_tokens * model.attention_flops_per_pair
    return flops / (model.weight_bytes_read(batch) + batch * history_tokens * model.kv_bytes_per_token)


def _check_degree(tensor_parallel: int) -> None:
    if tensor_parallel < 1:
        raise ValueError(f"tensor_parallel must be at least 1, not {tensor_parallel!r}")
