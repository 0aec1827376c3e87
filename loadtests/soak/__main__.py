"""`python -m loadtests.soak`: many requests while replicas come and go; do memory and /health stay as they were?"""

import sys
from pathlib import Path

import click
import uvloop
from rich.console import Console

from loadtests.soak.run import Options, Report, as_json, soak
from loadtests.stack.processes import ChildFailedError


@click.command()
@click.option("--requests", type=click.IntRange(100), default=200_000, show_default=True, help="Requests in all.")
@click.option("--users", type=click.IntRange(1), default=32, show_default=True, help="Requests at a time.")
@click.option("--replicas", type=click.IntRange(2), default=4, show_default=True, help="Replicas at a time.")
@click.option("--churn-s", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Between two restarts.")
@click.option("--awake-s", type=click.FloatRange(0), default=20.0, show_default=True, help="Long prompts; 0 for none.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of everything that is drawn.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where figures go.")
def main(
    requests: int, users: int, replicas: int, churn_s: float, awake_s: float, seed: int, json_path: Path | None
) -> None:
    """Soak a gateway; exit with 1 if anything leaked, failed or fell asleep."""
    options = Options(requests, users, replicas, churn_s, awake_s, seed)
    console = Console(stderr=True)
    try:
        with console.status("starting") as status:
            report = uvloop.run(soak(options, status.update))
    except ChildFailedError as error:
        raise click.ClickException(str(error)) from None
    show(report)
    if json_path is not None:
        json_path.write_text(as_json(report, options) + "\n", encoding="utf-8")
    sys.exit(1 if report.faults() else 0)


def show(report: Report) -> None:
    """Print a report in words."""
    progress = report.progress
    rate = progress.finished / report.seconds
    click.echo(f"{progress.finished:,} requests in {report.seconds:.0f} s ({rate:,.0f} per second)")
    for (kind, outcome), number in sorted(progress.outcomes.items()):
        click.echo(f"  {kind}: {outcome}: {number:,}")
    click.echo(f"{report.restarts} restarts of replicas, {report.exchanges} exchanged for others")
    trend = report.trend
    if trend is not None:
        click.echo(
            f"memory in the second half: {trend.rss_bytes / 1e6:.1f} MB, growing by {trend.growth_bytes / 1e6:.2f} MB "
            f"({trend.slope_bytes_per_request:.2f} bytes per request)"
        )
    for one in report.awake:
        click.echo(
            f"/health, {one.situation}: p50 {one.p50_ms:.1f} ms, p99 {one.p99_ms:.1f} ms, max {one.max_ms:.1f} ms "
            f"({one.probes} probes)"
        )
    for fault in report.faults():
        click.echo(f"FAULT: {fault}")


if __name__ == "__main__":
    main()
