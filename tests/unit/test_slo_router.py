"""Latency targets in front of policies: who is seen, what is refused, and what predictions are worth."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routers import fleet_of, router_over

from gateway.prompt.blocks import BlockSchedule, prompt_key
from gateway.prompt.body import RequestBody
from gateway.replicas.breaker import Outcome
from gateway.replicas.load import LoadLedger
from gateway.routing.assignment import Assignment
from gateway.routing.refusals import InvalidTarget, TargetsOutOfReach
from gateway.routing.slo import ModelTargets, Outlook, SloRules
from policies.catalog import POLICIES, make_policy

SCHEDULE = BlockSchedule()
LONG, SHORT = 40_000, 1_000


class Routed:
    """A router over equal replicas, whose times are those of an 8B model on an H100 unless that is not told."""

    def __init__(self, replicas: int = 3, policy: str = "predicted_ttft", *, known: bool = True) -> None:
        self.fleet = fleet_of(["h100-sxm" if known else None] * replicas)
        self.ledger = LoadLedger()
        self.router = router_over(self.fleet, make_policy(policy, seed=1), SCHEDULE, ledger=self.ledger)
        self._prompts = 0

    def refuse(self) -> None:
        self.router.slo.use(SloRules(ModelTargets(refuse=True)))

    def ask(
        self,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        *,
        tokens: int = SHORT,
        text: str | None = None,
        at_s: float = 100.0,
        now_s: float | None = None,
        tried: tuple[int, ...] = (),
    ) -> Assignment:
        """One request, with targets or without."""
        self._prompts += 1
        content = text if text is not None else f"{self._prompts:08d}" * (tokens // 2)
        key = prompt_key(content.encode(), 7, schedule=SCHEDULE)
        body = RequestBody(model="m", stream=True, include_usage=True, max_tokens=None, n=1, user=None, prompt=key)
        asked = None
        if ttft_ms is not None or tpot_ms is not None:
            asked = (_header(ttft_ms), _header(tpot_ms))
        query = self.router.query(body, {}, asked, at_s)
        return self.router.assign(query, tried, at_s if now_s is None else now_s)

    def load(self, slot: int, prompts: int = 1, tokens: int = LONG) -> list[Assignment]:
        """Put long prompts before a replica, whatever the policy."""
        others = tuple(other for other in range(len(self.fleet.replicas)) if other != slot)
        return [self.ask(tokens=tokens, tried=others) for _ in range(prompts)]

    def decodes(self, slot: int, count: int) -> None:
        """Let answers with long histories run on a replica."""
        for _ in range(count):
            self.ledger.start(slot, 100.0, 4000.0, 0.0, 0.0, 250.0).first_token(100.0)

    def observed(self, slot: int, ratio: float, times: int = 32) -> None:
        """Have predictions for a replica turn out wrong by a factor, without its calibration following."""
        for _ in range(times):
            self.router.predictor.errors[slot].add(1.0, ratio)


def _header(milliseconds: float | None) -> bytes | None:
    return None if milliseconds is None else b"%.3f" % milliseconds


# -- who is seen


def test_a_policy_blind_to_load_is_kept_from_a_replica_that_misses() -> None:
    routed = Routed(policy="random")
    routed.load(1, 4)
    slots = {routed.ask(1000).slot for _ in range(40)}
    assert slots == {0, 2}
    assert {routed.ask().slot for _ in range(40)} == {0, 1, 2}


def test_the_reason_says_what_the_filter_did() -> None:
    routed = Routed(policy="round_robin")
    routed.load(1, 4)
    assignment = routed.ask(1000, 50.0)
    assert assignment.outlook is Outlook.EXPECTED
    assert assignment.reason.endswith("; of 2 of 3 within the targets")
    assert assignment.terms["ttft_left_s"] == pytest.approx(1.0)
    assert 0.0 < assignment.terms["tpot_s"] < 0.05
    late = routed.ask(0.001)
    assert late.outlook is Outlook.BEST_EFFORT
    assert re.search(r"; best effort of \d: none of 3 within the targets", late.reason)
    plain = routed.ask()
    assert plain.outlook is None
    assert "target" not in plain.reason


def test_a_replica_whose_batch_is_too_large_for_the_tpot_target_is_left_out() -> None:
    routed = Routed(policy="random")
    routed.decodes(0, 200)
    assert {routed.ask(None, 20.0).slot for _ in range(30)} == {1, 2}
    assert {routed.ask(None, 500.0).slot for _ in range(40)} == {0, 1, 2}


def test_tpot_counts_those_who_wait_and_this_request() -> None:
    routed = Routed(1)
    empty_s = routed.ask(None, 1000.0).predicted_tpot_s
    busy_s = routed.ask(None, 1000.0, tokens=LONG).predicted_tpot_s
    busier_s = routed.ask(None, 1000.0).predicted_tpot_s
    assert empty_s is not None
    assert busy_s is not None
    assert busier_s is not None
    assert empty_s < busy_s < busier_s
    assert routed.ask(1000.0).predicted_tpot_s is None


def test_tpot_learns_from_what_answers_took() -> None:
    routed = Routed(1)
    predicted_s = []
    for _ in range(200):
        assignment = routed.ask(None, 1000.0)
        assert assignment.predicted_tpot_s is not None
        predicted_s.append(assignment.predicted_tpot_s)
        first_s = 100.0 + assignment.predicted_ttft_s
        assignment.first_token(first_s)
        # Twice as long as a decode step at first.
        assignment.finish(first_s + 100 * 2.0 * predicted_s[0], Outcome.OK, SHORT, 101, keep_prefix=True)
    assert predicted_s[-1] == pytest.approx(2.0 * predicted_s[0], rel=0.05)


def test_a_cached_prefix_is_not_left_for_tpot_but_for_ttft() -> None:
    routed = Routed(2)
    text = "y" * 4 * 8000
    owner = routed.ask(text=text, tried=(1,))
    owner.first_token(101.0)
    owner.finish(101.0, Outcome.OK, None, None, keep_prefix=True)
    routed.decodes(0, 100)
    routed.decodes(1, 60)
    predicted_ms = []
    for other in (1, 0):
        assignment = routed.ask(None, 1000.0, text=text + "more", at_s=101.0, tried=(other,))
        assert assignment.predicted_tpot_s is not None
        predicted_ms.append(1000.0 * assignment.predicted_tpot_s)
        assignment.finish(101.0, Outcome.CANCELLED, None, None, keep_prefix=False)
    assert predicted_ms[0] > predicted_ms[1] > 0.6 * predicted_ms[0]
    misses = routed.ask(None, sum(predicted_ms) / 2, text=text + "more", at_s=101.0)
    assert misses.outlook is Outlook.TTFT_ONLY
    assert misses.slot == 0
    routed.load(0, 4)
    assert routed.ask(1000.0, text=text + "other", at_s=101.0).slot == 1


# -- packing


def test_loose_requests_leave_room_for_tight_ones() -> None:
    routed = Routed(4, policy="least_outstanding")
    routed.load(0, 2, tokens=30_000)
    routed.ask(400)
    # A long prompt with all the time in the world: the shortest queue would be spoiled by it, the longest is already.
    loose = routed.ask(60_000, tokens=30_000)
    assert loose.slot == 0
    assert routed.ask(60_000, tokens=30_000).slot == 0
    assert routed.ask(400).slot != 0
    # Without tight ones of late, and without a target, it goes to the shortest queue.
    assert routed.ask(tokens=30_000).slot != 0
    assert routed.ask(60_000, tokens=30_000, at_s=1000.0).slot != 0


# -- refusals


def test_what_no_replica_keeps_is_refused_with_the_time_until_one_does() -> None:
    routed = Routed(2)
    routed.refuse()
    waiting = [*routed.load(0, 6), *routed.load(1, 4)]
    predicted_s = waiting[-1].predicted_ttft_s
    with pytest.raises(TargetsOutOfReach) as refused:
        routed.ask(500)
    after_s = refused.value.retry_after_s
    # The shorter queue, its last prompt included, and what this prompt takes itself; less the half second there is.
    assert after_s == math.ceil(predicted_s + 0.027 - 0.5)
    assert after_s > 1
    in_flight = list(routed.ledger.in_flight)
    with pytest.raises(TargetsOutOfReach):
        routed.ask(500)
    assert routed.ledger.in_flight == in_flight, "a refusal holds nothing"
    for assignment in waiting:
        # First come, first served, and as fast as predicted.
        if assignment.predicted_ttft_s <= after_s:
            assignment.first_token(100.0 + assignment.predicted_ttft_s)
    assert routed.ask(500, at_s=100.0 + after_s).slot == 1


def test_the_wait_is_bounded_where_waiting_is_no_help() -> None:
    routed = Routed(2)
    routed.router.slo.use(SloRules(ModelTargets(refuse=True), max_retry_after_s=7))
    with pytest.raises(TargetsOutOfReach) as refused:
        routed.ask(0.001)
    assert refused.value.retry_after_s == 7


def test_a_second_attempt_is_judged_by_what_is_left() -> None:
    routed = Routed(3)
    routed.refuse()
    assert routed.ask(500, at_s=100.0, now_s=100.4, tried=(0,)).outlook is Outlook.EXPECTED
    with pytest.raises(TargetsOutOfReach):
        routed.ask(500, at_s=100.0, now_s=100.499, tried=(0,))
    with pytest.raises(TargetsOutOfReach):
        routed.ask(500, at_s=100.0, now_s=105.0, tried=(0,))


# -- what predictions are worth


def test_predictions_that_have_been_wrong_come_after_those_that_have_not() -> None:
    routed = Routed(3, policy="random")
    # Tokens came ten times later than predicted: an idle replica says 0.03 s, and it may be 0.3 s.
    routed.observed(0, 10.0)
    assert {routed.ask(200).slot for _ in range(8)} == {1, 2}


def test_a_target_that_bad_predictions_still_keep_is_kept() -> None:
    routed = Routed(3, policy="random")
    routed.observed(0, 10.0)
    assert {routed.ask(60_000).slot for _ in range(40)} == {0, 1, 2}


def test_nothing_is_refused_on_the_word_of_bad_predictions() -> None:
    routed = Routed(2, policy="least_outstanding")
    routed.refuse()
    routed.load(0, 2)
    routed.load(1, 2)
    with pytest.raises(TargetsOutOfReach):
        routed.ask(2000)
    # First tokens came in a fifth of the time: it may well be in time.
    routed.router.slo.configure(0, routed.router._class_of(routed.fleet.replicas["r0"]))
    routed.observed(0, 0.2)
    assignment = routed.ask(2000)
    assert assignment.slot == 0
    assert assignment.outlook is Outlook.POSSIBLE
    assert "perhaps" in assignment.reason
    # Far beyond what such errors could explain, it is refused all the same.
    routed.load(0, 40)
    with pytest.raises(TargetsOutOfReach):
        routed.ask(2000)


def test_unknown_hardware_says_nothing_at_first() -> None:
    routed = Routed(2, known=False)
    routed.refuse()
    routed.load(0, 5)
    routed.load(1, 5)
    assert routed.ask(1).outlook is Outlook.POSSIBLE
    # Except that the time has passed.
    with pytest.raises(TargetsOutOfReach):
        routed.ask(500, at_s=100.0, now_s=101.0)


def test_unknown_hardware_is_believed_once_its_predictions_were_right() -> None:
    routed = Routed(2, known=False)
    routed.refuse()
    routed.load(0, 5)
    routed.load(1, 5)
    for slot in (0, 1):
        routed.observed(slot, 1.0)
    with pytest.raises(TargetsOutOfReach):
        routed.ask(1)


# -- with any policy, and without targets


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_kept_within_the_targets(policy: str) -> None:
    routed = Routed(4, policy=policy)
    routed.load(0, 4)
    routed.load(3, 4)
    for _ in range(20):
        assignment = routed.ask(800)
        assert assignment.slot in (1, 2)
        assert assignment.policy == policy


STEPS = st.lists(
    st.tuples(st.sampled_from(["shared" * 3000, "other" * 5000, None]), st.integers(1, 30_000), st.booleans()),
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(STEPS, st.sampled_from(list(POLICIES)))
def test_without_targets_nothing_changes(steps: list[tuple[str | None, int, bool]], policy: str) -> None:
    plain, ruled = Routed(3, policy), Routed(3, policy)
    ruled.router.slo.use(SloRules(ModelTargets(refuse=True), {"other": ModelTargets(ttft_s=0.001)}))
    for text, tokens, ends in steps:
        decisions = []
        for routed in (plain, ruled):
            assignment = routed.ask(tokens=tokens, text=None if text is None else text + str(tokens))
            decisions.append((assignment.slot, assignment.reason, dict(assignment.terms), assignment.predicted_ttft_s))
            if ends:
                assignment.first_token(100.0)
                assignment.finish(100.0, Outcome.OK, None, None, keep_prefix=True)
        assert decisions[0] == decisions[1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=4, max_size=4), st.floats(50.0, 20_000.0), st.sampled_from(list(POLICIES)))
def test_none_is_chosen_that_misses_the_first_token_when_one_keeps_it(
    queues: list[int], ttft_ms: float, policy: str
) -> None:
    routed = Routed(4, policy)
    for slot, prompts in enumerate(queues):
        routed.load(slot, prompts)
    assignment = routed.ask(round(ttft_ms, 3))
    if assignment.outlook is Outlook.EXPECTED:
        assert assignment.predicted_ttft_s <= round(ttft_ms, 3) / 1000.0
    else:
        assert assignment.outlook is Outlook.BEST_EFFORT
        predicted_s = [routed.router._columns.predicted_ttft_s[slot] for slot in range(4)]
        assert min(predicted_s) > round(ttft_ms, 3) / 1000.0


def test_a_request_without_a_prompt_has_no_targets_but_valid_headers() -> None:
    router = Routed().router
    router.slo.use(SloRules(ModelTargets(ttft_s=0.001, refuse=True)))
    assert router.query(None, {}, (b"500", None), 0.0).targets is None
    with pytest.raises(InvalidTarget):
        router.query(None, {}, (b"soon", None), 0.0)
