"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from loadtests.engine.block_pool import Segment


class Phase(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    """Queued: never scheduled yet, or preempted."""
    PREFILL = "prefill"
    """Scheduled, prompt not computed to its end."""
    DECODE = "decode"
    """One token per step."""
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one engine, under vLLM's meanings.

    Args:
        kv_capacity_tokens: tokens of KV memory; whole blocks of it are used.
        block_size_tokens: tokens per KV block (`--block-size`).
        max_batched_tokens: tokens computed per step (`--max-num-batched-tokens`).
        max_sequences: requests that run at a time (`--max-num-seqs`).
        enable_prefix_caching: reuse full blocks of equal prefixes.
    """

    kv_capacity_tokens: int
    block_size_tokens: int = 16
    max_batched_tokens: int = 8192
    max_sequences: int = 256
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if min(self.block_size_tokens, self.max_batched_tokens, self.max_sequences) < 1:
            raise ValueError(f"limits must be at least 1: {self}")
        if self.total_blocks < 1:
            raise ValueError(f"kv_capacity_tokens holds no block: {self}")

    @property
    def total_blocks(self) -> int:
        """KV blocks of the engine."""
        return self.kv_capacity_tokens // self.block_size_tokens


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence to prefill and decode. The fields up to `hold` are the caller's, the others the engine's.

    Args:
        id: unique among the requests of one engine.
        prompt_tokens: length of the prompt.
        max_tokens: tokens to generate; all of them are, unless the request is aborted.
        block_hashes: one hash per full block of prompt *and answer*, in order; a hash names the whole prefix
            up to the end of its block (chained), so equal hashes mean equal prefixes. Blocks beyond the
            sequence's end are never found again; leave the answer's out only if nobody will ask for it (its
            blocks then return to the pool at once instead of waiting in the LRU, as in a real engine).
    """

    id: str
    prompt_tokens: int
    max_tokens: int
    block_hashes: Sequence[int] = field(default=(), repr=False)
    external_tokens: int = 0
    """Prompt tokens whose KV has come from another engine by the time the request is scheduled. All but the last token
    of the prompt can. Lost with a preemption, as in vLLM."""
    hold: bool = False
    """Keep the blocks of a request of one token when it has finished, until `Engine.release`: another engine is to
    fetch them."""

    phase: Phase = field(default=Phase.WAITING, init=False)
    cached_tokens: int = field(default=0, init=False)
    """Prompt tokens found in the prefix cache when the request was first scheduled."""
    preemptions: int = field(default=0, init=False)

    hashed_blocks: int = field(default=0, init=False, repr=False)
    """How many of the sequence's blocks can be cached."""
    leaf: Segment | None = field(default=None, init=False, repr=False)
    """The last of the cached segments the request holds; the others are its parents."""
    emitted: int = field(default=0, init=False, repr=False)
    """Tokens emitted when the request last joined or left the decodes; see `Engine.emitted_tokens()`."""
    target_tokens: int = field(default=0, init=False, repr=False)
    """Tokens to compute before the next is emitted: the prompt, and after a preemption the answer so far."""
    computed_tokens: int = field(default=0, init=False, repr=False)
    blocks: int = field(default=0, init=False, repr=False)
    """Blocks held while in prefill; a decode holds as many as its context needs."""
    admission: int = field(default=0, init=False, repr=False)
    """Position in the order in which requests were scheduled; anew after a preemption."""
    joined_step: int = field(default=0, init=False, repr=False)
    joined_context: int = field(default=0, init=False, repr=False)
    finish_step: int = field(default=0, init=False, repr=False)


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Blocks that became cached: `request.block_hashes[first_block:end_block]`."""

    request: EngineRequest
    first_block: int
    end_block: int

    @property
    def hashes(self) -> Sequence[int]:
        """The hashes of the blocks."""
        return self.request.block_hashes[self.first_block : self.end_block]

    @property
    def parent_hash(self) -> int | None:
        """The hash of the block before them, None at the start of a prompt."""
        return self.request.block_hashes[self.first_block - 1] if self.first_block else None


@dataclass(slots=True)
class StepResult:
    """What one call of `Engine.step()` did: one step, or several pure decode steps with the same batch.

    Everything that is listed happens at the end of the (last) step; only admissions, preemptions and removed
    blocks belong to its start.
    """

    duration_s: float
    """Of all the steps together."""
    steps: int
    prefill_tokens: int
    """Prompt tokens computed, those of recomputed answers included."""
    decodes: int
    """Sequences that emitted one token in every one of the steps."""
    admitted: Sequence[EngineRequest]
    """Scheduled out of the queue, after a preemption again."""
    first_tokens: Sequence[EngineRequest]
    """Prefill complete, first token emitted."""
    resumed: Sequence[EngineRequest]
    """Recomputed after a preemption, next token emitted."""
    finished: Sequence[EngineRequest]
    """Emitted their last token, blocks freed."""
    preempted: Sequence[EngineRequest]
    """Lost their blocks, back at the head of the queue."""
    stored: Sequence[StoredBlocks]
    """Blocks that became cached, if events are collected."""
    removed: Sequence[int]
    """Hashes of cached blocks evicted for new ones, if events are collected."""
