"""What a client learns from the bytes of one streamed chat completion, without I/O.

`StreamObserver` takes the body's bytes as they come and finds the first token and the final usage. It parses
events only until it has seen the first token, then notes arrival times and keeps a tail: at thousands of
chunks a second a client that parses each of them measures itself.
"""

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

_TAIL_BYTES = 4096
"""Kept of the end of a stream: the usage event, [DONE] and an error event fit several times."""


@dataclass(slots=True)
class ChatResult:
    """What one request looked like from the client. Times are seconds of the client's monotonic clock."""

    sent_s: float
    status: int = 0
    """HTTP status, 0 when no response came."""
    error: str | None = None
    """Kind of failure, None when the stream ended well: `http_<status>`, `connect`, `timeout`,
    `disconnected`, `error_event`, `truncated` (no [DONE]), `no_content` or `no_usage`."""
    detail: str = ""
    """The failure in the server's or the library's words, shortened."""
    first_token_s: float | None = None
    ended_s: float = 0.0
    chunk_times_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Arrivals of streamed bytes from the first token on; chunks that arrive together count once."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    replica: str | None = None
    policy: str | None = None
    predicted_ttft_ms: float | None = None
    expected_cached_tokens: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first, None when there was one token at most."""
        if self.completion_tokens < 2 or self.first_token_s is None or not self.chunk_times_s:
            return None
        return (self.chunk_times_s[-1] - self.first_token_s) / (self.completion_tokens - 1)


def _payloads(data: bytes) -> Iterator[bytes]:
    """Payloads of the `data:` lines of whole events."""
    for line in data.split(b"\n"):
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _event(payload: bytes) -> dict[str, Any]:
    """The JSON object of an event, empty when it is something else, as [DONE] is."""
    try:
        event = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return {}
    return event if isinstance(event, dict) else {}


def answer_text(body: bytes) -> str:
    """All content of a streamed chat completion of one choice, from the whole body."""
    pieces: list[str] = []
    for payload in _payloads(body):
        for choice in _event(payload).get("choices") or ():
            pieces.append((choice.get("delta") or {}).get("content") or "")
    return "".join(pieces)


def carries_token(event: Mapping[str, Any]) -> bool:
    """Whether a chat or text completion chunk brings something a model generated.

    The first chunk of a chat announces the role with empty content before any token exists: it does not
    count.
    """
    for choice in event.get("choices") or ():
        if choice.get("text"):
            return True
        delta = choice.get("delta") or {}
        if any(delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls")):
            return True
    return False


class StreamObserver:
    """Watches the bytes of one event stream for its first token and its end."""

    __slots__ = ("_pending", "_result", "_tail")

    def __init__(self, result: ChatResult) -> None:
        self._result = result
        self._pending = b""
        self._tail = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Take the bytes that arrived at `now_s`; they may cut events anywhere."""
        result = self._result
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if result.first_token_s is None:
            whole, newline, self._pending = (self._pending + data).rpartition(b"\n")
            if not any(carries_token(_event(payload)) for payload in _payloads(whole + newline)):
                return
            result.first_token_s = now_s
            self._pending = b""
        result.chunk_times_s.append(now_s)

    def finish(self) -> None:
        """The body ended: read usage and errors off the tail."""
        result = self._result
        done = usage_seen = False
        for payload in _payloads(self._tail):
            if payload == b"[DONE]":
                done = True
                continue
            event = _event(payload)
            if error := event.get("error"):
                message = error.get("message") if isinstance(error, dict) else error
                result.error, result.detail = "error_event", str(message)[:200]
            if usage := event.get("usage"):
                usage_seen = True
                result.prompt_tokens = usage.get("prompt_tokens") or 0
                result.completion_tokens = usage.get("completion_tokens") or 0
                result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if result.error is None:
            if not done:
                result.error = "truncated"
            elif result.first_token_s is None:
                result.error = "no_content"
            elif not usage_seen:
                result.error = "no_usage"
