"""The matrix: which cells there are, and running those that are not in the cache."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from loadtests.compare.cache import Cache, source_digest
from loadtests.compare.cell import Cell, run_cell
from loadtests.compare.oracle import BOUNDS
from loadtests.compare.results import TTFT_MEAN, Results
from loadtests.compare.scenario import Scenario


def cells_of(scenarios: Sequence[Scenario], seeds: Sequence[int], policies: Sequence[str] | None = None) -> list[Cell]:
    """The cells of scenarios, first seeds first.

    Args:
        scenarios: rows.
        seeds: for scenarios without their own.
        policies: only these of the scenario's, and those with options; all of the scenario's if None.
    """
    cells: dict[Cell, None] = {}
    most = max((len(scenario.seeds or seeds) for scenario in scenarios), default=0)
    for turn in range(most):
        for scenario in scenarios:
            own = scenario.seeds or seeds
            if turn < len(own):
                for policy in _chosen(scenario, policies):
                    cells[Cell(scenario, policy, own[turn])] = None
    return list(cells)


def worth_other_seeds(cells: Sequence[Cell], results: Results, within: float) -> list[Cell]:
    """Cells but those of peers that the first seed has shown to be far behind.

    Args:
        cells: of all seeds, in the order of `cells_of`.
        results: those of the first seeds.
        within: peers stay whose mean TTFT is at most this many times the least one's.
    """
    first: dict[Scenario, int] = {}
    for cell in cells:
        first.setdefault(cell.scenario, cell.seed)
    kept = []
    for cell in cells:
        name = cell.scenario.name
        peers = results.peers(name)
        if cell.seed != first[cell.scenario] and cell.policy in peers:
            means = {peer: results.by_seed(name, peer, TTFT_MEAN).get(first[cell.scenario]) for peer in peers}
            known = [mean for mean in means.values() if mean is not None]
            own = means[cell.policy]
            if own is not None and own > within * min(known):
                continue
        kept.append(cell)
    return kept


def _chosen(scenario: Scenario, policies: Sequence[str] | None) -> list[str]:
    if policies is None:
        return list(scenario.policies)
    return [policy for policy in policies if policy in scenario.policies or ":" in policy or policy in BOUNDS]


def run_all(
    cells: Sequence[Cell], cache: Cache, trace: Path | None, processes: int, on_cell: Callable[[Cell], None]
) -> None:
    """Run the cells that the cache does not have.

    Args:
        cells: which, in this order.
        cache: where results are looked for and put.
        trace: the trace file.
        processes: how many cells run at a time.
        on_cell: called after each cell.
    """
    source = source_digest()
    todo = []
    for cell in cells:
        if cache.load(cell) is None:
            todo.append(cell)
        else:
            on_cell(cell)
    for cell, result in _results(todo, trace, processes):
        cache.store(cell, {"source": source, **result})
        on_cell(cell)


def _results(cells: Sequence[Cell], trace: Path | None, processes: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    if processes == 1:
        for cell in cells:
            yield cell, run_cell(cell, trace)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        futures = {pool.submit(run_cell, cell, trace): cell for cell in cells}
        for future in as_completed(futures):
            yield futures[future], future.result()
