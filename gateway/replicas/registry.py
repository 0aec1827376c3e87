"""The fleet: which replicas there are, what they serve, and which of them may get a request.

Theory of operation
- Every replica has a slot, a small integer; the lowest free one is given to the next replica. Columns of
  load and of predictions are indexed by it.
- Nothing here looks at the network or at a clock. Health, scrape and breaker report facts through the `set_*`
  methods; each of them ignores a replica that has left meanwhile.
- `route_slots` is asked for every request and answers from a cache by model name. Any fact that may change an
  answer empties the cache; there are few of those compared with requests.
- Listeners are told of a change after the fleet's state is consistent.
"""

import heapq
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from gateway.replicas.catalogue import Catalogue
from gateway.replicas.listing import ModelObject, read_listing
from gateway.replicas.metrics_page import ScrapedState
from gateway.replicas.replica import Replica
from gateway.replicas.spec import ReplicaSpec, Role

__all__ = ["Change", "Fleet", "Replica", "ReplicaSpec", "Role"]

logger = logging.getLogger(__name__)

# Names go into response headers and metric labels.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Change(StrEnum):
    """What listeners are told."""

    ADDED = "added"
    REMOVED = "removed"
    UP = "up"
    DOWN = "down"
    EJECTED = "ejected"
    RESTORED = "restored"
    RESTARTED = "restarted"
    """The replica's process is a new one: its cache is empty and its epoch has changed."""
    MODELS = "models"
    DRAINING = "draining"
    RESUMED = "resumed"
    CAPACITY = "capacity"
    """The KV capacity became known or changed."""
    CONFIGURED = "configured"
    """The operator says something else of the replica: its key, its limit or its hardware."""


Listener = Callable[[Change, Replica], None]


