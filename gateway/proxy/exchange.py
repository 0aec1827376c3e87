"""One request and its answer: the state machine between a client connection and the replicas.

Rules:
- This file touches no sockets and no event loop. Bytes and failures come in as method calls from the two protocols;
  what goes out are calls on `ClientSide` and `ReplicaConnection`. Time is asked of `plane.now`.
- What a failure means stands in `failures.TABLE`; here it is only carried out.
- A replica is charged at selection (`router.assign`) and released exactly once (`Assignment.finish`), in `_detach`.
- Every exchange ends in `_close`, exactly once, which is also where it is counted and logged.

A request goes READING -> (CONNECTING -> WAITING -> HELD | STREAMING)* -> done. An answer is HELD back while it is a
plain JSON body of moderate size, so that a replica that dies in the middle of it can be replaced unseen; a stream is
relayed from its first byte.
"""

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from gateway.prompt.body import InvalidBody, RequestBody
from gateway.proxy import errors, failures
from gateway.proxy.errors import REASONS, GatewayError
from gateway.proxy.failures import Action, Cause, Phase
from gateway.proxy.heads import RequestHead, ResponseHead, replica_request_head
from gateway.proxy.observe import StreamObserver, Usage, usage_in
from gateway.proxy.routes import Handling
from gateway.proxy.upstream import Dial, ReplicaConnection
from gateway.replicas.breaker import Outcome as Verdict
from gateway.routing.router import Assignment, NoReplica, Query, UnknownModel

if TYPE_CHECKING:
    from gateway.proxy.plane import DataPlane


class Outcome(StrEnum):
    """How a request ended; the label of the metrics and the field of the log."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    """A 4xx of a replica."""
    SERVER_ERROR = "server_error"
    """A 5xx of a replica, relayed."""
    REFUSED = "refused"
    """Answered by the gateway with an error of its own before any replica was tried."""
    FAILED = "failed"
    """Replicas were tried and the gateway had to answer with an error."""
    BROKEN = "broken"
    """The replica failed after bytes had reached the client."""
    CANCELLED = "cancelled"
    """The client left first."""
    LOCAL = "local"
    """Answered by the gateway itself: models, health."""


class ClientSide(Protocol):
    """What an exchange needs of the client's connection."""

    peer: str
    """The client's address, for the log."""

    def write(self, data: bytes) -> None:
        """Send bytes."""

    def finished(self, keep_alive: bool) -> None:
        """The answer is complete."""

    def abort(self, *, reset: bool) -> None:
        """End the connection so that the answer cannot pass for complete.

        Args:
            reset: a mere close would look like a proper end (or nobody reads), so reset the connection.
        """

    def pause(self) -> None:
        """Stop reading request bytes."""

    def resume(self) -> None:
        """Read request bytes again."""


