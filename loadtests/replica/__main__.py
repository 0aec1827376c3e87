"""Command line of the simulated replica: `python -m loadtests.replica --port 8101 ...`."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from contextlib import AsyncExitStack

import click
import uvloop
from aiohttp import web

from gateway.estimator.transfer import LINKS
from loadtests.replica.config import ReplicaConfig
from loadtests.replica.control import control_app
from loadtests.replica.server import start_replica


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--port", "ports", type=int, multiple=True, required=True, help="Of a replica; repeat for more.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--hardware", default="h100-sxm", help="Card of the estimator's list.")
@click.option("--model", default="llama-3.1-8b", help="Of the estimator's list, or path of a config.json.")
@click.option("--tensor-parallel", type=click.IntRange(1), default=1, help="Cards that share every layer.")
@click.option("--speedup", type=float, default=1.0, help="Engine seconds per wall second.")
@click.option("--served-model-name", "served_model_names", multiple=True, help="Default: the model's name.")
@click.option("--lora", "loras", multiple=True, help="Name of an adapter; repeat for more.")
@click.option("--kv-tokens", type=click.IntRange(1), help="KV memory; default what the cards hold.")
@click.option("--max-num-seqs", type=click.IntRange(1), default=256, help="Requests that run at a time.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=8192, help="Tokens per step.")
@click.option("--max-model-len", type=click.IntRange(1), default=131_072, help="Prompt and answer together.")
@click.option("--block-size", type=click.IntRange(1), default=16, help="Tokens per KV block.")
@click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True, help="Reuse prefixes.")
@click.option("--step-overhead-ms", type=float, default=0.0, help="Constant part of every step.")
@click.option("--stream-interval", type=click.IntRange(1), default=1, help="Tokens per streamed chunk.")
@click.option("--api-key", help="Asked for under /v1.")
@click.option(
    "--enable-prompt-tokens-details/--no-enable-prompt-tokens-details",
    default=True,
    help="Tell cached tokens in the usage.",
)
@click.option("--bytes-per-token", type=click.IntRange(1, 7), default=4, help="UTF-8 bytes of a token.")
@click.option("--seed", type=int, default=0, help="Other seeds make other answers.")
@click.option("--engine-version", default="0.32.0", help="Of vLLM, as it tells; empty for no /version.")
@click.option("--kv-connector", type=click.Choice(["none", "nixl"]), default="none", help="To move KV to others.")
@click.option("--kv-link", type=click.Choice(list(LINKS)), default="400g", help="What joins it with others.")
@click.option("--kv-link-latency-ms", type=float, default=2.0, help="Constant part of a transfer.")
@click.option("--kv-lease-s", type=float, default=30.0, help="How long KV is kept for others.")
@click.option("--kv-load-failure-policy", type=click.Choice(["fail", "recompute"]), default="fail")
@click.option("--kv-events/--no-kv-events", default=False, help="Publish KV events as vLLM does.")
@click.option(
    "--kv-events-endpoint", default="tcp://*:0", help="Bound if its host is *, else connected to; port 0: any."
)
@click.option("--kv-events-replay-endpoint", default="tcp://*:0", help="Where missed events are sent again.")
@click.option("--control-port", type=int, help="Serves /sim/{port}/... for all replicas of the process.")
def main(ports: tuple[int, ...], host: str, control_port: int | None, **options: object) -> None:
    """Serve simulated vLLM replicas, one per port, each with its own engine."""
    try:
        config = ReplicaConfig(**options)  # type: ignore[arg-type]
        uvloop.run(_serve(config, host, ports, control_port))
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


async def _serve(config: ReplicaConfig, host: str, ports: tuple[int, ...], control_port: int | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        replicas = {}
        for port in ports:
            running = await stack.enter_async_context(await start_replica(config, host=host, port=port))
            replicas[running.port] = running
        if control_port is not None:
            for running in replicas.values():
                running.refuse_by_not_listening()
            app = control_app({port: running.replica for port, running in replicas.items()})
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, host, control_port).start()
        # What is alive now lives on: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await stop.wait()


if __name__ == "__main__":
    main()
