"""Workers that share a prefix map through logs in memory: what each comes to believe."""

import dataclasses
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sharing_workers import (
    ALL,
    CHANGES,
    PROMPTS,
    REPLICAS,
    SHARDS,
    URLS,
    IndexChange,
    Logs,
    Worker,
    assert_sound,
    make_change,
    new_logs,
    prompt,
    restart,
)

from gateway.prompt.blocks import BlockSchedule
from gateway.replicas.metrics_page import NOTHING_SCRAPED
from gateway.replicas.registry import ReplicaSpec
from gateway.sharing import messages, prefixes
from gateway.sharing.layout import Keys, replica_identity


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


@given(CHANGES)
def test_corrections_are_believed_by_all(changes: list[IndexChange]) -> None:
    logs = new_logs()
    workers = [Worker(1, logs), Worker(2, logs)]
    for number, slot, hashes, change, depth in changes:
        make_change(workers[number].index, slot, hashes, change, depth)
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
