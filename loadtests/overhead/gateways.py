"""How each gateway is started: with its cache-aware policy, metrics and logs on, and otherwise as it comes."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loadtests.overhead import peers
from loadtests.stack.ports import LOOPBACK

WARMGATE = "warmgate"
FLOOR = "nginx"
"""No router: it neither parses bodies nor knows prefixes. What relaying costs at least."""
NAMES = (WARMGATE, *peers.PACKAGES, FLOOR)


@dataclass(frozen=True, slots=True)
class Place:
    """What a gateway is given."""

    replicas: tuple[str, ...]
    port: int
    admin_port: int
    """For its metrics."""
    directory: Path
    """For its files."""
    peers_venv: Path


def _warmgate(place: Place) -> list[str]:
    program = [sys.executable, "-m", "gateway.cli", "serve", "--host", LOOPBACK, "--port", str(place.port)]
    program += ["--admin-host", LOOPBACK, "--admin-port", str(place.admin_port)]
    # Without hardware and model the default policy has no times to predict, and would be measured at less than its job.
    program += ["--hardware", "h100-sxm", "--model", "llama-3.1-8b"]
    for url in place.replicas:
        program += ["--replica", url]
    return program


def _router(place: Place) -> list[str]:
    """Options that both Rust routers share."""
    options = ["--policy", "cache_aware", "--host", LOOPBACK, "--port", str(place.port)]
    return [*options, "--prometheus-port", str(place.admin_port), "--worker-urls", *place.replicas]


def _sglang(place: Place) -> list[str]:
    return [str(peers.command(place.peers_venv, "sglang")), "launch", *_router(place)]


def _vllm(place: Place) -> list[str]:
    return [str(peers.command(place.peers_venv, "vllm")), *_router(place)]


_NGINX = """
daemon off; worker_processes 1; pid nginx.pid; error_log stderr; {user}
events {{ worker_connections 8192; }}
http {{
  access_log access.log; client_max_body_size 0; client_body_buffer_size 1m;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi;
  scgi_temp_path scgi; keepalive_requests 1000000000;
  upstream replicas {{ {servers} keepalive 1024; keepalive_requests 1000000000; }}
  server {{
    listen {host}:{port} backlog=4096;
    location / {{
      proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


def _nginx(place: Place) -> list[str]:
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in place.replicas)
    user = "user root;" if os.geteuid() == 0 else ""
    text = _NGINX.format(user=user, servers=servers, host=LOOPBACK, port=place.port)
    path = place.directory / "nginx.conf"
    path.write_text(text, encoding="utf-8")
    return ["nginx", "-p", str(place.directory), "-c", str(path)]


_PROGRAMS: dict[str, Callable[[Place], list[str]]] = {
    WARMGATE: _warmgate,
    "sglang": _sglang,
    "vllm": _vllm,
    FLOOR: _nginx,
}


def program(name: str, place: Place, log: Path) -> list[str]:
    """Command line of a gateway whose output goes to a file.

    A shell redirects and then becomes the gateway: a pipe to the benchmark would make it pay for reading the logs.

    Args:
        name: one of `NAMES`.
        place: what it is given; configuration files are written to its directory.
        log: the file.
    """
    return ["/bin/sh", "-c", 'exec "$@" >"$0" 2>&1', str(log), *_PROGRAMS[name](place)]
