"""Streams of the overhead benchmark: many at once, whose events are counted and not looked at.

No object and no parsing per chunk: the load generator must not be what limits 512 streams.
"""

import asyncio
from typing import cast

from loadtests.overhead.loads import Load, happens
from loadtests.overhead.prompts import Requests

_PER_BATCH = 16
_BATCHES_APART_S = 0.002
_FIRST_BYTE_TIMEOUT_S = 15.0
_LAST_CHUNK = b"0\r\n\r\n"
_END_OF_BODY = b"\r\n" + _LAST_CHUNK  # with the end of the line before, which no head ends with
_EVENT = b"data: "
_END_OF_EVENT = b"\n\r\n"


class Stream(asyncio.Protocol):
    """A connection with one streamed answer, of which only the events are counted."""

    __slots__ = ("_load", "_rest", "_started", "_transport", "done")

    def __init__(self, load: "Streams") -> None:
        self._load = load
        self._rest = b""
        self._started = False
        self.done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast(asyncio.Transport, transport)
        self._load.opened(self)
        self._transport.writelines(next(self._load.requests))

    def data_received(self, data: bytes) -> None:
        """Count."""
        load = self._load
        load.reads += 1
        rest = self._rest
        if rest:
            data = rest + data
            load.completed -= rest.count(_EVENT)
        load.completed += data.count(_EVENT)
        # Reads end with an event as a rule. Where they do not, a mark or the end of the body may be cut in two.
        self._rest = b"" if data.endswith(_END_OF_EVENT) else data[1 - len(_END_OF_BODY) :]
        if not self._started:
            self._begin(data)
        if data.endswith(_END_OF_BODY) or data == _LAST_CHUNK:
            self.done = True
            self._transport.close()

    def _begin(self, data: bytes) -> None:
        self._started = True
        self._load.started()
        status = data[9:12]
        if status != b"200":
            self._load.errors[f"http_{status.decode(errors='replace')}"] += 1
            self.done = True
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the load."""
        if not self.done:
            self._load.errors["stream_cut"] += 1
        self._load.ended(self)

    def close(self) -> None:
        """Close now."""
        self.done = True
        self._transport.abort()


class Streams(Load):
    """Many streams at once, each on its connection."""

    def __init__(self, port: int, requests: Requests, streams: int) -> None:
        """Prepare.

        Args:
            port: of the gateway.
            requests: what to send; they must ask for streams.
            streams: how many.
        """
        super().__init__(port, requests)
        self._count = streams
        self._open_streams: set[Stream] = set()
        self._begun = 0
        self._ended = 0
        self._all_begun = asyncio.Event()
        self._all_ended = asyncio.Event()

    async def start(self) -> None:
        """Open all streams and wait for the first bytes of each; those that send none count as `no_first_byte`."""
        for number in range(self._count):
            self._open(Stream)
            if number % _PER_BATCH == _PER_BATCH - 1:
                await asyncio.sleep(_BATCHES_APART_S)
        if not await happens(self._all_begun, _FIRST_BYTE_TIMEOUT_S):
            self.errors["no_first_byte"] += self._count - self._begun

    def opened(self, stream: Stream) -> None:
        """A stream has a connection."""
        self.total += 1
        self._open_streams.add(stream)

    def started(self) -> None:
        """A stream has sent its first bytes."""
        self._begun += 1
        if self._begun >= self._count:
            self._all_begun.set()

    def ended(self, stream: Stream) -> None:
        """A stream is over."""
        self._open_streams.discard(stream)
        self._ended += 1
        if self._ended >= self._count:
            self._all_begun.set()
            self._all_ended.set()

    @property
    def open_streams(self) -> int:
        """Streams under way."""
        return len(self._open_streams)

    async def finish(self, timeout_s: float) -> None:
        """Wait for the ends of all streams; those that do not come count as `no_end`."""
        self._running = False
        if not await happens(self._all_ended, timeout_s):
            self.errors["no_end"] += len(self._open_streams)
        self._give_up_connecting()
        for stream in list(self._open_streams):
            stream.close()
