"""Tables and verdicts as markdown and as JSON."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from loadtests.compare.describe import describe
from loadtests.compare.results import (
    HIT_RATE,
    IN_FLIGHT_SKEW,
    LOAD_SKEW,
    OUTPUT_RATE,
    TPOT_P99,
    TTFT_MEAN,
    TTFT_P99,
    Metric,
    Results,
    metric,
)
from loadtests.compare.scenario import OURS, Scenario
from loadtests.compare.verdict import Verdict


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def _share(value: float) -> str:
    return f"{100.0 * value:.1f} %"


_LEGEND = "Means over the seeds that a policy was run with. Times are simulated milliseconds."

COLUMNS: Sequence[tuple[str, Metric, Callable[[float], str]]] = (
    ("TTFT mean ms", TTFT_MEAN, _ms),
    ("p50", metric("figures.ttft_ms.p50"), _ms),
    ("p99", TTFT_P99, _ms),
    ("TPOT p99 ms", TPOT_P99, _ms),
    ("hit rate", HIT_RATE, lambda value: f"{value:.3f}"),
    ("output tok/s", OUTPUT_RATE, lambda value: f"{value:,.0f}"),
    ("in SLO", metric("figures.goodput.share"), _share),
    ("max/mean requests", LOAD_SKEW, lambda value: f"{value:.2f}"),
    ("max/mean in flight", IN_FLIGHT_SKEW, lambda value: f"{value:.2f}"),
    ("preempted", metric("figures.preemptions"), lambda value: f"{value:,.0f}"),
    ("errors", metric("figures.errors"), lambda value: f"{value:,.0f}"),
    ("prediction bias", metric("figures.ttft_prediction.bias"), lambda value: f"{100.0 * value:+.0f} %"),
    ("median error", metric("figures.ttft_prediction.median_ape"), _share),
    ("p90", metric("figures.ttft_prediction.p90_ape"), lambda value: f"{100.0 * value:.0f} %"),
)
"""Columns of a scenario's table: heading, figure of a cell, and how its mean over the seeds is written."""


def scenario_table(results: Results, scenario: Scenario) -> list[str]:
    """A scenario's policies as lines of markdown, least mean TTFT first; empty if nothing was run."""
    name = scenario.name
    rows = []
    for policy in results.policies(name):
        mean = results.mean(name, policy, TTFT_MEAN)
        if mean is not None:
            rows.append((mean, policy))
    if not rows:
        return []
    lines = [
        f"| policy | seeds | {' | '.join(heading for heading, _, _ in COLUMNS)} |",
        f"|---|---:|{'---:|' * len(COLUMNS)}",
    ]
    for _, policy in sorted(rows):
        cells = [str(len(results.by_seed(name, policy, TTFT_MEAN)))]
        for _, figure, write in COLUMNS:
            value = results.mean(name, policy, figure)
            cells.append("-" if value is None else write(value))
        shown = f"**{policy}**" if policy == OURS else policy
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100.0 else f"{value:.3f}"


def verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    """Verdicts as lines of markdown, and how many there are of each kind."""
    counts = Counter(verdict.word for verdict in verdicts)
    lines = [
        f"{counts['yes']} targets are met, {counts['NO']} are not, {counts['not run']} were not run.",
        "",
        "| scenario | target | measured | worst seed | met | |",
        "|---|---|---:|---:|---|---|",
    ]
    for verdict in verdicts:
        word = f"**{verdict.word}**" if verdict.met is False else verdict.word
        lines.append(
            f"| {verdict.topic} | {verdict.target} | {_number(verdict.measured)} | {_number(verdict.worst_seed)} "
            f"| {word} | {verdict.note} |"
        )
    return lines


def version_warnings(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to know of cells that come from several versions of the code."""
    ours = {cell.get("source") for cell in cells if cell["policy"] == OURS}
    others = {cell.get("source") for cell in cells if cell["policy"] != OURS}
    warnings = []
    if len(ours) > 1:
        warnings.append(f"The cells of {OURS} come from {len(ours)} versions of the code.")
    if others - ours:
        warnings.append(
            f"Cells of the other policies come from {len(others)} versions of the code, some of them older."
        )
    return warnings


def to_markdown(
    results: Results, scenarios: Sequence[Scenario], verdicts: Sequence[Verdict], warnings: Sequence[str], command: str
) -> str:
    """The generated part of the document."""
    lines = ["## Verdicts", "", f"    {command}", ""]
    for warning in warnings:
        lines += [f"**{warning}**", ""]
    lines += verdict_table(verdicts)
    lines += [
        "",
        "## Figures",
        "",
        _LEGEND,
        "",
    ]
    for scenario in scenarios:
        table = scenario_table(results, scenario)
        if table:
            lines += [f"### {scenario.name}", "", describe(scenario), "", *table, ""]
    return "\n".join(lines)


MARK = "<!-- What follows is written by python -m loadtests.compare. -->"


def below_mark(text: str, generated: str) -> str:
    """A document with its generated part replaced; what stands above the mark is kept."""
    above, mark, _ = text.partition(MARK)
    return f"{above if mark else ''}{MARK}\n\n{generated.rstrip()}\n"


def to_json(verdicts: Sequence[Verdict], cells: Sequence[Mapping[str, Any]]) -> bytes:
    """Verdicts and all cells; equal results give equal bytes."""
    content = {
        "verdicts": [{**asdict(verdict), "met": verdict.met} for verdict in verdicts],
        "cells": list(cells),
    }
    return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
