"""A replica made for tests: real sockets, h11 for parsing, scripted answers, and counters.

A script is an async function `script(call)`: it writes raw bytes with `call.send`, waits on events, closes or resets
the connection. Health, models and metrics are answered by themselves, so that a gateway takes the stub for healthy.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from typing import Protocol as TypingProtocol

import h11


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes = b""

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Call:
    """One request being answered."""

    seen: Seen
    connection: "_Connection"
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, data: bytes) -> None:
        self.connection.transport.write(data)

    def close(self) -> None:
        """Close cleanly, whatever has been promised."""
        self.connection.ended_by_script = True
        self.connection.transport.close()

    def reset(self) -> None:
        """RST."""
        self.connection.ended_by_script = True
        raw = self.connection.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.transport.close()

    def json(self, payload: Any, status: int = 200, headers: str = "") -> None:
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}content-length: {len(body)}\r\n\r\n"
        self.send(head.encode() + body)

    def stream_head(self, framing: str = "transfer-encoding: chunked\r\n") -> None:
        self.send(f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n{framing}\r\n".encode())

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def end_chunks(self) -> None:
        self.send(b"0\r\n\r\n")

    async def drained(self) -> None:
        """Wait until what has been sent has left, or nearly."""
        await self.connection.writable.wait()


Script = Callable[[Call], Awaitable[None]]


def role_event() -> bytes:
    return event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})


def token_event(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


def usage_event(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> bytes:
    return event({"choices": [], "usage": usage(prompt_tokens, completion_tokens, cached_tokens)})


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def answer(call: Call) -> None:
    """The ordinary answer: a stream of three tokens or a small JSON object."""
    wants_stream = False
    if call.seen.body[:1] == b"{":
        wants_stream = bool(call.seen.json.get("stream"))
    if not wants_stream:
        call.json({"id": "x", "choices": [{"index": 0, "message": {"content": "Hi"}}], "usage": usage(10, 2, 0)})
        return
    call.stream_head()
    for part in (role_event(), token_event("a"), token_event("b"), usage_event(10, 2, 0), DONE):
        call.chunk(part)
    call.end_chunks()


class StubReplica:
    """A scripted replica.

    Attributes:
        script: how API requests are answered.
        requests: what arrived, in order.
        aborted_seen: requests whose client left before the script had ended.
        heads_seen: requests of which at least the head arrived.
        uploads_cut: requests of which no more than a part arrived.
        keepalive_s: idle connections are closed after so long; None: never.
        health_hangs: probes get no answer.
    """

    def __init__(self, model: str = "m", script: Script = answer, models: list[dict[str, Any]] | None = None) -> None:
        self.script = script
        self.models = models if models is not None else [{"id": model, "object": "model", "owned_by": "vllm"}]
        self.requests: list[Seen] = []
        self.aborted_seen = 0
        self.in_flight = 0
        self.in_flight_max = 0
        self.connections = 0
        self.health_status = 200
        self.heads_seen = 0
        self.uploads_cut = 0
        self.keepalive_s: float | None = None
        self.health_hangs = False
        self.changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._open: set[_Connection] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests_seen(self) -> int:
        return len(self.requests)

    async def start(self, port: int = 0, ssl: Any = None) -> "StubReplica":
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", port, ssl=ssl)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Refuse new connections and cut the open ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self._open):
            connection.ended_by_script = True
            connection.transport.abort()
        await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool], within_s: float = 5.0) -> None:
        """Wait until a condition on the counters holds."""
        async with asyncio.timeout(within_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class MakeStub(TypingProtocol):
    """The fixture that starts stub replicas."""

    async def __call__(self, script: Script = answer, port: int = 0) -> StubReplica: ...


class _Connection(asyncio.Protocol):
    def __init__(self, replica: StubReplica) -> None:
        self.replica = replica
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        self.seen: Seen | None = None
        self.call: Call | None = None
        self.task: asyncio.Task[None] | None = None
        self.ended_by_script = False
        self.receiving = False
        self.idle: asyncio.TimerHandle | None = None
        self.writable = asyncio.Event()
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.replica._open.add(self)
        self.replica.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.replica._open.discard(self)
        self._busy()
        if self.receiving:
            self.replica.uploads_cut += 1
        if self.task is not None and not self.task.done():
            if self.call is not None:
                self.call.gone.set()
            if not self.ended_by_script:
                self.replica.aborted_seen += 1
            self.task.cancel()
        self.replica.changed.set()

    def eof_received(self) -> bool:
        return False

    def _busy(self) -> None:
        if self.idle is not None:
            self.idle.cancel()
            self.idle = None

    def data_received(self, data: bytes) -> None:
        self._busy()
        self.http.receive_data(data)
        self._pump()

    def _pump(self) -> None:
        while self.task is None:
            received = self.http.next_event()
            if received is h11.NEED_DATA or received is h11.PAUSED:
                if self.http.they_are_waiting_for_100_continue:
                    self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            if isinstance(received, h11.Request):
                headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in received.headers]
                self.seen = Seen(received.method.decode(), received.target.decode("latin-1"), headers)
                self.receiving = True
                self.replica.heads_seen += 1
                self.replica.changed.set()
            elif isinstance(received, h11.Data):
                assert self.seen is not None
                self.seen.body += bytes(received.data)
            elif isinstance(received, h11.EndOfMessage):
                assert self.seen is not None
                self.receiving = False
                self._answer(self.seen)
            else:
                return

    def _answer(self, seen: Seen) -> None:
        path = seen.target.partition("?")[0]
        call = self.call = Call(seen, self)
        if path == "/health" and self.replica.health_hangs:
            return
        if path == "/health":
            call.json(b"", self.replica.health_status)
            self._next()
        elif path == "/v1/models":
            call.json({"object": "list", "data": self.replica.models})
            self._next()
        elif path == "/metrics":
            call.json(b"", 404)
            self._next()
        else:
            replica = self.replica
            replica.requests.append(seen)
            replica.in_flight += 1
            replica.in_flight_max = max(replica.in_flight_max, replica.in_flight)
            self.task = asyncio.get_running_loop().create_task(self._run(call))
            replica.changed.set()

    async def _run(self, call: Call) -> None:
        try:
            await self.replica.script(call)
        finally:
            self.replica.in_flight -= 1
            self.replica.changed.set()
        if not self.transport.is_closing():
            self.task = None
            self._next()
            self._pump()

    def _next(self) -> None:
        # The script wrote its answer around h11; start a fresh state machine with what has come already.
        trailing = self.http.trailing_data[0]
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        if trailing:
            self.http.receive_data(trailing)
        elif self.replica.keepalive_s is not None:
            self.idle = asyncio.get_running_loop().call_later(self.replica.keepalive_s, self.transport.close)
