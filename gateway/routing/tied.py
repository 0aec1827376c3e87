"""How many requests a second find their prefix on a replica: they come back there, and wait if it is busy then."""

from math import exp

FADING_S = 10.0
"""A request counts for about so long: longer than the time between the turns of most conversations, and than bursts."""
_EVERY_S = 0.25


class Tied:
    """Counts by replica slot that fade. No clock.

    Attributes:
        per_s: requests a second, each as the share of its prompt that it found. The same list for ever; it only grows.
    """

    __slots__ = ("_faded_s", "per_s")

    def __init__(self) -> None:
        self.per_s: list[float] = []
        self._faded_s = 0.0

    def open(self, slot: int) -> None:
        """Make room for a slot."""
        while len(self.per_s) <= slot:
            self.per_s.append(0.0)

    def forget(self, slot: int) -> None:
        """Nothing that was cached in the slot is there any more."""
        self.per_s[slot] = 0.0

    def fade(self, now_s: float) -> None:
        """Let time pass.

        Args:
            now_s: monotonic seconds.
        """
        passed_s = now_s - self._faded_s
        if 0.0 <= passed_s < _EVERY_S:
            return
        self._faded_s = now_s
        per_s, left = self.per_s, exp(-max(passed_s, 0.0) / FADING_S)
        for slot, rate in enumerate(per_s):
            if rate:
                per_s[slot] = rate * left

    def note(self, slot: int, found: float) -> None:
        """Count requests.

        Args:
            slot: where they go.
            found: prompts, each as the share of it that is cached there.
        """
        self.per_s[slot] += found / FADING_S
