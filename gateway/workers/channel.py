"""Messages between the supervisor and a worker: JSON objects on a Unix stream socket, each after its length.

The length is four bytes, big endian. Nothing waits for the other side to read: what is sent is buffered, and a side
that lets too much of it pile up has stopped working, so the channel is cut.
"""

import asyncio
import logging
import socket
import struct
from typing import Any

import orjson

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct(">I")
_MAX_BUFFERED_BYTES = 256 << 20


def frame(message: dict[str, Any]) -> bytes:
    """Return a message as bytes, to send it to several."""
    body = orjson.dumps(message, option=orjson.OPT_NON_STR_KEYS)
    return _LENGTH.pack(len(body)) + body


class Channel:
    """One end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use `over`."""
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> "Channel":
        """Return the channel over one end of a socket pair."""
        end.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; nothing happens if the other side has gone."""
        self.send_frame(frame(message))

    def send_frame(self, data: bytes) -> None:
        """Send what `frame` has returned."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > _MAX_BUFFERED_BYTES:
            logger.error("the other side of a control channel does not read; it is cut")
            transport.abort()
            return
        self._writer.write(data)

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message, None when the other side has gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            message: dict[str, Any] = orjson.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None
        return message

    async def flush(self, within_s: float) -> None:
        """Wait until what was sent has been taken, or the time is over, and close."""
        try:
            self._writer.close()
            async with asyncio.timeout(within_s):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()

    def close(self) -> None:
        """Close; what has been sent still goes out."""
        self._writer.close()
