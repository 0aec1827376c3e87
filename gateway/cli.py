"""The command line: serve, check, estimate, explain, replay, bench."""

import sys
from pathlib import Path
from typing import Any

import click
import uvloop

from gateway.bench_command import bench
from gateway.config import Config, ConfigError, load
from gateway.estimate_command import estimate
from gateway.explain_command import explain
from gateway.process import configure_logging
from gateway.replay_command import replay
from gateway.version import described


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(described(), prog_name="warmgate")
def main() -> None:
    """Warmgate: a cache-aware routing gateway for fleets of vLLM replicas."""


_CONFIG = click.option(
    "-c", "--config", "config_path", type=click.Path(dir_okay=False, path_type=Path), help="gateway.yaml"
)


@main.command()
@_CONFIG
@click.option("--replica", "replicas", multiple=True, metavar="URL", help="A vLLM replica; repeat for each.")
@click.option("--host", help="Address of the API port.")
@click.option("--port", type=click.IntRange(0, 65535), help="API port; 0 picks one.")
@click.option("--admin-host", help="Address of the admin port.")
@click.option("--admin-port", type=click.IntRange(0, 65535), help="Admin port; 0 picks one.")
@click.option("--policy", help="Routing policy.")
@click.option("--workers", type=click.IntRange(1), help="Worker processes.")
@click.option("--redis", metavar="URL", help="Redis that shares the prefix map.")
@click.option("--hardware", help="Hardware of the replicas, e.g. h100-sxm.")
@click.option("--model", help="Model shape of the replicas, e.g. llama-3.1-8b, or a config.json.")
@click.option("--api-key", envvar="WARMGATE_API_KEY", help="Key that clients must send.")
@click.option("--seed", type=int, help="Seed of the policy.")
def serve(config_path: Path | None, replicas: tuple[str, ...], **flags: Any) -> None:
    """Run the gateway. Flags win over the file."""
    from gateway.serve import serve as run

    config = _configuration(config_path, replicas, **flags)
    configure_logging(config.logging.level)
    sys.exit(uvloop.run(run(config, config_path, lambda: _read(config_path, replicas, **flags))))


@main.command()
@_CONFIG
@click.option("--replica", "replicas", multiple=True, metavar="URL", help="A vLLM replica; repeat for each.")
def check(config_path: Path | None, replicas: tuple[str, ...]) -> None:
    """Validate a configuration: exit 0 if `serve` would take it, 2 if not."""
    from gateway.app import summary

    config = _configuration(config_path, replicas)
    for name, value in summary(config).items():
        click.echo(f"{name}: {value}")
    click.echo("configuration is valid")


main.add_command(estimate)
main.add_command(bench)
main.add_command(replay)
main.add_command(explain)


def _read(
    config_path: Path | None,
    replicas: tuple[str, ...],
    host: str | None = None,
    port: int | None = None,
    admin_host: str | None = None,
    admin_port: int | None = None,
    policy: str | None = None,
    workers: int | None = None,
    redis: str | None = None,
    hardware: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    seed: int | None = None,
) -> Config:
    """Read the file, lay the flags over it, and validate the whole.

    Raises:
        ValueError: it cannot be used (ConfigError among them).
        OSError: a file it names cannot be read.
    """
    from gateway.app import validate
    from gateway.workers.redis_server import find_server

    flags: dict[str, Any] = {
        "listen": {"host": host, "port": port, "workers": workers},
        "admin": {"host": admin_host, "port": admin_port},
        "routing": {"policy": policy, "seed": seed},
        "auth": {"client_keys": [api_key] if api_key else None},
        "replicas": [{"url": url} for url in replicas] or None,
        "hardware": hardware,
        "model": model,
        "redis": redis,
    }
    config = load(config_path, _given(flags))
    validate(config)
    if config.listen.workers > 1 and config.redis is None:
        find_server()
    return config


def _configuration(config_path: Path | None, replicas: tuple[str, ...], **flags: Any) -> Config:
    try:
        return _read(config_path, replicas, **flags)
    except (ConfigError, ValueError, OSError) as error:
        click.echo(f"warmgate: invalid configuration\n{error}", err=True)
        sys.exit(2)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in flags.items():
        if isinstance(value, dict):
            inner = _given(value)
            if inner:
                given[name] = inner
        elif value is not None:
            given[name] = value
    return given


if __name__ == "__main__":
    main()
