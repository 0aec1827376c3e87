"""The upstream of the overhead benchmark: answers at once, from constants, at the least cost Python allows.

It is no engine: it exists so that the gateway in front of it is the only thing worth measuring. Plain answers are one
write; streams send one server-sent event per interval from a timer per port, as an engine's step feeds all its streams
at once. The ports' timers are apart by equal shares of the interval, as steps of different replicas are.

Two routes are for the benchmark itself: `/stub/calls` tells how often each path was asked for at each port, and
`/stub/finish` ends all streams and tells how many events they carried.
"""

import argparse
import asyncio
import json
import signal
from collections import Counter
from functools import partial
from typing import Any, cast

import httptools
import uvloop

_USAGE = {
    "prompt_tokens": 8,
    "total_tokens": 24,
    "completion_tokens": 16,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_STREAM_FLAG = b'"stream":true'
_SEARCHED_BYTES = 16 << 10  # of a body; a router that writes bodies anew may put the flag anywhere
_LAST_EVENTS = 3  # last token, usage, [DONE]


def _plain(payload: Any) -> bytes:
    body = json.dumps(payload, separators=(",", ":")).encode()
    head = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def _event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Answers:
    """All bytes the stub ever sends to a gateway."""

    def __init__(self, model: str, chunks: int) -> None:
        """Build them.

        Args:
            model: name of the served model.
            chunks: events with a token per stream, at most.
        """
        base = {"id": "chatcmpl-0123456789abcdef", "created": 1795961605, "model": model}
        message = {
            "role": "assistant",
            "content": "All is well with this answer of sixteen tokens or so.",
            "refusal": None,
        }
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        self.chat = _plain({**base, "object": "chat.completion", "choices": [choice], "usage": _USAGE})
        entry = {"id": model, "object": "model", "created": 1795961605, "owned_by": "vllm", "max_model_len": 1 << 20}
        self.models = _plain({"object": "list", "data": [entry]})
        self.health = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
        self.metrics = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\ncontent-length: 40\r\n\r\n"
            b'vllm:num_requests_running{engine="0"} 0\n'
        )
        # vllm-router asks replicas to render and tokenise; a cheap answer is fair to it.
        self.tokens = _plain(
            {"count": 8, "max_model_len": 1 << 20, "tokens": [1, 2, 3, 4, 5, 6, 7, 8], "token_ids": [1, 2, 3]}
        )
        self.version = _plain({"version": "0.32.0"})
        self.server_info = _plain(
            {"model_path": model, "served_model_name": model, "model_id": model, "tp_size": 1, "dp_size": 1}
        )
        self.stream_head = (
            b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        chunk = {**base, "object": "chat.completion.chunk"}

        def delta(content: dict[str, str], finish: str | None = None) -> dict[str, Any]:
            return {**chunk, "choices": [{"index": 0, "delta": content, "logprobs": None, "finish_reason": finish}]}

        self.role = _chunk(_event(delta({"role": "assistant", "content": ""})))
        self.token = _chunk(_event(delta({"content": " token"})))
        last = _chunk(_event(delta({"content": "."}, "stop")))
        usage = _chunk(_event({**chunk, "choices": [], "usage": _USAGE}))
        self.end = last + usage + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self.chunks = chunks


class Port:
    """One stub replica: its open streams, the timer that feeds them, and what it was asked."""

    def __init__(self, answers: Answers, stub: "Stub", number: int, interval_s: float, phase_s: float) -> None:
        self.answers = answers
        self.stub = stub
        self.number = number
        self.calls: Counter[bytes] = Counter()
        self.connections: set[Connection] = set()
        self.streams: dict[Connection, None] = {}
        self._interval_s = interval_s
        self._phase_s = phase_s
        self._ticking = False

    def add(self, stream: "Connection") -> None:
        """Feed a stream from the next tick on."""
        self.streams[stream] = None
        if not self._ticking:
            self._ticking = True
            loop = asyncio.get_running_loop()
            ticks = (loop.time() - self._phase_s) // self._interval_s + 1
            self._at(loop, self._phase_s + ticks * self._interval_s)

    def _at(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        loop.call_at(due_s, self._tick, loop, due_s)

    def _tick(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        for stream in list(self.streams):
            stream.emit()
        self._ticking = bool(self.streams)
        if self._ticking:
            self._at(loop, max(due_s + self._interval_s, loop.time()))


class Stub:
    """All ports of one process."""

    def __init__(self, answers: Answers, ports: list[int], interval_s: float) -> None:
        """Prepare; `start` opens the ports.

        Args:
            answers: what to send.
            ports: one stub replica each.
            interval_s: between two events of a stream.
        """
        shares = len(ports)
        self.ports = [
            Port(answers, self, number, interval_s, interval_s * index / shares) for index, number in enumerate(ports)
        ]
        self.events = 0
        self._servers: list[asyncio.Server] = []

    async def start(self) -> None:
        """Open all ports."""
        loop = asyncio.get_running_loop()
        for port in self.ports:
            server = await loop.create_server(partial(Connection, port), "127.0.0.1", port.number, backlog=4096)
            self._servers.append(server)

    def close(self) -> None:
        """Close all ports and abort what is open."""
        for server in self._servers:
            server.close()
        for port in self.ports:
            for connection in list(port.connections):
                connection.close()

    def control(self, path: bytes) -> bytes:
        """Answer one of the benchmark's own routes."""
        if path == b"/stub/finish":
            streams = [stream for port in self.ports for stream in port.streams]
            for stream in streams:
                stream.finish()
            events, self.events = self.events, 0
            return _plain({"streams": len(streams), "events": events})
        return _plain(
            {
                str(port.number): {path.decode(errors="replace"): count for path, count in port.calls.items()}
                for port in self.ports
            }
        )


class Connection(asyncio.Protocol):
    """One connection."""

    __slots__ = ("_body", "_left", "_parser", "_port", "_size", "_tail", "_transport", "_url")

    def __init__(self, port: Port) -> None:
        self._port = port
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = b""
        self._tail = b""
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._port.connections.add(self)

    def close(self) -> None:
        """Close now."""
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection and its stream."""
        self._port.connections.discard(self)
        self._port.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        """Parse."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_url(self, url: bytes) -> None:
        """Target."""
        self._url = url
        self._body = self._tail = b""

    def on_body(self, data: bytes) -> None:
        """Keep the beginning and the end of the body."""
        if len(self._body) < _SEARCHED_BYTES:
            self._body += data
        else:
            self._tail = data

    def on_message_complete(self) -> None:
        """Answer."""
        port, path = self._port, self._url.partition(b"?")[0]
        answers, write = port.answers, self._transport.write
        if path.startswith(b"/stub/"):
            write(port.stub.control(path))
            return
        port.calls[path] += 1
        if path in (b"/v1/chat/completions", b"/v1/completions"):
            if _STREAM_FLAG in self._body or _STREAM_FLAG in self._tail[-64:]:
                write(answers.stream_head + answers.role)
                port.stub.events += 1
                self._left = answers.chunks
                port.add(self)
            else:
                write(answers.chat)
        elif path == b"/v1/models":
            write(answers.models)
        elif path == b"/metrics":
            write(answers.metrics)
        elif path in (b"/health", b"/health_generate", b"/ready", b"/ping"):
            write(answers.health)
        elif path == b"/version":
            write(answers.version)
        elif path in (b"/get_server_info", b"/server_info", b"/get_model_info", b"/model_info"):
            write(answers.server_info)
        else:
            write(answers.tokens)

    def emit(self) -> None:
        """Send the next event of the stream."""
        if self._left > 0:
            self._left -= 1
            self._port.stub.events += 1
            self._transport.write(self._port.answers.token)
        else:
            self.finish()

    def finish(self) -> None:
        """End the stream as an engine does."""
        self._port.streams.pop(self, None)
        self._port.stub.events += _LAST_EVENTS
        self._transport.write(self._port.answers.end)


async def run(ports: list[int], model: str, chunks: int, interval_s: float) -> None:
    """Serve until SIGTERM.

    Args:
        ports: one stub replica each.
        model: the model they list.
        chunks: events per stream, at most.
        interval_s: between two events of a stream.
    """
    stub = Stub(Answers(model, chunks), ports, interval_s)
    await stub.start()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    print("ready", flush=True)
    await stop.wait()
    stub.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, action="append", required=True)
    parser.add_argument("--model", default="bench")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--interval-ms", type=float, default=20.0)
    options = parser.parse_args()
    uvloop.run(run(options.port, options.model, options.chunks, options.interval_ms / 1000))


if __name__ == "__main__":
    main()
