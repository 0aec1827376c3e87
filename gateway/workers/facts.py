"""What the supervisor finds out about replicas, for the workers' fleets.

A fact is what a probe or a scrape would have told the worker's own `Fleet`, as an array: [kind, replica's name, value].
A fleet that is told the same facts in the same order comes to the same state, restarts of replicas included. Times are
of the monotonic clock, which the processes of one machine share.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from gateway.replicas.metrics_page import ScrapedState
from gateway.replicas.registry import Fleet
from gateway.replicas.replica import Replica

logger = logging.getLogger(__name__)

_STATE_FIELDS = frozenset(field.name for field in fields(ScrapedState))

Fact = list[Any]


class ReportingFleet(Fleet):
    """A fleet that passes on what it is told."""

    def __init__(self, aliases: Mapping[str, str], report: Callable[[Fact], None]) -> None:
        """Start empty.

        Args:
            aliases: other names for models.
            report: called with every fact.
        """
        super().__init__(aliases)
        self._report = report
        self._scraping = False

    def set_served(self, replica: Replica, model_objects: Iterable[Any]) -> None:
        """The replica has listed its models."""
        before = replica.listing
        super().set_served(replica, model_objects)
        if replica.listing is not before:
            self._report(["models", replica.name, list(replica.listing.objects.values())])

    def set_up(self, replica: Replica, up: bool) -> None:
        """Active health has found the replica up or down."""
        changes = replica.up != up and self.has(replica)
        super().set_up(replica, up)
        if changes:
            self._report(["up", replica.name, up])

    def set_scraped(self, replica: Replica, state: ScrapedState) -> None:
        """The replica's metrics have been read, or have aged."""
        # A restart that shows in the metrics shows in the workers' too.
        self._scraping = True
        try:
            super().set_scraped(replica, state)
        finally:
            self._scraping = False
        if self.has(replica):
            self._report(["metrics", replica.name, state])

    def set_version(self, replica: Replica, version: str | None) -> None:
        """The replica has told the version of its engine."""
        changes = replica.version != version and self.has(replica)
        super().set_version(replica, version)
        if changes:
            self._report(["version", replica.name, version])

    def restarted(self, replica: Replica) -> None:
        """The replica's process is a new one."""
        super().restarted(replica)
        if not self._scraping and self.has(replica):
            self._report(["restarted", replica.name, None])


def snapshot(fleet: Fleet) -> list[Fact]:
    """Return what is known of all replicas, for a worker that starts."""
    facts: list[Fact] = []
    for replica in fleet.replicas.values():
        facts.append(["models", replica.name, list(replica.listing.objects.values())])
        facts.append(["metrics", replica.name, replica.kv])
        # After the metrics: a restart that shows in them makes the version unknown.
        facts.append(["version", replica.name, replica.version])
        facts.append(["up", replica.name, replica.up])
    return facts


def apply(fleet: Fleet, facts: Iterable[Fact]) -> None:
    """Tell a fleet what another has found out. Facts about replicas it does not have are passed over."""
    for kind, name, value in facts:
        replica = fleet.replicas.get(name)
        if replica is None:
            continue
        if kind == "up":
            fleet.set_up(replica, value)
        elif kind == "models":
            fleet.set_served(replica, value)
        elif kind == "metrics":
            fleet.set_scraped(replica, ScrapedState(**{k: v for k, v in value.items() if k in _STATE_FIELDS}))
        elif kind == "version":
            fleet.set_version(replica, value)
        elif kind == "restarted":
            fleet.restarted(replica)
        else:
            logger.error("unknown fact: %s", kind)
