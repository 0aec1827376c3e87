"""Small bounded GETs to replicas, for health, model lists and metrics."""

import asyncio
import ssl
from enum import StrEnum
from functools import lru_cache
from urllib.parse import quote

from gateway.replicas.probe_connection import BadAnswerError, ProbeConnection, StaleError
from gateway.replicas.replica import Replica

_KEEPALIVE_S = 15.0
"""An idle connection older than this is not used again: what lies between may have forgotten it without a word."""
_TARGET_CHARACTERS = "%/?:@!$&'()*+,;=~"
"""What may stand in a request target as it is, besides letters, digits and `_.-` (RFC 3986 section 3.3 and 3.4)."""


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
    """Sends probes. Use it as an asynchronous context manager, or call `close`.

    Connections are kept alive: one per replica, and more only where probes of one replica overlap.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """Make a client.

        Args:
            tls: how https replicas are spoken to, as requests do; by default with the system's authorities.
        """
        self._tls = tls
        self._idle: dict[Replica, list[ProbeConnection]] = {}

    async def __aenter__(self) -> "ProbeClient":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        self._forget_all()

    def _forget_all(self) -> None:
        for replica in list(self._idle):
            self.forget(replica)

    def use_tls(self, tls: ssl.SSLContext | None) -> None:
        """Speak to https replicas with another context from now on."""
        self._tls = tls
        self._forget_all()

    def forget(self, replica: Replica) -> None:
        """Close the connections to a replica that has left."""
        for connection in self._idle.pop(replica, ()):
            connection.close()

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
        request = _request(replica, path)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        try:
            return await self._get(replica, request, deadline_s, limit_bytes)
        except TimeoutError as error:
            raise ProbeError(ProbeFailure.TIMEOUT, f"no answer in {timeout_s:g} s") from error
        except BadAnswerError as error:
            raise ProbeError(ProbeFailure.ERROR, str(error)) from error

    async def _get(self, replica: Replica, request: bytes, deadline_s: float, limit_bytes: int) -> bytes:
        idle = self._idle.setdefault(replica, [])
        connection = _newest(idle)
        if connection is not None:
            try:
                body = await connection.get(request, deadline_s, limit_bytes)
            except StaleError:
                connection = None
        if connection is None:
            connection = await self._dial(replica, deadline_s)
            body = await connection.get(request, deadline_s, limit_bytes)
        if connection.usable:
            # Another list, or none: the replica has been forgotten meanwhile.
            if self._idle.get(replica) is idle:
                connection.idle_since_s = asyncio.get_running_loop().time()
                idle.append(connection)
            else:
                connection.close()
        return body

    async def _dial(self, replica: Replica, deadline_s: float) -> ProbeConnection:
        loop = asyncio.get_running_loop()
        deadline = asyncio.timeout_at(deadline_s)
        try:
            async with deadline:
                _, connection = await loop.create_connection(
                    ProbeConnection,
                    replica.host,
                    replica.port,
                    ssl=self._context() if replica.tls else None,
                    server_hostname=replica.host if replica.tls else None,
                )
        except ConnectionRefusedError as error:
            raise ProbeError(ProbeFailure.REFUSED, _unreachable(replica, error)) from error
        except (OSError, UnicodeError) as error:
            # UnicodeError is how a host that cannot be a name fails.
            if deadline.expired():
                raise
            # The kernel's own ETIMEDOUT is a TimeoutError as well, but nothing that a busy replica would cause.
            raise ProbeError(ProbeFailure.ERROR, _unreachable(replica, error)) from error
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _unreachable(replica: Replica, error: Exception) -> str:
    return f"no connection to {replica.host}:{replica.port}: {error}"


def _newest(idle: list[ProbeConnection]) -> ProbeConnection | None:
    oldest_s = asyncio.get_running_loop().time() - _KEEPALIVE_S
    while idle:
        connection = idle.pop()
        if connection.usable and connection.idle_since_s >= oldest_s:
            return connection
        connection.close()
    return None


def _request(replica: Replica, path: str) -> bytes:
    key = replica.spec.api_key
    if key is not None and any(end in key for end in "\r\n\0"):
        # Often the last line end of a key that was read from a file; in a head it would begin another line.
        raise ProbeError(ProbeFailure.ERROR, "api_key of the replica has a line end in it")
    return (
        b"GET %b HTTP/1.1\r\nHost: %b\r\nAccept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: warmgate\r\n%b\r\n"
        % (
            _target(replica.base_path + path),
            replica.host_header,
            b"" if key is None else b"Authorization: Bearer %b\r\n" % key.encode(),
        )
    )


@lru_cache(maxsize=4096)
def _target(path: str) -> bytes:
    return quote(path, safe=_TARGET_CHARACTERS).encode("ascii")
