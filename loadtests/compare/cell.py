"""One cell of the matrix: a policy on a scenario under a seed."""

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from loadtests.bench_summary import TtftPrediction
from loadtests.compare import unloaded
from loadtests.compare.oracle import make_any_policy
from loadtests.compare.scenario import TRACE, Scenario
from loadtests.replay.figures import figures
from loadtests.replay.record import RequestRecord
from loadtests.replay.replay import Replay, ReplayResult
from loadtests.workloads.catalog import load_named
from loadtests.workloads.types import Load

LEARNT_AFTER = 200
"""Requests after which wrong constants must have been corrected."""

_SERIAL_GAP_S = 1e3


@dataclass(frozen=True, slots=True)
class Cell:
    """What is run once.

    Args:
        scenario: workload, fleet and incidents.
        policy: name, with options as `name:option=value`.
        seed: of workload and policy.
    """

    scenario: Scenario
    policy: str
    seed: int


def run_cell(cell: Cell, trace: Path | None) -> dict[str, Any]:
    """Replay a cell.

    Args:
        cell: what.
        trace: the trace file.

    Returns:
        What goes into the cache; the same cell gives the same object.

    Raises:
        ValueError: the scenario needs a trace and there is none, or a name is unknown.
        OSError: the trace cannot be read.
    """
    scenario = cell.scenario
    if scenario.workload == TRACE and trace is None:
        raise ValueError(f"scenario {scenario.name} needs a trace file")
    name = str(trace) if scenario.workload == TRACE else scenario.workload
    load = _load(name, tuple(scenario.params), 0 if scenario.workload == TRACE else cell.seed, scenario.infinite_cache)
    settings = scenario.settings(cell.policy, cell.seed)
    asked = {"scenario": scenario.name, "policy": cell.policy, "seed": cell.seed}
    if cell.policy == unloaded.NAME:
        return {**asked, "figures": unloaded.unloaded_figures(load, list(settings.replicas))}
    policy = make_any_policy(cell.policy, cell.seed)
    replay = Replay(load, policy, settings, label=cell.policy)
    attach = getattr(policy, "attach", None)
    if attach is not None:
        attach(replay)
    result = replay.run()
    return {**asked, "figures": figures(result).as_json(), **_extras(result, scenario)}


@lru_cache(maxsize=2)
def _load(name: str, params: tuple[str, ...], seed: int, serial: bool) -> Load:
    load = load_named(name, params, seed)
    if not serial:
        return load
    (stage,) = load.stages
    sessions = [replace(session, arrival_s=_SERIAL_GAP_S * n) for n, session in enumerate(stage.sessions)]
    return Load(load.name, [replace(stage, sessions=sessions)])


def _extras(result: ReplayResult, scenario: Scenario) -> dict[str, Any]:
    """Figures that only the comparison asks for; predictions count from the first request, warm-up included."""
    extras: dict[str, Any] = {
        "prediction_from_cold": _prediction(result.records),
        "prediction_learnt": _prediction(result.records[LEARNT_AFTER:]),
    }
    if scenario.infinite_cache:
        block = result.settings.replicas[0].limits.block_size_tokens
        blocks = sum(-(-record.turn.prompt.tokens // block) for record in result.records)
        extras["block_hit_rate"] = sum(record.cached_tokens // block for record in result.records) / blocks
    return extras


def _prediction(records: list[RequestRecord]) -> dict[str, Any] | None:
    prediction = TtftPrediction.of(
        [
            (1000.0 * record.predicted_ttft_s, 1000.0 * (record.first_token_s - record.arrival_s))
            for record in records
            if record.error is None
            and record.attempts == 1
            and record.predicted_ttft_s is not None
            and record.first_token_s is not None
            and record.first_token_s > record.arrival_s
        ]
    )
    return None if prediction is None else asdict(prediction)
