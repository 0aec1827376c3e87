"""`python -m loadtests.kills`: kill -9 of Redis, of a worker and of a replica under load; who else notices?

Starts a redis-server, stub replicas and a gateway with several workers, sends requests at a fixed rate, half of them
streams, and kills one after the other. Ends with 1 if a request failed that its victim was not at work on, or if
something did not come back.
"""

import sys
from collections import Counter

import click
import uvloop
from rich.console import Console
from rich.table import Table

from gateway.workers.redis_server import NoServer
from loadtests.kills.run import Options, Report, run
from loadtests.stack.processes import ChildFailedError


@click.command(help=__doc__)
@click.option("--duration-s", type=click.FloatRange(4), default=60.0, show_default=True, help="Of the load.")
@click.option("--rate", type=click.FloatRange(1), default=200.0, show_default=True, help="Requests per second.")
@click.option("--replicas", type=click.IntRange(2), default=4, show_default=True, help="Stub replicas.")
@click.option("--workers", type=click.IntRange(2), default=2, show_default=True, help="Of the gateway.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of prompts and connections.")
def main(duration_s: float, rate: float, replicas: int, workers: int, seed: int) -> None:
    """Run it and print a table."""
    console = Console(stderr=True)
    try:
        with console.status("starting") as status:
            report = uvloop.run(run(Options(duration_s, rate, replicas, workers, seed), status.update))
    except (ChildFailedError, NoServer) as error:
        raise click.ClickException(str(error)) from None
    Console(width=100).print(_table(report))
    others = report.others()
    seconds = sorted(request.seconds for request in report.requests if not request.failed)
    click.echo(
        f"{len(report.requests):,} requests, sent at most {report.late_s * 1000:.0f} ms late; "
        f"answered in p50 {_at(seconds, 0.5):.0f} ms, p99 {_at(seconds, 0.99):.0f} ms, max {_at(seconds, 1.0):.0f} ms"
    )
    begun_s = report.requests[0].sent_s
    for request in others[:20]:
        click.echo(
            f"FAILED: sent at {request.sent_s - begun_s:.3f} s, {request.outcome} after {request.seconds:.3f} s, "
            f"{'stream' if request.streamed else 'plain'}, replica {request.replica}"
        )
    for missing in report.not_back:
        click.echo(f"NOT BACK: {missing}")
    click.echo(f"{len(others)} requests failed that no victim was at work on")
    sys.exit(1 if others or report.not_back else 0)


def _table(report: Report) -> Table:
    table = Table(title="kill -9")
    for column in ("of", "at s", "at work on", "of them failed", "how"):
        table.add_column(column, justify="left" if column in ("of", "how") else "right")
    for kill in report.kills:
        running = report.running(kill)
        failed = [request for request in running if request.failed]
        how = ", ".join(f"{number} {outcome}" for outcome, number in Counter(r.outcome for r in failed).items())
        at_s = kill.at_s - report.requests[0].sent_s
        table.add_row(kill.what, f"{at_s:.1f}", str(len(running)), str(len(failed)), how)
    return table


def _at(seconds: list[float], quantile: float) -> float:
    return seconds[int(quantile * (len(seconds) - 1))] * 1000 if seconds else 0.0


if __name__ == "__main__":
    main()
