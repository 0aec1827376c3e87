"""Workers that share a prefix map through logs in memory: what each comes to believe."""

import dataclasses
import random
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prefixes.shared import SharedIndex
from gateway.prompt.blocks import BlockSchedule
from gateway.replicas.metrics_page import NOTHING_SCRAPED
from gateway.replicas.registry import Fleet, ReplicaSpec
from gateway.sharing import messages, prefixes
from gateway.sharing.layout import Keys, replica_identity
from gateway.sharing.prefixes import PrefixShare
from gateway.sharing.rings import PLACE_BYTES, RING_BYTES, Rings

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


def test_an_answer_is_known_to_all_and_any_may_continue_it() -> None:
    logs = new_logs()
    one, other = Worker(1, logs), Worker(2, logs, URLS[::-1])
    hashes = prompt(1, 2, 3)
    slot, there = one.slot(URLS[1]), other.slot(URLS[1])
    record = one.index.insert(slot, hashes)
    one.index.answered(record, 77)
    one.write()
    other.follow()
    assert other.index.holds(there, 77)
    assert other.index.insert(there, prompt(1, 2, 3, 4), 77).continues
    assert not other.index.holds(there, 77)
    other.write()
    one.follow()
    assert one.believes([prompt(1, 2, 3, 4)]) == [{URLS[1]: 4}]
    for worker in (one, other):
        assert_sound(worker.index)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, REPLICAS - 1), PROMPTS, st.booleans()), max_size=30))
def test_workers_that_insert_at_the_same_time_come_to_believe_the_same(
    requests: list[tuple[int, int, list[int], bool]],
) -> None:
    logs = new_logs()
    # The same fleet in another order: slots are each worker's own.
    workers = [Worker(1, logs), Worker(2, logs, URLS[::-1])]
    for number, replica, hashes, deliver in requests:
        record = workers[number].index.insert(workers[number].slot(URLS[replica]), hashes)
        if hashes[-1] % 2:
            workers[number].index.answered(record, hashes[-1] // 3)
        if deliver:
            for worker in workers:
                worker.write()
                worker.follow()
    cold = Worker(3, logs)
    for worker in workers:
        worker.write()
    for worker in (*workers, cold):
        worker.follow()
    asked = ALL + [hashes for _, _, hashes, _ in requests]
    asked += [[*hashes, hashes[-1] // 3] for _, _, hashes, _ in requests]
    assert workers[0].believes(asked) == workers[1].believes(asked) == cold.believes(asked)
    assert cold.share.counts.orphans == cold.share.counts.bad_entries == 0


CHANGES = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, REPLICAS - 1),
        PROMPTS,
        st.sampled_from(["insert", "undo", "truncate"]),
        st.integers(0, 5),
    ),
    max_size=30,
)


@given(CHANGES)
def test_corrections_are_believed_by_all(changes: list[tuple[int, int, list[int], str, int]]) -> None:
    logs = new_logs()
    workers = [Worker(1, logs), Worker(2, logs)]
    for number, slot, hashes, change, depth in changes:
        index = workers[number].index
        if change == "insert":
            index.insert(slot, hashes)
        elif change == "undo":
            index.undo(index.insert(slot, hashes))
        else:
            index.truncate(slot, hashes, depth)
        for worker in workers:
            worker.write()
        for worker in workers:
            worker.follow()
        for worker in workers:
            assert_sound(worker.index)
    cold = Worker(3, logs)
    cold.follow()
    assert_sound(cold.index)
    asked = ALL + [change[2] for change in changes]
    assert workers[0].believes(asked) == workers[1].believes(asked) == cold.believes(asked)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_in_use_outlives_the_cutting_of_the_log(seed: int) -> None:
    """A cold worker, given only the log's end, knows all that was used in the log's younger half."""
    rng = random.Random(seed)
    logs = new_logs()
    warm = Worker(1, logs, max_bytes=SHARDS * prefixes.LEAST_BUDGET_BYTES)
    used: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for _ in range(3000):
        session = min(int(rng.expovariate(0.02)), 400)
        hashes = prompt(session % 5, session, *range(rng.randint(1, 60)))
        slot = session % REPLICAS
        position = warm.index.logs[slot].position
        warm.index.insert(slot, hashes)
        warm.write()
        warm.follow()
        # Where the log ended before it was told.
        used[slot, session] = (position, hashes)
    warm.share.refresh(0.0)
    cut_logs: Logs = []
    for shard in range(SHARDS):
        trim_id = warm.share.trim_id(shard, 0)
        assert trim_id is not None
        cut = int(trim_id.split("-")[0]) - 1
        assert cut > 0
        assert sum(map(len, logs[shard][cut:])) >= prefixes.LEAST_BUDGET_BYTES * 0.5
        cut_logs.append(logs[shard][cut:])
    cold = Worker(2, cut_logs, max_bytes=SHARDS * prefixes.LEAST_BUDGET_BYTES)
    cold.follow()
    recent = [hashes for (slot, _), (position, hashes) in used.items() if position > warm.index.logs[slot].kept_from]
    assert len(recent) > 50
    assert cold.believes(recent) == warm.believes(recent)
    assert cold.index.blocks(0) < warm.index.blocks(0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), PROMPTS), max_size=20), st.integers(0, 100))
