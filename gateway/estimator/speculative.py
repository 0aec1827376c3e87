"""Speculative decoding: a small model drafts tokens, the target verifies them all in one step.

Source: Y. Leviathan, M. Kalman, Y. Matias, "Fast inference from transformers via speculative decoding", ICML
2023.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.estimator.hardware import Hardware
from gateway.estimator.roofline import StepCost


@dataclass(frozen=True, slots=True)
class SpeculativeRound:
    """One round of drafting and verifying.

    Args:
        draft_s: all draft steps, one after the other.
        verify_s: the target's one step.
        tokens: tokens a sequence gains: the accepted drafts and the one the target itself adds.
    """

    draft_s: float
    verify_s: float
    tokens: float

    @property
    def round_s(self) -> float:
        """Seconds from one round to the next."""
        return self.draft_s + self.verify_s

    @property
    def s_per_token(self) -> float:
        """Seconds per token of a sequence."""
        return self.round_s / self.tokens


def draft_step_s(hardware: Hardware, draft_weight_bytes: float) -> float:
    """One draft step by the bytes it reads. A draft model with a shape has its `StepCost.decode_step_s`."""
    return draft_weight_bytes / (hardware.bandwidth_bytes_per_s * hardware.decode_efficiency)


def verify_step_s(target: StepCost, positions: int, batch: int = 1, kv_tokens: float = 0.0) -> float:
    """The target's step over the drafted positions of a batch.

    The positions of a sequence share one read of its history.

    Args:
        target: step constants of the target.
        positions: positions to verify per sequence.
        batch: sequences.
        kv_tokens: their histories, summed over the batch.
    """
    return target.step_s(positions * batch, 0.0, kv_tokens)


def speculative_round(
    target: StepCost,
    draft_step_s: float,
    draft_tokens: int,
    accepted_tokens: float,
    batch: int = 1,
    kv_tokens: float = 0.0,
) -> SpeculativeRound:
    """One round: the draft model makes k tokens in k steps, the target verifies k positions in one.

    Args:
        target: step constants of the target.
        draft_step_s: one step of the draft model over the batch.
        draft_tokens: k, drafts per round and sequence.
        accepted_tokens: how many of them the target accepts, from 0 to k; a mean need not be whole.
        batch: sequences.
        kv_tokens: their histories, summed over the batch.

    Raises:
        ValueError: no draft, or more accepted than drafted.
    """
    if draft_tokens < 1 or not 0 <= accepted_tokens <= draft_tokens:
        raise ValueError(f"cannot accept {accepted_tokens!r} of {draft_tokens!r} drafted tokens")
    return SpeculativeRound(
        draft_s=draft_tokens * draft_step_s,
        verify_s=verify_step_s(target, draft_tokens, batch, kv_tokens),
        tokens=accepted_tokens + 1,
    )


def expected_accepted_tokens(acceptance_rate: float, draft_tokens: int) -> float:
    """Mean drafts accepted per round if each is with the same probability, up to the first refused one.

    a + a^2 + ... + a^k: equation 1 of Leviathan et al. less the token the target adds.

    Raises:
        ValueError: a rate outside [0, 1].
    """
    if not 0 <= acceptance_rate <= 1:
        raise ValueError(f"acceptance_rate must be in [0, 1], not {acceptance_rate!r}")
    return sum(acceptance_rate**position for position in range(1, draft_tokens + 1))
