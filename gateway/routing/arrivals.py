"""How many requests a second come, by pool: what a decision takes from those who come next depends on it."""

_STEP = 0.02
"""Weight of one gap in the moving mean."""
_LONGEST_GAP_S = 60.0
_FIRST_GAP_S = 1.0


class Arrivals:
    """Moving means of the gaps between requests. No clock."""

    __slots__ = ("_gaps_s", "_last_s")

    def __init__(self) -> None:
        self._gaps_s: dict[str, float] = {}
        self._last_s: dict[str, float] = {}

    def note(self, pool: str, now_s: float) -> None:
        """Count a request.

        Args:
            pool: for which it is; one of the fleet's.
            now_s: monotonic seconds.
        """
        gap_s = min(max(now_s - self._last_s.get(pool, now_s), 0.0), _LONGEST_GAP_S)
        before_s = self._gaps_s.get(pool, _FIRST_GAP_S)
        self._last_s[pool] = now_s
        self._gaps_s[pool] = before_s + _STEP * (gap_s - before_s)

    def per_s(self, pool: str) -> float:
        """Return how many come a second; one where nothing is known."""
        return 1.0 / max(self._gaps_s.get(pool, _FIRST_GAP_S), 1e-6)
