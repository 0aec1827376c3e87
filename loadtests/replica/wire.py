"""Server-sent events on an aiohttp connection, straight or through faults.

aiohttp writes the head of the response and its end. The events in between go to the transport as one HTTP
chunk each, without a coroutine per event: a replica sends a thousand and more of them per second and stream.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from typing import Protocol

import orjson
from aiohttp import web
from aiohttp.http import HttpVersion11

from loadtests.replica.errors import error_body
from loadtests.replica.faults import Faults

DONE_EVENT = b"data: [DONE]\n\n"
_CUT_PAUSE_S = 0.001


class Wire(Protocol):
    """Takes the events of one stream."""

    ended: asyncio.Future[None] | None
    """Done when the stream is to end before its time; None if it never is."""

    def write(self, events: Sequence[bytes]) -> None:
        """Send events, each as it is; never blocks."""

    async def finish(self) -> None:
        """All events are written: return when they are sent, if that ever happens."""

    def close(self) -> None:
        """Nobody listens any more."""


class PlainWire:
    """Sends events as they come."""

    ended: asyncio.Future[None] | None = None

    def __init__(self, transport: asyncio.Transport, chunked: bool) -> None:
        self._transport = transport
        self._chunked = chunked

    def write(self, events: Sequence[bytes]) -> None:
        """Send events, each as one HTTP chunk."""
        if self._transport.is_closing():
            return
        if self._chunked:
            self._transport.write(b"".join([b"%x\r\n%b\r\n" % (len(event), event) for event in events]))
        else:
            self._transport.write(b"".join(events))

    async def finish(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Nothing is kept back."""


class FaultyWire:
    """Sends events until a fault says otherwise."""

    def __init__(self, wire: PlainWire, transport: asyncio.Transport, faults: Faults) -> None:
        self._wire = wire
        self._transport = transport
        self._faults = faults
        self._events = 0
        self._offset = 0
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.ended: asyncio.Future[None] | None = None
        self._pump = self.ended = asyncio.ensure_future(self._send())

    def write(self, events: Sequence[bytes]) -> None:
        """Queue events."""
        for event in events:
            self._queue.put_nowait(event)

    async def finish(self) -> None:
        """Return when everything that will ever be sent is sent; with silence that is never."""
        self._queue.put_nowait(None)
        await self._pump

    def close(self) -> None:
        """Stop sending."""
        self._pump.cancel()

    async def _send(self) -> None:
        faults = self._faults
        while True:
            if self._events == faults.silence_after_chunks:
                await asyncio.Event().wait()
            if self._events == faults.die_after_chunks:
                await end_connection(self._transport, faults.die_mode)
                return
            if self._events == faults.error_event_after_chunks:
                message = "the simulated engine died"
                error = orjson.dumps(error_body(500, message, "InternalServerError"))
                self._wire.write([b"data: " + error + b"\n\n", DONE_EVENT])
                return
            event = await self._queue.get()
            if event is None:
                return
            self._events += 1
            await self._send_cut(event)

    async def _send_cut(self, event: bytes) -> None:
        faults = self._faults
        cuts = [cut - self._offset for cut in faults.cut_at or () if 0 < cut - self._offset < len(event)]
        self._offset += len(event)
        start = 0
        for cut in cuts:
            self._wire.write([event[start:cut]])
            start = cut
            await asyncio.sleep(_CUT_PAUSE_S if faults.cut_pause_s is None else faults.cut_pause_s)
        self._wire.write([event[start:]])


async def open_stream(request: web.Request, headers: dict[str, str], faults: Faults) -> tuple[web.StreamResponse, Wire]:
    """Send the head of an event stream. Returns the response, to be ended by `write_eof()`, and its wire."""
    response = web.StreamResponse(headers=headers)
    chunked = request.version >= HttpVersion11
    if chunked:
        response.enable_chunked_encoding()
    await response.prepare(request)
    transport = connection(request)
    wire = PlainWire(transport, chunked)
    if faults.as_json():
        return response, FaultyWire(wire, transport, faults)
    return response, wire


def connection(request: web.Request) -> asyncio.Transport:
    """The connection of a request.

    Raises:
        ConnectionResetError: it is gone.
    """
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client is gone")
    return transport


async def end_connection(transport: asyncio.Transport, mode: str | None) -> None:
    """End a connection in one of `faults.DIE_MODES`; what was written before is sent first."""
    if mode == "eof":
        return
    # A transport tells nobody but its protocol, which is aiohttp's, when its buffer is empty.
    while transport.get_write_buffer_size() and not transport.is_closing():  # noqa: ASYNC110
        await asyncio.sleep(_CUT_PAUSE_S)
    if mode == "close":
        transport.close()
    else:
        reset(transport)
    # The handler ends when aiohttp notices that the connection is gone.
    await asyncio.Event().wait()


def reset(transport: asyncio.Transport) -> None:
    """End a connection with a TCP reset."""
    raw = transport.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
