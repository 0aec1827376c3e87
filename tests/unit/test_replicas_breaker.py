import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.replicas.breaker import FAILURES, Breaker, BreakerSettings, Outcome, State

SETTINGS = BreakerSettings(consecutive_failures=3, base_ejection_s=10.0, max_ejection_s=60.0)
NEUTRAL = sorted(set(Outcome) - FAILURES - {Outcome.OK})


def play(breaker: Breaker, script: str) -> list[str]:
    """Play a script and return the state after each of its steps.

    A step is `outcome` (begin and record), `tick:seconds` (time passes), or `fresh` (a reason to try
    again), with `!` for a pool that cannot spare the replica.
    """
    states = []
    now_s = 0.0
    for step in script.split():
        word = step.rstrip("!")
        if word.startswith("tick:"):
            now_s += float(word.removeprefix("tick:"))
            breaker.elapsed(now_s)
        elif word == "fresh":
            breaker.offer_trial()
        else:
            spare = not step.endswith("!")
            breaker.record(breaker.begin(), Outcome(word), now_s, lambda spare=spare: spare)  # type: ignore[misc]
        states.append(breaker.state.value)
    return states


@pytest.mark.parametrize(
    ("script", "states"),
    [
        ("timeout timeout timeout", "closed closed ejected"),
        ("connect_error server_error cut", "closed closed ejected"),
        ("timeout timeout ok timeout timeout", "closed closed closed closed closed"),
        # Neutral outcomes neither count nor start the count again.
        ("timeout client_error timeout backpressure timeout", "closed closed closed closed ejected"),
        ("timeout! timeout! timeout! timeout! timeout", "closed closed closed closed ejected"),
        ("timeout! timeout! timeout! ok timeout", "closed closed closed closed closed"),
        ("cut cut cut tick:9 tick:1", "closed closed ejected ejected half_open"),
        ("cut cut cut tick:10 ok cut cut", "closed closed ejected half_open closed closed closed"),
        ("cut cut cut tick:10 client_error ok", "closed closed ejected half_open half_open closed"),
        ("cut cut cut tick:10 backpressure cut", "closed closed ejected half_open half_open ejected"),
        ("cut cut cut tick:10 cancelled ok", "closed closed ejected half_open half_open closed"),
        # Ejected longer each time in a row, up to the maximum.
        (
            "cut cut cut tick:10 cut tick:19 tick:1",
            "closed closed ejected half_open ejected ejected half_open",
        ),
        (
            "cut cut cut tick:10 cut tick:20 cut tick:40 cut tick:59 tick:1",
            "closed closed ejected half_open ejected half_open ejected half_open ejected ejected half_open",
        ),
        # A success forgives: the next ejection is a short one again.
        (
            "cut cut cut tick:10 cut tick:20 ok cut cut cut tick:10",
            "closed closed ejected half_open ejected half_open closed closed closed ejected half_open",
        ),
        ("cut cut cut fresh cut", "closed closed ejected half_open ejected"),
        ("fresh cut", "closed closed"),
        # Sent for want of another replica.
        ("cut cut cut ok", "closed closed ejected closed"),
        ("cut cut cut cut cut tick:10", "closed closed ejected ejected ejected half_open"),
        # A trial is a trial even when the pool could not spare the replica any more.
        ("cut cut cut tick:10 cut!", "closed closed ejected half_open ejected"),
    ],
)
def test_transitions(script: str, states: str) -> None:
    assert play(Breaker(SETTINGS), script) == states.split()


@pytest.mark.parametrize("outcome", NEUTRAL)
def test_neutral_outcomes_never_eject(outcome: Outcome) -> None:
    breaker = Breaker(SETTINGS)
    assert set(play(breaker, " ".join([outcome] * 50))) == {"closed"}
    assert breaker.failures == 0


def state(breaker: Breaker) -> State:
    """The state now; a call, because type checkers believe that attributes keep what they were found to be."""
    return breaker.state


