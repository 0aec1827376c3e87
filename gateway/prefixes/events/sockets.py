"""ZeroMQ sockets read by the event loop, without threads and without futures.

libzmq does the network in threads of its own, which know nothing of Python. What is left is to take messages out,
decode them and apply them: some microseconds each, done on the event loop in slices. A Python thread for it would
compete with the loop for the interpreter and hold it for up to 5 ms at a time; a slice holds it for one.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger(__name__)

SLICE_S = 0.001
"""Messages are taken out for so long at a time; then everybody else has a turn."""
MAX_MESSAGE_BYTES = 64 << 20
"""A step of an engine announces some hundred blocks, of which each takes some hundred bytes."""
RECEIVE_MESSAGES = 20_000
"""Messages libzmq holds while the event loop is busy; what is more is dropped by the publisher, and replayed."""

Receive = Callable[[list[bytes]], None]


class Reader:
    """One socket and who is told of its messages."""

    def __init__(self, socket: zmq.Socket[bytes], receive: Receive) -> None:
        """Begin to read. Takes over the socket.

        Args:
            socket: connected or bound.
            receive: called with the frames of each message.
        """
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._receive = receive
        descriptor = socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        self._fd = descriptor
        self._due: asyncio.Handle | None = None
        self._loop.add_reader(self._fd, self._read)
        # The descriptor tells of changes only: what is there already it will not tell of.
        self._soon()

    def send(self, frames: list[bytes]) -> None:
        """Send a message; dropped if the socket cannot take it now."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        # Sending, too, may take the change away that the descriptor has to tell of.
        self._soon()

    def close(self) -> None:
        """Stop, at once and for good."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)

    def _soon(self) -> None:
        if self._due is None and not self._socket.closed:
            self._due = self._loop.call_soon(self._read)

    def _read(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        until_s = time.perf_counter() + SLICE_S
        socket, receive = self._socket, self._receive
        while not socket.closed:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                logger.error("a KV event socket cannot be read: %s", error)
                return
            try:
                receive(frames)
            except Exception:
                logger.exception("a KV event message failed inside the gateway")
            if time.perf_counter() > until_s:
                self._soon()
                return


def subscriber(context: "zmq.Context[zmq.Socket[bytes]]", topic: str) -> zmq.Socket[bytes]:
    """Make a SUB socket that is not connected yet."""
    socket = context.socket(zmq.SUB)
    _options(socket)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_MESSAGES)
    socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
    # A peer that vanished without a word is noticed by its missing heartbeat.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
    return socket


def replayer(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> zmq.Socket[bytes]:
    """Make a DEALER socket connected to a publisher's replay endpoint."""
    socket = context.socket(zmq.DEALER)
    _options(socket)
    # A publisher sends a replay in one go and drops what does not fit.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(endpoint)
    return socket


def monitor(socket: zmq.Socket[bytes], connected: Callable[[], None], disconnected: Callable[[], None]) -> Reader:
    """Tell of a socket's connections being made and lost; the reader must be closed before the socket."""
    events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    pair: zmq.Socket[bytes] = socket.get_monitor_socket(events)

    def receive(frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            connected()
        elif event == zmq.EVENT_DISCONNECTED:
            disconnected()

    return Reader(pair, receive)


def _options(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
