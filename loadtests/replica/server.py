"""A replica's HTTP server: routes, what happens to every request, start and stop."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from loadtests.engine import Engine
from loadtests.replica import info, pooling
from loadtests.replica.answering import client_request_id, json_response
from loadtests.replica.chat import chat_completions
from loadtests.replica.completions import completions
from loadtests.replica.config import ReplicaConfig
from loadtests.replica.control import control_routes, state
from loadtests.replica.errors import ApiError, error_body
from loadtests.replica.faults import NO_FAULTS, Faults, FaultSwitch
from loadtests.replica.generate import generate
from loadtests.replica.kv_transfer import KvTransfer
from loadtests.replica.messages import messages
from loadtests.replica.replica import FAULTS, REPLICA, Replica
from loadtests.replica.responses import responses
from loadtests.replica.tokenization import detokenize, render_chat_completion, tokenize
from loadtests.replica.wire import connection, end_connection, reset

_MAX_BODY_BYTES = 1 << 30
_SHUTDOWN_S = 0.1
_BACKLOG = 2048

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RunningReplica:
    """A replica that serves on a port of this process.

    Use `start_replica()`; end it with `close()` or as an async context manager.
    """

    def __init__(self, replica: Replica, runner: web.AppRunner, host: str, listener: socket.socket) -> None:
        self.replica = replica
        self.host = host
        self.port: int = listener.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        self._runner = runner
        self._site: web.SockSite | None = None
        self._listener: socket.socket | None = listener
        self._switching: set[asyncio.Task[None]] = set()

    @property
    def engine(self) -> Engine:
        """The engine behind the port."""
        return self.replica.engine

    @property
    def faults(self) -> FaultSwitch:
        """What goes wrong; `faults.merge({...})` as on POST /sim/faults."""
        return self.replica.faults

    def state(self) -> dict[str, Any]:
        """The same as GET /sim/state."""
        return state(self.replica)

    async def listen(self) -> None:
        """Accept connections, after `stop_listening()` on the same port again."""
        if self._site is not None:
            return
        if self._listener is None:
            self._listener = _bind(self.host, self.port)
        self._site = web.SockSite(self._runner, self._listener, backlog=_BACKLOG)
        await self._site.start()

    async def stop_listening(self) -> None:
        """Refuse new connections. Those that exist live on until their next request."""
        if self._site is not None:
            site, self._site, self._listener = self._site, None, None
            await site.stop()

    def refuse_by_not_listening(self) -> None:
        """Let the fault `refuse` close the port; its admin paths must be reachable elsewhere."""

        def switch(refuse: bool) -> None:
            task = asyncio.ensure_future(self.stop_listening() if refuse else self.listen())
            self._switching.add(task)
            task.add_done_callback(self._switching.discard)

        self.replica.faults.on_refuse = switch

    async def close(self) -> None:
        """Stop serving; requests in flight are cut off."""
        self.replica.close()
        if self.replica.kv_transfer is not None:
            await self.replica.kv_transfer.close()
        await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def start_replica(
    config: ReplicaConfig | None = None, *, host: str = "127.0.0.1", port: int = 0
) -> RunningReplica:
    """Serve a simulated replica on the running event loop.

    Args:
        config: what it is made of; default one h100-sxm with llama-3.1-8b in real time.
        host: address to listen on.
        port: port to listen on, 0 for a free one.

    Returns:
        The replica, listening.

    Raises:
        ValueError: the configuration makes no sense.
        OSError: the port is taken.
    """
    replica = Replica(config or ReplicaConfig())
    listener = _bind(host, port)
    runner = web.AppRunner(
        _application(replica),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=replica.config.keep_alive_s,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    running = RunningReplica(replica, runner, host, listener)
    if replica.config.kv_connector != "none":
        replica.kv_transfer = KvTransfer(replica, host, running.port)
    try:
        replica.publish_kv_events(host, running.port)
    except OSError:
        listener.close()
        raise
    await running.listen()
    return running


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def _application(replica: Replica) -> web.Application:
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_edge])
    app[REPLICA] = replica
    app.on_response_prepare.append(_common_headers)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/chat/completions/render", render_chat_completion),
            web.post("/v1/completions", completions),
            web.post("/v1/responses", responses),
            web.post("/v1/messages", messages),
            web.post("/inference/v1/generate", generate),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.post("/v1/embeddings", pooling.embeddings),
            web.post("/pooling", pooling.pooling),
            web.post("/classify", pooling.classify),
            *(web.post(path, pooling.score) for path in ("/score", "/v1/score")),
            *(web.post(path, pooling.rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
            web.get("/v1/models", info.models, allow_head=False),
            web.get("/health", info.health, allow_head=False),
            web.get("/ping", info.ping, allow_head=False),
            web.post("/ping", info.ping),
            web.get("/version", info.version, allow_head=False),
            web.get("/load", info.load, allow_head=False),
            web.get("/metrics", info.metrics, allow_head=False),
            web.get("/kv_event_sources", info.kv_event_sources, allow_head=False),
            *control_routes("/sim"),
        ]
    )
    return app


async def _common_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["server"] = "uvicorn"
    response.headers["vary"] = "Origin"
    response.headers["x-request-id"] = client_request_id(request) or uuid.uuid4().hex


@web.middleware
async def _edge(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Around every request: counters, faults, API key, errors."""
    replica = request.app[REPLICA]
    if request.path.startswith("/sim/"):
        return await handler(request)
    if replica.faults.current.refuse:
        reset(connection(request))
        await asyncio.Event().wait()
    if request.method != "POST":
        return await _answered(request, handler)
    faults = replica.faults.take()
    request[FAULTS] = faults
    traffic = replica.traffic
    traffic.requests_seen += 1
    traffic.in_flight += 1
    traffic.in_flight_max = max(traffic.in_flight_max, traffic.in_flight)
    completed = False
    try:
        if faults is NO_FAULTS:
            response = await _answered(request, handler)
        else:
            response = await _faulty(request, handler, faults)
        completed = True
        return response
    finally:
        # `/sim/reset` may have replaced the counters meanwhile.
        traffic = replica.traffic
        traffic.in_flight -= 1
        if completed:
            traffic.completed += 1
        else:
            traffic.aborted_seen += 1


