"""Requests that find their prefix on a replica, by slot and second."""

import pytest
from support.routers import h100s, router_over

from gateway.prompt.blocks import DEFAULT_SCHEDULE, prompt_key
from gateway.prompt.body import RequestBody
from gateway.routing.assignment import Assignment
from gateway.routing.tied import FADING_S, Tied
from policies.catalog import make_policy


def test_the_rate_is_that_of_the_last_seconds() -> None:
    tied = Tied()
    tied.open(1)
    for number in range(10_000):
        now_s = 5.0 + 0.01 * number
        tied.fade(now_s)
        tied.note(0, 0.5, 0.1)
    assert tied.per_s == [pytest.approx(50.0, rel=0.02), 0.0]
    assert tied.saved == [pytest.approx(10.0, rel=0.02), 0.0]
    tied.fade(now_s + FADING_S)
    assert tied.per_s[0] == pytest.approx(50.0 / 2.718, rel=0.03)
    tied.forget(0)
    assert tied.per_s == tied.saved == [0.0, 0.0]


def test_a_burst_counts_as_what_it_is_over_some_seconds() -> None:
    tied = Tied()
    tied.open(0)
    tied.fade(100.0)
    for _ in range(100):
        tied.note(0, 1.0, 1.0)
    assert tied.per_s == [pytest.approx(10.0)]
    tied.fade(99.0)  # no clock goes back, but other clocks may be behind
    assert tied.per_s == [pytest.approx(10.0)]


def test_a_request_ties_by_what_it_finds_and_a_restart_frees() -> None:
    router = router_over(h100s(2), make_policy("predicted_ttft", 1), DEFAULT_SCHEDULE)
    text = b"In the beginning " * 2000

    def assign() -> Assignment:
        body = RequestBody(None, True, False, 100, 1, None, prompt_key(text, 1))
        return router.assign(router.query(body, {}), (), 100.0)

    first = assign()
    column = router._columns.tied.per_s
    assert column == [0.0, 0.0]
    second = assign()
    slot = second.slot
    assert slot == first.slot
    assert column[slot] == pytest.approx(second.decision.cached_tokens / second.decision.prompt_tokens / FADING_S)
    assert column[1 - slot] == 0.0
    whole_s = router.predictor.own_prefill_s(slot, second.decision.prompt_tokens, 0.0)
    assert router._columns.tied.saved[slot] == pytest.approx((whole_s - second.decision.own_prefill_s) / FADING_S)
    router.ledger.workers_share = 4.0
    assign()
    assert column[slot] > 4.5 / FADING_S * 0.9
    replica = router.fleet.by_slot[slot]
    assert replica is not None
    router.fleet.restarted(replica)
    assert column == [0.0, 0.0]
