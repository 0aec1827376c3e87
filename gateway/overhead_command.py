"""`warmgate bench overhead`: what this gateway costs, and what others cost."""

import asyncio
import shlex
import shutil
import sys
import tempfile
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import click

from gateway.version import described

_QUICK: dict[str, Any] = {"rounds": 2, "seconds": 0.7, "warmup": 0.3, "sizes": "1,32,128"}


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise click.BadParameter("positive whole numbers, separated by commas", param_hint=option)
    return tuple(dict.fromkeys(numbers))


def _names(text: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if unknown := [name for name in names if name not in known]:
        raise click.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(known)}", param_hint=option)
    return names


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Of all loads.")
@click.option("--seconds", type=click.FloatRange(min=0.2), default=3.0, show_default=True, help="Of a window.")
@click.option("--warmup", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Seconds before it.")
@click.option("--sizes", default="1,8,32,128,512", show_default=True, help="Prompts, in KB.")
@click.option("--streams", default="64,512", show_default=True, help="Streams at once.")
@click.option("--only", default="streams,requests,latency,idle", show_default=True, help="What to measure.")
@click.option("--gateways", help="Which to compare.  [default: warmgate,sglang,vllm, and nginx if on PATH]")
@click.option("--connections", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--interval-ms", type=click.FloatRange(min=1), default=20.0, show_default=True, help="Of stream chunks.")
@click.option("--wrk", "use_wrk", is_flag=True, help="Plain requests come from wrk, if it is on PATH.")
@click.option("--quick", is_flag=True, help="One to two minutes: fewer sizes, two short rounds.")
@click.option("--peers-venv", type=click.Path(file_okay=False, path_type=Path), help="Where the peers are or go.")
@click.option("--logs", type=click.Path(file_okay=False, path_type=Path), help="Keep the gateways' logs here.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON.")
@click.option("--markdown", type=click.Path(dir_okay=False, path_type=Path), help="Write a Markdown table.")
@click.pass_context
def overhead(
    context: click.Context,
    rounds: int,
    seconds: float,
    warmup: float,
    sizes: str,
    streams: str,
    only: str,
    gateways: str | None,
    connections: int,
    interval_ms: float,
    use_wrk: bool,
    quick: bool,
    peers_venv: Path | None,
    logs: Path | None,
    output: Path | None,
    markdown: Path | None,
) -> None:
    """Compare the CPU time, latency and memory of this gateway with those of other routers.

    Every gateway gets the same requests, one gateway at a time, in front of eight stub replicas that answer at
    once. The routers to compare with are installed from the package index into an environment of their own.
    Exits with status 1 when any request to this gateway failed.
    """
    try:
        import psutil  # noqa: F401
    except ImportError:
        raise click.ClickException("this benchmark needs psutil: pip install 'warmgate[loadtest]'") from None
    import uvloop
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from loadtests.overhead import machine, peers, report
    from loadtests.overhead.gateways import FLOOR, NAMES, WARMGATE
    from loadtests.overhead.plan import PARTS, Settings, run_count
    from loadtests.overhead.process_tree import ProcessGoneError
    from loadtests.overhead.rounds import Benchmark
    from loadtests.stack import ChildFailedError

    chosen = NAMES if gateways is None else _names(gateways, NAMES, "--gateways")
    if FLOOR in chosen and shutil.which("nginx") is None:
        if gateways is not None:
            raise click.ClickException("nginx is not on PATH")
        chosen = tuple(name for name in chosen if name != FLOOR)
    parts = _names(only, PARTS, "--only")
    if quick:
        given = click.core.ParameterSource.COMMANDLINE
        rounds, seconds, warmup, sizes = (
            context.params[name] if context.get_parameter_source(name) is given else value
            for name, value in _QUICK.items()
        )
    settings = Settings(
        gateways=chosen,
        rounds=rounds,
        seconds=seconds,
        warmup_s=warmup,
        sizes_kb=_numbers(sizes, "--sizes"),
        streams=_numbers(streams, "--streams"),
        parts=tuple(part for part in PARTS if part in parts),
        connections=connections,
        interval_ms=interval_ms,
        use_wrk=use_wrk and shutil.which("wrk") is not None,
    )
    venv = peers_venv or peers.default_directory()

    command = shlex.join(["warmgate", *sys.argv[1:]])
    result = report.Result(settings, {}, machine.describe(), command)

    async def measure(directory: Path) -> None:
        if WARMGATE in chosen:
            result.versions[WARMGATE] = described()
        if wanted := [name for name in chosen if name in peers.PACKAGES]:
            result.versions |= await peers.ensure(venv, wanted, lambda text: click.echo(text, err=True))
        if FLOOR in chosen:
            result.versions[FLOOR] = await peers.nginx_version()
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
            bar = bars.add_task("", total=run_count(settings))

            def about_to(what: str) -> None:
                bars.update(bar, description=what, advance=0 if "start of" in what else 1)

            result.load_averages.append(machine.load_average())
            async with aclosing(Benchmark(settings, venv, directory, about_to).run()) as rounds_of_runs:
                async for runs in rounds_of_runs:
                    result.runs += runs
                    result.load_averages.append(machine.load_average())
                    report.write(result, output, markdown)

    failure: Exception | None = None
    with ExitStack() as undo:
        if logs is None:
            directory = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="warmgate-overhead-")))
        else:
            directory = logs.absolute()
            directory.mkdir(parents=True, exist_ok=True)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(measure(directory))
        except (ChildFailedError, ProcessGoneError, peers.PeersError) as error:
            failure = error

    if result.runs:
        console = Console()
        console.print(report.terminal_table(result))
        for note in report.notes(result):
            console.print(note, soft_wrap=True, highlight=False, markup=False)
    if use_wrk and not settings.use_wrk:
        click.echo("wrk is not on PATH: our own generator was used.", err=True)
    if failure is not None:
        raise click.ClickException(str(failure))
    if report.errors_of(result.runs, WARMGATE):
        sys.exit(1)