def test_blocks_that_found_no_parent_find_it_in_the_end(told: list[tuple[bool, int, list[int]]], capacity: int) -> None:
    worker = Worker(1, new_logs())
    index = worker.index
    index.set_capacity(0, capacity)
    for adopt, depth, hashes in told:
        depth = min(depth, len(hashes) - 1)
        learn = index.adopt if adopt else index.graft
        before = dict(index.match(hashes)).get(0, 0)
        learned = learn(0, depth, hashes[depth - 1] if depth else 0, array("Q", hashes[depth:]))
        assert learned == (before >= depth)
        assert_sound(index)
        assert index.held_bytes(0) <= capacity


def test_adopted_blocks_are_the_first_to_go() -> None:
    index = Worker(1, new_logs()).index
    index.insert(0, [1, 2])
    index.insert(0, [5])
    assert index.adopt(0, 2, 2, array("Q", [3, 4]))
    assert index.match([1, 2, 3, 4]) == [(0, 4)]
    index.set_capacity(0, 30)
    assert index.match([1, 2, 3, 4]) == [(0, 2)]
    assert index.match([5]) == [(0, 1)]


def test_a_prompt_used_again_costs_nothing_until_a_part_of_the_log_has_passed() -> None:
    logs = new_logs()
    worker = Worker(1, logs)
    worker.index.insert(0, prompt(1, 2, 3))
    worker.write()
    worker.follow()
    shard = worker.share.shard_of(worker.fleet.replicas["replica-1"])
    assert len(logs[shard]) == 1
    for _ in range(10):
        worker.index.insert(0, prompt(1, 2, 3))
    assert worker.share.take(shard) is None
    worker.index.logs[0].advance(prefixes.LEAST_BUDGET_BYTES // 8)
    worker.index.insert(0, prompt(1, 2, 3))
    worker.write()
    assert len(logs[shard][1]) < len(logs[shard][0])
    # Whoever reads only this knows that it is used, but not what it is.
    worker.index.logs[0].advance(prefixes.LEAST_BUDGET_BYTES)
    worker.index.insert(0, prompt(1, 2, 3))
    worker.write()
    assert len(logs[shard][2]) == len(logs[shard][0])


def test_use_told_by_others_keeps_blocks_from_eviction() -> None:
    logs = new_logs()
    one, other = Worker(1, logs), Worker(2, logs)
    for number in (1, 2, 3):
        one.index.insert(0, prompt(number))
        one.write()
        other.follow()
    one.follow()
    one.index.logs[0].advance(prefixes.LEAST_BUDGET_BYTES // 8)
    one.index.insert(0, prompt(1))
    one.write()
    other.follow()
    other.index.set_capacity(0, 20)
    assert other.believes([prompt(1), prompt(2), prompt(3)]) == [{URLS[0]: 1}, {}, {URLS[0]: 1}]


# -- restarts


def restart(worker: Worker, now_s: float, start_s: float | None = None, wall_ms: int = 0) -> bool:
    """The router's part of a restart: forget, if it is news."""
    replica = worker.fleet.replicas["replica-1"]
    if start_s is not None:
        replica.kv = dataclasses.replace(NOTHING_SCRAPED, process_start_s=start_s)
    news = worker.share.restarted(replica, now_s, wall_ms)
    if news:
        worker.index.forget(0)
    return news


@pytest.mark.parametrize("told", [True, False], ids=["process start", "no process start"])
def test_a_restart_is_noticed_once_for_all(told: bool) -> None:
    logs = new_logs()
    one, other = Worker(1, logs), Worker(2, logs)
    if told:
        for worker in (one, other):
            worker.fleet.replicas["replica-1"].kv = dataclasses.replace(NOTHING_SCRAPED, process_start_s=1000.0)
            worker.share.refresh(0.0)
    start_s = 2000.0 if told else None
    one.index.insert(0, prompt(1, 2))
    one.write()
    other.follow()
    if not told:
        assert restart(one, 5.0, None, 1_000_000)  # so that the epoch is not 0
        one.index.insert(0, prompt(1, 2))
        one.write()
        other.share.refresh(5.0)
        other.follow()
        assert other.believes([prompt(1, 2)]) == [{URLS[0]: 2}]
    assert restart(one, 20.0, start_s, 2_000_000)
    one.write()
    other.share.refresh(20.0)
    other.follow()
    assert other.believes([prompt(1, 2)]) == [{}]
    # What is sent there after the restart stays, although the other notices the restart only now.
    one.index.insert(0, prompt(3))
    one.write()
    other.follow()
    assert not restart(other, 21.0, start_s, 2_001_000)
    assert other.believes([prompt(3)]) == [{URLS[0]: 1}]
    cold = Worker(3, logs)
    cold.follow()
    assert cold.believes([prompt(1, 2), prompt(3)]) == [{}, {URLS[0]: 1}]


def test_what_is_told_of_an_earlier_life_is_ignored() -> None:
    logs = new_logs()
    one, late = Worker(1, logs), Worker(2, logs)
    for worker in (one, late):
        worker.fleet.replicas["replica-1"].kv = dataclasses.replace(NOTHING_SCRAPED, process_start_s=1000.0)
        worker.share.refresh(0.0)
    assert restart(one, 1.0, 2000.0)
    late.index.insert(0, prompt(1))
    one.write()
    late.write()
    one.follow()
    assert one.believes([prompt(1)]) == [{}]
    late.follow()
    assert late.believes([prompt(1)]) == [{}]


def test_a_gateway_started_after_a_restart_nobody_saw_believes_nothing_of_before() -> None:
    logs = new_logs()
    gone = Worker(1, logs)
    gone.fleet.replicas["replica-1"].kv = dataclasses.replace(NOTHING_SCRAPED, process_start_s=1000.0)
    gone.share.refresh(0.0)
    gone.index.insert(0, prompt(1))
    gone.index.insert(1, prompt(1))
    gone.write()
    new = Worker(2, logs)
    new.fleet.replicas["replica-1"].kv = dataclasses.replace(NOTHING_SCRAPED, process_start_s=9000.0)
    new.share.refresh(0.0)
    new.follow()
    assert new.believes([prompt(1)]) == [{URLS[1]: 1}]


# -- losses


@given(st.lists(st.tuples(st.integers(0, REPLICAS - 1), PROMPTS), min_size=1, max_size=20))
def test_after_a_flush_one_telling_by_all_brings_everything_back(requests: list[tuple[int, list[int]]]) -> None:
    logs = new_logs()
    workers = [Worker(1, logs), Worker(2, logs)]
    for number, (slot, hashes) in enumerate(requests):
        workers[number % 2].index.insert(slot, hashes)
        for worker in workers:
            worker.write()
            worker.follow()
    before = sum(map(len, (entry for log in logs for entry in log)))
    for log in logs:
        log.clear()
    for worker in workers:
        worker.read = [0] * SHARDS
        for shard in range(SHARDS):
            worker.share.lost(shard)
    for worker in workers:
        for shard in range(SHARDS):
            while worker.share.retell_some(shard, None, 2):
                pass
        worker.write()
        for each in workers:
            each.follow()
    cold = Worker(3, logs)
    cold.follow()
    asked = ALL + [hashes for _, hashes in requests]
    assert cold.believes(asked) == workers[0].believes(asked)
    # The second left out what the first had told.
    assert sum(map(len, (entry for log in logs for entry in log))) <= before + 100


def test_only_what_was_used_since_is_told_again() -> None:
    logs = new_logs()
    worker = Worker(1, logs)
    worker.index.insert(0, prompt(1, 2, 3))
    worker.index.insert(0, prompt(4, 5))
    since = worker.index.clock
    worker.write()
    worker.follow()
    worker.index.insert(0, prompt(1, 2, 9))
    for log in logs:
        log.clear()
    shard = worker.share.shard_of(worker.fleet.replicas["replica-1"])
    worker.share._shards[shard].waiting.clear()
    while worker.share.retell_some(shard, since, 100):
        pass
    worker.write()
    worker.read = [0] * SHARDS
    cold = Worker(2, logs)
    cold.follow()
    assert cold.believes([prompt(1, 2, 9), prompt(1, 2, 3), prompt(4, 5)]) == [{URLS[0]: 3}, {URLS[0]: 2}, {}]


def test_what_waits_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "WAITING_BYTES", 200)
    logs = new_logs()
    worker = Worker(1, logs)
    for number in range(30):
        worker.index.insert(0, prompt(number, 1))
    assert worker.share.waiting_bytes <= 200
    assert worker.share.lossy
    assert worker.share.counts.dropped == 30 - 200 // 30
    worker.write()
    assert worker.share.waiting_bytes == 0
    cold = Worker(2, logs)
    cold.follow()
    assert cold.believes([prompt(0, 1), prompt(29, 1)]) == [{}, {URLS[0]: 2}]


def test_an_entry_that_was_not_written_is_written_later_in_its_place() -> None:
    logs = new_logs()
    worker = Worker(1, logs)
    shard = worker.share.shard_of(worker.fleet.replicas["replica-1"])
    worker.index.insert(0, prompt(1))
    batch = worker.share.take(shard)
    assert batch is not None
    worker.index.insert(0, prompt(1, 2))
    worker.share.put_back(batch)
    worker.write()
    cold = Worker(2, logs)
    cold.follow()
    assert cold.believes([prompt(1, 2)]) == [{URLS[0]: 2}]
    assert cold.share.counts.orphans == 0


# -- workers of one gateway


NEAR = 2


def near_workers(logs: Logs) -> list[Worker]:
    """Workers that have heard each other for long."""
    memory = memoryview(bytearray(NEAR * PLACE_BYTES))
    workers = [Worker(number + 1, logs, rings=Rings(memory, number)) for number in range(NEAR)]
    for worker in workers:
        worker.index.insert(0, prompt(99))
    for now_s in (0.0, 2 * prefixes._SETTLED_S):
        for worker in workers:
            worker.share.look(now_s)
            worker.share.refresh(now_s)
            worker.write()
            worker.follow()
    return workers


def test_a_worker_of_the_same_gateway_knows_at_once_and_does_not_take_it_in_again() -> None:
    logs = new_logs()
    one, other = near_workers(logs)
    stranger = Worker(7, logs)
    before = other.share.counts.applied
    record = one.index.insert(0, prompt(1, 2, 3))
    assert other.believes([prompt(1, 2, 3)]) == [{}]
    assert not other.share.look(30.0)
    assert other.believes([prompt(1, 2, 3)]) == [{URLS[0]: 3}]
    one.index.undo(record)
    other.share.look(30.0)
    assert other.believes([prompt(1, 2, 3)]) == [{}]
    one.index.insert(1, prompt(4))
    one.write()
    other.share.look(30.0)
    other.follow()
    assert other.share.counts.applied == before
    assert other.believes([prompt(1, 2, 3), prompt(4)]) == [{}, {URLS[1]: 1}]
    stranger.follow()
    assert stranger.believes([prompt(1, 2, 3), prompt(4)]) == [{}, {URLS[1]: 1}]
    stranger.index.insert(2, prompt(5))
    stranger.write()
    other.follow()
    assert other.believes([prompt(5)]) == [{URLS[2]: 1}]


def test_a_chain_longer_than_a_message_is_told_in_parts() -> None:
    one, other = near_workers(new_logs())
    long = prompt(*range(2500))
    one.index.insert(0, long)
    other.share.look(30.0)
    assert other.believes([long]) == [{URLS[0]: 2500}]


def test_what_was_missed_in_memory_is_known_through_redis() -> None:
    logs = new_logs()
    one, other = near_workers(logs)
    chains = [prompt(number, *range(1000)) for number in range(RING_BYTES // 8000 + 2)]
    for chain in chains:
        one.index.insert(0, chain)
    other.share.look(30.0)
    assert other.share.counts.near_missed == 1
    assert other.believes(chains[:1]) == [{}]
    one.index.insert(1, prompt(77, 2))
    other.share.look(30.0)
    assert other.believes([prompt(77, 2)]) == [{URLS[1]: 2}]
    one.write()
    other.follow()
    assert other.believes(chains) == [{URLS[0]: 1001}] * len(chains)
    applied = other.share.counts.applied
    one.index.insert(0, prompt(5, 6))
    one.write()
    other.share.look(31.0 + prefixes._SETTLED_S)
    other.follow()
    assert other.share.counts.applied == applied


def test_what_has_no_parent_waits_for_it_only_where_it_may_come() -> None:
    logs = new_logs()
    memory = memoryview(bytearray(NEAR * PLACE_BYTES))
    one = Worker(1, logs, rings=Rings(memory, 0))
    one.index.insert(0, prompt(1, 2))
    late = Worker(2, logs, rings=Rings(memory, 1))
    for number in range(5):
        one.index.insert(0, prompt(1, 2, number))
    late.share.look(0.0)
    assert late.believes([prompt(1, 2, 3)]) == [{}]
    assert late.share.counts.orphans == 5
    assert not any(shard.orphans for shard in late.share._shards)
    one.write()
    late.follow()
    assert late.believes([prompt(1, 2, 3)]) == [{URLS[0]: 3}]


def test_one_look_is_bounded() -> None:
    one, other = near_workers(new_logs())
    for number in range(prefixes._LOOK_MESSAGES + 1):
        one.index.insert(0, prompt(number, 1))
    assert other.share.look(30.0)
    assert other.believes([prompt(prefixes._LOOK_MESSAGES, 1)]) == [{}]
    assert not other.share.look(30.0)
    assert other.believes([prompt(prefixes._LOOK_MESSAGES, 1)]) == [{URLS[0]: 2}]


def test_what_was_told_in_memory_of_a_replica_not_known_yet_is_read_from_redis() -> None:
    logs = new_logs()
    one, other = near_workers(logs)
    other.fleet.remove("replica-1")
    one.index.insert(0, prompt(1, 2))
    other.share.look(30.0)
    other.fleet.add(ReplicaSpec(URLS[0]))
    one.write()
    other.follow()
    assert other.believes([prompt(1, 2)]) == [{URLS[0]: 2}]


@pytest.mark.parametrize("told", [True, False], ids=["process start", "no process start"])
def test_a_restart_is_known_in_memory(told: bool) -> None:
    one, other = near_workers(new_logs())
    if told:
        for worker in (one, other):
            worker.fleet.replicas["replica-1"].kv = dataclasses.replace(NOTHING_SCRAPED, process_start_s=1000.0)
            worker.share.refresh(21.0)
    one.index.insert(0, prompt(1, 2))
    other.share.look(21.0)
    start_s = 2000.0 if told else None
    assert restart(one, 40.0, start_s, 2_000_000)
    other.share.look(40.0)
    assert other.believes([prompt(1, 2)]) == [{}]
    one.index.insert(0, prompt(3))
    other.share.look(40.0)
    assert not restart(other, 41.0, start_s, 2_001_000)
    assert other.believes([prompt(3)]) == [{URLS[0]: 1}]


def test_what_is_told_again_after_a_loss_goes_through_redis_alone() -> None:
    logs = new_logs()
    one, other = near_workers(logs)
    one.index.insert(0, prompt(1, 2))
    other.share.look(30.0)
    near = other.share.counts.near
    for shard in range(SHARDS):
        one.share.lost(shard)
        while one.share.retell_some(shard, None, 100):
            pass
    assert one.share.counts.retold
    other.share.look(30.0)
    assert other.share.counts.near == near
    one.index.insert(0, prompt(7))
    other.share.look(30.0)
    assert other.share.counts.near == near + 1


def test_garbage_in_memory_is_counted_and_does_no_harm() -> None:
    memory = memoryview(bytearray(NEAR * PLACE_BYTES))
    worker = Worker(1, new_logs(), rings=Rings(memory, 0))
    rings = Rings(memory, 1)
    for message in (b"", b"short", bytes(40)):
        rings.tell(message)
    worker.share.look(0.0)
    assert worker.share.counts.bad_entries == 3


@given(CHANGES)
def test_corrections_are_believed_at_once_by_workers_of_one_gateway(
    changes: list[tuple[int, int, list[int], str, int]],
) -> None:
    logs = new_logs()
    workers = near_workers(logs)
    asked = ALL + [change[2] for change in changes]
    for number, slot, hashes, change, depth in changes:
        index = workers[number].index
        if change == "insert":
            index.insert(slot, hashes)
        elif change == "undo":
            index.undo(index.insert(slot, hashes))
        else:
            index.truncate(slot, hashes, depth)
        for worker in workers:
            worker.share.look(30.0)
            assert_sound(worker.index)
        assert workers[0].believes(asked) == workers[1].believes(asked)
    for worker in workers:
        worker.write()
    stranger = Worker(3, logs)
    for worker in (*workers, stranger):
        worker.follow()
        assert_sound(worker.index)
    assert workers[0].believes(asked) == workers[1].believes(asked)


# -- the fleet and the bytes


def test_a_replica_that_joins_later_is_read_of_again() -> None:
    logs = new_logs()
    one = Worker(1, logs)
    one.index.insert(0, prompt(1))
    one.index.insert(2, prompt(1))
    one.write()
    other = Worker(2, logs, URLS[1:])
    other.follow()
    other.fleet.remove("replica-1")
    added = other.fleet.add(ReplicaSpec(URLS[0]))
    assert other.believes([prompt(1)]) == [{URLS[2]: 1}]
    shard = other.share.shard_of(added)
    for number, entry in enumerate(logs[shard]):
        other.share.read(shard, f"{number + 1}-0", entry, only=replica_identity(added.base_url))
    assert other.believes([prompt(1)]) == [{URLS[0]: 1, URLS[2]: 1}]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**64 - 1),
            st.none() | st.lists(st.integers(0, 2**64 - 1), max_size=40),
        ),
        max_size=5,
    )
)
def test_records_survive_packing(records: list[messages.Record]) -> None:
    entry = messages.pack_entry(7, [(1, 2, messages.pack_records(records)), (3, 4, b"")])
    assert messages.writer_of(entry) == 7
    (one, epoch, packed), (other, _, empty) = messages.groups_of(entry)
    assert (one, epoch, other, bytes(empty)) == (1, 2, 3, b"")
    read = [
        (depth, block, None if tail is None else tail.tolist()) for depth, block, tail in messages.records_of(packed)
    ]
    assert read == records


