"""Replays with prefill replicas: worked examples, and what must hold whatever happens."""

from random import Random

import pytest

from gateway.estimator.roofline import StepCost
from gateway.replicas.spec import Role
from gateway.routing.hand_off import HandOffSettings
from loadtests.engine import EngineLimits
from loadtests.replay.figures import figures
from loadtests.replay.options import FleetOptions, fleet
from loadtests.replay.replay import Replay, ReplayResult
from loadtests.replay.settings import Incident, ReplaySettings, ReplicaModel
from loadtests.workloads.prompt import Part, Prompt
from loadtests.workloads.types import Load, Session, Stage, Turn
from policies.catalog import make_policy

COST = StepCost(
    prefill_s_per_token=3e-5, attention_s_per_pair=2e-10, weights_s=0.006, kv_s_per_token=5e-8, overhead_s=0.001
)
LIMITS = EngineLimits(kv_capacity_tokens=200_000, max_batched_tokens=8192)
RATE = 1e9


def run(roles: str, load: Load, *incidents: Incident, policy: str = "always", delay_s: float = 0.0) -> ReplayResult:
    names = {"p": Role.PREFILL, "d": Role.DECODE}
    models = [ReplicaModel(COST, LIMITS, "h100-sxm", "llama-3.1-8b", role=names[letter]) for letter in roles]
    hand_off = HandOffSettings(policy=policy, link_bytes_per_s=RATE, link_latency_s=0.004)  # type: ignore[arg-type]
    settings = ReplaySettings(models, hand_off=hand_off, incidents=incidents, event_delay_s=delay_s)
    return Replay(load, make_policy("predicted_ttft", 0), settings).run()


def load_of(*requests: tuple[float, int, int]) -> Load:
    sessions = [
        Session(at_s, (Turn(Prompt([Part(number, tokens)]), output, 1000 + number),))
        for number, (at_s, tokens, output) in enumerate(requests, start=1)
    ]
    return Load("test", (Stage("all", sessions),))


def test_a_prompt_alone_takes_prefill_transfer_and_a_step() -> None:
    result = run("pd", load_of((0.0, 4096, 10)))
    (record,) = result.records
    prefill_s = COST.step_s(4096, 4096 * 4096 / 2, 0)
    transfer_s = 0.004 + 4096 * 131_072 / RATE
    # The last token of the prompt, which attends to the 4,095 before it.
    step_s = COST.step_s(1, 4095.5, 0)
    assert record.first_token_s == pytest.approx(prefill_s + transfer_s + step_s)
    assert record.disaggregated
    assert [replica.engine.computed_prompt_tokens for replica in result.replicas] == [4096, 1]
    assert figures(result).disaggregated == 1


def test_transfers_of_one_replica_share_its_link() -> None:
    result = run("pd", load_of((0.0, 2048, 5), (0.0, 2048, 5)))
    first, second = (record.first_token_s or 0.0 for record in result.records)
    # Both prompts are computed in one step; then one waits for the other's bytes.
    assert second - first > 0.9 * 2048 * 131_072 / RATE


def test_a_running_answer_is_not_held_up_by_a_prompt_elsewhere() -> None:
    load = load_of((0.0, 100, 400), (1.0, 16_000, 5))
    alone = run("pd", load, policy="never")
    apart = run("pd", load)
    longest = [max(gap for gap, _ in result.gaps.weighted()) for result in (alone, apart)]
    assert longest[0] > 0.2
    assert longest[1] < 0.02


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_every_request_ends_and_nothing_is_held(seed: int, delay_s: float) -> None:
    rng = Random(seed)
    requests = []
    now_s = 0.0
    for _ in range(60):
        now_s += rng.expovariate(8.0)
        requests.append((now_s, rng.choice((50, 500, 9000, 20_000)), rng.randrange(1, 60)))
    incidents = (Incident(0, 2.0, False), Incident(0, 4.0, True), Incident(2, 3.0, False), Incident(2, 5.0, True))
    result = run("ppddd", load_of(*requests), *incidents, policy="always", delay_s=delay_s)
    assert len(result.records) == 60
    assert all(record.ended_s is not None for record in result.records)
    assert sum(record.error is None for record in result.records) > 40
    for replica in result.replicas:
        assert replica.engine.held == 0
        assert replica.engine.pool.used_blocks == 0
        assert replica.engine.running == replica.engine.waiting == 0


def test_the_first_replicas_of_a_fleet_prefill() -> None:
    roles = [replica.role for replica in fleet(FleetOptions(replicas=4, prefill=1))]
    assert roles == [Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE]
    assert {replica.role for replica in fleet(FleetOptions(replicas=2))} == {Role.MIXED}
    with pytest.raises(ValueError, match="leave none"):
        fleet(FleetOptions(replicas=2, prefill=2))
