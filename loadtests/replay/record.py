"""What happened to each request, and between tokens, while a replay runs."""

from array import array

from gateway.replicas.breaker import Outcome
from gateway.routing.assignment import Assignment
from gateway.routing.query import Query
from loadtests.engine import EngineRequest
from loadtests.replay.settings import Slo
from loadtests.workloads.types import Session, Turn


class RequestRecord:
    """One request from its arrival to its end."""

    __slots__ = (
        "arrival_s",
        "assigned_s",
        "assignment",
        "attempts",
        "cached_tokens",
        "disaggregated",
        "ended_s",
        "engine_request",
        "error",
        "expected_cached_tokens",
        "first_token_s",
        "predicted_ttft_s",
        "prefill_cached_tokens",
        "query",
        "session",
        "slo",
        "slot",
        "stage",
        "tried",
        "turn",
        "turn_number",
    )

    def __init__(
        self, session: Session, turn_number: int, stage: int, arrival_s: float, query: Query, slo: Slo
    ) -> None:
        self.session = session
        self.turn_number = turn_number
        self.turn: Turn = session.turns[turn_number]
        self.stage = stage
        self.arrival_s = arrival_s
        self.query = query
        self.slo = slo
        self.assignment: Assignment | None = None
        self.engine_request: EngineRequest | None = None
        self.attempts = 0
        self.tried: tuple[int, ...] = ()
        self.slot = -1
        self.assigned_s = arrival_s
        self.predicted_ttft_s: float | None = None
        """What the first attempt was promised; later ones do not begin at the arrival."""
        self.expected_cached_tokens = 0
        self.cached_tokens = 0
        self.disaggregated = False
        self.prefill_cached_tokens = 0
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.error: Outcome | str | None = None


class TokenGaps:
    """Times between two tokens of one answer, as (seconds, how many): a step of n decodes makes n equal ones."""

    __slots__ = ("_counts", "_gaps_s", "_paused")

    def __init__(self) -> None:
        self._gaps_s = array("d")
        self._counts = array("q")
        self._paused: dict[EngineRequest, float] = {}

    def add(self, gap_s: float, count: int) -> None:
        """Count `count` gaps of `gap_s` seconds."""
        self._gaps_s.append(gap_s)
        self._counts.append(count)

    def preempted(self, request: EngineRequest, last_token_s: float) -> None:
        """A request stops to decode and starts over; its last token so far was at `last_token_s`."""
        # Preempted again before it has emitted another: the gap began with the first time.
        self._paused.setdefault(request, last_token_s)

    def resumed(self, request: EngineRequest, token_s: float) -> None:
        """A preempted request emits its next token."""
        last_token_s = self._paused.pop(request, None)
        if last_token_s is not None:
            self.add(token_s - last_token_s, 1)

    def ended(self, request: EngineRequest) -> None:
        """A request is gone."""
        self._paused.pop(request, None)

    def weighted(self) -> list[tuple[float, int]]:
        """All gaps, ascending."""
        return sorted(zip(self._gaps_s, self._counts, strict=True))