class Exchange:
    """One request from its head to its end."""

    __slots__ = (
        "_begun",
        "_body",
        "_body_bytes",
        "_chunked",
        "_client",
        "_client_writable",
        "_connection",
        "_dial",
        "_ended",
        "_handling",
        "_held",
        "_held_bytes",
        "_holding",
        "_last_byte_s",
        "_observer",
        "_paused_since_s",
        "_plane",
        "_query",
        "_request_complete",
        "_resent",
        "_response",
        "_sent_head",
        "_tried",
        "_upload_chunked",
        "_upload_started",
        "_whole",
        "assignment",
        "attempts",
        "bytes_in",
        "bytes_out",
        "error_code",
        "first_token_s",
        "head",
        "last_token_s",
        "method",
        "outcome",
        "phase",
        "request_id",
        "sent_s",
        "started_s",
        "status",
        "usage",
    )

    def __init__(self, plane: "DataPlane", client: ClientSide, head: RequestHead) -> None:
        self._plane = plane
        self._client = client
        self.head = head
        self.method = head.method
        self.started_s = plane.now()
        self.request_id = head.request_id if head.valid_request_id() else plane.new_request_id()
        self.assignment: Assignment | None = None
        self.attempts = 0
        self.phase: Phase | None = None
        self.status = 0
        self.outcome: Outcome | None = None
        self.error_code: str | None = None
        self.usage: Usage | None = None
        self.bytes_in = 0
        self.bytes_out = 0
        self.sent_s = 0.0
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self._handling: Handling | None = None
        self._begun = False
        self._ended = False
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._whole = b""
        self._request_complete = False
        self._upload_chunked = False
        self._upload_started = False
        self._query: Query | None = None
        self._tried: list[int] = []
        self._resent = False
        self._connection: ReplicaConnection | None = None
        self._dial: Dial | None = None
        self._response: ResponseHead | None = None
        self._observer: StreamObserver | None = None
        self._holding = False
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._sent_head = False
        self._chunked = False
        self._client_writable = True
        self._paused_since_s = 0.0
        self._last_byte_s = self.started_s

    # -- events of the client side

    @property
    def request_complete(self) -> bool:
        """The whole request has been read."""
        return self._request_complete

    @property
    def client_address(self) -> str:
        """The client's address."""
        return self._client.peer

    @property
    def query(self) -> Query | None:
        """What the router was asked, for the log."""
        return self._query

    @property
    def streaming(self) -> bool:
        """The answer is an event stream."""
        return self._observer is not None

    def heard_from(self, slot: int, since_s: float) -> bool:
        """Say whether a replica has sent bytes of this answer since a time."""
        assignment = self.assignment
        return (
            assignment is not None
            and assignment.slot == slot
            and self.phase in (Phase.HELD, Phase.STREAMING)
            and self._last_byte_s >= since_s
        )

    def begin(self) -> None:
        """The request's turn has come (with pipelining, after the answers before it)."""
        self._begun = True
        self._plane.exchange_began(self)
        head = self.head
        error = head.error or self._plane.refuse(head)
        if error is not None:
            self._refuse(error)
            return
        handling = self._plane.routes.handling(head)
        self._handling = handling
        if handling is Handling.NOT_FOUND:
            self._refuse(errors.NOT_FOUND)
            return
        limit = self._plane.limits.max_body_bytes
        if (head.content_length or 0) > limit or self._body_bytes > limit:
            self._refuse(errors.body_too_large(limit))
            return
        if head.expect_continue and not self._request_complete and not head.version_1_0:
            # RFC 9110 section 10.1.1
            self._client.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if handling is Handling.STREAM:
            self._route(None)
        elif self._request_complete:
            self._have_request()

    def request_body(self, data: bytes) -> None:
        """Body bytes of the request."""
        self.bytes_in += len(data)
        if self._ended:
            return
        self._last_byte_s = self._plane.now()
        if self._begun and self._handling is Handling.STREAM:
            self._upload(data)
            return
        self._body.append(data)
        self._body_bytes += len(data)
        limit = self._plane.limits.max_body_bytes
        if self._begun and self._body_bytes > limit:
            self._refuse(errors.body_too_large(limit))

    def request_end(self) -> None:
        """The request is complete."""
        self._request_complete = True
        if self._ended or not self._begun:
            return
        if self._handling is Handling.STREAM:
            if self._connection is not None and self._upload_chunked:
                self._connection.write(b"0\r\n\r\n")
            return
        self._have_request()

    def client_gone(self) -> None:
        """The client has closed the connection."""
        if self._ended:
            return
        self._detach(Verdict.CANCELLED, keep_prefix=self.first_token_s is not None)
        self._close(Outcome.CANCELLED)

    def client_writable(self, writable: bool) -> None:
        """The client's socket can, or cannot, take more: carry the pressure on to the replica."""
        self._client_writable = writable
        if not writable:
            self._paused_since_s = self._plane.now()
        else:
            self._last_byte_s = self._plane.now()
        connection = self._connection
        if connection is not None and not connection.closed:
            if writable:
                connection.transport.resume_reading()
            else:
                connection.transport.pause_reading()

    # -- from request to attempt

    def _have_request(self) -> None:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self._whole = body
        handling = self._handling
        if handling is Handling.LOCAL:
            status, payload = self._plane.answer_locally(self.head)
            self._answer(status, payload, Outcome.LOCAL)
            return
        parsed: RequestBody | None = None
        if handling is Handling.JSON:
            try:
                parsed = self._plane.parse(self.head, body)
            except InvalidBody as invalid:
                self._refuse(GatewayError(400, invalid.message, invalid.code, param=invalid.param))
                return
            if parsed.model is None and self._plane.routes.needs_model(self.head.path):
                self._refuse(
                    GatewayError(
                        400,
                        "You must provide a `model`; GET /v1/models lists those that exist.",
                        "missing_required_parameter",
                        param="model",
                    )
                )
                return
        self._route(parsed)

    def _route(self, body: RequestBody | None) -> None:
        router = self._plane.router
        try:
            self._query = router.query(body, self.head.headers)
            assignment = router.assign(self._query, (), self._plane.now())
        except UnknownModel as unknown:
            self._refuse(errors.unknown_model(unknown.model))
            return
        except NoReplica:
            self._refuse(errors.no_replica(self._plane.limits.retry_after_s))
            return
        if self._query.rewritten_model is not None:
            self._whole = self._query.rewritten_body(self._whole)
        self._attempt(assignment)

    def _attempt(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.attempts += 1
        self._tried.append(assignment.slot)
        self._connect()

    def _connect(self) -> None:
        assert self.assignment is not None
        self.phase = Phase.CONNECTING
        pool = self._plane.pool(self.assignment.replica)
        connection = None if self._resent else pool.acquire()
        if connection is not None:
            self.connected(connection)
        else:
            self._dial = pool.dial(self)

    def connected(self, connection: ReplicaConnection) -> None:
        """A connection is there: send the request."""
        assert self.assignment is not None
        self._dial = None
        self._connection = connection
        self.phase = Phase.WAITING
        self.sent_s = self._last_byte_s = self._plane.now()
        replica = self.assignment.replica
        streamed = self._handling is Handling.STREAM
        length = self.head.content_length if streamed else len(self._whole)
        if streamed and length is None and not self.head.chunked:
            length = 0
        self._upload_chunked = length is None
        head = replica_request_head(
            self.head,
            replica.host_header,
            replica.base_path.encode(),
            self._plane.replica_authorization(replica, self.head),
            self.request_id,
            length,
        )
        if streamed:
            connection.send(self, head)
            pending, self._body = self._body, []
            for data in pending:
                self._upload(data)
            if self._request_complete and self._upload_chunked:
                connection.write(b"0\r\n\r\n")
            self._client.resume()
        elif len(self._whole) < 32768:
            connection.send(self, head + self._whole)
        else:
            connection.send(self, head)
            connection.write(self._whole)

    def _upload(self, data: bytes) -> None:
        connection = self._connection
        if connection is None:
            # Not connected yet: hold what one read brought, and read no further.
            self._body.append(data)
            self._client.pause()
            return
        self._upload_started = True
        if self._upload_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        connection.write(data)

    def replica_writable(self, writable: bool) -> None:
        """The replica can, or cannot, take more of an upload."""
        if writable:
            self._client.resume()
        elif self._handling is Handling.STREAM:
            self._client.pause()

    # -- events of the replica side

    def connect_failed(self, cause: Cause) -> None:
        """No connection to the replica."""
        self._dial = None
        self._failed(cause)

    def replica_failed(self, cause: Cause) -> None:
        """The connection broke."""
        self._connection = None
        self._failed(cause)

    def response_head(self, head: ResponseHead) -> None:
        """The replica's response begins."""
        self._last_byte_s = self._plane.now()
        self._response = head
        self.phase = Phase.HELD
        self.status = head.status
        cause = failures.STATUS_CAUSES.get(head.status)
        if cause is not None and self._retry_instead(failures.TABLE[Phase.HELD, cause]):
            return
        if head.event_stream:
            self._observer = StreamObserver()
            self._holding = False
            self._write_head(None)
        else:
            limit = self._plane.limits.max_held_bytes
            known = head.content_length
            self._holding = known <= limit if known is not None else b"json" in head.content_type
            if not self._holding:
                self._write_head(None)
        if not self._client_writable and self._connection is not None:
            self._connection.transport.pause_reading()

    def response_body(self, data: bytes) -> None:
        """Body bytes of the response."""
        now = self._last_byte_s = self._plane.now()
        if self._holding:
            self._held.append(data)
            self._held_bytes += len(data)
            if self._held_bytes > self._plane.limits.max_held_bytes:
                self._holding = False
                self._write_head(None)
                held, self._held = b"".join(self._held), []
                self._relay(held)
            return
        self._relay(data)
        observer = self._observer
        if observer is not None:
            if observer.feed(data):
                self.first_token_s = now
                if self.assignment is not None:
                    self.assignment.first_token(now)
            self.last_token_s = now

    def response_end(self) -> None:
        """The replica's response is complete, or its connection ended a body that has no other end."""
        self._connection = None
        head = self._response
        assert head is not None
        observer = self._observer
        if observer is not None and head.content_length is None and not head.chunked and not observer.ended_properly():
            # Close-delimited: an end without the API's last event is a replica that died.
            self._failed(Cause.RESET)
            return
        if self._holding:
            body = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            self._held = []
            self._write_head(len(body), body)
            self.usage = usage_in(body) if head.status < 300 else None
        else:
            if self._chunked:
                self._send(b"0\r\n\r\n")
            if observer is not None:
                self.usage = usage_in(observer.tail())
        status = head.status
        if status < 400:
            verdict, outcome = Verdict.OK, Outcome.OK
            if observer is not None and observer.failed:
                outcome = Outcome.BROKEN
        elif status < 500:
            verdict, outcome = Verdict.CLIENT_ERROR, Outcome.CLIENT_ERROR
        else:
            cause = failures.STATUS_CAUSES.get(status, Cause.SERVER_ERROR)
            verdict, outcome = failures.TABLE[Phase.HELD, cause].verdict, Outcome.SERVER_ERROR
        self._detach(verdict, keep_prefix=status < 400)
        self._close(outcome)
        self._client.finished(self._keep_alive() and not self._close_delimited())

    def tick(self, now_s: float) -> None:
        """Look at the limits; called a few times a second for every exchange under way."""
        limits = self._plane.limits
        if self._ended or not self._begun:
            return
        if limits.deadline_s and now_s - self.started_s > limits.deadline_s and self.phase is not None:
            self._failed(Cause.DEADLINE)
        elif self.phase is None:
            if now_s - self._last_byte_s > limits.body_timeout_s:
                self._refuse(errors.BODY_TIMEOUT)
        elif not self._client_writable:
            if now_s - self._paused_since_s > limits.client_stall_timeout_s:
                self._client.abort(reset=True)
                self.client_gone()
        elif self.phase is Phase.WAITING:
            uploading = self._handling is Handling.STREAM and not self._request_complete
            if now_s - self._last_byte_s > limits.first_byte_timeout_s and not uploading:
                self._failed(Cause.FIRST_BYTE_TIMEOUT)
            elif self.assignment is not None:
                self.assignment.presume(now_s)
        elif self.phase is not Phase.CONNECTING and now_s - self._last_byte_s > limits.silence_timeout_s:
            self._failed(Cause.SILENCE)

    def cut(self) -> None:
        """The drain limit has passed: end now."""
        if self._ended:
            return
        if self.phase is None:
            self._refuse(errors.from_rule(failures.TABLE[Phase.WAITING, Cause.DRAIN], self._plane.limits.retry_after_s))
        else:
            self._failed(Cause.DRAIN)

    # -- failures

    def _failed(self, cause: Cause) -> None:
        if self._ended:
            return
        assert self.phase is not None
        rule = failures.TABLE[self.phase, cause]
        if rule.action is Action.RESEND and not self._resent and self._replayable():
            self._resent = True
            self._connect()
            return
        if rule.action is Action.RETRY_ELSEWHERE and self._retry_instead(rule):
            return
        self._detach(rule.verdict, keep_prefix=self.first_token_s is not None)
        self.error_code = rule.code
        if rule.action is Action.BREAK_STREAM:
            self._break(errors.from_rule(rule, self._plane.limits.retry_after_s))
            return
        self._held = []
        error = errors.from_rule(rule, self._plane.limits.retry_after_s)
        self.status = error.status
        self._respond(error)
        self._close(Outcome.FAILED)
        self._client.finished(self._keep_alive())

    def _retry_instead(self, rule: failures.Rule) -> bool:
        """Start another attempt on a replica that has not been tried, if all that limits retries allows it."""
        if not self._replayable() or self._query is None or not self._plane.may_retry(self):
            return False
        try:
            assignment = self._plane.router.assign(self._query, self._tried, self._plane.now())
        except (NoReplica, UnknownModel):
            return False
        self._plane.retried(self)
        self._detach(rule.verdict, keep_prefix=False)
        self._response = None
        self._observer = None
        self._held = []
        self._held_bytes = 0
        self._resent = False
        self._attempt(assignment)
        return True

    def _replayable(self) -> bool:
        """Nothing has been sent that cannot be sent again, and nothing of an answer has reached the client."""
        return not self._sent_head and not self._upload_started

    def _detach(self, verdict: Verdict, *, keep_prefix: bool) -> None:
        """Leave the replica: release what it was charged with, and end the connection if one is in use."""
        if self._dial is not None:
            self._dial.exchange = None
            self._dial = None
        connection = self._connection
        if connection is not None:
            self._connection = None
            connection.abandon()
        assignment = self.assignment
        if assignment is not None:
            usage = self.usage
            assignment.finish(
                self._plane.now(),
                verdict,
                usage.prompt_tokens if usage is not None else None,
                usage.completion_tokens if usage is not None else None,
                keep_prefix=keep_prefix,
            )

    def _break(self, error: GatewayError) -> None:
        observer = self._observer
        if observer is not None and not self._bodiless():
            event = error.event()
            self._relay(event if observer.at_event_boundary() else b"\n\n" + event)
        self._close(Outcome.BROKEN)
        self._client.abort(reset=self._close_delimited())

    # -- answers

    def _refuse(self, error: GatewayError) -> None:
        """Answer with an error before any replica has been tried."""
        self.status = error.status
        self.error_code = error.code
        self._respond(error)
        self._close(Outcome.REFUSED)
        self._client.finished(self._keep_alive() and not error.close)

    def _respond(self, error: GatewayError) -> None:
        extra = b"retry-after: %d\r\n" % error.retry_after_s if error.retry_after_s is not None else b""
        if error.status == 401:
            extra += b'www-authenticate: Bearer realm="warmgate"\r\n'
        keep = self._keep_alive() and not error.close
        self._send_whole(error.status, error.body(), extra, keep)

    def _answer(self, status: int, payload: bytes, outcome: Outcome) -> None:
        self.status = status
        self._send_whole(status, payload, b"", self._keep_alive())
        self._close(outcome)
        self._client.finished(self._keep_alive())

    def _send_whole(self, status: int, payload: bytes, extra: bytes, keep_alive: bool) -> None:
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%bx-request-id: %b\r\n%b\r\n"
        self._sent_head = True
        self._send(
            head
            % (
                status,
                REASONS.get(status, b"Error"),
                len(payload),
                extra,
                self.request_id,
                self._connection_header(keep_alive),
            )
            + (b"" if self.method == b"HEAD" else payload)
        )

    def _keep_alive(self) -> bool:
        """A request that was not read to its end leaves its bytes on the connection, which cannot be used again."""
        return self.head.keep_alive and self._request_complete

    def _connection_header(self, keep_alive: bool) -> bytes:
        if not keep_alive:
            return b"connection: close\r\n"
        return b"connection: keep-alive\r\n" if self.head.version_1_0 else b""

    def _bodiless(self) -> bool:
        return self._response is None or self._response.bodiless(self.method)

    def _close_delimited(self) -> bool:
        """RFC 9112 section 6.3 point 8: an HTTP/1.0 client cannot read chunks, so the end of the body is the close."""
        head = self._response
        return (
            head is not None
            and not self._holding
            and head.content_length is None
            and not self._chunked
            and not self._bodiless()
        )

    def _write_head(self, body_bytes: int | None, body: bytes = b"") -> None:
        """Send the response head, and with it a whole body if there is one.

        Args:
            body_bytes: length of the body when all of it is at hand; None to frame as the replica did.
            body: the body to send along.
        """
        head = self._response
        assert head is not None
        length = head.content_length if body_bytes is None or self._bodiless() else body_bytes
        self._chunked = length is None and not self._bodiless() and not self.head.version_1_0
        if length is not None and head.status != 204:
            framing = b"content-length: %d\r\n" % length
        elif self._chunked:
            framing = b"transfer-encoding: chunked\r\n"
        else:
            framing = b""
        keep = self._keep_alive() and not (length is None and not self._chunked and not self._bodiless())
        extra = self._plane.response_headers(self.assignment) if self.assignment is not None else b""
        self._sent_head = True
        self.phase = Phase.STREAMING
        self._send(
            b"HTTP/1.1 %d %b\r\n%b%bx-request-id: %b\r\n%b%b\r\n%b"
            % (
                head.status,
                head.reason,
                head.passed,
                framing,
                self.request_id,
                extra,
                self._connection_header(keep),
                body if not self._bodiless() else b"",
            )
        )

    def _relay(self, data: bytes) -> None:
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._send(data)

    def _send(self, data: bytes) -> None:
        self.bytes_out += len(data)
        self._client.write(data)

    def _close(self, outcome: Outcome) -> None:
        if self._ended:
            return
        self._ended = True
        self.outcome = outcome
        self._whole = b""
        self._body = []
        if self._begun:
            self._plane.exchange_ended(self)
