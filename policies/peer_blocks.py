"""What peers count by blocks, beside which prefix is where.

- `UseBook`: Preble's record of how often each cached block was asked for.
- `ActiveBlocks`: Dynamo's count of the blocks of requests in flight, shared ones once.

Pure: nothing here looks at a clock or draws a random number.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from policies.peer_index import leading_bytes


class _Use:
    """One cached block: its tokens, how often it was asked for of late, and when last."""

    __slots__ = ("last_s", "tokens", "uses")

    def __init__(self, tokens: int, now_s: float) -> None:
        self.tokens = tokens
        self.uses = 1
        self.last_s = now_s


class UseBook:
    """What each replica probably caches, with how often it was asked for: what would be lost by evicting it.

    Source: WukLab/preble, multi_node/global_scheduler_with_time.py (`virtual_evict_for_routing`, a window of three
    minutes). Blocks instead of tree nodes; least recently used first, tails before roots, as the engine evicts.
    """

    def __init__(self, window_s: float) -> None:
        """Make an empty book.

        Args:
            window_s: uses older than this count for nothing.
        """
        self._window_s = window_s
        self._blocks: dict[int, OrderedDict[int, _Use]] = {}
        self._tokens: dict[int, int] = {}

    def insert(
        self,
        slot: int,
        hashes: Sequence[int],
        offsets: Sequence[int],
        tokens_per_byte: float,
        capacity_tokens: float,
        now_s: float,
    ) -> None:
        """The replica is about to hold this prompt, and evicts for it what it must.

        Args:
            slot: the replica.
            hashes: block hashes of the prompt.
            offsets: bytes covered by the first k blocks.
            tokens_per_byte: tokens of this prompt per canonical byte.
            capacity_tokens: what the replica can hold.
            now_s: seconds.
        """
        blocks = self._blocks.setdefault(slot, OrderedDict())
        total = self._tokens.get(slot, 0)
        expired_s = now_s - self._window_s
        for position in range(len(hashes) - 1, -1, -1):
            block = hashes[position]
            use = blocks.get(block)
            if use is None:
                tokens = max(round((offsets[position + 1] - offsets[position]) * tokens_per_byte), 1)
                blocks[block] = _Use(tokens, now_s)
                total += tokens
                continue
            blocks.move_to_end(block)
            use.uses = use.uses + 1 if use.last_s >= expired_s else 1
            use.last_s = now_s
        while total > capacity_tokens and blocks:
            total -= blocks.popitem(last=False)[1].tokens
        self._tokens[slot] = total

    def tokens_lost(self, slot: int, needed_tokens: float, capacity_tokens: float, now_s: float) -> float:
        """Return the tokens that would be evicted to make room, each times its uses within the window.

        Args:
            slot: the replica.
            needed_tokens: tokens to make room for.
            capacity_tokens: what the replica can hold.
            now_s: seconds.
        """
        over = self._tokens.get(slot, 0) + needed_tokens - capacity_tokens
        if over <= 0.0:
            return 0.0
        lost = 0.0
        expired_s = now_s - self._window_s
        for use in self._blocks.get(slot, {}).values():
            if use.last_s >= expired_s:
                lost += use.tokens * use.uses
            over -= use.tokens
            if over <= 0.0:
                break
        return lost

    def forget(self, slot: int) -> None:
        """The replica holds nothing any more."""
        self._blocks.pop(slot, None)
        self._tokens.pop(slot, None)


class _Active:
    """The requests in flight on one replica, oldest first, and the blocks of their prompts."""

    __slots__ = ("blocks", "requests", "tokens")

    def __init__(self) -> None:
        self.blocks: dict[int, list[int]] = {}  # block -> [requests with it, tokens]
        self.requests: deque[tuple[Sequence[int], int]] = deque()  # block hashes, tokens beyond the last full block
        self.tokens = 0


class ActiveBlocks:
    """Tokens of prompts in flight on each replica, a block that several of them share counted once.

    Source: ai-dynamo/dynamo, lib/kv-router/src/scheduling/config.rs (`router_track_active_blocks`,
    `router_assume_kv_reuse`, both on) and docs/design_docs/router_design.md (active decoding blocks, potential active
    blocks). Dynamo's router is told when a request ends. A policy is not, but knows how many are left: the oldest are
    taken to have ended first.
    """

    def __init__(self) -> None:
        self._active: dict[int, _Active] = {}
        self._holders: dict[int, int] = {}  # bit n: slot n

    def keep(self, slot: int, in_flight: int) -> int:
        """Drop the oldest requests until so many are left, and return the tokens of the replica's prompts."""
        active = self._active.get(slot)
        if active is None:
            return 0
        while len(active.requests) > in_flight:
            hashes, rest = active.requests.popleft()
            active.tokens -= rest
            for block in hashes:
                entry = active.blocks[block]
                entry[0] -= 1
                if entry[0] == 0:
                    del active.blocks[block]
                    active.tokens -= entry[1]
                    self._leave(block, 1 << slot)
        return active.tokens

    def shared(self, hashes: Sequence[int], offsets: Sequence[int]) -> dict[int, int]:
        """Return the canonical bytes of a prompt that belong to prompts in flight, for each slot that has any."""
        return leading_bytes(self._holders, hashes, offsets)

    def start(
        self, slot: int, hashes: Sequence[int], offsets: Sequence[int], tokens_per_byte: float, prompt_tokens: float
    ) -> None:
        """A request is sent to the replica.

        Args:
            slot: the replica.
            hashes: block hashes of the prompt.
            offsets: bytes covered by the first k blocks.
            tokens_per_byte: tokens of this prompt per canonical byte.
            prompt_tokens: tokens of the whole prompt.
        """
        active = self._active.get(slot)
        if active is None:
            active = self._active[slot] = _Active()
        blocks, holders, bit = active.blocks, self._holders, 1 << slot
        rest = round(prompt_tokens - offsets[len(hashes)] * tokens_per_byte) if hashes else round(prompt_tokens)
        active.requests.append((hashes, rest))
        active.tokens += rest
        for position, block in enumerate(hashes):
            entry = blocks.get(block)
            if entry is not None:
                entry[0] += 1
                continue
            tokens = round((offsets[position + 1] - offsets[position]) * tokens_per_byte)
            blocks[block] = [1, tokens]
            active.tokens += tokens
            holders[block] = holders.get(block, 0) | bit

    def forget(self, slot: int) -> None:
        """The replica has no requests any more."""
        self.keep(slot, 0)
        self._active.pop(slot, None)

    def _leave(self, block: int, bit: int) -> None:
        rest = self._holders[block] & ~bit
        if rest:
            self._holders[block] = rest
        else:
            del self._holders[block]
