"""Metrics of the exact map: KV-event feeds and tokenising."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    # Their packages are installed only where KV events are followed.
    from gateway.prefixes.events.stream import Stream
    from gateway.prompt.tokenise.pool import TokenPool
    from gateway.routing.kv_events import KvEvents

_LABELS = ("replica", "rank")
_COUNTED = " Each worker follows every feed: with several workers, what all of them have counted."
_COUNTERS: tuple[tuple[str, str, "Callable[[Stream], int]"], ...] = (
    ("messages", "Messages heard of a replica's KV-event feed.", lambda stream: stream.messages),
    ("events", "Events applied, replayed ones included.", lambda stream: stream.events),
    ("stored_blocks", "Blocks the engine has told to be cached.", lambda stream: stream.blocks.stored),
    ("removed_blocks", "Blocks it has told to be gone.", lambda stream: stream.blocks.removed),
    ("gaps", "Times messages were missing.", lambda stream: stream.gaps),
    ("replays", "Times missing messages were asked for.", lambda stream: stream.replays),
    ("clears", "Times the map started anew: gaps that could not be filled, restarts.", lambda stream: stream.clears),
    ("restarts", "Engine restarts noticed in the feed.", lambda stream: stream.restarts),
    ("bad_messages", "Messages that could not be read.", lambda stream: stream.bad_messages),
    (
        "bad_events",
        "Events that could not be read, or contradict themselves.",
        lambda stream: stream.bad_events + stream.blocks.malformed,
    ),
    (
        "orphan_blocks",
        "Blocks left out because the block before them is unknown.",
        lambda stream: stream.blocks.orphans,
    ),
    ("overflows", "Times the map was emptied because it had grown too large.", lambda stream: stream.blocks.overflows),
)


class ExactMapCollector(Collector):
    """Everything the exact map counts."""

    def __init__(self, events: "KvEvents", pool: "TokenPool", clock: Callable[[], float] = time.time) -> None:
        self._events = events
        self._pool = pool
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        yield from self._feeds()
        yield from self._tokens()

    def _feeds(self) -> Iterator[Metric]:
        counters = [
            CounterMetricFamily(f"warmgate_kv_events_{name}", text + _COUNTED, labels=_LABELS)
            for name, text, _ in _COUNTERS
        ]
        live = GaugeMetricFamily("warmgate_kv_events_live", "1 if the feed's map is current.", labels=_LABELS)
        complete = GaugeMetricFamily(
            "warmgate_kv_events_complete", "1 if the map is current and lacks nothing.", labels=_LABELS
        )
        blocks = GaugeMetricFamily("warmgate_kv_events_blocks", "Blocks in the map.", labels=_LABELS)
        lag = GaugeMetricFamily(
            "warmgate_kv_events_last_event_age_seconds",
            "Age of the last batch applied by the engine's clock; grows while the engine has nothing to tell.",
            labels=_LABELS,
        )
        delay = GaugeMetricFamily(
            "warmgate_kv_events_lag_seconds",
            "From a batch being made to being applied, for the last live one, by both machines' clocks.",
            labels=_LABELS,
        )
        now_s = self._clock()
        for replica, feed in self._events.feeds.items():
            for source, stream in zip(feed.sources, feed.streams, strict=True):
                labels = [replica.name, str(source.rank)]
                for counter, (_, _, value) in zip(counters, _COUNTERS, strict=True):
                    counter.add_metric(labels, value(stream))
                live.add_metric(labels, stream.live)
                complete.add_metric(labels, stream.sure)
                blocks.add_metric(labels, len(stream.blocks))
                if stream.last_sent_s is not None:
                    lag.add_metric(labels, max(0.0, now_s - stream.last_sent_s))
                if stream.lag_s is not None:
                    delay.add_metric(labels, stream.lag_s)
        yield from counters
        yield from (live, complete, blocks, lag, delay)
        subscriber = self._events.subscriber
        yield CounterMetricFamily(
            "warmgate_kv_events_unknown_messages",
            "Messages of engines that connected themselves and belong to no replica." + _COUNTED,
            value=subscriber.unknown_messages,
        )
        yield CounterMetricFamily(
            "warmgate_kv_events_unreadable_messages",
            "Messages of engines that connected themselves that could not be read." + _COUNTED,
            value=subscriber.bad_messages,
        )

    def _tokens(self) -> Iterator[Metric]:
        pool = self._pool
        tokenised = CounterMetricFamily(
            "warmgate_prompts_tokenised", "Prompts routed by their tokens.", labels=["model"]
        )
        fallbacks = CounterMetricFamily(
            "warmgate_prompts_by_byte_blocks",
            "Prompts routed by byte blocks although KV events are followed, by reason.",
            labels=["model", "reason"],
        )
        seconds = CounterMetricFamily(
            "warmgate_tokenise_seconds", "Time to the tokens of prompts, those too late included.", labels=["model"]
        )
        late = CounterMetricFamily(
            "warmgate_tokenise_late", "Prompts whose tokens came after they had been routed.", labels=["model"]
        )
        hits = CounterMetricFamily("warmgate_tokenise_piece_hits", "Pieces of text known already.", labels=["model"])
        misses = CounterMetricFamily(
            "warmgate_tokenise_piece_misses", "Pieces that had to be tokenised.", labels=["model"]
        )
        held = GaugeMetricFamily("warmgate_tokenise_memory_bytes", "Memory of known pieces.", labels=["model"])
        for model, number in pool.tokenised.items():
            tokenised.add_metric([model], number)
        for (model, reason), number in pool.fallbacks.items():
            fallbacks.add_metric([model, reason], number)
        for model, value in pool.seconds.items():
            seconds.add_metric([model], value)
        for model, number in pool.late_done.items():
            late.add_metric([model], number)
        for model, tokens in pool.models.items():
            hits.add_metric([model], tokens.text.hits)
            misses.add_metric([model], tokens.text.misses)
            held.add_metric([model], tokens.text.held_bytes)
        yield from (tokenised, fallbacks, seconds, late, hits, misses, held)
