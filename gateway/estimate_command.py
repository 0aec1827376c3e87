"""`warmgate estimate`: the estimator's figures of one workload as tables, or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import TypeVar

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.estimator.hardware import Hardware, hardware
from gateway.estimator.model import ModelShape, model
from gateway.estimator.report import DEFAULT_CHUNK_TOKENS, Estimate, Workload
from gateway.estimator.report import estimate as estimate_figures

T = TypeVar("T")


def _parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str], T]:
    def callback(ctx: click.Context, param: click.Parameter, value: str) -> T:
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return callback


@click.command("estimate")
@click.option(
    "--model",
    "shape",
    metavar="NAME|PATH",
    callback=_parsed(model),
    required=True,
    help="Preset, or path of a Hugging Face config.json.",
)
@click.option(
    "--hardware",
    "card",
    metavar="NAME|VALUES",
    callback=_parsed(hardware),
    required=True,
    help="Preset, or flops=FLOP/s,bandwidth=bytes/s,memory=bytes.",
)
@click.option("--prompt", "prompt_tokens", type=click.IntRange(min=1), required=True, help="Prompt tokens.")
@click.option("--output", "output_tokens", type=click.IntRange(min=1), required=True, help="Output tokens.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences decoding together.")
@click.option(
    "--cached",
    "cached_tokens",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Cached prompt tokens.",
)
@click.option("--tensor-parallel", type=click.IntRange(min=1), default=1, show_default=True, help="Cards per replica.")
@click.option(
    "--chunk",
    "chunk_tokens",
    type=click.IntRange(min=1),
    multiple=True,
    default=DEFAULT_CHUNK_TOKENS,
    show_default=True,
    help="Prefill tokens per step; repeat to compare. TTFT is that of the largest.",
)
@click.option(
    "--kv-dtype-bytes",
    type=click.FloatRange(min=0, min_open=True),
    help="Bytes per KV element: 2 for 16 bit, 1 for FP8. Default: the model's.",
)
@click.option(
    "--memory-utilization",
    type=click.FloatRange(min=0, min_open=True, max=1),
    default=0.9,
    show_default=True,
    help="Share of the memory that the engine may use.",
)
@click.option(
    "--link-latency-ms",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Constant part of a KV transfer.",
)
@click.option("--json", "as_json", is_flag=True, help="The same figures as one JSON object.")
def estimate(
    shape: ModelShape,
    card: Hardware,
    prompt_tokens: int,
    output_tokens: int,
    batch: int,
    cached_tokens: int,
    tensor_parallel: int,
    chunk_tokens: tuple[int, ...],
    kv_dtype_bytes: float | None,
    memory_utilization: float,
    link_latency_ms: float,
    as_json: bool,
) -> None:
    """Prefill, TTFT, TPOT, limits, KV use, chunking and KV transfer from the roofline."""
    if kv_dtype_bytes is not None:
        shape = dataclasses.replace(shape, bytes_per_kv_element=kv_dtype_bytes)
    try:
        figures = estimate_figures(
            card,
            shape,
            Workload(prompt_tokens, output_tokens, batch, cached_tokens),
            tensor_parallel=tensor_parallel,
            chunk_tokens=chunk_tokens,
            memory_utilization=memory_utilization,
            link_latency_s=link_latency_ms / 1e3,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(figures), indent=2, allow_nan=False))
    else:
        print_tables(figures, Console())


def print_tables(figures: Estimate, console: Console) -> None:
    """Prints all figures as tables."""
    for table in (
        _latency_table(figures),
        _limit_table(figures),
        _kv_table(figures),
        _chunk_table(figures),
        _transfer_table(figures),
    ):
        console.print(table)
    if not figures.weights_fit:
        console.print("[bold red]The weights do not fit into the memory: more cards or fewer bits.[/]")
    elif not figures.batch_fits:
        console.print(
            f"[bold red]A batch of {figures.batch} does not fit: {figures.max_sequences} sequences do. "
            "An engine would queue or preempt the others.[/]"
        )


def _latency_table(figures: Estimate) -> Table:
    cards = f"{figures.tensor_parallel} x {figures.hardware}" if figures.tensor_parallel > 1 else figures.hardware
    table = _table(
        f"{escape(figures.model)} on {escape(cards)}: {figures.prompt_tokens} prompt tokens "
        f"({figures.cached_tokens} cached), {figures.output_tokens} output tokens, batch {figures.batch}",
        "latency",
        "value",
        "note",
    )
    table.add_row("prefill, linear", seconds(figures.prefill_linear_s), "2 FLOPs per parameter and token")
    table.add_row("prefill, attention", seconds(figures.prefill_attention_s), "between the prompt's tokens")
    table.add_row("prefill", seconds(figures.prefill_s), "alone, at least one read of the weights")
    table.add_row(
        "TTFT",
        seconds(figures.ttft_s),
        f"empty queue, batch of {figures.batch} decoding, chunks of {figures.ttft_chunk_tokens}",
    )
    table.add_row("TPOT", seconds(figures.tpot_s), f"{figures.output_tokens_per_s_per_stream:.1f} token/s per stream")
    table.add_row("end to end", seconds(figures.end_to_end_s), f"{figures.output_tokens_per_s:,.0f} token/s in all")
    return table


def _limit_table(figures: Estimate) -> Table:
    table = _table(
        f"Ridge point: {figures.ridge_point_flop_per_byte:.0f} FLOP/byte at peak rates, "
        f"{figures.achievable_ridge_flop_per_byte:.0f} at those reached",
        "phase",
        "FLOP/byte",
        "limited by",
        "note",
    )
    table.add_row(
        "prefill",
        f"{figures.prefill_intensity_flop_per_byte:,.1f}",
        figures.prefill_limit,
        "in one step; attention and KV left out",
    )
    table.add_row(
        "decode",
        f"{figures.decode_intensity_flop_per_byte:,.1f}",
        figures.decode_limit,
        f"weights {seconds(figures.decode_weights_s)} + KV {seconds(figures.decode_kv_s)} per step",
    )
    return table


def _kv_table(figures: Estimate) -> Table:
    table = _table("KV", "what", "value", "note")
    table.add_row("weights", size(figures.weight_bytes), f"{size(figures.memory_bytes)} of memory")
    table.add_row(
        "KV per token",
        size(figures.kv_bytes_per_token),
        "held once" if figures.kv_copies == 1 else f"held {figures.kv_copies:g} times over the cards",
    )
    table.add_row("KV per request", size(figures.kv_bytes_per_request), "prompt and output")
    table.add_row(
        "KV of the batch",
        size(figures.kv_bytes_batch),
        f"{figures.kv_batch_share_of_memory:.1%} of the memory",
    )
    table.add_row(
        "KV capacity",
        size(figures.kv_capacity_bytes),
        f"{figures.kv_capacity_tokens:,} tokens at {figures.memory_utilization:.0%} of the memory",
    )
    table.add_row("sequences that fit", f"{figures.max_sequences:,}", "without sharing prefixes")
    return table


def _chunk_table(figures: Estimate) -> Table:
    table = _table(
        f"Chunked prefill beside {figures.batch} decoding streams (ITL alone: {seconds(figures.tpot_s)})",
        "chunk",
        "steps",
        "ITL mean",
        "ITL max",
        "ITL max, nothing overlapped",
        "TTFT",
    )
    for row in figures.chunking:
        table.add_row(
            str(row.chunk_tokens),
            str(row.steps),
            *(seconds(value) for value in (row.itl_mean_s, row.itl_max_s, row.itl_max_serial_s, row.ttft_s)),
        )
    return table


def _transfer_table(figures: Estimate) -> Table:
    table = _table(
        f"Moving the prompt's KV ({size(figures.whole_prompt_kv_bytes)}) "
        f"or computing it ({seconds(figures.whole_prompt_prefill_s)})",
        "link",
        "GB/s",
        "transfer",
        "of its prefill",
        "faster from",
        f"split beside {figures.batch} from",
        "this prompt",
    )
    for row in figures.transfer:
        table.add_row(
            row.link,
            f"{row.bytes_per_s / 1e9:g}",
            seconds(row.transfer_s),
            f"{row.share_of_prefill:.1%}",
            _tokens(row.break_even_tokens),
            _tokens(row.split_from_tokens),
            f"{row.advice} ({'+' if row.split_saves_s > 0 else '-'}{seconds(abs(row.split_saves_s))})",
        )
    return table


def _tokens(count: int | None) -> str:
    return "never" if count is None else f"{count:,} tokens"


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="left" if column in ("note", "limited by") else "right")
    return table


def seconds(value_s: float) -> str:
    """A duration in the unit a reader would say it in."""
    if value_s >= 1:
        return f"{value_s:,.2f} s"
    if value_s >= 1e-3:
        return f"{value_s * 1e3:.{1 if value_s >= 10e-3 else 2}f} ms"
    return f"{value_s * 1e6:.1f} us"


def size(value_bytes: float) -> str:
    """Bytes with a decimal prefix."""
    for exponent, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value_bytes >= 10**exponent:
            return f"{value_bytes / 10**exponent:,.1f} {prefix}B"
    return f"{value_bytes:,.0f} B"