def half_open() -> Breaker:
    breaker = Breaker(SETTINGS)
    play(breaker, "cut cut cut fresh")
    assert state(breaker) is State.HALF_OPEN
    return breaker


def test_one_trial_at_a_time_and_only_its_end_decides() -> None:
    breaker = half_open()
    trial = breaker.begin()
    assert state(breaker) is State.TRIAL
    other = breaker.begin()
    breaker.record(other, Outcome.CUT, 1.0, lambda: True)
    breaker.record(other, Outcome.CLIENT_ERROR, 1.0, lambda: True)
    assert state(breaker) is State.TRIAL
    breaker.record(trial, Outcome.CUT, 1.0, lambda: True)
    assert state(breaker) is State.EJECTED


def test_an_answered_trial_restores_on_probation() -> None:
    breaker = half_open()
    trial = breaker.begin()
    breaker.answered(trial)
    assert state(breaker) is State.CLOSED
    # Its stream breaks: ejected again, for longer than the first time.
    breaker.record(trial, Outcome.CUT, 100.0, lambda: True)
    assert state(breaker) is State.EJECTED
    assert breaker.until_s == 120.0


def test_an_answered_trial_that_ends_well_is_forgiven() -> None:
    breaker = half_open()
    trial = breaker.begin()
    breaker.answered(trial)
    breaker.record(trial, Outcome.OK, 1.0, lambda: True)
    assert play(breaker, "cut cut cut") == ["closed", "closed", "ejected"]
    assert breaker.ejections == 1


def test_only_the_trial_can_be_answered() -> None:
    breaker = half_open()
    breaker.begin()
    breaker.answered(breaker.begin())
    assert state(breaker) is State.TRIAL


@pytest.mark.parametrize("outcome", list(Outcome))
def test_requests_begun_before_an_ejection_decide_nothing_after_it(outcome: Outcome) -> None:
    breaker = Breaker(SETTINGS)
    early = [breaker.begin() for _ in range(5)]
    play(breaker, "cut cut cut")
    for mark in early:
        breaker.record(mark, outcome, 0.0, lambda: True)
    assert state(breaker) is State.EJECTED
    breaker.offer_trial()
    trial = breaker.begin()
    breaker.record(early[0], outcome, 0.0, lambda: True)
    assert state(breaker) is State.TRIAL
    breaker.record(trial, Outcome.OK, 0.0, lambda: True)
    assert state(breaker) is State.CLOSED


def test_ejections_double_up_to_the_maximum_for_ever() -> None:
    settings = BreakerSettings()
    assert [settings.ejection_s(count) for count in (1, 2, 3, 4, 5, 6, 10_000)] == [
        10,
        20,
        40,
        80,
        120,
        120,
        120,
    ]


@given(st.lists(st.tuples(st.sampled_from(list(Outcome)), st.floats(0, 50), st.booleans()), max_size=60))
def test_a_replica_is_never_stuck(history: list[tuple[Outcome, float, bool]]) -> None:
    """Whatever happened, waiting and one success bring the replica back."""
    breaker = Breaker(SETTINGS)
    now_s = 0.0
    open_marks: list[int] = []
    for outcome, step_s, overlap in history:
        now_s += step_s
        breaker.elapsed(now_s)
        open_marks.append(breaker.begin())
        if not overlap:
            while open_marks:
                breaker.record(open_marks.pop(), outcome, now_s, lambda: True)
        assert breaker.state is not State.EJECTED or breaker.until_s <= now_s + SETTINGS.max_ejection_s
    while open_marks:
        breaker.record(open_marks.pop(), Outcome.CANCELLED, now_s, lambda: True)
    breaker.elapsed(now_s + SETTINGS.max_ejection_s)
    assert breaker.state in (State.CLOSED, State.HALF_OPEN)
    breaker.record(breaker.begin(), Outcome.OK, now_s, lambda: True)
    assert state(breaker) is State.CLOSED
