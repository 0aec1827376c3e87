"""What the router gives to policies, and what it tells them about replicas that are gone."""

from dataclasses import replace

from support.routers import router_over

from gateway.prompt.blocks import BlockSchedule, prompt_key
from gateway.prompt.body import RequestBody
from gateway.replicas.metrics_page import ScrapedState
from gateway.replicas.registry import Fleet, Replica
from gateway.replicas.spec import ReplicaSpec
from gateway.routing.assignment import Assignment
from gateway.routing.columns import ENGINE_REFRESH_S
from gateway.routing.router import Router
from policies.catalog import POLICIES, make_policy
from policies.types import Candidates, Choice, Column, Policy, Request


class Recording:
    """Takes the first candidate and keeps what it saw."""

    name = "recording"

    def __init__(self, *reads: Column) -> None:
        self.reads = frozenset(reads)
        self.requests: list[Request] = []
        self.columns: list[dict[str, list[float]]] = []
        self.names: list[str] = []
        self.forgotten: list[int] = []

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        self.requests.append(request)
        self.columns.append({column.value: list(getattr(candidates, column.value)) for column in Column})
        self.names = list(candidates.names)
        return Choice(candidates.slots[0], "recorded")

    def forget(self, slot: int) -> None:
        self.forgotten.append(slot)


def fleet_of(count: int) -> tuple[Fleet, list[Replica]]:
    fleet = Fleet()
    replicas = [fleet.add(spec(f"r{number}")) for number in range(count)]
    for replica in replicas:
        fleet.set_up(replica, True)
    return fleet, replicas


def spec(name: str) -> ReplicaSpec:
    return ReplicaSpec(url=f"http://{name}", name=name, models=("m",))


SCHEDULE = BlockSchedule()


def router_of(fleet: Fleet, policy: Policy) -> Router:
    return router_over(fleet, policy, SCHEDULE)


def body(text: bytes) -> RequestBody:
    key = prompt_key(text, 7, schedule=SCHEDULE)
    return RequestBody(model="m", stream=True, include_usage=False, max_tokens=None, n=1, user=None, prompt=key)


def test_a_policy_sees_the_prompts_blocks_and_the_time() -> None:
    fleet, _ = fleet_of(2)
    policy = Recording()
    router = router_of(fleet, policy)
    request = body(b"x" * 1000)
    router.assign(router.query(request, {}), (), 12.5)
    seen = policy.requests[0]
    assert request.prompt is not None
    assert seen.block_hashes is request.prompt.hashes
    assert [seen.block_offsets[end] for end in range(4)] == [0, 256, 512, 768]
    assert seen.canonical_bytes == 1000
    assert seen.now_s == 12.5
    assert policy.names == ["r0", "r1"]
    router.assign(router.query(None, {}), (), 13.0)
    assert (policy.requests[1].block_hashes, policy.requests[1].canonical_bytes) == ((), 0)


def test_scraped_columns_are_copied_when_they_are_read() -> None:
    fleet, (first, second) = fleet_of(2)
    policy = Recording(Column.ENGINE_WAITING)
    router = router_of(fleet, policy)
    fleet.set_scraped(first, ScrapedState(running=3, waiting=5, kv_usage=0.25))
    now_s = 100.0

    def seen() -> tuple[list[float], list[float], list[float]]:
        router.assign(router.query(None, {}), (), now_s)
        last = policy.columns[-1]
        return last["engine_waiting"], last["engine_running"], last["engine_kv_usage"]

    # What the second has not said is zero.
    assert seen() == ([5, 0], [3, 0], [0.25, 0.0])
    fleet.set_scraped(second, ScrapedState(running=1, waiting=2, kv_usage=0.5))
    assert seen()[0] == [5, 0]
    now_s += 1.01 * ENGINE_REFRESH_S
    assert seen() == ([5, 2], [3, 1], [0.25, 0.5])
    # Measurements too old are dropped by the scraper, and then they are zero here too.
    fleet.set_scraped(first, first.kv.aged())
    now_s += 1.01 * ENGINE_REFRESH_S
    assert seen() == ([0, 2], [0, 1], [0.0, 0.5])


