"""Prompt text from the block ids of a trace.

A trace names its prompt blocks by id and withholds the text. Here every id expands to the same text each
time, so that prompts share exactly the prefixes the trace says they share, and two different ids differ
within their first `HEAD_BYTES` bytes, so that nothing else is shared.

A block is a head that encodes the id one to one, followed by a slice of a large text of common English
words at an offset drawn from the id. Slicing costs less than looking a block up in a cache, so there is
none.
"""

import random
from collections.abc import Sequence

import orjson

from loadtests.trace import BLOCK_TOKENS

HEAD_BYTES = 16
"""Bytes at a block's start that are unique to its id: two made-up words of seven letters and their spaces."""

_CORPUS_BYTES = 1 << 20
_HEAD_LETTERS = 14  # 26^14 > 2^64: every mixed id has a head of its own
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_PAIRS = tuple(first + second for first in _ALPHABET for second in _ALPHABET)
_MASK_64 = (1 << 64) - 1

# Common words are one token each in the usual vocabularies, and with their space about four bytes long:
# on a real engine the prompt then has about as many tokens as the trace says.
_WORDS = tuple(
    word
    for line in (
        "a i an as at be by do go he if in is it me my no of on or so to up us we act add age ago air all",
        "and any are arm art ask bad bag bar bed big bit box boy bus but buy can car cat cut day did die",
        "dog dry due eat egg end eye far few fit fly for fun gas get got had has her him his hit hot how",
        "ice its job key kid law lay led leg let lie lot low man map may men met mix new nor not now off",
        "oil old one our out own pay per put ran raw red run sat saw say sea see set she sir sit six sky",
        "son sum sun tax tea ten the tie too top try two use war was way who why win yes yet you area",
        "away back base been best blue book both call came care case city come cost data does done door",
        "down each even ever face fact feel five food form four from full gave girl give goes gone good",
        "half hand hard have head hear help here high home hour idea into just keep kind knew know land",
        "last late left less life like line list live long look made make many mind more most move much",
        "must name near need next only open over page part past plan play real rest road room same seen",
        "side some soon stop such sure take talk tell than that them then they this time told took town",
        "true turn upon very view want week well went were what when will wish with word work year about",
        "after again below early every first found great group house large later light might money never",
        "night often order other place plant point power quite right shall small sound state still study",
        "their there these thing think three today under until water where which while white whole world",
        "would write young",
    )
    for word in line.split()
)


def _mix(value: int) -> int:
    """Splitmix64's finaliser: a one-to-one mix of 64 bits (Steele, Lea, Flood: Fast splittable PRNGs,
    2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


class PromptSynthesizer:
    """Expands block ids to text. Equal seeds and ids give equal text in any process."""

    def __init__(self, seed: int = 0, bytes_per_token: int = 4) -> None:
        """Prepare the text that blocks are cut from.

        Args:
            seed: a different seed gives different text for every id.
            bytes_per_token: ASCII bytes that stand for one token, at least 1.
        """
        if bytes_per_token < 1:
            raise ValueError(f"bytes_per_token must be at least 1, got {bytes_per_token}")
        self.bytes_per_token = bytes_per_token
        self.block_bytes = BLOCK_TOKENS * bytes_per_token
        self._salt = _mix(seed & _MASK_64)
        needed = _CORPUS_BYTES + self.block_bytes
        words = random.Random(seed).choices(_WORDS, k=needed // 2)  # a word and its space are two bytes or more
        self._corpus = " ".join(words)[:needed]

    def block(self, hash_id: int) -> str:
        """Text of a whole block: `BLOCK_TOKENS` x `bytes_per_token` ASCII characters."""
        mixed = _mix(hash_id ^ self._salt)
        offset = mixed % _CORPUS_BYTES
        rest = mixed
        pairs = []
        for _ in range(_HEAD_LETTERS // 2):
            rest, pair = divmod(rest, 676)
            pairs.append(_PAIRS[pair])
        letters = "".join(pairs)
        return f"{letters[:7]} {letters[7:]} {self._corpus[offset : offset + self.block_bytes - HEAD_BYTES]}"

    def text(self, hash_ids: Sequence[int], input_tokens: int) -> str:
        """Text of a prompt, `input_tokens` x `bytes_per_token` ASCII characters.

        Args:
            hash_ids: ids of the prompt's blocks; they must cover `input_tokens`.
            input_tokens: length of the prompt; the last block is cut to it.
        """
        if len(hash_ids) * BLOCK_TOKENS < input_tokens:
            raise ValueError(f"{len(hash_ids)} blocks of {BLOCK_TOKENS} do not cover {input_tokens} tokens")
        return "".join(map(self.block, hash_ids))[: input_tokens * self.bytes_per_token]


def chat_body(text: str, model: str, max_tokens: int) -> bytes:
    """A streaming chat completion request of one user message that asks for exactly `max_tokens` tokens.

    `ignore_eos` is vLLM's: the answer has the trace's length whatever the model would have said.
    """
    return orjson.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
