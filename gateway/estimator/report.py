"""All that `warmgate estimate` says of one workload on one card, as figures. No text, no tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.estimator import roofline
from gateway.estimator.hardware import Hardware
from gateway.estimator.model import ModelShape
from gateway.estimator.roofline import StepCost
from gateway.estimator.splitting import shortest_tokens, split_saves_s
from gateway.estimator.transfer import LINKS, transfer_s

DEFAULT_CHUNK_TOKENS = (512, 2048, 8192)
"""Chunk sizes compared unless others are given; the last is vLLM's `max_num_batched_tokens` for serving."""

Limit = Literal["compute", "bandwidth"]


@dataclass(frozen=True, slots=True)
class Workload:
    """One request and the batch it meets.

    Args:
        prompt_tokens: tokens of the prompt, cached ones included.
        output_tokens: tokens to generate.
        batch: sequences that decode together, each with this prompt and half of this output on average.
        cached_tokens: tokens of the prompt that are cached.

    Raises:
        ValueError: no prompt, no output, no batch, or nothing left of the prompt to compute (an engine
            computes at least its last token).
    """

    prompt_tokens: int
    output_tokens: int
    batch: int
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        for field in ("prompt_tokens", "output_tokens", "batch"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, not {getattr(self, field)}")
        if not 0 <= self.cached_tokens < self.prompt_tokens:
            raise ValueError(f"cached_tokens must be below the prompt's {self.prompt_tokens}, not {self.cached_tokens}")

    @property
    def new_tokens(self) -> int:
        """Tokens of the prompt to compute."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def mean_history_tokens(self) -> float:
        """Tokens a decoding sequence has behind it, averaged over its output."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class ChunkEffect:
    """A prompt prefilled in chunks while the batch decodes: what it costs the batch, and the prompt.

    Args:
        chunk_tokens: prompt tokens per step.
        steps: steps that the prompt takes.
        itl_mean_s: inter-token latency of the decoding streams during the prefill, mean over its steps.
        itl_max_s: the longest of them.
        itl_max_serial_s: the longest by the serial accounting, an upper bound.
        ttft_s: the prompt's time to first token.
    """

    chunk_tokens: int
    steps: int
    itl_mean_s: float
    itl_max_s: float
    itl_max_serial_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class LinkTransfer:
    """The KV of the whole prompt moved over one link.

    Args:
        link: a key of `LINKS`.
        bytes_per_s: its rate.
        transfer_s: wire time.
        share_of_prefill: wire time over the time to compute the whole prompt; below 1, moving is faster.
        break_even_tokens: shortest prompt that is moved faster than computed; None if there is none.
        split_saves_s: what prefill on another, idle card saves for this prompt and batch; see `estimator.splitting`.
        split_from_tokens: shortest prompt for which that saves anything beside this batch; None if there is none.
        advice: whether to split this prompt.
    """

    link: str
    bytes_per_s: float
    transfer_s: float
    share_of_prefill: float
    break_even_tokens: int | None
    split_saves_s: float
    split_from_tokens: int | None
    advice: Literal["split", "stay"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Figures of one workload on one card or tensor-parallel group; its field names are the JSON keys.

    `ttft_s` is that of an empty queue, prefilled in chunks of `ttft_chunk_tokens` while the batch decodes. A
    limit is the side that takes longer at the efficiencies the hardware is given: intensity against
    `achievable_ridge_flop_per_byte`, not against the ridge of the peak rates. Bytes are of all cards of the
    group together; what a request holds counts `kv_copies`, what a transfer moves does not.
    """

    model: str
    hardware: str
    tensor_parallel: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    batch: int

    prefill_linear_s: float
    prefill_attention_s: float
    prefill_s: float
    ttft_s: float
    ttft_chunk_tokens: int
    tpot_s: float
    end_to_end_s: float
    output_tokens_per_s_per_stream: float
    output_tokens_per_s: float

    ridge_point_flop_per_byte: float
    achievable_ridge_flop_per_byte: float
    prefill_intensity_flop_per_byte: float
    prefill_limit: Limit
    decode_intensity_flop_per_byte: float
    decode_limit: Limit
    decode_weights_s: float
    decode_kv_s: float

    parameters: float
    active_parameters: float
    weight_bytes: float
    memory_bytes: float
    memory_utilization: float
    kv_bytes_per_token: float
    kv_copies: float
    kv_bytes_per_request: float
    kv_bytes_batch: float
    kv_capacity_bytes: float
    kv_capacity_tokens: int
    kv_batch_share_of_memory: float
    max_sequences: int
    weights_fit: bool
    batch_fits: bool

    whole_prompt_kv_bytes: float
    whole_prompt_prefill_s: float
    chunking: tuple[ChunkEffect, ...]
    transfer: tuple[LinkTransfer, ...]


def estimate(
    hardware: Hardware,
    model: ModelShape,
    workload: Workload,
    *,
    tensor_parallel: int = 1,
    chunk_tokens: Sequence[int] = DEFAULT_CHUNK_TOKENS,
    memory_utilization: float = 0.9,
    link_latency_s: float = 0.0,
) -> Estimate:
    """All figures of a workload on a card.

    Args:
        hardware: the card.
        model: the model.
        workload: the request and its batch.
        tensor_parallel: cards that share every layer.
        chunk_tokens: prefill chunk sizes to compare; the largest is the one of `ttft_s`.
        memory_utilization: share of the memory the engine may use.
        link_latency_s: constant part of every KV transfer.

    Raises:
        ValueError: a degree, chunk size or utilization out of range.
    """
    if not chunk_tokens or min(chunk_tokens) < 1:
        raise ValueError(f"chunk sizes must be at least 1 token, not {list(chunk_tokens)}")
    cost = roofline.step_cost(hardware, model, tensor_parallel)
    new, cached, batch = workload.new_tokens, workload.cached_tokens, workload.batch
    history = workload.mean_history_tokens
    chunking = tuple(chunk_effect(cost, workload, size) for size in sorted(set(chunk_tokens)))
    ttft_s = chunking[-1].ttft_s
    tpot_s = cost.decode_step_s(batch, batch * history)

    achievable_ridge = roofline.achievable_ridge_flop_per_byte(hardware)
    prefill_intensity = roofline.prefill_intensity_flop_per_byte(model, new)
    decode_intensity = roofline.decode_intensity_flop_per_byte(model, batch, history)

    capacity_tokens = roofline.kv_capacity_tokens(hardware, model, tensor_parallel, memory_utilization)
    request_tokens = workload.prompt_tokens + workload.output_tokens
    max_sequences = capacity_tokens // request_tokens
    kv_copies = roofline.kv_copies(model, tensor_parallel)
    memory_bytes = hardware.memory_bytes * tensor_parallel
    kv_bytes_request = request_tokens * model.kv_bytes_per_token * kv_copies

    prompt_kv_bytes = workload.prompt_tokens * model.kv_bytes_per_token
    prompt_prefill_s = cost.prefill_s(workload.prompt_tokens)
    transfer = tuple(
        _link_transfer(cost, model, workload, link, link_latency_s, chunking[-1].chunk_tokens, prompt_prefill_s)
        for link in LINKS
    )
    return Estimate(
        model=model.name,
        hardware=hardware.name,
        tensor_parallel=tensor_parallel,
        prompt_tokens=workload.prompt_tokens,
        cached_tokens=cached,
        output_tokens=workload.output_tokens,
        batch=batch,
        prefill_linear_s=new * cost.prefill_s_per_token,
        prefill_attention_s=roofline.attention_pairs(new, cached) * cost.attention_s_per_pair,
        prefill_s=cost.prefill_s(new, cached),
        ttft_s=ttft_s,
        ttft_chunk_tokens=chunking[-1].chunk_tokens,
        tpot_s=tpot_s,
        end_to_end_s=ttft_s + (workload.output_tokens - 1) * tpot_s,
        output_tokens_per_s_per_stream=1 / tpot_s,
        output_tokens_per_s=batch / tpot_s,
        ridge_point_flop_per_byte=roofline.ridge_point_flop_per_byte(hardware),
        achievable_ridge_flop_per_byte=achievable_ridge,
        prefill_intensity_flop_per_byte=prefill_intensity,
        prefill_limit=_limit(prefill_intensity, achievable_ridge),
        decode_intensity_flop_per_byte=decode_intensity,
        decode_limit=_limit(decode_intensity, achievable_ridge),
        decode_weights_s=cost.weights_read_s(batch),
        decode_kv_s=batch * history * cost.kv_s_per_token,
        parameters=model.parameters,
        active_parameters=model.active_parameters,
        weight_bytes=model.weight_bytes,
        memory_bytes=memory_bytes,
        memory_utilization=memory_utilization,
        kv_bytes_per_token=model.kv_bytes_per_token,
        kv_copies=kv_copies,
        kv_bytes_per_request=kv_bytes_request,
        kv_bytes_batch=batch * kv_bytes_request,
        kv_capacity_bytes=roofline.kv_capacity_bytes(hardware, model, tensor_parallel, memory_utilization),
        kv_capacity_tokens=capacity_tokens,
        kv_batch_share_of_memory=batch * kv_bytes_request / memory_bytes,
        max_sequences=max_sequences,
        weights_fit=capacity_tokens > 0,
        batch_fits=batch <= max_sequences,
        whole_prompt_kv_bytes=prompt_kv_bytes,
        whole_prompt_prefill_s=prompt_prefill_s,
        chunking=chunking,
        transfer=transfer,
    )


def chunk_effect(cost: StepCost, workload: Workload, chunk_tokens: int) -> ChunkEffect:
    """Prefills the prompt in chunks, each in one step with the decoding batch (fused accounting).

    Args:
        cost: step constants.
        workload: the prompt, and the batch that decodes beside it.
        chunk_tokens: prompt tokens per step; the last chunk holds the rest.
    """
    steps = math.ceil(workload.new_tokens / chunk_tokens)
    batch, kv_tokens = workload.batch, workload.batch * workload.mean_history_tokens
    fused_s, serial_s = [], []
    for start in range(workload.cached_tokens, workload.prompt_tokens, chunk_tokens):
        chunk = min(chunk_tokens, workload.prompt_tokens - start)
        pairs = roofline.attention_pairs(chunk, start)
        fused_s.append(cost.step_s(chunk + batch, pairs, kv_tokens))
        serial_s.append(cost.mixed_step_s(chunk, start, batch, kv_tokens))
    ttft_s = math.fsum(fused_s)
    return ChunkEffect(
        chunk_tokens=chunk_tokens,
        steps=steps,
        itl_mean_s=ttft_s / steps,
        itl_max_s=max(fused_s),
        itl_max_serial_s=max(serial_s),
        ttft_s=ttft_s,
    )


def _link_transfer(
    cost: StepCost,
    model: ModelShape,
    workload: Workload,
    link: str,
    latency_s: float,
    chunk_tokens: int,
    prefill_s: float,
) -> LinkTransfer:
    """The KV of the prompt, and of prompts of other lengths, over one link."""

    def moved_s(tokens: int) -> float:
        return transfer_s(tokens * model.kv_bytes_per_token, link, latency_s)

    def saves_s(tokens: int, cached_tokens: int = 0) -> float:
        moving_s = moved_s(tokens - cached_tokens)
        history = workload.mean_history_tokens
        return split_saves_s(cost, tokens, moving_s, workload.batch, history, chunk_tokens, cached_tokens)

    whole_s = moved_s(workload.prompt_tokens)
    saved_s = saves_s(workload.prompt_tokens, workload.cached_tokens)
    return LinkTransfer(
        link=link,
        bytes_per_s=LINKS[link],
        transfer_s=whole_s,
        share_of_prefill=whole_s / prefill_s,
        break_even_tokens=shortest_tokens(lambda tokens: moved_s(tokens) <= cost.prefill_s(tokens)),
        split_saves_s=saved_s,
        split_from_tokens=shortest_tokens(lambda tokens: saves_s(tokens) > 0),
        advice="split" if saved_s > 0 else "stay",
    )


def _limit(intensity_flop_per_byte: float, ridge_flop_per_byte: float) -> Limit:
    return "compute" if intensity_flop_per_byte > ridge_flop_per_byte else "bandwidth"
