"""The KV-event feeds of the fleet: opened when a replica comes up, closed when it leaves, asked for every request.

A replica is asked once, when it comes up, where it publishes (`GET /kv_event_sources`); one that does not know the
question is followed where the operator says, or not at all.

With data parallelism a replica is several engines behind one address, and its own balancer picks one without looking
at prefixes. What a request can expect there is the mean over the engines, and that is what is matched.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.prefixes.events.sources import Source, configured_sources, read_sources
from gateway.prefixes.events.subscriber import Feed, Subscriber
from gateway.prompt.token_chain import TokenPrompt
from gateway.replicas.probe import ProbeClient, ProbeError, ProbeFailure
from gateway.replicas.registry import Change, Fleet
from gateway.replicas.replica import Replica
from gateway.routing.exact_match import Match

logger = logging.getLogger(__name__)

_PATH = "/kv_event_sources"
_LIMIT_BYTES = 1 << 20
_TIMEOUT_S = 5.0
_TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """Where replicas publish that do not say so themselves; see `gateway.config.KvEvents`."""

    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    ranks: int = 1


class KvEvents:
    """All feeds, by replica.

    Attributes:
        subscriber: the sockets.
        feeds: feed of each replica that has one.
        block_tokens: block sizes of the engines, as far as known.
    """

    def __init__(
        self,
        fleet: Fleet,
        probes: ProbeClient,
        subscriber: Subscriber,
        default: SourceSettings,
        by_replica: dict[str, SourceSettings],
    ) -> None:
        """Prepare; nothing happens before `start`.

        Args:
            fleet: the replicas.
            probes: asks them.
            subscriber: follows them.
            default: where replicas publish that do not say so.
            by_replica: where single replicas publish, whatever they say; by name.
        """
        self.subscriber = subscriber
        self.feeds: dict[Replica, Feed] = {}
        self.block_tokens: tuple[int, ...] = ()
        self._fleet = fleet
        self._probes = probes
        self._default = default
        self._by_replica = by_replica
        self._by_slot: dict[int, Feed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.TimerHandle | None = None
        self._closed = False
        fleet.on_change(self._changed)

    def start(self) -> None:
        """Follow the replicas that are up, and from now on those that come up."""
        self._ticker = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        for replica in self._fleet.replicas.values():
            if replica.up:
                self._spawn(self.discover(replica))

    async def stop(self) -> None:
        """Close everything."""
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.feeds.clear()
        self._by_slot.clear()
        self.subscriber.close()

    def any_live(self, slots: Sequence[int]) -> bool:
        """Say whether the feed of any of these replicas is live."""
        by_slot = self._by_slot
        return any(slot in by_slot and by_slot[slot].live for slot in slots)

    def match(self, tokens: TokenPrompt) -> list[Match]:
        """Return what replicas with a live feed have cached of a prompt.

        The engine computes at least the last token itself, and caches whole blocks only.
        """
        matches: list[Match] = []
        last = tokens.count - 1
        found = 0
        for slot, feed in self._by_slot.items():
            if not feed.live:
                continue
            held_tokens, size = 0, 1
            for stream in feed.streams:
                blocks = stream.blocks
                if not blocks.block_tokens:
                    continue
                size = blocks.block_tokens
                hashes = tokens.hashes(size)
                if hashes is None:
                    break
                # Replicas that have only the common system prompt all end where the last one did.
                found = blocks.match(hashes, found)
                held_tokens += min(found, last // size) * size
            else:
                mean = held_tokens // len(feed.streams)
                matches.append((slot, float(mean - mean % size), feed.sure))
        return matches

    async def discover(self, replica: Replica) -> None:
        """Find out where a replica publishes, and follow it there."""
        sources = await self._sources(replica)
        if self._closed or not self._fleet.has(replica):
            return
        known = self.feeds.get(replica)
        if known is not None:
            if known.sources == tuple(sources):
                return
            self._close(replica)
        if not sources:
            logger.info("%s publishes no KV events; its prefixes are matched by byte blocks", replica.name)
            return
        try:
            feed = self.subscriber.open(replica.name, sources)
        except ValueError as error:
            logger.warning("%s: its KV events cannot be followed: %s", replica.name, error)
            return
        self.feeds[replica] = self._by_slot[replica.slot] = feed
        logger.info("%s: following its KV events, %d source(s)", replica.name, len(sources))

    async def _sources(self, replica: Replica) -> list[Source]:
        settings = self._by_replica.get(replica.name)
        if settings is None:
            try:
                answer = await self._probes.get(replica, _PATH, _TIMEOUT_S, _LIMIT_BYTES)
                sources = read_sources(answer, replica.host, self.subscriber.bound_port)
            except ProbeError as error:
                # Versions without this path answer 404; a replica that does not answer comes up again later.
                if error.failure is not ProbeFailure.ERROR:
                    logger.warning("%s does not say where it publishes KV events: %s", replica.name, error)
            except ValueError as error:
                logger.warning("%s says something else of its KV events than expected: %s", replica.name, error)
            else:
                if sources:
                    return sources
            settings = self._default
        if settings.endpoint is None and (self.subscriber.bound_port is None or not settings.topic):
            return []
        return configured_sources(
            settings.endpoint, settings.replay_endpoint, settings.topic, settings.ranks, replica.host
        )

    def _changed(self, change: Change, replica: Replica) -> None:
        if self._closed:
            return
        if change is Change.REMOVED:
            self._close(replica)
        elif change is Change.RESTARTED:
            feed = self.feeds.get(replica)
            if feed is not None:
                feed.restarted()
        if change is Change.UP and self._ticker is not None:
            self._spawn(self.discover(replica))

    def _close(self, replica: Replica) -> None:
        feed = self.feeds.pop(replica, None)
        if feed is not None:
            self._by_slot.pop(replica.slot, None)
            self.subscriber.close_feed(feed)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("following a replica's KV events has failed", exc_info=task.exception())

    def _tick(self) -> None:
        """What changes slowly: block sizes in use, and how the maps compare with the engines' sizes."""
        self._ticker = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        sizes: dict[int, None] = {}
        for replica, feed in self.feeds.items():
            for stream in feed.streams:
                if stream.blocks.block_tokens:
                    sizes[stream.blocks.block_tokens] = None
            if replica.kv.num_gpu_blocks:
                feed.compare(replica.kv.num_gpu_blocks)
        self.block_tokens = tuple(sizes)
