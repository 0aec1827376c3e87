"""Several workers' loads in one ledger each, and what bursts do to replicas then. Virtual time throughout."""

import contextlib
import heapq
import itertools
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.routers import router_over

from gateway.prompt.blocks import DEFAULT_SCHEDULE, prompt_key
from gateway.prompt.body import RequestBody
from gateway.replicas.breaker import Outcome
from gateway.replicas.load import NO_LOAD, Load, LoadLedger
from gateway.replicas.registry import Fleet
from gateway.replicas.spec import ReplicaSpec
from gateway.sharing import messages
from gateway.sharing.board import Board, open_memory
from gateway.sharing.loads import EXPIRE_S, HEARTBEAT_S, TELL_EVERY_S, LoadShare
from policies.catalog import make_policy

URLS = ("http://a:8000", "http://b:8000", "http://c:8000")


def fleet_of(*urls: str) -> Fleet:
    fleet = Fleet()
    for url in urls:
        fleet.set_up(fleet.add(ReplicaSpec(url, hardware="h100-sxm", model_shape="llama-3.1-8b")), True)
    return fleet


class Worker:
    def __init__(self, number: int, *urls: str, board: Board | None = None) -> None:
        self.fleet = fleet_of(*urls)
        self.ledger = LoadLedger()
        self.share = LoadShare(self.ledger, self.fleet, number, board)

    def columns(self, slot: int) -> Load:
        self.share.look()
        ledger = self.ledger
        return Load(
            ledger.in_flight[slot],
            ledger.decodes[slot],
            ledger.prefill_tokens[slot],
            ledger.prefill_work_s[slot],
            ledger.context_tokens[slot],
            ledger.kv_tokens[slot],
            ledger.kv_own_tokens[slot],
        )


WorkerKind = TypeVar("WorkerKind", bound=Worker)


def tell(one: Worker, other: Worker, now_s: float) -> None:
    entry = one.share.entry(now_s, [1000, 2000])
    if entry is not None:
        other.share.read(entry, now_s)


def test_each_sees_the_sum_whatever_its_slots() -> None:
    one, other = Worker(1, *URLS), Worker(2, *URLS[::-1])
    one.ledger.start(0, 0.0, 1000, 400, 0.25, 50)
    other.ledger.start(2, 0.0, 100, 100, 0.5, 10)
    tell(one, other, 0.0)
    assert other.columns(2) == Load(2, 0, 500.0, 0.75, 0.0, 1160.0, 560.0)
    assert other.columns(0) == NO_LOAD
    assert other.ledger.own(2).in_flight == 1
    assert one.columns(0).in_flight == 1


def test_a_prefill_of_others_is_ahead_less_what_is_done_of_it() -> None:
    one, other = Worker(1, *URLS), Worker(2, *URLS)
    other.ledger.on_start = None  # expects nothing of others
    one.ledger.start(0, 0.0, 1000, 1000, 1.0, 50)
    tell(one, other, 0.75)
    assert other.ledger.prefill_ahead_s(0, 0.75) == pytest.approx(0.25)
    column = [0.0]
    other.ledger.fill_prefill_ahead_s((0,), 0.75, column)
    assert column == [pytest.approx(0.25)]
    other.ledger.start(0, 1.0, 1000, 1000, 0.5, 50)
    assert other.ledger.prefill_ahead_s(0, 1.0) == pytest.approx(0.75)


def test_only_changes_are_told_and_everything_once_a_second() -> None:
    one = Worker(1, *URLS)
    one.ledger.start(0, 0.0, 100, 0, 0.0, 50).first_token(0.0)
    assert one.share.entry(0.0, [7]) is not None
    assert one.share.entry(0.1, [7]) is None
    one.ledger.start(1, 0.2, 100, 0, 0.0, 50).first_token(0.2)
    entry = one.share.entry(0.2, [7])
    assert entry is not None
    assert len(messages.loads_of(entry)[2]) == 1
    entry = one.share.entry(HEARTBEAT_S, [7])
    assert entry is not None
    _, budgets, loads = messages.loads_of(entry)
    assert (budgets, len(loads)) == ((7,), 2)


