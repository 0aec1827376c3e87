"""How many requests a second come, by pool: what a decision takes from those who come next depends on it."""

from math import exp

_MEMORY_S = 10.0
"""A request counts for about so long. Longer than bursts are: what has come in one is there already, and others follow
it at the usual rate."""


class Arrivals:
    """Counts of requests that fade away. No clock."""

    __slots__ = ("_counts", "_last_s")

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._last_s: dict[str, float] = {}

    def note(self, pool: str, now_s: float) -> None:
        """Count a request.

        Args:
            pool: for which it is; one of the fleet's.
            now_s: monotonic seconds.
        """
        self._counts[pool] = 1.0 + _MEMORY_S * self.per_s(pool, now_s)
        self._last_s[pool] = now_s

    def per_s(self, pool: str, now_s: float) -> float:
        """Return how many come a second, as it has been lately; too few in the first moments.

        Args:
            pool: of which.
            now_s: monotonic seconds.
        """
        count = self._counts.get(pool)
        if count is None:
            return 0.0
        return count * exp(min(self._last_s[pool] - now_s, 0.0) / _MEMORY_S) / _MEMORY_S
