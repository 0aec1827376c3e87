"""The admin port on aiohttp: the dashboard at /, /metrics, /health, /ready, and the JSON under /admin/."""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from gateway.admin.metrics import GatewayCollector
from gateway.proxy.plane import DataPlane
from gateway.replicas.ejection import Ejector
from gateway.version import VERSION

_DASHBOARD = resources.files("gateway.admin").joinpath("dashboard.html").read_text(encoding="utf-8")
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminServer:
    """The admin application and its socket."""

    def __init__(self, plane: DataPlane, ejector: Ejector, *, key: str | None, config: dict[str, Any]) -> None:
        """Make the application.

        Args:
            plane: the data plane to tell about.
            ejector: the breakers' states.
            key: bearer key of /admin/...; None lets loopback clients in, and only those.
            config: the configuration in force, secrets masked.
        """
        self._plane = plane
        self._ejector = ejector
        self._key = key.encode() if key is not None else None
        self._config = config
        self._registry = CollectorRegistry()
        self._registry.register(GatewayCollector(plane, ejector))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._runner: web.AppRunner | None = None

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        application = web.Application(middlewares=[self._guard])
        application.router.add_get("/", self._dashboard)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/health", self._health)
        application.router.add_get("/ready", self._ready)
        application.router.add_get("/admin/replicas", self._replicas)
        application.router.add_get("/admin/config", self._show_config)
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
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "version": VERSION})

    async def _ready(self, request: web.Request) -> web.Response:
        if self._plane.draining:
            return web.json_response({"status": "draining"}, status=503)
        if not self._plane.listening:
            return web.json_response({"status": "starting"}, status=503)
        if not self._plane.router.fleet.any_routable:
            return web.json_response({"status": "no replica can take requests"}, status=503)
        return web.json_response({"status": "ready"})

    async def _replicas(self, request: web.Request) -> web.Response:
        router = self._plane.router
        ledger, predictor = router.ledger, router.predictor
        replicas = []
        for replica in router.fleet.replicas.values():
            slot = replica.slot
            errors = predictor.errors[slot]
            replicas.append(
                {
                    "name": replica.name,
                    "url": replica.spec.url,
                    "role": replica.role,
                    "models": sorted(replica.served),
                    "up": replica.up,
                    "routable": replica.routable,
                    "draining": replica.draining,
                    "breaker": self._ejector.state(replica),
                    "epoch": replica.epoch,
                    "in_flight": ledger.in_flight[slot],
                    "decodes": ledger.decodes[slot],
                    "prefill_tokens": ledger.prefill_tokens[slot],
                    "kv_tokens": ledger.kv_tokens[slot],
                    "kv_capacity_tokens": replica.kv.kv_capacity_tokens,
                    "prefix_map_blocks": router.index.blocks(slot),
                    "ttft_prediction": {
                        "bias": errors.bias(),
                        "median_ape": errors.absolute_quantile(0.5),
                        "p90_ape": errors.absolute_quantile(0.9),
                        "count": errors.count,
                    },
                }
            )
        return web.json_response({"policy": router.policy.name, "replicas": replicas})

    async def _show_config(self, request: web.Request) -> web.Response:
        return web.json_response(self._config)
