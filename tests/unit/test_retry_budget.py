"""How many retries are allowed: a share of the requests, and a few per second."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.retry_budget import RetryBudget


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def taken(budget: RetryBudget) -> int:
    number = 0
    while budget.withdraw():
        number += 1
    return number


def test_a_quiet_gateway_has_saved_ten_seconds_worth() -> None:
    clock = Clock()
    budget = RetryBudget(0.2, 3.0, clock)
    assert taken(budget) == 30
    clock.now_s += 2.0
    assert taken(budget) == 6


def test_requests_pay_for_retries() -> None:
    budget = RetryBudget(0.25, 0.0, Clock())
    assert taken(budget) == 0
    for _ in range(40):
        budget.deposit()
    assert budget.available()
    assert taken(budget) == 10
    assert not budget.available()


def test_savings_are_bounded() -> None:
    clock = Clock()
    budget = RetryBudget(0.2, 1.0, clock)
    for _ in range(1_000_000):
        budget.deposit()
    clock.now_s += 1e6
    assert taken(budget) == 210


def test_other_terms_apply_to_what_comes() -> None:
    clock = Clock()
    budget = RetryBudget(0.0, 0.0, clock)
    budget.configure(0.5, 2.0)
    budget.deposit()
    budget.deposit()
    clock.now_s += 1.0
    assert taken(budget) == 3


@given(
    st.floats(0, 1),
    st.floats(0, 20),
    st.lists(st.one_of(st.just("request"), st.just("retry"), st.floats(0, 5)), max_size=200),
)
def test_never_more_than_share_and_rate_allow(share: float, per_s: float, acts: list[str | float]) -> None:
    clock = Clock()
    budget = RetryBudget(share, per_s, clock)
    requests = retries = 0
    for act in acts:
        if act == "request":
            budget.deposit()
            requests += 1
        elif act == "retry":
            looked = budget.available()
            assert budget.withdraw() == looked
            retries += looked
        else:
            assert isinstance(act, float)
            clock.now_s += act
        assert retries <= share * requests + per_s * (clock.now_s + 10.0) + 1e-6
