"""Small bounded GETs to replicas, for health, model lists and metrics."""

import asyncio
import ssl
from enum import StrEnum

import aiohttp

from gateway.replicas.replica import Replica


class ProbeFailure(StrEnum):
    """Why a probe has no usable answer. The difference matters to health."""

    REFUSED = "refused"
    """Nobody listens there."""
    TIMEOUT = "timeout"
    """Nothing came in time: dead, unreachable or busy."""
    ERROR = "error"
    """Another status than 200, a broken connection, an answer too long."""


class ProbeError(Exception):
    """A probe without a usable answer."""

    def __init__(self, failure: ProbeFailure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure


class ProbeClient:
    """Sends probes. Use it as an asynchronous context manager, or call `close`."""

    def __init__(self, session: aiohttp.ClientSession | None = None, tls: ssl.SSLContext | None = None) -> None:
        """Make a client.

        Args:
            session: used and left open when given; otherwise the client makes its own at the first probe.
            tls: how https replicas are spoken to, as requests do; by default as aiohttp does it.
        """
        self._tls = tls
        self._session = session
        self._owns_session = session is None

    async def __aenter__(self) -> "ProbeClient":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._owns_session and self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, replica: Replica, path: str, timeout_s: float, limit_bytes: int) -> bytes:
        """Get a path of a replica.

        Args:
            replica: whom to ask.
            path: below the replica's base URL, with its leading slash.
            timeout_s: for everything from connecting to the last byte.
            limit_bytes: the longest body accepted.

        Returns:
            The body of a 200 answer.

        Raises:
            ProbeError: when there is none.
        """
        headers = {"Accept-Encoding": "identity"}
        if replica.spec.api_key is not None:
            headers["Authorization"] = f"Bearer {replica.spec.api_key}"
        try:
            async with self._open_session().get(
                replica.base_url + path,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise ProbeError(ProbeFailure.ERROR, f"status {response.status}")
                return await _read(response, limit_bytes)
        except TimeoutError as error:
            raise ProbeError(ProbeFailure.TIMEOUT, f"no answer in {timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            failure = ProbeFailure.REFUSED if refused else ProbeFailure.ERROR
            raise ProbeError(failure, str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ProbeError(ProbeFailure.ERROR, f"{type(error).__name__}: {error}") from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No cookies, no proxy from the environment: replicas are asked directly.
            self._session = aiohttp.ClientSession(
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(ssl=self._tls) if self._tls is not None else None,
            )
        return self._session


async def _read(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > limit_bytes:
            raise ProbeError(ProbeFailure.ERROR, f"answer longer than {limit_bytes} bytes")
        chunks.append(chunk)
        # A body that is always there when asked for would keep the loop from everyone else.
        await asyncio.sleep(0)
    return b"".join(chunks)
