"""Text to tokens, with a memory for pieces of text seen before.

A tokenizer looks for its added tokens first, and tokenises what lies between them piece by piece; nothing of one piece
depends on another (`tokenizers`, `AddedVocabulary::extract_and_normalize`). So a text may be cut before every added
token and tokenised piece by piece, with the same outcome, and pieces that were seen before need not be tokenised again:
in the next turn of a conversation only what is new, and in another conversation not the system prompt.

This does not hold for added tokens that take the white space on their left, that must stand between words, or that are
looked for in normalised text; nothing is cut at those, and if there are any of the latter two kinds, nowhere.
"""

import re
import threading
from collections import OrderedDict

from tokenizers import Tokenizer
from xxhash import xxh3_128_digest

from gateway.prompt.token_chain import pack

_ENTRY_BYTES = 200
"""What an entry of the memory takes besides its tokens."""
_PROBES = (
    " a b  c\n\nd",
    "  \n x",
    "\tdef f(x):\n    return x  ",
    "",
    "Grüße, 世界! 🙂",
    "x",
    "\n",
)
"""What a cut is tried on when a tokenizer is loaded: white space at both ends is what breaks."""


class TextTokens:
    """One model's tokenizer. Safe to use from several threads.

    Attributes:
        hits, misses: pieces found and not found in the memory.
        cuts: texts are cut before added tokens.
    """

    def __init__(self, tokenizer: Tokenizer, cache_bytes: int) -> None:
        """Take over a tokenizer.

        Args:
            tokenizer: its truncation and padding are switched off.
            cache_bytes: memory for tokens of pieces.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._capacity_bytes = cache_bytes
        self._held_bytes = 0
        self._pieces: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = 0
        self.misses = 0
        self._around = _around(tokenizer)
        self._cut = _cut_pattern(tokenizer)
        if self._cut is not None and not self._verified():
            self._cut = None
        self.cuts = self._cut is not None

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        """Tokenise a text.

        Args:
            text: the text; added tokens in it are recognised, as the engine does.
            add_special_tokens: put the tokens around it that the tokenizer puts around a prompt.

        Returns:
            Four bytes per token, see `gateway.prompt.token_chain.pack`.
        """
        if add_special_tokens:
            before, after = self._around
            return before + self.encode(text, False) + after
        return b"".join(self._remembered(self._split(text) if self._cut is not None else [text]))

    def whole(self, text: str, add_special_tokens: bool) -> bytes:
        """Tokenise a text in one piece, memory left out: what `encode` must be equal to."""
        return pack(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def _split(self, text: str) -> list[str]:
        assert self._cut is not None
        pattern, cut = self._cut
        starts = [match.start() for match in pattern.finditer(text) if match.group() in cut]
        if not starts or starts[0]:
            starts.insert(0, 0)
        ends = starts[1:]
        ends.append(len(text))
        return [text[start:end] for start, end in zip(starts, ends, strict=True)]

    def _remembered(self, texts: list[str]) -> list[bytes]:
        """Tokens of pieces; those not in the memory are made together, which gives way to other threads once."""
        # A lone surrogate cannot come from JSON in UTF-8, but from an escape it may.
        keys = [xxh3_128_digest(text.encode("utf-8", "surrogatepass")) for text in texts]
        missing: dict[bytes, str] = {}
        found: dict[bytes, bytes] = {}
        pieces = self._pieces
        with self._lock:
            for key, text in zip(keys, texts, strict=True):
                tokens = pieces.get(key)
                if tokens is None:
                    missing[key] = text
                else:
                    pieces.move_to_end(key)
                    found[key] = tokens
            self.misses += len(missing)
            self.hits += len(keys) - len(missing)
        if missing:
            made = dict(zip(missing, self._tokenise(list(missing.values())), strict=True))
            found.update(made)
            with self._lock:
                for key, tokens in made.items():
                    self._remember(key, tokens)
        return [found[key] for key in keys]

    def _tokenise(self, texts: list[str]) -> list[bytes]:
        if len(texts) == 1:
            return [self.whole(texts[0], False)]
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [pack(encoding.ids) for encoding in encodings]

    def _remember(self, key: bytes, tokens: bytes) -> None:
        size = len(tokens) + _ENTRY_BYTES
        if key in self._pieces or size > self._capacity_bytes:
            return
        self._pieces[key] = tokens
        self._held_bytes += size
        while self._held_bytes > self._capacity_bytes:
            _, dropped = self._pieces.popitem(last=False)
            self._held_bytes -= len(dropped) + _ENTRY_BYTES

    @property
    def held_bytes(self) -> int:
        """Memory the pieces take."""
        return self._held_bytes

    def _verified(self) -> bool:
        """Try cuts before every kind of added token on awkward text."""
        contents = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        for content in contents[:64]:
            for left in _PROBES:
                text = left + content + "".join(right + content for right in _PROBES)
                pieces = b"".join([self.whole(piece, False) for piece in self._split(text)])
                if pieces != self.whole(text, False):
                    return False
        return True


def _around(tokenizer: Tokenizer) -> tuple[bytes, bytes]:
    """What the tokenizer puts before and after a prompt."""
    ids, inner = tokenizer.encode("x").ids, tokenizer.encode("x", add_special_tokens=False).ids
    for start in range(len(ids) - len(inner) + 1):
        if ids[start : start + len(inner)] == inner:
            return pack(ids[:start]), pack(ids[start + len(inner) :])
    return b"", b""


def _cut_pattern(tokenizer: Tokenizer) -> tuple[re.Pattern[str], frozenset[str]] | None:
    """A pattern that finds added tokens as the tokenizer does, leftmost and longest; and those that are cut at."""
    added = tokenizer.get_added_tokens_decoder().values()
    plain = [token for token in added if token.content and not token.normalized]
    cut = frozenset(token.content for token in plain if not token.lstrip)
    if not cut or any(token.single_word for token in plain):
        return None
    longest_first = sorted((token.content for token in plain), key=lambda content: -len(content))
    return re.compile("|".join(map(re.escape, longest_first))), cut
