"""The requests of the overhead benchmark: chat prompts shaped like conversations under way.

Some conversations are active at a time, each sends its turns in order, and every turn repeats the one before and adds
an answer and a question. Conversations differ from the first user message on, and share the system prompt before it.
Nothing is sent twice, so prefix maps and radix trees meet what they meet in service: a known prefix, a new end, and now
and then a new conversation. Request i is the same for equal arguments, whoever asks.

The bytes are built beforehand; a conversation of its own costs the load generator only the number written into it.
"""

import random
from functools import cache
from typing import NamedTuple

import orjson

MODEL = "bench"
ACTIVE_CONVERSATIONS = 64
TURNS = 4
VARIANTS = 4
"""Different texts; every fourth conversation has characters beyond ASCII, as much real text has."""

_MARK = "%conversation%"
_NUMBER = b"%012d"
_SOUP_WORDS = 40_000
_VOCABULARY = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said what "
    "its about than into them can only other time new some could these two may first then do any like my now over "
    "such our man me even most made after also did many off before must well back through years where much your way "
    "down should because each just those people too little state good very make world still see own work long here "
    "between both being under never day same another know while last might us great old year come since against go "
    "prefix replica prefill decode token request cache memory latency router schedule batch engine return value None"
)


class Turn(NamedTuple):
    """The constant parts of one request; the conversation's number goes between them."""

    lead: bytes
    """HTTP head and body up to the number."""
    rest: bytes
    """Body after the number."""


@cache
def _soup(ascii_only: bool) -> str:
    """About 200 KB of words with line breaks, quotes and the like, from which all texts are cut."""
    source = random.Random(7)
    words = source.choices(_VOCABULARY.split(), k=_SOUP_WORDS)
    for position in range(0, len(words), 13):
        words[position] += ".\n"
    for position in range(0, len(words), 37):
        words[position] = f'"{words[position]}"'
    if not ascii_only:
        for position in range(0, len(words), 41):
            words[position] += " \u2013 caf\u00e9"
    return " ".join(words)


def _text(source: random.Random, length: int, ascii_only: bool) -> str:
    soup = _soup(ascii_only)
    pieces: list[str] = []
    while length > 0:
        start = source.randrange(len(soup) // 2)
        pieces.append(soup[start : start + length])
        length -= len(pieces[-1])
    return "".join(pieces)


def _messages(size_bytes: int, variant: int, turn: int) -> list[dict[str, str]]:
    """Messages of one turn; those of the next one begin with them."""
    message_bytes = min(max(size_bytes // 8, 128), 4096)
    # Turns are centred on the size: the conversation has run for a while when its first turn here is sent.
    count = max(size_bytes // message_bytes - (TURNS - 1), 2) | 1
    source = random.Random(f"{size_bytes} {variant}")
    shared = _text(random.Random(-1), message_bytes // 2, True)
    messages = [{"role": "system", "content": shared}]
    for number in range(count + 2 * turn):
        start = f"{size_bytes}-byte conversation {_MARK}: " if number == 0 else ""
        text = _text(source, max(message_bytes - len(start) - 40, 16), variant != VARIANTS - 1)
        messages.append({"role": "assistant" if number % 2 else "user", "content": start + text})
    return messages


class Requests:
    """An endless sequence of requests of about one size."""

    def __init__(self, size_bytes: int, host: str, stream: bool = False) -> None:
        """Build the texts.

        Args:
            size_bytes: mean length of the bodies.
            host: value of the Host header.
            stream: ask for server-sent events.
        """
        self.turns = [
            [self._turn(size_bytes, variant, turn, host, stream) for turn in range(TURNS)]
            for variant in range(VARIANTS)
        ]
        self._next = 0

    @staticmethod
    def _turn(size_bytes: int, variant: int, turn: int, host: str, stream: bool) -> Turn:
        body = {"model": MODEL, "messages": _messages(size_bytes, variant, turn), "temperature": 0.7, "max_tokens": 512}
        if stream:
            body |= {"stream_options": {"include_usage": True}, "stream": True}
        before, after = orjson.dumps(body).split(_MARK.encode())
        length = len(before) + len(_NUMBER % 0) + len(after)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAccept: application/json\r\n"
            "User-Agent: OpenAI/Python 2.8.0\r\nAuthorization: Bearer sk-0123456789abcdef0123456789abcdef\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        )
        return Turn(head.encode() + before, after)

    def request(self, number: int) -> tuple[bytes, bytes, bytes]:
        """The parts of request `number`, to be written one after the other.

        Active conversations take turns, each at a different one of its turns, so that new and known prompts mix.
        """
        round_, slot = divmod(number, ACTIVE_CONVERSATIONS)
        generation, turn = divmod(round_ + slot, TURNS)
        conversation = generation * ACTIVE_CONVERSATIONS + slot
        lead, rest = self.turns[conversation % VARIANTS][turn]
        return lead, _NUMBER % conversation, rest

    def skip_to(self, number: int) -> None:
        """Go on with request `number`."""
        self._next = number

    def __next__(self) -> tuple[bytes, bytes, bytes]:
        """The next request."""
        number = self._next
        self._next = number + 1
        return self.request(number)
