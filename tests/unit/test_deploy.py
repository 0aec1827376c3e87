"""The files of deploy/ agree with each other and with the program. There is no container engine in these tests."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from click.testing import CliRunner

from gateway.cli import main
from gateway.config import load
from loadtests.replica.__main__ import main as replica

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def listening() -> set[str]:
    """host:port of everything in the compose file that answers /metrics."""
    config = load(DEPLOY / "gateway.yaml", {})
    ports = [word.removeprefix("--port=") for word in SERVICES["replicas"]["command"] if "--port=" in word]
    return {f"gateway:{config.admin.port}", *(f"replicas:{port}" for port in ports)}


def test_the_services() -> None:
    assert {"gateway", "replicas", "redis", "prometheus"} <= set(SERVICES)


@pytest.mark.parametrize("name", SERVICES)
def test_files_of_a_service_exist(name: str) -> None:
    service = SERVICES[name]
    if build := service.get("build"):
        context = DEPLOY / build["context"]
        assert (context / "pyproject.toml").is_file()
        assert (context / build["dockerfile"]).is_file()
    for volume in service.get("volumes", ()):
        source = volume.split(":")[0]
        assert (DEPLOY / source).is_file(), source


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_waits_for_services_that_can_be_waited_for(name: str) -> None:
    waits = SERVICES[name].get("depends_on", {})
    assert set(waits) <= set(SERVICES)
    for other, wait in waits.items() if isinstance(waits, dict) else ():
        assert wait == {"condition": "service_healthy"}
        assert "healthcheck" in SERVICES[other]


def test_the_gateway_knows_the_replicas_of_the_compose_file() -> None:
    config = load(DEPLOY / "gateway.yaml", {})
    urls = {urlsplit(replica.url).netloc for replica in config.replicas}
    assert urls == {target for target in listening() if target.startswith("replicas:")}
    assert f"{config.listen.port}:{config.listen.port}" in SERVICES["gateway"]["ports"]
    assert f"127.0.0.1:{config.admin.port}:{config.admin.port}" in SERVICES["gateway"]["ports"]


def test_the_workers_share_through_the_redis_of_the_compose_file() -> None:
    config = load(DEPLOY / "gateway.yaml", {})
    assert config.listen.workers > 1
    assert config.redis is not None
    address = urlsplit(config.redis.url.get_secret_value())
    assert (address.scheme, address.netloc) == ("redis", "redis:6379")
    assert {"redis", "replicas"} <= set(SERVICES["gateway"]["depends_on"])


def test_the_gateway_takes_its_command_line_and_configuration() -> None:
    command, *arguments = SERVICES["gateway"]["command"]
    parsed = main.commands[command].make_context(command, arguments)
    mounted = [volume.split(":")[1] for volume in SERVICES["gateway"]["volumes"]]
    assert [str(parsed.params["config_path"])] == mounted
    checked = CliRunner().invoke(main, ["check", "-c", str(DEPLOY / "gateway.yaml")])
    assert checked.exit_code == 0, checked.output


def test_the_replicas_take_their_command_line() -> None:
    assert SERVICES["replicas"]["entrypoint"] == ["python", "-m", "loadtests.replica"]
    parsed = replica.make_context("replica", list(SERVICES["replicas"]["command"]))
    config = load(DEPLOY / "gateway.yaml", {})
    assert (parsed.params["hardware"], parsed.params["model"]) == (config.hardware, config.model)
    assert parsed.params["host"] == "0.0.0.0"
    checked = " ".join(SERVICES["replicas"]["healthcheck"]["test"])
    assert any(f":{port}/health" in checked for port in parsed.params["ports"])


def test_prometheus_scrapes_all_of_them() -> None:
    document = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    targets = {
        target for job in document["scrape_configs"] for group in job["static_configs"] for target in group["targets"]
    }
    assert targets == listening()


def test_the_gateway_drains_before_it_is_killed() -> None:
    config = load(DEPLOY / "gateway.yaml", {})
    grace_s = float(SERVICES["gateway"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > config.timeouts.drain_grace_s + config.timeouts.drain_s


def test_the_image_copies_what_exists_and_does_not_run_as_root() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    sources = [
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    ]
    assert {"pyproject.toml", "gateway", "policies", "loadtests"} <= set(sources)
    assert [source for source in sources if not (DEPLOY.parent / source).exists()] == []
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert [s for s in sources if f"!{s}" not in ignored and f"!{s.split('/')[0]}" not in ignored] == []
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users
    assert users[-1] not in ("root", "0")
    assert any(re.search(r"127\.0\.0\.1:8001/health", line) for line in lines)
