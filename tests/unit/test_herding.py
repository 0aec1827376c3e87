"""Several gateways that see the same do not all choose the same."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routers import h100s, router_over

from gateway.app import seed_of
from gateway.config import Routing
from gateway.prompt.blocks import BlockSchedule, PromptKey
from gateway.prompt.body import RequestBody
from gateway.replicas.load import Load
from gateway.routing.router import Router
from policies.catalog import make_policy

SCHEDULE = BlockSchedule()
BUSY = Load(8, 8, 0.0, 0.0, 30_000.0, 36_000.0, 36_000.0)


def gateway(replicas: int, seed: int, loads: dict[int, Load]) -> Router:
    """One gateway that has been told the load of others, a moment ago."""
    router = router_over(h100s(replicas), make_policy("predicted_ttft", seed), SCHEDULE, seed=seed)
    for slot, load in loads.items():
        router.ledger.set_others(slot, load)
    return router


def burst(routers: list[Router], requests: int, random: Random) -> Counter[int]:
    """Let each gateway choose for so many requests before it hears of the others again."""
    chosen: Counter[int] = Counter()
    for _ in range(requests):
        for router in routers:
            hashes = [random.getrandbits(60) for _ in range(30)]
            key = PromptKey(hashes, SCHEDULE.covered_bytes(30), None, 0, hashes[0])
            body = RequestBody(model="m", stream=True, include_usage=False, max_tokens=None, n=1, user=None, prompt=key)
            chosen[router.assign(router.query(body, {}), (), 1.0).slot] += 1
    return chosen


def skew(chosen: Counter[int], replicas: int) -> float:
    """Most over mean requests per replica."""
    return max(chosen.values()) * replicas / chosen.total()


@pytest.mark.parametrize(
    ("replicas", "requests", "most"),
    [
        (8, 1, 2.0),  # 64 requests on 8 replicas: thrown at random, the fullest gets 1.7 times the mean
        (8, 4, 1.5),
        (200, 10, 4.0),  # as a shortlist; 640 on 200 at random: 2.8 times the mean of 3.2
    ],
)
@pytest.mark.parametrize("busy", [False, True])
def test_a_burst_seen_by_all_at_once_is_spread(replicas: int, requests: int, most: float, busy: bool) -> None:
    loads = dict.fromkeys(range(replicas), BUSY) if busy else {}
    routers = [gateway(replicas, seed, loads) for seed in range(64)]
    chosen = burst(routers, requests, Random(1))
    assert skew(chosen, replicas) <= most


def test_gateways_that_draw_the_same_would_herd() -> None:
    """What the seeds are for: the same test with one seed for all."""
    assert skew(burst([gateway(8, 0, {}) for _ in range(64)], 1, Random(1)), 8) == 8.0
    assert skew(burst([gateway(200, 0, {}) for _ in range(16)], 1, Random(1)), 200) == 200.0


def test_without_a_configured_seed_every_process_has_its_own() -> None:
    assert len({seed_of(Routing()) for _ in range(10)}) > 1
    assert seed_of(Routing(seed=7)) == 7


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8), st.integers(0, 1 << 20))
def test_a_hairs_breadth_is_no_reason_to_go_all_to_one(differences: list[float], seed: int) -> None:
    # Up to 300 KV tokens of 36,000 more: less than 1 % of the cost.
    loads = {
        slot: BUSY._replace(kv_tokens=BUSY.kv_tokens + 300.0 * difference)
        for slot, difference in enumerate(differences)
    }
    chosen = burst([gateway(8, seed + number, loads) for number in range(32)], 4, Random(seed))
    assert skew(chosen, 8) <= 2.0


def test_one_that_is_ahead_gets_no_more_from_each_gateway_than_evens_it_out() -> None:
    loads = dict.fromkeys(range(1, 8), BUSY)
    chosen = burst([gateway(8, seed, loads) for seed in range(4)], 16, Random(1))
    # Each gateway knows what it has sent itself: with four, the idle one gets up to four times its share of a burst.
    assert chosen[0] <= 4 * 8
    assert min(chosen[slot] for slot in range(1, 8)) >= 2
