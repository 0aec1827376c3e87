"""Passive outlier ejection of one replica, from its answers to real requests. Pure; time is passed in.

Active health asks the replica; this watches it work. A replica that answers probes and fails every request is
found here and nowhere else.

States

    CLOSED     takes requests. Counts failures in a row.
    EJECTED    takes none, until `until_s`.
    HALF_OPEN  would take one request, the trial.
    TRIAL      the trial is under way; takes no other.

Transitions

    CLOSED     success                              -> CLOSED     the count starts again, the past is forgiven
    CLOSED     failure, fewer than the threshold    -> CLOSED     counted
    CLOSED     failure, threshold, may be ejected   -> EJECTED    base time, doubled for each time in a row
    CLOSED     failure, threshold, may not          -> CLOSED     asked again at the next failure
    EJECTED    time is over, or fresh process       -> HALF_OPEN
    HALF_OPEN  a request begins                     -> TRIAL      this request is the trial
    TRIAL      the trial is answered                -> CLOSED     on probation: the next outcome decides
    TRIAL      the trial succeeds                   -> CLOSED     forgiven
    TRIAL      the trial fails                      -> EJECTED    longer
    TRIAL      the trial ends neutral               -> HALF_OPEN  it decided nothing
    not CLOSED success of a request begun since     -> CLOSED     forgiven; it was sent for want of others

Neutral outcomes change nothing anywhere else: a client's error, back-pressure (429, 503: an overloaded
replica is no outlier, and ejecting it moves its load onto the next), a client that left. Outcomes of
requests begun before an ejection are ignored after it.

Defaults are those of Envoy's outlier detection (consecutive_5xx 5), with shorter times (Envoy: base 30 s,
maximum 300 s), because a trial costs one request here and not a full share of the traffic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How one attempt on a replica ended."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    """4xx other than 429."""
    BACKPRESSURE = "backpressure"
    """429 or 503."""
    SERVER_ERROR = "server_error"
    """500, 502, 504, or an answer that is not HTTP."""
    CONNECT_ERROR = "connect_error"
    TIMEOUT = "timeout"
    """No first byte in time."""
    CUT = "cut"
    """The connection broke before the answer was complete."""
    CANCELLED = "cancelled"
    """The gateway or the client gave up first: says nothing about the replica."""


FAILURES = frozenset({Outcome.SERVER_ERROR, Outcome.CONNECT_ERROR, Outcome.TIMEOUT, Outcome.CUT})


class State(StrEnum):
    """See the module."""

    CLOSED = "closed"
    EJECTED = "ejected"
    HALF_OPEN = "half_open"
    TRIAL = "trial"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When to eject, and for how long."""

    consecutive_failures: int = 5
    base_ejection_s: float = 10.0
    max_ejection_s: float = 120.0
    max_ejected_share: float = 0.5
    """Of a pool's replicas that are up, how many may be ejected at a time, rounded up; one always stays.

    When most of a pool fails at once, the cause is rarely the replicas, and ejecting them sends all load to
    the rest: Envoy bounds it for that reason (max_ejection_percent, 10 %). Fleets of GPUs have a few dear
    replicas, not hundreds of cheap ones, hence a half.
    """

    def ejection_s(self, times_in_a_row: int) -> float:
        """How long the n-th ejection in a row lasts.

        Args:
            times_in_a_row: 1 for the first.
        """
        # The exponent is bounded: 2.0**1024 is an OverflowError.
        return min(self.base_ejection_s * 2.0 ** min(times_in_a_row - 1, 60), self.max_ejection_s)


class Breaker:
    """The breaker of one replica.

    Every `begin` is followed by exactly one `record` with what `begin` returned.

    Attributes:
        state: see the module.
        failures: failures in a row.
        ejections: ejections in a row.
        until_s: when an ejection is over.
    """

    __slots__ = ("_generation", "_settings", "ejections", "failures", "state", "until_s")

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._generation = 1
        self.state = State.CLOSED
        self.failures = 0
        self.ejections = 0
        self.until_s = 0.0

    def begin(self) -> int:
        """A request is sent to the replica.

        Returns:
            A mark of the attempt: the ejections so far, negative for the trial.
        """
        if self.state is State.HALF_OPEN:
            self.state = State.TRIAL
            return -self._generation
        return self._generation

    def answered(self, mark: int) -> None:
        """The first byte of a successful answer has come. A trial need not last as long as its stream."""
        if self.state is State.TRIAL and mark == -self._generation:
            self.state = State.CLOSED
            self.failures = self._settings.consecutive_failures - 1

    def record(self, mark: int, outcome: Outcome, now_s: float, may_eject: Callable[[], bool]) -> None:
        """An attempt has ended.

        Args:
            mark: what `begin` returned for it.
            outcome: how it ended.
            now_s: monotonic seconds.
            may_eject: asked when it comes to an ejection, whether the pool can spare the replica.
        """
        if abs(mark) != self._generation:
            return
        is_trial = mark < 0 and self.state is State.TRIAL
        if outcome is Outcome.OK:
            self.state = State.CLOSED
            self.failures = 0
            self.ejections = 0
        elif outcome not in FAILURES:
            if is_trial:
                self.state = State.HALF_OPEN
        elif is_trial:
            self._eject(now_s)
        elif self.state is State.CLOSED:
            self.failures += 1
            if self.failures >= self._settings.consecutive_failures and may_eject():
                self._eject(now_s)

    def elapsed(self, now_s: float) -> None:
        """Time has passed: an ejection may be over."""
        if self.state is State.EJECTED and now_s >= self.until_s:
            self.state = State.HALF_OPEN

    def offer_trial(self) -> None:
        """The replica may work again (a fresh process, say): an ejection ends early."""
        if self.state is State.EJECTED:
            self.state = State.HALF_OPEN

    def _eject(self, now_s: float) -> None:
        self.state = State.EJECTED
        self.ejections += 1
        self.failures = 0
        self._generation += 1
        self.until_s = now_s + self._settings.ejection_s(self.ejections)
