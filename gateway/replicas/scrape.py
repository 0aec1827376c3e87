"""Reads each replica's `/metrics` and tells the fleet.

What a scrape says holds until the next one. When none succeeds for three intervals its measurements are
dropped: a queue length of a minute ago is worse than none. What cannot change while the process lives, such as its KV
capacity, is kept.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.replicas.metrics_page import read_metrics
from gateway.replicas.probe import ProbeClient, ProbeError
from gateway.replicas.registry import Change, Fleet
from gateway.replicas.replica import Replica
from gateway.replicas.rounds import Rounds

logger = logging.getLogger(__name__)

STALE_AFTER_INTERVALS = 3
_LIMIT_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ScrapeSettings:
    """How often to read metrics."""

    interval_s: float = 1.0
    """0 to read them only when a replica comes up."""
    timeout_s: float = 2.0
    concurrency: int = 32
    path: str = "/metrics"


class Scraper:
    """Keeps `Replica.kv` current."""

    def __init__(
        self,
        fleet: Fleet,
        client: ProbeClient,
        settings: ScrapeSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the scrapes; nothing runs before `start`.

        Args:
            fleet: whom to ask, and where the answers go.
            client: sends the requests; left open.
            settings: defaults if None.
            clock: monotonic seconds.
        """
        self._fleet = fleet
        self._client = client
        self._settings = settings or ScrapeSettings()
        self._clock = clock
        self._failing: set[Replica] = set()
        self._rounds = Rounds(fleet, self._turn, self._settings.interval_s, self._settings.concurrency)
        fleet.on_change(self._on_change)

    async def start(self) -> None:
        """Start scraping, unless the interval is 0."""
        if self._settings.interval_s > 0:
            await self._rounds.start()

    async def stop(self) -> None:
        """Stop scraping."""
        await self._rounds.stop()

    async def scrape(self, replica: Replica) -> None:
        """Read a replica's metrics now, and drop what is too old if that fails."""
        try:
            page = await self._client.get(replica, self._settings.path, self._settings.timeout_s, _LIMIT_BYTES)
            state = read_metrics(page, self._clock())
        except (ProbeError, ValueError) as error:
            if replica not in self._failing and self._fleet.has(replica):
                self._failing.add(replica)
                logger.warning("%s has no readable metrics: %s", replica.name, error)
            self._age(replica)
            return
        if replica in self._failing:
            self._failing.discard(replica)
            logger.info("%s has metrics again", replica.name)
        # With no next scrape coming, measurements would be old at once.
        self._fleet.set_scraped(replica, state if self._settings.interval_s > 0 else state.aged())

    async def _turn(self, replica: Replica) -> None:
        if replica.up:
            await self.scrape(replica)
        else:
            self._age(replica)

    def _age(self, replica: Replica) -> None:
        state = replica.kv
        if state.scraped_at_s is None:
            return
        if self._clock() - state.scraped_at_s > STALE_AFTER_INTERVALS * self._settings.interval_s:
            aged = state.aged()
            if aged != state:
                self._fleet.set_scraped(replica, aged)

    def _on_change(self, change: Change, replica: Replica) -> None:
        if change is Change.REMOVED:
            self._failing.discard(replica)
            self._client.forget(replica)
