"""Cells: what tells two of them apart, what the cache keeps, and that the same cell gives the same bytes."""

from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from gateway.estimator.roofline import StepCost
from loadtests.compare import unloaded
from loadtests.compare.__main__ import main
from loadtests.compare.cache import Cache, key
from loadtests.compare.capacity import sustained_speed
from loadtests.compare.cell import Cell, run_cell
from loadtests.compare.describe import describe
from loadtests.compare.oracle import Informed, common_blocks
from loadtests.compare.results import Results
from loadtests.compare.run import cells_of, run_all, worth_other_seeds
from loadtests.compare.scenario import OURS, PEERS, TRACE, Group, Scenario
from loadtests.compare.scenarios import SCENARIOS
from loadtests.replay.options import FleetOptions
from loadtests.replay.replay import Replay
from loadtests.workloads.catalog import load_named
from loadtests.workloads.prompt import Part, Prompt
from loadtests.workloads.types import Load, Session, Stage, Turn
from policies.catalog import POLICIES
from policies.types import Candidates, Choice, Request

TINY = Scenario(
    "tiny", Group.WORKLOADS, "no-reuse", ("requests=40",), FleetOptions(replicas=2), policies=("random", OURS)
)


def test_every_policy_is_either_ours_or_a_peer() -> None:
    assert sorted([*PEERS, OURS]) == sorted(POLICIES)


def test_scenarios_have_names_of_their_own() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert len(names) == len(set(names))
    assert {scenario.group for scenario in SCENARIOS} == set(Group)


def test_the_key_depends_on_what_changes_the_result_and_on_nothing_else() -> None:
    cell = Cell(TINY, "random", 1)
    others = [
        Cell(replace(TINY, speed=2.0), "random", 1),
        Cell(replace(TINY, params=("requests=41",)), "random", 1),
        Cell(replace(TINY, fleet=FleetOptions(replicas=3)), "random", 1),
        Cell(replace(TINY, kv_events=True), "random", 1),
        Cell(TINY, "kv_cost", 1),
        Cell(TINY, "kv_cost:temperature=1", 1),
        Cell(TINY, "random", 2),
    ]
    keys = {key(other, "") for other in others}
    assert len(keys) == len(others)
    assert key(cell, "") not in keys
    assert key(cell, "") == key(cell, "other trace")
    assert key(Cell(replace(TINY, policies=()), "random", 1), "") == key(cell, "")
    traced = Cell(replace(TINY, workload=TRACE), "random", 1)
    assert key(traced, "one") != key(traced, "other")


def test_cells_come_seed_by_seed() -> None:
    one_seed = replace(TINY, name="own", policies=("random",), seeds=(7,))
    cells = cells_of([TINY, one_seed], [1, 2])
    assert [(cell.scenario.name, cell.policy, cell.seed) for cell in cells] == [
        ("tiny", "random", 1),
        ("tiny", OURS, 1),
        ("own", "random", 7),
        ("tiny", "random", 2),
        ("tiny", OURS, 2),
    ]
    assert [cell.policy for cell in cells_of([TINY], [1], ["random"])] == ["random"]


def test_peers_that_are_far_behind_are_not_run_with_other_seeds() -> None:
    row = replace(TINY, policies=("random", "lmetric", "min_ttft", OURS))
    means = {"random": 126.0, "lmetric": 100.0, "min_ttft": 125.0, OURS: 900.0}
    results = Results(
        {"scenario": "tiny", "policy": policy, "seed": 1, "figures": {"ttft_ms": {"mean": mean}}}
        for policy, mean in means.items()
    )
    cells = worth_other_seeds(cells_of([row], [1, 2]), results, 1.25)
    assert [cell.policy for cell in cells if cell.seed == 1] == list(means)
    assert [cell.policy for cell in cells if cell.seed == 2] == ["lmetric", "min_ttft", OURS]


@pytest.mark.parametrize("policy", ["random", OURS, "min_ttft"])
def test_a_cell_is_the_same_every_time(policy: str) -> None:
    cell = Cell(TINY, policy, 3)
    assert orjson.dumps(run_cell(cell, None)) == orjson.dumps(run_cell(cell, None))
    assert run_cell(cell, None) != run_cell(Cell(TINY, policy, 4), None)


