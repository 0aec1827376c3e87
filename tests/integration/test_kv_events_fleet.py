"""Feeds follow the fleet: discovery, ranks, restarts, and what is matched."""

import contextlib
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import zmq
from support.waiting import eventually

from gateway.prefixes.events.subscriber import Subscriber
from gateway.prompt.token_chain import TokenChain, TokenPrompt, pack
from gateway.replicas.metrics_page import ScrapedState
from gateway.replicas.probe import ProbeClient, ProbeError, ProbeFailure
from gateway.replicas.registry import Fleet, ReplicaSpec
from gateway.replicas.replica import Replica
from gateway.routing.kv_events import KvEvents, SourceSettings
from loadtests.replica.kv_events import BlockStored, Publisher

BLOCK = 2


class Answers(ProbeClient):
    """Replicas that answer as told, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, bytes | ProbeError] = {}
        self.asked: list[str] = []

    async def get(self, replica: Replica, path: str, timeout_s: float, limit_bytes: int) -> bytes:
        self.asked.append(replica.name + path)
        answer = self.by_name[replica.name]
        if isinstance(answer, ProbeError):
            raise answer
        return answer


def stored(names: list[int], tokens: list[int], parent: int | None = None) -> BlockStored:
    return BlockStored(names, parent, tokens, BLOCK, None, "GPU", None)


@contextlib.contextmanager
def publisher(rank: int = 0) -> Iterator[Publisher]:
    made = Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", f"kv@{rank}", rank)
    made.endpoint = made._pub.getsockopt_string(zmq.LAST_ENDPOINT)
    made.replay_endpoint = made._router.getsockopt_string(zmq.LAST_ENDPOINT)
    try:
        yield made
    finally:
        made.close()


def answer(*publishers: Publisher) -> bytes:
    return orjson.dumps({str(p.rank): p.source() for p in publishers})


class Set:
    """A fleet of two with its feeds."""

    def __init__(self, default: SourceSettings | None = None, **by_replica: SourceSettings) -> None:
        self.fleet = Fleet()
        self.probes = Answers()
        self.replicas = [self.fleet.add(ReplicaSpec(f"http://127.0.0.1:{port}")) for port in (1, 2)]
        names = {name.replace("_", "-"): settings for name, settings in by_replica.items()}
        self.events = KvEvents(self.fleet, self.probes, Subscriber(TokenChain()), default or SourceSettings(), names)

    def match(self, tokens: list[int]) -> list[tuple[int, float, bool]]:
        return self.events.match(TokenPrompt(pack(tokens)))

    async def live(self, number: int = 1) -> None:
        feeds = self.events.feeds
        await eventually(lambda: len(feeds) == number and all(feed.live for feed in feeds.values()))


async def test_a_feed_opens_when_its_replica_comes_up_and_closes_when_it_leaves() -> None:
    made = Set()
    with publisher() as engine:
        made.probes.by_name = {"replica-1": answer(engine), "replica-2": b"{}"}
        made.events.start()
        assert made.probes.asked == []
        for replica in made.replicas:
            made.fleet.set_up(replica, True)
        await made.live()
        assert made.probes.asked == ["replica-1/kv_event_sources", "replica-2/kv_event_sources"]
        assert made.events.any_live((0, 1))
        assert not made.events.any_live((1,))
        assert made.match([1, 2, 3]) == [(0, 0.0, True)]
        engine.publish([stored([1, 2], [1, 2, 3, 4])])
        stream = made.events.feeds[made.replicas[0]].streams[0]
        await eventually(lambda: stream.messages)
        # The last token is always computed, in whole blocks.
        assert made.match([1, 2, 3, 4, 5]) == [(0, 4.0, True)]
        assert made.match([1, 2, 3, 4]) == [(0, 2.0, True)]
        # Coming up again with the same sources changes nothing.
        made.fleet.set_up(made.replicas[0], False)
        made.fleet.set_up(made.replicas[0], True)
        await eventually(lambda: len(made.probes.asked) == 3 and not made.events._tasks)
        assert made.events.feeds[made.replicas[0]].streams[0] is stream
        made.fleet.remove("replica-1")
        assert made.match([1, 2, 3]) == []
        await made.events.stop()


async def test_what_can_be_expected_of_ranks_is_their_mean() -> None:
    made = Set()
    with publisher(0) as first, publisher(1) as second:
        made.probes.by_name = {"replica-1": answer(first, second)}
        made.fleet.set_up(made.replicas[0], True)
        made.events.start()
        await made.live()
        first.publish([stored([1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8])])
        streams = made.events.feeds[made.replicas[0]].streams
        await eventually(lambda: streams[0].messages)
        assert made.match([*range(1, 9), 9]) == [(0, 4.0, True)]
        second.publish([stored([1, 2], [1, 2, 3, 4])])
        await eventually(lambda: streams[1].messages)
        assert made.match([*range(1, 9), 9]) == [(0, 6.0, True)]
        await made.events.stop()


async def test_new_sources_after_a_restart() -> None:
    made = Set()
    made.events.start()
    with publisher() as old:
        old.publish([stored([1], [1, 2])])
        made.probes.by_name = {"replica-1": answer(old)}
        made.fleet.set_up(made.replicas[0], True)
        await made.live()
        assert made.match([1, 2, 3]) == [(0, 2.0, True)]
        made.fleet.set_up(made.replicas[0], False)
    with publisher() as new:
        new.publish([stored([5], [5, 6])])
        made.probes.by_name = {"replica-1": answer(new)}
        made.fleet.set_up(made.replicas[0], True)
        await eventually(lambda: made.match([5, 6, 7]) == [(0, 2.0, True)])
        assert made.match([1, 2, 3]) == [(0, 0.0, True)]
        await made.events.stop()


async def test_a_restart_seen_in_the_metrics_empties_the_map_until_the_engine_has_told_anew() -> None:
    made = Set()
    made.events.start()
    with publisher() as engine:
        engine.publish([stored([1], [1, 2])])
        made.probes.by_name = {"replica-1": answer(engine)}
        made.fleet.set_up(made.replicas[0], True)
        await made.live()
        feed = made.events.feeds[made.replicas[0]]
        made.fleet.set_scraped(made.replicas[0], ScrapedState(process_start_s=1.0))
        made.fleet.set_scraped(made.replicas[0], ScrapedState(process_start_s=2.0))
        assert not feed.live
        assert made.match([1, 2, 3]) == []
        await made.live()
        assert made.match([1, 2, 3]) == [(0, 2.0, True)]  # this one has not really restarted
        await made.events.stop()


@pytest.mark.parametrize(
    "said",
    [ProbeError(ProbeFailure.ERROR, "status 404"), ProbeError(ProbeFailure.TIMEOUT, "no answer"), b"{}", b"nonsense"],
    ids=["an older version", "silence", "nothing", "nonsense"],
)
async def test_replicas_that_do_not_say_where_they_publish_are_followed_where_the_operator_says(
    said: bytes | ProbeError,
) -> None:
    with publisher() as engine:
        assert engine.replay_endpoint is not None
        made = Set(SourceSettings(engine.endpoint, engine.replay_endpoint, "kv@0"))
        made.probes.by_name = {"replica-1": said}
        made.fleet.set_up(made.replicas[0], True)
        made.events.start()
        await made.live()
        engine.publish([stored([1], [1, 2])])
        await eventually(lambda: made.match([1, 2, 3]) == [(0, 2.0, True)])
        await made.events.stop()


async def test_what_the_operator_says_of_one_replica_counts_whatever_it_says() -> None:
    with publisher() as engine:
        made = Set(replica_2=SourceSettings(engine.endpoint, engine.replay_endpoint, ""))
        made.probes.by_name = {}
        made.fleet.set_up(made.replicas[1], True)
        made.events.start()
        await made.live()
        assert made.probes.asked == []
        await made.events.stop()


async def test_an_endpoint_that_is_none_is_said_and_left(caplog: pytest.LogCaptureFixture) -> None:
    made = Set(SourceSettings("tcp://nonsense", None, ""))
    made.probes.by_name = {"replica-1": b"{}"}
    made.events.start()
    made.fleet.set_up(made.replicas[0], True)
    await eventually(lambda: any("cannot be followed" in record.message for record in caplog.records))
    assert made.events.feeds == {}
    await made.events.stop()


async def test_block_sizes_and_turnover_are_looked_at_now_and_then() -> None:
    made = Set()
    made.events.start()
    with publisher() as engine:
        engine.drop = 1
        engine.publish([stored([9], [9, 9])])
        engine._buffer.clear()
        engine.publish([stored([1], [1, 2])])
        made.probes.by_name = {"replica-1": answer(engine)}
        made.fleet.set_up(made.replicas[0], True)
        await made.live()
        assert made.match([1, 2, 3]) == [(0, 2.0, False)]
        made.fleet.set_scraped(made.replicas[0], ScrapedState(num_gpu_blocks=1))
        assert made.events.block_tokens == ()
        engine.publish([stored([2], [3, 4], parent=1)])
        stream: Any = made.events.feeds[made.replicas[0]].streams[0]
        await eventually(lambda: len(stream.blocks) == 2)
        made.fleet.set_scraped(made.replicas[0], ScrapedState(num_gpu_blocks=2))
        made.events._tick()
        assert made.events.block_tokens == (BLOCK,)
        assert not stream.sure
        engine.publish([stored([3], [5, 6])])
        await eventually(lambda: len(stream.blocks) == 3)
        made.fleet.set_scraped(made.replicas[0], ScrapedState(num_gpu_blocks=3))
        made.events._tick()
        assert not stream.sure
        made.fleet.set_scraped(made.replicas[0], ScrapedState(num_gpu_blocks=2))
        made.events._tick()  # more than there are
        assert len(stream.blocks) == 0
        await made.events.stop()
