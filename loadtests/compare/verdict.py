"""A target, what was measured, and whether that is enough."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the list.

    Args:
        topic: what the target is about: a set of scenarios.
        target: the target in words.
        limit: the bound on `measured`.
        measured: what was reached; None if it has not been run.
        at_least: the bound is a lower one.
        worst_seed: the worst single seed's value of the same; None if there is but one or it means nothing.
        note: who or what it was measured against.
    """

    topic: str
    target: str
    limit: float
    measured: float | None
    at_least: bool = False
    worst_seed: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None if nothing was measured."""
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    @property
    def word(self) -> str:
        """Yes, no, or not run."""
        return {True: "yes", False: "NO", None: "not run"}[self.met]

    @property
    def missing_by(self) -> float:
        """How far off the limit a missed target is, as a share of the limit; 0 for others."""
        if self.met is not False or self.measured is None:
            return 0.0
        return abs(self.measured / self.limit - 1.0)


def missed(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The targets that are not reached, the worst first."""
    return sorted((verdict for verdict in verdicts if verdict.met is False), key=lambda verdict: -verdict.missing_by)
