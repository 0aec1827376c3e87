"""How many retries the fleet can bear: a share of the requests, and a few per second for quiet times.

After Finagle's RetryBudget (twitter/finagle, `RetryBudget.scala`): each request deposits, each retry withdraws. When
every replica fails, retries then add at most that share to the load instead of multiplying it.
"""

from collections.abc import Callable

_WINDOW_S = 10.0


class RetryBudget:
    """A token bucket fed by requests and by time."""

    __slots__ = ("_balance", "_ceiling", "_filled_s", "_min_per_s", "_now", "_share")

    def __init__(self, share: float, min_per_s: float, now: Callable[[], float]) -> None:
        """Start with what ten quiet seconds would have saved.

        Args:
            share: retries allowed per request.
            min_per_s: retries per second that are always allowed.
            now: monotonic clock.
        """
        self._share = share
        self._min_per_s = min_per_s
        self._now = now
        self._ceiling = min_per_s * _WINDOW_S + share * 1000.0
        self._balance = min_per_s * _WINDOW_S
        self._filled_s = now()

    def configure(self, share: float, min_per_s: float) -> None:
        """Use other terms from now on; what has been saved is kept."""
        self._share = share
        self._min_per_s = min_per_s
        self._ceiling = min_per_s * _WINDOW_S + share * 1000.0

    def deposit(self) -> None:
        """A request has come."""
        balance = self._balance + self._share
        self._balance = balance if balance < self._ceiling else self._ceiling

    def available(self) -> bool:
        """Say whether there is a retry to take."""
        now_s = self._now()
        self._balance = min(self._balance + (now_s - self._filled_s) * self._min_per_s, self._ceiling)
        self._filled_s = now_s
        return self._balance >= 1.0

    def withdraw(self) -> bool:
        """Take a retry, if there is one."""
        if not self.available():
            return False
        self._balance -= 1.0
        return True
