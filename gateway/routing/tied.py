"""How many requests a second find their prefix on a replica: they come back there, and wait if it is busy then."""

from math import exp

FADING_S = 10.0
"""A request counts for about so long: longer than the time between the turns of most conversations, and than bursts."""
_EVERY_S = 0.25


class Tied:
    """Counts by replica slot that fade. No clock.

    Attributes:
        per_s: requests a second, each as the share of its prompt that it found.
        saved: seconds of prefill a second that they would have taken elsewhere, where nothing is cached. Both are the
            same lists for ever; they only grow.
    """

    __slots__ = ("_faded_s", "per_s", "saved")

    def __init__(self) -> None:
        self.per_s: list[float] = []
        self.saved: list[float] = []
        self._faded_s = 0.0

    def open(self, slot: int) -> None:
        """Make room for a slot."""
        while len(self.per_s) <= slot:
            self.per_s.append(0.0)
            self.saved.append(0.0)

    def forget(self, slot: int) -> None:
        """Nothing that was cached in the slot is there any more."""
        self.per_s[slot] = self.saved[slot] = 0.0

    def fade(self, now_s: float) -> None:
        """Let time pass.

        Args:
            now_s: monotonic seconds.
        """
        passed_s = now_s - self._faded_s
        if 0.0 <= passed_s < _EVERY_S:
            return
        self._faded_s = now_s
        left = exp(-max(passed_s, 0.0) / FADING_S)
        for column in (self.per_s, self.saved):
            for slot, rate in enumerate(column):
                if rate:
                    column[slot] = rate * left

    def note(self, slot: int, found: float, saved_s: float) -> None:
        """Count requests.

        Args:
            slot: where they go.
            found: prompts, each as the share of it that is cached there.
            saved_s: seconds of prefill that this saves.
        """
        self.per_s[slot] += found / FADING_S
        self.saved[slot] += saved_s / FADING_S
