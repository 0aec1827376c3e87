"""Who comes when: stages, the sessions in them, and the turns that answers release."""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loadtests.replay.events import ARRIVAL, REPORT, Events
from loadtests.workloads.types import Load, Session

Arrive = Callable[[Session, int], None]


@dataclass(slots=True)
class StageSpan:
    """When a stage began, and when its last answer ended."""

    started_s: float
    ended_s: float


class Arrivals:
    """Brings the turns of a load, stage after stage.

    Attributes:
        stage: number of the stage under way.
        spans: of the stages so far.
        done: all stages have drained.
    """

    def __init__(self, load: Load, speed: float, events: Events, arrive: Arrive) -> None:
        """Prepare; nothing comes before `start`.

        Args:
            load: what comes.
            speed: sessions come this many times faster than the load says.
            events: the clock.
            arrive: called with a session and the number of its turn.
        """
        self.stage = -1
        self.spans: list[StageSpan] = []
        self.done = False
        self._load = load
        self._speed = speed
        self._events = events
        self._arrive = arrive
        self._sessions: Iterator[Session] = iter(())
        self._to_come = False
        self._open_sessions = 0
        self._expected_s: list[float] = []
        """Times of what is known to come, as a heap."""
        self._least_think_s = math.inf

    def start(self) -> None:
        """Begin the first stage now."""
        self._next_stage()

    def expect(self, at_s: float) -> None:
        """Something else will send requests at a time: engines must not run past it."""
        heapq.heappush(self._expected_s, at_s)

    def happened(self) -> None:
        """What was expected first has come."""
        heapq.heappop(self._expected_s)

    def quiet_until(self) -> float:
        """Until when no request can come: the next known arrival, and the shortest think time from now."""
        quiet_s = self._events.now_s + self._least_think_s
        return min(quiet_s, self._expected_s[0]) if self._expected_s else quiet_s

    def turn_ended(self, session: Session, turn_number: int, *, goes_on: bool) -> None:
        """An answer has ended, well or not.

        Args:
            session: whose.
            turn_number: which.
            goes_on: the session's next turn comes, if it has one.
        """
        following = turn_number + 1
        if goes_on and following < len(session.turns):
            self._bring(self._events.now_s + session.turns[following].think_s, session, following)
            return
        self._open_sessions -= 1
        self._check_drained()

    def _next_stage(self) -> None:
        self.stage += 1
        if self.stage >= len(self._load.stages):
            self.done = True
            return
        stage = self._load.stages[self.stage]
        now_s = self._events.now_s
        self.spans.append(StageSpan(now_s, now_s))
        thinks_s = [turn.think_s for session in stage.sessions for turn in session.turns[1:]]
        self._least_think_s = min(thinks_s, default=math.inf)
        self._sessions = iter(stage.sessions)
        self._to_come = True
        self._next_session()

    def _next_session(self) -> None:
        session = next(self._sessions, None)
        if session is None:
            self._to_come = False
            self._check_drained()
        else:
            self._bring(self.spans[-1].started_s + session.arrival_s / self._speed, session, 0)

    def _bring(self, at_s: float, session: Session, turn_number: int) -> None:
        self.expect(at_s)
        self._events.at(at_s, ARRIVAL, self._come, session, turn_number)

    def _come(self, session: Session, turn_number: int) -> None:
        self.happened()
        if turn_number == 0:
            self._open_sessions += 1
            self._next_session()
        self._arrive(session, turn_number)

    def _check_drained(self) -> None:
        if self._to_come or self._open_sessions:
            return
        now_s = self._events.now_s
        span = self.spans[-1]
        span.ended_s = now_s
        least_s = self._load.stages[self.stage].duration_s / self._speed
        self._events.at(max(now_s, span.started_s + least_s), REPORT, self._next_stage)
