"""The blocks that one engine has cached, as its events tell. Exact, as long as no event is missing.

- The engine's names of blocks are translated into the gateway's own chain over token ids (`Chain`) when they are
  stored; a block whose parent is not known cannot be named and is left out (an orphan).
- A hash is announced once per physical block. Two requests that compute the same block at a time make two, and the
  block is gone when both have been removed. So blocks are counted.
- A cached block's parents are cached too: vLLM frees a request's blocks from the end, so children leave before their
  parents. The longest cached prefix of a prompt is therefore found by bisecting its blocks.
- Everything is kept in dictionaries of integers, which the cycle collector does not look into.
"""

from collections.abc import Sequence
from typing import Protocol

from gateway.prefixes.events.wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event

DEFAULT_MAX_BLOCKS = 1 << 20
"""Blocks remembered of one engine: 16 million tokens in blocks of 16, more than any single engine holds."""

_ATTENTION_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Groups of layers whose blocks are a prefix. Of layers that see a window only, an engine keeps the window's blocks, of
recurrent ones states; what a request can reuse is bounded by the layers that see everything."""
_MEDIA = frozenset({None, "GPU"})
"""Copies in host memory or on disk are not in the engine's own cache."""


class Chain(Protocol):
    """Names prefixes of tokens; `gateway.prompt.token_chain.TokenChain` is one."""

    def root(self, adapter: str) -> int:
        """Start of the chains of an adapter's prompts."""

    def extend(
        self, parent: int, token_ids: Sequence[int], block_tokens: int, extra: Sequence[Sequence[object] | None] | None
    ) -> list[int]:
        """Hashes of the blocks that follow a prefix; `ValueError` for what are no tokens."""


