"""What the load generator is told and what it tells: plain data that passes as JSON between two processes."""

from dataclasses import dataclass, field
from typing import Literal

LoadKind = Literal["closed", "open", "streams"]


@dataclass(frozen=True, slots=True)
class Job:
    """One load on one port."""

    load: LoadKind
    """`closed`: each connection sends its next request when the last is answered. `open`: requests come at a fixed
    rate whatever happens. `streams`: long streams, all at once."""
    port: int
    size_bytes: int
    seconds: float
    """Length of the measured window."""
    warmup_s: float
    connections: int
    """Connections, or streams."""
    first_request: int = 0
    rate_per_s: float = 0.0
    """Of the open loop."""
    stub_port: int = 0
    """Where to end the streams."""
    watched: dict[str, int] = field(default_factory=dict)
    """Root processes whose CPU time is taken at both ends of the window, by name. `gateway` has its memory watched."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened in the window."""

    window_s: float = 0.0
    completed: int = 0
    """Requests answered in the window, or events received."""
    total: int = 0
    """Requests sent with warm-up and end, or streams."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU seconds in the window by name; `generator` is the load generator itself."""
    peak_rss_bytes: int = 0
    """Highest resident memory of the gateway from the first connection to the end of the window."""
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    """Latencies of the requests that completed in the window."""
    reads: int = 0
    """Reads in which the events of the window came; fewer than events means that they were bunched."""
    errors: dict[str, int] = field(default_factory=dict)
    """Everything but a complete answer of status 200, by kind, warm-up and end included."""
