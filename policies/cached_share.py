"""Which share of a prompt each candidate holds, by one index or another.

llm-d's routing exists with a precise index, fed by the engines' KV events, and with an approximate one, fed by its own
decisions. Here `gateway` is the gateway's own prefix map, bounded by what the engines hold and corrected by what they
report; `approximate` is llm-d's, see `BlockLru`.
"""

from typing import Protocol

from policies.peer_index import BlockLru
from policies.types import Candidates, Column, Request

INDEXES = ("gateway", "approximate")


class CachedShares(Protocol):
    """Where a policy gets cached shares from."""

    reads: frozenset[Column]

    def shares(self, request: Request, candidates: Candidates) -> list[float]:
        """Return the cached share of the prompt, 0 to 1, for each of `candidates.slots` in order."""
        ...

    def chosen(self, request: Request, slot: int) -> None:
        """Learn that the request goes to this replica."""
        ...

    def forget(self, slot: int) -> None:
        """Learn that the replica holds nothing any more."""
        ...


class GatewayShares:
    """The gateway's own prefix map; the gateway keeps it itself."""

    reads = frozenset({Column.MATCHED_TOKENS})

    def shares(self, request: Request, candidates: Candidates) -> list[float]:
        """Return matched tokens over prompt tokens."""
        tokens = request.prompt_tokens
        if tokens <= 0.0:
            return [0.0] * len(candidates.slots)
        matched = candidates.matched_tokens
        return [matched[slot] / tokens for slot in candidates.slots]

    def chosen(self, request: Request, slot: int) -> None:
        """Do nothing."""

    def forget(self, slot: int) -> None:
        """Do nothing."""


class ApproximateShares:
    """llm-d's index of its own decisions."""

    reads: frozenset[Column] = frozenset()

    def __init__(self, lru_blocks: int, block_tokens: int) -> None:
        self._index = BlockLru(lru_blocks, block_tokens)

    def shares(self, request: Request, candidates: Candidates) -> list[float]:
        """Return matched bytes over canonical bytes."""
        matched = self._index.match(request.block_hashes, request.block_offsets)
        if not matched:
            return [0.0] * len(candidates.slots)
        length = request.canonical_bytes
        return [matched.get(slot, 0) / length for slot in candidates.slots]

    def chosen(self, request: Request, slot: int) -> None:
        """Enter the prompt."""
        if request.block_hashes:
            per_byte = request.prompt_tokens / request.canonical_bytes
            self._index.insert(slot, request.block_hashes, request.block_offsets, per_byte)

    def forget(self, slot: int) -> None:
        """Drop the replica's blocks."""
        self._index.forget(slot)


def cached_shares(index: str, lru_blocks: int, block_tokens: int) -> CachedShares:
    """Make one by name.

    Args:
        index: one of `INDEXES`.
        lru_blocks: blocks per replica of the approximate index.
        block_tokens: tokens per block of the approximate index.

    Raises:
        ValueError: unknown name, or an index that could hold nothing.
    """
    if index == "gateway":
        return GatewayShares()
    if index == "approximate":
        return ApproximateShares(lru_blocks, block_tokens)
    raise ValueError(f"index must be one of {', '.join(INDEXES)}, got {index!r}")
