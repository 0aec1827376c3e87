"""A request until it is known what it asks for: its head checked, its body read, the router's question put.

Rules:
- No replica is looked for here, and nothing is charged.
- It ends in at most one call on its owner: `refused`, `answered` or `asked`; before `asked`, `body_streams` says of a
  body that is not JSON that it is not to be waited for.
"""

import logging
from functools import partial
from typing import TYPE_CHECKING, Protocol

from gateway.prompt.body import InvalidBody, RequestBody
from gateway.prompt.token_chain import TokenPrompt
from gateway.proxy import errors
from gateway.proxy.errors import GatewayError
from gateway.proxy.heads import RequestHead
from gateway.proxy.routes import Handling
from gateway.routing.query import Query
from gateway.routing.refusals import InvalidTarget, UnknownModel

if TYPE_CHECKING:
    from gateway.proxy.plane import DataPlane

logger = logging.getLogger(__name__)

_NO_MODEL = GatewayError(
    400,
    "You must provide a `model`; GET /v1/models lists those that exist.",
    "missing_required_parameter",
    param="model",
)


class RequestOwner(Protocol):
    """Who has a request read."""

    request_id: bytes
    started_s: float

    def refused(self, error: GatewayError, query: Query | None = None) -> None:
        """It cannot be served; `query` if it was read that far."""

    def answered(self, status: int, payload: bytes) -> None:
        """The gateway knows the answer itself: a JSON document."""

    def send_continue(self) -> None:
        """The client may send the body."""

    def body_streams(self, pending: list[bytes]) -> None:
        """The body is not JSON: it is sent on while it comes. `pending` of it is there already."""

    def asked(self, query: Query, body: bytes, usage_added: bool) -> None:
        """A replica is to be asked.

        Args:
            query: what the router is asked.
            body: as replicas get it; b"" for one that streams through.
            usage_added: usage is asked for in it, and the client has not asked for it.
        """

    def broken_inside(self) -> None:
        """The gateway itself has failed on the request."""


class Intake:
    """The reading of one request."""

    __slots__ = ("_handling", "_head", "_over", "_owner", "_pieces", "_plane", "_size_bytes")

    def __init__(self, owner: RequestOwner, plane: "DataPlane", head: RequestHead) -> None:
        """Begin behind the head.

        Args:
            owner: told what it asks for.
            plane: limits, paths and the router.
            head: the request's.
        """
        self._owner = owner
        self._plane = plane
        self._head = head
        self._handling: Handling | None = None
        self._pieces: list[bytes] = []
        self._size_bytes = 0
        self._over = False

    def begin(self, complete: bool) -> None:
        """The request's turn has come: look at its head.

        Args:
            complete: its body is there.
        """
        head, plane = self._head, self._plane
        error = head.error or plane.refuse(head)
        if error is not None:
            self._owner.refused(error)
            return
        handling = self._handling = plane.routes.handling(head)
        if handling is Handling.NOT_FOUND:
            self._owner.refused(errors.NOT_FOUND)
            return
        limit = plane.limits.max_body_bytes
        if (head.content_length or 0) > limit or self._size_bytes > limit:
            self._owner.refused(errors.body_too_large(limit))
            return
        if head.expect_continue and not complete and not head.version_1_0:
            # RFC 9110 section 10.1.1
            self._owner.send_continue()
        if handling is Handling.STREAM:
            pending, self._pieces = self._pieces, []
            self._owner.body_streams(pending)
            self.end()
        elif complete:
            self.end()

    def add(self, data: bytes) -> None:
        """Keep a piece of the body; it may come before the request's turn."""
        self._pieces.append(data)
        self._size_bytes += len(data)
        limit = self._plane.limits.max_body_bytes
        if self._size_bytes > limit and self._handling is not None:
            self._owner.refused(errors.body_too_large(limit))

    def end(self) -> None:
        """The body is complete, or streams through: say what the request asks for."""
        try:
            self._read()
        except Exception:
            # In the parser's callback an exception would pass for bytes that are not HTTP.
            logger.exception("request %s failed inside the gateway", self._owner.request_id.decode("latin-1"))
            self._owner.broken_inside()

    def abandon(self) -> None:
        """The request has ended."""
        self._over = True
        self._pieces = []

    def _read(self) -> None:
        plane, head, handling = self._plane, self._head, self._handling
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        if handling is Handling.LOCAL:
            status, payload = plane.answer_locally(head)
            self._owner.answered(status, payload)
            return
        if handling is not Handling.JSON:
            self._ask(None, body, None)
            return
        try:
            read = plane.parse(head, body)
        except InvalidBody as invalid:
            self._owner.refused(GatewayError(400, invalid.message, invalid.code, param=invalid.param))
            return
        if read.model is None and plane.routes.needs_model(head.path):
            self._owner.refused(_NO_MODEL)
            return
        source = plane.token_source
        if source is not None and source.fetch(
            head.path.decode("latin-1"), read, partial(self._have_tokens, read, body)
        ):
            return
        self._ask(read, body, None)

    def _have_tokens(self, read: RequestBody, body: bytes, tokens: TokenPrompt | None) -> None:
        """The prompt's tokens are there, or will not be in time: go on."""
        if self._over:
            return
        try:
            self._ask(read, body, tokens)
        except Exception:
            logger.exception("request %s failed inside the gateway", self._owner.request_id.decode("latin-1"))
            self._owner.broken_inside()

    def _ask(self, read: RequestBody | None, body: bytes, tokens: TokenPrompt | None) -> None:
        plane, head, owner = self._plane, self._head, self._owner
        try:
            query = plane.router.query(read, head.headers, head.targets, owner.started_s, tokens)
        except UnknownModel as unknown:
            owner.refused(errors.unknown_model(unknown.model))
            return
        except InvalidTarget as invalid:
            owner.refused(errors.invalid_target(invalid.header))
            return
        if read is not None and read.transfer_params and plane.router.fleet.divided:
            owner.refused(errors.TRANSFER_PARAMS, query)
            return
        if head.content_encoding:
            # Nothing can be put into a compressed body.
            query.divisible = False
        if query.rewritten_model is not None:
            body = query.rewritten_body(body)
        if plane.asks_usage and read is not None and read.stream and not read.include_usage:
            asking = plane.asking_usage(head, body)
            if asking is not None:
                owner.asked(query, asking, True)
                return
        owner.asked(query, body, False)
