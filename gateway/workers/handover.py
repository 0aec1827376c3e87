"""Hands accepted connections to workers; the other end is `gateway.proxy.handed`.

Each connection goes to the worker with the fewest, and is kept here until the worker reports that it has taken it. So
nothing is lost when a worker dies with connections waiting for it: they go to another. While no worker can take any,
connections wait here and in the kernel's queue.
"""

import asyncio
import logging
import socket
from collections import deque

from gateway.proxy.handed import MAX_AT_ONCE, REPORT
from gateway.proxy.listener import Listener, listen

logger = logging.getLogger(__name__)

_MAX_UNTAKEN = 256
"""Connections on the way to one worker; one that has so many is busy."""
_SLOW_S = 0.2
"""A worker that has taken nothing for so long, while something is on the way to it, is busy as well."""
_MAX_WAITING = 512
"""Connections accepted and not given to anybody, before no more are accepted."""


class Lane:
    """The way to one worker.

    Attributes:
        end: our end of the socket pair.
        closing: it gets no more connections.
        untaken: what it has not taken yet, in order.
        unsent: of these, the last so many have not been sent.
        turn: when it last got one.
        seen_s: when it last took one, or the first on the way was given to it.
    """

    def __init__(self, end: socket.socket) -> None:
        """Use `Handover.add`."""
        self.end = end
        self.seen_s = 0.0
        self.closing = False
        self.untaken: deque[socket.socket] = deque()
        self.unsent = 0
        self.turn = 0
        self._taken = 0
        self._open = 0
        self._rest = b""

    @property
    def connections(self) -> int:
        """Connections it is thought to have, those on the way included."""
        return self._open + len(self.untaken)

    def full(self, now_s: float) -> bool:
        """Say whether it is too far behind to get more."""
        untaken = len(self.untaken)
        return self.closing or untaken >= _MAX_UNTAKEN or (untaken > 0 and now_s - self.seen_s > _SLOW_S)

    def reported(self, data: bytes) -> int:
        """Read reports; return how many more connections have been taken."""
        data = self._rest + data
        whole = len(data) - len(data) % REPORT.size
        self._rest = data[whole:]
        if not whole:
            return 0
        taken: int
        taken, self._open = REPORT.unpack_from(data, whole - REPORT.size)
        more = (taken - self._taken) & 0xFFFFFFFF
        self._taken = taken
        return more


class Handover:
    """Accepts, and gives to the worker that has the fewest connections."""

    def __init__(self) -> None:
        """Start without workers and without a socket."""
        self._loop = asyncio.get_running_loop()
        self._lanes: list[Lane] = []
        self._waiting: deque[socket.socket] = deque()
        self._listener: Listener | None = None
        self._turn = 0
        self._settled = asyncio.Event()
        self._over = False

    def listen(self, sockets: list[socket.socket], backlog: int) -> int:
        """Begin to accept on bound sockets; return the port.

        Raises:
            OSError: another process listens there.
        """
        self._listener = listen(sockets, backlog, self._take)
        return self._listener.port

    @property
    def listening(self) -> bool:
        """Whether connections are accepted."""
        return self._listener is not None

    def add(self, end: socket.socket) -> Lane:
        """Give connections to a worker from now on.

        Args:
            end: of a Unix stream socket pair; closed with the lane.
        """
        end.setblocking(False)
        lane = Lane(end)
        self._lanes.append(lane)
        self._loop.add_reader(end.fileno(), self._reported, lane)
        self._deal_waiting()
        return lane

    def remove(self, lane: Lane) -> None:
        """A worker has gone: what it has not taken goes to others."""
        if lane not in self._lanes:
            return
        self._lanes.remove(lane)
        self._read_reports(lane)
        self._loop.remove_reader(lane.end.fileno())
        if lane.unsent:
            self._loop.remove_writer(lane.end.fileno())
        lane.end.close()
        self._waiting.extendleft(reversed(lane.untaken))
        lane.untaken.clear()
        if self._over:
            self._drop_waiting()
        else:
            self._deal_waiting()

    async def close(self, within_s: float) -> None:
        """Accept no more, and see that what has been accepted is taken.

        Args:
            within_s: how long to wait for that.
        """
        if self._listener is not None:
            # What waits in the kernel would be reset.
            self._listener.accept_all()
            self._listener.close()
            self._listener = None
        try:
            async with asyncio.timeout(within_s):
                while self._waiting or any(lane.untaken for lane in self._lanes):
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            logger.warning("connections that no worker has taken are closed")
        self._over = True
        self._drop_waiting()

    async def empty(self, lane: Lane) -> None:
        """Give a worker no more connections, and wait until it has taken those on the way."""
        lane.closing = True
        while lane.untaken and lane in self._lanes:
            self._settled.clear()
            await self._settled.wait()

    # -- inside

    def _drop_waiting(self) -> None:
        for connection in self._waiting:
            connection.close()
        self._waiting.clear()

    def _take(self, connection: socket.socket) -> None:
        self._waiting.append(connection)
        self._deal_waiting()

    def _deal_waiting(self) -> None:
        waiting, now_s = self._waiting, self._loop.time()
        while waiting:
            lane = min(
                (lane for lane in self._lanes if not lane.full(now_s)),
                key=lambda lane: (lane.connections, lane.turn),
                default=None,
            )
            if lane is None:
                break
            self._turn += 1
            lane.turn = self._turn
            if not lane.untaken:
                lane.seen_s = now_s
            lane.untaken.append(waiting.popleft())
            lane.unsent += 1
            if lane.unsent == 1:
                # Sent in the next turn of the loop: what was accepted in this one goes in one message.
                self._loop.add_writer(lane.end.fileno(), self._send, lane)
        if self._listener is not None:
            self._listener.hold(len(waiting) >= _MAX_WAITING)

    def _send(self, lane: Lane) -> None:
        while lane.unsent:
            count = min(lane.unsent, MAX_AT_ONCE)
            first = len(lane.untaken) - lane.unsent
            descriptors = [lane.untaken[first + place].fileno() for place in range(count)]
            try:
                socket.send_fds(lane.end, [bytes((count,))], descriptors)
            except BlockingIOError:
                return
            except OSError:
                # The worker is dying; the end of its process brings the connections back.
                break
            lane.unsent -= count
        self._loop.remove_writer(lane.end.fileno())

    def _reported(self, lane: Lane) -> None:
        if not self._read_reports(lane):
            # At its end the socket is always readable; the end of the process is noticed elsewhere.
            self._loop.remove_reader(lane.end.fileno())
            lane.closing = True

    def _read_reports(self, lane: Lane) -> bool:
        """Read what a worker reports; False at the end."""
        alive, taken = True, 0
        while True:
            try:
                data = lane.end.recv(4096)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                alive = False
                break
            taken += lane.reported(data)
        for _ in range(min(taken, len(lane.untaken))):
            lane.untaken.popleft().close()
        if taken:
            lane.seen_s = self._loop.time()
            self._settled.set()
            self._deal_waiting()
        return alive
