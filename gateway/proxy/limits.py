"""The limits of the data plane, flat for the hot path."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlaneLimits:
    """What `gateway.config` says in its sections limits, timeouts, retries and queue; explained there."""

    max_body_bytes: int
    max_head_bytes: int
    max_headers: int
    max_connections: int
    max_held_bytes: int
    write_buffer_bytes: int
    max_idle_connections: int
    retry_after_s: int
    head_timeout_s: float
    body_timeout_s: float
    idle_timeout_s: float
    connect_timeout_s: float
    first_byte_timeout_s: float
    silence_timeout_s: float
    client_stall_timeout_s: float
    deadline_s: float
    queue_wait_s: float
    replica_keepalive_s: float
    max_attempts: int
    retry_within_s: float

    def tick_s(self) -> float:
        """How often limits must be looked at so that the shortest of them is kept to within a quarter."""
        shortest = min(
            self.head_timeout_s,
            self.body_timeout_s,
            self.idle_timeout_s,
            self.first_byte_timeout_s,
            self.silence_timeout_s,
            self.client_stall_timeout_s,
            self.replica_keepalive_s,
            self.deadline_s or 1e9,
            self.queue_wait_s or 1e9,
        )
        return min(max(shortest / 4, 0.01), 0.25)
