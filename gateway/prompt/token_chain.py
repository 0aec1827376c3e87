"""Chained hashes over token ids: one integer names a prefix of tokens, in blocks as an engine cuts them.

The chain is the gateway's own, not the engine's: engines hash with SHA-256 or XXH3, over pickle or CBOR, with seeds
nobody else may know. Their events carry the token ids, so the same chain can be made from an event and from a prompt,
and engines of all settings meet in it. What vLLM puts into its block hashes besides tokens (the adapter, `cache_salt`,
images) enters this chain as well, so that blocks are equal here exactly when they are there
(`vllm/v1/core/kv_cache_utils.py`, `generate_block_hash_extra_keys`).
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

import orjson
from xxhash import xxh3_64_intdigest

from gateway.prompt.blocks import HASH_MASK

TOKEN_BYTES = 4

MediaItem = tuple[str, int, int]
"""Identifier of an image or other medium, its first token, its number of tokens."""


class TokenChain:
    """How token ids become block hashes; see the module."""

    def root(self, adapter: str) -> int:
        """Start of the chains of one adapter's prompts; of the base model's with ""."""
        return root(adapter)

    def extend(
        self, parent: int, token_ids: Sequence[int], block_tokens: int, extra: Sequence[Sequence[object] | None] | None
    ) -> list[int]:
        """Hash the blocks that follow a prefix.

        Args:
            parent: hash of the prefix, or a root.
            token_ids: whole blocks of tokens.
            block_tokens: tokens per block.
            extra: what else distinguishes each block, as vLLM's events tell it (without the adapter); None for none.

        Raises:
            ValueError: an id that is no token.
        """
        return chain(parent, pack(token_ids), block_tokens, extra)


def pack(token_ids: Sequence[int]) -> bytes:
    """Four bytes per token id, little-endian.

    Raises:
        ValueError: an id that is no token.
    """
    try:
        packed = array("I", token_ids)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"not a token id: {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


@lru_cache(maxsize=1024)
def root(adapter: str) -> int:
    """Start of the chains of one adapter's prompts; of the base model's with ""."""
    return xxh3_64_intdigest(adapter) & HASH_MASK


def chain(
    parent: int, packed: bytes, block_tokens: int, extra: Sequence[Sequence[object] | None] | None = None
) -> list[int]:
    """Hash the full blocks of packed tokens: `h[i] = xxh3_64(block[i], seed=h[i - 1])`, below 2**60.

    Args:
        parent: hash of the prefix before them, or a root.
        packed: as by `pack`; what does not fill a block is left out.
        block_tokens: tokens per block.
        extra: keys of each block besides its tokens, None for none; they are hashed into the seed.
    """
    size = block_tokens * TOKEN_BYTES
    length = len(packed) // size * size
    if length != len(packed):
        packed = packed[:length]
    digest, mask, seed = xxh3_64_intdigest, HASH_MASK, parent
    blocks = struct.iter_unpack(f"{size}s", packed)
    if extra is None:
        return [seed := digest(block, seed) & mask for (block,) in blocks]
    hashes = []
    for (block,), keys in zip(blocks, extra, strict=False):
        if keys:
            seed = digest(_key_bytes(keys), seed)
        seed = digest(block, seed) & mask
        hashes.append(seed)
    return hashes


def _key_bytes(keys: Sequence[object]) -> bytes:
    return orjson.dumps(keys, default=_hex)


def _hex(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError


class TokenPrompt:
    """A prompt as the engine will see it: tokens, and what else its block hashes depend on.

    Attributes:
        count: tokens.
    """

    __slots__ = ("_hashes", "_media", "_packed", "_root", "_salt", "count")

    _packed: bytes | None

    def __init__(
        self, packed: bytes, adapter: str = "", cache_salt: str | None = None, media: Sequence[MediaItem] = ()
    ) -> None:
        """Take over a tokenised prompt.

        Args:
            packed: its token ids, see `pack`.
            adapter: name of the adapter that serves it; "" for the base model.
            cache_salt: vLLM's `cache_salt`.
            media: images and other media, in the order of their tokens.
        """
        self.count = len(packed) // TOKEN_BYTES
        self._packed = packed
        self._root = root(adapter)
        self._salt = cache_salt or None
        self._media = media
        self._hashes: dict[int, array[int]] = {}

    def hashes(self, block_tokens: int) -> "array[int] | None":
        """Return the hashes of the full blocks of so many tokens; computed once per size.

        None if the prompt has been sealed and the size was not asked for before.
        """
        known = self._hashes.get(block_tokens)
        if known is None and self._packed is not None:
            made = chain(self._root, self._packed, block_tokens, self._extra_keys(block_tokens))
            known = self._hashes[block_tokens] = array("Q", made)
        return known

    def seal(self) -> None:
        """Forget the tokens: a request that runs for minutes need not keep them."""
        self._packed = None

    def _extra_keys(self, block_tokens: int) -> list[list[object] | None] | None:
        if not self._media and self._salt is None:
            return None
        keys: list[list[object] | None] = [None] * (self.count // block_tokens)
        for identifier, first, length in self._media:
            # Every block that shares a token with the medium knows it, and where in the block it begins.
            for number in range(first // block_tokens, -(-(first + length) // block_tokens)):
                if number < len(keys):
                    of_block = keys[number] or []
                    of_block.append([identifier, first - number * block_tokens])
                    keys[number] = of_block
        if self._salt is not None and keys:
            keys[0] = [*(keys[0] or ()), self._salt]
        return keys
