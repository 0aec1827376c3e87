"""The data plane of one process: its sockets, its exchanges, and what they share."""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable

import orjson
from mypy_extensions import mypyc_attr

from gateway.prompt.blocks import DEFAULT_SCHEDULE, BlockSchedule
from gateway.prompt.body import RequestBody, parse_body
from gateway.prompt.rewrite import with_usage
from gateway.proxy import encodings, errors
from gateway.proxy.admission import AdmissionQueue
from gateway.proxy.client import ClientConnection
from gateway.proxy.errors import GatewayError
from gateway.proxy.exchange import Exchange
from gateway.proxy.handed import HandedConnections
from gateway.proxy.heads import RequestHead
from gateway.proxy.limits import PlaneLimits
from gateway.proxy.listener import Arrivals, Listener, bind, listen
from gateway.proxy.outbox import Outbox
from gateway.proxy.outcome import Outcome
from gateway.proxy.recent import Recent
from gateway.proxy.record import count, log_record
from gateway.proxy.request_log import RequestLog
from gateway.proxy.retry_budget import RetryBudget
from gateway.proxy.routes import Routes
from gateway.proxy.tally import Tally
from gateway.proxy.upstream import ReplicaPool
from gateway.replicas.registry import Change, Replica
from gateway.routing.assignment import Assignment
from gateway.routing.exact_match import TokenSource
from gateway.routing.hand_off import HandOff
from gateway.routing.router import Router

logger = logging.getLogger(__name__)

_MODELS = b"/v1/models"
_SWEEP_BLOCKS = 20_000
"""Blocks of forgotten replicas freed per tick: a few milliseconds."""
_BACK_OFF_S = 1.0
"""How long a replica that answered 429 or 503 without Retry-After is spared, while others can serve."""
_MAX_BACK_OFF_S = 30.0
"""No Retry-After is believed for longer: health probes and the next request know better."""