def test_a_lost_entry_heals_and_a_silent_worker_has_no_load() -> None:
    one, other = Worker(1, *URLS), Worker(2, *URLS)
    ticket = one.ledger.start(0, 0.0, 100, 0, 0.0, 50)
    tell(one, other, 0.0)
    ticket.finish()
    one.share.entry(0.1, [1])  # lost on the way
    assert other.columns(0).in_flight == 1
    tell(one, other, HEARTBEAT_S)
    assert other.columns(0) == NO_LOAD
    one.ledger.start(1, 1.1, 100, 0, 0.0, 50)
    tell(one, other, 1.2)
    other.share.expire(1.2 + EXPIRE_S)
    assert (other.columns(1).in_flight, other.share.workers) == (1, 2)
    other.share.expire(1.3 + EXPIRE_S)
    assert (other.columns(1), other.share.workers) == (NO_LOAD, 1)


def test_a_worker_that_says_farewell_has_no_load() -> None:
    one, other = Worker(1, *URLS), Worker(2, *URLS)
    one.ledger.start(0, 0.0, 100, 0, 0.0, 50)
    tell(one, other, 0.0)
    other.share.read(one.share.farewell(), 0.1)
    assert other.columns(0) == NO_LOAD


# -- workers of one gateway


@contextlib.contextmanager
def on_one_board(workers: int, *urls: str, kind: type[WorkerKind]) -> Iterator[tuple[Board, list[WorkerKind]]]:
    """Workers that see each other, and the board as their supervisor has it."""
    memory = open_memory(workers)
    try:
        team = [kind(number + 1, *urls, board=Board(memory, number)) for number in range(workers)]
        yield Board(memory), team
    finally:
        os.close(memory)


def test_workers_of_one_gateway_see_each_others_load_without_being_told() -> None:
    with on_one_board(3, *URLS, kind=Worker) as (_, (one, other, third)):
        ticket = one.ledger.start(0, 0.0, 1000, 400, 0.25, 50)
        third.ledger.start(0, 0.0, 10, 10, 0.5, 10)
        # Nothing is expected of those who can be seen.
        assert other.columns(0) == Load(2, 0, 410.0, 0.75, 0.0, 1070.0, 470.0)
        assert one.columns(0) == Load(2, 0, 410.0, 0.75, 0.0, 1070.0, 470.0)
        ticket.first_token(0.2)
        assert other.columns(0) == Load(2, 1, 10.0, 0.5, 1025.0, 1070.0, 470.0)
        ticket.finish(0.3)
        assert other.columns(0) == Load(1, 0, 10.0, 0.5, 0.0, 20.0, 20.0)
        assert third.columns(0).in_flight == 1
        assert [worker.share.near_workers for worker in (one, other, third)] == [3, 3, 3]


def test_a_prompt_that_another_replica_computes_is_on_the_board() -> None:
    with on_one_board(2, *URLS, kind=Worker) as (_, (one, other)):
        news: list[int] = []
        one.share.on_news = lambda: news.append(1)
        one.ledger.start(0, 0.0, 1000, 400, 0.25, 50, computed_elsewhere=True)
        assert news
        assert other.columns(0) == Load(1, 0, 0.0, 0.0, 0.0, 1050.0, 450.0)


def test_many_ends_of_one_moment_are_on_the_board_with_the_next_entry() -> None:
    with on_one_board(2, *URLS, kind=Worker) as (_, (one, other)):
        tickets = [one.ledger.start(0, 0.0, 1000, 400, 0.25, 50) for _ in range(100)]
        for ticket in tickets:
            ticket.finish(0.1)
        assert 0 < other.columns(0).in_flight < 100
        one.share.entry(0.1, [0])
        assert other.columns(0) == NO_LOAD


def test_what_is_done_of_a_prompt_is_on_the_board_after_a_while() -> None:
    with on_one_board(2, *URLS, kind=Worker) as (_, (one, other)):
        one.ledger.start(0, 0.0, 1000, 1000, 1.0, 50)
        assert other.columns(0).prefill_work_s == 1.0
        one.share.entry(0.75, [0])
        assert other.columns(0).prefill_work_s == pytest.approx(0.25)


def test_a_worker_that_has_died_has_no_load_also_if_redis_says_so_later() -> None:
    with on_one_board(2, *URLS, kind=Worker) as (supervisor, (one, other)):
        one.ledger.start(0, 0.0, 1000, 400, 0.25, 50)
        late = one.share.entry(0.0, [0])
        assert late is not None
        assert other.columns(0).in_flight == 1
        supervisor.clear(0)
        assert other.columns(0) == NO_LOAD
        assert (other.share.workers, other.share.near_workers) == (1, 1)
        other.share.read(late, 0.01)
        assert other.columns(0) == NO_LOAD
        assert other.share.workers == 1


