"""The matrix.

Rates: `python -m loadtests.compare.capacity` finds, for each generated workload, the speed that eight H100 sustain
under least_outstanding (90 % of requests with a TTFT of at most 2 s and a TPOT of at most 100 ms). Each workload runs
at 0.65 of that, and, as `-high`, at 1.0: there a policy without regard to caches is at its limit, and others need not
be. The trace comes as it was recorded and at twice its speed, the ladder at its published rates.
"""

from collections.abc import Mapping, Sequence

from loadtests.compare.scenario import OURS, TRACE, Group, Scenario
from loadtests.replay.options import FleetOptions

PARAMS: Mapping[str, Sequence[str]] = {"chat": ("sessions=2000", "turns=5", "think_s=2")}
"""Parameters other than the catalogue's: with fewer people who think longer the fleet idles at any rate of arrival."""

SUSTAINED_SPEED: Mapping[str, float] = {
    "shared-prefixes": 1.04,
    "chat": 4.0,
    "agent-loops": 0.38,
    "document-questions": 0.58,
    "no-reuse": 1.45,
    "viral-prefix": 1.41,
    "mixed-lengths": 0.96,
    "bursts": 2.65,
}
"""By workload, relative to the rate of the catalogue, seed 1. Chat keeps the SLO at any speed up to 8, because people
wait for their answers; at 4 all of them have come within 42 s."""

USUAL_SHARE, HIGH_SHARE = 0.65, 1.0

_QWEN = FleetOptions(hardware="h100-sxm", model="qwen3-32b", tensor_parallel=2)
_H200 = FleetOptions(preset="h200")
_MIXED = FleetOptions(hardware="h100-sxm,l40s")
_MIXED_SHARE = 0.6
"""Four H100 and four L40S (a fifth of the compute, a quarter of the bandwidth) do about this much of eight H100."""

_BASELINE = "least_outstanding"


def _params(workload: str) -> Sequence[str]:
    return PARAMS.get(workload, ())


def _speed(workload: str, share: float) -> float:
    return round(SUSTAINED_SPEED[workload] * share, 3)


LADDERS = [
    Scenario("ladder-73", Group.LADDER, "b2b-saas", fleet=FleetOptions(preset="b2b-saas")),
    Scenario("ladder-37", Group.LADDER, "b2b-saas-37", fleet=FleetOptions(preset="b2b-saas-37")),
]

TRACES = [
    Scenario(f"trace-{name}-{speed}x", Group.TRACE, TRACE, fleet=fleet, speed=speed)
    for name, fleet in (("8b", FleetOptions()), ("32b", _QWEN), ("h200", _H200))
    for speed in (1, 2)
]

GENERATED = [
    Scenario(f"{workload}{suffix}", Group.WORKLOADS, workload, _params(workload), speed=_speed(workload, share))
    for suffix, share in (("", USUAL_SHARE), ("-high", HIGH_SHARE))
    for workload in SUSTAINED_SPEED
]

MIXED = [
    Scenario("mixed-trace", Group.MIXED, TRACE, fleet=_MIXED, peers_assume="h100-sxm"),
    *(
        Scenario(
            f"mixed-{workload}",
            Group.MIXED,
            workload,
            _params(workload),
            _MIXED,
            _speed(workload, USUAL_SHARE * _MIXED_SHARE),
            peers_assume="h100-sxm",
        )
        for workload in ("chat", "shared-prefixes", "no-reuse", "mixed-lengths")
    ),
]

_FAULTY = [
    ("trace", TRACE, 2.0),
    *((name, name, _speed(name, USUAL_SHARE)) for name in ("shared-prefixes", "agent-loops", "no-reuse")),
]

FAULTS = [
    scenario
    for name, workload, speed in _FAULTY
    for scenario in (
        Scenario(
            f"lost-{name}",
            Group.FAULTS,
            workload,
            _params(workload),
            speed=speed,
            policies=(_BASELINE, OURS),
            kv_events=True,
            kv_events_lost=0.2,
        ),
        Scenario(
            f"restart-{name}",
            Group.FAULTS,
            workload,
            _params(workload),
            speed=speed,
            policies=(_BASELINE, OURS),
            restarts=("3@30",),
        ),
    )
]
"""Metrics are a second old in all scenarios, these included."""

_WRONG_CONSTANTS: Mapping[str, str] = {
    "all-x1.3": "scale=1.3",
    "all-x0.7": "scale=0.7",
    "prefill-x1.3": "prefill_s_per_token=*1.3",
    "prefill-x0.7": "prefill_s_per_token=*0.7",
    "attention-x1.3": "attention_s_per_pair=*1.3",
    "attention-x0.7": "attention_s_per_pair=*0.7",
    "weights-x1.3": "weights_s=*1.3",
    "weights-x0.7": "weights_s=*0.7",
    "kv-x1.3": "kv_s_per_token=*1.3",
    "kv-x0.7": "kv_s_per_token=*0.7",
}

WRONG = [
    Scenario(f"{name}-{what}", Group.WRONG, workload, fleet=fleet, policies=(OURS,))
    for name, workload, preset in (("trace-8b-1x", TRACE, None), ("ladder-73", "b2b-saas", "b2b-saas"))
    for what, fleet in (
        *(
            (what, FleetOptions(preset=preset, predictor_cost=words))
            for what, words in _WRONG_CONSTANTS.items()
            if workload == TRACE or what.startswith(("all", "prefill"))
        ),
        ("unknown", FleetOptions(preset=preset, predictor_unknown=True)),
    )
]

FACTS = [
    Scenario(
        f"infinite-cache-{replicas}",
        Group.FACTS,
        TRACE,
        fleet=FleetOptions(replicas=replicas),
        policies=("random",),
        infinite_cache=True,
        seeds=(1,) if replicas == 1 else tuple(range(1, 6)),
    )
    for replicas in (1, 4, 8, 16)
]

SCENARIOS: Sequence[Scenario] = (*LADDERS, *TRACES, *GENERATED, *MIXED, *FAULTS, *WRONG, *FACTS)