def test_a_long_chain_is_several_records() -> None:
    tail = list(range(1, 2 * messages.MAX_TAIL + 2))
    read = list(messages.records_of(memoryview(messages.pack_records([(5, 99, tail)]))))
    assert [(depth, block, len(part or ())) for depth, block, part in read] == [
        (5, 99, messages.MAX_TAIL),
        (5 + messages.MAX_TAIL, messages.MAX_TAIL, messages.MAX_TAIL),
        (5 + 2 * messages.MAX_TAIL, 2 * messages.MAX_TAIL, 1),
    ]


@given(st.binary(max_size=80))
def test_garbage_is_counted_and_does_no_harm(entry: bytes) -> None:
    worker = Worker(1, new_logs())
    worker.share.read(0, "1-0", entry)
    worker.share.read(0, "2-0", messages.pack_entry(9, [(replica_identity(URLS[0]), 0, entry)]))
    worker.index.insert(0, prompt(1))
    assert worker.believes([prompt(1)]) == [{URLS[0]: 1}]


def test_hashes_of_a_collision_do_not_break_the_index() -> None:
    worker = Worker(1, new_logs())
    worker.index.insert(0, [1, 2, 3])
    assert not worker.index.graft(0, 1, 3, array("Q", [9]))
    assert not worker.index.graft(0, 0, 0, array("Q", [3, 7]))
    assert worker.believes([[1, 2, 3]]) == [{URLS[0]: 3}]


def test_other_block_lengths_are_other_keys() -> None:
    keys = [Keys("w", BlockSchedule(block_bytes=size), 4) for size in (256, 512)]
    assert not set(keys[0].logs) & set(keys[1].logs)
    assert len({*keys[0].logs, *keys[0].births, keys[0].load}) == 9


def test_the_first_record_after_a_pause_is_news() -> None:
    worker = Worker(1, new_logs())
    news: list[int] = []
    worker.share.on_news = lambda: news.append(len(news))
    slot = worker.slot(URLS[0])
    worker.index.insert(slot, prompt(1, 2))
    worker.index.insert(slot, prompt(1, 2, 3))
    assert len(news) == 1
    worker.write()
    worker.index.truncate(slot, prompt(1, 2, 3), 1)
    assert len(news) == 2
