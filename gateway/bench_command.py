"""`warmgate bench`: load tests over HTTP.

The load tests are no part of the serving gateway: they are imported when a benchmark runs and not before.
"""

import asyncio
import shlex
import sys
from pathlib import Path

import click

from gateway.overhead_command import overhead


@click.group()
def bench() -> None:
    """Drive a gateway with load and report what clients see, and what it costs."""


bench.add_command(overhead)


@bench.command()
@click.argument("trace_path", metavar="TRACE", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--url", help="Gateway to drive, with the policy it has. Without it every policy gets a stack.")
@click.option("--admin-url", help="Admin side of that gateway: check that it is ready before the start.")
@click.option("--api-key", envvar="WARMGATE_API_KEY", help="Client key of that gateway.")
@click.option("--requests", type=click.IntRange(min=1), help="First requests of the trace.  [default: all]")
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Arrivals come this many times faster than in the trace.",
)
@click.option("--serial", is_flag=True, help="One request after the other, each on a connection of its own.")
@click.option(
    "--pause-ms",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="With --serial, between the end of a request and the next: workers hear of each other in milliseconds.",
)
@click.option("--max-output-tokens", type=click.IntRange(min=1), help="Cut longer answers to this.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompt text and the policies.")
@click.option("--bytes-per-token", type=click.IntRange(min=1), default=4, show_default=True, help="Of the prompt text.")
@click.option(
    "--policy",
    default="round_robin,predicted_ttft",
    show_default=True,
    help="Policies to compare, separated by commas. Not with --url.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Of the gateway. Not with --url."
)
@click.option("--replicas", type=click.IntRange(min=1), default=8, show_default=True, help="Simulated ones.")
@click.option("--replica-processes", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--hardware", default="h100-sxm", show_default=True, help="Card of the simulated replicas.")
@click.option(
    "--model",
    help="Model of the simulated replicas, with --url the model to ask for.  "
    "[default: llama-3.1-8b, with --url the first that is served]",
)
@click.option(
    "--speedup",
    type=click.FloatRange(min=0, min_open=True),
    help="Engine seconds per wall second; with --url only for the report.  [default: 1]",
)
@click.option(
    "--stream-interval",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Tokens per streamed chunk of the simulated replicas.",
)
@click.option(
    "--kv-tokens", type=click.IntRange(min=1), help="KV memory of a simulated replica.  [default: its card's]"
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON.")
@click.option("--markdown", type=click.Path(dir_okay=False, path_type=Path), help="Write a Markdown table.")
@click.pass_context
def trace(
    context: click.Context,
    trace_path: Path,
    url: str | None,
    admin_url: str | None,
    api_key: str | None,
    requests: int | None,
    speed: float,
    serial: bool,
    pause_ms: float,
    max_output_tokens: int | None,
    seed: int,
    bytes_per_token: int,
    policy: str,
    workers: int,
    replicas: int,
    replica_processes: int,
    hardware: str,
    model: str | None,
    speedup: float | None,
    stream_interval: int,
    kv_tokens: int | None,
    output: Path | None,
    markdown: Path | None,
) -> None:
    """Send the requests of TRACE (Mooncake format, JSONL) at their times and compare policies.

    Prompts are synthesised: equal block ids of the trace give equal text. Without --url every policy runs
    on a fresh fleet of simulated replicas behind a fresh gateway, so that all start with cold caches.
    """
    import uvloop
    from rich.console import Console

    from loadtests.bench_compare import bench_policies, bench_running
    from loadtests.bench_progress import ProgressBars
    from loadtests.bench_report import terminal_table, write_reports
    from loadtests.bench_summary import PolicySummary
    from loadtests.bench_trace import TraceLoad
    from loadtests.stack import ChildFailedError, FleetOptions, GatewayOptions
    from loadtests.trace import TraceError, read_trace
    from loadtests.trace_facts import infinite_cache_hit_rates
    from policies.catalog import make_policy

    policies = [name.strip() for name in policy.split(",") if name.strip()]
    if url is not None and context.get_parameter_source("policy") is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("--policy needs a stack of its own: with --url the gateway's policy is measured")
    try:
        for name in policies:
            make_policy(name)  # a misspelt one must not be found after an hour of the others
        arrivals = read_trace(trace_path, requests)
    except (TraceError, ValueError) as error:
        raise click.ClickException(str(error)) from None

    ceiling = infinite_cache_hit_rates(arrivals).token
    facts = f"One infinite cache would serve {ceiling:.3f} of these prompt tokens."
    notes = [facts, "    " + shlex.join(["warmgate", *sys.argv[1:]])]
    load = TraceLoad(model or "", speed, max_output_tokens, seed, bytes_per_token, serial, pause_ms / 1000)
    shape = model or "llama-3.1-8b"
    fleet = FleetOptions(
        replicas=replicas,
        processes=replica_processes,
        hardware=hardware,
        model=shape,
        speedup=speedup or 1.0,
        stream_interval=stream_interval,
        kv_tokens=kv_tokens,
        extra=("--bytes-per-token", str(bytes_per_token)),
    )
    gateway = GatewayOptions(hardware=hardware, model=shape, seed=seed, extra=("--workers", str(workers)))
    summaries: list[PolicySummary] = []

    def keep(summary: PolicySummary) -> None:
        """Write what there is after every policy, so that a later one's failure loses nothing."""
        summaries.append(summary)
        write_reports(summaries, output, markdown, notes)

    async def measure(bars: ProgressBars) -> None:
        if url is None:
            await bench_policies(arrivals, load, fleet, gateway, policies, bars.start, keep)
        else:
            keep(await bench_running(arrivals, load, url, bars.start, admin_url, speedup, api_key))

    failure: Exception | None = None
    with ProgressBars(Console(stderr=True)) as bars:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(measure(bars))
        except (ChildFailedError, RuntimeError) as error:
            failure = error

    if summaries:
        Console().print(terminal_table(summaries))
        click.echo(facts)
    for summary in summaries:
        for kind, count in summary.errors_by_kind.items():
            click.echo(f"{summary.policy}: {count} requests failed: {kind}", err=True)
    if failure is not None:
        raise click.ClickException(str(failure))
    if any(summary.errors == summary.requests for summary in summaries):
        sys.exit(1)