def test_no_policy_beats_the_bound() -> None:
    bound = run_cell(Cell(TINY, unloaded.NAME, 3), None)["figures"]["ttft_ms"]
    for policy in ("random", OURS):
        ttft_ms = run_cell(Cell(TINY, policy, 3), None)["figures"]["ttft_ms"]
        assert bound["mean"] < ttft_ms["mean"]
        assert bound["p99"] < ttft_ms["p99"]


def test_a_request_alone_computes_what_is_not_cached_in_steps_of_the_budget() -> None:
    cost = StepCost(
        prefill_s_per_token=0.01, attention_s_per_pair=0.0, weights_s=0.6, kv_s_per_token=1.0, overhead_s=0.1
    )
    # 250 tokens in steps of 100, 100 and 50; the last still reads all weights.
    assert unloaded.alone_s(1000, 750, cost, 100) == pytest.approx(1.1 + 1.1 + 0.7)
    assert unloaded.alone_s(1000, 999, cost, 100) == pytest.approx(0.7)


def test_the_bound_computes_a_shared_prefix_once() -> None:
    prefix = Prompt([Part(1, 640)])
    turns = [Turn(prefix.extended(Part(content, 64)), 1, 100 + content) for content in (2, 3)]
    load = Load("l", [Stage("all", [Session(float(n), (turn,)) for n, turn in enumerate(turns)])])
    (engine, *_) = TINY.settings("random", 1).replicas
    cost = replace(engine.cost, prefill_s_per_token=1.0, attention_s_per_pair=0.0, overhead_s=0.0)
    first_s, second_s = unloaded.unloaded_ttfts_s(load, [replace(engine, cost=cost)])
    assert first_s == 704.0
    # Prefixes are compared at a grain, and the bound stays below: all but the last token may be cached.
    assert second_s <= 64.0


def test_a_prompt_that_is_being_computed_counts_as_cached_for_those_behind_it() -> None:
    assert common_blocks([1, 2, 3], [1, 2, 4]) == 2
    assert common_blocks([1, 2, 3], [1, 2, 3, 4]) == 3
    assert common_blocks([1, 2, 3], [9, 2, 3]) == 0
    assert common_blocks([1, 2, 3], [9, 2, 3], 2) == 3
    assert common_blocks([1, 2], [], 0) == 0
    assert common_blocks([1, 2], [1, 9], 2) == 2


