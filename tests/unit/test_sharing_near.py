"""Workers of one gateway that tell each other of prefixes in memory, and write to Redis, too."""

import dataclasses

import pytest
from hypothesis import given
from support.sharing_workers import (
    ALL,
    CHANGES,
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

from gateway.replicas.metrics_page import NOTHING_SCRAPED
from gateway.replicas.registry import ReplicaSpec
from gateway.sharing import prefixes
from gateway.sharing.rings import PLACE_BYTES, RING_BYTES, Rings

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
    changes: list[IndexChange],
) -> None:
    logs = new_logs()
    workers = near_workers(logs)
    asked = ALL + [change[2] for change in changes]
    for number, slot, hashes, change, depth in changes:
        make_change(workers[number].index, slot, hashes, change, depth)
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
