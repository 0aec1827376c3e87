"""What a simulated replica is made of."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.estimator.hardware import hardware
from gateway.estimator.model import model
from gateway.estimator.roofline import StepCost, kv_capacity_tokens, step_cost
from gateway.estimator.transfer import LINKS
from loadtests.engine import EngineLimits


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """One simulated replica; options that vLLM has too have its meaning.

    Args:
        hardware: name of a card the estimator knows.
        model: name of a model the estimator knows, or the path of a Hugging Face config.json.
        tensor_parallel: cards that share every layer.
        speedup: engine seconds per wall second.
        served_model_names: what clients may call the model, the first is what answers say; default the model.
        loras: names of the adapters it serves.
        kv_tokens: tokens of KV memory; default what the cards hold beside the weights.
        max_num_seqs: requests that run at a time.
        max_num_batched_tokens: tokens computed per step.
        max_model_len: tokens of prompt and answer together; lowered to the KV memory if that is smaller.
        block_size: tokens per KV block.
        enable_prefix_caching: reuse the KV of equal prefixes.
        step_overhead_ms: constant part of every step.
        stream_interval: tokens per streamed chunk after the first.
        api_key: asked for on every path under /v1.
        enable_prompt_tokens_details: tell `cached_tokens` in the usage.
        bytes_per_token: UTF-8 bytes that make a token.
        default_max_tokens: answer length where the client sets no limit.
        keep_alive_s: idle connections are closed after this time, as uvicorn does.
        seed: other seeds make other answers.
        engine_version: of vLLM, as it tells; empty for a server that has no /version.
        kv_connector: nixl to hand KV to other replicas and to fetch it from them, or none.
        kv_link: what joins it with others, a key of `gateway.estimator.transfer.LINKS`.
        kv_link_latency_ms: constant part of a transfer.
        kv_lease_s: engine seconds for which KV is kept for others.
        kv_load_failure_policy: what happens when KV cannot be fetched: fail or recompute.
        kv_events: publish KV events.
        kv_events_endpoint: where; a wildcard host is bound (port 0 for a free one), another is connected to.
        kv_events_replay_endpoint: where missed events are sent again; None for nowhere.
    """

    hardware: str = "h100-sxm"
    model: str = "llama-3.1-8b"
    tensor_parallel: int = 1
    speedup: float = 1.0
    served_model_names: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    kv_tokens: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131_072
    block_size: int = 16
    enable_prefix_caching: bool = True
    step_overhead_ms: float = 0.0
    stream_interval: int = 1
    api_key: str | None = None
    enable_prompt_tokens_details: bool = True
    bytes_per_token: int = 4
    default_max_tokens: int = 256
    keep_alive_s: float = 5.0
    seed: int = 0
    engine_version: str = "0.32.0"
    kv_connector: str = "none"
    kv_link: str = "400g"
    kv_link_latency_ms: float = 2.0
    kv_lease_s: float = 30.0
    kv_load_failure_policy: str = "fail"
    kv_events: bool = False
    kv_events_endpoint: str = "tcp://*:0"
    kv_events_replay_endpoint: str | None = "tcp://*:0"

    def __post_init__(self) -> None:
        if not self.speedup > 0:
            raise ValueError(f"speedup must be positive, not {self.speedup!r}")
        if not 1 <= self.bytes_per_token <= 7:
            raise ValueError(f"bytes_per_token must be 1 to 7, not {self.bytes_per_token!r}")
        if self.kv_connector not in ("none", "nixl") or self.kv_load_failure_policy not in ("fail", "recompute"):
            raise ValueError("kv_connector must be none or nixl, kv_load_failure_policy fail or recompute")
        if self.kv_link not in LINKS:
            raise ValueError(f"unknown link {self.kv_link!r}; known: {', '.join(LINKS)}")
        if min(self.stream_interval, self.default_max_tokens, self.max_model_len) < 1:
            raise ValueError("stream_interval, default_max_tokens and max_model_len must be at least 1")

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model, the first of which answers use."""
        return self.served_model_names or (self.model,)

    def step_cost(self) -> StepCost:
        """Step times of the model on the hardware."""
        return step_cost(hardware(self.hardware), model(self.model), self.tensor_parallel, self.step_overhead_ms / 1000)

    def engine_limits(self) -> EngineLimits:
        """Batch and memory limits."""
        kv_tokens = self.kv_tokens
        if kv_tokens is None:
            kv_tokens = kv_capacity_tokens(hardware(self.hardware), model(self.model), self.tensor_parallel)
            if kv_tokens < self.block_size:
                raise ValueError(f"{self.model} leaves no KV memory on {self.hardware}")
        return EngineLimits(
            kv_capacity_tokens=kv_tokens,
            block_size_tokens=self.block_size,
            max_batched_tokens=self.max_num_batched_tokens,
            max_sequences=self.max_num_seqs,
            enable_prefix_caching=self.enable_prefix_caching,
        )
