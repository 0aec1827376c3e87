"""A light HTTP client for benchmarks of streamed chat completions."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import aiohttp
import orjson

from loadtests.sse_stream import ChatResult, StreamObserver


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


class ChatClient:
    """Sends chat completions to one server, over kept-alive connections unless told otherwise, without a limit."""

    def __init__(
        self,
        url: str,
        timeout_s: float = 600.0,
        headers: Mapping[str, str] | None = None,
        *,
        keeps_alive: bool = True,
    ) -> None:
        """Prepare a client; enter it as an async context to use it.

        Args:
            url: address of the server without the path, as `http://127.0.0.1:8000`.
            timeout_s: bound on one whole request.
            headers: sent with every request, as an Authorization header.
            keeps_alive: False for a connection per request.
        """
        self.url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, connect=None, sock_connect=10.0)
        self._keeps_alive = keeps_alive
        self._headers = {"content-type": "application/json", "accept-encoding": "identity", **(headers or {})}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=(
                aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
                if self._keeps_alive
                else aiohttp.TCPConnector(limit=0, force_close=True)
            ),
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

    async def status(self, url: str) -> int:
        """Status of a GET of any address.

        Raises:
            RuntimeError: there is no answer.
        """
        try:
            async with self._session.get(url) as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RuntimeError(f"{url}: {str(error) or type(error).__name__}") from error

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
