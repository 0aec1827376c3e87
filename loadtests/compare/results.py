"""Results of cells, and their means over seeds."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from loadtests.compare.scenario import OURS

Metric = Callable[[Mapping[str, Any]], float | None]
"""A figure of a cell; None where the cell has no such figure."""


def metric(path: str) -> Metric:
    """The metric at a dotted path of the cell's object."""
    names = path.split(".")

    def read(cell: Mapping[str, Any]) -> float | None:
        value: Any = cell
        for name in names:
            if value is None:
                return None
            value = value[name]
        return None if value is None else float(value)

    return read


TTFT_MEAN = metric("figures.ttft_ms.mean")
TTFT_P99 = metric("figures.ttft_ms.p99")
TPOT_P99 = metric("figures.tpot_ms.p99")
HIT_RATE = metric("figures.token_hit_rate")
OUTPUT_RATE = metric("figures.output_tokens_per_s")
STAGE_OUTPUT_RATE = metric("figures.stage_means.output_tokens_per_s")
STAGE_TTFT = metric("figures.stage_means.ttft_mean_ms")
LOAD_SKEW = metric("figures.load_skew")
IN_FLIGHT_SKEW = metric("figures.in_flight_skew")
ERROR_FROM_COLD = metric("prediction_from_cold.median_ape")
ERROR_LEARNT = metric("prediction_learnt.median_ape")
BLOCK_HIT_RATE = metric("block_hit_rate")


class Results:
    """Cells by scenario, policy and seed.

    Means are over the seeds that every policy of the scenario has, so that a policy whose other seeds have not been run
    yet is not compared on another load.
    """

    def __init__(self, cells: Iterable[Mapping[str, Any]], bounds: Iterable[str] = ()) -> None:
        """Sort the cells.

        Args:
            cells: as `run_cell` makes them.
            bounds: policies that are no peers: they know what no gateway can.
        """
        self._cells: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
        for cell in cells:
            self._cells[cell["scenario"]][cell["policy"]][cell["seed"]] = cell
        self._bounds = frozenset(bounds)

    def policies(self, scenario: str) -> list[str]:
        """Policies that have been run on a scenario."""
        return list(self._cells[scenario]) if scenario in self._cells else []

    def peers(self, scenario: str) -> list[str]:
        """Those of them that are neither ours nor bounds. Options of a policy make it a bound: nobody ships them."""
        return [
            policy
            for policy in self.policies(scenario)
            if policy != OURS and policy not in self._bounds and ":" not in policy
        ]

    def seeds(self, scenario: str) -> list[int]:
        """Seeds that every peer and ours have been run with."""
        compared = [*self.peers(scenario), OURS] if OURS in self.policies(scenario) else self.peers(scenario)
        sets = [set(self._cells[scenario][policy]) for policy in compared]
        return sorted(set.intersection(*sets)) if sets else []

    def cells(self, scenario: str, policy: str) -> list[Mapping[str, Any]]:
        """Cells of a policy, by seed."""
        by_seed = self._cells[scenario][policy] if policy in self.policies(scenario) else {}
        return [by_seed[seed] for seed in self.seeds(scenario) if seed in by_seed]

    def by_seed(self, scenario: str, policy: str, figure: Metric) -> list[float]:
        """A figure of each cell; empty if one has none."""
        values = [figure(cell) for cell in self.cells(scenario, policy)]
        known = [value for value in values if value is not None]
        return known if len(known) == len(values) else []

    def mean(self, scenario: str, policy: str, figure: Metric) -> float | None:
        """Mean of a figure over the seeds; None if it is not there."""
        values = self.by_seed(scenario, policy, figure)
        return sum(values) / len(values) if values else None

    def best_peer(self, scenario: str, figure: Metric, peers: Iterable[str] | None = None) -> str | None:
        """The peer with the least mean of a figure; None without any.

        Args:
            scenario: where.
            figure: of what; negate it for figures of which more is better.
            peers: only these.
        """
        means = {
            peer: mean
            for peer in (self.peers(scenario) if peers is None else peers)
            if (mean := self.mean(scenario, peer, figure)) is not None
        }
        return min(means, key=means.__getitem__, default=None)
