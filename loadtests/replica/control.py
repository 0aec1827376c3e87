"""The admin paths of the simulation: faults, state, reset.

On every replica's own port under /sim, and for all replicas of a process on a control port under
/sim/{port}, which stays reachable when a replica refuses connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web

from loadtests.replica.answering import json_response
from loadtests.replica.errors import ApiError
from loadtests.replica.replica import REPLICA, Replica, Traffic

REPLICAS = web.AppKey("replicas", Mapping[int, Replica])


def control_routes(prefix: str) -> list[web.RouteDef]:
    """The admin routes below `prefix`."""
    return [
        web.post(f"{prefix}/faults", _set_faults),
        web.get(f"{prefix}/faults", _get_faults),
        web.get(f"{prefix}/state", _state),
        web.post(f"{prefix}/reset", _reset),
        web.get(f"{prefix}/kv_blocks", _kv_blocks),
        web.post(f"{prefix}/kv_events", _kv_events),
        web.post(f"{prefix}/kv_transfer", _kv_transfer),
    ]


def control_app(replicas: Mapping[int, Replica]) -> web.Application:
    """The application of a control port.

    Args:
        replicas: by port.
    """
    app = web.Application()
    app[REPLICAS] = replicas
    app.add_routes(control_routes("/sim/{port:\\d+}"))
    return app


def state(replica: Replica) -> dict[str, Any]:
    """What a replica is doing, and what it has done."""
    engine = replica.engine
    return {
        **asdict(replica.traffic),
        "generations": replica.driver.in_flight,
        "engine": {
            "injected": engine.injected,
            "completed": engine.completed,
            "aborted": engine.aborted,
            "running": engine.running,
            "waiting": engine.waiting,
            "decoding": engine.decoding,
            "context_tokens": engine.context_tokens,
            "preemptions": engine.preemptions,
            "prefix_queried_tokens": engine.prefix_queried_tokens,
            "prefix_hit_tokens": engine.prefix_hit_tokens,
            "computed_prompt_tokens": engine.computed_prompt_tokens,
            "generated_tokens": engine.generated_tokens,
            "kv_usage": engine.kv_usage,
            "total_blocks": engine.pool.total_blocks,
            "used_blocks": engine.pool.used_blocks,
            "cached_blocks": engine.pool.cached_hashes,
            "steps": engine.steps,
        },
        "kv_transfer": None
        if replica.kv_transfer is None
        else {
            "holding": replica.kv_transfer.holding,
            "expired": replica.kv_transfer.expired,
            "sent": replica.kv_transfer.sent,
            "received": replica.kv_transfer.received,
        },
        "faults": replica.faults.current.as_json(),
    }


def _replica(request: web.Request) -> Replica:
    if REPLICA in request.app:
        return request.app[REPLICA]
    replica = request.app[REPLICAS].get(int(request.match_info["port"]))
    if replica is None:
        raise web.HTTPNotFound(text="no replica on this port\n")
    return replica


async def _set_faults(request: web.Request) -> web.Response:
    replica = _replica(request)
    try:
        change = orjson.loads(await request.read())
        if change is not None and not isinstance(change, dict):
            raise ValueError("faults must be a JSON object or null")
        faults = replica.faults.merge(change)
    except ValueError as error:
        return json_response(ApiError(400, str(error)).body(), 400)
    return json_response(faults.as_json())


async def _get_faults(request: web.Request) -> web.Response:
    return json_response(_replica(request).faults.current.as_json())


async def _state(request: web.Request) -> web.Response:
    return json_response(state(_replica(request)))


async def _kv_blocks(request: web.Request) -> web.Response:
    """The prefix cache: block hash -> physical blocks."""
    return json_response({str(name): copies for name, copies in _replica(request).engine.pool.cached().items()})


async def _kv_events(request: web.Request) -> web.Response:
    """Lose the next `drop` messages of the KV-event feed; a replay still has them."""
    feed = _replica(request).kv_feed
    if feed is None:
        raise web.HTTPNotFound(text="no KV events here\n")
    feed.publisher.drop = int(orjson.loads(await request.read())["drop"])
    return json_response({"drop": feed.publisher.drop})


async def _kv_transfer(request: web.Request) -> web.Response:
    """Another replica reads KV."""
    transfer = _replica(request).kv_transfer
    if transfer is None:
        raise web.HTTPNotFound(text="no KV connector here\n")
    try:
        return json_response(await transfer.read(orjson.loads(await request.read())))
    except ApiError as error:
        return json_response(error.body(), error.status)


async def _reset(request: web.Request) -> web.Response:
    replica = _replica(request)
    replica.reset_prefix_cache()
    in_flight = replica.traffic.in_flight
    replica.traffic = Traffic(in_flight=in_flight, in_flight_max=in_flight)
    return json_response(state(replica))
