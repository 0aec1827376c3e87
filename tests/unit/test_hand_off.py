"""The decision between one replica and two, and what a hand-off holds."""

import logging
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.routers import fleet_of, router_over

from gateway.app import hand_off_rules
from gateway.config import Config
from gateway.estimator.transfer import LINKS
from gateway.prompt.blocks import BlockSchedule, PromptKey
from gateway.prompt.body import RequestBody, parse_body
from gateway.replicas.breaker import Outcome
from gateway.replicas.metrics_page import ScrapedState
from gateway.replicas.spec import Role
from gateway.routing.assignment import Assignment
from gateway.routing.hand_off import REST_AFTER_S, HandOffRules, HandOffSettings
from gateway.routing.pairing import difference
from gateway.routing.router import Router
from policies.catalog import make_policy


def routed(roles: str = "pdd", whole: str = "predicted_ttft", **settings: Any) -> Router:
    """A router in front of H100s with an 8B model; one letter per role."""
    names = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}
    fleet = fleet_of(["h100-sxm"] * len(roles), [names[letter] for letter in roles])
    router = router_over(fleet, make_policy(whole, 0, {}), BlockSchedule())
    defaults = {"link_bytes_per_s": LINKS["400g"], "answer_whole": False}
    router.hand_offs.use(HandOffRules(HandOffSettings(**(defaults | settings))))
    return router


def body(tokens: int, *, divisible: bool = True, first: int = 1) -> RequestBody:
    """A prompt of so many tokens; prompts with the same first number share their beginnings."""
    schedule = BlockSchedule()
    ends = [schedule.covered_bytes(number + 1) for number in range(tokens)]
    hashes = [first * 1_000_000 + end for end in ends if end <= 4 * tokens]
    key = PromptKey(hashes, 4 * tokens, tokens, 0, hashes[0] if hashes else first)
    return RequestBody("m", True, True, 250, 1, None, key, divisible=divisible)


def ask(router: Router, tokens: int, now_s: float = 0.0, **fields: Any) -> Assignment:
    return router.assign(router.query(body(tokens, **fields), {}), (), now_s)


def decoding(router: Router, slot: int, streams: int) -> None:
    for _ in range(streams):
        router.ledger.start(slot, 0.0, 500, 500, 0.013, 250).first_token(0.0)


def test_a_long_prompt_beside_running_answers_is_prefilled_elsewhere() -> None:
    router = routed()
    for slot in (1, 2):
        decoding(router, slot, 20)
    assignment = ask(router, 32_000)
    hand_off = assignment.hand_off
    assert hand_off is not None
    assert (hand_off.slot, assignment.slot in (1, 2)) == (0, True)
    assert assignment.reason == "prefill elsewhere costs less"
    # 32,000 tokens of 131,072 bytes over 50 GB/s, and 2 ms.
    assert hand_off.transfer_bytes == 32_000 * 131_072
    assert hand_off.transfer_s == pytest.approx(0.002 + 32_000 * 131_072 / 50e9)
    terms = assignment.terms
    assert terms["cost_s"] < terms["whole_cost_s"]
    assert terms["ttft_s"] == assignment.predicted_ttft_s > terms["prefill_s"] + terms["transfer_s"]


@pytest.mark.parametrize("tokens", [1, 500])
def test_a_short_prompt_stays(tokens: int) -> None:
    router = routed()
    for slot in (1, 2):
        decoding(router, slot, 5)
    assert ask(router, tokens).hand_off is None


def test_over_a_slow_link_everything_stays() -> None:
    router = routed(link_bytes_per_s=LINKS["10g"])
    for slot in (1, 2):
        decoding(router, slot, 20)
    assert ask(router, 32_000).hand_off is None


def test_prefill_replicas_serve_whole_requests_while_no_hand_off_pays() -> None:
    router = routed(link_bytes_per_s=LINKS["10g"], answer_whole=True)
    for slot in (1, 2):
        decoding(router, slot, 20)
    for tokens in (500, 32_000):
        assignment = ask(router, tokens)
        assert (assignment.hand_off, assignment.slot) == (None, 0)
        assignment.finish(1.0, Outcome.OK, tokens, 250, keep_prefix=False)


def test_the_first_hand_off_ends_their_help_and_a_time_without_one_brings_it_back() -> None:
    router = routed(answer_whole=True)
    for slot, streams in enumerate((20, 25, 25)):
        decoding(router, slot, streams)

    def chosen(now_s: float) -> int:
        assignment = ask(router, 100, now_s)
        assignment.finish(now_s, Outcome.OK, 100, 1, keep_prefix=False)
        return assignment.slot

    assert chosen(0.0) == 0
    long = ask(router, 32_000, 1.0)
    assert long.hand_off is not None
    long.hand_off.returned(2.0, 32_000, 0)
    long.finish(3.0, Outcome.OK, 32_000, 250, keep_prefix=False)
    assert chosen(1.0 + REST_AFTER_S) in (1, 2)
    assert chosen(1.1 + REST_AFTER_S) == 0


def test_now_and_then_a_hand_off_that_saves_little_does_not_end_their_help() -> None:
    router = routed(answer_whole=True)
    decoding(router, 0, 10)
    for slot in (1, 2):
        decoding(router, slot, 20)

    def assigned(tokens: int, now_s: float) -> Assignment:
        assignment = ask(router, tokens, now_s, first=round(now_s) + 1)
        if assignment.hand_off is not None:
            assignment.hand_off.ended(now_s, Outcome.CANCELLED)
        assignment.finish(now_s, Outcome.CANCELLED, None, None, keep_prefix=False)
        return assignment

    # Beside the others each of these would be better off divided, by some hundredths of a second.
    for number in range(50):
        now_s = float(number)
        longer = assigned(4000 if number % 10 == 5 else 100, now_s)
        assert longer.hand_off is None
        assert router.hand_offs.at_rest("m", now_s)
    # Very many of them are worth it.
    number = 50
    while assigned(4000, float(number)).hand_off is None:
        number += 1
        assert number < 200
    assert not router.hand_offs.at_rest("m", float(number))
    assert assigned(4000, number + 1.0).hand_off is not None
    # Among many short ones they are not any more, long before there has been a time without any.
    for short in range(1000):
        assigned(100, number + 1.0 + 0.01 * short)
    assert router.hand_offs.at_rest("m", number + 11.0)
    assert assigned(4000, number + 11.0).hand_off is None


@pytest.mark.parametrize(
    "settings",
    [
        {"answer_whole": False},
        {"answer_whole": True, "policy": "never"},
        {"answer_whole": True, "connector": "none"},
        {"answer_whole": True, "policy": "threshold", "threshold_tokens": 1_000_000},
    ],
)
def test_otherwise_prefill_replicas_keep_to_their_role(settings: dict[str, Any]) -> None:
    router = routed(**settings)
    for slot in (1, 2):
        decoding(router, slot, 20)
    for _ in range(5):
        assert ask(router, 500).slot in (1, 2)


def test_a_retry_leaves_out_what_was_tried_among_prefill_replicas_too() -> None:
    router = routed("pd", link_bytes_per_s=LINKS["10g"], answer_whole=True)
    query = router.query(body(500), {})
    assert {router.assign(query, (tried,), 0.0).slot for tried in (0, 1)} == {0, 1}


def test_predictions_are_made_for_decode_replicas_that_the_policy_could_not_choose() -> None:
    router = routed("pddd", answer_whole=True)
    columns = router._columns
    key = body(32_000).prompt
    # As many as there are decode replicas, but not the same: one of those is kept free for KV that is on its way.
    columns.fill((0, 2, 3), key, 32_000.0, 0.0)
    assert columns.own_prefill_s[1] == 0.0
    columns.predict_all((1, 2, 3), 32_000.0, 0.0)
    assert columns.own_prefill_s[1] == columns.own_prefill_s[2] > 0.0


def test_a_prompt_that_is_cached_where_it_decodes_stays() -> None:
    router = routed()
    for slot in (1, 2):
        decoding(router, slot, 20)
    first = ask(router, 32_000)
    first.finish(0.1, Outcome.OK, 32_000, 250, keep_prefix=True)
    again = ask(router, 32_000, 5.0)
    assert again.hand_off is None
    assert again.slot == first.slot


