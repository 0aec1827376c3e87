"""`python -m loadtests.compare`: run the matrix, print the tables and the verdicts."""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from loadtests.compare import unloaded
from loadtests.compare.cache import Cache
from loadtests.compare.cell import Cell
from loadtests.compare.oracle import BOUNDS
from loadtests.compare.report import below_mark, to_json, to_markdown, version_warnings
from loadtests.compare.results import Results
from loadtests.compare.run import cells_of, run_all, worth_other_seeds
from loadtests.compare.scenario import TRACE, Group
from loadtests.compare.scenarios import SCENARIOS
from loadtests.compare.targets import verdicts
from loadtests.compare.verdict import Verdict, missed
from policies.catalog import POLICIES


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _check(words: Sequence[str] | None, known: Sequence[str], what: str) -> None:
    for word in words or ():
        if word not in known:
            raise click.ClickException(f"unknown {what} {word!r}; known: {', '.join(known)}")


@click.command()
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Mooncake JSONL.")
@click.option("--cache", "cache_path", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--sets", "groups", help=f"Of {', '.join(Group)}.  [default: all]")
@click.option("--scenarios", "names", help="Only these.")
@click.option("--policies", help="Only these; names with options (name:option=value) come in addition.")
@click.option("--seeds", default="1,2,3", show_default=True)
@click.option(
    "--within",
    type=click.FloatRange(min=1.0),
    default=1.25,
    show_default=True,
    help="Other seeds than the first are run for peers whose mean TTFT is at most this many times the best one's.",
)
@click.option("--fresh", default="", help="Policies whose cells are dropped from the cache first; `all` for all.")
@click.option("--no-run", is_flag=True, help="Report what the cache has.")
@click.option(
    "--markdown", "markdown_path", type=click.Path(dir_okay=False, path_type=Path), help="Tables and verdicts."
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Verdicts and all figures.")
@click.option("--processes", type=click.IntRange(min=1), default=1, show_default=True)
def main(
    trace: Path | None,
    cache_path: Path,
    groups: str | None,
    names: str | None,
    policies: str | None,
    seeds: str,
    within: float,
    fresh: str,
    no_run: bool,
    markdown_path: Path | None,
    json_path: Path | None,
    processes: int,
) -> None:
    """Every policy on every scenario, and whether the default policy reaches its targets.

    Cells are kept in the cache directory and not run again, also when code has changed: name what has to be run again
    with --fresh. The exit code is 1 if a target is missed.
    """
    logging.getLogger("gateway").addHandler(logging.NullHandler())
    wanted_groups, wanted_names = _words(groups), _words(names)
    _check(wanted_groups, list(Group), "set")
    _check(wanted_names, [scenario.name for scenario in SCENARIOS], "scenario")
    _check(
        [policy.partition(":")[0] for policy in _words(policies) or ()], [*POLICIES, *BOUNDS, unloaded.NAME], "policy"
    )
    scenarios = [
        scenario
        for scenario in SCENARIOS
        if (wanted_groups is None or scenario.group in wanted_groups)
        and (wanted_names is None or scenario.name in wanted_names)
        and (trace is not None or scenario.workload != TRACE)
    ]
    cache = Cache(cache_path, trace)
    numbers = [int(word) for word in _words(seeds) or ()]
    cells = cells_of(scenarios, numbers, _words(policies))
    dropped = _words(fresh) or []
    for cell in cells:
        if "all" in dropped or cell.policy in dropped:
            cache.drop(cell)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    if not no_run:
        with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
            task = bars.add_task("cells", total=len(cells))

            def done(cell: Cell) -> None:
                bars.update(task, advance=1, description=f"{cell.scenario.name} {cell.policy} seed {cell.seed}")

            try:
                first = [cell for cell in cells if cell.seed == (cell.scenario.seeds or numbers)[0]]
                run_all(first, cache, trace, processes, done)
                stored = [content for cell in first if (content := cache.load(cell)) is not None]
                settled = set(first)
                others = [cell for cell in worth_other_seeds(cells, _results(stored), within) if cell not in settled]
                bars.update(task, total=len(first) + len(others))
                run_all(others, cache, trace, processes, done)
            except (ValueError, OSError) as error:
                raise click.ClickException(str(error)) from error
    known = [content for cell in cells if (content := cache.load(cell)) is not None]
    results = _results(known)
    found = verdicts(results, scenarios)
    warnings = version_warnings(known)
    if markdown_path is not None:
        name = trace.name if trace is not None else None
        command = _command(trace=name, sets=groups, scenarios=names, policies=policies, seeds=seeds)
        before = markdown_path.read_text(encoding="utf-8") if markdown_path.exists() else ""
        generated = to_markdown(results, scenarios, found, warnings, command)
        markdown_path.write_text(below_mark(before, generated), encoding="utf-8")
    if json_path is not None:
        json_path.write_bytes(to_json(found, known))
    show(found, warnings)
    sys.exit(1 if missed(found) else 0)


def _results(cells: Sequence[Mapping[str, Any]]) -> Results:
    return Results(cells, (*BOUNDS, unloaded.NAME))


def show(found: Sequence[Verdict], warnings: Sequence[str]) -> None:
    """Print the verdicts."""
    table = Table(title="Targets")
    for heading in ("scenario", "target", "measured", "worst seed", "met", ""):
        table.add_column(heading, justify="right" if heading in ("measured", "worst seed") else "left")
    for verdict in found:
        cells = [f"{value:.3f}" if value is not None else "-" for value in (verdict.measured, verdict.worst_seed)]
        style = "bold red" if verdict.met is False else None
        table.add_row(verdict.topic, verdict.target, *cells, verdict.word, verdict.note, style=style)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for warning in warnings:
        console.print(warning)


def _command(**options: str | None) -> str:
    """The command that made a report, without the paths of one machine."""
    words = [f"--{name} {value}" for name, value in options.items() if value is not None]
    return " ".join(["python -m loadtests.compare", *words, "--cache DIR --markdown OUT"])


if __name__ == "__main__":
    main()
