"""The tokeniser: UTF-8 in pieces of equal length, block hashes over them, and made-up answers.

Prefix-stable by construction: a longer text has the shorter one's tokens, but for the last piece. A token's
id is its piece read as a little-endian number, so ids and text convert into each other without a vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

_WIDE_BYTES = 8
_WIDE_ROOT = 0x9E3779B97F4A7C15

# Three letters and a space: four bytes, one token of the usual width.
_WORDS = tuple(
    word.encode() + b" "
    for line in (
        "act add age ago aid aim air all and any arm art ask bad bag bar bay bed big bit box boy bus but buy",
        "can car cat cup cut day dog dry due ear eat egg end eye far few fit fly for fun get got guy hat her",
        "him his hit hot how ice ill its job joy key kid lap law lay leg let lie lot low man map may men met",
        "mix mud net new nor not now oak odd off oil old one our out own pan pay pen per pie put ran red row",
        "run sad say sea see set she sir sit six sky son sun ten the tie too top two use was way who you yes",
        "cow log ash fog hay",
    )
    for word in line.split()
)
_WORD_OF_BYTE = (_WORDS * 3)[:256]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenised prompt: `count` pieces of `width` bytes each, the last one padded with zeros."""

    data: bytes
    width: int

    @property
    def count(self) -> int:
        """Length in tokens."""
        return len(self.data) // self.width

    def ids(self) -> list[int]:
        """The token ids."""
        data, width = self.data, self.width
        if width == 4:
            return list(struct.unpack(f"<{self.count}I", data))
        return [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]


class Tokenizer:
    """Text to tokens and back.

    Args:
        bytes_per_token: bytes of a piece, 1 to 7.
        block_size: tokens of a KV block.
        seed: other seeds make other answers.
    """

    def __init__(self, bytes_per_token: int, block_size: int, seed: int) -> None:
        self.width = bytes_per_token
        self._block_size = block_size
        self._seed = seed

    def from_text(self, text: bytes) -> Tokens:
        """Tokenise UTF-8 text."""
        return Tokens(text + bytes(-len(text) % self.width), self.width)

    def from_ids(self, ids: Sequence[int]) -> Tokens:
        """Take over token ids. Those of this tokeniser stand for the text they came from.

        Raises:
            ValueError: an id is negative or beyond 64 bits.
            TypeError: an id is not a whole number.
        """
        try:
            if self.width == 4:
                return Tokens(struct.pack(f"<{len(ids)}I", *ids), 4)
            if not ids or max(ids) < 1 << 8 * self.width:
                return Tokens(b"".join(token.to_bytes(self.width, "little") for token in ids), self.width)
        except (struct.error, OverflowError, AttributeError):
            pass
        try:
            return Tokens(struct.pack(f"<{len(ids)}Q", *ids), _WIDE_BYTES)
        except struct.error as error:
            if not all(isinstance(token, int) for token in ids):
                raise TypeError("token ids must be integers") from error
            raise ValueError("token ids must be between 0 and 2^64 - 1") from error

    def text(self, tokens: Tokens) -> str:
        """The text of tokens; what is no UTF-8 is replaced."""
        if tokens.width == self.width:
            return tokens.data.rstrip(b"\0").decode(errors="replace")
        return "".join(self.piece(token) for token in tokens.ids())

    def piece(self, token: int) -> str:
        """The text of one token."""
        return token.to_bytes(_WIDE_BYTES, "little").rstrip(b"\0").decode(errors="replace")

    def root(self, *parts: str) -> int:
        """Start of a hash chain: prompts with different adapters or salts share no block."""
        return xxhash.xxh3_64_intdigest("\0".join(parts).encode())

    def answer(self, prompt: Tokens, root: int, choice: int, tokens: int) -> bytes:
        """The first `tokens` tokens of the made-up answer to a prompt: ASCII words, all tokens full pieces.

        Equal prompts get equal answers; a longer answer starts with the shorter one.
        """
        name = xxhash.xxh3_64_digest(prompt.data, root) + struct.pack("<Qq", choice, self._seed)
        length = tokens * self.width
        words = hashlib.shake_256(name).digest(-(-length // 4))
        return b"".join([_WORD_OF_BYTE[byte] for byte in words])[:length]

    def joined(self, prompt: Tokens, answer: bytes) -> bytes:
        """The pieces of a prompt and its answer, all as wide as the prompt's."""
        width = prompt.width
        if width != self.width:
            answer = b"".join(answer[i : i + self.width].ljust(width, b"\0") for i in range(0, len(answer), self.width))
        return prompt.data + answer

    def block_hashes(self, prompt: Tokens, answer: bytes, root: int) -> list[int]:
        """Chained hashes of the full blocks of a prompt and its answer; each names the prefix up to its end."""
        width = prompt.width
        if width != self.width:
            root ^= _WIDE_ROOT
        data = self.joined(prompt, answer)
        block_bytes = self._block_size * width
        digest = xxhash.xxh3_64_intdigest
        block_hash = root
        blocks = struct.iter_unpack(f"{block_bytes}s", data[: len(data) // block_bytes * block_bytes])
        return [block_hash := digest(block, block_hash) for (block,) in blocks]
