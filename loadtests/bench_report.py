"""Benchmark summaries as tables, for a terminal and in Markdown, from one list of columns; and as files."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import orjson
from rich.table import Table

from loadtests.bench_summary import PolicySummary, Times

Column = tuple[str, Callable[[PolicySummary], str]]


def _ms(value: float) -> str:
    """Milliseconds with about three significant digits."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _of_times(summaries: Sequence[PolicySummary]) -> tuple[str, Callable[[PolicySummary], Times]]:
    """Time base of the tables: the engine's when it is known of every run and differs from the wall's."""
    engines = [summary.engine for summary in summaries]
    if engines and all(engines) and any(summary.speedup != 1.0 for summary in summaries):
        return "engine", lambda summary: summary.engine or summary.wall
    return "wall", lambda summary: summary.wall


def _prediction(summary: PolicySummary, text: Callable[[float, float], str]) -> str:
    prediction = summary.ttft_prediction
    return "-" if prediction is None else text(prediction.ratio_of_means, prediction.median_ape)


def columns(summaries: Sequence[PolicySummary]) -> list[Column]:
    """Headers and cells of the table. TTFT and TPOT are in the time base that `caption` names."""
    _, times = _of_times(summaries)
    return [
        ("policy", lambda summary: summary.policy),
        ("requests", lambda summary: f"{summary.requests:,}"),
        ("errors", lambda summary: f"{summary.errors:,}"),
        ("TTFT mean ms", lambda summary: _ms(times(summary).ttft_ms.mean)),
        ("TTFT p50", lambda summary: _ms(times(summary).ttft_ms.p50)),
        ("TTFT p90", lambda summary: _ms(times(summary).ttft_ms.p90)),
        ("TTFT p99", lambda summary: _ms(times(summary).ttft_ms.p99)),
        ("TPOT mean ms", lambda summary: _ms(times(summary).tpot_ms.mean)),
        ("TPOT p99", lambda summary: _ms(times(summary).tpot_ms.p99)),
        ("token hit rate", lambda summary: f"{summary.token_hit_rate:.3f}"),
        ("output tok/s", lambda summary: f"{times(summary).output_tokens_per_s:,.0f}"),
        ("load skew", lambda summary: f"{summary.load_skew:.2f}"),
        ("predicted/observed TTFT", lambda summary: _prediction(summary, lambda ratio, _: f"{ratio:.2f}")),
        ("median error", lambda summary: _prediction(summary, lambda _, error: f"{error:.0%}")),
    ]


def caption(summaries: Sequence[PolicySummary]) -> str:
    """One sentence that says in which seconds the table is, and whether the load generator kept up."""
    base, _ = _of_times(summaries)
    lag_ms = max((summary.dispatch_lag_ms.p99 for summary in summaries), default=0.0)
    speedups = sorted({summary.speedup for summary in summaries if summary.speedup is not None})
    if base == "engine":
        factors = ", ".join(f"{speedup:g}" for speedup in speedups)
        first = f"Times are engine time: wall time x {factors}, the speedup of the simulated replicas."
    else:
        first = "Times are wall time."
    return f"{first} Requests were sent at most {_ms(lag_ms)} ms (wall, p99) after their arrival."


def markdown(summaries: Sequence[PolicySummary], notes: Iterable[str] = ()) -> str:
    """A Markdown table with its caption.

    Args:
        summaries: one per policy.
        notes: further paragraphs, as the command that made the table.
    """
    cells = columns(summaries)
    rows = [
        "| " + " | ".join(header for header, _ in cells) + " |",
        "|" + "|".join("---" if header == "policy" else "---:" for header, _ in cells) + "|",
        *("| " + " | ".join(cell(summary) for _, cell in cells) + " |" for summary in summaries),
    ]
    return "\n\n".join(["\n".join(rows), caption(summaries), *notes]) + "\n"


def terminal_table(summaries: Sequence[PolicySummary]) -> Table:
    """The same figures for a terminal, which is narrow: a row for each figure, a column for each policy."""
    (_, name), *cells = columns(summaries)
    table = Table("", caption=caption(summaries))
    for summary in summaries:
        table.add_column(name(summary), justify="right")
    for header, cell in cells:
        table.add_row(header, *(cell(summary) for summary in summaries))
    return table


def write_reports(
    summaries: Sequence[PolicySummary], json_path: Path | None, markdown_path: Path | None, notes: Iterable[str]
) -> None:
    """Write the figures to files.

    Args:
        summaries: one per policy.
        json_path: gets a list of one object per policy, when given.
        markdown_path: gets the table, when given.
        notes: paragraphs below the table.
    """
    if json_path is not None:
        figures = [summary.as_json() for summary in summaries]
        json_path.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    if markdown_path is not None:
        markdown_path.write_text(markdown(summaries, notes), encoding="utf-8")
