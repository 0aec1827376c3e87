"""Named fleets: the engines of published benchmarks.

b2b-saas
    The fleet of llm-d's "73 % capacity" benchmark: 8 pods of Qwen3-32B on two H100, 307,328 KV tokens each. Its step
    constants were fitted to the published throughput of all its routing configurations: 0.40 s per 8,192 prefill
    tokens, 9.8 ms for the weights, 1.5 ms per step, and 131,072 bytes of KV per token and card at 80 % of 3.35 TB/s.
b2b-saas-37
    The fleet of the "37 % capacity" one: 4 pods of Llama-3.1-70B with 461,376 KV tokens, which is what four H100 hold.
    Constants from the roofline.
h200
    The b2b-saas engine with 720,000 KV tokens, about what the cards' larger memory would hold, for the Mooncake
    conversation trace. Its prompts are up to 120,000 tokens long, so attention counts: 4 FLOPs per layer (64), hidden
    dimension (5,120) and pair, at 60 % of 2 x 989 TFLOP/s. For the 7,200 tokens of b2b-saas the fitted constant has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gateway.estimator.roofline import StepCost


@dataclass(frozen=True, slots=True)
class Preset:
    """Defaults for the options of a replay; None leaves the general default."""

    replicas: int | None = None
    hardware: str | None = None
    model: str | None = None
    tensor_parallel: int | None = None
    kv_tokens: int | None = None
    cost: StepCost | None = None


QWEN3_32B_ON_TWO_H100 = StepCost(
    prefill_s_per_token=0.40 / 8192,
    attention_s_per_pair=0.0,
    weights_s=0.0098,
    kv_s_per_token=131_072 / (3.35e12 * 0.8),
    overhead_s=0.0015,
)

WITH_ATTENTION = replace(QWEN3_32B_ON_TWO_H100, attention_s_per_pair=4 * 64 * 5120 / (0.6 * 2 * 989e12))

PRESETS: Mapping[str, Preset] = {
    "b2b-saas": Preset(8, "h100-sxm", "qwen3-32b", 2, 307_328, QWEN3_32B_ON_TWO_H100),
    "b2b-saas-37": Preset(4, "h100-sxm", "llama-3.1-70b", 4, 461_376),
    "h200": Preset(8, "h200-sxm", "qwen3-32b", 2, 720_000, WITH_ATTENTION),
}