def test_a_prefill_replica_with_a_queue_is_left_alone() -> None:
    router = routed()
    for slot in (1, 2):
        decoding(router, slot, 20)
    router.ledger.start(0, 0.0, 64_000, 64_000, 3.0, 0)
    assert ask(router, 32_000).hand_off is None


@pytest.mark.parametrize(
    ("settings", "tokens", "expected"),
    [
        ({"policy": "threshold", "threshold_tokens": 1000}, 1100, True),
        ({"policy": "threshold", "threshold_tokens": 1000}, 900, False),
        ({"policy": "always"}, 20, True),
        ({"policy": "never"}, 32_000, False),
        ({"policy": "always", "connector": "none"}, 32_000, False),
    ],
)
def test_the_other_policies(settings: dict[str, Any], tokens: int, expected: bool) -> None:
    assert (ask(routed(**settings), tokens).hand_off is not None) == expected


@pytest.mark.parametrize("policy", ["round_robin", "least_outstanding", "predicted_ttft"])
def test_every_policy_may_decide_where_whole_requests_go(policy: str) -> None:
    router = routed("pddm", policy)
    for slot in (1, 2, 3):
        decoding(router, slot, 20)
    assignment = ask(router, 32_000)
    assert assignment.hand_off is not None
    assert assignment.slot in (1, 2, 3)


