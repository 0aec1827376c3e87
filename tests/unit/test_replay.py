"""The replay in virtual time against what can be computed without it."""

import math
import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from gateway.estimator.roofline import StepCost
from loadtests.engine import Engine, EngineLimits, EngineRequest
from loadtests.replay.figures import figures
from loadtests.replay.record import RequestRecord
from loadtests.replay.replay import NO_REPLICA, Replay, ReplayResult
from loadtests.replay.report import to_json
from loadtests.replay.settings import Incident, ReplaySettings, ReplicaModel
from loadtests.trace import TraceRequest, read_trace
from loadtests.trace_facts import infinite_cache_hit_rates, random_routing_block_hit_rate
from loadtests.workloads.catalog import load_named
from loadtests.workloads.conversations import growing_turns
from loadtests.workloads.mooncake import load_of
from loadtests.workloads.prompt import Part, Prompt
from loadtests.workloads.types import Load, Session, Stage, Turn
from policies.catalog import make_policy
from policies.types import Candidates, Choice, Column, Request

COST = StepCost(
    prefill_s_per_token=3e-5, attention_s_per_pair=2e-10, weights_s=0.006, kv_s_per_token=5e-8, overhead_s=0.001
)
LIMITS = EngineLimits(kv_capacity_tokens=60_000, max_batched_tokens=2048)


class Always:
    """Sends everything to one slot, or to the first candidate if that slot is none."""

    name = "always"
    reads: frozenset[Column] = frozenset()

    def __init__(self, slot: int) -> None:
        self.slot = slot

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        return Choice(self.slot if self.slot in candidates.slots else candidates.slots[0], "always")

    def forget(self, slot: int) -> None:
        pass


def settings(replicas: int = 1, limits: EngineLimits = LIMITS, **others: object) -> ReplaySettings:
    return ReplaySettings([ReplicaModel(COST, limits, "h100-sxm", "llama-3.1-8b")] * replicas, **others)  # type: ignore[arg-type]


def run(load: Load, policy: str, replayed: ReplaySettings, seed: int = 0) -> ReplayResult:
    return Replay(load, make_policy(policy, seed), replayed).run()


def one_stage(*sessions: Session) -> Load:
    return Load("test", (Stage("all", sessions),))


def single(arrival_s: float, content: int, tokens: int, output_tokens: int) -> Session:
    return Session(arrival_s, (Turn(Prompt([Part(content, tokens)]), output_tokens, 1_000_000 + content),))


def random_load(seed: int, requests: int = 120, rate_per_s: float = 12.0) -> Load:
    """Requests of all sizes, some of which share beginnings."""
    rng = Random(seed)
    sessions = []
    now_s = 0.0
    for number in range(requests):
        now_s += rng.expovariate(rate_per_s)
        prompt = Prompt([Part(rng.randrange(4), rng.choice((100, 1000))), Part(100 + number, rng.randrange(1, 4000))])
        sessions.append(Session(now_s, (Turn(prompt, rng.randrange(1, 120), 10_000 + number),)))
    return one_stage(*sessions)


def ttft_s(record: RequestRecord) -> float:
    assert record.first_token_s is not None
    return record.first_token_s - record.arrival_s


def by_hand(load: Load, limits: EngineLimits) -> tuple[dict[str, float], dict[str, float], list[float]]:
    """First tokens, ends, and when there were tokens, by stepping one engine one step at a time."""
    engine = Engine(COST, limits)
    arrivals = [
        (
            session.arrival_s,
            EngineRequest(
                str(number),
                turn.prompt.tokens,
                turn.output_tokens,
                turn.prompt.extended(Part(turn.answer, turn.output_tokens)).names_every(limits.block_size_tokens),
            ),
        )
        for number, session in enumerate(load.stages[0].sessions)
        for turn in session.turns
    ]
    arrivals.reverse()
    now_s = 0.0
    first_s: dict[str, float] = {}
    ended_s: dict[str, float] = {}
    tokens_s: list[float] = [0.0]
    while True:
        while arrivals and arrivals[-1][0] <= now_s:
            engine.add(arrivals.pop()[1])
        result = engine.step()
        if result is None:
            if not arrivals:
                return first_s, ended_s, tokens_s
            now_s = arrivals[-1][0]
            continue
        now_s += result.duration_s
        if result.decodes or result.first_tokens or result.resumed:
            tokens_s.append(now_s)
        first_s.update((request.id, now_s) for request in result.first_tokens)
        ended_s.update((request.id, now_s) for request in result.finished)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("capacity_tokens", [200_000, 9_000])
