"""What one process says of a request: why it went where it did, or where it would go now.

Asking changes nothing. The only traces are a prompt in the tokenizer's cache and its counters, where there are KV
events, and engine metrics that the next request would have taken in.
"""

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from gateway.prompt.body import InvalidBody, RequestBody
from gateway.prompt.token_chain import TokenPrompt
from gateway.proxy import errors
from gateway.proxy.errors import GatewayError
from gateway.proxy.heads import RequestHead
from gateway.proxy.plane import DataPlane
from gateway.proxy.record import log_record
from gateway.proxy.routes import Handling
from gateway.routing.decision import Decision
from gateway.routing.explain import explained, who_could
from gateway.routing.query import Query
from gateway.routing.refusals import InvalidTarget, NoReplica, Saturated, TargetsOutOfReach, UnknownModel

_NOT_PASSED = frozenset({"authorization", "x-api-key", "content-length", "content-encoding", "transfer-encoding"})


class Explainer:
    """Looks requests up, and rehearses others."""

    def __init__(self, plane: DataPlane, worker: int) -> None:
        """Look at a data plane.

        Args:
            plane: which.
            worker: number of this process among the workers.
        """
        self._plane = plane
        self._worker = worker

    def explain(self, request_id: str) -> dict[str, Any]:
        """Return why a request went where it did; `found` is false where it is not known.

        Args:
            request_id: as its client got it in `x-request-id`.
        """
        plane, now_s = self._plane, self._plane.now()
        exchange = plane.under_way(request_id)
        if exchange is not None:
            assignment = exchange.assignment
            decision = assignment.decision if assignment is not None else None
            record: Mapping[str, Any] = log_record(exchange, now_s)
            return self._explanation(record, decision, exchange.phase.value, now_s - exchange.started_s)
        recent = plane.recent
        ended = recent.find(request_id) if recent is not None else None
        if ended is not None:
            record, decision, ended_s = ended
            return self._explanation(record, decision, "ended", now_s - ended_s + record["duration_ms"] / 1000.0)
        oldest_s = recent.oldest_s if recent is not None else None
        return {
            "found": False,
            "kept": len(recent) if recent is not None else 0,
            "capacity": recent.capacity if recent is not None else 0,
            "per_s": recent.per_s if recent is not None else None,
            "oldest_age_s": now_s - oldest_s if oldest_s is not None else None,
        }

    def _explanation(
        self, record: Mapping[str, Any], decision: Decision | None, state: str, age_s: float
    ) -> dict[str, Any]:
        router = self._plane.router
        explanation: dict[str, Any] = {
            "found": True,
            "id": record["id"],
            "worker": self._worker,
            "received_at": _clock(age_s),
            "state": state,
            "attempts": explained(decision) if decision is not None else [],
            "record": dict(record),
        }
        if decision is None:
            pool = record.get("model")
            explanation["replicas_now"] = who_could(router.standing(), pool or None, router.ledger.in_flight)
        return explanation

    async def rehearse(self, path: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
        """Return where a request would go now, without sending it.

        Args:
            path: of the request.
            headers: its headers; credentials are passed over.
            body: its body.
        """
        lines = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"host", b"gateway")]
        lines += [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in headers.items()
            if name.lower() not in _NOT_PASSED | {"host", "content-type"}
        ]
        answer: dict[str, Any] = {"worker": self._worker, "received_at": _clock(0.0), "path": path, "attempts": []}
        router = self._plane.router
        query: Query | None = None
        try:
            query = await self._query(RequestHead(b"POST", path.encode(), lines, False, True), body)
            answer["attempts"] = explained(router.rehearse(query, self._plane.now()))
        except _Refused as refused:
            answer["refused"] = {"status": refused.error.status, "message": refused.error.message}
        except TargetsOutOfReach as late:
            answer["refused"] = {
                "status": 429,
                "message": f"No replica would keep its latency targets; one might in {late.retry_after_s} s.",
            }
        except Saturated:
            answer["refused"] = {"status": 429, "message": "All replicas that could serve it are at their limit."}
        except NoReplica:
            answer["refused"] = {"status": 503, "message": "No replica that could serve it is up."}
        except ValueError as error:
            answer["refused"] = {"status": None, "message": f"This policy cannot be rehearsed: {error}."}
        if "refused" in answer:
            model = query.model if query is not None else None
            answer["replicas_now"] = who_could(router.standing(), model, router.ledger.in_flight)
        return answer

    async def _query(self, head: RequestHead, body: bytes) -> Query:
        plane = self._plane
        if head.error is not None:
            raise _Refused(head.error)
        handling = plane.routes.handling(head)
        if handling is Handling.NOT_FOUND:
            raise _Refused(errors.NOT_FOUND)
        read: RequestBody | None = None
        tokens: TokenPrompt | None = None
        if handling is Handling.JSON:
            try:
                read = plane.parse(head, body)
            except InvalidBody as invalid:
                raise _Refused(GatewayError(400, invalid.message, invalid.code, param=invalid.param)) from invalid
            if read.model is None and plane.routes.needs_model(head.path):
                raise _Refused(GatewayError(400, "It names no model.", "missing_required_parameter", param="model"))
            tokens = await self._tokens(head, read)
        try:
            return plane.router.query(read, head.headers, head.targets, plane.now(), tokens)
        except UnknownModel as unknown:
            raise _Refused(errors.unknown_model(unknown.model)) from unknown
        except InvalidTarget as invalid_target:
            raise _Refused(errors.invalid_target(invalid_target.header)) from invalid_target

    async def _tokens(self, head: RequestHead, read: RequestBody) -> TokenPrompt | None:
        source = self._plane.token_source
        if source is None:
            return None
        told: asyncio.Future[TokenPrompt | None] = asyncio.get_running_loop().create_future()

        def done(tokens: TokenPrompt | None) -> None:
            if not told.done():
                told.set_result(tokens)

        return await told if source.fetch(head.path.decode("latin-1"), read, done) else None


class _Refused(Exception):
    """The gateway would answer by itself."""

    def __init__(self, error: GatewayError) -> None:
        super().__init__(error.message)
        self.error = error


def _clock(age_s: float) -> str:
    return datetime.fromtimestamp(time.time() - age_s, UTC).isoformat(timespec="milliseconds")
