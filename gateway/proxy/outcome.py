"""How a request ended."""

from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended; the label of the metrics and the field of the log."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    """A 4xx of a replica."""
    SERVER_ERROR = "server_error"
    """A 5xx of a replica, relayed."""
    REFUSED = "refused"
    """Answered by the gateway with an error of its own: the client's fault, or no replica could be tried."""
    FAILED = "failed"
    """Replicas were tried and the gateway had to answer with an error."""
    BROKEN = "broken"
    """The replica failed after bytes had reached the client."""
    CANCELLED = "cancelled"
    """The client left first."""
    LOCAL = "local"
    """Answered by the gateway itself: models, health."""
