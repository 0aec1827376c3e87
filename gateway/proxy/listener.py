"""The listening socket: takes all waiting connections at once.

libuv, and with it uvloop, accepts one connection per turn of the event loop. While hundreds of streams keep every turn
busy for milliseconds, a burst of new clients would wait in line for seconds; so the waiting connections are accepted
here, up to a bound, whenever there are any.
"""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

logger = logging.getLogger(__name__)

_AT_ONCE = 256
_PAUSE_S = 0.5
# The peer gave up while waiting in line: the next one may be fine.
_SKIPPED = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR})


class Arrivals:
    """Makes transports and protocols of connected sockets, with TLS if there is a context for it."""

    def __init__(
        self, factory: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None, handshake_timeout_s: float
    ) -> None:
        """Prepare.

        Args:
            factory: makes the protocol of each connection.
            tls: context for TLS, None for plain TCP.
            handshake_timeout_s: limit of a TLS handshake.
        """
        self._loop = asyncio.get_running_loop()
        self._factory = factory
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s if tls is not None else None
        self._arriving: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Connections that are not open yet."""
        return len(self._arriving)

    def take(self, connection: socket.socket) -> None:
        """Open a connection; it belongs to its protocol from then on."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._open(connection))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._factory, connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_timeout_s
            )
        except (OSError, ssl.SSLError) as error:
            # A client that leaves, or speaks no TLS, while it is let in.
            logger.debug("connection ended while it was opened: %s", error)
            connection.close()


class Listener:
    """Accepts connections on one or more sockets until it is closed.

    Attributes:
        port: the bound port.
    """

    def __init__(self, sockets: list[socket.socket], take: Callable[[socket.socket], None]) -> None:
        """Begin to accept.

        Args:
            sockets: listening, non-blocking.
            take: called with each connection.
        """
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        self._take = take
        self._resumes: set[asyncio.TimerHandle] = set()
        self._closed = False
        self._held = False
        self.port: int = sockets[0].getsockname()[1]
        for listening in sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def close(self) -> None:
        """Accept no more; connections that have been accepted go on."""
        if self._closed:
            return
        self._closed = True
        for handle in self._resumes:
            handle.cancel()
        for listening in self._sockets:
            self._loop.remove_reader(listening.fileno())
            listening.close()

    def hold(self, held: bool) -> None:
        """Leave connections in the kernel's queue for the time being, or take them again."""
        if held == self._held or self._closed:
            return
        self._held = held
        for listening in self._sockets:
            if held:
                self._loop.remove_reader(listening.fileno())
            else:
                self._loop.add_reader(listening.fileno(), self._accept, listening)

    def accept_all(self) -> None:
        """Accept whatever waits in the kernel's queue; closing would reset it."""
        for listening in self._sockets:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    break
                self._take(connection)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if self._held:
                return
            try:
                connection, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _SKIPPED:
                    continue
                # Out of sockets or memory: trying again at once would only burn the loop.
                logger.error("cannot accept connections for the moment: %s", error)
                self._pause(listening)
                return
            self._take(connection)

    def _pause(self, listening: socket.socket) -> None:
        self._loop.remove_reader(listening.fileno())

        def resume() -> None:
            self._resumes.discard(handle)
            if not self._held:
                self._loop.add_reader(listening.fileno(), self._accept, listening)

        handle = self._loop.call_later(_PAUSE_S, resume)
        self._resumes.add(handle)


async def bind(host: str, port: int) -> list[socket.socket]:
    """Bind an address, without listening yet.

    Args:
        host: name or address; a name that stands for several addresses binds them all.
        port: TCP port; 0 picks one, the same for all addresses.

    Raises:
        OSError: the address cannot be bound.
    """
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            bound = socket.socket(family, kind, protocol)
            sockets.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(
                (address[0], sockets[0].getsockname()[1] if port == 0 and len(sockets) > 1 else port, *address[2:])
            )
            bound.setblocking(False)
    except OSError as error:
        for bound in sockets:
            bound.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
    return sockets


def listen(sockets: list[socket.socket], backlog: int, take: Callable[[socket.socket], None]) -> Listener:
    """Begin to accept on bound sockets.

    Args:
        sockets: of `bind`; closed if this fails.
        backlog: connections the kernel holds before they are accepted.
        take: called with each connection.

    Raises:
        OSError: another socket listens there.
    """
    try:
        for bound in sockets:
            bound.listen(backlog)
    except OSError as error:
        host, port = sockets[0].getsockname()[:2]
        for bound in sockets:
            bound.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
    return Listener(sockets, take)
