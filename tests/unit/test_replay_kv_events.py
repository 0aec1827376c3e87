"""With KV events the gateway's map is what the engines hold."""

from random import Random

import pytest

from gateway.estimator.roofline import StepCost
from gateway.prefixes.index import PrefixIndex
from gateway.prompt.blocks import BlockSchedule
from loadtests.engine import EngineLimits, EngineRequest, StoredBlocks
from loadtests.replay.kv_events import EventFeed
from loadtests.replay.replay import Replay
from loadtests.replay.settings import ReplaySettings, ReplicaModel
from loadtests.replay.wiring import PromptKeys
from loadtests.workloads.conversations import growing_turns
from loadtests.workloads.prompt import Part, Prompt
from loadtests.workloads.types import Load, Session, Stage
from policies.catalog import make_policy

COST = StepCost(prefill_s_per_token=3e-5, attention_s_per_pair=0.0, weights_s=0.006, kv_s_per_token=5e-8)


def conversations(seed: int) -> Load:
    rng = Random(seed)
    sessions = []
    for number in range(40):
        opening = Prompt([Part(rng.randrange(5), 700)])
        steps = [
            (
                Part(1000 + 100 * number + turn, rng.randrange(1, 500)),
                rng.randrange(1, 300),
                10_000 * number + turn,
                0.5,
            )
            for turn in range(rng.randrange(1, 5))
        ]
        sessions.append(Session(0.4 * number, growing_turns(opening, steps)))
    return Load("conversations", (Stage("all", sessions),))


def agreement(lost: float, kv_events: bool = True) -> tuple[int, int, int]:
    """Map blocks that the map holds falsely, those it lacks, and those both hold, after a run with evictions."""
    limits = EngineLimits(kv_capacity_tokens=8_000)
    settings = ReplaySettings(
        [ReplicaModel(COST, limits, "h100-sxm", "llama-3.1-8b")] * 2, kv_events=kv_events, kv_events_lost=lost
    )
    replay = Replay(conversations(1), make_policy("round_robin"), settings)
    result = replay.run()
    index, keys = replay._router.index, replay._gateway.keys
    false = lacking = common = 0
    seen: set[tuple[int, int]] = set()
    for record in result.records:
        turn = record.turn
        sequence = turn.prompt.extended(Part(turn.answer, turn.output_tokens))
        hashes = keys.key(sequence).hashes
        believed = dict(index.match(hashes))
        for replica in result.replicas:
            names = sequence.names_every(16)
            held = replica.engine.pool.match(names, len(names)) * 16
            for place, (block_hash, position) in enumerate(zip(hashes, keys.positions(sequence.tokens), strict=True)):
                if (replica.slot, block_hash) in seen:
                    continue
                seen.add((replica.slot, block_hash))
                in_map, in_engine = place < believed.get(replica.slot, 0), position <= held
                false += in_map and not in_engine
                lacking += in_engine and not in_map
                common += in_engine and in_map
    return false, lacking, common


def test_the_map_is_what_the_engines_hold() -> None:
    false, lacking, common = agreement(lost=0.0)
    assert false == 0
    assert common > 100
    # The map bounds itself too, by bytes of its own blocks: it may drop a block the engine still has.
    assert lacking <= 0.05 * common


def test_lost_events_make_it_worse() -> None:
    assert agreement(lost=0.5)[0] > 0
    assert agreement(lost=0.0, kv_events=False)[0] > 0


@pytest.fixture
def feed() -> EventFeed:
    schedule = BlockSchedule()
    return EventFeed(PrefixIndex(schedule), PromptKeys(schedule), 0, 16, 0.0, 0)


def request(prompt: Prompt) -> EngineRequest:
    return EngineRequest("a", prompt.tokens, 1, prompt.names_every(16))


def test_a_block_held_twice_survives_one_eviction(feed: EventFeed) -> None:
    prompt = Prompt([Part(1, 256)])
    hashes = PromptKeys(BlockSchedule()).key(prompt).hashes
    names = prompt.names_every(16)
    feed.apply([StoredBlocks(request(prompt), 0, 16)], ())
    feed.apply([StoredBlocks(request(prompt), 0, 16)], ())
    feed.apply((), names[::-1])
    assert feed._index.match(hashes) == [(0, 4)]
    # Tails go first: the last block of the map, then the one before.
    feed.apply((), names[:7:-1])
    assert feed._index.match(hashes) == [(0, 2)]
    feed.apply((), names[7::-1])
    assert feed._index.match(hashes) == []


def test_blocks_are_known_as_they_become_full(feed: EventFeed) -> None:
    prompt = Prompt([Part(1, 256)])
    hashes = PromptKeys(BlockSchedule()).key(prompt).hashes
    running = request(prompt)
    feed.apply([StoredBlocks(running, 0, 3)], ())
    assert feed._index.match(hashes) == []
    feed.apply([StoredBlocks(running, 3, 9)], ())
    assert feed._index.match(hashes) == [(0, 2)]


def test_after_a_restart_old_evictions_mean_nothing(feed: EventFeed) -> None:
    prompt = Prompt([Part(1, 256)])
    feed.apply([StoredBlocks(request(prompt), 0, 16)], ())
    feed.restarted()
    feed.apply((), prompt.names_every(16))
    assert feed._index.match(PromptKeys(BlockSchedule()).key(prompt).hashes) == [(0, 4)]
