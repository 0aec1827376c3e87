"""Engines' KV events as the truth of the gateway's prefix map.

An engine tells which blocks it has cached and which it has evicted. Names of prefixes are the same for engine and
gateway here, so an event concerns the map exactly when its block ends where one of the map's does. Blocks of answers
become known this way too, before any prompt has repeated them.

Events may get lost: what was cached is then not known (unless the gateway's own decision put it into the map), what was
evicted is believed in until the map's own LRU drops it. No replay of lost messages is modelled, so this is the worst
case of a subscriber.
"""

from bisect import bisect_right
from collections.abc import Sequence
from random import Random

from gateway.prefixes.index import PrefixIndex
from loadtests.engine import EngineRequest, StoredBlocks
from loadtests.replay.wiring import PromptKeys


class EventFeed:
    """The events of one replica, applied to the map.

    Args:
        index: the map.
        keys: where its blocks end.
        slot: the replica.
        block_tokens: tokens of an engine's block.
        lost_share: events that never arrive, 0 to 1.
        seed: which ones.
    """

    def __init__(
        self, index: PrefixIndex, keys: PromptKeys, slot: int, block_tokens: int, lost_share: float, seed: int
    ) -> None:
        self._index = index
        self._keys = keys
        self._slot = slot
        self._block_tokens = block_tokens
        self._lost_share = lost_share
        self._random = Random(f"{seed}:{slot}")
        self._chains: dict[EngineRequest, tuple[list[int], list[int]]] = {}
        """Per running request: where the map's blocks end in it, and their hashes."""
        self._held: dict[int, tuple[list[int], int]] = {}
        """Hash -> a chain it is in, and its place there."""
        self._copies: dict[int, int] = {}
        """Hash -> physical blocks that end there, where there are several: requests may compute the same at a time."""

    def apply(self, stored: Sequence[StoredBlocks], removed: Sequence[int]) -> None:
        """Take in what one step has cached and evicted; evictions come first in a step."""
        for block_hash in removed:
            if block_hash in self._held and not self._lost():
                self._removed(block_hash)
        for blocks in stored:
            if not self._lost():
                self._stored(blocks)

    def ended(self, request: EngineRequest) -> None:
        """A request stores no more."""
        self._chains.pop(request, None)

    def restarted(self) -> None:
        """The engine's cache is empty. The map learns it from the scrape, as without events."""
        self._chains.clear()
        self._held.clear()
        self._copies.clear()

    def _lost(self) -> bool:
        return self._lost_share > 0 and self._random.random() < self._lost_share

    def _stored(self, blocks: StoredBlocks) -> None:
        request = blocks.request
        chain = self._chains.get(request)
        if chain is None:
            chain = self._chains[request] = self._chain(request)
        positions, hashes = chain
        first = bisect_right(positions, blocks.first_block * self._block_tokens)
        end = bisect_right(positions, blocks.end_block * self._block_tokens)
        if first == end:
            return
        self._index.insert(self._slot, hashes[:end])
        held = self._held
        for place in range(first, end):
            block_hash = hashes[place]
            if block_hash in held:
                self._copies[block_hash] = self._copies.get(block_hash, 1) + 1
            else:
                held[block_hash] = (hashes, place)

    def _removed(self, block_hash: int) -> None:
        copies = self._copies.pop(block_hash, 1) - 1
        if copies > 1:
            self._copies[block_hash] = copies
        if copies:
            return
        hashes, place = self._held.pop(block_hash)
        self._index.truncate(self._slot, hashes, place)

    def _chain(self, request: EngineRequest) -> tuple[list[int], list[int]]:
        block_tokens, names = self._block_tokens, request.block_hashes
        # A block of the map that ends inside an engine's block is never told of.
        positions = [
            position for position in self._keys.positions(len(names) * block_tokens) if position % block_tokens == 0
        ]
        return positions, [names[position // block_tokens - 1] for position in positions]
