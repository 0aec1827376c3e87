"""Clients of a soak: closed-loop users with conversations that grow, and some that misbehave."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

_TURNS = 6
_GROUPS = 20
_SYSTEM_WORDS = 400
_WORDS = [f"word{number}" for number in range(997)]


@dataclass
class Progress:
    """What all users together have done.

    Attributes:
        wanted: requests to make in all.
        started, finished: requests so far.
        outcomes: how they ended, by kind of request and outcome.
    """

    wanted: int
    started: int = 0
    finished: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def unexpected(self) -> dict[tuple[str, str], int]:
        """What must not happen: a plain request that fails, whatever its replicas do."""
        fine = {
            ("plain", "200"),
            ("stream", "200"),
            ("stream", "broken"),  # its replica went away in the middle
            ("leaver", "left"),
            ("leaver", "200"),
            ("unknown model", "404"),
            ("bad body", "400"),
            ("upload", "200"),
            ("upload", "502"),  # its replica went away, and it cannot be sent twice
        }
        return {key: number for key, number in self.outcomes.items() if key not in fine}


class Connection(asyncio.Protocol):
    """One connection: sends one request at a time and waits for the end of its answer."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[str] | None = None
        self._begun: asyncio.Future[None] | None = None
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer that is not complete by now never will be."""
        self.open = False
        if self._done is not None and not self._done.done():
            self._done.set_result("broken")
        if self._begun is not None and not self._begun.done():
            self._begun.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Parse."""
        if self._begun is not None and not self._begun.done():
            self._begun.set_result(None)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """The answer is complete."""
        if self._done is not None and not self._done.done():
            self._done.set_result(str(self._parser.get_status_code()))
        if not self._parser.should_keep_alive():
            self._transport.close()

    async def ask(self, data: bytes) -> str:
        """Send a request; return the status of its answer, or `broken`."""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return await self._done

    async def ask_and_leave(self, data: bytes) -> str:
        """Send a request and leave when its answer begins; return `left`, or the status if it was complete by then."""
        loop = asyncio.get_running_loop()
        self._done, self._begun = loop.create_future(), loop.create_future()
        self._transport.write(data)
        await self._begun
        whole = self._done.done()
        self.close()
        return self._done.result() if whole else "left"

    async def ask_and_stay(self, data: bytes) -> None:
        """Send a request and wait until its answer begins."""
        loop = asyncio.get_running_loop()
        self._done, self._begun = loop.create_future(), loop.create_future()
        self._transport.write(data)
        await self._begun

    def close(self) -> None:
        """Close now."""
        if self.open:
            self.open = False
            self._transport.abort()


class User:
    """One closed loop of requests."""

    def __init__(self, port: int, progress: Progress, rng: random.Random, model: str) -> None:
        """Prepare.

        Args:
            port: the gateway's.
            progress: shared by all users.
            rng: draws what to do.
            model: what to ask for.
        """
        self._port = port
        self._progress = progress
        self._rng = rng
        self._model = model
        self._connection: Connection | None = None
        self._messages: list[dict[str, str]] = []

    async def run(self) -> None:
        """Make requests until all that are wanted have been made."""
        progress = self._progress
        while progress.started < progress.wanted:
            progress.started += 1
            kind, data = self._next()
            if self._connection is None or not self._connection.open:
                self._connection = await self._connect()
            if kind == "leaver":
                outcome = await self._connection.ask_and_leave(data)
            else:
                outcome = await self._connection.ask(data)
            progress.outcomes[kind, outcome] += 1
            progress.finished += 1
        if self._connection is not None:
            self._connection.close()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
        return connection

    def _next(self) -> tuple[str, bytes]:
        draw = self._rng.random()
        if draw < 0.005:
            return "bad body", _post("/v1/chat/completions", b'{"model": ')
        if draw < 0.01:
            # Names that clients invent must not become labels or cache entries.
            name = f"invented-{self._rng.random()}"
            return "unknown model", json_post("/v1/chat/completions", {"model": name, "messages": []})
        if draw < 0.02:
            return "upload", _post("/v1/audio/transcriptions", b"x" * 20_000, "multipart/form-data; boundary=x")
        body = {"model": self._model, "messages": self._conversation()}
        if draw < 0.05:
            return "leaver", json_post("/v1/chat/completions", {**body, "stream": True})
        if draw < 0.25:
            return "stream", json_post("/v1/chat/completions", {**body, "stream": True})
        return "plain", json_post("/v1/chat/completions", body)

    def _conversation(self) -> list[dict[str, str]]:
        rng = self._rng
        if len(self._messages) >= 2 * _TURNS or not self._messages:
            group = rng.randrange(_GROUPS)
            system = " ".join(_WORDS[(group * 31 + n) % len(_WORDS)] for n in range(_SYSTEM_WORDS))
            self._messages = [{"role": "system", "content": system}]
        else:
            self._messages.append({"role": "assistant", "content": "An answer of a few words."})
        self._messages.append({"role": "user", "content": " ".join(rng.choices(_WORDS, k=40))})
        return self._messages


def json_post(path: str, payload: Any) -> bytes:
    """Return a POST request with a JSON body."""
    return _post(path, json.dumps(payload, separators=(",", ":")).encode())


def _post(path: str, body: bytes, kind: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body
