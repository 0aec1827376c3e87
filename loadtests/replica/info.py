"""Endpoints that tell of the replica: models, health, version, load, metrics."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from aiohttp import web

from loadtests.replica.answering import json_response
from loadtests.replica.metrics import CONTENT_TYPE
from loadtests.replica.replica import REPLICA, Replica


async def models(request: web.Request) -> web.Response:
    """GET /v1/models: the model under all its names, and the adapters."""
    replica = request.app[REPLICA]
    names = replica.config.model_names
    cards = [_card(replica, name, replica.config.model, None) for name in names]
    cards += [_card(replica, lora, f"loras/{lora}", names[0]) for lora in replica.config.loras]
    return json_response({"object": "list", "data": cards})


async def health(request: web.Request) -> web.Response:
    """GET /health."""
    faults = request.app[REPLICA].faults.current
    if faults.hang_health:
        await asyncio.Event().wait()
    return web.Response(status=faults.health_status or 200)


async def ping(request: web.Request) -> web.Response:
    """GET or POST /ping."""
    return await health(request)


async def version(request: web.Request) -> web.Response:
    """GET /version."""
    engine_version = request.app[REPLICA].config.engine_version
    if not engine_version:
        raise web.HTTPNotFound
    return json_response({"version": engine_version})


async def load(request: web.Request) -> web.Response:
    """GET /load: requests in flight."""
    return json_response({"server_load": request.app[REPLICA].traffic.in_flight})


async def kv_event_sources(request: web.Request) -> web.Response:
    """GET /kv_event_sources: where events are published, by data-parallel rank."""
    feed = request.app[REPLICA].kv_feed
    return json_response({} if feed is None else {str(feed.publisher.rank): feed.publisher.source()})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics."""
    return web.Response(body=request.app[REPLICA].page.render(), headers={"content-type": CONTENT_TYPE})


def _card(replica: Replica, name: str, root: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": replica.created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": replica.max_model_len if parent is None else None,
        "permission": [
            {
                "id": f"modelperm-{os.urandom(8).hex()}",
                "object": "model_permission",
                "created": replica.created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }
