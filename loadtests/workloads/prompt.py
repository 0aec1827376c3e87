"""Prompts known by what they share instead of by their text.

A prompt is a row of parts. A part is so many tokens of some content, and the content is only an id: two parts with the
same id hold the same tokens, the shorter one a prefix of the longer; parts with different ids differ from their first
token on. That is all that prefix caches care about, and it costs a few dozen bytes where the text would cost 50 KB.

A prefix is named by a number that depends on the parts up to its end: `base of the part + tokens into it`, where the
base is a hash of the name of the prefix before the part and of the part's content. Names at any spacing, the engine's
16-token blocks or the gateway's growing ones, are therefore plain ranges.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

# Bases keep 59 bits: with the tokens of a part added they still fit the 60 bits that the gateway's hashes have.
_MASK = (1 << 59) - 1


class Part(NamedTuple):
    """A run of tokens."""

    content: int
    """Which tokens, 0 to 2^64 - 1."""
    tokens: int
    """How many, at least 1."""
    role: str = "user"
    """Who speaks, for chat messages: system, user, assistant or tool."""


class Prompt:
    """A row of parts and the names of its prefixes. Immutable.

    Attributes:
        parts: what it consists of.
        tokens: its length.
    """

    __slots__ = ("_bases", "_starts", "parts", "tokens")

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.parts: tuple[Part, ...] = ()
        self.tokens = 0
        self._starts: list[int] = []
        self._bases: list[int] = []
        self._append(tuple(parts))

    def extended(self, *parts: Part) -> "Prompt":
        """A longer prompt that begins with this one."""
        longer = Prompt()
        longer.parts = self.parts
        longer.tokens = self.tokens
        longer._starts = self._starts.copy()
        longer._bases = self._bases.copy()
        longer._append(parts)
        return longer

    def __repr__(self) -> str:
        return f"<Prompt of {self.tokens} tokens in {len(self.parts)} parts>"

    @property
    def name(self) -> int:
        """The name of the whole prompt."""
        return self._bases[-1] + self.tokens - self._starts[-1] if self._bases else 0

    @property
    def last_answer(self) -> tuple[int, int]:
        """Where the last answer of the model stands that something follows, in tokens; 0 and 0 if there is none."""
        begin = end = 0
        following = 0
        for part, start in zip(reversed(self.parts), reversed(self._starts), strict=True):
            if part.role != "assistant":
                if end:
                    break
                following = start
            elif following:
                begin, end = start, following
        return begin, end

    def names_every(self, block_tokens: int) -> list[int]:
        """Names of the prefixes of `block_tokens`, 2 x `block_tokens`, ... tokens: an engine's block hashes."""
        names: list[int] = []
        ends = [*self._starts[1:], self.tokens]
        for start, end, base in zip(self._starts, ends, self._bases, strict=True):
            first = start - start % block_tokens + block_tokens
            names.extend(range(base + first - start, base + end - start + 1, block_tokens))
        return names

    def names_at(self, positions: Sequence[int]) -> list[int]:
        """Names of the prefixes of so many tokens.

        Args:
            positions: lengths in tokens, ascending, from 1; those beyond the prompt's end are left out.
        """
        names: list[int] = []
        done = 0
        ends = [*self._starts[1:], self.tokens]
        for start, end, base in zip(self._starts, ends, self._bases, strict=True):
            until = bisect_right(positions, end, done)
            if until > done:
                shift = base - start
                names.extend([shift + position for position in positions[done:until]])
                done = until
        return names

    def _append(self, parts: tuple[Part, ...]) -> None:
        name = self.name
        tokens = self.tokens
        for part in parts:
            if part.tokens < 1:
                raise ValueError(f"a part needs at least one token: {part}")
            base = xxh3_64_intdigest(part.content.to_bytes(8, "little"), name) & _MASK
            self._starts.append(tokens)
            self._bases.append(base)
            tokens += part.tokens
            name = base + part.tokens
        self.tokens = tokens
        self.parts += parts
