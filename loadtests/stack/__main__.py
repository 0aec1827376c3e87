"""`python -m loadtests.stack`: a fleet and a gateway to play with, or to run the load test against."""

import asyncio
import signal
import sys
from dataclasses import replace
from pathlib import Path

import click
import uvloop

from loadtests.sse_client import ChatClient
from loadtests.stack.launch import FleetOptions, GatewayOptions, Stack
from loadtests.stack.ports import PortTakenError
from loadtests.stack.processes import ChildFailedError, bound_to_this_process

_LOCUSTFILE = Path(__file__).parent.parent / "locustfile.py"
_LOCUST_DEFAULTS = ("--users", "8", "--spawn-rate", "8", "--run-time", "20s")


def banner(stack: Stack, model: str, fleet: str) -> str:
    """What to do with a stack that runs.

    Args:
        stack: it.
        model: model name that the replicas serve.
        fleet: what the replicas are, in words.
    """
    body = (
        f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], '
        f'"max_tokens": 32, "stream": true}}'
    )
    return f"""
Warmgate serves {model} on {stack.url}, from {fleet}. Try:

  curl -N {stack.url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{body}'

Metrics: {stack.admin_url}/metrics    Stop: Ctrl-C
"""


async def _run_locust(stack: Stack, model: str, arguments: tuple[str, ...]) -> int:
    """Run the load test to its end; returns its exit status."""
    locust = [sys.executable, "-m", "locust", "--locustfile", str(_LOCUSTFILE), "--headless", "--only-summary"]
    options = ["--host", stack.url, "--model", model, *_LOCUST_DEFAULTS, *arguments]
    process = await asyncio.create_subprocess_exec(*bound_to_this_process([*locust, *options]))
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def _serve(fleet: FleetOptions | tuple[str, ...], gateway: GatewayOptions, locust: tuple[str, ...] | None) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    # Beside Locust's report the gateway's line per request would only be in the way.
    echo = None if locust is not None else lambda name, line: click.echo(f"{name} | {line}")
    stack = Stack(fleet, gateway, echo)

    def stop() -> None:
        """The first signal asks for an orderly end, the second for an end."""
        if task.cancelling():
            stack.kill()
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        async with stack:
            async with ChatClient(stack.url) as client:
                model = await client.first_model()
            failure = asyncio.create_task(stack.first_failure())
            if locust is None:
                click.echo(banner(stack, model, _describe(fleet, stack)))
                raise await failure
            load_test = asyncio.create_task(_run_locust(stack, model, locust))
            try:
                await asyncio.wait({failure, load_test}, return_when=asyncio.FIRST_COMPLETED)
                if not load_test.done():
                    raise failure.result()
                return load_test.result()
            finally:
                failure.cancel()
                load_test.cancel()
                await asyncio.wait({load_test})
    except asyncio.CancelledError:
        # Asked for by a signal: a clean end when serving, an unfinished load test otherwise.
        return 0 if locust is None else 130
    except (PortTakenError, ChildFailedError, RuntimeError) as error:
        click.echo(f"error: {error}", err=True)
        return 1


def _describe(fleet: FleetOptions | tuple[str, ...], stack: Stack) -> str:
    if isinstance(fleet, tuple):
        return f"{len(fleet)} replicas: {' '.join(fleet)}"
    pace = "" if fleet.speedup == 1 else f", {fleet.speedup:g} times real time"
    return f"{fleet.replicas} simulated replicas ({fleet.hardware}{pace}): {' '.join(stack.replica_urls)}"


def _with_default(context: click.Context, name: str, value: int) -> int | None:
    """Fixed ports for hand use; a load test takes free ones unless told, to run beside what runs."""
    given: int | None = context.params[name]
    return value if given is None and not context.params["run_locust"] else given


_port = click.IntRange(1, 65535)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--replica", "replica_urls", multiple=True, metavar="URL", help="Use this replica; repeatable.")
@click.option("--replicas", type=click.IntRange(min=1), default=4, show_default=True, help="Simulated replicas.")
@click.option("--replica-processes", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--first-replica-port", type=_port, help="Simulated replicas listen from here on.  [default: 8101]")
@click.option("--hardware", default="h100-sxm", show_default=True, help="Card of the simulated replicas.")
@click.option("--model", default="llama-3.1-8b", show_default=True, help="Model of the simulated replicas.")
@click.option("--speedup", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True)
@click.option("--port", type=_port, help="Port of the gateway.  [default: 8000]")
@click.option("--admin-port", type=_port, help="Port of the gateway's admin side.  [default: 8001]")
@click.option("--policy", help="Routing policy; the gateway's default when not given.")
@click.option("--run-locust", is_flag=True, help="Run the load test, then stop. Further options go to Locust.")
@click.argument("locust_arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def main(
    context: click.Context,
    replica_urls: tuple[str, ...],
    replicas: int,
    replica_processes: int,
    first_replica_port: int | None,
    hardware: str,
    model: str,
    speedup: float,
    port: int | None,
    admin_port: int | None,
    policy: str | None,
    run_locust: bool,
    locust_arguments: tuple[str, ...],
) -> None:
    """Start simulated replicas, or use those given with --replica, and a gateway in front of them."""
    if locust_arguments and not run_locust:
        raise click.UsageError(f"unknown arguments: {' '.join(locust_arguments)}", context)
    gateway = GatewayOptions(
        port=_with_default(context, "port", 8000),
        admin_port=_with_default(context, "admin_port", 8001),
        policy=policy,
    )
    fleet: FleetOptions | tuple[str, ...] = replica_urls
    if not replica_urls:
        fleet = FleetOptions(
            replicas=replicas,
            first_port=_with_default(context, "first_replica_port", 8101),
            processes=replica_processes,
            hardware=hardware,
            model=model,
            speedup=speedup,
        )
        gateway = replace(gateway, hardware=hardware, model=model)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_serve(fleet, gateway, locust_arguments if run_locust else None))
    sys.exit(status)


if __name__ == "__main__":
    main()