@mypyc_attr(allow_interpreted_subclasses=True)
class DataPlane:
    """Everything exchanges share.

    Attributes:
        router, routes, limits, tally, queue: what their names say.
        draining: no connection is kept alive any more.
        outbox: through which all connections write.
        asks_usage: replicas are asked for the usage of all streams.
        recent: requests that have ended; None to keep none.
    """

    def __init__(
        self,
        router: Router,
        routes: Routes,
        limits: PlaneLimits,
        tally: Tally,
        budget: RetryBudget,
        queue: AdmissionQueue | None = None,
        *,
        schedule: BlockSchedule = DEFAULT_SCHEDULE,
        client_keys: Iterable[str] = (),
        upstream_auth: str = "replace",
        response_headers: bool = True,
        request_log: RequestLog | None = None,
        replica_tls: ssl.SSLContext | None = None,
        asks_usage: bool = False,
        recent: Recent | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wire the data plane.

        Args:
            router: chooses replicas.
            routes: path table.
            limits: all limits.
            tally: counts.
            budget: retry budget.
            queue: where requests wait for room; by default none may.
            schedule: where prompts are cut into blocks.
            client_keys: keys that let a client in; none lets everybody in.
            upstream_auth: pass, replace or strip.
            response_headers: send x-warmgate-* headers.
            request_log: where request lines go; None for nowhere.
            replica_tls: context for https replicas.
            asks_usage: ask replicas for the usage of streams whose clients do not.
            recent: keeps requests that have ended, with the decisions about them; None keeps none.
            now: monotonic clock.
        """
        self.router = router
        self.routes = routes
        self.limits = limits
        self.tally = tally
        self.now = now
        self.draining = False
        self.outbox = Outbox()
        self.token_source: TokenSource | None = None
        """Where the tokens of prompts come from; None: nowhere."""
        self.asks_usage = asks_usage
        self.recent = recent
        self.queue = queue or AdmissionQueue(0)
        self._budget = budget
        self._schedule = schedule
        self.use_keys(client_keys, upstream_auth)
        self._response_headers = response_headers
        self._header_prefixes: dict[tuple[str, str], bytes] = {}
        self._request_log = request_log
        self._replica_tls = replica_tls
        self._pools: dict[Replica, ReplicaPool] = {}
        # Dictionaries for their order: what a tick does must not depend on memory addresses.
        self._exchanges: dict[Exchange, None] = {}
        self._clients: dict[ClientConnection, None] = {}
        self._listeners: list[Listener | HandedConnections] = []
        self._ticker: asyncio.TimerHandle | None = None
        # Set whenever an exchange or a connection has ended; drain waits for it.
        self._ended = asyncio.Event()
        self._ids = itertools.count(1)
        self._id_prefix = b"wg-" + os.urandom(8).hex().encode() + b"-"
        router.fleet.on_change(self._changed)

    # -- what may change while it runs

    def use_keys(self, client_keys: Iterable[str], upstream_auth: str) -> None:
        """Let in clients with these keys only, or everybody if there are none.

        Args:
            client_keys: the keys.
            upstream_auth: pass, replace or strip.
        """
        # Looked up by digest: how long that takes tells nothing about how much of a key was right.
        self._key_digests = frozenset(hashlib.sha256(key.encode()).digest() for key in client_keys)
        self._upstream_auth = upstream_auth

    def use_limits(self, limits: PlaneLimits, budget_share: float, budget_min_per_s: float) -> None:
        """Keep to other limits from the next look at them on."""
        self.limits = limits
        self._budget.configure(budget_share, budget_min_per_s)
        for pool in self._pools.values():
            pool.limit(limits)

    def use_replica_tls(self, context: ssl.SSLContext | None) -> None:
        """Connect to https replicas with another context from now on."""
        self._replica_tls = context
        for replica, pool in self._pools.items():
            if replica.tls:
                pool.use_tls(context)

    def use_response_headers(self, send: bool) -> None:
        """Send the x-warmgate-* headers, or do not."""
        self._response_headers = send

    # -- sockets

    async def listen(self, host: str, port: int, backlog: int, tls: ssl.SSLContext | None) -> int:
        """Start to accept connections; return the port.

        Raises:
            OSError: the address cannot be bound.
        """
        listener = listen(await bind(host, port), backlog, self._arrivals(tls).take)
        self._listen_on(listener)
        return listener.port

    def adopt(self, channel: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Serve the connections that another process accepts and hands over.

        Args:
            channel: where they come in; see `gateway.proxy.handed`.
            tls: context for TLS, None for plain TCP.
        """
        self._listen_on(HandedConnections(channel, self._arrivals(tls), lambda: self.open_connections))

    def _arrivals(self, tls: ssl.SSLContext | None) -> Arrivals:
        # The event loop's own limit for a handshake is a minute, and what is still shaking hands is not counted as a
        # connection.
        return Arrivals(lambda: ClientConnection(self), tls, self.limits.head_timeout_s)

    def _listen_on(self, listener: Listener | HandedConnections) -> None:
        self._listeners.append(listener)
        if self._ticker is None:
            loop = asyncio.get_running_loop()
            self._ticker = loop.call_later(self.limits.tick_s(), self._tick)
            self.outbox.open(loop.call_soon)

    async def drain(self, grace_s: float, limit_s: float) -> None:
        """Stop: accept for a grace time, let running requests end, cut what is left.

        Args:
            grace_s: how long new connections are accepted while /ready says no.
            limit_s: how long running requests may take after that.
        """
        self.draining = True
        if grace_s:
            await asyncio.sleep(grace_s)
        for listener in self._listeners:
            listener.close()
        for client in list(self._clients):
            client.close_if_idle()
        deadline_s = self.now() + limit_s
        while self._exchanges and self.now() < deadline_s:
            self._ended.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), deadline_s - self.now())
        if self._exchanges:
            logger.warning("%d requests are cut at the drain limit", len(self._exchanges))
        for exchange in list(self._exchanges):
            exchange.cut()
        # What has been written must reach the sockets before the loop ends.
        flush_s = self.now() + 1.0
        while self._clients and self.now() < flush_s:
            for client in list(self._clients):
                client.close_if_idle()
            self._ended.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), flush_s - self.now())

    def close(self) -> None:
        """Close everything at once."""
        self.outbox.close()
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        for listener in self._listeners:
            listener.close()
        for pool in self._pools.values():
            pool.close()

    def _tick(self) -> None:
        try:
            self.check_limits(self.now())
            self.router.index.sweep(_SWEEP_BLOCKS)
        finally:
            self._ticker = asyncio.get_running_loop().call_later(self.limits.tick_s(), self._tick)

    def check_limits(self, now_s: float) -> None:
        """Look at all limits in time, of requests, of client connections and of idle connections to replicas."""
        for exchange in list(self._exchanges):
            try:
                exchange.tick(now_s)
            except Exception:
                # A fault in one request must not end the limits of all others.
                logger.exception("the limits of request %s failed", exchange.request_id.decode("latin-1"))
                exchange.broken_inside()
        for client in list(self._clients):
            if client.deadline_s is not None and client.deadline_s < now_s:
                client.expired(now_s)
        for pool in self._pools.values():
            pool.sweep()

    # -- clients

    @property
    def log_lines_dropped(self) -> int:
        """Request log lines lost."""
        return self._request_log.dropped if self._request_log is not None else 0

    def client_connected(self, client: ClientConnection) -> bool:
        """Count a connection; False if there are too many."""
        if len(self._clients) >= self.limits.max_connections:
            self.tally.connections_refused += 1
            return False
        self._clients[client] = None
        self.tally.connections += 1
        return True

    def client_disconnected(self, client: ClientConnection) -> None:
        """Forget a connection."""
        self._clients.pop(client, None)
        self._ended.set()

    @property
    def listening(self) -> bool:
        """The API port is open."""
        return bool(self._listeners)

    @property
    def open_connections(self) -> int:
        """Client connections now."""
        return len(self._clients)

    def refused_bytes(self, error: GatewayError) -> None:
        """Count bytes that were no request."""
        self.tally.bad_requests[error.code] += 1

    # -- exchanges

    def exchange_began(self, exchange: Exchange) -> None:
        """Follow an exchange."""
        self._exchanges[exchange] = None
        self.tally.in_progress += 1
        self._budget.deposit()

    def exchange_ended(self, exchange: Exchange) -> None:
        """Count an exchange and write its line."""
        self._exchanges.pop(exchange, None)
        self._ended.set()
        tally = self.tally
        tally.in_progress -= 1
        now_s = self.now()
        assignment = exchange.assignment
        count(exchange, tally, now_s, self.metric_name(assignment.replica) if assignment is not None else "")
        log, recent = self._request_log, self.recent
        outcome = exchange.outcome
        if outcome is Outcome.LOCAL:
            return
        well = outcome is Outcome.OK and exchange.attempts == 1
        keep = recent is not None and recent.wants(assignment, well, now_s)
        if log is not None or keep:
            record = log_record(exchange, now_s)
            if log is not None:
                log.add(record)
            if recent is not None and keep:
                recent.add(record, assignment.decision if assignment is not None else None, now_s)

    def under_way(self, request_id: str) -> Exchange | None:
        """Return the request with an id that has not ended, the last one if there are several."""
        wanted = request_id.encode("latin-1", "replace")
        return next((each for each in reversed(self._exchanges) if each.request_id == wanted), None)

    def replica_active(self, slot: int, within_s: float = 2.0) -> bool:
        """Say whether bytes of a replica's answers have passed lately; asked only when its health is in doubt."""
        replica = self.router.fleet.by_slot[slot]
        if replica is None:
            return False
        since_s = self.now() - within_s
        return any(exchange.heard_from(replica, since_s) for exchange in self._exchanges)

    def replica_busy(self, place: Assignment | HandOff, retry_after: bytes) -> None:
        """A replica has answered 429 or 503: spare it for as long as it asks, while others can serve."""
        # Retry-After may also be a date (RFC 9110 section 10.2.3); engines send seconds.
        asked_s = float(retry_after) if retry_after.isdigit() and len(retry_after) < 9 else _BACK_OFF_S
        if self.router.fleet.has(place.replica):
            self.router.room.spare(place.slot, self.now() + min(asked_s, _MAX_BACK_OFF_S))

    def may_retry(self, exchange: Exchange) -> bool:
        """Say whether limits and budget allow one more attempt, should there be a replica for it."""
        limits = self.limits
        if exchange.attempts >= limits.max_attempts or self.now() - exchange.routed_s > limits.retry_within_s:
            return False
        if not self._budget.available():
            self.tally.retries_denied += 1
            return False
        return True

    def retried(self, exchange: Exchange) -> None:
        """Pay for a retry and count it against the replica that was left."""
        self._budget.withdraw()
        if exchange.assignment is not None:
            self.tally.retries[self.metric_name(exchange.assignment.replica)] += 1

    def metric_name(self, replica: Replica) -> str:
        """Return a replica's label; "" once it has been removed, so that its series do not come back."""
        return replica.name if self.router.fleet.has(replica) else ""

    def pool(self, replica: Replica) -> ReplicaPool:
        """Return the connections to a replica."""
        pool = self._pools.get(replica)
        if pool is None:
            pool = self._new_pool(replica)
            if self.router.fleet.has(replica):
                self._pools[replica] = pool
            else:
                # A last attempt on a replica removed meanwhile; nothing of it is kept.
                pool.close()
        return pool

    def _new_pool(self, replica: Replica) -> ReplicaPool:
        return ReplicaPool(replica, self.limits, self._replica_tls if replica.tls else None, self.now, self.outbox)

    def _changed(self, change: Change, replica: Replica) -> None:
        if change is Change.REMOVED:
            pool = self._pools.pop(replica, None)
            if pool is not None:
                pool.close()
            self.tally.forget_replica(replica.name)
            for key in [key for key in self._header_prefixes if key[0] == replica.name]:
                del self._header_prefixes[key]
        elif change in (Change.RESTARTED, Change.DOWN):
            pool = self._pools.get(replica)
            if pool is not None:
                pool.close_idle()
        # Somewhere may be room now, or none at all any more, which those who wait must be told.
        self.queue.room_may_be()

    # -- keys and identities

    def new_request_id(self) -> bytes:
        """Return an id that no other request has."""
        return self._id_prefix + b"%x" % next(self._ids)

    def refuse(self, head: RequestHead) -> GatewayError | None:
        """Return the error for a client without a valid key, None if it may pass."""
        if not self._key_digests or head.path in (b"/health", b"/ping") or head.method == b"OPTIONS":
            return None
        scheme, _, token = head.authorization.partition(b" ")
        presented = token.strip() if scheme.lower() == b"bearer" else head.api_key
        if presented and hashlib.sha256(presented).digest() in self._key_digests:
            return None
        return errors.INVALID_KEY

    def replica_authorization(self, replica: Replica, head: RequestHead) -> bytes:
        """Return the credential lines of a request to a replica, each with its line end."""
        if self._upstream_auth == "replace":
            key = replica.spec.api_key
            return b"authorization: Bearer %b\r\n" % key.encode() if key else b""
        if self._upstream_auth == "strip":
            return b""
        lines = b"authorization: %b\r\n" % head.authorization if head.authorization else b""
        return lines + (b"x-api-key: %b\r\n" % head.api_key if head.api_key else b"")

    # -- answers

    def parse(self, head: RequestHead, body: bytes) -> RequestBody:
        """Parse a JSON request body, its content encoding taken off.

        Raises:
            InvalidBody: it cannot be served.
        """
        if head.content_encoding:
            body = encodings.decoded(body, head.content_encoding, self.limits.max_body_bytes)
        path, aliases = head.path.decode("latin-1"), self.router.fleet.aliases
        return parse_body(path, body, self._schedule, aliases, self.token_source is not None)

    def asking_usage(self, head: RequestHead, body: bytes) -> bytes | None:
        """Return the body of a stream with the request for usage added, None where it cannot be."""
        if head.content_encoding or not self.routes.has_stream_options(head.path):
            return None
        return with_usage(body)

    def answer_locally(self, head: RequestHead) -> tuple[int, bytes]:
        """Answer what the gateway knows itself: models and its own life."""
        if head.path in (b"/health", b"/ping"):
            return 200, b'{"status":"ok"}'
        models = self.router.fleet.models()
        if head.path == _MODELS:
            return 200, orjson.dumps({"object": "list", "data": models})
        name = head.path[len(_MODELS) + 1 :].decode("utf-8", "replace")
        for model in models:
            if model.get("id") == name:
                return 200, orjson.dumps(model)
        error = errors.unknown_model(name)
        return error.status, error.body()

    def response_headers(self, assignment: Assignment) -> bytes:
        """Return the x-warmgate-* lines, b"" if they are switched off."""
        if not self._response_headers:
            return b""
        key = (assignment.replica.name, assignment.policy)
        prefix = self._header_prefixes.get(key)
        if prefix is None:
            prefix = self._header_prefixes[key] = b"x-warmgate-replica: %b\r\nx-warmgate-policy: %b\r\n" % (
                key[0].encode(),
                key[1].encode(),
            )
        if assignment.outlook is not None:
            prefix += b"x-warmgate-slo: %b\r\n" % assignment.outlook.encode()
        if assignment.hand_off is not None:
            prefix += b"x-warmgate-prefill-replica: %b\r\n" % assignment.hand_off.replica.name.encode()
        return b"%bx-warmgate-expected-cached-tokens: %d\r\nx-warmgate-predicted-ttft-ms: %.1f\r\n" % (
            prefix,
            assignment.expected_cached_tokens,
            assignment.predicted_ttft_s * 1000.0,
        )
