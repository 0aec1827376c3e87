"""What a workload is: stages of sessions of turns.

An open loop is sessions of one turn each. In a session of several the next turn comes a think time after the answer to
the one before has ended, however long that took: a closed loop, as users and agents behave. A stage starts when the
stage before has drained and its time is over, as the steps of a rate ladder do.
"""

from collections.abc import Sequence
from dataclasses import Field, dataclass, replace
from typing import Any, ClassVar, Protocol

from loadtests.workloads.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Turn:
    """One request."""

    prompt: Prompt
    output_tokens: int
    """Tokens of the answer, at least 1."""
    answer: int
    """Content id of the answer, under which later prompts repeat it."""
    think_s: float = 0.0
    """Seconds from the end of the answer before to this request; of no meaning in a session's first turn."""
    request_class: str = ""
    """In mixtures, the part that the request belongs to, of which figures are given too; empty where all are alike."""


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of one user or agent, one after the other."""

    arrival_s: float
    """When the first turn comes, in seconds from the start of the stage."""
    turns: Sequence[Turn]
    """At least one."""
    key: str | None = None
    """What the client would send as its session or user; None if it sends nothing."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Sessions that are measured together."""

    name: str
    sessions: Sequence[Session]
    """In order of arrival."""
    duration_s: float = 0.0
    """The next stage starts no earlier than this, even if all is done."""
    warm_up: bool = False
    """Left out of the figures."""
    rate_per_s: float | None = None
    """Offered sessions per second, where the stage has such a rate: the abscissa of curves."""


@dataclass(frozen=True, slots=True)
class Load:
    """A workload with all its numbers drawn: the same object drives every policy."""

    name: str
    stages: Sequence[Stage]

    @property
    def requests(self) -> int:
        """Turns of all sessions."""
        return sum(len(session.turns) for stage in self.stages for session in stage.sessions)

    @property
    def request_classes(self) -> list[str]:
        """Names of its parts, in alphabetical order; empty where all requests are alike."""
        turns = (turn for stage in self.stages for session in stage.sessions for turn in session.turns)
        return sorted({turn.request_class for turn in turns} - {""})

    def first(self, requests: int) -> "Load":
        """The load without the sessions that come after so many requests."""
        stages = []
        for stage in self.stages:
            sessions = []
            for session in stage.sessions:
                if requests <= 0:
                    break
                sessions.append(session)
                requests -= len(session.turns)
            if sessions:
                stages.append(replace(stage, sessions=sessions))
        return Load(self.name, stages)


class Workload(Protocol):
    """A generator: a frozen dataclass of parameters that draws a load."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def load(self, seed: int) -> Load:
        """Draw the load; equal seeds give equal loads."""
        ...
