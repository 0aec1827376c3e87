"""One row of the matrix: a workload, a fleet, and what goes wrong."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from loadtests.compare import oracle, unloaded
from loadtests.replay.options import FleetOptions, fleet, incidents
from loadtests.replay.settings import ReplaySettings
from policies.catalog import POLICIES

OURS = "predicted_ttft"
PEERS: Sequence[str] = tuple(name for name in POLICIES if name != OURS)
DEFAULT_FLEET = FleetOptions()
TRACE = "trace"
"""Workload of a scenario that replays the trace file of the command line."""


class Group(StrEnum):
    """Scenarios that are run and judged together."""

    LADDER = "ladder"
    TRACE = "trace"
    WORKLOADS = "workloads"
    MIXED = "mixed"
    FAULTS = "faults"
    WRONG = "wrong"
    FACTS = "facts"


@dataclass(frozen=True, slots=True)
class Scenario:
    """What every policy is run on.

    Args:
        name: of files and tables.
        group: set it belongs to.
        workload: name in the catalogue, or `TRACE`.
        params: `name=value` words that change the workload.
        fleet: the replicas.
        speed: arrivals come this many times faster than the workload says.
        policies: those that are run, and bounds.
        peers_assume: card that the gateway is told for all replicas unless the policy is ours: peers have one set of
            constants.
        scrape_interval_s: age at which metrics are renewed.
        kv_events: engines' KV events correct the prefix map.
        kv_events_lost: share of them that never arrives.
        restarts: `slot@seconds` words.
        infinite_cache: caches that never evict, in the trace's blocks of 512 tokens, and so much time between requests
            that each finds what all before it have left.
        seeds: other seeds than those of the command line.
    """

    name: str
    group: Group
    workload: str
    params: Sequence[str] = ()
    fleet: FleetOptions = DEFAULT_FLEET
    speed: float = 1.0
    policies: Sequence[str] = (*PEERS, OURS, unloaded.NAME, oracle.INFORMED)
    peers_assume: str | None = None
    scrape_interval_s: float = 1.0
    kv_events: bool = False
    kv_events_lost: float = 0.0
    restarts: Sequence[str] = ()
    infinite_cache: bool = False
    seeds: Sequence[int] | None = None

    def settings(self, policy: str, seed: int) -> ReplaySettings:
        """How a policy is replayed.

        Args:
            policy: name, with options or without.
            seed: of the policy, and of the events that get lost.
        """
        engines = fleet(self.fleet)
        if self.peers_assume is not None and policy.partition(":")[0] != OURS:
            engines = [replace(engine, hardware=self.peers_assume, assumed_cost=None) for engine in engines]
        if self.infinite_cache:
            limits = replace(engines[0].limits, kv_capacity_tokens=1 << 40, block_size_tokens=512)
            engines = [replace(engine, limits=limits) for engine in engines]
        return ReplaySettings(
            engines,
            seed=seed,
            speed=self.speed,
            scrape_interval_s=0.0 if self.infinite_cache else self.scrape_interval_s,
            kv_events=self.kv_events,
            kv_events_lost=self.kv_events_lost,
            incidents=incidents((), self.restarts, len(engines)),
        )
