"""How often something is done: so often on average, and several times at once after a pause. No clock."""


class Pace:
    """A token bucket.

    Where little happens, what happens is passed on at once; where much does, it is gathered.
    """

    __slots__ = ("_last_s", "_most", "_saved")

    def __init__(self, saved: float) -> None:
        """Make one that is full.

        Args:
            saved: how many times it may be done at once after a pause.
        """
        self._most = self._saved = saved
        self._last_s = float("-inf")

    def is_due(self, now_s: float, every_s: float) -> bool:
        """Return whether it may be done now, and note that it is.

        Args:
            now_s: monotonic seconds.
            every_s: how much time it has on average.
        """
        self._saved = min(self._saved + (now_s - self._last_s) / every_s, self._most)
        self._last_s = now_s
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True

    def pause_s(self, now_s: float, every_s: float) -> float:
        """Note that it has been done, and return the seconds until it may be done again.

        Args:
            now_s: monotonic seconds.
            every_s: how much time it has on average.
        """
        self._saved = min(self._saved + (now_s - self._last_s) / every_s, self._most) - 1.0
        self._last_s = now_s
        return max(-self._saved, 0.0) * every_s
