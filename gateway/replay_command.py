"""`warmgate replay`: routing policies against a workload in virtual time."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Literal

import click

from gateway.estimator.transfer import LINKS


@click.command()
@click.argument("workload", metavar="TRACE|WORKLOAD")
@click.option(
    "--policy",
    "policies",
    default="random,least_outstanding,predicted_ttft",
    show_default=True,
    help="Policies to compare, separated by commas; name:option=value:... for other options than the defaults.",
)
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="Parameter of the workload; repeat.")
@click.option("--requests", type=click.IntRange(min=1), help="First requests only.  [default: all]")
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Arrivals come this many times faster.",
)
@click.option("--preset", metavar="NAME", help="A published benchmark's fleet: b2b-saas, b2b-saas-37, h200.")
@click.option("--replicas", type=click.IntRange(min=1), help="Replicas.  [default: 8]")
@click.option(
    "--prefill",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of the replicas, the first so many do nothing but prefill; the others decode.",
)
@click.option(
    "--disaggregation",
    type=click.Choice(["predicted", "threshold", "always", "never"]),
    default="predicted",
    show_default=True,
    help="Which prompts are computed on prefill replicas.",
)
@click.option("--threshold-tokens", type=click.IntRange(min=1), default=4096, show_default=True)
@click.option(
    "--link",
    type=click.Choice(list(LINKS)),
    default="100g",
    show_default=True,
    help="What joins prefill and decode replicas.",
)
@click.option(
    "--link-latency-ms",
    type=click.FloatRange(min=0),
    default=2.0,
    show_default=True,
    help="Constant part of a hand-off.",
)
@click.option("--hardware", metavar="CARD[,CARD...]", help="Cards, in turn over the replicas.  [default: h100-sxm]")
@click.option("--model", metavar="NAME|PATH", help="Model of the replicas.  [default: llama-3.1-8b]")
@click.option("--tensor-parallel", type=click.IntRange(min=1), help="Cards per replica.  [default: 1]")
@click.option(
    "--kv-tokens", type=click.IntRange(min=16), help="KV memory of a replica.  [default: what the card holds]"
)
@click.option("--max-batched-tokens", type=click.IntRange(min=1), default=8192, show_default=True)
@click.option("--max-sequences", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--overhead-ms", type=click.FloatRange(min=0), help="Constant part of every engine step.  [default: 0]")
@click.option(
    "--cost",
    metavar="NAME=VALUE,...",
    help="Engine constants instead of the roofline's: prefill_s_per_token, attention_s_per_pair, weights_s, "
    "kv_s_per_token, overhead_s; seconds, or *1.3 for a multiple; scale=1.3 for all.",
)
@click.option(
    "--predictor-cost", metavar="NAME=VALUE,...", help="What the gateway assumes instead of the engine's constants."
)
@click.option("--predictor-unknown", is_flag=True, help="The gateway is told neither hardware nor model.")
@click.option("--announce-output", is_flag=True, help="Requests state the length of their answer as max_tokens.")
@click.option(
    "--metrics-staleness",
    "scrape_interval_s",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two reads of engine metrics; 0 to read them only at the start.",
)
@click.option(
    "--event-delay",
    "event_delay_s",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Until the gateway sees what an engine has done.",
)
@click.option(
    "--feedback/--no-feedback",
    default=True,
    show_default=True,
    help="Cached tokens that engines report correct the prefix map.",
)
@click.option("--kv-events", is_flag=True, help="The engines' KV events correct the prefix map.")
@click.option(
    "--kv-events-lost",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    metavar="SHARE",
    help="KV events that never arrive.",
)
@click.option("--fail", "ends", multiple=True, metavar="SLOT@SECONDS", help="A replica's process ends; repeat.")
@click.option("--restart", "starts", multiple=True, metavar="SLOT@SECONDS", help="A new process starts; repeat.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the workload and the policies.")
@click.option(
    "--slo-ttft-ms",
    default="2000",
    show_default=True,
    metavar="MS[,MS...]",
    help="TTFT of a good request; several are asked for by sessions in turn.",
)
@click.option("--slo-tpot-ms", default="100", show_default=True, metavar="MS[,MS...]", help="The same for TPOT.")
@click.option(
    "--slo",
    "slo_routing",
    type=click.Choice(["off", "serve", "refuse"]),
    default="off",
    show_default=True,
    help="The router is told these targets, and serves or refuses what no replica can keep.",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draw TTFT curves (PNG).")
@click.option("--timing", is_flag=True, help="Print seconds per policy and microseconds per decision.")
def replay(
    workload: str,
    policies: str,
    params: tuple[str, ...],
    requests: int | None,
    speed: float,
    preset: str | None,
    replicas: int | None,
    prefill: int,
    disaggregation: Literal["predicted", "threshold", "always", "never"],
    threshold_tokens: int,
    link: str,
    link_latency_ms: float,
    hardware: str | None,
    model: str | None,
    tensor_parallel: int | None,
    kv_tokens: int | None,
    max_batched_tokens: int,
    max_sequences: int,
    overhead_ms: float | None,
    cost: str | None,
    predictor_cost: str | None,
    predictor_unknown: bool,
    announce_output: bool,
    scrape_interval_s: float,
    event_delay_s: float,
    feedback: bool,
    kv_events: bool,
    kv_events_lost: float,
    ends: tuple[str, ...],
    starts: tuple[str, ...],
    seed: int,
    slo_ttft_ms: str,
    slo_tpot_ms: str,
    slo_routing: Literal["off", "serve", "refuse"],
    json_path: Path | None,
    plot_path: Path | None,
    timing: bool,
) -> None:
    """Run policies on a trace or a workload against engine models, on a simulated clock.

    Routing, load accounting, prefix map and predictor are the gateway's own. The same seed gives the same JSON, byte
    for byte. TRACE is a file: Mooncake JSONL, sessions in JSONL, vLLM conversations in JSON, or Azure's CSV.
    """
    from rich.console import Console

    from gateway.routing.hand_off import HandOffSettings
    from loadtests.replay.figures import figures, ttfts_ms
    from loadtests.replay.options import FleetOptions, fleet, incidents, policy, slos
    from loadtests.replay.progress import PolicyBar, progress_bars
    from loadtests.replay.replay import Replay
    from loadtests.replay.report import classes_table, policies_table, stages_table, to_json
    from loadtests.replay.settings import ReplaySettings
    from loadtests.workloads.catalog import load_named

    # Breakers that open in simulated time are figures, not news for the log.
    logging.getLogger("gateway").addHandler(logging.NullHandler())
    options = FleetOptions(
        preset=preset,
        replicas=replicas,
        prefill=prefill,
        hardware=hardware,
        model=model,
        tensor_parallel=tensor_parallel,
        kv_tokens=kv_tokens,
        cost=cost,
        overhead_ms=overhead_ms,
        max_batched_tokens=max_batched_tokens,
        max_sequences=max_sequences,
        predictor_cost=predictor_cost,
        predictor_unknown=predictor_unknown,
    )
    names = [name.strip() for name in policies.split(",")]
    try:
        engines = fleet(options)
        settings = ReplaySettings(
            replicas=engines,
            seed=seed,
            speed=speed,
            scrape_interval_s=scrape_interval_s,
            event_delay_s=event_delay_s,
            feedback=feedback,
            kv_events=kv_events,
            kv_events_lost=kv_events_lost,
            incidents=incidents(ends, starts, len(engines)),
            announce_output=announce_output,
            slos=slos(slo_ttft_ms, slo_tpot_ms),
            slo_routing=slo_routing,
            hand_off=HandOffSettings(
                policy=disaggregation,
                threshold_tokens=threshold_tokens,
                link_bytes_per_s=LINKS[link],
                link_latency_s=link_latency_ms / 1000.0,
            ),
        )
        for name in names:
            policy(name, seed)
        load = load_named(workload, params, seed, requests)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if plot_path is not None:
        from loadtests.replay.plot import require_matplotlib

        try:
            require_matplotlib()
        except ImportError as error:
            raise click.ClickException(str(error)) from error

    results = []
    curves: dict[str, list[float]] = {}
    times: list[str] = []
    with progress_bars(Console(stderr=True)) as bars:
        for name in names:
            began_s = time.process_time()
            bar = PolicyBar(bars, name, load.requests)
            result = Replay(load, policy(name, seed), settings, bar, name).run()
            results.append(figures(result))
            if plot_path is not None:
                curves[name] = ttfts_ms(result)
            decisions_us = 1e6 * sum(result.decisions_s) / max(len(result.decisions_s), 1)
            times.append(f"{name}: {time.process_time() - began_s:.1f} s CPU, {decisions_us:.1f} us per decision")
    if json_path is not None:
        json_path.write_bytes(to_json(results))
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(policies_table(results))
    for table in (classes_table(results), stages_table(results)):
        if table is not None:
            console.print(table)
    if timing:
        for line in times:
            console.print(line, highlight=False)
    if plot_path is not None:
        from loadtests.replay.plot import draw

        draw(plot_path, curves, results)
