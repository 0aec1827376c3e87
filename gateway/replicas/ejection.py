"""The breakers of all replicas, bound to the fleet: outcomes in, ejected replicas and trials out.

The exchange calls `begin` when it sends an attempt, `answered` at the first byte of a successful answer, and
`record` exactly once when the attempt has ended.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from mypy_extensions import mypyc_attr

from gateway.replicas.breaker import Breaker, BreakerSettings, Outcome, State
from gateway.replicas.registry import Change, Fleet
from gateway.replicas.replica import Replica

logger = logging.getLogger(__name__)


class Timer(Protocol):
    """What a scheduled call can do; `asyncio.TimerHandle` is one."""

    def cancel(self) -> None:
        """Do not call."""


CallLater = Callable[[float, Callable[[], None]], Timer]
"""Calls a function after so many seconds; `loop.call_later` is one."""


class Attempt:
    """One attempt on one replica, as its breaker knows it."""

    __slots__ = ("_breaker", "_mark", "_recorded", "replica")

    def __init__(self, replica: Replica, breaker: Breaker, mark: int) -> None:
        self.replica = replica
        self._breaker = breaker
        self._mark = mark
        self._recorded = False


@mypyc_attr(allow_interpreted_subclasses=True)
class Ejector:
    """Takes replicas that fail real requests out of routing for a while."""

    def __init__(self, fleet: Fleet, settings: BreakerSettings, call_later: CallLater) -> None:
        """Follow a fleet from now on.

        Args:
            fleet: the fleet; replicas already in it are taken over.
            settings: when to eject.
            call_later: schedules the end of an ejection.
        """
        self._fleet = fleet
        self._settings = settings
        self._call_later = call_later
        self._breakers: dict[Replica, Breaker] = {}
        self._timers: dict[Replica, Timer] = {}
        for replica in fleet.replicas.values():
            self._breakers[replica] = Breaker(settings)
        fleet.on_change(self._on_change)

    def begin(self, replica: Replica) -> Attempt:
        """An attempt is sent to a replica. If the replica is on trial, this is the trial."""
        breaker = self._breakers.get(replica)
        if breaker is None:
            # The replica has left between selection and sending: nobody's breaker.
            breaker = Breaker(self._settings)
        attempt = Attempt(replica, breaker, breaker.begin())
        if replica.ejected:
            self._show(replica, breaker)
        return attempt

    def answered(self, attempt: Attempt) -> None:
        """The first byte of a successful answer has come."""
        if attempt.replica.ejected:
            attempt._breaker.answered(attempt._mark)
            self._show(attempt.replica, attempt._breaker)

    def record(self, attempt: Attempt, outcome: Outcome, now_s: float) -> None:
        """An attempt has ended. Only the first call for an attempt counts.

        Args:
            attempt: what `begin` returned.
            outcome: how it ended.
            now_s: monotonic seconds.
        """
        if attempt._recorded:
            return
        attempt._recorded = True
        replica, breaker = attempt.replica, attempt._breaker
        before = breaker.state
        breaker.record(attempt._mark, outcome, now_s, lambda: self._may_eject(replica))
        if breaker.state is before:
            return
        if breaker.state is State.EJECTED and self._breakers.get(replica) is breaker:
            duration_s = breaker.until_s - now_s
            logger.warning("%s is ejected for %.0f s, last failure: %s", replica.name, duration_s, outcome)
            self._cancel_timer(replica)
            self._timers[replica] = self._call_later(duration_s, lambda: self._elapsed(replica))
        self._show(replica, breaker)

    def state(self, replica: Replica) -> State:
        """The state of a replica's breaker, for operators."""
        breaker = self._breakers.get(replica)
        return State.CLOSED if breaker is None else breaker.state

    def close(self) -> None:
        """Cancel what is scheduled."""
        for replica in list(self._timers):
            self._cancel_timer(replica)

    def _may_eject(self, replica: Replica) -> bool:
        return self._fleet.may_eject(replica, self._settings.max_ejected_share)

    def _elapsed(self, replica: Replica) -> None:
        self._timers.pop(replica, None)
        breaker = self._breakers.get(replica)
        if breaker is not None:
            # The timer is the clock here: an event loop may call a hair before its own clock says so.
            breaker.elapsed(breaker.until_s)
            self._show(replica, breaker)

    def _show(self, replica: Replica, breaker: Breaker) -> None:
        """Make the fleet see the breaker's state."""
        if self._breakers.get(replica) is not breaker:
            return
        if replica.ejected and breaker.state is State.CLOSED:
            logger.info("%s is restored", replica.name)
            self._cancel_timer(replica)
        self._fleet.set_ejected(replica, breaker.state is not State.CLOSED)
        self._fleet.set_trial_open(replica, breaker.state is State.HALF_OPEN)

    def _cancel_timer(self, replica: Replica) -> None:
        timer = self._timers.pop(replica, None)
        if timer is not None:
            timer.cancel()

    def _on_change(self, change: Change, replica: Replica) -> None:
        if change is Change.ADDED:
            self._breakers[replica] = Breaker(self._settings)
        elif change is Change.REMOVED:
            self._cancel_timer(replica)
            self._breakers.pop(replica, None)
        elif change in (Change.UP, Change.RESTARTED) and replica.ejected:
            breaker = self._breakers[replica]
            breaker.offer_trial()
            self._show(replica, breaker)
