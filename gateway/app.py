"""The composition root: the only place where the parts are wired together."""

import asyncio
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Mapping

from pydantic import SecretStr

from gateway.admin.exact_map_metrics import ExactMapCollector
from gateway.admin.hand_off_metrics import HandOffCollector
from gateway.admin.server import AdminServer
from gateway.admin.sharing_metrics import SharingCollector
from gateway.admin.view import GatewayView
from gateway.config import Config, ModelDisaggregation, ModelSlo, RedisSection, ReplicaConfig, Routing
from gateway.estimator.fallback import FallbackRules
from gateway.estimator.hardware import hardware
from gateway.estimator.model import model
from gateway.estimator.predictor import Predictor
from gateway.estimator.transfer import LINKS
from gateway.exact_map import ExactMap
from gateway.exact_map import check as check_exact_map
from gateway.prefixes.index import PrefixIndex
from gateway.prefixes.shared import SharedIndex
from gateway.prompt.blocks import BlockSchedule
from gateway.prompt.tokens import TokensPerByte
from gateway.proxy.admission import AdmissionQueue
from gateway.proxy.limits import PlaneLimits
from gateway.proxy.plane import DataPlane
from gateway.proxy.recent import Recent
from gateway.proxy.request_log import RequestLog
from gateway.proxy.retry_budget import RetryBudget
from gateway.proxy.routes import Routes
from gateway.proxy.tally import Tally
from gateway.reload import change_replicas, check_names, replica_changes, sections_that_wait
from gateway.replicas.breaker import BreakerSettings
from gateway.replicas.ejection import Ejector
from gateway.replicas.health import HealthChecker, HealthSettings
from gateway.replicas.load import LoadLedger
from gateway.replicas.probe import ProbeClient
from gateway.replicas.registry import Fleet
from gateway.replicas.scrape import Scraper, ScrapeSettings
from gateway.replicas.spec import ReplicaSpec, Role
from gateway.routing.hand_off import HandOffRules, HandOffSettings
from gateway.routing.router import Router
from gateway.routing.slo import ModelTargets, SloRules
from gateway.sharing.board import Board
from gateway.sharing.connection import RedisTarget, check_url
from gateway.sharing.sharing import Sharing
from policies.catalog import make_policy

logger = logging.getLogger(__name__)

_HAND_OFF_FIELDS = tuple(ModelDisaggregation.model_fields)


def replica_spec(replica: ReplicaConfig, config: Config) -> ReplicaSpec:
    """Return the registry's form of a replica, with the top-level defaults filled in."""
    return ReplicaSpec(
        url=replica.url,
        name=replica.name,
        models=replica.models,
        role=Role(replica.role),
        hardware=replica.hardware or config.hardware,
        model_shape=replica.model_shape or config.model,
        tensor_parallel=replica.tensor_parallel,
        api_key=replica.api_key.get_secret_value() if replica.api_key is not None else None,
        max_in_flight=replica.max_in_flight,
        max_num_batched_tokens=replica.max_num_batched_tokens,
    )


def seed_of(routing: Routing) -> int:
    """Return the configured seed, or a new one."""
    return secrets.randbits(32) if routing.seed is None else routing.seed


def validate(config: Config) -> None:
    """Check what the schema alone cannot: names of policies, hardware and models, URLs, key files.

    Raises:
        ValueError: the first fault.
        OSError: a key or certificate file cannot be read.
    """
    make_policy(config.routing.policy, 0, config.routing.policy_options)
    fleet = Fleet(config.aliases)
    for replica in config.replicas:
        spec = replica_spec(replica, config)
        if spec.hardware is not None:
            hardware(spec.hardware)
        if spec.model_shape is not None:
            model(spec.model_shape)
        fleet.add(spec)
    if not config.replicas:
        raise ValueError("no replicas: give --replica URL or a `replicas` list")
    if config.redis is not None:
        check_url(config.redis.url.get_secret_value())
    check_exact_map(config)
    client_tls(config)
    replica_tls(config)


