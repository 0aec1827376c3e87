"""When it pays to prefill on another card than the one that decodes: arithmetic on one prompt, one batch and one link.

Whole, beside a batch of b streams that decode:   TTFT of the prompt in chunks   + price x b x prefill
Split, on an idle card:                           prefill + latency + wire time + one decode step

The price is what the default policy sets on a second by which a running stream is delayed. Queues are left out: an idle
card on both sides.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.estimator.roofline import StepCost

DECODE_PRICE = 0.02
"""About that of policies/predicted_ttft.py (`decode_price`)."""
LONGEST_TOKENS = 1 << 20
"""Prompts beyond a million tokens are not looked at."""
_GROWTH = 1.05


def split_saves_s(
    cost: StepCost,
    prompt_tokens: int,
    transfer_s: float,
    batch: int,
    history_tokens: float,
    chunk_tokens: int,
    cached_tokens: int = 0,
) -> float:
    """Seconds of cost that a split saves; negative where the prompt should stay.

    Args:
        cost: step constants of both cards.
        prompt_tokens: tokens of the prompt.
        transfer_s: latency and wire time of its KV.
        batch: streams that decode where it would be served whole.
        history_tokens: tokens of history of each of them.
        chunk_tokens: prompt tokens per step.
        cached_tokens: tokens of the prompt that both cards hold.
    """
    new = prompt_tokens - cached_tokens
    steps = -(-new // chunk_tokens)
    compute_s = cost.prefill_compute_s(new, cached_tokens)
    # Every step of the prefill also decodes the batch.
    beside_s = compute_s + steps * (batch * (cost.prefill_s_per_token + history_tokens * cost.kv_s_per_token))
    overhead_s = steps * cost.overhead_s
    floor_s = steps * cost.weights_s
    whole_s = max(beside_s, floor_s) + overhead_s + DECODE_PRICE * batch * compute_s
    split_s = max(compute_s, floor_s) + overhead_s + transfer_s + cost.decode_step_s(batch, batch * history_tokens)
    return whole_s - split_s


def shortest_tokens(holds: Callable[[int], bool]) -> int | None:
    """The shortest prompt from which on something holds, to a twentieth; None if not even for a million tokens."""
    found: int | None = None
    tokens = 16
    while tokens <= LONGEST_TOKENS:
        if not holds(tokens):
            found = None
        elif found is None:
            found = tokens
        tokens = max(tokens + 1, int(tokens * _GROWTH))
    return found