@pytest.mark.interpreted
def test_without_prefill_replicas_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    router = routed("mmm")

    def never(*args: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(router, "_plan", never)
    monkeypatch.setattr(router.hand_offs, "out_of_the_way", never)
    assert ask(router, 32_000).hand_off is None


def test_what_cannot_be_divided_is_served_whole() -> None:
    router = routed()
    for slot in (1, 2):
        decoding(router, slot, 20)
    assert ask(router, 32_000, divisible=False).hand_off is None
    query = router.query(body(32_000, first=2), {})
    assert router.assign(query, (), 0.0, whole=True).hand_off is None


def test_work_is_held_where_it_is_done_and_given_back_once() -> None:
    router = routed(roles="pd")
    router.hand_offs.use(HandOffRules(HandOffSettings(policy="always")))
    ledger = router.ledger
    assignment = ask(router, 32_000)
    hand_off = assignment.hand_off
    assert hand_off is not None
    assert ledger.prefill_tokens == [32_000, 0]
    assert ledger.kv_own_tokens == [32_000, 32_250]
    assert (ledger.in_flight, ledger.reserved) == ([1, 1], [0, 1])
    hand_off.returned(1.4, 32_000, 0)
    hand_off.returned(1.5, 32_000, 0)
    hand_off.ended(1.5, Outcome.SERVER_ERROR)
    assert (ledger.prefill_tokens, ledger.in_flight) == ([0, 0], [0, 1])
    hand_off.fetching_s = 1.4
    assignment.first_token(1.5)
    assert (ledger.decodes, ledger.reserved) == ([0, 1], [0, 0])
    assignment.finish(2.0, Outcome.OK, 32_000, 250, keep_prefix=True, cached_tokens=0)
    assert ledger.in_flight == ledger.decodes == ledger.kv_tokens == ledger.kv_own_tokens == [0, 0]
    key = body(32_000).prompt
    assert key is not None
    assert {slot for slot, _ in router.index.match(key.hashes)} == {0, 1}


def test_a_request_given_up_before_its_prompt_is_computed_leaves_no_prefix_behind() -> None:
    router = routed(roles="pd")
    router.hand_offs.use(HandOffRules(HandOffSettings(policy="always")))
    assignment = ask(router, 32_000)
    assignment.finish(0.5, Outcome.CANCELLED, None, None, keep_prefix=False)
    assert router.ledger.in_flight == router.ledger.reserved == router.ledger.prefill_tokens == [0, 0]
    key = body(32_000).prompt
    assert key is not None
    assert not router.index.match(key.hashes)


def test_a_long_prompt_keeps_out_of_the_way_of_kv_that_is_coming() -> None:
    router = routed(roles="pdd")
    router.hand_offs.use(HandOffRules(HandOffSettings(policy="always")))
    coming = ask(router, 32_000)
    query = router.query(body(30_000, first=2), {})
    whole = [router.assign(query, (), 0.0, whole=True).slot for _ in range(4)]
    assert coming.slot not in whole


def test_replicas_that_differ_are_not_paired_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    router = routed()
    router.hand_offs.use(HandOffRules(HandOffSettings(policy="always")))
    fleet = router.fleet
    for replica, block in zip(fleet.replicas.values(), (16, 32, 32), strict=True):
        fleet.set_scraped(replica, ScrapedState(block_size_tokens=block))
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            assert ask(router, 32_000, first=number + 1).hand_off is None
    told = [record.message for record in caplog.records if "does not prefill" in record.message]
    assert told == [f"r0 does not prefill for r{n}: block sizes differ: 16 for prefill, 32 for decode" for n in (1, 2)]
    assert router.hand_offs.unpaired == {("m", "block_size"): 3}
    fleet.set_scraped(fleet.replicas["r2"], ScrapedState(block_size_tokens=16))
    assignment = ask(router, 32_000, first=9)
    assert assignment.hand_off is not None
    assert assignment.slot == 2


def versions(router: Router, *of_replicas: str | None) -> None:
    for replica, version in zip(router.fleet.replicas.values(), of_replicas, strict=True):
        router.fleet.set_version(replica, version)


def test_a_prompt_is_served_whole_while_the_versions_of_all_pairs_differ_and_its_reason_says_so() -> None:
    router = routed(policy="always")
    versions(router, "0.33.0", "0.32.0", "0.32.0")
    whole = ask(router, 32_000)
    assert whole.hand_off is None
    assert whole.reason.endswith("; no pair for a hand-off, versions differ: 0.33.0 for prefill, 0.32.0 for decode")
    assert router.hand_offs.unpaired == {("m", "version"): 1}
    versions(router, "0.33.0", "0.32.0", "0.33.0")
    assert (ask(router, 32_000, first=2).hand_off is not None, ask(router, 32_000, first=3).slot) == (True, 2)
    versions(router, "0.33.0", "0.33.0", "0.33.0")
    assert ask(router, 32_000, first=4).hand_off is not None
    assert router.hand_offs.unpaired == {("m", "version"): 1}


def test_a_prompt_that_nobody_would_hand_off_is_not_counted_as_unpaired() -> None:
    router = routed()
    versions(router, "0.33.0", "0.32.0", "0.32.0")
    short = ask(router, 10)
    assert "no pair" not in short.reason
    assert not router.hand_offs.unpaired


def test_a_restart_makes_the_version_unknown() -> None:
    router = routed(policy="always")
    versions(router, "0.33.0", "0.32.0", "0.32.0")
    router.fleet.restarted(router.fleet.replicas["r1"])
    assert router.fleet.replicas["r1"].version is None
    assert ask(router, 32_000).slot == 1


VERSIONS = st.sampled_from([None, "0.32.0", "0.33.0"])


@given(st.lists(VERSIONS, min_size=2, max_size=3), st.lists(VERSIONS, min_size=1, max_size=3))
def test_whoever_may_be_paired_is_and_nobody_else(prefills: list[str | None], decodes: list[str | None]) -> None:
    router = routed("p" * len(prefills) + "d" * len(decodes), policy="always")
    versions(router, *prefills, *decodes)
    # Busy in turn, so that the cheapest pair is not always the first.
    for number in range(4):
        assignment = ask(router, 1000, first=number + 1)
        may = any(one is None or other is None or one == other for one in prefills for other in decodes)
        assert (assignment.hand_off is not None) == may
        if assignment.hand_off is not None:
            assert difference(assignment.hand_off.replica, assignment.replica) is None


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ((16, "0.32.0"), (16, "0.32.0"), None),
        ((16, "0.32.0"), (16, "0.33.0"), "version"),
        ((16, "0.32.0"), (16, "0.32.0rc1"), "version"),
        ((16, None), (16, "0.33.0"), None),
        ((16, "0.32.0"), (16, None), None),
        ((16, None), (16, None), None),
        ((16, "0.32.0"), (32, "0.32.0"), "block_size"),
        ((16, "0.32.0"), (None, "0.32.0"), "block_size"),
    ],
)
def test_what_keeps_two_replicas_apart(
    one: tuple[int, str | None], other: tuple[int | None, str | None], kind: str | None
) -> None:
    fleet = fleet_of(["h100-sxm"] * 2, [Role.PREFILL, Role.DECODE])
    replicas = list(fleet.replicas.values())
    for replica, (block, version) in zip(replicas, (one, other), strict=True):
        fleet.set_scraped(replica, ScrapedState(block_size_tokens=block))
        fleet.set_version(replica, version)
    found = difference(*replicas)
    assert (found.kind if found is not None else None) == kind


