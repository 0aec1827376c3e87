"""Large fleets: what a decision does not look at could not have been chosen."""

from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routers import fleet_of, router_over

from gateway.prefixes.index import PrefixIndex
from gateway.prompt.blocks import BlockSchedule, PromptKey
from gateway.prompt.body import RequestBody
from gateway.replicas.breaker import Outcome
from gateway.replicas.load import Load
from gateway.routing.assignment import Assignment
from gateway.routing.query import Query
from policies import predicted_ttft
from policies.predicted_ttft import PredictedTTFT

SCHEDULE = BlockSchedule()
HARDWARE = (None, "h100-sxm", "l40s", "a100-80g")


class Crowd:
    """A fleet under random load, with everything that can happen to it."""

    def __init__(self, count: int, seed: int, hardware: int, rate: float) -> None:
        self.random = Random(seed)
        self.fleet = fleet_of([HARDWARE[self.random.randrange(hardware)] for _ in range(count)])
        self.policy = PredictedTTFT(seed)
        self.router = router_over(self.fleet, self.policy, SCHEDULE, index=PrefixIndex(SCHEDULE, 1 << 18))
        self.columns = self.router._columns
        self.columns.all_up_to = 0
        self.columns.look_at_most = 1 << 20
        self.rate = rate
        self.now_s = 1.0
        self.waiting: list[Assignment] = []
        self.running: list[Assignment] = []
        self.heads = [self.chain(self.random.randint(1, 60)) for _ in range(max(count // 2, 1))]

    def chain(self, blocks: int) -> list[int]:
        return [self.random.getrandbits(60) for _ in range(blocks)]

    def query(self) -> Query:
        random = self.random
        hashes = (random.choice(self.heads) if random.random() < 0.5 else []) + self.chain(random.randint(1, 60))
        length = SCHEDULE.covered_bytes(len(hashes)) + random.randrange(200)
        key = PromptKey(hashes, length, None, 0, hashes[0])
        body = RequestBody(model="m", stream=True, include_usage=False, max_tokens=None, n=1, user=None, prompt=key)
        return self.router.query(body, {})

    def step(self) -> None:
        random, router = self.random, self.router
        self.now_s += random.expovariate(self.rate)
        event = random.random()
        if event < 0.5:
            self.waiting.append(router.assign(self.query(), (), self.now_s))
        elif event < 0.7 and self.waiting:
            assignment = self.waiting.pop(random.randrange(len(self.waiting)))
            router.ledger.step_seen_s[assignment.slot] = self.now_s
            assignment.first_token(self.now_s)
            self.running.append(assignment)
        elif event < 0.9 and self.running:
            ended = self.running.pop(random.randrange(len(self.running)))
            ended.finish(self.now_s, Outcome.OK, None, random.randint(2, 600), keep_prefix=True)
        elif event < 0.92 and self.waiting:
            self.waiting.pop().finish(self.now_s, Outcome.CANCELLED, None, None, keep_prefix=False)
        elif event < 0.94:
            load = Load(random.randrange(4), 0, random.uniform(0, 9000), random.uniform(0, 2), 0.0, 4000.0, 4000.0)
            router.ledger.set_others(random.choice(self.slots()), load)
        elif event < 0.95:
            self.fleet.restarted(random.choice(list(self.fleet.replicas.values())))
        elif event < 0.96:
            router.memory.saw_usage(random.choice(self.slots()), random.random(), self.now_s)
        elif event < 0.97:
            replica = random.choice(list(self.fleet.replicas.values()))
            self.fleet.set_up(replica, not replica.up or len(self.slots()) < 2)
        elif event < 0.98 and len(self.fleet.replicas) > 2:
            name = random.choice(list(self.fleet.replicas))
            if self.slots() != (self.fleet.replicas[name].slot,):
                self.fleet.remove(name)

    def slots(self) -> tuple[int, ...]:
        return tuple(self.fleet.route_slots("m"))

    def costs(self, query: Query) -> dict[int, float]:
        """What each candidate costs, looked at one by one."""
        view = self.columns.fill(self.slots(), query.key, query.request.prompt_tokens, self.now_s)
        costs = {}
        for slot in self.slots():
            view.slots = (slot,)
            costs[slot] = deepcopy(self.policy).choose(query.request, view).terms["cost_s"]
        self.columns.clear()
        return costs


crowds = st.builds(
    Crowd,
    count=st.integers(1, 40),
    seed=st.integers(0, 1 << 32),
    hardware=st.integers(1, len(HARDWARE)),
    rate=st.sampled_from([2.0, 20.0, 200.0, 2000.0]),
)


@settings(max_examples=60, deadline=None)
@given(crowds, st.integers(0, 300))
def test_what_is_not_looked_at_costs_no_less_than_what_the_policy_was_satisfied_with(crowd: Crowd, events: int) -> None:
    for _ in range(events):
        crowd.step()
    for _ in range(5):
        crowd.step()
        query = crowd.query()
        costs = crowd.costs(query)
        key, tokens = query.key, query.request.prompt_tokens
        view = crowd.columns.fill(crowd.slots(), key, tokens, crowd.now_s, whole=False)
        seen = set(view.slots)
        assert seen
        assert list(view.slots) == sorted(seen)
        assert view.total == len(costs)
        assert view.more is not None
        more = view.more

        def recorded(
            below_s: float, more: Callable[[float], Any] = more, seen: set[int] = seen, costs: dict[int, float] = costs
        ) -> Any:
            slots = more(below_s)
            assert not seen.intersection(slots)
            seen.update(slots)
            if not slots:
                assert all(cost >= below_s - 1e-9 for slot, cost in costs.items() if slot not in seen)
            return slots

        view.more = recorded
        choice = deepcopy(crowd.policy).choose(query.request, view)
        crowd.columns.clear()
        assert choice.terms["evaluated"] == len(seen)
        assert choice.terms["cost_s"] * (1.0 - predicted_ttft._TIE) <= min(costs.values()) + 1e-9


@settings(max_examples=40, deadline=None)
@given(crowds, st.integers(0, 300))
def test_without_ties_the_choice_is_that_of_looking_at_all(crowd: Crowd, events: int) -> None:
    for _ in range(events):
        crowd.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predicted_ttft, "_TIE", 0.0)
        for _ in range(5):
            crowd.step()
            query = crowd.query()
            costs = crowd.costs(query)
            best = min(costs.values())
            key, tokens = query.key, query.request.prompt_tokens
            view = crowd.columns.fill(crowd.slots(), key, tokens, crowd.now_s, whole=False)
            choice = deepcopy(crowd.policy).choose(query.request, view)
            crowd.columns.clear()
            assert costs[choice.slot] <= best + 1e-9
            assert crowd.columns.candidates.more is None
            assert crowd.columns.candidates.total == 0


@settings(max_examples=60, deadline=None)
@given(crowds, st.integers(0, 300))
def test_nothing_costs_less_than_its_bound(crowd: Crowd, events: int) -> None:
    for _ in range(events):
        crowd.step()
    query = crowd.query()
    costs = crowd.costs(query)
    slots = set(crowd.slots())
    tokens = query.request.prompt_tokens
    crowd.columns.fill(crowd.slots(), query.key, tokens, crowd.now_s)
    most = max(crowd.columns.matched_tokens[slot] for slot in slots)
    crowd.columns.clear()
    walk = crowd.columns._order.walk(tokens, most, crowd.policy.floor_prices(), slots, set())
    found: set[int] = set()
    for slot, cost in sorted(costs.items(), key=lambda item: item[1]):
        found.update(walk.further(cost * (1.0 + 1e-9) + 1e-12, 1000))
        assert slot in found


def test_an_idle_fleet_is_not_looked_at_as_a_whole_and_does_not_fill_from_one_end() -> None:
    crowd = Crowd(200, 1, 1, 20.0)
    used: set[int] = set()
    for _ in range(100):
        assignment = crowd.router.assign(crowd.query(), (), crowd.now_s)
        assert assignment.terms["evaluated"] <= 16
        assert assignment.terms["candidates"] == 200
        used.add(assignment.slot)
    # A burst on idle replicas: few get a second request while others have none.
    assert len(used) >= 85
    assert min(used) < 50
    assert max(used) >= 150


def test_small_fleets_and_those_of_other_policies_are_looked_at_as_a_whole() -> None:
    crowd = Crowd(20, 1, 1, 20.0)
    crowd.columns.all_up_to = 20
    assert "evaluated" not in crowd.router.assign(crowd.query(), (), crowd.now_s).terms


def test_a_prefix_that_all_hold_does_not_make_all_worth_a_look() -> None:
    crowd = Crowd(200, 1, 1, 20.0)
    viral = crowd.chain(20)
    for slot in crowd.slots():
        crowd.router.index.insert(slot, viral)
    deeper = viral + crowd.chain(40)
    crowd.router.index.insert(77, deeper)
    hashes = deeper + crowd.chain(2)
    key = PromptKey(hashes, SCHEDULE.covered_bytes(len(hashes)), None, 0, hashes[0])
    body = RequestBody(model="m", stream=True, include_usage=False, max_tokens=None, n=1, user=None, prompt=key)
    assignment = crowd.router.assign(crowd.router.query(body, {}), (), crowd.now_s)
    assert assignment.slot == 77
    assert assignment.terms["evaluated"] <= 16


def test_there_is_an_end_to_looking() -> None:
    crowd = Crowd(200, 1, 1, 20.0)
    crowd.columns.look_at_most = 56
    query = crowd.query()
    view = crowd.columns.fill(crowd.slots(), query.key, query.request.prompt_tokens, crowd.now_s, whole=False)
    assert view.more is not None
    assert [len(view.slots), *(len(view.more(1e9)) for _ in range(3))] == [8, 16, 32, 0]