def client_tls(config: Config) -> ssl.SSLContext | None:
    """Return the TLS context of the API port, None for plain HTTP."""
    tls = config.listen.tls
    if tls is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.cert, tls.key)
    if tls.client_ca is not None:
        context.load_verify_locations(tls.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def replica_tls(config: Config) -> ssl.SSLContext | None:
    """Return the TLS context towards https replicas, None if there are none."""
    if not any(replica.url.startswith("https:") for replica in config.replicas):
        return None
    tls = config.tls
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def redis_target(redis: RedisSection) -> RedisTarget:
    """Return where Redis is and how to get in."""

    def secret(value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()

    return RedisTarget(
        url=redis.url.get_secret_value(),
        username=redis.username,
        password=secret(redis.password),
        sentinel_username=redis.sentinel_username,
        sentinel_password=secret(redis.sentinel_password),
        ca=redis.tls.ca,
        cert=redis.tls.cert,
        key=redis.tls.key,
        timeout_s=redis.timeout_s,
    )


def plane_limits(config: Config) -> PlaneLimits:
    """Return the limits of the data plane."""
    limits, timeouts, retries = config.limits, config.timeouts, config.retries
    return PlaneLimits(
        max_body_bytes=limits.max_body_bytes,
        max_head_bytes=limits.max_head_bytes,
        max_headers=limits.max_headers,
        max_connections=limits.max_connections,
        max_held_bytes=limits.max_held_bytes,
        write_buffer_bytes=limits.write_buffer_bytes,
        max_idle_connections=limits.max_idle_connections,
        retry_after_s=limits.retry_after_s,
        head_timeout_s=timeouts.head_s,
        body_timeout_s=timeouts.body_s,
        idle_timeout_s=timeouts.idle_s,
        connect_timeout_s=timeouts.connect_s,
        first_byte_timeout_s=timeouts.first_byte_s,
        silence_timeout_s=timeouts.silence_s,
        client_stall_timeout_s=timeouts.client_stall_s,
        deadline_s=timeouts.deadline_s,
        queue_wait_s=config.queue.max_wait_s,
        replica_keepalive_s=timeouts.replica_keepalive_s,
        max_attempts=retries.max_attempts,
        retry_within_s=retries.within_s,
    )


def health_settings(config: Config) -> HealthSettings:
    """Return how replicas are probed."""
    health = config.health
    return HealthSettings(health.interval_s, health.timeout_s, health.rise, health.fall, path=health.path)


def scrape_settings(config: Config) -> ScrapeSettings:
    """Return how the replicas' metrics are read."""
    return ScrapeSettings(config.scrape.interval_s, config.scrape.timeout_s)


def slo_rules(config: Config) -> SloRules:
    """Return the rules for latency targets, with what models leave out filled in."""
    slo = config.slo

    def seconds(milliseconds: float | None) -> float | None:
        return None if milliseconds is None else milliseconds / 1000.0

    def targets(of: ModelSlo) -> ModelTargets:
        given = of.model_fields_set
        ttft_ms = of.ttft_ms if "ttft_ms" in given else slo.ttft_ms
        tpot_ms = of.tpot_ms if "tpot_ms" in given else slo.tpot_ms
        on_miss = of.on_miss if "on_miss" in given else slo.on_miss
        return ModelTargets(seconds(ttft_ms), seconds(tpot_ms), on_miss == "refuse")

    return SloRules(targets(slo), {name: targets(of) for name, of in slo.models.items()}, slo.max_retry_after_s)


def hand_off_rules(config: Config) -> HandOffRules:
    """Return how prompts move between replicas, with what models leave out filled in."""
    common = config.disaggregation

    def settings(of: ModelDisaggregation) -> HandOffSettings:
        chosen = {name: getattr(of if name in of.model_fields_set else common, name) for name in _HAND_OFF_FIELDS}
        # A preset of the model's own is meant to take the place of a rate given for all.
        own_link = "link" in of.model_fields_set and "link_bytes_per_s" not in of.model_fields_set
        rate = None if own_link else chosen["link_bytes_per_s"]
        return HandOffSettings(
            connector=chosen["connector"],
            policy=chosen["policy"],
            threshold_tokens=chosen["threshold_tokens"],
            link_bytes_per_s=rate or LINKS[chosen["link"]],
            link_latency_s=chosen["link_latency_ms"] / 1000.0,
            kv_lease_s=chosen["kv_lease_s"],
            answer_whole=chosen["answer_whole"],
        )

    return HandOffRules(settings(common), {name: settings(of) for name, of in common.models.items()})


class Gateway:
    """One worker: everything, wired.

    Attributes:
        fleet, router, plane, tally, view: the parts others may want to look at.
        port, admin_port: bound ports, after `start`.
    """

    def __init__(
        self,
        config: Config,
        request_log: RequestLog | None = None,
        worker: int = 1,
        board: Board | None = None,
    ) -> None:
        """Wire a gateway; must be called with a running event loop.

        Args:
            config: a configuration that `validate` accepts.
            request_log: where request lines go; standard output by default.
            worker: its number among the processes that share a port.
            board: where these see each other's load; None if it is alone.
        """
        loop = asyncio.get_running_loop()
        self.config = config
        self.fleet = Fleet(config.aliases)
        for replica in config.replicas:
            self.fleet.add(replica_spec(replica, config))
        breaker = config.breaker
        self._ejector = Ejector(
            self.fleet,
            BreakerSettings(
                consecutive_failures=breaker.consecutive_failures,
                base_ejection_s=breaker.base_ejection_s,
                max_ejection_s=breaker.max_ejection_s,
                max_ejected_share=breaker.max_ejected_share,
            ),
            loop.call_later,
        )
        prefixes = config.prefixes
        schedule = BlockSchedule(prefixes.block_bytes, prefixes.growth, prefixes.max_block_bytes)
        routing = config.routing
        redis, ledger = config.redis, LoadLedger()
        index = PrefixIndex(schedule) if redis is None else SharedIndex(schedule)
        self.router = Router(
            self.fleet,
            ledger,
            self._ejector,
            index,
            TokensPerByte(),
            Predictor(routing.token_budget),
            make_policy(routing.policy, seed_of(routing), routing.policy_options),
            schedule,
            routing.session_header,
            routing.slow_start_s,
            prefixes.feedback,
            seed_of(routing),
        )
        self.router.slo.use(slo_rules(config))
        self.router.hand_offs.use(hand_off_rules(config))
        self.router.fallback.use(FallbackRules(routing.fallback.error, routing.fallback.samples))
        self.sharing: Sharing | None = None
        if redis is not None and isinstance(index, SharedIndex):
            self.sharing = Sharing(
                redis_target(redis),
                self.fleet,
                index,
                ledger,
                schedule,
                redis.namespace,
                redis.shards,
                redis.max_bytes,
                board=board,
            )
            self.router.restart_is_news = self.sharing.is_news
        self.tally = Tally()
        tls = replica_tls(config)
        self._request_log = request_log or (RequestLog() if config.logging.requests else None)
        self.plane = DataPlane(
            self.router,
            Routes(config.paths.extra, config.paths.blocked),
            plane_limits(config),
            self.tally,
            RetryBudget(config.retries.budget_share, config.retries.budget_min_per_s, time.monotonic),
            AdmissionQueue(config.queue.max_requests),
            schedule=schedule,
            client_keys=[key.get_secret_value() for key in config.auth.client_keys],
            upstream_auth=config.auth.upstream,
            response_headers=routing.response_headers,
            request_log=self._request_log,
            replica_tls=tls,
            asks_usage=prefixes.ask_usage,
            recent=Recent(config.logging.decisions, config.logging.decisions_per_s)
            if config.logging.decisions
            else None,
        )
        ledger.on_room = self.plane.queue.room_may_be
        key = config.admin.key
        self.view = GatewayView(self.plane, self._ejector, worker)
        self.view.register(HandOffCollector(self.plane))
        if self.sharing is not None:
            self.view.register(SharingCollector(self.sharing))
        self._admin = AdminServer(
            self.view,
            key=key.get_secret_value() if key is not None else None,
            config=config.model_dump(mode="json"),
        )
        self._probes = ProbeClient(tls=tls)
        self._scraper = Scraper(self.fleet, self._probes, scrape_settings(config))
        self._health = HealthChecker(
            self.fleet,
            self._probes,
            health_settings(config),
            self.plane.replica_active,
            self._scraper.scrape,
        )
        self.exact: ExactMap | None = None
        if config.kv_events.enabled:
            self.exact = ExactMap(config, self.fleet, self._probes, self.plane)
            self.view.register(ExactMapCollector(self.exact.events, self.exact.pool))
        self._client_tls = client_tls(config)
        self.port = 0
        self.admin_port = 0

    async def start(self) -> None:
        """Probe the replicas, then open both ports.

        Raises:
            OSError: an address cannot be bound.
        """
        config = self.config
        if self._request_log is not None:
            self._request_log.start()
        self.admin_port = await self._admin.start(config.admin.host, config.admin.port)
        await self._health.start(config.health.startup_wait_s)
        await self._scraper.start()
        if self.sharing is not None:
            self.sharing.start()
        if self.exact is not None:
            self.exact.start()
            await self.exact.loaded()
        listen = config.listen
        self.port = await self.plane.listen(listen.host, listen.port, listen.backlog, self._client_tls)
        up = sum(replica.up for replica in self.fleet.replicas.values())
        logger.info(
            "serving on %s:%d, admin on %s:%d, policy %s, %d of %d replicas up",
            listen.host,
            self.port,
            config.admin.host,
            self.admin_port,
            self.router.policy.name,
            up,
            len(self.fleet.replicas),
        )

    def start_behind(self, connections: socket.socket) -> None:
        """Serve connections that another process accepts. That process also probes the replicas and is asked by admins.

        Args:
            connections: where they come in; see `gateway.proxy.handed`.
        """
        if self._request_log is not None:
            self._request_log.start()
        if self.sharing is not None:
            self.sharing.start()
        if self.exact is not None:
            self.exact.start()
        self.plane.adopt(connections, self._client_tls)

    async def reload(self, config: Config) -> None:
        """Put another configuration in force, as far as that is possible while running.

        Requests under way are not touched. What cannot change is named in the log and takes effect at the next start.

        Args:
            config: a configuration that `validate` accepts.

        Raises:
            ValueError: a new replica has the name of one that stays. Nothing has changed then.
            OSError: a key or certificate file cannot be read. Nothing has changed then.
        """
        old, routing, before = self.config, config.routing, self.config.routing
        changes = replica_changes(
            [replica_spec(replica, old) for replica in old.replicas],
            [replica_spec(replica, config) for replica in config.replicas],
        )
        check_names(self.fleet, changes)
        tls = await asyncio.to_thread(self._renewed_tls, config)
        self.config = config
        change_replicas(self.fleet, changes)
        if config.aliases != old.aliases:
            self.fleet.use_aliases(config.aliases)
        policy = (routing.policy, routing.policy_options, routing.seed)
        if policy != (before.policy, before.policy_options, before.seed):
            self.router.use(make_policy(routing.policy, seed_of(routing), routing.policy_options))
        self.router.room.slow_start(routing.slow_start_s)
        self.router.slo.use(slo_rules(config))
        self.router.hand_offs.use(hand_off_rules(config))
        self.router.fallback.use(FallbackRules(routing.fallback.error, routing.fallback.samples))
        plane, retries = self.plane, config.retries
        plane.use_response_headers(routing.response_headers)
        plane.use_keys([key.get_secret_value() for key in config.auth.client_keys], config.auth.upstream)
        plane.use_limits(plane_limits(config), retries.budget_share, retries.budget_min_per_s)
        plane.queue.max_requests = config.queue.max_requests
        plane.routes = Routes(config.paths.extra, config.paths.blocked)
        plane.use_replica_tls(tls)
        self._probes.use_tls(tls)
        logging.getLogger().setLevel(config.logging.level.upper())
        self._admin.use_config(config.model_dump(mode="json"))
        for name in sections_that_wait(old, config):
            logger.warning("%s has changed and takes effect at the next start", name)
        logger.info("configuration is in force: %d replicas, policy %s", len(config.replicas), routing.policy)

    def _renewed_tls(self, config: Config) -> ssl.SSLContext | None:
        """Read the certificates again; they are renewed under the same names. Open connections keep theirs."""
        if self._client_tls is not None and config.listen.tls is not None:
            self._client_tls.load_cert_chain(config.listen.tls.cert, config.listen.tls.key)
        return replica_tls(config)

    async def stop(self) -> None:
        """Drain, then close everything."""
        timeouts = self.config.timeouts
        await self.plane.drain(timeouts.drain_grace_s, timeouts.drain_s)
        await self.close()

    async def close(self) -> None:
        """Close everything at once."""
        await self._health.stop()
        await self._scraper.stop()
        if self.sharing is not None:
            await self.sharing.stop()
        self.plane.close()
        if self.exact is not None:
            await self.exact.stop()
        self._ejector.close()
        await self._probes.close()
        await self._admin.stop()
        if self._request_log is not None:
            self._request_log.stop()


def summary(config: Config) -> Mapping[str, object]:
    """Return what `warmgate check` shows of a configuration."""
    return {
        "replicas": len(config.replicas),
        "policy": config.routing.policy,
        "listen": f"{config.listen.host}:{config.listen.port}",
        "workers": config.listen.workers,
        "admin": f"{config.admin.host}:{config.admin.port}",
    }
