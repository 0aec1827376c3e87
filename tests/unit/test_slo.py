"""Latency targets, the pure part: what keeps them, who is spared, how long to wait, and what the headers say."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.app import slo_rules
from gateway.config import Config
from gateway.routing.refusals import InvalidTarget
from gateway.routing.slo import TIGHTEST_WITHIN_S, ModelTargets, SloRules, Tightest, parse_target_s
from policies.slo import Targets, keeping, sparing, wait_s

ALL = (0, 1, 2)


def limits(value: float) -> list[float]:
    return [value] * 3


# -- who keeps the targets


def test_exactly_at_the_target_keeps_it() -> None:
    both, worth = keeping(ALL, [0.5, 0.500001, 0.1], [0.04, 0.01, 0.040001], [0.1] * 3, limits(0.5), limits(0.04))
    assert both == worth == [0]


def test_no_target_of_a_kind_is_kept_by_all() -> None:
    assert keeping(ALL, [9.0, 1.0, 2.0], [1.0, 0.1, 0.2], [0.1] * 3, limits(2.0), limits(inf))[1] == [1, 2]
    assert keeping(ALL, [9.0, 1.0, 2.0], [1.0, 0.1, 0.2], [0.1] * 3, limits(inf), limits(0.2))[1] == [1, 2]


def test_nobody_keeps_them() -> None:
    assert keeping(ALL, [9.0, 8.0, 7.0], [0.0] * 3, [0.1] * 3, limits(6.0), limits(inf)) == ([], [])


def test_no_prompt_is_computed_again_for_tpot_alone() -> None:
    # The first holds the prefix and is a little over its TPOT; the second is below, for 0.11 s more of prefill.
    own_s = [0.01, 0.12, 0.12]
    both, worth = keeping(ALL, [0.1, 0.2, 0.2], [0.031, 0.029, 0.031], own_s, limits(1.0), limits(0.030))
    assert both == [1]
    assert worth == [0, 1, 2]


def test_for_ttft_a_prompt_is_computed_again() -> None:
    both, worth = keeping(ALL, [3.0, 0.2, 0.3], [0.031, 0.029, 0.029], [0.01, 0.12, 0.12], limits(1.0), limits(0.030))
    assert both == worth == [1, 2]


SECONDS = st.floats(0.0, 100.0)
THREE = st.lists(SECONDS, min_size=3, max_size=3)


@given(THREE, THREE, THREE, SECONDS | st.just(inf), SECONDS | st.just(inf))
def test_what_misses_is_never_chosen_from_when_one_keeps(
    ttft_s: list[float], tpot_s: list[float], own_s: list[float], ttft_limit_s: float, tpot_limit_s: float
) -> None:
    both, worth = keeping(ALL, ttft_s, tpot_s, own_s, limits(ttft_limit_s), limits(tpot_limit_s))
    assert both == [slot for slot in ALL if ttft_s[slot] <= ttft_limit_s and tpot_s[slot] <= tpot_limit_s]
    in_time = [slot for slot in ALL if ttft_s[slot] <= ttft_limit_s]
    assert set(worth) <= set(in_time)
    if both:
        assert worth
        least_s = min(own_s[slot] for slot in in_time)
        if any(own_s[slot] == least_s for slot in both) or tpot_limit_s == inf:
            # One that keeps both costs nothing more, so nothing but such is left.
            assert set(worth) <= set(both)


# -- who is spared


def test_a_loose_request_goes_where_no_tight_one_could_go_or_where_room_is_left() -> None:
    # Room for tight ones is half of 0.4 s. The first has a long queue, the second would have none left, the third some.
    assert sparing(ALL, [2.0, 0.3, 0.15], [0.2, 0.2, 0.1], 0.4) == [0, 2]


def test_nobody_is_spared_by_computing_a_prompt_again() -> None:
    # Only the second holds the prefix, and would be spoiled by what is left of the prompt.
    assert sparing(ALL, [2.0, 0.21, 2.0], [0.2, 0.05, 0.2], 0.4) == ALL


def test_where_all_would_be_spoiled_the_policy_decides() -> None:
    assert sparing(ALL, [0.3, 0.3, 0.3], [0.2] * 3, 0.4) == ALL


@given(THREE, THREE, SECONDS)
def test_sparing_never_leaves_nothing(ttft_s: list[float], own_s: list[float], tight_s: float) -> None:
    kept = sparing(ALL, ttft_s, own_s, tight_s)
    assert kept
    assert set(kept) <= set(ALL)


def test_the_tightest_target_is_forgotten_after_a_while() -> None:
    tightest = Tightest()
    assert tightest.see("m", 0.5, 0.0) == 0.5
    assert tightest.see("m", 2.0, 1.0) == 0.5
    assert tightest.see("other", 2.0, 1.0) == 2.0
    assert tightest.see("m", 2.0, TIGHTEST_WITHIN_S / 2) == 0.5
    assert tightest.see("m", 3.0, TIGHTEST_WITHIN_S) == 2.0
    assert tightest.see("m", 4.0, 10 * TIGHTEST_WITHIN_S) == 4.0


# -- how long to wait


def test_the_shortest_wait_counts() -> None:
    targets = Targets(1.0, None, 0.0)
    assert wait_s(ALL, [4.0, 3.5, 9.0], [3.8, 3.2, 8.0], [0.0] * 3, [0] * 3, 100.0, targets) == pytest.approx(2.5)


def test_a_queue_drains_no_further_than_to_nothing() -> None:
    # 3 s on an idle replica: waiting is no help.
    assert wait_s((0,), [4.0], [1.0], [0.0], [0], 100.0, Targets(1.0, None, 0.0)) == inf


def test_answers_end_at_their_own_pace() -> None:
    # A fifth of the answers is too many; an answer takes 100 x 50 ms.
    targets = Targets(None, 0.04, 0.0)
    assert wait_s((0,), [0.1], [0.0], [0.05], [10], 100.0, targets) == pytest.approx(1.0)
    assert wait_s((0,), [0.1], [0.0], [0.05], [0], 100.0, targets) == inf
    both = Targets(1.0, 0.04, 0.0)
    assert wait_s((0,), [3.5], [3.0], [0.05], [10], 100.0, both) == pytest.approx(2.5)


def test_what_is_left_of_the_first_token() -> None:
    targets = Targets(2.0, None, 10.0, refuse=True)
    assert targets.ttft_left_s(11.5) == 0.5
    assert not targets.overdue(11.9)
    assert targets.overdue(12.0)
    assert not Targets(2.0, None, 10.0).overdue(99.0)
    assert Targets(None, 0.1, 10.0, refuse=True).ttft_left_s(99.0) == inf
    assert not Targets(None, 0.1, 10.0, refuse=True).overdue(99.0)


# -- what is asked for


@pytest.mark.parametrize(
    ("value", "seconds"), [(b"500", 0.5), (b"12.5", 0.0125), (b" 0.001\t", 1e-6), (b"9999999.999", 9999.999999)]
)
def test_targets_in_headers(value: bytes, seconds: float) -> None:
    assert parse_target_s("x-slo-ttft-ms", value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value",
    [b"", b"0", b"0.000", b"-1", b"+1", b"1e3", b"nan", b"inf", b"1,5", b"500, 600", b".5", b"5.", b"0x10", b"1_000",
     b"10000000", b"1.2345", "٣".encode(), b"5 0", b"soon"],
)  # fmt: skip
def test_what_is_no_target(value: bytes) -> None:
    with pytest.raises(InvalidTarget) as invalid:
        parse_target_s("x-slo-tpot-ms", value)
    assert invalid.value.header == "x-slo-tpot-ms"


@given(st.binary(max_size=12))
def test_any_value_is_a_positive_number_or_refused(value: bytes) -> None:
    try:
        seconds = parse_target_s("x-slo-ttft-ms", value)
    except InvalidTarget:
        return
    assert 0.0 < seconds < 1e4


def rules(**slo: object) -> SloRules:
    return slo_rules(Config.model_validate({"slo": slo}))


def test_without_defaults_only_headers_make_targets() -> None:
    none = rules(on_miss="refuse")
    assert not none.has_defaults
    assert none.targets("m", "m", None, 5.0) is None
    assert none.targets("m", "m", (b"500", None), 5.0) == Targets(0.5, None, 5.0, refuse=True)


def test_a_header_wins_over_the_models_default_and_that_over_the_general_one() -> None:
    some = rules(
        ttft_ms=2000,
        tpot_ms=100,
        models={"chat": {"ttft_ms": 500, "on_miss": "refuse"}, "batch": {"ttft_ms": None, "tpot_ms": None}},
    )
    assert some.has_defaults
    assert some.targets("other", "other", None, 0.0) == Targets(2.0, 0.1, 0.0)
    assert some.targets("chat", "chat", None, 0.0) == Targets(0.5, 0.1, 0.0, refuse=True)
    assert some.targets("chat", "chat", (None, b"40"), 0.0) == Targets(0.5, 0.04, 0.0, refuse=True)
    assert some.targets("batch", "batch", None, 0.0) is None
    # An adapter has its model's, a request without a model the general ones.
    assert some.targets("adapter", "chat", None, 0.0) == Targets(0.5, 0.1, 0.0, refuse=True)
    assert some.targets(None, "", None, 0.0) == Targets(2.0, 0.1, 0.0)


def test_defaults_of_one_model_are_defaults() -> None:
    assert SloRules(models={"m": ModelTargets(ttft_s=1.0)}).has_defaults


@pytest.mark.parametrize("slo", [{"ttft_ms": 0}, {"tpot_ms": -5}, {"ttft_ms": float("inf")}, {"on_miss": "queue"}])
def test_what_is_no_default(slo: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Config.model_validate({"slo": slo})
