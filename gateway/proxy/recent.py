"""The last requests that have ended, with the decisions about them: what `warmgate explain` is answered from."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from gateway.routing.decision import Decision

Ended = tuple[Mapping[str, Any], Decision | None, float]
"""The fields of a request's log line; the decision about its last attempt, None if there was none; and the monotonic
seconds when it ended."""


class Recent:
    """A bounded number of them; the oldest goes first.

    Attributes:
        capacity: how many are kept.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: deque[Ended] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def oldest_s(self) -> float | None:
        """When the oldest one ended: monotonic seconds; None if there is none."""
        return self._kept[0][2] if self._kept else None

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
