"""A decision taken apart: its costs add up, the sentence says why, and those left out are named."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routers import fleet_of, h100s, router_over

from gateway.estimator.fallback import FallbackRules
from gateway.prompt.blocks import BlockSchedule, prompt_key
from gateway.prompt.body import RequestBody
from gateway.replicas.breaker import Outcome
from gateway.replicas.metrics_page import ScrapedState
from gateway.replicas.registry import Fleet
from gateway.replicas.spec import ReplicaSpec, Role
from gateway.routing.assignment import Assignment
from gateway.routing.decision import COPIED
from gateway.routing.explain import MOST_SHOWN, explain, explained, who_could
from gateway.routing.query import Query
from gateway.routing.refusals import Saturated
from gateway.routing.router import Router
from policies.catalog import POLICIES, make_policy
from policies.cost_terms import CostTerms
from policies.predicted_ttft import PredictedTTFT
from policies.types import Candidates, Column, Request
from policies.understudy import understudy

SCHEDULE = BlockSchedule()
_OK = Outcome.OK
SYSTEM = "You are a careful assistant. " * 800


def asking(router: Router, text: str, model: str = "m", *, divisible: bool = False) -> Query:
    key = prompt_key(text.encode(), 7, schedule=SCHEDULE)
    body = RequestBody(
        model=model, stream=True, include_usage=True, max_tokens=None, n=1, user=None, prompt=key, divisible=divisible
    )
    return router.query(body, {})


def assign(router: Router, text: str, now_s: float = 100.0, tried: tuple[int, ...] = (), **how: Any) -> Assignment:
    return router.assign(asking(router, text, **how), tried, now_s)


def router_of(fleet: Fleet, policy: str = "predicted_ttft") -> Router:
    return router_over(fleet, make_policy(policy, 1), SCHEDULE)


def use(router: Router, **settings: Any) -> None:
    """Change how prompts are handed over."""
    rules = router.hand_offs.rules
    router.hand_offs.use(replace(rules, common=replace(rules.common, **settings)))


def left_out(assignment: Assignment) -> dict[str, str]:
    return {one["replica"]: one["why"] for one in explain(assignment.decision)["left_out"]}


# -- what costs are made of


def view(**columns: Any) -> Candidates:
    """Two candidates with nothing to do, save for what is said."""
    names = "in_flight decodes cache_full matched_tokens own_prefill_s predicted_ttft_s decode_delay_s batch_cost_s"
    others = ("memory_wait_s", "cache_oldest_use", "tied_per_s", "tied_saved")
    plain: dict[str, Any] = dict.fromkeys([*names.split(), *others], (0, 0))
    capacity = {"kv_capacity_tokens": (10_000.0, 10_000.0), "kv_room_tokens": (10_000.0, 10_000.0)}
    return Candidates(slots=(0, 1), **{**plain, **capacity, **columns})


def test_the_terms_of_a_worked_example() -> None:
    candidates = view(
        in_flight=(5, 0),
        decodes=(2, 0),
        cache_full=(True, False),
        matched_tokens=(1000.0, 0.0),
        own_prefill_s=(0.2, 0.4),
        predicted_ttft_s=(1.0, 0.5),
        decode_delay_s=(3.0, 0.0),
        batch_cost_s=(0.01, 0.005),
        memory_wait_s=(0.4, 0.0),
        kv_room_tokens=(500.0, 10_000.0),
        tied_per_s=(1.5, 0.5),
        tied_saved=(0.9, 0.1),
    )
    policy = PredictedTTFT()
    policy._reuse = 0.5
    request = Request(prompt_tokens=2000.0, expected_output_tokens=500.0)
    terms = CostTerms(policy, {"eviction_price": 2.0, "least_own_prefill_s": 0.1})
    assert terms.unit == "s"
    assert terms.of(request, candidates, 0) == pytest.approx(
        {
            "ttft": 1.0,
            "prefill_work": 0.1 * 0.2,
            "tied": 2.0 * 1.5 * (0.2 - 0.1) ** 2,
            "queue": 1.0 * (5 - 2) * 0.2,
            "eviction": 4.0 * 0.5 * 0.2,
            "decode_delay": 0.025 * 3.0,
            "batch": 5.0 * 0.01,
            # 2,000 + 500 tokens, 1,000 of them there, into 500 of 10,000
            "memory": 10.0 * 0.1,
            "memory_wait": -(1.0 - 0.03) * 0.4,
        }
    )
    assert terms.of(request, candidates, 1) == pytest.approx(
        {"ttft": 0.5, "prefill_work": 0.04, "tied": 2.0 * 0.1 * (0.4 - 0.1), "batch": 0.025}
    )


_SECONDS = st.floats(0.0, 100.0)
_TOKENS = st.floats(0.0, 200_000.0)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), reuse=st.floats(0.0, 1.0))
def test_terms_add_up_to_the_cost_that_was_minimised_and_nobody_costs_less(data: st.DataObject, reuse: float) -> None:
    def pair(of: st.SearchStrategy[Any]) -> tuple[Any, Any]:
        return data.draw(st.tuples(of, of))

    decodes = pair(st.integers(0, 50))
    candidates = view(
        decodes=decodes,
        in_flight=tuple(running + waiting for running, waiting in zip(decodes, pair(st.integers(0, 20)), strict=True)),
        cache_full=pair(st.booleans()),
        cache_oldest_use=pair(st.integers(0, 9)),
        matched_tokens=pair(_TOKENS),
        own_prefill_s=pair(_SECONDS),
        predicted_ttft_s=pair(_SECONDS),
        decode_delay_s=pair(_SECONDS),
        batch_cost_s=pair(_SECONDS),
        tied_per_s=pair(st.floats(0.0, 1000.0)),
        tied_saved=pair(st.floats(0.0, 1000.0)),
        memory_wait_s=pair(_SECONDS),
        kv_capacity_tokens=pair(st.floats(1.0, 1e6)),
        kv_room_tokens=pair(st.floats(-1e6, 1e6)),
    )
    policy = PredictedTTFT(seed=data.draw(st.integers(0, 3)))
    policy._reuse = reuse
    request = Request(data.draw(_TOKENS), data.draw(_TOKENS))
    choice = policy.choose(request, candidates)
    terms = CostTerms(policy, choice.terms)
    totals = [sum(terms.of(request, candidates, slot).values()) for slot in candidates.slots]
    # Costs are sums of numbers of very different sizes.
    tolerance = 1e-9 * max(1.0, *map(abs, totals), *candidates.predicted_ttft_s, *candidates.memory_wait_s)
    assert min(abs(total - choice.terms["cost_s"]) for total in totals) <= tolerance
    if choice.reason == "least predicted cost":
        assert totals[choice.slot] == pytest.approx(min(totals), abs=tolerance)
        assert totals[choice.slot] == pytest.approx(choice.terms["cost_s"], abs=tolerance)


@pytest.mark.parametrize(("policy", "key"), [("lmetric", "product"), ("min_ttft", "ttft_s")])
def test_costs_of_other_policies_that_minimise_something(policy: str, key: str) -> None:
    router = router_of(h100s(3), policy)
    for number in range(5):
        assignment = assign(router, f"{number} {SYSTEM}")
        found = explain(assignment.decision)
        totals = [one["cost"]["total"] for one in found["candidates"]]
        chosen = next(one for one in found["candidates"] if one["chosen"])
        assert chosen["cost"]["total"] == assignment.terms[key] == min(totals)


def test_policies_without_a_cost_have_columns_and_reasons() -> None:
    found = explain(assign(router_of(h100s(2), "round_robin"), "hello").decision)
    assert [one["cost"] for one in found["candidates"]] == [None, None]
    assert [one["predicted_ttft_s"] for one in found["candidates"]] == [None, None]
    assert "next in turn" in found["why"]


# -- where it went, and why


def test_the_replica_that_holds_the_prompt() -> None:
    router = router_of(h100s(3))
    first = assign(router, SYSTEM)
    first.first_token(100.5)
    second = assign(router, SYSTEM + "More, please.", 101.0)
    found = explain(second.decision)
    assert found["replica"] == first.replica.name == second.replica.name
    assert found["url"] == first.replica.base_url
    assert found["expected_cached_tokens"] == second.expected_cached_tokens > 0
    assert found["predicted_ttft_s"] == second.predicted_ttft_s
    candidates = found["candidates"]
    assert [one["chosen"] for one in candidates] == [True, False, False]
    assert candidates[0]["cost"]["total"] == pytest.approx(second.terms["cost_s"])
    assert candidates[0]["matched_tokens"] + candidates[0]["uncached_tokens"] == pytest.approx(
        second.decision.prompt_tokens
    )
    # As it was before this request was charged.
    assert [one["in_flight"] for one in candidates] == [1, 0, 0]
    assert candidates[0]["running_decodes"] == 1
    tokens = f"{second.expected_cached_tokens:,} of {round(second.decision.prompt_tokens):,} prompt tokens"
    assert found["why"].startswith(f"{second.replica.name}: holds {tokens}; first token predicted ")
    assert " sooner than on the next best, " in found["why"]
    json.dumps(found, allow_nan=False)
    # Compiled policies take nothing else.
    kinds = {
        column: {type(value) for value in values}
        for column, values in zip(COPIED, second.decision.copy.columns, strict=True)
    }
    assert kinds.pop(Column.CACHE_FULL) == {bool}
    assert kinds.pop(Column.IN_FLIGHT) == kinds.pop(Column.DECODES) == {int}
    assert set().union(*kinds.values()) == {float}


def test_why_it_did_not_go_where_its_prompt_is() -> None:
    router = router_of(h100s(2))
    holder = assign(router, SYSTEM)
    for _ in range(6):
        # A queue of long prompts before the holder.
        router.assign(asking(router, SYSTEM + "x" * 60_000), (1 - holder.slot,), 100.0)
    other = assign(router, SYSTEM + "More, please.", 100.0)
    assert other.slot != holder.slot
    found = explain(other.decision)
    assert f"; {holder.replica.name} holds " in found["why"]
    assert "more, mostly for " in found["why"]


def test_equals_are_drawn() -> None:
    found = explain(assign(router_of(h100s(2)), SYSTEM).decision)
    assert found["why"].endswith("costs as much as r1, or nearly, and was drawn") or found["why"].endswith(
        "costs as much as r0, or nearly, and was drawn"
    )


def test_of_equals_the_one_that_holds_more_may_lose_the_draw() -> None:
    """A short prefix saves less than predictions are worth."""
    seen = set()
    for seed in range(40):
        router = router_over(h100s(2), make_policy("predicted_ttft", seed), SCHEDULE)
        first = assign(router, SYSTEM[:400] + "x" * 40_000)
        first.first_token(101.0)
        first.finish(102.0, _OK, None, None, keep_prefix=True)
        second = assign(router, SYSTEM[:400] + "y" * 40_000, 1000.0)
        why = explain(second.decision)["why"]
        assert "--" not in why
        assert " -" not in why
        if second.slot != first.slot and explain(second.decision)["candidates"][-1]["chosen"]:
            seen.add(why.split("; ", 1)[1])
    one, *more = sorted(seen)
    assert "costs as much as r" in one
    assert one.endswith(", and costs as much, or nearly")
    assert len(more) <= 1


def test_the_only_candidate() -> None:
    assert explain(assign(router_of(h100s(1)), SYSTEM).decision)["why"].endswith("it was the only candidate")


def test_a_decision_keeps_what_was_true_then() -> None:
    fleet = h100s(3)
    router = router_of(fleet)
    assignment = assign(router, SYSTEM)
    before = explain(assignment.decision)
    for number in range(10):
        assign(router, f"{number} {SYSTEM}", 100.0 + number)
    fleet.remove(assignment.replica.name)
    fleet.add(ReplicaSpec(url="http://new", name="new", models=("m",)))
    fleet.set_draining(fleet.replicas[next(iter(fleet.replicas))], True)
    assert explain(assignment.decision) == before


def test_predictions_that_are_not_followed() -> None:
    router = router_of(h100s(2))
    router.fallback.use(FallbackRules(0.5, 4))
    for _ in range(8):
        router.fallback.observe("m", 1.0, 10.0)
    found = explain(assign(router, SYSTEM).decision)
    assert found["policy"] == "lmetric"
    assert found["fallback_to_load"]
    assert found["candidates"][0]["cost"]["unit"] == ""
    assert "fallback to load" in found["reason"]


# -- who was left out


def test_every_reason_to_be_left_out() -> None:
    specs = [
        ReplicaSpec(url="http://taken", name="taken", models=("m",)),
        ReplicaSpec(url="http://down", name="down", models=("m",)),
        ReplicaSpec(url="http://draining", name="draining", models=("m",)),
        ReplicaSpec(url="http://ejected", name="ejected", models=("m",)),
        ReplicaSpec(url="http://other", name="other", models=("n",)),
        ReplicaSpec(url="http://full", name="full", models=("m",), max_in_flight=1),
        ReplicaSpec(url="http://busy", name="busy", models=("m",)),
        ReplicaSpec(url="http://tried", name="tried", models=("m",)),
    ]
    fleet = Fleet()
    for spec in specs:
        fleet.set_up(fleet.add(spec), spec.name != "down")
    replicas = fleet.replicas
    router = router_of(fleet)
    everybody_else = tuple(replica.slot for replica in replicas.values() if replica.name != "full")
    assert assign(router, "x", tried=everybody_else).replica.name == "full"
    fleet.set_draining(replicas["draining"], True)
    fleet.set_ejected(replicas["ejected"], True)
    router.room.spare(replicas["busy"].slot, 200.0)
    assignment = assign(router, "hello", tried=(replicas["tried"].slot,))
    assert assignment.replica.name == "taken"
    assert left_out(assignment) == {
        "down": "down: health probes fail",
        "draining": "draining",
        "ejected": "ejected: its circuit breaker is open",
        "other": "does not serve m",
        "full": "saturated: at its limit of 1 requests",
        "busy": "asked for a pause (429 or 503)",
        "tried": "already tried for this request",
    }


def test_prefill_replicas_have_the_wrong_role() -> None:
    fleet = fleet_of(["h100-sxm"] * 2, [Role.MIXED, Role.PREFILL])
    router = router_of(fleet)
    use(router, answer_whole=False)
    assert left_out(assign(router, "hello")) == {"r1": "wrong role: computes prompts only"}


def test_a_replica_that_warms_up() -> None:
    fleet = h100s(2)
    router = Router(
        fleet,
        (plain := router_of(fleet)).ledger,
        plain.ejector,
        plain.index,
        plain.tokens,
        plain.predictor,
        make_policy("predicted_ttft", 1),
        SCHEDULE,
        slow_start_s=10.0,
    )
    first = fleet.replicas["r0"]
    for _ in range(2):
        # It has one request already, and is to have no more than the other's share of two.
        router.assign(asking(router, "x"), (first.slot,), 100.0)
    router.room.came_up(first.slot)
    router.assign(asking(router, "y"), (1,), 100.0)
    assert left_out(assign(router, "hello")) == {"r0": "warming up (slow start)"}


def test_when_nobody_could_be_chosen_the_replicas_say_why() -> None:
    fleet = Fleet()
    fleet.set_up(fleet.add(ReplicaSpec(url="http://a", name="a", models=("m",), max_in_flight=1)), True)
    fleet.add(ReplicaSpec(url="http://b", name="b", models=("m",)))
    router = router_of(fleet)
    assign(router, "hello")
    with pytest.raises(Saturated):
        assign(router, "hello")
    why = {one["replica"]: one["why"] for one in who_could(router.standing(), "m", router.ledger.in_flight)}
    assert why == {"a": "saturated: at its limit of 1 requests", "b": "down: health probes fail"}


# -- attempts and hand-offs


def test_attempts_in_their_order() -> None:
    router = router_of(h100s(3))
    first = assign(router, SYSTEM)
    second = router.assign(asking(router, SYSTEM), (first.slot,), 101.0)
    first.decision.failure = "reset"
    second.decision.before = first.decision
    found = explained(second.decision)
    assert [one["replica"] for one in found] == [first.replica.name, second.replica.name]
    assert [one["failure"] for one in found] == ["reset", None]


def test_a_hand_off_says_who_does_what() -> None:
    fleet = fleet_of(["h100-sxm"] * 3, [Role.DECODE, Role.DECODE, Role.PREFILL])
    router = router_of(fleet)
    use(router, policy="always")
    before = everything(router)
    rehearsed = router.rehearse(asking(router, SYSTEM, divisible=True), 100.0)
    assert everything(router) == before
    assignment = assign(router, SYSTEM, divisible=True)
    assert assignment.hand_off is not None
    assert explain(rehearsed)["hand_off"]["prefill_replica"] == "r2"
    found = explain(assignment.decision)
    assert found["hand_off"]["taken"]
    assert found["hand_off"]["prefill_replica"] == "r2"
    assert found["hand_off"]["decode_replica"] == assignment.replica.name == found["replica"]
    assert found["hand_off"]["cost_s"] == assignment.terms["cost_s"]
    assert found["predicted_ttft_s"] == assignment.predicted_ttft_s
    assert found["why"].startswith(f"r2 computes the prompt and {assignment.replica.name} answers")
    assert found["left_out"] == []


def test_why_there_was_no_hand_off() -> None:
    fleet = fleet_of(["h100-sxm"] * 2, [Role.DECODE, Role.PREFILL])
    fleet.set_scraped(fleet.replicas["r0"], ScrapedState(block_size_tokens=16))
    fleet.set_scraped(fleet.replicas["r1"], ScrapedState(block_size_tokens=32))
    router = router_of(fleet)
    use(router, policy="always")
    found = explain(assign(router, SYSTEM, divisible=True).decision)
    assert not found["hand_off"]["taken"]
    assert "block sizes differ" in found["hand_off"]["reason"]
    assert found["left_out"] == [{"replica": "r1", "url": "http://r1", "why": "wrong role: computes prompts only"}]


# -- large fleets


@pytest.mark.parametrize("count", [30, 70, 200])
def test_large_fleets_are_shown_in_part(count: int) -> None:
    router = router_of(h100s(count))
    for number in range(60):
        assignment = assign(router, f"{number % 7} {SYSTEM} {number}", 100.0 + number / 100)
        found = explain(assignment.decision)
        chosen = [one for one in found["candidates"] if one["chosen"]]
        assert [one["replica"] for one in chosen] == [assignment.replica.name]
        assert chosen[0]["predicted_ttft_s"] == assignment.predicted_ttft_s
        assert len(found["candidates"]) <= MOST_SHOWN
        assert found["candidates_not_shown"] == count - len(found["candidates"])
        totals = [one["cost"]["total"] for one in found["candidates"]]
        assert min(totals) == pytest.approx(assignment.terms["cost_s"], rel=0.021)
        assert found["left_out"] == []


def test_of_a_large_fleet_without_a_shortlist_the_chosen_is_shown() -> None:
    router = router_of(h100s(100), "least_outstanding")
    assignment = router.assign(asking(router, "hello"), tuple(range(99)), 100.0)
    again = assign(router, "hello", tried=tuple(range(20)))
    for one in (assignment, again):
        chosen = [each for each in explain(one.decision)["candidates"] if each["chosen"]]
        assert [each["replica"] for each in chosen] == [one.replica.name]


# -- rehearsals


def everything(router: Router) -> dict[str, Any]:
    """All that a request changes in a router."""
    ledger, memory, index, policy = router.ledger, router.memory, router.index, router.policy
    slots = range(len(router.fleet.by_slot))
    columns = ("in_flight", "decodes", "prefill_tokens", "kv_tokens", "kv_own_tokens", "prefill_work_s")
    assert isinstance(policy, PredictedTTFT)
    return {
        "ledger": {name: list(getattr(ledger, name)) for name in columns},
        "memory": list(memory.room_tokens),
        "map": [(index.blocks(slot), index.held_bytes(slot)) for slot in slots],
        "clock": index._clock,
        "policy": (policy._random.getstate(), policy._reuse),
        "by_load": router._by_load._random.getstate(),  # type: ignore[attr-defined]
        "fallback": list(router.fallback.pools()),
        "room": (dict(router.room._warming_since_s), dict(router.room._spared_until_s), set(router.room._marked)),
        "slo": router.slo.state()[0]._pools,
        "doubt": router.slo.state()[1:],
        "errors": [router.predictor.errors[slot].count for slot in slots],
        "planned": dict(router.hand_offs._planned_s),
        "breakers": [router.ejector.state(replica) for replica in router.fleet.replicas.values()],
        "output": dict(router._output_tokens),
    }


@pytest.mark.parametrize("count", [3, 40])
def test_a_rehearsal_says_what_happens_next_and_changes_nothing(count: int) -> None:
    router = router_of(h100s(count))
    for number in range(20):
        text = f"{number % 4} {SYSTEM} {number}"
        before = everything(router)
        rehearsed = router.rehearse(asking(router, text), 100.0 + number)
        assert everything(router) == before
        assignment = assign(router, text, 100.0 + number)
        if count == 3:
            # Of a large fleet not all are looked at in earnest.
            assert rehearsed.slot == assignment.slot
            assert explain(rehearsed) == explain(assignment.decision)
        assert sum(one["chosen"] for one in explain(rehearsed)["candidates"]) == 1


def test_a_rehearsal_does_not_start_the_clock_of_a_slow_start() -> None:
    fleet = h100s(2)
    router = router_of(fleet)
    router.room.slow_start(10.0)
    router.room.came_up(0)
    router.room.spare(1, 50.0)
    before = everything(router)
    router.rehearse(asking(router, "hello"), 100.0)
    assert everything(router) == before


def test_a_rehearsal_with_latency_targets_changes_nothing() -> None:
    router = router_of(h100s(2))
    key = prompt_key(SYSTEM.encode(), 7, schedule=SCHEDULE)
    body = RequestBody(model="m", stream=True, include_usage=True, max_tokens=None, n=1, user=None, prompt=key)
    before = everything(router)
    decision = router.rehearse(router.query(body, {}, (b"500", b"50"), 100.0), 100.0)
    assert everything(router) == before
    assert explain(decision)["latency_targets"] == "expected"


def test_a_rehearsal_of_a_fallback_is_not_counted() -> None:
    router = router_of(h100s(2))
    router.fallback.use(FallbackRules(0.5, 4))
    for _ in range(8):
        router.fallback.observe("m", 1.0, 10.0)
    before = everything(router)
    assert explain(router.rehearse(asking(router, SYSTEM), 100.0))["fallback_to_load"]
    assert everything(router) == before


def test_a_rehearsal_that_is_refused_changes_nothing() -> None:
    fleet = Fleet()
    fleet.set_up(fleet.add(ReplicaSpec(url="http://a", name="a", models=("m",), max_in_flight=1)), True)
    router = router_of(fleet)
    assign(router, "hello")
    before = everything(router)
    with pytest.raises(Saturated):
        router.rehearse(asking(router, "hello"), 100.0)
    assert everything(router) == before
    assert router.policy.name == "predicted_ttft"


_WITH_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in POLICIES),
    ("weighted_score", {"index": "approximate"}),
    ("sticky_until_saturated", {"index": "approximate"}),
    ("kv_cost", {"temperature": 1.0}),
    ("min_ttft", {"transfer_s_per_token": 1e-6}),
    ("consistent_hash", {"prompt_key": "whole"}),
]


@pytest.mark.parametrize(("name", "policy_options"), _WITH_OPTIONS)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1000), ends=st.lists(st.booleans(), min_size=30, max_size=30))
def test_asking_an_understudy_leaves_any_policy_as_it_is(
    name: str, policy_options: dict[str, Any], seed: int, ends: list[bool]
) -> None:
    """Of two equal policies one is rehearsed before every choice: they choose alike to the end."""
    routers = [router_over(h100s(4), make_policy(name, seed, policy_options), SCHEDULE, seed=seed) for _ in range(2)]
    running: list[list[Assignment]] = [[], []]
    for number, end in enumerate(ends):
        text = f"{(seed + number * number) % 5} {SYSTEM[: 3000 * (1 + number % 5)]}"
        now_s = 100.0 + 10.0 * number
        rehearsed = routers[0].rehearse(asking(routers[0], text), now_s)
        for one in range(3):
            routers[0].rehearse(asking(routers[0], f"other {one}" + SYSTEM), now_s)
        chosen = [assign(router, text, now_s) for router in routers]
        assert chosen[0].slot == chosen[1].slot == rehearsed.slot
        assert chosen[0].terms == chosen[1].terms == rehearsed.final.terms
        for assignments, assignment in zip(running, chosen, strict=True):
            assignments.append(assignment)
            if end:
                assignments.pop(0).finish(now_s + 1.0, _OK, None, None, keep_prefix=True)


def test_what_cannot_be_copied_is_not_asked() -> None:
    class Hoarder:
        name = "hoarder"
        reads = frozenset()

        def __init__(self) -> None:
            self.seen: list[int] = []

    with pytest.raises(ValueError, match=r"Hoarder\.seen cannot be read without changing it"):
        understudy(Hoarder())  # type: ignore[arg-type]
