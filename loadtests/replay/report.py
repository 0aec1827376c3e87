"""Figures of replays as tables and as JSON."""

from collections.abc import Callable, Sequence

import orjson
from rich.table import Table

from loadtests.replay.figures import Figures

Column = tuple[str, Callable[[Figures], str]]


def to_json(all_figures: Sequence[Figures]) -> bytes:
    """A list with one object per policy; equal figures give equal bytes."""
    objects = [figures.as_json() for figures in all_figures]
    return orjson.dumps(objects, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _prediction(figures: Figures) -> str:
    prediction = figures.ttft_prediction
    if prediction is None:
        return "-"
    return f"{prediction.bias:+.0%} / {prediction.median_ape:.1%} / {prediction.p90_ape:.0%}"


def _goodput(figures: Figures) -> str:
    by_slo = " / ".join(f"{each.share:.1%}" for each in figures.goodput_by_slo)
    return f"{figures.goodput.share:.1%}" + (f" ({by_slo})" if by_slo else "")


_COLUMNS: Sequence[Column] = (
    ("policy", lambda f: f.policy),
    ("requests", lambda f: f"{f.requests:,}"),
    ("errors", lambda f: f"{f.errors:,}"),
    ("refused", lambda f: f"{f.refused:,}"),
    ("TTFT mean ms", lambda f: _ms(f.ttft_ms.mean)),
    ("p50", lambda f: _ms(f.ttft_ms.p50)),
    ("p90", lambda f: _ms(f.ttft_ms.p90)),
    ("p99", lambda f: _ms(f.ttft_ms.p99)),
    ("TPOT mean", lambda f: _ms(f.tpot_ms.mean)),
    ("p99", lambda f: _ms(f.tpot_ms.p99)),
    ("ITL p99", lambda f: _ms(f.itl_ms.p99)),
    ("hit rate", lambda f: f"{f.token_hit_rate:.3f}"),
    ("expected", lambda f: f"{f.expected_hit_rate:.3f}"),
    ("output tok/s", lambda f: f"{f.output_tokens_per_s:,.0f}"),
    ("in SLO", _goodput),
    ("skew", lambda f: f"{f.load_skew:.2f}"),
    ("split", lambda f: f"{f.disaggregated:,}"),
    ("preempted", lambda f: f"{f.preemptions:,}"),
    ("prediction", _prediction),
)

CAPTION = (
    "Simulated milliseconds. Skew: most over mean requests per replica. "
    "Prediction of TTFT: bias of the mean / median / p90 of the absolute error."
)


def policies_table(all_figures: Sequence[Figures]) -> Table:
    """One row per policy."""
    table = Table(title=all_figures[0].workload if all_figures else "", caption=CAPTION, caption_justify="left")
    for name, _ in _COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=name == "policy")
    for figures in all_figures:
        table.add_row(*(cell(figures) for _, cell in _COLUMNS))
    return table


def stages_table(all_figures: Sequence[Figures]) -> Table | None:
    """TTFT mean and output rate by stage, a pair of columns per policy; None for loads of one stage."""
    if not all_figures or not all_figures[0].stages:
        return None
    table = Table(
        title="By stage",
        caption="The last row is the unweighted mean of the stages, without warm-up.",
        caption_justify="left",
    )
    table.add_column("stage")
    for figures in all_figures:
        table.add_column(f"{figures.policy} TTFT ms", justify="right")
        table.add_column("p90", justify="right")
        table.add_column("tok/s", justify="right")
    for number, stage in enumerate(all_figures[0].stages):
        cells = [stage.name]
        for figures in all_figures:
            own = figures.stages[number]
            cells += [_ms(own.ttft_ms.mean), _ms(own.ttft_ms.p90), f"{own.output_tokens_per_s:,.0f}"]
        table.add_row(*cells, style="dim" if stage.warm_up else None)
    table.add_section()
    cells = ["mean"]
    for figures in all_figures:
        means = figures.stage_means
        assert means is not None
        cells += [_ms(means.ttft_mean_ms), _ms(means.ttft_p90_ms), f"{means.output_tokens_per_s:,.0f}"]
    table.add_row(*cells, style="bold")
    return table


def classes_table(all_figures: Sequence[Figures]) -> Table | None:
    """One row per policy and class of request; None where there are not several classes."""
    if not all_figures or len(all_figures[0].classes) < 2:
        return None
    table = Table(title="By class of request", caption="Simulated milliseconds.", caption_justify="left")
    for name in ("policy", "class"):
        table.add_column(name, no_wrap=True)
    for name in (
        *("requests", "errors", "TTFT mean", "p50", "p90", "p99"),
        *("TPOT mean", "p99", "ITL mean", "p50", "p90", "p99"),
    ):
        table.add_column(name, justify="right")
    for figures in all_figures:
        for name, own in figures.classes.items():
            ttft, tpot, itl = own.ttft_ms, own.tpot_ms, own.itl_ms
            times = (ttft.mean, ttft.p50, ttft.p90, ttft.p99, tpot.mean, tpot.p99, itl.mean, itl.p50, itl.p90, itl.p99)
            table.add_row(figures.policy, name, f"{own.requests:,}", f"{own.errors:,}", *map(_ms, times))
    return table