def test_of_a_worker_on_the_board_what_redis_says_is_not_believed() -> None:
    with on_one_board(2, *URLS, kind=Worker) as (_, (one, other)):
        ticket = one.ledger.start(0, 0.0, 1000, 400, 0.25, 50)
        old = one.share.entry(0.0, [77])
        assert old is not None
        ticket.finish(0.01)
        one.share.entry(0.01, [77])
        other.share.look()
        other.share.read(old, 0.02)
        assert other.columns(0) == NO_LOAD
        assert other.share.budget_bytes(0) == 77
        # It does not expire either: it may have nothing to say.
        other.share.expire(10 * EXPIRE_S)
        assert other.share.workers == 2


def test_workers_of_other_gateways_are_told_all_and_are_heard() -> None:
    far = Worker(9, *URLS)
    with on_one_board(2, *URLS, kind=Worker) as (_, (one, other)):
        assert one.share.entry(0.0, [0]) is not None
        one.ledger.start(0, 0.1, 1000, 400, 0.25, 50)
        other.share.look()
        one.share.look()
        assert one.share.entry(0.1, [0]) is None  # nobody is there who does not see it
        far.ledger.start(1, 0.1, 100, 100, 0.5, 10)
        tell(far, one, 0.2)
        assert one.columns(1).in_flight == 1
        assert other.columns(1) == NO_LOAD  # that is his own load, not the sum
        tell(one, far, 0.3)
        assert far.columns(0).in_flight == 1
        # Of those who are not seen it is expected that they do alike: one of the two others.
        one.ledger.start(2, 0.4, 1000, 400, 0.25, 50)
        assert one.columns(2).prefill_tokens == 800.0


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 1), st.integers(0, 1), st.sampled_from(["start", "first", "finish", "tell"]), st.integers(0, 4)
    ),
    max_size=40,
)


@given(EVENTS)
def test_nothing_is_left_when_all_have_ended_in_any_order(events: list[tuple[int, int, str, int]]) -> None:
    _all_ends([Worker(1, *URLS), Worker(2, *URLS)], events)
    with on_one_board(2, *URLS, kind=Worker) as (_, team):
        _all_ends(team, events)


def _all_ends(workers: list[Worker], events: list[tuple[int, int, str, int]]) -> None:
    tickets: list[list[Any]] = [[], []]
    now_s = 0.0
    for number, slot, event, which in events:
        now_s += 0.013
        if event == "start":
            tickets[number].append(workers[number].ledger.start(slot, now_s, 1000.3, 333.1 * which, 0.07 * which, 77.7))
        elif event == "tell":
            tell(workers[number], workers[1 - number], now_s)
        elif tickets[number]:
            ticket = tickets[number][which % len(tickets[number])]
            if event == "first":
                ticket.first_token(now_s)
            else:
                ticket.finish(now_s)
        for worker in workers:
            for slot in (0, 1):
                assert all(value >= 0 for value in worker.columns(slot))
                assert worker.ledger.prefill_ahead_s(slot, now_s) >= 0
    for ticket in itertools.chain(*tickets):
        ticket.finish(now_s)
    for later_s in (1.0, 2.0):  # what was expected is given up
        for one, other in (workers, workers[::-1]):
            tell(one, other, now_s + later_s)
    for worker in workers:
        assert [worker.columns(slot) for slot in (0, 1)] == [NO_LOAD, NO_LOAD]


# -- bursts


class RoutingWorker(Worker):
    """A worker with a router."""

    def __init__(self, number: int, *urls: str, board: Board | None = None) -> None:
        super().__init__(number, *urls, board=board)
        policy = make_policy("predicted_ttft", number)
        self.router = router_over(self.fleet, policy, DEFAULT_SCHEDULE, ledger=self.ledger)
        self.ledger.on_look = self.share.look_now_and_then


