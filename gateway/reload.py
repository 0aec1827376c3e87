"""A configuration that changes while the gateway runs: what differs, what of it takes effect, and when to look.

`replica_changes` and `sections_that_wait` are pure; `change_replicas` and `Gateway.reload` carry out what they find. A
replica is known by its URL. One that leaves the file gets no request from then on, and what runs on it ends in its own
time. One of which only the key, the limit or the hardware changes stays what it is, cache and all.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.config import Config, ConfigError
from gateway.replicas.registry import Fleet
from gateway.replicas.spec import ReplicaSpec, parse_address

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How often the file is looked at. A change is read when two looks in a row find it the same, so that a file still
being written is left alone."""

# What is built once, with sockets, threads or loops behind it.
_FIXED_SECTIONS = ("listen", "admin", "prefixes", "health", "breaker", "scrape", "redis", "kv_events", "tokenizer")
_FIXED_OPTIONS = (
    ("routing", "token_budget"),
    ("routing", "session_header"),
    ("logging", "requests"),
    ("logging", "decisions"),
    ("logging", "decisions_per_s"),
)


@dataclass(frozen=True, slots=True)
class ReplicaChanges:
    """What has become of the replicas.

    Attributes:
        removed: in the old configuration only, or too different to go on; by base URL.
        adjusted: go on with another specification; by base URL.
        added: new, or in place of a removed one of the same URL.
    """

    removed: tuple[str, ...] = ()
    adjusted: tuple[tuple[str, ReplicaSpec], ...] = ()
    added: tuple[ReplicaSpec, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.removed or self.adjusted or self.added)


def base_url(spec: ReplicaSpec) -> str:
    """Return what identifies a replica: its address, however it was written."""
    address = parse_address(spec.url)
    return address.origin + address.base_path


def replica_changes(old: Sequence[ReplicaSpec], new: Sequence[ReplicaSpec]) -> ReplicaChanges:
    """Compare two lists of replicas.

    Args:
        old: those in force.
        new: those wanted.
    """
    before = {base_url(spec): spec for spec in old}
    after = {base_url(spec): spec for spec in new}
    removed, adjusted, added = [], [], []
    for url, spec in before.items():
        if url not in after or not _same_replica(spec, after[url]):
            removed.append(url)
    for url, spec in after.items():
        if url not in before or not _same_replica(before[url], spec):
            added.append(spec)
        elif spec != before[url]:
            adjusted.append((url, spec))
    return ReplicaChanges(tuple(removed), tuple(adjusted), tuple(added))


def _same_replica(one: ReplicaSpec, other: ReplicaSpec) -> bool:
    """Say whether two specifications differ in nothing that a running replica could not take over."""
    return (one.name, one.models, one.role) == (other.name, other.models, other.role)


def check_names(fleet: Fleet, changes: ReplicaChanges) -> None:
    """Check that the replicas to be added can have the names they ask for.

    Raises:
        ValueError: one that stays has such a name.
    """
    staying = {replica.name for replica in fleet.replicas.values() if replica.base_url not in changes.removed}
    for spec in changes.added:
        if spec.name in staying:
            raise ValueError(f"there is a replica named {spec.name} already; the names given by themselves stay")


def change_replicas(fleet: Fleet, changes: ReplicaChanges) -> None:
    """Remove, adjust and add replicas; those that are not named in the changes keep all that is known of them."""
    by_url = {replica.base_url: replica for replica in fleet.replicas.values()}
    removed = {}
    for url in changes.removed:
        replica = by_url.pop(url, None)
        if replica is not None:
            removed[url] = replica
            fleet.remove(replica.name)
            logger.info("%s is removed", replica.name)
    for url, spec in changes.adjusted:
        if url in by_url:
            fleet.reconfigure(by_url[url], spec)
    for spec in changes.added:
        if base_url(spec) in by_url:
            continue
        added = fleet.add(spec)
        logger.info("%s is added", added.name)
        before = removed.get(base_url(spec))
        if before is not None and before.up:
            # The same process under another name or role: it need not be out of service until its first probe.
            fleet.set_served(added, before.listing.objects.values())
            fleet.set_up(added, True)


def sections_that_wait(old: Config, new: Config) -> tuple[str, ...]:
    """Name the options that differ and take effect at the next start only."""
    waiting = [name for name in _FIXED_SECTIONS if getattr(old, name) != getattr(new, name)]
    for section, option in _FIXED_OPTIONS:
        if getattr(getattr(old, section), option) != getattr(getattr(new, section), option):
            waiting.append(f"{section}.{option}")
    return tuple(waiting)


class ConfigWatcher:
    """Reads the configuration again when it is told to, or when the file changes, and never takes a bad one."""

    def __init__(
        self,
        path: Path | None,
        read: Callable[[], Config],
        take: Callable[[Config], Awaitable[None]],
        poll_s: float = POLL_S,
    ) -> None:
        """Prepare to watch.

        Args:
            path: the file to look at; None to react to requests only.
            read: reads and validates; called in a thread. Raises ValueError or OSError for a bad configuration.
            take: puts a configuration in force, or raises ValueError or OSError and changes nothing.
            poll_s: how often to look.
        """
        self._path = path
        self._read = read
        self._take = take
        self._poll_s = poll_s
        self._wanted = asyncio.Event()
        # Of the file that has just been read: what changes while the gateway starts is a change.
        self._settled = self._signature()

    def request(self) -> None:
        """Read it again, changed or not."""
        self._wanted.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        seen = self._settled
        while True:
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._wanted.wait()
            except TimeoutError:
                now = await asyncio.to_thread(self._signature)
                unchanged, seen = now == seen, now
                # A file that is not there is one about to be replaced.
                if now is None or now == self._settled or not unchanged:
                    continue
            self._wanted.clear()
            self._settled = seen = await asyncio.to_thread(self._signature)
            await self._reload()

    async def _reload(self) -> None:
        try:
            config = await asyncio.to_thread(self._read)
            await self._take(config)
        except (ConfigError, ValueError, OSError) as error:
            logger.error("the new configuration is refused, the old one stays in force: %s", error)
        except Exception:
            logger.exception("the configuration could not be taken")

    def _signature(self) -> tuple[int, int, int] | None:
        """Return what changes with the file, also when a link to it is moved (as Kubernetes does); None if absent."""
        if self._path is None:
            return None
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
