"""Paged KV blocks with a prefix cache, kept as runs of blocks instead of single ones.

Semantics, as in vLLM's V1 KV cache manager:
- A block is free (of no request) or used. Free blocks that hold no reusable content are handed out first,
  then the least recently freed cached ones (they are evicted by that, and only by that).
- A request frees its blocks in reverse order, so the tail of a prefix is evicted before its root.
- Two requests may compute the same block at the same time; both copies are kept, and a hash is found as long
  as one copy lives.

Representation: a `Segment` is a run of consecutive cached blocks that have always been held and freed
together. Segments form a forest by their parent pointers (like the radix tree of SGLang, L. Zheng et
al., 2024), and whoever holds a segment holds its ancestors. Hence:
- Holding or freeing a prompt of thousands of blocks touches a handful of segments.
- The free queue is a queue of segments, each evicted from its tail.
- A cached block's ancestors are cached too, so the longest cached chain is found by bisection.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Segment:
    """A run of cached blocks of one prefix: blocks `start` to `end` of it."""

    __slots__ = ("hashes", "parent", "references", "sealed", "start")

    def __init__(self, parent: Segment | None, start: int, hashes: list[int], references: int, sealed: bool) -> None:
        self.parent = parent
        self.start = start
        self.hashes = hashes
        self.references = references
        """Requests that hold the segment."""
        self.sealed = sealed
        """Others may have built on its end. Only an unsealed segment grows, for the request that made it."""

    @property
    def end(self) -> int:
        """Blocks of the prefix up to the end of the segment."""
        return self.start + len(self.hashes)


class BlockPool:
    """The KV blocks of one engine. Counts blocks, not tokens.

    Args:
        total_blocks: blocks there are.
    """

    def __init__(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        self.removed: list[int] | None = None
        """Where the hashes of evicted blocks go, oldest first, if anybody wants them."""
        self._blank_blocks = total_blocks
        self._idle_blocks = 0
        self._idle: OrderedDict[Segment, None] = OrderedDict()
        self._owner: dict[int, Segment] = {}
        self._copies: dict[int, list[Segment]] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks no request holds, cached ones included."""
        return self._blank_blocks + self._idle_blocks

    @property
    def used_blocks(self) -> int:
        """Blocks requests hold; a shared one counts once."""
        return self.total_blocks - self.free_blocks

    @property
    def cached_hashes(self) -> int:
        """Distinct block hashes that would be found."""
        return len(self._owner)

    def cached(self) -> dict[int, int]:
        """Every block hash that would be found, and how many blocks have it."""
        return {block_hash: 1 + len(self._copies.get(block_hash, ())) for block_hash in self._owner}

    def match(self, hashes: Sequence[int], limit: int) -> int:
        """Length in blocks of the longest cached chain from the start of `hashes`, at most `limit`."""
        owner = self._owner
        low, high = 0, min(limit, len(hashes))
        if not high or hashes[0] not in owner:
            return 0
        while low < high:
            middle = (low + high + 1) >> 1
            if hashes[middle - 1] in owner:
                low = middle
            else:
                high = middle - 1
        return low

    def idle_blocks(self, hashes: Sequence[int], blocks: int) -> int:
        """How many of the first `blocks` blocks, all cached, are free at present."""
        if not blocks:
            return 0
        idle = 0
        end = blocks
        node: Segment | None = self._owner[hashes[blocks - 1]]
        while node is not None:
            if not node.references:
                idle += end - node.start
            end = node.start
            node = node.parent
        return idle

    def acquire(self, hashes: Sequence[int], blocks: int) -> Segment | None:
        """Hold the first `blocks` blocks, all cached, for one request. Returns their last segment."""
        if not blocks:
            return None
        leaf = self._owner[hashes[blocks - 1]]
        if leaf.end > blocks:
            leaf = self._split(leaf, blocks)
        leaf.sealed = True
        node: Segment | None = leaf
        while node is not None:
            if not node.references:
                del self._idle[node]
                self._idle_blocks -= len(node.hashes)
            node.references += 1
            node = node.parent
        return leaf

    def take(self, count: int) -> None:
        """Hand out `count` free blocks, which must be there; evicts cached ones if need be."""
        self._blank_blocks -= count
        if self._blank_blocks < 0:
            self._evict(-self._blank_blocks)
            self._blank_blocks = 0

    def store(self, leaf: Segment | None, hashes: Sequence[int]) -> Segment:
        """Blocks taken earlier and full by now become cached, as continuation of the request's chain.

        Args:
            leaf: the last segment the request holds.
            hashes: of the blocks that follow it, at least one.

        Returns:
            The last segment the request holds from now on.
        """
        if leaf is None:
            leaf = Segment(None, 0, list(hashes), 1, False)
        elif leaf.sealed:
            leaf = Segment(leaf, leaf.end, list(hashes), 1, False)
        else:
            leaf.hashes.extend(hashes)
        owner = self._owner
        if hashes[0] not in owner:
            # A cached block's ancestors are cached: if the first is new, all are.
            owner.update(dict.fromkeys(hashes, leaf))
        else:
            for block_hash in hashes:
                if owner.setdefault(block_hash, leaf) is not leaf:
                    self._copies.setdefault(block_hash, []).append(leaf)
        return leaf

    def release(self, leaf: Segment | None, uncached_blocks: int) -> None:
        """One request lets go of its chain and of its blocks that are not cached."""
        self._blank_blocks += uncached_blocks
        node = leaf
        while node is not None:
            node.references -= 1
            if not node.references:
                self._idle[node] = None
                self._idle_blocks += len(node.hashes)
            node = node.parent

    def reset(self) -> None:
        """Forget the cached blocks that nobody holds."""
        self._blank_blocks += self._idle_blocks
        self._evict(self._idle_blocks)

    def _evict(self, count: int) -> None:
        self._idle_blocks -= count
        while count:
            segment = next(iter(self._idle))
            hashes = segment.hashes
            kept = len(hashes) - count
            if kept <= 0:
                del self._idle[segment]
                kept = 0
            evicted = hashes[kept:]
            del hashes[kept:]
            count -= len(evicted)
            evicted.reverse()
            self._forget(segment, evicted)
            if self.removed is not None:
                self.removed.extend(evicted)

    def _forget(self, segment: Segment, hashes: list[int]) -> None:
        owner = self._owner
        copies = self._copies
        if not copies:
            for block_hash in hashes:
                del owner[block_hash]
            return
        for block_hash in hashes:
            others = copies.get(block_hash)
            if others is None:
                del owner[block_hash]
                continue
            if owner[block_hash] is segment:
                owner[block_hash] = others.pop(0)
            else:
                others.remove(segment)
            if not others:
                del copies[block_hash]

    def _split(self, lower: Segment, end: int) -> Segment:
        """Cut a segment at block `end` of its prefix. The lower part keeps its place in the free queue."""
        cut = end - lower.start
        upper = Segment(lower.parent, lower.start, lower.hashes[:cut], lower.references, True)
        lower.parent = upper
        lower.start = end
        del lower.hashes[:cut]
        if not upper.references:
            self._idle[upper] = None
        owner = self._owner
        if not self._copies:
            owner.update(dict.fromkeys(upper.hashes, upper))
            return upper
        for block_hash in upper.hashes:
            if owner[block_hash] is lower:
                owner[block_hash] = upper
            else:
                others = self._copies[block_hash]
                others[others.index(lower)] = upper
        return upper
