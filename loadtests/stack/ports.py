"""Finding and checking TCP ports of this machine."""

import socket
from contextlib import ExitStack

LOOPBACK = "127.0.0.1"


class PortTakenError(RuntimeError):
    """Something listens already on a port that was asked for."""


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, all different.

    They are free when this returns; another program may take one before it is used.
    """
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind((LOOPBACK, 0))
        return [int(listener.getsockname()[1]) for listener in sockets]


def check_free(port: int, purpose: str, option: str, host: str = LOOPBACK) -> None:
    """Make sure that a server can listen on a port.

    Args:
        port: the port.
        purpose: what it is for, as "the gateway".
        option: the command line option that chooses another.
        host: address to listen on.

    Raises:
        PortTakenError: it cannot; the message names the option.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortTakenError(
                f"port {port} for {purpose} cannot be used ({error.strerror}): "
                f"stop what listens there, or choose another with {option}"
            ) from None