class BlockMap:
    """See the module.

    Attributes:
        block_tokens: tokens per block, as the engine's events say; 0 before the first.
        complete: the map has missed nothing since the engine's cache was last empty; without that it may lack blocks
            the engine has.
        stored, removed: blocks told of so far.
        orphans: blocks left out because their parent was unknown.
        ignored: events about other tiers of memory or other kinds of layers.
        malformed: events that contradict themselves.
        overflows: times the map was emptied because it had grown beyond its bound, or beyond the engine.
    """

    __slots__ = (
        "_blocks",
        "_chain",
        "_copies",
        "_group",
        "_held",
        "_max_blocks",
        "_turnover_blocks",
        "block_tokens",
        "complete",
        "ignored",
        "malformed",
        "orphans",
        "overflows",
        "removed",
        "stored",
    )

    def __init__(self, chain: Chain, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        """Begin with nothing.

        Args:
            chain: names prefixes.
            max_blocks: blocks remembered at most.
        """
        self._chain = chain
        self._max_blocks = max_blocks
        self._blocks: dict[BlockHash, int] = {}
        self._copies: dict[BlockHash, int] = {}  # of hashes with more than one physical block
        self._held: dict[int, int] = {}  # hash of our chain -> engine's blocks of that name
        self._group: int | None = None
        self._turnover_blocks = 0
        self.block_tokens = 0
        self.complete = False
        self.stored = self.removed = self.orphans = self.ignored = self.malformed = self.overflows = 0

    def __len__(self) -> int:
        """Distinct blocks held."""
        return len(self._blocks)

    def hashes(self) -> frozenset[int]:
        """All that is held, in the gateway's chain."""
        return frozenset(self._held)

    def names(self) -> dict[BlockHash, int]:
        """All that is held: the engine's name of each block, and how many blocks have it."""
        return {name: self._copies.get(name, 1) for name in self._blocks}

    def match(self, hashes: Sequence[int], guess: int = 0) -> int:
        """Return the number of leading blocks of a prompt that the engine has cached.

        Args:
            hashes: the prompt's blocks.
            guess: what it may be, because it is that of another engine.
        """
        held = self._held
        if not hashes or hashes[0] not in held:
            return 0
        length = len(hashes)
        if 0 < guess <= length and hashes[guess - 1] in held and (guess == length or hashes[guess] not in held):
            return guess
        if hashes[length - 1] in held:
            return length
        low, high = 0, length - 1
        while high - low > 1:
            middle = (low + high) >> 1
            if hashes[middle] in held:
                low = middle
            else:
                high = middle
        return high

    def clear(self, complete: bool) -> tuple[object, ...]:
        """Forget everything.

        Args:
            complete: the engine's cache is empty too, and the map has missed nothing.

        Returns:
            What was held. Freeing a hundred thousand blocks takes milliseconds: see `free_slowly`.
        """
        garbage = (self._blocks, self._held, self._copies)
        self._blocks, self._held, self._copies = {}, {}, {}
        self._group = None
        self._turnover_blocks = 0
        self.block_tokens = 0
        self.complete = complete
        return garbage

    def compare(self, engine_blocks: int) -> tuple[object, ...]:
        """Hold the map against the size of the engine's memory.

        An incomplete map of an engine that has since stored as many blocks as it has is as good as complete: what it
        was not told of has been overwritten, but for blocks in use all the time. A map of more blocks than there are
        is wrong (vLLM tells of a block again without a removal in between when a client asks for
        `kv_cache_report_mode: full`), and starts anew.

        Args:
            engine_blocks: blocks the engine has.

        Returns:
            What a clearing has left behind, see `clear`.
        """
        if len(self._blocks) + sum(self._copies.values()) - len(self._copies) > engine_blocks:
            self.overflows += 1
            return self.clear(complete=False)
        if not self.complete and self._turnover_blocks > engine_blocks:
            self.complete = True
        return ()

    def apply(self, events: Sequence[Event]) -> tuple[object, ...]:
        """Take in events, in order.

        Returns:
            What a clearing has left behind, see `clear`.
        """
        garbage: tuple[object, ...] = ()
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
                if len(self._blocks) > self._max_blocks:
                    self.overflows += 1
                    garbage += self.clear(complete=False)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                garbage += self.clear(complete=True)
        return garbage

    def _store(self, event: BlockStored) -> None:
        if event.medium not in _MEDIA or event.kv_cache_spec_kind not in _ATTENTION_KINDS:
            self.ignored += 1
            return
        group = event.group_idx or 0
        if self._group is None:
            self._group = group
        elif group != self._group:
            # Groups of full-attention layers hold the same prefixes; one speaks for all.
            self.ignored += 1
            return
        names, size = event.block_hashes, event.block_size
        if size < 1 or len(names) * size != len(event.token_ids):
            self.malformed += 1
            return
        if not self.block_tokens:
            self.block_tokens = size
        elif size != self.block_tokens:
            # Part of a block, which only engines of that kind reuse.
            self.ignored += 1
            return
        self.stored += len(names)
        self._turnover_blocks += len(names)
        blocks = self._blocks
        if event.parent_block_hash is None:
            parent: int | None = self._chain.root(event.lora_name or "")
        else:
            parent = blocks.get(event.parent_block_hash)
        if parent is None:
            self.orphans += len(names)
            return
        try:
            hashes = self._chain.extend(parent, event.token_ids, size, _keys(event))
        except ValueError:
            self.malformed += 1
            return
        held = self._held
        if blocks.keys().isdisjoint(names) and held.keys().isdisjoint(hashes):
            blocks.update(zip(names, hashes, strict=True))
            held.update(dict.fromkeys(hashes, 1))
            return
        copies = self._copies
        for name, block_hash in zip(names, hashes, strict=True):
            if name in blocks:
                copies[name] = copies.get(name, 1) + 1
            else:
                blocks[name] = block_hash
                held[block_hash] = held.get(block_hash, 0) + 1

    def _remove(self, event: BlockRemoved) -> None:
        if event.medium not in _MEDIA or (self._group is not None and (event.group_idx or 0) != self._group):
            self.ignored += 1
            return
        blocks, held, copies = self._blocks, self._held, self._copies
        self.removed += len(event.block_hashes)
        for name in event.block_hashes:
            if copies and name in copies:
                copies[name] -= 1
                if copies[name] == 1:
                    del copies[name]
                continue
            block_hash = blocks.pop(name, None)
            if block_hash is not None:
                count = held.pop(block_hash)
                if count > 1:
                    held[block_hash] = count - 1


def _keys(event: BlockStored) -> Sequence[Sequence[object] | None] | None:
    """Keys of the blocks besides tokens and adapter; None if no block has any."""
    keys = event.extra_keys
    if keys is None or not any(keys):
        return None
    adapter = event.lora_name
    if adapter is None:
        return keys
    # The adapter comes first among the keys of each block; the chain has it in its root.
    stripped = [of_block[1:] if of_block and of_block[0] == adapter else of_block for of_block in keys]
    return stripped if any(stripped) else None


def free_slowly(garbage: list[object], budget: int) -> bool:
    """Free entries of dictionaries that nobody uses any more, a few at a time.

    Args:
        garbage: what `BlockMap.clear` has returned; becomes empty.
        budget: entries to free at most.

    Returns:
        Whether anything is left.
    """
    while garbage and budget > 0:
        table = garbage[-1]
        if not isinstance(table, dict) or not table:
            garbage.pop()
            continue
        for _ in range(min(budget, len(table))):
            table.popitem()
            budget -= 1
    return bool(garbage)
