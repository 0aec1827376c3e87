"""What the gateway learns from a response body while it passes: the first token and the final usage.

The observer never changes, delays or splits the bytes. It parses events only until the first token has been seen;
after that it keeps references to the last few pieces, because usage stands in the last event before `[DONE]`.
"""

import re
from collections import deque
from dataclasses import dataclass
from typing import Any

import orjson

_MAX_EVENT_BYTES = 1 << 20
_TAIL_PIECES = 8
_TAIL_PIECE_BYTES = 8192
_SMALL_PIECE_BYTES = 64
# Generated text is inside JSON strings, where line breaks and quotes are escaped. So none of these, with a bare line
# break or bare quotes, is ever generated text that happens to look like it.
_ENDINGS = (  # OpenAI, Anthropic messages, OpenAI responses
    b"\ndata: [DONE]",
    b"\ndata:[DONE]",
    b'"type":"message_stop"',
    b'"type":"response.completed"',
    b'"type":"response.incomplete"',
    b'"type":"response.failed"',
)
_ERRORS = (b'data: {"error"', b'"type":"error"', b'"type":"response.failed"')
_TOKEN_FIELDS = (
    "content",
    "reasoning",
    "reasoning_content",
    "tool_calls",
    "function_call",
    "refusal",
    "audio",
)


@dataclass(slots=True, init=False)
class Usage:
    """Token counts the engine reports.

    Attributes:
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens of the answer.
        cached_tokens: prompt tokens taken from the prefix cache; None when the engine does not say.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

    def __init__(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> None:
        """Put together what has been counted."""
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens
        self.cached_tokens = cached_tokens


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def parse_usage(usage: Any) -> Usage | None:
    """Return the counts of a `usage` object in OpenAI's or Anthropic's field names, None when it is neither."""
    if not isinstance(usage, dict):
        return None
    prompt = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
    completion = _count(usage.get("completion_tokens", usage.get("output_tokens", 0)))
    if prompt is None or completion is None:
        return None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    if isinstance(details, dict):
        return Usage(prompt, completion, _count(details.get("cached_tokens")))
    cached = _count(usage.get("cache_read_input_tokens"))
    # Anthropic, "Prompt caching": "total_input_tokens = cache_read_input_tokens + cache_creation_input_tokens +
    # input_tokens". OpenAI's counts include the cached tokens.
    prompt += (cached or 0) + (_count(usage.get("cache_creation_input_tokens")) or 0)
    return Usage(prompt, completion, cached)


# Usage holds numbers, nulls, arrays of numbers and shallow objects, so its end is the matching brace two levels deep.
_USAGE = re.compile(rb'"usage":\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


def usage_in(body: bytes) -> Usage | None:
    """Return the last usage object in a JSON body or the tail of an event stream.

    Inside a JSON string the quotes would be escaped, so the raw bytes `"usage":` are always a key. Anthropic's API
    counts the prompt in its first event and the answer in its last; what is found in both is put together.
    """
    answer_tokens: int | None = None
    at = body.rfind(b'"usage":')
    while at >= 0:
        match = _USAGE.match(body, at)
        if match is not None:
            try:
                found = orjson.loads(match[1])
            except orjson.JSONDecodeError:
                return None
            usage = parse_usage(found)
            if usage is not None:
                if answer_tokens is not None:
                    usage.completion_tokens = answer_tokens
                return usage
            if answer_tokens is None:
                answer_tokens = _count(found.get("output_tokens"))
        at = body.rfind(b'"usage":', 0, at)
    return None


def has_token(event: Any) -> bool:
    """Say whether a parsed event carries generated output.

    Content, reasoning and tool-call deltas count; the role chunk, empty `choices` and pure usage do not.
    """
    if not isinstance(event, dict):
        return False
    choices = event.get("choices")
    if isinstance(choices, list):
        for choice in choices:
            if not isinstance(choice, dict):
                continue
            delta = choice.get("delta")
            if isinstance(delta, dict):
                for field in _TOKEN_FIELDS:
                    if delta.get(field):
                        return True
            # A token that ends inside a character has an id, if ids are asked for, but no text yet.
            if choice.get("text") or choice.get("token_ids"):
                return True
        return False
    kind = event.get("type")
    if isinstance(kind, str):
        if kind == "content_block_start":
            block = event.get("content_block")
            return isinstance(block, dict) and block.get("type") == "tool_use"
        return kind == "content_block_delta" or kind.endswith(".delta")
    return False


class StreamObserver:
    """Watches one event stream.

    Attributes:
        first_token_seen: the first generated token has passed.
    """

    __slots__ = ("_failed", "_finale_seen", "_pending", "_tail", "first_token_seen")

    def __init__(self) -> None:
        self._pending = b""
        self._tail: deque[bytes] = deque(maxlen=_TAIL_PIECES)
        self._failed = False
        self._finale_seen = False
        self.first_token_seen = False

    def feed(self, data: bytes) -> bool:
        """Look at the next bytes of the body; return True exactly once, when the first token is among them."""
        if _SMALL_PIECE_BYTES <= len(data) <= _TAIL_PIECE_BYTES:
            self._tail.append(data)
        else:
            self._keep(data)
        if self.first_token_seen:
            return False
        searched = len(self._pending)
        pending = self._pending + data
        start = 0
        while True:
            end = pending.find(b"\n", searched)
            if end < 0:
                break
            line = pending[start:end]
            start = searched = end + 1
            if line.startswith(b"data:") and self._look(line[5:]):
                self._first_token()
                return True
        self._pending = pending[start:] if start else pending
        if len(self._pending) > _MAX_EVENT_BYTES:
            # An event this large is output of some kind; do not hold more of it.
            self._first_token()
            return True
        return False

    def _keep(self, data: bytes) -> None:
        """Add a piece of unusual size to the tail."""
        tail = self._tail
        if len(data) > _TAIL_PIECE_BYTES:
            self._finale_seen = self._finale_seen or any(ending in data for ending in _ENDINGS)
            tail.append(data[-_TAIL_PIECE_BYTES:])
        elif tail and len(tail[-1]) < _TAIL_PIECE_BYTES:
            # However finely a stream is cut, its last event stays in the tail.
            tail[-1] += data
        else:
            tail.append(data)

    def _first_token(self) -> None:
        self.first_token_seen = True
        self._pending = b""

    def _look(self, payload: bytes) -> bool:
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError:
            return False
        if isinstance(event, dict) and event.get("error"):
            self._failed = True
        return has_token(event)

    def tail(self) -> bytes:
        """Return the last bytes seen, enough to hold the final events."""
        return b"".join(self._tail)

    @property
    def failed(self) -> bool:
        """Say whether an error event has passed, before the first token or among the last events."""
        if self._failed:
            return True
        tail = self.tail()
        return any(error in tail for error in _ERRORS)

    def ended_properly(self) -> bool:
        """Say whether the stream closed with the API's own last event, for bodies delimited by connection close."""
        tail = b"\n" + self.tail()
        return self._finale_seen or any(ending in tail for ending in _ENDINGS)

    def at_event_boundary(self) -> bool:
        """Say whether the bytes so far end between two events."""
        tail = self.tail()
        return not tail or tail.endswith((b"\n\n", b"\r\n\r\n"))