def test_one_replica_alone_does_what_its_engine_does(seed: int, capacity_tokens: int) -> None:
    # With 9,000 tokens of memory requests are preempted.
    limits = EngineLimits(kv_capacity_tokens=capacity_tokens, max_batched_tokens=2048)
    load = random_load(seed)
    first_s, ended_s, _ = by_hand(load, limits)
    result = run(load, "round_robin", settings(limits=limits))
    assert len(first_s) == len(result.records) == 120
    assert (result.replicas[0].preemptions > 0) == (capacity_tokens == 9_000)
    for number, record in enumerate(result.records):
        assert record.first_token_s == pytest.approx(first_s[str(number)], rel=1e-9)
        assert record.ended_s == pytest.approx(ended_s[str(number)], rel=1e-9)


@pytest.mark.parametrize("delay_s", [0.0, 0.003])
def test_the_gateway_sees_the_last_token_before_each_arrival(delay_s: float) -> None:
    seen: list[float] = []

    class Watching(Always):
        def choose(self, request: Request, candidates: Candidates) -> Choice:
            seen.append(replay._router.ledger.step_seen_s[0])
            return super().choose(request, candidates)

    load = random_load(5)
    _, _, tokens_s = by_hand(load, LIMITS)
    replay = Replay(load, Watching(0), settings(event_delay_s=delay_s))
    replay.run()
    for session, seen_s in zip(load.stages[0].sessions, seen, strict=True):
        last_s = max(token_s for token_s in tokens_s if token_s + delay_s <= session.arrival_s or token_s == 0.0)
        assert seen_s == pytest.approx(last_s + delay_s if last_s else 0.0, abs=1e-9)


@pytest.mark.parametrize("policy", ["random", "least_outstanding", "predicted_ttft"])
def test_the_same_seed_gives_the_same_bytes(policy: str) -> None:
    def report(seed: int) -> bytes:
        load = load_named("chat", ["sessions=40", "rate_per_s=20"], seed)
        return to_json([figures(run(load, policy, settings(3, seed=seed), seed))])

    assert report(1) == report(1)
    assert report(1) != report(2)


def test_every_request_ends_once() -> None:
    incidents = (Incident(0, 2.0, False), Incident(1, 3.0, True), Incident(0, 5.0, True))
    load = load_named("agent-loops", ["sessions=40", "rate_per_s=10", "calls=4"], 1)
    ended: list[RequestRecord] = []
    replayed = settings(3, EngineLimits(100_000), incidents=incidents)
    result = Replay(load, make_policy("least_outstanding"), replayed, ended.append).run()
    assert len(ended) == len(set(map(id, ended))) == len(result.records)
    assert {id(record) for record in ended} == {id(record) for record in result.records}
    # A session whose turn failed goes no further; all others are complete.
    failed = [record for record in result.records if record.error is not None]
    turns = sum(len(session.turns) for session in load.stages[0].sessions)
    skipped = sum(len(record.session.turns) - record.turn_number - 1 for record in failed)
    assert len(result.records) + skipped == turns
    assert failed
    report = figures(result)
    assert report.requests == len(result.records)
    assert report.errors == len(failed)
    assert sum(report.requests_per_replica) == report.requests


def tree_trace(seed: int, requests: int) -> list[TraceRequest]:
    """A trace whose prompts are walks down a tree of blocks, each with a last partial block of its own."""
    rng = Random(seed)
    children: dict[tuple[int, ...], int] = {}
    trace = []
    for number in range(requests):
        path: tuple[int, ...] = ()
        ids = []
        for _ in range(rng.randrange(1, 7)):
            path += (rng.randrange(2),)
            ids.append(children.setdefault(path, len(children)))
        ids.append(1_000_000 + number)
        length = 512 * (len(ids) - 1) + rng.randrange(1, 512)
        trace.append(TraceRequest(timestamp=60_000.0 * number, input_length=length, output_length=5, hash_ids=ids))
    return trace


INFINITE = EngineLimits(kv_capacity_tokens=1 << 40, block_size_tokens=512)


