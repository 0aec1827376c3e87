"""Connecting to Redis: one server, Sentinel or Cluster, from a URL.

redis://[user:password@]host[:port][/db]                     one server; a Cluster's node is recognised
rediss://...                                                 the same over TLS
redis+sentinel://[user:password@]host[:port],.../service     the primary that these Sentinels name
redis+cluster://[user:password@]host[:port],...              Cluster
rediss+sentinel://, rediss+cluster://                        the same over TLS
unix://[user:password@]/path                                 one server on this machine
"""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisClusterException, RedisError

_URL = re.compile(
    r"(?P<scheme>rediss?)\+(?P<kind>sentinel|cluster)://(?:(?P<user>[^:@/]*)(?::(?P<password>[^@/]*))?@)?"
    r"(?P<hosts>[^/@?]+)(?:/(?P<path>[^?]*))?"
)
_SIMPLE = re.compile(r"(rediss?|unix)://\S+")
_PORTS = {"cluster": 6379, "sentinel": 26379}

BLOCK_MS = 500
"""How long a read waits for something new."""

Client = Redis | RedisCluster

FAULTS = (RedisError, RedisClusterException, OSError, TimeoutError, asyncio.IncompleteReadError)
"""What a client raises when Redis is not there or not well; the second is no `RedisError`."""


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """Where Redis is and how to get in.

    Attributes:
        url: see the module. May carry user and password.
        username, password: instead of those in the URL.
        sentinel_username, sentinel_password: those of the Sentinels, which have their own.
        ca, cert, key: PEM files, for TLS.
        timeout_s: for a connection, and for an answer.
    """

    url: str
    username: str | None = None
    password: str | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    timeout_s: float = 1.0


def check_url(url: str) -> None:
    """Check a URL's form.

    Raises:
        ValueError: it is none that `connect` takes. The message does not repeat it: it may carry a password.
    """
    match = _URL.fullmatch(url)
    if match is None:
        if _SIMPLE.fullmatch(url) is None:
            raise ValueError(
                "redis: the URL must be redis://host:port, rediss://..., redis+sentinel://... or unix://..."
            )
        return
    _hosts(match)
    if match["kind"] == "sentinel" and not (match["path"] or "").split("/")[0]:
        raise ValueError("redis: a Sentinel URL must name the service: redis+sentinel://host:port,host:port/service")


def connect(target: RedisTarget) -> Client:
    """Make a client; nothing is sent yet.

    Raises:
        ValueError: the URL is malformed.
    """
    check_url(target.url)
    options = _options(target)
    match = _URL.fullmatch(target.url)
    if match is None:
        tls = _tls(target) if target.url.startswith("rediss:") else {}
        return Redis.from_url(target.url, **options, **tls)
    if match["user"]:
        options.setdefault("username", unquote(match["user"]))
    if match["password"]:
        options.setdefault("password", unquote(match["password"]))
    if match["scheme"] == "rediss":
        options |= {"ssl": True, **_tls(target)}
    hosts = _hosts(match)
    if match["kind"] == "cluster":
        return RedisCluster(startup_nodes=[ClusterNode(host, port) for host, port in hosts], **options)
    service, _, database = (match["path"] or "").partition("/")
    beside = {key: value for key, value in options.items() if key not in ("username", "password")}
    if target.sentinel_username is not None:
        beside["username"] = target.sentinel_username
    if target.sentinel_password is not None:
        beside["password"] = target.sentinel_password
    sentinel = cast(Any, Sentinel)(hosts, sentinel_kwargs=beside, **options)
    return cast(Redis, sentinel.master_for(service, db=int(database or 0)))


async def cluster_of(client: Client, target: RedisTarget) -> Client:
    """Return a Cluster's client if a plain client has reached a node of one; else the client itself."""
    if isinstance(client, RedisCluster):
        await client.initialize()
        return client
    try:
        info = await client.info("cluster")
    except NoPermissionError:
        return client
    if not info.get("cluster_enabled"):
        return client
    options = _options(target)
    tls = _tls(target) if target.url.startswith("rediss:") else {}
    cluster = RedisCluster.from_url(target.url, **options, **tls)
    await client.aclose()
    try:
        await cluster.initialize()
    except BaseException:
        await close(cluster)
        raise
    return cluster


async def close(client: Client) -> None:
    """Close all of a client's connections, also those that the library leaves open."""
    with contextlib.suppress(*FAULTS):
        await client.aclose()
    nodes: list[Any] = []
    if isinstance(client, RedisCluster):
        # One that could not be initialised closes nothing.
        nodes += [*client.nodes_manager.startup_nodes.values(), *client.nodes_manager.nodes_cache.values()]
    else:
        sentinels = getattr(client.connection_pool, "sentinel_manager", None)
        nodes += [sentinel.connection_pool for sentinel in sentinels.sentinels] if sentinels is not None else []
    for node in nodes:
        with contextlib.suppress(*FAULTS):
            await node.disconnect()


def _options(target: RedisTarget) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_timeout": target.timeout_s + BLOCK_MS / 1000.0,
        "socket_connect_timeout": target.timeout_s,
        # Whoever fails begins a new round; a library that tries again by itself would hide a hung server.
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "client_name": "warmgate",
    }
    if target.username is not None:
        options["username"] = target.username
    if target.password is not None:
        options["password"] = target.password
    return options


def _tls(target: RedisTarget) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if target.ca is not None:
        options["ssl_ca_certs"] = str(target.ca)
    if target.cert is not None:
        options["ssl_certfile"] = str(target.cert)
    if target.key is not None:
        options["ssl_keyfile"] = str(target.key)
    return options


def _hosts(match: "re.Match[str]") -> Sequence[tuple[str, int]]:
    hosts = []
    for item in match["hosts"].split(","):
        host, colon, port = item.rpartition(":")
        if not colon or item.endswith("]"):
            host, port = item, str(_PORTS[match["kind"]])
        if not port.isdigit() or not 0 < int(port) < 65536 or not host:
            raise ValueError("redis: a host in the URL has no valid port")
        hosts.append((host.strip("[]"), int(port)))
    return hosts