def test_models_of_different_paths_keep_replicas_apart() -> None:
    fleet = fleet_of(["h100-sxm"] * 2, [Role.PREFILL, Role.DECODE])
    prefill, decode = fleet.replicas.values()
    fleet.set_served(prefill, [{"id": "m", "root": "/models/a"}])
    fleet.set_served(decode, [{"id": "m", "root": "/models/b"}])
    found = difference(prefill, decode)
    assert found is not None
    assert found.kind == "models"
    assert "/models/a" in found.text
    assert "/models/b" in found.text


def test_observed_hand_offs_correct_the_link() -> None:
    router = routed(roles="pd")
    router.hand_offs.use(HandOffRules(HandOffSettings(policy="always", link_bytes_per_s=LINKS["400g"])))
    predicted = []
    now_s = 0.0
    for number in range(60):
        assignment = ask(router, 32_000, now_s, first=number + 1)
        hand_off = assignment.hand_off
        assert hand_off is not None
        predicted.append(hand_off.transfer_s)
        hand_off.returned(now_s + 1.4, 32_000, 0)
        hand_off.fetching_s = now_s + 1.4
        # Twice as slow as configured, and a step.
        step_s = assignment.predicted_ttft_s - hand_off.prefill_s - hand_off.transfer_s
        assignment.first_token(now_s + 1.4 + 2 * predicted[0] + step_s)
        assignment.finish(now_s + 5, Outcome.OK, 32_000, 250, keep_prefix=True)
        now_s += 10
    assert predicted[-1] == pytest.approx(2 * predicted[0], rel=0.01)
    router.hand_offs.use(HandOffRules(HandOffSettings(policy="always", link_bytes_per_s=LINKS["100g"])))
    assert router.hand_offs.correction("m") == 1.0


def test_models_take_what_they_leave_out_from_all() -> None:
    config = Config.model_validate(
        {
            "disaggregation": {
                "link_bytes_per_s": 1e9,
                "kv_lease_s": 12,
                "models": {"a": {"policy": "never"}, "b": {"link": "nvlink"}, "c": {"link_bytes_per_s": 2e9}},
            }
        }
    )
    rules = hand_off_rules(config)
    assert rules.of("other") == HandOffSettings(link_bytes_per_s=1e9, kv_lease_s=12.0)
    assert (rules.of("a").policy, rules.of("a").link_bytes_per_s) == ("never", 1e9)
    assert rules.of("b").link_bytes_per_s == LINKS["nvlink"]
    assert (rules.of("c").link_bytes_per_s, rules.of("c").kv_lease_s) == (2e9, 12.0)


@pytest.mark.parametrize(
    ("fields", "divisible"),
    [
        ({"prompt": "text"}, True),
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": ["text"]}, True),
        ({"prompt": ["one", "two"]}, False),
        ({"prompt": "text", "echo": True}, False),
        ({"prompt": "text", "n": 3}, False),
        ({"prompt": "text", "best_of": 2}, False),
        ({"prompt": "text", "prompt_logprobs": 1}, False),
    ],
)
def test_which_completions_can_be_divided(fields: dict[str, Any], divisible: bool) -> None:
    assert parse_body("/v1/completions", orjson.dumps({"model": "m", **fields})).divisible is divisible
    assert parse_body("/v1/embeddings", orjson.dumps({"model": "m", **fields})).divisible is False