def spread(
    workers: int, replicas: int, rate_per_s: float, duration_s: float, prompt_tokens: int, delay_s: float, seed: int
) -> float:
    """Largest share of the requests in flight on one replica, against an equal share, over a burst.

    Every worker gets its part of the arrivals, and tells its load every so often; others hear it after the delay. Each
    replica computes prompts one after the other at the predicted speed, and answers for a second.
    """
    rng = random.Random(seed)
    urls = [f"http://replica-{number}:8000" for number in range(replicas)]
    all_workers = [RoutingWorker(number + 1, *urls) for number in range(workers)]
    events: list[tuple[float, int, str, Any]] = []
    order = itertools.count()

    def at(when_s: float, what: str, value: Any) -> None:
        heapq.heappush(events, (when_s, next(order), what, value))

    for number in range(int(rate_per_s * duration_s)):
        at(rng.uniform(0.0, duration_s), "arrival", (all_workers[rng.randrange(workers)], number))
    for worker in all_workers:
        at(rng.uniform(0.0, 0.02), "tell", worker)
    free_s = [0.0] * replicas
    in_flight = [0] * replicas
    worst: list[float] = []
    while events:
        now_s, _, what, value = heapq.heappop(events)
        if now_s > duration_s:
            break
        if what == "arrival":
            worker, number = value
            text = b"%08d" % number * (prompt_tokens // 2)
            body = RequestBody(None, True, False, 100, 1, None, prompt_key(text, 1))
            assignment = worker.router.assign(worker.router.query(body, {}), (), now_s)
            slot = assignment.slot
            in_flight[slot] += 1
            prefill_s = worker.router.predictor.own_prefill_s(slot, prompt_tokens, 0)
            free_s[slot] = max(free_s[slot], now_s) + prefill_s
            at(free_s[slot], "first", assignment)
            at(free_s[slot] + 1.0, "end", assignment)
        elif what == "first":
            value.first_token(now_s)
        elif what == "end":
            in_flight[value.slot] -= 1
            value.finish(now_s, Outcome.OK, None, None, keep_prefix=True)
        elif what == "tell":
            entry = value.share.entry(now_s, [0])
            if entry is not None:
                for other in all_workers:
                    if other is not value:
                        at(now_s + delay_s, "hear", (other, entry))
            at(now_s + value.share.tell_every_s, "tell", value)
        else:
            value[0].share.read(value[1], now_s)
        total = sum(in_flight)
        if what == "arrival" and total >= 10 * replicas:
            worst.append(max(in_flight) * replicas / total)
    return sorted(worst)[int(0.99 * len(worst))]


@pytest.mark.parametrize(("workers", "most"), [(2, 2), (3, 1), (5, 1)])
def test_workers_divide_the_replicas_among_them(workers: int, most: int) -> None:
    """Whatever the order and the slots in which they know them."""
    team = [Worker(number, *(URLS if number % 2 else URLS[::-1])) for number in range(1, workers + 1)]
    assert not any(any(worker.ledger.preferred) for worker in team)
    for one in team:
        entry = one.share.entry(0.0, [0])
        assert entry is not None
        for other in team:
            other.share.read(entry, 0.0)

    def owners() -> list[list[int]]:
        result: list[list[int]] = [[] for _ in URLS]
        for number, worker in enumerate(team):
            for slot, mine in enumerate(worker.ledger.preferred):
                if mine:
                    replica = worker.fleet.by_slot[slot]
                    assert replica is not None
                    result[URLS.index(replica.base_url)].append(number)
        return result

    owned = owners()
    assert all(owned)
    taken = Counter(number for numbers in owned for number in numbers)
    assert set(taken) == set(range(workers))
    assert max(taken.values()) == most
    # Who hears of no others has no preference.
    for worker in team:
        worker.share.expire(EXPIRE_S + 1.0)
    assert not any(any(worker.ledger.preferred) for worker in team)


def test_a_burst_of_one_moment_is_spread_by_four_workers_of_one_gateway_as_by_one() -> None:
    urls = [f"http://replica-{number}:8000" for number in range(8)]

    def fullest(team: Sequence[RoutingWorker], requests: int) -> int:
        rng = random.Random(3)
        in_flight = [0] * len(urls)
        for number in range(requests):
            worker = team[rng.randrange(len(team))]
            body = RequestBody(None, True, False, 100, 1, None, prompt_key(b"%08d" % number * 2000, 1))
            in_flight[worker.router.assign(worker.router.query(body, {}), (), 0.0).slot] += 1
        return max(in_flight)

    for requests in (8, 40):
        with on_one_board(4, *urls, kind=RoutingWorker) as (_, team):
            assert fullest(team, requests) == requests // 8
        strangers = [RoutingWorker(number + 1, *urls) for number in range(4)]
        assert fullest(strangers, requests) > requests // 8


def test_others_are_expected_to_do_alike_until_they_tell() -> None:
    one, other = Worker(1, *URLS), Worker(2, *URLS)
    tell(other, one, 0.0)
    assert one.share.workers == 2
    one.ledger.start(0, 0.0, 1000, 400, 0.25, 50)
    assert one.columns(0) == Load(1, 0, 800.0, 0.5, 0.0, 2100.0, 900.0)
    assert one.ledger.own(0) == Load(1, 0, 400.0, 0.25, 0.0, 1050.0, 450.0)
    one.share.entry(0.04, [0])
    assert one.columns(0).prefill_tokens == 800.0
    one.share.entry(0.08, [0])
    assert one.columns(0) == Load(1, 0, 400.0, 0.25, 0.0, 1050.0, 450.0)


def test_what_is_expected_of_others_ends_with_this_workers_own_requests() -> None:
    one, other = Worker(1, *URLS), Worker(2, *URLS)
    tell(other, one, 0.0)
    first, second = one.ledger.start(0, 0.0, 1000, 400, 0.25, 50), one.ledger.start(1, 0.0, 1000, 400, 0.25, 50)
    first.finish(0.01)
    one.share.entry(0.01, [0])
    assert [one.columns(slot).prefill_tokens for slot in (0, 1)] == [400.0, 800.0]
    second.finish(0.02)
    one.share.entry(0.02, [0])
    assert one.columns(0) == one.columns(1) == NO_LOAD


def test_an_expectation_is_given_up_in_time_where_nothing_else_happens() -> None:
    one, other = Worker(1, *URLS), Worker(2, *URLS)
    tell(other, one, 0.0)
    one.share.entry(0.0, [0])
    one.ledger.start(0, 0.0, 1000, 400, 0.25, 50).first_token(0.0)
    assert one.columns(0).kv_tokens == 2100.0
    now_s = 0.0
    one.share.entry(now_s, [0])
    while one.columns(0).kv_tokens > 1050.0:
        now_s += sum(one.share.pace(now_s))
        one.share.entry(now_s, [0])
    assert now_s <= 0.07
    assert sum(one.share.pace(now_s)) > 0.5


def test_others_that_start_little_are_expected_to_start_little() -> None:
    one, other = Worker(1, *URLS), Worker(2, *URLS)
    tell(other, one, 0.0)
    for number in range(90):
        one.ledger.start(1, number * 0.01, 10, 0, 0.0, 1).finish()
    one.share.entry(1.0, [0])
    one.share.entry(1.1, [0])
    one.share.entry(1.2, [0])
    one.ledger.start(0, 1.2, 1000, 1000, 1.0, 50)
    assert one.columns(0).prefill_work_s == pytest.approx(1.1)
    # What this worker sees of all requests is nearly all of them.
    assert one.ledger.workers_share == pytest.approx(1.1)


@pytest.mark.parametrize(("rate_per_s", "duration_s"), [(2000, 0.25), (400, 2.0), (100, 3.0)])
def test_a_burst_over_four_workers_is_spread_nearly_as_by_one(rate_per_s: float, duration_s: float) -> None:
    def average(workers: int) -> float:
        return fmean(spread(workers, 8, rate_per_s, duration_s, 4000, 0.03, seed) for seed in range(3))

    assert average(1) <= 1.1
    assert average(4) <= 1.25


def test_news_after_a_pause_is_told_at_once_and_steady_news_at_the_usual_pace() -> None:
    one = Worker(1, *URLS)
    assert one.share.entry(0.0, [0]) is not None
    waits = []
    for _ in range(16):
        pause_s, patience_s = one.share.pace(0.0)
        waits.append(pause_s / TELL_EVERY_S)
        assert pause_s + patience_s == pytest.approx(max(HEARTBEAT_S, pause_s))
    # What has been saved up may be told at once; then one entry after the other.
    assert waits == pytest.approx([0.0] * 12 + [1.0, 2.0, 3.0, 4.0])
    assert one.share.pace(1.0)[0] == 0.0
    now_s = 1.0
    for _ in range(50):
        pause_s, _ = one.share.pace(now_s)
        now_s += pause_s
    assert now_s == pytest.approx(1.0 + 39 * TELL_EVERY_S)


def test_progress_is_told_while_there_is_any() -> None:
    one = Worker(1, *URLS)
    ticket = one.ledger.start(0, 0.0, 1000, 400, 0.25, 50)
    one.share.entry(0.0, [0])
    assert one.share.pace(0.0) == (0.0, 2 * TELL_EVERY_S)
    ticket.first_token(0.05)
    one.share.entry(0.05, [0])
    assert one.share.pace(0.05)[1] == pytest.approx(HEARTBEAT_S - 0.05)


def test_starts_first_tokens_and_ends_are_news() -> None:
    one = Worker(1, *URLS)
    news: list[int] = []
    one.share.on_news = lambda: news.append(len(news))
    ticket = one.ledger.start(0, 0.0, 1000, 400, 0.25, 50)
    assert len(news) == 1
    ticket.first_token(0.1)
    assert len(news) == 2
    ticket.finish(0.2)
    ticket.finish(0.3)
    assert len(news) == 3
