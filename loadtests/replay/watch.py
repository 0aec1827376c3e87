"""How the gateway learns of its replicas: health probes and metrics scrapes in simulated time."""

import math
from collections.abc import Callable, Sequence

from gateway.replicas.registry import Fleet, Replica
from gateway.replicas.scrape import STALE_AFTER_INTERVALS
from loadtests.replay.engines import SimulatedReplica
from loadtests.replay.events import REPORT, Events
from loadtests.replay.settings import ReplaySettings


class Watch:
    """Scrapes every replica in turn, and finds those that have died or come back, as late as the live gateway does."""

    def __init__(
        self,
        fleet: Fleet,
        replicas: Sequence[SimulatedReplica],
        settings: ReplaySettings,
        events: Events,
        done: Callable[[], bool],
    ) -> None:
        """Prepare; nothing is read before `start`.

        Args:
            fleet: who is told.
            replicas: who is asked.
            settings: intervals.
            events: the clock.
            done: no more requests will come, so there is nothing to watch for.
        """
        self._fleet = fleet
        self._replicas = replicas
        self._settings = settings
        self._events = events
        self._done = done

    def start(self) -> None:
        """Read all metrics once, and then every replica's once per interval."""
        interval_s = self._settings.scrape_interval_s
        for replica in self._replicas:
            self._scrape(replica)
            if interval_s > 0:
                # Spread over the interval, as the live scraper spreads its requests.
                phase_s = interval_s * (replica.slot + 1) / len(self._replicas)
                self._events.at(phase_s, REPORT, self._turn, replica)

    def died(self, replica: SimulatedReplica) -> None:
        """A process has ended: probes will be refused until that counts as down."""
        settings = self._settings
        noticed_s = self._next_probe_s() + (settings.health_fall - 1) * settings.health_interval_s
        self._events.at(noticed_s, REPORT, self._refused, replica)

    def started(self, replica: SimulatedReplica) -> None:
        """A process has started: the next probe will find it."""
        self._events.at(self._next_probe_s(), REPORT, self._answered, replica)

    def _next_probe_s(self) -> float:
        interval_s = self._settings.health_interval_s
        return (math.floor(self._events.now_s / interval_s) + 1) * interval_s

    def _refused(self, replica: SimulatedReplica) -> None:
        if not replica.alive:
            self._fleet.set_up(self._known(replica), False)

    def _answered(self, replica: SimulatedReplica) -> None:
        known = self._known(replica)
        if replica.alive and not known.up:
            self._fleet.set_up(known, True)
            self._scrape(replica)

    def _turn(self, replica: SimulatedReplica) -> None:
        if self._done():
            return
        if self._known(replica).up:
            self._scrape(replica)
        self._events.at(self._events.now_s + self._settings.scrape_interval_s, REPORT, self._turn, replica)

    def _scrape(self, replica: SimulatedReplica) -> None:
        known = self._known(replica)
        if replica.alive:
            self._fleet.set_scraped(known, replica.metrics())
            return
        scraped_at_s = known.kv.scraped_at_s
        limit_s = STALE_AFTER_INTERVALS * self._settings.scrape_interval_s
        if scraped_at_s is not None and self._events.now_s - scraped_at_s > limit_s:
            self._fleet.set_scraped(known, known.kv.aged())

    def _known(self, replica: SimulatedReplica) -> Replica:
        known = self._fleet.by_slot[replica.slot]
        assert known is not None
        return known