def block_hit_rate(result: ReplayResult) -> float:
    hits = sum(record.cached_tokens // 512 for record in result.records)
    return hits / sum(-(-record.turn.prompt.tokens // 512) for record in result.records)


def test_one_infinite_cache_serves_what_the_trace_repeats() -> None:
    trace = tree_trace(1, 150)
    facts = infinite_cache_hit_rates(trace)
    result = run(load_of(trace, "tree"), "round_robin", settings(limits=INFINITE))
    assert block_hit_rate(result) == facts.block
    assert figures(result).token_hit_rate == facts.token
    assert 0.3 < facts.block < 0.9


def test_several_infinite_caches_serve_what_each_has_seen() -> None:
    trace = tree_trace(2, 200)
    result = run(load_of(trace, "tree"), "random", settings(4, INFINITE), seed=5)
    held: list[set[int]] = [set() for _ in range(4)]
    for record, request in zip(result.records, trace, strict=True):
        seen = held[record.slot]
        assert record.cached_tokens == 512 * sum(hash_id in seen for hash_id in request.hash_ids)
        seen.update(request.hash_ids)
    assert {record.slot for record in result.records} == {0, 1, 2, 3}


def test_random_routing_hits_as_often_as_it_should() -> None:
    trace = tree_trace(3, 200)
    rates = [
        block_hit_rate(run(load_of(trace, "tree"), "random", settings(4, INFINITE, scrape_interval_s=0), seed))
        for seed in range(30)
    ]
    mean = sum(rates) / len(rates)
    error = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1) / len(rates))
    assert abs(mean - random_routing_block_hit_rate(trace, 4)) < 4 * error
    assert error < 0.01


def test_the_map_promises_what_the_engine_has() -> None:
    # One request at a time and memory for all: nothing is promised that is not there, and little is missed.
    result = run(load_of(tree_trace(4, 100), "tree"), "predicted_ttft", settings(3, EngineLimits(1 << 30)))
    for record in result.records:
        assert record.expected_cached_tokens <= record.cached_tokens
        assert record.cached_tokens - record.expected_cached_tokens < 128


def test_the_next_turn_comes_a_think_time_after_the_answer() -> None:
    steps = [(Part(number, 200), 30, 100 + number, 0.7 * number) for number in range(1, 5)]
    load = one_stage(Session(1.0, growing_turns(Prompt(), steps), "s"), single(1.5, 50, 5000, 200))
    conversation = [record for record in run(load, "round_robin", settings()).records if record.session.key == "s"]
    assert conversation[0].arrival_s == 1.0
    for number, (before, after) in enumerate(pairwise(conversation), start=2):
        assert before.ended_s is not None
        assert after.arrival_s == pytest.approx(before.ended_s + 0.7 * number)
    # The answer before is in the cache as well: all but the message and the last, unfinished block.
    last = conversation[-1]
    assert last.turn.prompt.tokens - 200 - last.cached_tokens < 2 * 16


def test_a_stage_begins_when_the_one_before_has_drained() -> None:
    load = Load(
        "stages",
        (
            Stage("a", [single(0.0, 1, 100, 500)], 0.1, warm_up=True),
            Stage("b", [single(0.2, 2, 100, 5)], 9.0),
            Stage("c", [single(0.0, 3, 100, 5)], 1.0),
        ),
    )
    result = run(load, "round_robin", settings())
    first, second, third = result.records
    assert first.ended_s is not None
    assert second.arrival_s == pytest.approx(first.ended_s + 0.2)
    assert third.arrival_s == pytest.approx(result.spans[1].started_s + 9.0)
    report = figures(result)
    assert [stage.requests for stage in report.stages] == [1, 1, 1]
    assert report.requests == 2
    assert report.stage_means is not None
    assert report.stage_means.ttft_mean_ms == pytest.approx(1000 * (ttft_s(second) + ttft_s(third)) / 2)


def test_arrivals_come_faster_with_speed() -> None:
    load = one_stage(single(0.0, 1, 100, 5), single(10.0, 2, 100, 5))
    result = run(load, "round_robin", settings(speed=4.0))
    assert [record.arrival_s for record in result.records] == [0.0, 2.5]


def test_news_reaches_the_gateway_late() -> None:
    load = random_load(4, requests=30, rate_per_s=1.0)
    at_once = run(load, "round_robin", settings())
    late = run(load, "round_robin", settings(event_delay_s=0.25))
    for before, after in zip(at_once.records, late.records, strict=True):
        assert ttft_s(after) == pytest.approx(ttft_s(before) + 0.25)


def test_requests_without_a_token_survive_their_replica() -> None:
    # One is decoding when the replica dies, one waits for its prefill, one comes while nobody knows yet, one later.
    load = one_stage(
        single(0.0, 1, 100, 5000), single(0.95, 2, 50_000, 10), single(1.5, 3, 100, 10), single(20.0, 4, 100, 10)
    )
    replayed = settings(2, incidents=[Incident(0, 1.0, False)])
    result = Replay(load, Always(0), replayed).run()
    decoding, waiting, unaware, later = result.records
    assert decoding.error == "cut"
    assert decoding.first_token_s is not None
    for record in (waiting, unaware):
        assert record.error is None
        assert record.tried == (0, 1)
    assert later.tried == (1,)
    assert figures(result).errors == 1


def test_a_restarted_replica_is_cold_and_the_gateway_learns_it() -> None:
    load = one_stage(*(single(arrival_s, 1, 4000, 10) for arrival_s in (0.0, 10.0, 20.5, 30.0)))
    result = Replay(load, Always(0), settings(1, incidents=[Incident(0, 20.0, True)])).run()
    assert [record.cached_tokens for record in result.records] == [0, 3984, 0, 3984]
    # The scrape after the restart tells; until then the map still believes.
    late = Replay(
        one_stage(*(single(arrival_s, 1, 4000, 10) for arrival_s in (0.0, 22.5))),
        Always(0),
        settings(1, incidents=[Incident(0, 20.0, True)]),
    ).run()
    assert late.records[1].expected_cached_tokens == 0


def test_without_any_replica_requests_fail() -> None:
    load = one_stage(single(0.0, 1, 100, 10), single(30.0, 2, 100, 10))
    result = Replay(load, Always(0), settings(1, incidents=[Incident(0, 10.0, False)])).run()
    assert [record.error for record in result.records] == [None, NO_REPLICA]


def test_a_prompt_no_engine_can_hold_is_an_error() -> None:
    load = one_stage(single(0.0, 1, 70_000, 10), single(1.0, 2, 100, 10))
    result = run(load, "round_robin", settings())
    assert [record.error for record in result.records] == ["client_error", None]
    # Nothing of it stays behind: neither load nor a promise.
    assert figures(run(load, "predicted_ttft", settings(2))).errors == 1


def test_metrics_age_until_the_next_scrape() -> None:
    seen: list[tuple[int | None, float | None]] = []

    class Watching(Always):
        def choose(self, request: Request, candidates: Candidates) -> Choice:
            replica = replay._gateway.fleet.by_slot[0]
            assert replica is not None
            seen.append((replica.kv.running, replica.kv.scraped_at_s))
            return super().choose(request, candidates)

    load = one_stage(*(single(0.3 * number, number, 100, 400) for number in range(8)))
    replay = Replay(load, Watching(0), settings(1, scrape_interval_s=1.0))
    replay.run()
    assert [scraped_at_s for _, scraped_at_s in seen] == [0, 0, 0, 0, 1, 1, 1, 2]
    assert [running for running, _ in seen] == [0, 0, 0, 0, 4, 4, 4, 7]


trace_file = os.environ.get("WARMGATE_TRACE")
needs_trace = pytest.mark.skipif(trace_file is None, reason="WARMGATE_TRACE names no Mooncake conversation trace")


def serial(trace: list[TraceRequest]) -> Load:
    """The trace with time enough between requests that each finds what all before it have left."""
    spread = [request.model_copy(update={"timestamp": 1e6 * number}) for number, request in enumerate(trace)]
    return load_of(spread, "serial")


@needs_trace
def test_the_conversation_trace_on_one_infinite_cache() -> None:
    assert trace_file is not None
    limits = EngineLimits(1 << 40, block_size_tokens=512)
    result = run(serial(read_trace(Path(trace_file))), "round_robin", settings(1, limits, scrape_interval_s=0))
    assert figures(result).token_hit_rate == pytest.approx(0.3736, rel=0.01)
    assert block_hit_rate(result) == pytest.approx(0.3664, rel=0.01)


def routed_hit_rate(trace: list[TraceRequest], slots: Iterable[int], replicas: int) -> float:
    """Block hit rate of infinite caches for a given routing, from sets of block ids alone."""
    held: list[set[int]] = [set() for _ in range(replicas)]
    hits = 0
    for slot, request in zip(slots, trace, strict=True):
        seen = held[slot]
        hits += sum(hash_id in seen for hash_id in request.hash_ids)
        seen.update(request.hash_ids)
    return hits / sum(len(request.hash_ids) for request in trace)


@needs_trace
@pytest.mark.parametrize(("replicas", "expected"), [(4, 0.1893), (8, 0.1318), (16, 0.0932)])
def test_the_conversation_trace_under_random_routing(replicas: int, expected: float) -> None:
    assert trace_file is not None
    trace = read_trace(Path(trace_file))
    limits = EngineLimits(1 << 40, block_size_tokens=512)
    result = run(serial(trace), "random", settings(replicas, limits, scrape_interval_s=0))
    rate = block_hit_rate(result)
    same_routing = routed_hit_rate(trace, [record.slot for record in result.records], replicas)
    # The engine computes the last block of a prompt in any case.
    assert rate == pytest.approx(same_routing, rel=0.005)
    # One routing is within 2 % of the expectation. What is special about this one is known from the sets alone.
    rng = Random(1)
    others = [routed_hit_rate(trace, rng.choices(range(replicas), k=len(trace)), replicas) for _ in range(40)]
    assert rate - same_routing + sum(others) / len(others) == pytest.approx(expected, rel=0.01)
