"""The admin port on aiohttp: the dashboard at /, /metrics, /health, /ready, and the JSON under /admin/."""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from gateway.admin.view import AdminView
from gateway.version import VERSION

_DASHBOARD = resources.files("gateway.admin").joinpath("dashboard.html").read_text(encoding="utf-8")
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
_MAX_BODY_BYTES = 128 << 20
"""Of a request that is to be rehearsed."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminServer:
    """The admin application and its socket."""

    def __init__(self, view: AdminView, *, key: str | None, config: dict[str, Any]) -> None:
        """Make the application.

        Args:
            view: answers its questions.
            key: bearer key of /admin/...; None lets loopback clients in, and only those.
            config: the configuration in force, secrets masked.
        """
        self._view = view
        self._key = key.encode() if key is not None else None
        self._config = config
        self._runner: web.AppRunner | None = None

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        application = web.Application(middlewares=[self._guard], client_max_size=_MAX_BODY_BYTES)
        application.router.add_get("/", self._dashboard)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/health", self._health)
        application.router.add_get("/ready", self._ready)
        application.router.add_get("/admin/replicas", self._replicas)
        application.router.add_get("/admin/workers", self._workers)
        application.router.add_get("/admin/config", self._show_config)
        application.router.add_get("/admin/decisions", self._explain)
        application.router.add_post("/admin/rehearsal", self._rehearse)
        return application

    def use_config(self, config: dict[str, Any]) -> None:
        """Show another configuration, secrets masked."""
        self._config = config

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port.

        Raises:
            OSError: the address cannot be bound.
        """
        self._runner = web.AppRunner(self.application(), access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Close the socket."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path.startswith("/admin/") and not self._allowed(request):
            return web.json_response(
                {"error": {"message": "Admin key needed.", "type": "authentication_error", "param": None,
                           "code": "invalid_admin_key"}},
                status=401,
            )  # fmt: skip
        return await handler(request)

    def _allowed(self, request: web.Request) -> bool:
        if self._key is None:
            try:
                return ipaddress.ip_address(request.remote or "").is_loopback
            except ValueError:
                return False
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._key)

    async def _dashboard(self, request: web.Request) -> web.Response:
        return web.Response(text=_DASHBOARD, content_type="text/html", headers={"Content-Security-Policy": _POLICY})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=await self._view.metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "version": VERSION})

    async def _ready(self, request: web.Request) -> web.Response:
        status = self._view.readiness()
        return web.json_response({"status": status}, status=200 if status == "ready" else 503)

    async def _replicas(self, request: web.Request) -> web.Response:
        return web.json_response(await self._view.replicas())

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": await self._view.workers()})

    async def _show_config(self, request: web.Request) -> web.Response:
        return web.json_response(self._config)

    async def _explain(self, request: web.Request) -> web.Response:
        """`id` is a request's, which may have slashes and dots in it."""
        answer = await self._view.explain(request.query.get("id", ""))
        return web.json_response(answer, status=200 if answer["found"] else 404)

    async def _rehearse(self, request: web.Request) -> web.Response:
        """The body is the request's own, and so are its headers; `path` says where it would be sent."""
        path = request.query.get("path", "/v1/chat/completions")
        answer = await self._view.rehearse(path, dict(request.headers), await request.read())
        return web.json_response(answer)