class Fleet:
    """All replicas."""

    def __init__(self, aliases: Mapping[str, str] | None = None) -> None:
        """Make an empty fleet.

        Args:
            aliases: other names for models; alias -> the name the replicas list.
        """
        self._catalogue = Catalogue(aliases or {})
        self.by_slot: list[Replica | None] = []
        """Replicas by slot, None where a slot is free. The same list object for ever."""
        self.replicas: dict[str, Replica] = {}
        """Replicas by name."""
        self._free_slots: list[int] = []
        self._names = itertools.count(1)
        self._epochs = itertools.count(1)
        self._listeners: list[Listener] = []
        self._routes: dict[str | None, tuple[int, ...]] = {}
        self._prefill_routes: dict[str | None, tuple[int, ...]] = {}

    # --- who there is

    def add(self, spec: ReplicaSpec) -> Replica:
        """Add a replica. It gets no request before it is reported up.

        Raises:
            ValueError: when its URL or name is malformed, or another replica has the same.
        """
        name = spec.name if spec.name is not None else self._next_name()
        if not _NAME.fullmatch(name):
            raise ValueError(f"replica name must match {_NAME.pattern}, got {name!r}")
        if name in self.replicas:
            raise ValueError(f"there is a replica named {name} already")
        slot = self._free_slots[0] if self._free_slots else len(self.by_slot)
        replica = Replica(slot, name, spec, next(self._epochs), read_listing((), spec.models))
        for other in self.replicas.values():
            if other.base_url == replica.base_url:
                raise ValueError(f"{name} has the same URL as {other.name}")
        if self._free_slots:
            heapq.heappop(self._free_slots)
            self.by_slot[slot] = replica
        else:
            self.by_slot.append(replica)
        self.replicas[name] = replica
        self._listings_changed()
        self._emit(Change.ADDED, replica)
        return replica

    def remove(self, name: str) -> None:
        """Remove a replica at once; `set_draining` first lets its requests end.

        Raises:
            KeyError: when there is no such replica.
        """
        replica = self.replicas.pop(name)
        self.by_slot[replica.slot] = None
        heapq.heappush(self._free_slots, replica.slot)
        self._listings_changed()
        self._emit(Change.REMOVED, replica)

    def has(self, replica: Replica) -> bool:
        """Whether this very replica is still part of the fleet."""
        return self.replicas.get(replica.name) is replica

    def reconfigure(self, replica: Replica, spec: ReplicaSpec) -> None:
        """Change what the operator says of a replica.

        Args:
            replica: which.
            spec: the same URL, name, models and role; the rest may differ.
        """
        if self.has(replica) and replica.spec != spec:
            replica.spec = spec
            self._emit(Change.CONFIGURED, replica)

    def use_aliases(self, aliases: Mapping[str, str]) -> None:
        """Change the other names for models."""
        self._catalogue.use_aliases(aliases)
        self._listings_changed()

    @property
    def aliases(self) -> Mapping[str, str]:
        """Alias -> the model name behind it."""
        return self._catalogue.aliases

    @property
    def any_routable(self) -> bool:
        """Whether some replica could serve some request."""
        return bool(self.route_slots(None))

    @property
    def divided(self) -> bool:
        """Whether some replica is there for prefill or for decode only."""
        return any(replica.role is not Role.MIXED for replica in self.replicas.values())

    # --- which replicas may serve a model

    def resolve(self, name: str) -> str:
        """The model behind an alias; any other name is returned as it is."""
        return self._catalogue.resolve(name)

    def route_slots(self, model: str | None) -> Sequence[int]:
        """Slots of the replicas that may get a request for a model, ascending; empty when there is none.

        Args:
            model: the request's model or alias; None when it names none, for which every routable replica
                counts.

        If the breaker has ejected all that are up, they are given nevertheless: a request that may fail is
        better than one that must (Envoy's panic threshold and nginx's upstream module do the same).
        """
        slots = self._routes.get(model)
        return self._compute_route(model) if slots is None else slots

    def up_slots(self, model: str | None) -> tuple[int, ...]:
        """Slots as `route_slots`, but with the ejected ones in any case: the last resort of a retry."""
        members = self._members(model, prefill=False)
        return tuple(replica.slot for replica in members if replica.up and not replica.draining)

    def prefill_slots(self, model: str | None) -> Sequence[int]:
        """Slots of the routable prefill replicas that serve a model, ascending; empty when there is none."""
        slots = self._prefill_routes.get(model)
        if slots is None:
            if model is not None and not self.knows(model):
                return ()
            members = self._members(model, prefill=True)
            slots = self._prefill_routes[model] = tuple(item.slot for item in members if item.routable)
        return slots

    def knows(self, model: str) -> bool:
        """Whether a replica has ever listed the model, or configuration names it; served now or not."""
        return self._catalogue.knows(model)

    def pool(self, model: str | None) -> str:
        """The base model behind a name: for metric labels and constants learned per model; bounded in number.

        Args:
            model: a model, an adapter, an alias, or None for the only base model if there is one.
        """
        return self._catalogue.pool(model)

    def models(self) -> list[ModelObject]:
        """The `data` of a merged `/v1/models`: each replica's objects, once per id, then the aliases.

        Models of replicas that are down are included: they are known, only not available at the moment.
        """
        return self._catalogue.merged()

    def may_eject(self, replica: Replica, max_ejected_share: float) -> bool:
        """Whether the breaker may take a replica out without harm to a pool.

        Args:
            replica: the candidate.
            max_ejected_share: of the replicas of a base model that are up, the share that may be out at a
                time (rounded up).

        At least one other must stay. Adapters do not count: where the only replica with an adapter is out,
        `route_slots` still gives it.
        """
        prefill = replica.role is Role.PREFILL
        models: list[str | None] = [*replica.base_models] or [None]
        for model in models:
            members = [item for item in self._members(model, prefill) if item.up and not item.draining]
            ejected = sum(item.ejected for item in members if item is not replica)
            others_left = sum(not item.ejected for item in members if item is not replica)
            if others_left == 0 or ejected + 1 > math.ceil(max_ejected_share * len(members)):
                return False
        return True

    # --- facts reported by health, scrape, breaker and operators

    def set_served(self, replica: Replica, model_objects: Iterable[Any]) -> None:
        """The replica has listed its models.

        Args:
            replica: which.
            model_objects: `data` of its `/v1/models`; malformed entries are ignored.
        """
        if not self.has(replica):
            return
        listing = read_listing(model_objects, replica.spec.models)
        if listing.ignored and listing.ignored != replica.listing.ignored:
            logger.warning("%s lists %d models that are ignored", replica.name, listing.ignored)
        if listing.same_models(replica.listing):
            return
        replica.listing = listing
        self._listings_changed()
        logger.info("%s serves %s", replica.name, ", ".join(sorted(listing.served)) or "no models")
        self._emit(Change.MODELS, replica)

    def set_up(self, replica: Replica, up: bool) -> None:
        """Active health has found the replica up or down."""
        if replica.up != up and self.has(replica):
            replica.up = up
            self._invalidate()
            self._emit(Change.UP if up else Change.DOWN, replica)

    def set_ejected(self, replica: Replica, ejected: bool) -> None:
        """The breaker has taken the replica out, or back in."""
        if replica.ejected != ejected and self.has(replica):
            replica.ejected = ejected
            replica.trial_open = False
            self._invalidate()
            self._emit(Change.EJECTED if ejected else Change.RESTORED, replica)

    def set_trial_open(self, replica: Replica, trial_open: bool) -> None:
        """The breaker would let one trial request through an ejected replica, or has just let it."""
        if replica.trial_open != trial_open and self.has(replica):
            replica.trial_open = trial_open
            self._invalidate()

    def set_draining(self, replica: Replica, draining: bool) -> None:
        """The operator wants no new requests on the replica, or wants them again."""
        if replica.draining != draining and self.has(replica):
            replica.draining = draining
            self._invalidate()
            logger.info("%s %s", replica.name, "is draining" if draining else "takes requests again")
            self._emit(Change.DRAINING if draining else Change.RESUMED, replica)

    def set_scraped(self, replica: Replica, state: ScrapedState) -> None:
        """The replica's metrics have been read, or have aged.

        A new process start time means a restart. Servers that do not tell it (several API server processes
        sharing a port) give themselves away by counters that run backwards.
        """
        if not self.has(replica):
            return
        before, replica.kv = replica.kv, state
        if _is_restart(before, state):
            self.restarted(replica)
        if state.kv_capacity_tokens is not None and state.kv_capacity_tokens != before.kv_capacity_tokens:
            self._emit(Change.CAPACITY, replica)

    def set_version(self, replica: Replica, version: str | None) -> None:
        """The replica has told the version of its engine; None if it does not tell."""
        if replica.version != version and self.has(replica):
            replica.version = version
            logger.info("%s runs version %s", replica.name, version or "unknown")

    def restarted(self, replica: Replica) -> None:
        """The replica's process is a new one."""
        if self.has(replica):
            replica.epoch = next(self._epochs)
            # Another version is a usual reason to restart.
            replica.version = None
            logger.info("%s has restarted", replica.name)
            self._emit(Change.RESTARTED, replica)

    def on_change(self, listener: Listener) -> None:
        """Call a function at every change, with its kind and the replica, after the fact."""
        self._listeners.append(listener)

    # --- inside

    def _next_name(self) -> str:
        return next(name for number in self._names if (name := f"replica-{number}") not in self.replicas)

    def _in_slot_order(self) -> list[Replica]:
        return [replica for replica in self.by_slot if replica is not None]

    def _members(self, model: str | None, prefill: bool) -> list[Replica]:
        name = None if model is None else self.resolve(model)
        return [
            replica
            for replica in self._in_slot_order()
            if (replica.role is Role.PREFILL) == prefill and (name is None or name in replica.listing.objects)
        ]

    def _compute_route(self, model: str | None) -> tuple[int, ...]:
        # Names nobody knows are not cached: clients could fill the memory with them.
        if model is not None and not self.knows(model):
            return ()
        members = self._members(model, prefill=False)
        slots = tuple(replica.slot for replica in members if replica.routable)
        # A prefill replica can do the whole of it: worse for those who wait for prefill, better than nothing.
        self._routes[model] = slots = slots or self.up_slots(model) or tuple(self.prefill_slots(model))
        return slots

    def _listings_changed(self) -> None:
        self._catalogue.update(replica.listing for replica in self._in_slot_order())
        self._invalidate()

    def _invalidate(self) -> None:
        self._routes.clear()
        self._prefill_routes.clear()

    def _emit(self, change: Change, replica: Replica) -> None:
        for listener in self._listeners:
            try:
                listener(change, replica)
            except Exception:
                # One listener's fault must not keep the others, or the health loop, from going on.
                logger.exception("a listener failed on %s of %s", change, replica.name)


def _is_restart(before: ScrapedState, now: ScrapedState) -> bool:
    if before.process_start_s is not None and now.process_start_s is not None:
        return before.process_start_s != now.process_start_s
    if before.prefix_queries_tokens is None or now.prefix_queries_tokens is None:
        return False
    return now.prefix_queries_tokens < before.prefix_queries_tokens
