"""Predictions that are too wrong are not followed; load decides until they are better."""

import logging
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.routers import h100s, router_over

from gateway.estimator.fallback import NOTICED_S, RECOVERY, WINDOW, FallbackRules, PredictionFallback
from gateway.prompt.blocks import BlockSchedule, PromptKey
from gateway.prompt.body import RequestBody
from gateway.replicas.breaker import Outcome
from gateway.routing.assignment import Assignment
from policies.catalog import make_policy

SCHEDULE = BlockSchedule()
FALLBACK = "fallback to load"


class Pool:
    """Replicas whose speed is what a test says, on a clock of its own. One request at a time."""

    def __init__(self, policy: str = "predicted_ttft", replicas: int = 4) -> None:
        self.random = Random(7)
        self.now_s = 0.0
        self.router = router_over(h100s(replicas), make_policy(policy), SCHEDULE)

    def ask(self, hashes: list[int] | None = None, slowness: float = 1.0) -> Assignment:
        """Send one request, and let it take so many times as long as predicted at first hand: without calibration."""
        if hashes is None:
            hashes = [self.random.getrandbits(60) for _ in range(40)]
        key = PromptKey(hashes, SCHEDULE.covered_bytes(len(hashes)), None, 0, hashes[0])
        body = RequestBody(model="m", stream=True, include_usage=False, max_tokens=None, n=1, user=None, prompt=key)
        assignment = self.router.assign(self.router.query(body, {}), (), self.now_s)
        uncached = self.router.tokens.estimate("m", key) - assignment.expected_cached_tokens
        self.now_s += 0.01 + slowness * uncached * 3e-5
        assignment.first_token(self.now_s)
        self.now_s += 0.2
        assignment.finish(self.now_s, Outcome.OK, None, 20, keep_prefix=True)
        return assignment

    def jumping(self) -> Assignment:
        """One request to a replica that is five times faster or slower than before, at random."""
        return self.ask(slowness=5.0 ** self.random.choice((-1.0, 1.0)))

    def fallen(self) -> bool:
        return "m" in self.router.fallback.fallen


def test_speeds_that_jump_make_load_decide_and_steady_ones_end_it(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool()
    caplog.set_level(logging.INFO, "gateway.estimator.fallback")
    for _ in range(100):
        assert FALLBACK not in pool.ask().reason
    requests = 0
    while not pool.fallen():
        requests += 1
        assert requests < 3 * WINDOW
        assert FALLBACK not in pool.jumping().reason
    reasons = [pool.jumping() for _ in range(2 * WINDOW)]
    # Every decision says so, and predictions go on.
    assert all(assignment.reason.startswith(FALLBACK) for assignment in reasons)
    assert all(assignment.terms["prediction_error"] > 1.0 for assignment in reasons)
    assert all(assignment.predicted_ttft_s > 0.0 for assignment in reasons)
    requests = 0
    while pool.fallen():
        requests += 1
        assert requests < 6 * WINDOW
        pool.ask()
    for _ in range(100):
        assert FALLBACK not in pool.ask().reason
    (name, fallen, decisions) = next(iter(pool.router.fallback.pools()))
    assert (name, fallen) == ("m", False)
    assert decisions == 2 * WINDOW + requests
    assert ["off by" in record.getMessage() for record in caplog.records] == [True, True]
    assert "by load" in caplog.records[0].getMessage()
    assert "followed again" in caplog.records[1].getMessage()


def test_a_wrong_factor_that_calibration_can_follow_is_only_a_while() -> None:
    pool = Pool()
    for _ in range(50):
        pool.ask()
    asked = sum(FALLBACK in pool.ask(slowness=4.0).reason for _ in range(600))
    assert asked > 0
    assert not pool.fallen()


def test_prefixes_are_respected_and_load_is_spread_while_fallen_back() -> None:
    pool = Pool()
    while not pool.fallen():
        pool.jumping()
    shared = [pool.random.getrandbits(60) for _ in range(60)]
    holder = pool.ask(shared).slot
    again = pool.ask([*shared, 5])
    assert again.reason.startswith(FALLBACK)
    assert again.slot == holder
    assert again.expected_cached_tokens > 0
    # Without a match, requests under way count: none of eight is sent where two are, while others have one.
    router, slots = pool.router, []
    for number in range(8):
        hashes = [1000 + number, *(pool.random.getrandbits(60) for _ in range(39))]
        key = PromptKey(hashes, SCHEDULE.covered_bytes(40), None, 0, hashes[0])
        body = RequestBody(model="m", stream=True, include_usage=False, max_tokens=None, n=1, user=None, prompt=key)
        slots.append(router.assign(router.query(body, {}), (), pool.now_s).slot)
    assert sorted(slots) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_policies_that_follow_no_predictions_go_on_by_their_own_rule() -> None:
    pool = Pool("least_outstanding")
    for _ in range(4 * WINDOW):
        assert pool.jumping().reason == "fewest requests in flight"
    assert pool.fallen()


def test_each_model_is_judged_by_itself_and_rules_can_be_changed() -> None:
    fallback = PredictionFallback(FallbackRules(1.0, 8))
    for _ in range(8):
        fallback.observe("bad", 0.1, 1.0)
        fallback.observe("good", 1.0, 1.0)
    assert list(fallback.fallen) == ["bad"]
    fallback.use(FallbackRules(None))
    assert not fallback.fallen
    for _ in range(WINDOW):
        fallback.observe("bad", 0.1, 1.0)
    assert not fallback.fallen


def test_what_is_off_by_milliseconds_is_not_wrong() -> None:
    fallback = PredictionFallback(FallbackRules(1.0, 8))
    for _ in range(WINDOW):
        fallback.observe("m", 0.001, 0.001 + 0.9 * NOTICED_S)
    assert not fallback.fallen
    for _ in range(WINDOW):
        fallback.observe("m", 0.001, 0.001 + 1.1 * NOTICED_S)
    assert fallback.fallen


@given(
    st.lists(st.tuples(st.floats(0.05, 50.0), st.floats(0.05, 50.0)), max_size=300),
    st.floats(0.1, 5.0),
    st.integers(1, WINDOW),
)
def test_turns_follow_the_median_of_what_was_compared_since_the_last(
    pairs: list[tuple[float, float]], limit: float, samples: int
) -> None:
    fallback = PredictionFallback(FallbackRules(limit, samples))
    errors: list[float] = []
    fallen = False
    for predicted_s, observed_s in pairs:
        fallback.observe("m", predicted_s, observed_s)
        off = abs(predicted_s - observed_s) > NOTICED_S
        errors.append(max(predicted_s, observed_s) / min(predicted_s, observed_s) - 1.0 if off else 0.0)
        errors = errors[-WINDOW:]
        over = sum(error > (RECOVERY * limit if fallen else limit) for error in errors)
        if (
            len(errors) == WINDOW and 4 * over <= WINDOW
            if fallen
            else len(errors) >= samples and 2 * over > len(errors)
        ):
            fallen = not fallen
            errors = []
        assert ("m" in fallback.fallen) is fallen