async def _faulty(request: web.Request, handler: Handler, faults: Faults) -> web.StreamResponse:
    if faults.delay_headers_s:
        await asyncio.sleep(faults.delay_headers_s)
    if faults.silence:
        await request.read()
        await asyncio.Event().wait()
    if faults.status is not None:
        await request.read()
        response = json_response(error_body(faults.status, "a simulated fault", "InternalServerError"), faults.status)
        if faults.retry_after_s is not None:
            response.headers["retry-after"] = f"{faults.retry_after_s:g}"
        return response
    answer = await _answered(request, handler)
    if faults.die_after_chunks is not None and isinstance(answer, web.Response) and not answer.prepared:
        await _half(request, answer)
        await end_connection(connection(request), faults.die_mode if faults.die_mode != "eof" else "close")
    return answer


async def _half(request: web.Request, answer: web.Response) -> None:
    """Send the head of an answer and half of its body."""
    body = answer.body
    assert isinstance(body, bytes)
    partial = web.StreamResponse(status=answer.status, headers=answer.headers)
    partial.content_length = len(body)
    await partial.prepare(request)
    await partial.write(body[: len(body) // 2])


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The handler's answer, or the error that vLLM's server would send."""
    api_key = request.app[REPLICA].config.api_key
    if (
        api_key is not None
        and request.path.startswith("/v1")
        and request.headers.get("authorization") != f"Bearer {api_key}"
    ):
        return json_response({"error": "Unauthorized"}, 401)
    rank = request.headers.get("x-data-parallel-rank", "0")
    if rank != "0":
        message = f"data_parallel_rank {rank} is out of range [0, 1)."
        return json_response(error_body(400, message, "BadRequestError"), 400)
    try:
        return await handler(request)
    except ApiError as error:
        return json_response(error.body(), error.status)
    except web.HTTPNotFound:
        return json_response({"detail": "Not Found"}, 404)
    except web.HTTPMethodNotAllowed as error:
        response = json_response({"detail": "Method Not Allowed"}, 405)
        response.headers["allow"] = ", ".join(sorted(error.allowed_methods))
        return response