def test_scraped_columns_are_left_alone_when_nobody_reads_them() -> None:
    fleet, (first, _) = fleet_of(2)
    policy = Recording(Column.IN_FLIGHT)
    router = router_of(fleet, policy)
    fleet.set_scraped(first, ScrapedState(running=3, waiting=5, kv_usage=0.25))
    router.assign(router.query(None, {}), (), 0.0)
    assert policy.columns[0]["engine_waiting"] == [0, 0]
    # The next policy needs them at once.
    reading = Recording(Column.ENGINE_KV_USAGE)
    router.use(reading)
    router.assign(router.query(None, {}), (), 0.0)
    assert reading.columns[0]["engine_kv_usage"] == [0.25, 0.0]


def test_a_slot_given_to_another_replica_has_its_name_and_no_measurements() -> None:
    fleet, (first, _) = fleet_of(2)
    policy = Recording(Column.ENGINE_WAITING)
    router = router_of(fleet, policy)
    fleet.set_scraped(first, ScrapedState(waiting=5))
    router.assign(router.query(None, {}), (), 0.0)
    fleet.remove("r0")
    fleet.set_up(fleet.add(spec("other")), True)
    router.assign(router.query(None, {}), (), 0.001)
    assert policy.names == ["other", "r1"]
    assert policy.columns[-1]["engine_waiting"] == [0, 0]


def test_policies_hear_of_removals_and_restarts_even_while_another_is_in_force() -> None:
    fleet, (_, second, third) = fleet_of(3)
    one, two = Recording(), Recording()
    router = router_of(fleet, one)
    fleet.restarted(second)
    router.use(two)
    fleet.remove(third.name)
    assert one.forgotten == [1, 2]
    assert two.forgotten == [2]


def test_policies_that_remember_nothing_need_no_hook() -> None:
    fleet, (first, second) = fleet_of(2)
    router = router_of(fleet, make_policy("least_outstanding"))
    fleet.restarted(first)
    fleet.remove(second.name)
    assert router.assign(router.query(None, {}), (), 0.0).slot == 0


def test_a_restarted_replica_loses_its_prefixes_with_its_cache() -> None:
    fleet, (first, second) = fleet_of(2)
    router = router_of(fleet, make_policy("cache_aware"))
    query = router.query(body(b"x" * 2000), {})
    assert router.assign(query, (), 0.0).slot == 0
    assert router.assign(query, (), 0.1).slot == 0  # the owner, though busier
    fleet.restarted(first)
    assert router.assign(query, (), 0.2).slot == second.slot


def test_a_first_token_that_later_requests_may_have_delayed_is_not_learned_from() -> None:
    fleet, _ = fleet_of(1)
    router = router_of(fleet, Recording())
    calibration = next(iter(router.predictor.classes.values()))

    def ask(text: bytes, now_s: float) -> Assignment:
        return router.assign(router.query(body(text * 20_000), {}), (), now_s)

    first, second = ask(b"x", 0.0), ask(b"y", 0.001)
    first.first_token(0.5)
    assert calibration.samples == 0
    assert calibration.errors.count == 1
    second.first_token(0.6)
    assert calibration.samples == 1


def test_every_policy_routes_real_queries() -> None:
    fleet, _ = fleet_of(4)
    router = router_of(fleet, make_policy("random"))
    for name in POLICIES:
        router.use(make_policy(name, seed=1))
        for number in range(20):
            assignment = router.assign(router.query(body(b"shared " * 100 + bytes([number]) * 500), {}), (), number)
            assert assignment.policy == name
            assert assignment.slot in range(4)


def test_replicas_that_say_so_have_their_own_step() -> None:
    fleet, (first, _) = fleet_of(2)
    router = router_of(fleet, make_policy("predicted_ttft"))
    fleet.reconfigure(first, replace(first.spec, max_num_batched_tokens=2048))
    assert [router.predictor.budget(slot) for slot in (0, 1)] == [2048, 8192]
