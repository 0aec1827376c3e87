"""The upstream of the overhead benchmark: answers at once, from constants, at the least cost Python allows.

It is no engine: it exists so that the gateway in front of it is the only thing worth measuring. Plain answers are one
write; streams send one server-sent event per interval to every open stream from a single timer per port.
"""

import argparse
import asyncio
import json
import signal
import sys
from typing import Any, cast

import httptools
import uvloop

_USAGE = {
    "prompt_tokens": 8,
    "total_tokens": 24,
    "completion_tokens": 16,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def _plain(payload: Any) -> bytes:
    body = json.dumps(payload, separators=(",", ":")).encode()
    head = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def _event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Answers:
    """All bytes the stub ever sends."""

    def __init__(self, model: str, chunks: int) -> None:
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


class Stub(asyncio.Protocol):
    """One connection."""

    __slots__ = ("_answers", "_body", "_left", "_parser", "_streams", "_transport", "_url")

    def __init__(self, answers: Answers, streams: "dict[Stub, None]") -> None:
        self._answers = answers
        self._streams = streams
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the stream, if one was open."""
        self._streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        """Parse."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_url(self, url: bytes) -> None:
        """Target."""
        self._url = url
        self._body = []

    def on_body(self, data: bytes) -> None:
        """Body."""
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Answer."""
        answers, path = self._answers, self._url.partition(b"?")[0]
        write = self._transport.write
        if path in (b"/v1/chat/completions", b"/v1/completions"):
            # The flag stands at the end of the load generator's bodies, or at their beginning.
            tail = self._body[-1][-64:] if self._body else b""
            if b'"stream":true' in tail or b'"stream":true' in self._body[0][:64]:
                write(answers.stream_head + answers.role)
                self._left = answers.chunks
                self._streams[self] = None
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
            self._transport.write(self._answers.token)
        else:
            self._streams.pop(self, None)
            self._transport.write(self._answers.end)


async def run(ports: list[int], model: str, chunks: int, interval_s: float) -> None:
    """Serve until SIGTERM.

    Args:
        ports: one stub replica each.
        model: the model they list.
        chunks: events per stream.
        interval_s: between two events of a stream.
    """
    loop = asyncio.get_running_loop()
    answers = Answers(model, chunks)
    streams: dict[Stub, None] = {}
    for port in ports:
        await loop.create_server(lambda: Stub(answers, streams), "127.0.0.1", port, backlog=4096)

    def tick(due_s: float) -> None:
        for stream in list(streams):
            stream.emit()
        due_s = max(due_s + interval_s, loop.time())
        loop.call_at(due_s, tick, due_s)

    tick(loop.time())
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    print("ready", flush=True)
    await stop.wait()


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
    sys.exit(main())
