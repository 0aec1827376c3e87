"""Workers that share a prefix map, without their processes, and what one may ask of them."""

import dataclasses
from collections.abc import Sequence

from hypothesis import strategies as st

from gateway.prefixes.shared import SharedIndex
from gateway.prompt.blocks import BlockSchedule
from gateway.replicas.metrics_page import NOTHING_SCRAPED
from gateway.replicas.registry import Fleet, ReplicaSpec
from gateway.sharing.prefixes import PrefixShare
from gateway.sharing.rings import Rings

UNBOUNDED = 1 << 60
SHARDS = 2
REPLICAS = 3
URLS = [f"http://replica:{8000 + port}" for port in range(REPLICAS)]

Logs = list[list[bytes]]


def new_logs() -> Logs:
    return [[] for _ in range(SHARDS)]


class Worker:
    """An index and its share, and how far it has read the logs."""

    def __init__(
        self,
        number: int,
        logs: Logs,
        urls: Sequence[str] = URLS,
        max_bytes: int = 1 << 30,
        rings: Rings | None = None,
    ) -> None:
        self.index = SharedIndex(BlockSchedule(block_bytes=10, growth=0), UNBOUNDED)
        self.fleet = Fleet()
        for url in urls:
            self.fleet.add(ReplicaSpec(url))
        self.share = PrefixShare(self.index, self.fleet, SHARDS, max_bytes, number, rings)
        self.logs = logs
        self.read = [0] * SHARDS

    def write(self) -> None:
        for shard in range(SHARDS):
            while (batch := self.share.take(shard)) is not None:
                self.logs[shard].append(batch.payload)

    def follow(self) -> None:
        for shard, log in enumerate(self.logs):
            for number in range(self.read[shard], len(log)):
                self.share.read(shard, f"{number + 1}-0", log[number])
            self.read[shard] = len(log)
            for _ in self.share.loaded(shard):
                pass

    def believes(self, prompts: Sequence[Sequence[int]]) -> list[dict[str, int]]:
        """Blocks by replica, whatever the slots are here."""
        url = {replica.slot: replica.base_url for replica in self.fleet.replicas.values()}
        return [{url[slot]: depth for slot, depth in self.index.match(list(prompt))} for prompt in prompts]

    def slot(self, url: str) -> int:
        return next(replica.slot for replica in self.fleet.replicas.values() if replica.base_url == url)


def prompt(*turns: int) -> list[int]:
    """Chained hashes, so that equal blocks behind different ones differ."""
    hashes: list[int] = []
    for turn in turns:
        hashes.append(hash((hashes[-1] if hashes else 0, turn)) & ((1 << 60) - 1))
    return hashes


def assert_sound(index: SharedIndex) -> None:
    """What the index promises of its insides."""
    for replica in index._replicas:
        place = {number: at for at, number in enumerate(replica.segments)}
        assert [s.used for s in replica.segments.values()] == sorted(s.used for s in replica.segments.values())
        held = {}
        for number, segment in replica.segments.items():
            assert len(segment.hashes) > 0
            held.update(dict.fromkeys(segment.hashes, number))
            for child in segment.children or ():
                below = replica.segments[child]
                assert (below.parent, below.start) == (number, segment.start + len(segment.hashes))
                assert place[child] < place[number]
        assert held == replica.blocks
        assert replica.held_bytes == 10 * len(held)


PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=6).map(lambda turns: prompt(*turns))
ALL = [prompt(*([a, b, c] * 2)) for a in (1, 2, 3) for b in (1, 2, 3) for c in (1, 2, 3)]

IndexChange = tuple[int, int, list[int], str, int]
"""Worker, slot, prompt, what is done, and where it is cut off."""

CHANGES: st.SearchStrategy[list[IndexChange]] = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, REPLICAS - 1),
        PROMPTS,
        st.sampled_from(["insert", "undo", "truncate"]),
        st.integers(0, 5),
    ),
    max_size=30,
)


def make_change(index: SharedIndex, slot: int, hashes: list[int], change: str, depth: int) -> None:
    """Do one of `CHANGES`."""
    if change == "insert":
        index.insert(slot, hashes)
    elif change == "undo":
        index.undo(index.insert(slot, hashes))
    else:
        index.truncate(slot, hashes, depth)


def restart(worker: Worker, now_s: float, start_s: float | None = None, wall_ms: int = 0) -> bool:
    """The router's part of a restart: forget, if it is news."""
    replica = worker.fleet.replicas["replica-1"]
    if start_s is not None:
        replica.kv = dataclasses.replace(NOTHING_SCRAPED, process_start_s=start_s)
    news = worker.share.restarted(replica, now_s, wall_ms)
    if news:
        worker.index.forget(0)
    return news
