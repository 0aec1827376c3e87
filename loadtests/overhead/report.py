"""The result of a benchmark as a table for the terminal, as Markdown and as JSON, all from the same lines."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

from loadtests.overhead import figures
from loadtests.overhead.figures import Line, Spread
from loadtests.overhead.plan import Run, Settings

_LEFT = ("", "target", "met")
"""Headers of columns without figures."""


@dataclass(slots=True)
class Result:
    """Everything a report is made from; `runs` grows while the benchmark goes on."""

    settings: Settings
    versions: dict[str, str]
    """Of the gateways."""
    machine: dict[str, Any]
    command: str
    runs: list[Run] = field(default_factory=list)
    load_averages: list[float] = field(default_factory=list)
    """Of the machine, before each round and at the end."""

    @property
    def lines(self) -> list[Line]:
        """The table."""
        return figures.lines(self.runs)


def _spread(spread: Spread | None, digits: int) -> str:
    """Median and, where they differ from it, lowest and highest."""
    if spread is None:
        return "-"
    text = f"{spread.median:,.{digits}f}"
    if spread.low == spread.high:
        return text
    return f"{text} ({spread.low:,.{digits}f} to {spread.high:,.{digits}f})"


def _target(line: Line) -> str:
    metric = line.metric
    if metric.max_value is not None:
        return f"<= {metric.max_value:g} MB"
    if metric.max_ratio is None:
        return ""
    goal = "" if metric.goal_ratio is None else f" (goal {metric.goal_ratio:g})"
    return f"<= {metric.max_ratio:g}{goal}"


def _verdict(line: Line) -> str:
    if line.met is None:
        return ""
    goal = line.metric.goal_ratio
    if line.met and goal is not None and line.ratio is not None and line.ratio.median <= goal:
        return "goal"
    return "yes" if line.met else "NO"


def _cell(line: Line, gateway: str) -> str:
    mark = "! " if line.errors.get(gateway) else ""
    return mark + _spread(line.cells.get(gateway), line.metric.digits)


def _rows(result: Result) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the table."""
    names = result.settings.gateways
    headers = ["", *names, "ratio to best peer", "target", "met"]
    rows = []
    for line in result.lines:
        ratio = "" if line.ratio is None else f"{_spread(line.ratio, 2)} {line.best_peer}"
        rows.append([line.metric.title, *(_cell(line, name) for name in names), ratio, _target(line), _verdict(line)])
    return headers, rows


def notes(result: Result) -> list[str]:
    """What belongs below the table, a sentence or two each."""
    settings, machine = result.settings, result.machine
    loads = " ".join(f"{load:.1f}" for load in result.load_averages)
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    rounds = len({run.round for run in result.runs})
    closed = "wrk" if settings.use_wrk else "this project's own generator (asyncio on uvloop and llhttp)"
    return [
        f"Medians of {rounds} rounds (lowest to highest), ratios within a round. CPU is user and system time of all "
        f"processes and threads of a gateway, in windows of {settings.seconds:g} s after "
        f"{settings.warmup_s:g} s of warm-up. {settings.connections} connections; load from {closed}. Chunks come "
        f"every {settings.interval_ms:g} ms per stream. Cells marked ! had errors.",
        f"{versions}. {machine['cores']} cores of {machine['processor']}, {machine['memory_gb']:g} GB, "
        f"{machine['kernel']}, Python {machine['python']}. Load average before each round and at the end: {loads}.",
        *figures.hidden_calls(result.runs),
        *figures.warnings(result.runs, settings.interval_ms),
    ]


def terminal_table(result: Result) -> Table:
    """For a terminal, with ranges on a line of their own."""
    headers, rows = _rows(result)
    table = Table()
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if header in _LEFT else "right", no_wrap=number == 0)
    for row in rows:
        table.add_row(row[0], *(cell.replace(" (", "\n(", 1) for cell in row[1:]))
    return table


def markdown(result: Result) -> str:
    """A Markdown table with its notes and the command that makes it."""
    headers, rows = _rows(result)
    sides = ["---" if header in _LEFT else "---:" for header in headers]
    table = ["| " + " | ".join(cells) + " |" for cells in (headers, sides, *rows)]
    return "\n\n".join(["\n".join(table), *notes(result), f"    {result.command}"]) + "\n"


def as_json(result: Result) -> dict[str, Any]:
    """Figures and the runs they come from."""
    runs = result.runs
    return {
        "command": result.command,
        "machine": {**result.machine, "load_averages": result.load_averages},
        "versions": result.versions,
        "settings": asdict(result.settings),
        "metrics": [
            {
                "metric": line.metric.key,
                "title": line.metric.title,
                "gateways": {
                    gateway: {**asdict(spread), "errors": line.errors.get(gateway, 0)}
                    for gateway, spread in line.cells.items()
                },
                "rounds": {
                    gateway: [by_round.get(number) for number in range(result.settings.rounds)]
                    for gateway, by_round in figures.values(line.metric, runs).items()
                },
                "best_peer": line.best_peer,
                "ratio": None if line.ratio is None else asdict(line.ratio),
                "max_ratio": line.metric.max_ratio,
                "goal_ratio": line.metric.goal_ratio,
                "max_value": line.metric.max_value,
                "met": line.met,
            }
            for line in result.lines
        ],
        "hidden_calls": figures.hidden_calls(runs),
        "warnings": figures.warnings(runs, result.settings.interval_ms),
        "runs": [asdict(run) for run in runs],
    }


def write(result: Result, json_path: Path | None, markdown_path: Path | None) -> None:
    """Write the files that are wanted."""
    if json_path is not None:
        options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        json_path.write_bytes(orjson.dumps(as_json(result), option=options))
    if markdown_path is not None:
        markdown_path.write_text(markdown(result), encoding="utf-8")


def errors_of(runs: Sequence[Run], gateway: str) -> int:
    """All errors of a gateway."""
    return sum(sum(run.outcome.errors.values()) for run in runs if run.gateway == gateway)
