"""Connections that another process has accepted, and hands over through a Unix socket.

The accepting process sends one byte, the number of connections, with their descriptors (SCM_RIGHTS, unix(7)). Back go
`REPORT` frames: how many connections have been taken since the start, and how many are open. The totals heal what a
lost frame would tell. A connection that is not reported as taken has not been touched, so the accepting process can
still give it to somebody else; the report is therefore sent before the first look at a connection.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable

from gateway.proxy.listener import Arrivals

logger = logging.getLogger(__name__)

REPORT = struct.Struct("<II")
"""Connections taken since the start, modulo 2**32, and connections open now."""
MAX_AT_ONCE = 64
"""Connections of one message."""
_REPORT_S = 0.1
"""How often a number of open connections that has changed is told."""


class HandedConnections:
    """Takes connections from a channel until it is closed."""

    def __init__(self, channel: socket.socket, arrivals: Arrivals, open_connections: Callable[[], int]) -> None:
        """Begin to take.

        Args:
            channel: the end of a Unix stream socket; closed with this object.
            arrivals: opens the connections.
            open_connections: how many the process serves.
        """
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._arrivals = arrivals
        self._open_connections = open_connections
        self._taken = 0
        self._reported = (0, 0)
        self._closed = False
        self._reports = self._loop.call_later(_REPORT_S, self._report_again)
        channel.setblocking(False)
        self._loop.add_reader(channel.fileno(), self._receive)

    def close(self) -> None:
        """Take no more; connections that have been taken go on."""
        if self._closed:
            return
        self._closed = True
        self._reports.cancel()
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()

    def _receive(self) -> None:
        connections: list[socket.socket] = []
        while True:
            try:
                data, descriptors, flags, _ = socket.recv_fds(self._channel, 1, MAX_AT_ONCE)
            except BlockingIOError:
                break
            except OSError as error:
                logger.error("no more connections can be taken: %s", error)
                self.close()
                break
            if not data:
                # The other end has gone.
                self.close()
                break
            self._taken += data[0]
            connections += [socket.socket(fileno=descriptor) for descriptor in descriptors]
            if flags & socket.MSG_CTRUNC or len(descriptors) < data[0]:
                # Out of descriptors: the kernel has closed what did not fit.
                logger.error("%d connections are lost: out of file descriptors", data[0] - len(descriptors))
        self._report(len(connections))
        for connection in connections:
            self._arrivals.take(connection)

    def _report(self, just_taken: int = 0) -> None:
        if self._closed:
            return
        now = (self._taken & 0xFFFFFFFF, self._open_connections() + len(self._arrivals) + just_taken)
        if now == self._reported:
            return
        try:
            self._channel.send(REPORT.pack(*now))
        except OSError:
            # Full, or gone: the next report tells it all.
            return
        self._reported = now

    def _report_again(self) -> None:
        self._report()
        self._reports = self._loop.call_later(_REPORT_S, self._report_again)
