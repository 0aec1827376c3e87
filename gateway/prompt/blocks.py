"""Chained block hashes of a canonical prompt: equal hashes mean equal prompts up to that point.

A prompt is cut at offsets that depend on nothing but the offset itself, and each block is hashed with the
hash of the block before it as seed. One integer therefore names a whole prefix, and a prompt that grows keeps
every hash it had. The idea is that of vLLM's KV block hashes (`vllm/v1/core/kv_cache_utils.py`), over bytes
instead of token ids.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from gateway.prompt.speedups import block_hashes

HASH_MASK = (1 << 60) - 1
"""Hashes keep 60 bits: CPython stores such an integer in 32 bytes instead of 48, at 25 ns a block."""


class BlockSchedule:
    """Where a canonical prompt is cut into blocks.

    Blocks are `block_bytes` long at first. With growth they double once the doubled block is at most
    `1 / growth` of the bytes before it, up to `max_block_bytes`: a long prompt costs few hashes, and what a
    match loses to its last unfinished block stays below `1 / growth` of the match.
    """

    __slots__ = ("_growth", "_parts", "block_bytes", "max_block_bytes", "offsets")

    def __init__(self, block_bytes: int = 256, growth: int = 32, max_block_bytes: int = 4096) -> None:
        """Make a schedule.

        Args:
            block_bytes: length of the first blocks, in bytes of the canonical prompt.
            growth: a block longer than `block_bytes` is at most `1 / growth` of its offset; 0 keeps all
                blocks equal.
            max_block_bytes: no block grows longer than this.

        Raises:
            ValueError: if a length is not positive or `growth` is negative.
        """
        if block_bytes < 1 or max_block_bytes < 1 or growth < 0:
            raise ValueError("block_bytes and max_block_bytes must be positive, growth not negative")
        self.block_bytes = block_bytes
        self.max_block_bytes = max_block_bytes
        self._growth = growth
        self.offsets: list[int] = [0]
        """`offsets[k]`: bytes covered by the first `k` blocks. Grows in place, never changes."""
        self._parts: list[slice[int, int, None]] = []

    def covered_bytes(self, blocks: int) -> int:
        """Bytes covered by the first `blocks` blocks; `offsets` reaches at least that far afterwards."""
        while len(self.offsets) <= blocks:
            self._append()
        return self.offsets[blocks]

    def hashes(self, data: bytes, seed: int) -> list[int]:
        """Hash the full blocks of `data`, chained.

        Args:
            data: a canonical prompt.
            seed: what must differ from the first block on when nothing may be shared (model, adapter, salt).

        Returns:
            One hash below 2**60 per full block: `h[i] = xxh3_64(block[i], seed=h[i - 1])`, `h[-1] = seed`.
        """
        length = len(data)
        offsets = self.offsets
        while offsets[-1] <= length:
            self._append()
        if block_hashes is not None:
            return block_hashes(data, seed, self.block_bytes, self._growth, self.max_block_bytes)
        hashes: list[int] = []
        whole: Any = data  # mypyc takes any index of bytes for a number
        # Names looked up once, and a loop instead of a comprehension: short prompts are the common case.
        digest, mask, append = xxh3_64_intdigest, HASH_MASK, hashes.append
        for part in self._parts[: bisect_right(offsets, length) - 1]:
            seed = digest(whole[part], seed) & mask
            append(seed)
        return hashes

    def _append(self) -> None:
        offset = self.offsets[-1]
        size = self.block_bytes
        if self._growth:
            while size * 2 <= self.max_block_bytes and size * 2 * self._growth <= offset:
                size *= 2
        self._parts.append(slice(offset, offset + size))
        self.offsets.append(offset + size)


DEFAULT_SCHEDULE = BlockSchedule()


# The constructor is written out, here and elsewhere on a request's path: the generated one stays Python when compiled.
@dataclass(slots=True, init=False)
class PromptKey:
    """What the gateway keeps of a prompt. The prompt itself is not kept."""

    hashes: list[int]
    """Chained block hashes; hash `i` names the whole prefix up to `offsets[i + 1]` of the schedule."""
    canonical_bytes: int
    """Length of the canonical prompt, the unfinished last block included."""
    exact_tokens: int | None
    """Tokens of a prompt given as token ids; None for text."""
    media: int
    """Images, videos, sounds and files: each is 16 bytes here and many tokens in the engine."""
    head_hash: int
    """Hash of the first block, or of the whole prompt when it is shorter than one."""
    computed_anew: bool
    """The engine computes all of it whatever it has cached, because the answer needs every token's logits."""
    end_hash: int
    """Names the whole prompt, its unfinished last block included; 0 where nothing could continue its answer."""
    continued_hash: int
    """The `end_hash` of the prompt whose answer this one continues; 0 if it continues none."""
    continued_blocks: int
    """Full blocks of that prompt."""
    continued_bytes: int
    """Canonical bytes of that prompt and its answer: what an engine that gave the answer has cached."""

    def __init__(
        self,
        hashes: list[int],
        canonical_bytes: int,
        exact_tokens: int | None = None,
        media: int = 0,
        head_hash: int = 0,
    ) -> None:
        """Make the key of a prompt that continues no answer."""
        self.hashes = hashes
        self.canonical_bytes = canonical_bytes
        self.exact_tokens = exact_tokens
        self.media = media
        self.head_hash = head_hash
        self.computed_anew = False
        self.end_hash = self.continued_hash = self.continued_blocks = self.continued_bytes = 0


def prompt_key(
    data: bytes,
    seed: int,
    exact_tokens: int | None = None,
    media: int = 0,
    schedule: BlockSchedule = DEFAULT_SCHEDULE,
    answer: tuple[int, int] | None = None,
) -> PromptKey:
    """Key of a canonical prompt.

    Args:
        data: the prompt.
        seed: as for `BlockSchedule.hashes`.
        exact_tokens: its tokens if it was given as token ids.
        media: its images, videos, sounds and files.
        schedule: where it is cut into blocks.
        answer: where in `data` the last answer stands that something follows, `(0, 0)` if there is none; None for
            prompts that are no conversation.
    """
    hashes = schedule.hashes(data, seed)
    if not hashes:
        return PromptKey(hashes, len(data), exact_tokens, media, xxh3_64_intdigest(data, seed) & HASH_MASK)
    key = PromptKey(hashes, len(data), exact_tokens, media, hashes[0])
    if answer is not None:
        offsets, blocks = schedule.offsets, len(hashes)
        key.end_hash = xxh3_64_intdigest(data[offsets[blocks] :], hashes[-1]) & HASH_MASK
        begin, end = answer
        if begin >= offsets[1]:
            blocks = bisect_right(offsets, begin) - 1
            key.continued_hash = xxh3_64_intdigest(data[offsets[blocks] : begin], hashes[blocks - 1]) & HASH_MASK
            key.continued_blocks, key.continued_bytes = blocks, end
    return key