class Watched(Informed):
    """Notes what it expects of each request."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.expected_s: list[float] = []

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        choice = super().choose(request, candidates)
        replay = self._replay
        assert replay is not None
        turn = replay.assigning.turn
        hashes = turn.prompt.extended(Part(turn.answer, turn.output_tokens)).names_every(16)
        replica = replay.replicas[choice.slot]
        hit = self._hit(replica.engine, hashes, (turn.prompt.tokens - 1) // 16)
        self.expected_s.append(self._ttft_s(replica, request.now_s, turn.prompt.tokens, hit))
        return choice


@pytest.mark.parametrize("workload", ["no-reuse", "shared-prefixes", "mixed-lengths"])
def test_the_perfect_knowledge_knows_when_the_first_token_comes(workload: str) -> None:
    policy = Watched(1)
    replay = Replay(
        load_named(workload, ("requests=300", "rate_per_s=8"), 1), policy, TINY.settings("perfect_knowledge", 1)
    )
    policy.attach(replay)
    records = replay.run().records
    off = sorted(
        abs(expected_s / (record.first_token_s - record.arrival_s) - 1.0)
        for expected_s, record in zip(policy.expected_s, records, strict=True)
        if record.first_token_s is not None
    )
    # Who comes later and shares the step makes the difference.
    assert off[len(off) // 2] < 0.01
    assert off[int(0.8 * len(off))] < 0.05


def test_the_bound_has_answers_cached_too() -> None:
    opening = Prompt([Part(1, 640)])
    following = opening.extended(Part(9, 640), Part(2, 64))
    session = Session(0.0, (Turn(opening, 640, 9), Turn(following, 1, 10)))
    (engine, *_) = TINY.settings("random", 1).replicas
    cost = replace(engine.cost, prefill_s_per_token=1.0, attention_s_per_pair=0.0, overhead_s=0.0)
    first_s, second_s = unloaded.unloaded_ttfts_s(Load("l", [Stage("all", [session])]), [replace(engine, cost=cost)])
    assert first_s == 640.0
    assert second_s <= 64.0


def test_a_stored_cell_is_not_run_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path, None)
    cells = cells_of([TINY], [1])
    seen: list[Cell] = []
    run_all(cells, cache, None, 1, seen.append)
    assert seen == cells
    content = cache.load(cells[0])
    assert content is not None
    cache.store(cells[0], {**content, "mark": True})
    cache.drop(cells[1])
    assert cache.load(cells[1]) is None
    run_all(cells, cache, None, 1, seen.append)
    assert cache.load(cells[0]) == {**content, "mark": True}
    assert cache.load(cells[1]) is not None
    assert len(seen) == 2 * len(cells)


def test_processes_do_not_change_the_cells(tmp_path: Path) -> None:
    cells = cells_of([TINY], [1])
    for processes in (1, 2):
        run_all(cells, Cache(tmp_path / str(processes), None), None, processes, lambda cell: None)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / n).iterdir()} for n in ("1", "2"))
    assert one == two


def test_peers_have_one_set_of_constants_and_we_have_the_truth() -> None:
    mixed = replace(TINY, fleet=FleetOptions(replicas=2, hardware="h100-sxm,l40s"), peers_assume="h100-sxm")
    assert [engine.hardware for engine in mixed.settings("min_ttft", 1).replicas] == ["h100-sxm", "h100-sxm"]
    ours = mixed.settings(OURS, 1).replicas
    assert [engine.hardware for engine in ours] == ["h100-sxm", "l40s"]
    # The engines themselves are what they are.
    assert [engine.cost for engine in mixed.settings("min_ttft", 1).replicas] == [engine.cost for engine in ours]
    assert mixed.settings(f"{OURS}:prefill_price=2", 1).replicas == ours


def test_a_trace_is_asked_for() -> None:
    with pytest.raises(ValueError, match="trace"):
        run_cell(Cell(replace(TINY, workload=TRACE, params=()), "random", 1), None)


def test_a_scenario_in_words() -> None:
    faulty = replace(TINY, kv_events=True, kv_events_lost=0.2, restarts=("3@30",), speed=1.5)
    text = describe(faulty)
    assert "no-reuse (requests=40) at 1.5 x" in text
    assert "replicas 2" in text
    assert "20 % are lost" in text
    assert "Replica 3 is restarted at 30 s." in text


def test_the_sustained_speed_is_found_by_bisection() -> None:
    assert sustained_speed(lambda speed: 1.0 if speed <= 1.7 else 0.5, 0.5, 8.0) == pytest.approx(1.7, rel=0.05)
    assert sustained_speed(lambda speed: 1.0 if speed <= 0.2 else 0.5, 0.5, 8.0) == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize("words", [("--sets", "no"), ("--scenarios", "no"), ("--policies", "random,no")])
def test_the_command_knows_what_there_is(tmp_path: Path, words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["--cache", str(tmp_path), "--no-run", *words])
    assert result.exit_code == 1
    assert "unknown" in result.output
    assert "'no'; known: " in result.output


def test_the_command_reports_without_running(tmp_path: Path) -> None:
    markdown, report = tmp_path / "out.md", tmp_path / "out.json"
    paths = ["--cache", str(tmp_path / "cells"), "--markdown", str(markdown), "--json", str(report)]
    result = CliRunner().invoke(main, [*paths, "--sets", "ladder", "--no-run"])
    assert result.exit_code == 0, result.output
    assert "python -m loadtests.compare --sets ladder --seeds 1,2,3 --cache DIR" in markdown.read_text(encoding="utf-8")
    assert {verdict["met"] for verdict in orjson.loads(report.read_bytes())["verdicts"]} == {None}
