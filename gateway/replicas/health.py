"""Active health: asks each replica whether it is well, and what it serves.

How probes are weighed

    probe                      replica up                                   replica down
    200                        counts start again                           up after `rise` in a row
    refused                    down after `refused_fall` in a row           stays down
    error, other status        down after `fall` in a row                   stays down
    timeout, bytes flow        nothing: busy is not dead                    stays down
    timeout, no bytes flow     down after `fall` in a row                   stays down

vLLM answers /health from the API server's event loop, which a long tokenisation can hold for seconds while
the engine streams on; taking such a replica out would move its load onto the others and make them late too.
A refused connection is another matter: nothing listens there, and a second look confirms it.

A replica that comes up is asked for its models and metrics before it is reported up, so that the first
requests are already routed by them; in fleets with prefill or decode replicas for its version as well.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import orjson

from gateway.replicas.probe import ProbeClient, ProbeError, ProbeFailure
from gateway.replicas.registry import Change, Fleet
from gateway.replicas.replica import Replica
from gateway.replicas.rounds import Rounds
from gateway.replicas.spec import Role

logger = logging.getLogger(__name__)

_HEALTH_LIMIT_BYTES = 64 * 1024
_MODELS_LIMIT_BYTES = 8 * 1024 * 1024
_VERSION_LIMIT_BYTES = 64 * 1024
_MOST_VERSION_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """How often to ask and when to believe."""

    interval_s: float = 2.0
    timeout_s: float = 2.0
    rise: int = 1
    fall: int = 3
    refused_fall: int = 2
    concurrency: int = 64
    path: str = "/health"
    models_interval_s: float = 30.0
    models_timeout_s: float = 5.0


class Vitals:
    """What a row of probes says about one replica. Pure.

    Attributes:
        up: None before the first verdict.
        was_refused: whether a connection was refused since it was last up: its listening socket was closed.
    """

    __slots__ = ("_failed", "_passed", "_refused", "_settings", "up", "was_refused")

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._passed = 0
        self._failed = 0
        self._refused = 0
        self.up: bool | None = None
        self.was_refused = False

    def observe(self, failure: ProbeFailure | None, active: bool) -> bool | None:
        """Weigh one probe.

        Args:
            failure: None for a 200.
            active: whether the replica has sent bytes of answers lately.

        Returns:
            The new verdict, True for up, if it has changed; else None.
        """
        if failure is ProbeFailure.TIMEOUT and active and self.up:
            return None
        if failure is None:
            self._failed = self._refused = 0
            self._passed += 1
            # The first answer ever decides: there is no history to doubt it with.
            if not self.up and (self.up is None or self._passed >= self._settings.rise):
                self.up = True
                return True
            return None
        self._passed = 0
        self._failed += 1
        if failure is ProbeFailure.REFUSED:
            self._refused += 1
            self.was_refused = True
        else:
            self._refused = 0
        if self.up is not False and (
            self._failed >= self._settings.fall or self._refused >= self._settings.refused_fall
        ):
            self.up = False
            return False
        return None


class HealthChecker:
    """Keeps the fleet informed of who is up and what they serve."""

    def __init__(
        self,
        fleet: Fleet,
        client: ProbeClient,
        settings: HealthSettings | None = None,
        is_active: Callable[[int], bool | Awaitable[bool]] = lambda slot: False,
        refresh: Callable[[Replica], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the checks; nothing runs before `start`.

        Args:
            fleet: whom to ask, and where the answers go.
            client: sends the probes; left open.
            settings: defaults if None.
            is_active: whether the replica in a slot has sent bytes of answers lately.
            refresh: awaited with a replica that comes up, before it is reported: reads its metrics.
            clock: monotonic seconds.
        """
        self._fleet = fleet
        self._client = client
        self._settings = settings or HealthSettings()
        self._is_active = is_active
        self._refresh = refresh
        self._clock = clock
        self._vitals: dict[Replica, Vitals] = {}
        self._models_due_s: dict[Replica, float] = {}
        self._without_models: set[Replica] = set()
        self._version_due: set[Replica] = set()
        self._rounds = Rounds(fleet, self.check, self._settings.interval_s, self._settings.concurrency)
        fleet.on_change(self._on_change)

    async def start(self, within_s: float | None = None) -> None:
        """Start checking, and wait for the first verdicts.

        Args:
            within_s: at most so long; None for a little longer than one probe may take. Replicas that have
                not answered by then are checked on in the background.
        """
        await self._rounds.start(self._settings.timeout_s + 0.5 if within_s is None else within_s)

    async def stop(self) -> None:
        """Stop checking."""
        await self._rounds.stop()

    async def check(self, replica: Replica) -> None:
        """Probe a replica once and tell the fleet."""
        detail = "ok"
        failure: ProbeFailure | None = None
        try:
            path, timeout_s = self._settings.path, self._settings.timeout_s
            await self._client.get(replica, path, timeout_s, _HEALTH_LIMIT_BYTES)
        except ProbeError as error:
            failure, detail = error.failure, str(error)
        active = failure is ProbeFailure.TIMEOUT and await self._active(replica)
        if not self._fleet.has(replica):
            return
        vitals = self._vitals.setdefault(replica, Vitals(self._settings))
        seen_before = vitals.up is not None
        verdict = vitals.observe(failure, active)
        if verdict is True:
            await self._came_up(replica, vitals, seen_before)
        elif verdict is False:
            logger.warning("%s is down: %s", replica.name, detail)
            self._fleet.set_up(replica, False)
        elif vitals.up and failure is None:
            if self._models_due(replica):
                await self.refresh_models(replica)
                await self.refresh_version(replica)
            elif replica in self._version_due:
                await self.refresh_version(replica)

    async def refresh_models(self, replica: Replica) -> None:
        """Ask a replica now what it serves. What is known of it stays when it does not answer."""
        self._models_due_s[replica] = self._clock() + self._settings.models_interval_s
        try:
            body = await self._client.get(replica, "/v1/models", self._settings.models_timeout_s, _MODELS_LIMIT_BYTES)
            entries = _read_entries(body)
        except (ProbeError, ValueError) as error:
            if replica not in self._without_models and self._fleet.has(replica):
                self._without_models.add(replica)
                logger.warning("%s does not list its models: %s", replica.name, error)
            return
        self._without_models.discard(replica)
        self._fleet.set_served(replica, entries)

    async def refresh_version(self, replica: Replica) -> None:
        """Ask a replica now which version of the engine it runs, if the fleet has replicas that must agree on it.

        What is known of it stays when it does not tell; a restart makes it unknown.
        """
        self._version_due.discard(replica)
        if not self._fleet.divided:
            return
        try:
            body = await self._client.get(replica, "/version", self._settings.models_timeout_s, _VERSION_LIMIT_BYTES)
            self._fleet.set_version(replica, _read_version(body))
        except ProbeError as error:
            # Who answers otherwise has no such path; who does not answer may be busy, and is asked again soon.
            if error.failure is not ProbeFailure.ERROR and self._fleet.has(replica):
                self._version_due.add(replica)
        except ValueError as error:
            logger.debug("%s does not tell its version: %s", replica.name, error)

    async def _active(self, replica: Replica) -> bool:
        active = self._is_active(replica.slot)
        return active if isinstance(active, bool) else await active

    def _models_due(self, replica: Replica) -> bool:
        return not replica.served or self._clock() >= self._models_due_s.get(replica, 0.0)

    async def _came_up(self, replica: Replica, vitals: Vitals, seen_before: bool) -> None:
        epoch = replica.epoch
        await self.refresh_models(replica)
        if self._refresh is not None:
            await self._refresh(replica)
        # Without a process start time to compare, a closed listening socket is the evidence of a restart.
        if seen_before and vitals.was_refused and replica.epoch == epoch and replica.kv.process_start_s is None:
            self._fleet.restarted(replica)
        vitals.was_refused = False
        # Last, because a restart that has just been noticed makes it unknown.
        await self.refresh_version(replica)
        if not replica.up and self._fleet.has(replica):
            logger.info("%s is up", replica.name)
        self._fleet.set_up(replica, True)

    def _on_change(self, change: Change, replica: Replica) -> None:
        if change is Change.REMOVED:
            self._vitals.pop(replica, None)
            self._models_due_s.pop(replica, None)
            self._without_models.discard(replica)
            self._version_due.discard(replica)
            self._client.forget(replica)
        elif change is Change.RESTARTED:
            self._version_due.add(replica)
        elif change is Change.ADDED and replica.role is not Role.MIXED:
            # Nobody may have been asked so far.
            self._version_due.update(self._fleet.replicas.values())


def _read_entries(body: bytes) -> list[object]:
    answer = orjson.loads(body)
    entries = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        raise ValueError("no list of models in the answer")
    return entries


def _read_version(body: bytes) -> str:
    answer = orjson.loads(body)
    version = answer.get("version") if isinstance(answer, dict) else None
    if not isinstance(version, str) or not version:
        raise ValueError("no version in the answer")
    return version[:_MOST_VERSION_CHARACTERS]
