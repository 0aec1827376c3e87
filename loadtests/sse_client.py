"""A light HTTP client for benchmarks of streamed chat completions.

`StreamObserver` takes the body's bytes as they come and decides, without I/O, when the first token was
there and what the final usage says. It parses events only until it has seen the first token, then counts
reads and keeps a tail: at thousands of chunks a second a client that parses each of them measures itself.

`ChatClient` adds the socket and the clock.
"""

import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
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


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


class ChatClient:
    """Sends chat completions to one server over kept-alive connections, without a limit on their number."""

    def __init__(self, url: str, timeout_s: float = 600.0, headers: Mapping[str, str] | None = None) -> None:
        """Prepare a client; enter it as an async context to use it.

        Args:
            url: address of the server without the path, as `http://127.0.0.1:8000`.
            timeout_s: bound on one whole request.
            headers: sent with every request, as an Authorization header.
        """
        self.url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, connect=None, sock_connect=10.0)
        self._headers = {"content-type": "application/json", "accept-encoding": "identity", **(headers or {})}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            timeout=self._timeout,
            headers=self._headers,
            auto_decompress=False,
            raise_for_status=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        """Id of the first model the server lists.

        Raises:
            RuntimeError: the server does not answer or lists none.
        """
        try:
            async with self._session.get(f"{self.url}/v1/models") as response:
                body = await response.read()
            return str(orjson.loads(body)["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RuntimeError(f"{self.url}/v1/models: {str(error) or type(error).__name__}") from error
        except (orjson.JSONDecodeError, LookupError, TypeError):
            raise RuntimeError(f"{self.url}/v1/models lists no model (status {response.status})") from None

    async def chat(self, body: bytes) -> ChatResult:
        """Send one streaming chat completion and read it to its end. Failures are in the result, not
        raised."""
        result = ChatResult(sent_s=time.monotonic())
        try:
            async with self._session.post(f"{self.url}/v1/chat/completions", data=body) as response:
                self._read_head(response, result)
                if response.status == 200:
                    await self._read_stream(response, result)
                else:
                    result.error = f"http_{response.status}"
                    result.detail = (await response.text(errors="replace"))[:200]
        except TimeoutError:
            result.error = "timeout"
        except aiohttp.ClientConnectorError as error:
            result.error, result.detail = "connect", str(error)[:200]
        except (aiohttp.ClientError, ConnectionError) as error:
            result.error, result.detail = "disconnected", str(error)[:200]
        result.ended_s = time.monotonic()
        return result

    @staticmethod
    async def _read_stream(response: aiohttp.ClientResponse, result: ChatResult) -> None:
        observer = StreamObserver(result)
        try:
            async for data in response.content.iter_any():
                observer.feed(data, time.monotonic())
        except aiohttp.ClientError:
            # A proxy that lost its upstream says so in a last event and then cuts: the event is the
            # better reason.
            observer.finish()
            if result.error != "error_event":
                raise
        else:
            observer.finish()

    @staticmethod
    def _read_head(response: aiohttp.ClientResponse, result: ChatResult) -> None:
        headers = response.headers
        result.status = response.status
        result.replica = headers.get("x-warmgate-replica")
        result.policy = headers.get("x-warmgate-policy")
        result.predicted_ttft_ms = _number(headers.get("x-warmgate-predicted-ttft-ms"))
        result.expected_cached_tokens = _number(headers.get("x-warmgate-expected-cached-tokens"))
