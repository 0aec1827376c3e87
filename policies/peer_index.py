"""What peers believe their replicas hold, where that belief is part of how they route.

Each peer fills an index of its own from its own decisions and asks no engine. Two are rebuilt here, over the block
hashes of a request instead of characters or tokens; a match is therefore rounded down to a block.

- `OwnerTree`: SGLang's radix tree over all replicas, whose nodes remember who came first.
- `BlockLru`: llm-d's list of recently used blocks per replica, far larger than what an engine holds.

Pure: nothing here looks at a clock or draws a random number.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence

_SWEEP_PER_INSERT = 64


class _Held:
    """The blocks of one replica, least recently used first."""

    __slots__ = ("alone", "blocks", "number", "size")

    def __init__(self, number: int) -> None:
        self.number = number
        self.alone = (number,)
        self.blocks: OrderedDict[int, int] = OrderedDict()
        self.size = 0


class OwnerTree:
    """A prefix tree shared by all replicas, in which every block knows who holds it, its first holder first.

    Source: sgl-project/sglang, sgl-model-gateway/src/policies/tree.rs, which vllm-project/router has too. A look-up
    goes as deep as anybody's prompts go and returns the owner of where it ends: the replica that brought this part,
    or, once that has lost it, another one that has it. Each replica is limited to `max_bytes`; what it used least
    recently goes first, tails before roots.
    Differences: blocks instead of characters; the limit is kept at each insertion, where the original lets trees
    overshoot until a thread comes round every minute or two; a prefix counts as used whenever something that begins
    with it is.
    """

    def __init__(self, max_bytes: int) -> None:
        """Make an empty tree.

        Args:
            max_bytes: canonical bytes that one replica may hold.
        """
        self._max_bytes = max_bytes
        self._holders: dict[int, tuple[int, ...]] = {}
        # Holders are numbers that are never used again: what a forgotten replica left behind belongs to nobody.
        self._slot_of: dict[int, int] = {}
        self._held: dict[int, _Held] = {}
        self._left: deque[_Held] = deque()
        self._last_number = 0

    def match(self, hashes: Sequence[int]) -> tuple[int, int | None]:
        """Return how many leading blocks somebody holds, and who owns the last of them."""
        # Whoever holds a block holds all before it, so the held ones come first and bisecting finds the end.
        depth = bisect_left(hashes, True, key=lambda block: self._owner(block) is None)
        return depth, self._owner(hashes[depth - 1]) if depth else None

    def insert(self, slot: int, hashes: Sequence[int], offsets: Sequence[int]) -> None:
        """The replica is about to hold this prompt.

        Args:
            slot: the replica.
            hashes: block hashes of the prompt.
            offsets: bytes covered by the first k blocks.
        """
        if self._left:
            self._sweep()
        held = self._held.get(slot)
        if held is None:
            self._last_number += 1
            held = self._held[slot] = _Held(self._last_number)
            self._slot_of[held.number] = slot
        blocks, holders = held.blocks, self._holders
        for position in range(len(hashes) - 1, -1, -1):  # the root last, so that it is the last to go
            block = hashes[position]
            if block in blocks:
                blocks.move_to_end(block)
                continue
            size = offsets[position + 1] - offsets[position]
            blocks[block] = size
            held.size += size
            before = holders.get(block)
            holders[block] = held.alone if before is None else (*before, held.number)
        while held.size > self._max_bytes and blocks:
            self._drop_oldest(held)

    def forget(self, slot: int) -> None:
        """The replica holds nothing any more."""
        held = self._held.pop(slot, None)
        if held is not None:
            del self._slot_of[held.number]
            self._left.append(held)

    def held_bytes(self, slot: int) -> int:
        """Canonical bytes the replica is believed to hold."""
        held = self._held.get(slot)
        return 0 if held is None else held.size

    def _owner(self, block: int) -> int | None:
        for number in self._holders.get(block, ()):
            slot = self._slot_of.get(number)
            if slot is not None:
                return slot
        return None

    def _drop_oldest(self, held: _Held) -> None:
        block, size = held.blocks.popitem(last=False)
        held.size -= size
        rest = tuple(number for number in self._holders[block] if number != held.number)
        if rest:
            self._holders[block] = rest
        else:
            del self._holders[block]

    def _sweep(self) -> None:
        held = self._left[0]
        for _ in range(_SWEEP_PER_INSERT):
            if not held.blocks:
                self._left.popleft()
                return
            self._drop_oldest(held)


class BlockLru:
    """Recently used blocks per replica, each counted as so many tokens of a fixed budget.

    Source: llm-d/llm-d-router, pkg/epp/framework/plugins/requestcontrol/dataproducer/approximateprefix: indexer.go
    (one LRU per pod), plugin.go (`matchLongestPrefix`, blocks of at least 64 tokens), types.go (31,250 blocks by
    default, meant as blocks of 16 tokens for 500 k tokens of KV memory). 31,250 x 64 is two million tokens, several
    times what the engine holds, and the index keeps believing in what is long gone.

    Kept as they are: the blocks of a prompt are used root first, so the root is the first to go; and a block counts
    for a replica wherever it lies before the first block that nobody has, whether the replica has those before it or
    not. Differences: the gateway's blocks grow with their offset, so a block is counted by its tokens; the unfinished
    last block is left out; `maxPrefixTokensToMatch` (131,072) and the auto-tuned capacity (the engine's number of
    blocks, still of 64 tokens each) are not rebuilt.
    """

    def __init__(self, lru_blocks: int = 31_250, block_tokens: int = 64) -> None:
        """Make an empty index.

        Args:
            lru_blocks: blocks per replica.
            block_tokens: tokens per block.

        Raises:
            ValueError: if it could hold nothing.
        """
        if lru_blocks < 1 or block_tokens < 1:
            raise ValueError("lru_blocks and block_tokens must be at least 1")
        self._capacity_tokens = lru_blocks * block_tokens
        self._holders: dict[int, int] = {}  # bit n: slot n
        self._held: dict[int, _Held] = {}

    def match(self, hashes: Sequence[int], offsets: Sequence[int]) -> dict[int, int]:
        """Return the matched canonical bytes of each slot that has any."""
        return leading_bytes(self._holders, hashes, offsets)

    def insert(self, slot: int, hashes: Sequence[int], offsets: Sequence[int], tokens_per_byte: float) -> None:
        """The replica is about to hold this prompt.

        Args:
            slot: the replica.
            hashes: block hashes of the prompt.
            offsets: bytes covered by the first k blocks.
            tokens_per_byte: tokens of this prompt per canonical byte.
        """
        held = self._held.get(slot)
        if held is None:
            held = self._held[slot] = _Held(slot)
        blocks, holders, bit = held.blocks, self._holders, 1 << slot
        for position, block in enumerate(hashes):
            if block in blocks:
                blocks.move_to_end(block)
                continue
            size = max(round((offsets[position + 1] - offsets[position]) * tokens_per_byte), 1)
            blocks[block] = size
            held.size += size
            holders[block] = holders.get(block, 0) | bit
        while held.size > self._capacity_tokens:
            block, size = blocks.popitem(last=False)
            held.size -= size
            self._leave(block, bit)

    def forget(self, slot: int) -> None:
        """The replica holds nothing any more."""
        held = self._held.pop(slot, None)
        if held is not None:
            for block in held.blocks:
                self._leave(block, 1 << slot)

    def held_tokens(self, slot: int) -> int:
        """Tokens the replica is believed to hold."""
        held = self._held.get(slot)
        return 0 if held is None else held.size

    def _leave(self, block: int, bit: int) -> None:
        rest = self._holders[block] & ~bit
        if rest:
            self._holders[block] = rest
        else:
            del self._holders[block]


def leading_bytes(holders: dict[int, int], hashes: Sequence[int], offsets: Sequence[int]) -> dict[int, int]:
    """Sum, for each slot, the bytes of its blocks before the first block that nobody has."""
    matched: dict[int, int] = {}
    find = holders.get
    start = run = 0
    position = -1
    # Neighbouring blocks mostly have the same holders: one sum per run of them.
    for position, block in enumerate(hashes):
        bits = find(block, 0)
        if bits != run:
            _credit(matched, run, offsets[position] - offsets[start])
            run, start = bits, position
        if not bits:
            return matched
    if run:
        _credit(matched, run, offsets[position + 1] - offsets[start])
    return matched


def _credit(matched: dict[int, int], holders: int, size: int) -> None:
    """Add a size to every slot whose bit is set."""
    while holders:
        lowest = holders & -holders
        slot = lowest.bit_length() - 1
        matched[slot] = matched.get(slot, 0) + size
        holders ^= lowest
