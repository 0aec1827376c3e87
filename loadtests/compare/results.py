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
            value = value.get(name)
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
    """Cells by scenario, policy and seed."""

    def __init__(self, cells: Iterable[Mapping[str, Any]], bounds: Iterable[str] = ()) -> None:
        """Sort the cells.

        Args:
            cells: as `run_cell` makes them.
            bounds: policies that are no peers: they know what no gateway can.
        """
        self._cells: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
        for cell in cells:
            policies = self._cells.setdefault(cell["scenario"], defaultdict(dict))
            policies[cell["policy"]][cell["seed"]] = cell
        self._bounds = frozenset(bounds)

    def policies(self, scenario: str) -> list[str]:
        """Policies that have been run on a scenario."""
        return list(self._cells.get(scenario, ()))

    def peers(self, scenario: str) -> list[str]:
        """Those of them that are neither ours nor bounds, and as they are shipped: without options."""
        return [
            policy
            for policy in self.policies(scenario)
            if policy != OURS and policy not in self._bounds and ":" not in policy
        ]

    def by_seed(self, scenario: str, policy: str, figure: Metric) -> dict[int, float]:
        """A figure of each cell of a policy that has it, by seed."""
        cells = self._cells.get(scenario, {}).get(policy, {})
        return {seed: value for seed in sorted(cells) if (value := figure(cells[seed])) is not None}

    def mean(self, scenario: str, policy: str, figure: Metric) -> float | None:
        """Mean of a figure over the seeds; None if there is none."""
        values = self.by_seed(scenario, policy, figure).values()
        return sum(values) / len(values) if values else None

    def ratios(self, scenario: str, figure: Metric, peer: str) -> tuple[float, list[float]] | None:
        """Ours over a peer's, on the seeds that both were run with: loads of other seeds are other loads.

        Args:
            scenario: where.
            figure: of what.
            peer: the policy below the line.

        Returns:
            The ratio of the means over the seeds, and the ratio of each seed; None without a seed in common, or if the
            peer's figure is zero.
        """
        ours, theirs = self.by_seed(scenario, OURS, figure), self.by_seed(scenario, peer, figure)
        seeds = [seed for seed in ours if seed in theirs]
        if not seeds or min(theirs[seed] for seed in seeds) <= 0.0:
            return None
        ratio = sum(ours[seed] for seed in seeds) / sum(theirs[seed] for seed in seeds)
        return ratio, [ours[seed] / theirs[seed] for seed in seeds]
