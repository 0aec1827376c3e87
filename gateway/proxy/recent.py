"""The last requests that have ended, with the decisions about them: what `warmgate explain` is answered from.

Keeping one costs a tenth of what a short request costs in all: its objects are freed long after, when no cache of the
processor has them any more. So under load only some of those are kept that went as they should, and all others.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from gateway.routing.assignment import Assignment
from gateway.routing.decision import Decision

_LATE_RATIO, _LATE_S = 2.0, 0.1
"""A first token is remarkably late beyond this times the prediction, and this much more."""
_SAVED_S = 2.0
"""For so long what might have been kept may be kept later."""

Ended = tuple[Mapping[str, Any], Decision | None, float]
"""The fields of a request's log line; the decision about its last attempt, None if there was none; and the monotonic
seconds when it ended."""


class Recent:
    """A bounded number of them; the oldest goes first.

    Attributes:
        capacity: how many are kept.
        per_s: how many a second are kept of those that went as they should.
    """

    def __init__(self, capacity: int, per_s: float) -> None:
        self.capacity = capacity
        self.per_s = per_s
        self._kept: deque[Ended] = deque(maxlen=capacity)
        self._saved = self._most_saved = per_s * _SAVED_S
        self._saved_s = float("-inf")

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def oldest_s(self) -> float | None:
        """When the oldest one ended: monotonic seconds; None if there is none."""
        return self._kept[0][2] if self._kept else None

    def wants(self, assignment: Assignment | None, well: bool, now_s: float) -> bool:
        """Say whether a request that has ended is to be kept.

        Args:
            assignment: its last attempt, if there was one.
            well: it was answered in full, at the first attempt.
            now_s: monotonic seconds.
        """
        if not well or assignment is None:
            return True
        observed_s = assignment.observed_ttft_s
        if observed_s is not None and observed_s > _LATE_RATIO * assignment.predicted_ttft_s + _LATE_S:
            return True
        saved = self._saved
        if saved < self._most_saved:
            saved = min(saved + (now_s - self._saved_s) * self.per_s, self._most_saved)
        self._saved_s = now_s
        keep = saved >= 1.0
        self._saved = saved - 1.0 if keep else saved
        return keep

    def add(self, record: Mapping[str, Any], decision: Decision | None, now_s: float) -> None:
        """Keep a request that has ended.

        Args:
            record: the fields of its log line.
            decision: about its last attempt.
            now_s: monotonic seconds.
        """
        self._kept.append((record, decision, now_s))

    def find(self, request_id: str) -> Ended | None:
        """Return the request with an id, the last one if clients have used it again; None if it is not kept."""
        for ended in reversed(self._kept):
            if ended[0]["id"] == request_id:
                return ended
        return None
