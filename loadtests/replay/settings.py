"""What a replay is run with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.config import Retries
from gateway.estimator.roofline import StepCost
from gateway.replicas.spec import Role
from gateway.routing.hand_off import NEUTRAL_KV_BYTES_PER_TOKEN, HandOffSettings
from loadtests.engine import EngineLimits


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """One replica: its engine, and what the gateway is told of it.

    Args:
        cost: step times of the engine.
        limits: batch and memory limits of the engine.
        hardware: card in the gateway's configuration; None to let it learn.
        model: model shape in the gateway's configuration; None to let it learn.
        tensor_parallel: cards per replica in the gateway's configuration.
        role: mixed, prefill or decode.
        kv_bytes_per_token: keys and values of one token, for what moves between replicas.
        assumed_cost: constants the predictor starts from instead of those of `hardware` and `model`.
    """

    cost: StepCost
    limits: EngineLimits
    hardware: str | None = None
    model: str | None = None
    tensor_parallel: int = 1
    assumed_cost: StepCost | None = None
    role: Role = Role.MIXED
    kv_bytes_per_token: float = NEUTRAL_KV_BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True)
class Incident:
    """A replica's process ends, or a new one starts.

    Args:
        slot: which replica.
        at_s: when, in simulated seconds.
        starts: a new process starts (killing the old one, if it still lives) instead of the old one ending.
    """

    slot: int
    at_s: float
    starts: bool


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good request keeps; the defaults are those of MLPerf Inference for Llama 3.1 8B, server scenario."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 100.0


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Everything but workload and policy.

    Args:
        replicas: one entry each.
        seed: of the policy.
        speed: sessions arrive this many times faster than the workload says.
        scrape_interval_s: age at which the gateway's view of engine metrics is renewed; 0 for once, at the start.
        event_delay_s: from the end of an engine's step until the gateway, and with it the client, sees its tokens.
        feedback: the cached tokens that engines report correct the prefix map, unless their events do.
        kv_events: the engines' KV events correct the prefix map.
        kv_events_lost: share of them that never arrives.
        incidents: replicas that end and start.
        announce_output: requests state the length of their answer as `max_tokens`.
        health_interval_s: between two health probes of a replica.
        health_fall: refused probes in a row that take a replica down.
        retries: as in the gateway's configuration.
        slos: what sessions ask for, in turn.
        hand_off: how prompts move from prefill to decode replicas; the link is the simulated one as well.
        slo_routing: the gateway is told what they ask for, and serves or refuses what no replica can keep; or is not.
    """

    replicas: Sequence[ReplicaModel]
    seed: int = 0
    speed: float = 1.0
    scrape_interval_s: float = 1.0
    event_delay_s: float = 0.0
    feedback: bool = True
    kv_events: bool = False
    kv_events_lost: float = 0.0
    incidents: Sequence[Incident] = ()
    announce_output: bool = False
    health_interval_s: float = 2.0
    health_fall: int = 2
    retries: Retries = field(default_factory=Retries)
    slos: Sequence[Slo] = (Slo(),)
    slo_routing: Literal["off", "serve", "refuse"] = "off"
    hand_off: HandOffSettings = field(default_factory=HandOffSettings)
