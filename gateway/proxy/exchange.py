"""One request and its answer: the state machine between a client connection and the replicas.

Rules:
- This file touches no sockets and no event loop. Bytes and failures come in as method calls from the two protocols;
  what goes out are calls on `ClientSide` and `ReplicaConnection`. Time is asked of `plane.now`.
- What a failure means stands in `failures.TABLE`; here it is only carried out.
- A replica is charged at selection (`router.assign`) and released exactly once (`Assignment.finish`), in `_detach`.
- Every exchange ends in `_close`, exactly once, which is also where it is counted and logged.

A request goes READING -> QUEUED -> ([PREFILL ->] CONNECTING -> WAITING -> HELD | STREAMING)* -> done; it stays QUEUED
only while no replica has room. An answer is HELD back while it is a plain JSON body of moderate size, so that a replica
that dies in the middle of it can be replaced unseen; a stream is relayed from its first byte.

Where the router has the prompt computed by another replica, a `PrefillLeg` does that first. What it brings is put into
the client's request for the replica that answers, and used at most once: KV that has been read is freed, and parameters
that point to freed blocks give wrong answers in silence. So it travels on a connection of its own, and whatever goes
wrong after it was sent, the prompt is computed again.
"""

import logging
import re
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

import orjson

from gateway.prompt.body import InvalidBody, RequestBody
from gateway.prompt.hand_off import Prefilled, prefill_body, pushed_params, with_transfer_params
from gateway.prompt.token_chain import TokenPrompt
from gateway.proxy import errors, failures
from gateway.proxy.answer import Answer, ClientSide
from gateway.proxy.errors import GatewayError
from gateway.proxy.failures import Action, Cause, Phase
from gateway.proxy.heads import RequestHead, ResponseHead, replica_request_head
from gateway.proxy.observe import StreamObserver, Usage, usage_in
from gateway.proxy.prefill_leg import PrefillLeg
from gateway.proxy.routes import Handling
from gateway.proxy.upstream import Dial, ReplicaConnection
from gateway.proxy.usage_filter import UsageFilter
from gateway.replicas.breaker import Outcome as Verdict
from gateway.replicas.replica import Replica
from gateway.routing.assignment import Assignment
from gateway.routing.hand_off import HandOff
from gateway.routing.query import Query
from gateway.routing.refusals import InvalidTarget, NoReplica, Saturated, TargetsOutOfReach, UnknownModel

if TYPE_CHECKING:
    from gateway.proxy.plane import DataPlane

logger = logging.getLogger(__name__)

# A server's error inside an event stream, as vLLM writes it: {"error": {..., "code": 500}}.
_SERVER_FAULT = re.compile(rb'"code"\s*:\s*"?5\d\d\b')


_ERROR_EVENT = b'data: {"error"'
_MAX_EVENT_BYTES = 65536


class Outcome(StrEnum):
    """How a request ended; the label of the metrics and the field of the log."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    """A 4xx of a replica."""
    SERVER_ERROR = "server_error"
    """A 5xx of a replica, relayed."""
    REFUSED = "refused"
    """Answered by the gateway with an error of its own: the client's fault, or no replica could be tried."""
    FAILED = "failed"
    """Replicas were tried and the gateway had to answer with an error."""
    BROKEN = "broken"
    """The replica failed after bytes had reached the client."""
    CANCELLED = "cancelled"
    """The client left first."""
    LOCAL = "local"
    """Answered by the gateway itself: models, health."""


class Exchange:
    """One request from its head to its end."""

    __slots__ = (
        "_answer",
        "_begun",
        "_body",
        "_body_bytes",
        "_client",
        "_client_writable",
        "_connection",
        "_dial",
        "_ended",
        "_handling",
        "_held",
        "_held_bytes",
        "_holding",
        "_lacking",
        "_last_byte_s",
        "_leg",
        "_observer",
        "_out",
        "_params",
        "_paused_since_s",
        "_peeking",
        "_plane",
        "_query",
        "_redone",
        "_request_complete",
        "_resent",
        "_response",
        "_routed_s",
        "_tried",
        "_upload_blocked",
        "_upload_chunked",
        "_upload_started",
        "_usage_added",
        "_whole",
        "assignment",
        "attempts",
        "bytes_in",
        "error_code",
        "first_token_s",
        "head",
        "last_token_s",
        "method",
        "outcome",
        "phase",
        "queued_s",
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
        self.phase = Phase.READING
        self.status = 0
        self.outcome: Outcome | None = None
        self.error_code: str | None = None
        self.usage: Usage | None = None
        self.bytes_in = 0
        self.sent_s = 0.0
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self._answer = Answer(client, head, self.request_id)
        self._out: Answer | UsageFilter = self._answer
        self._usage_added = False
        self._handling: Handling | None = None
        self._begun = False
        self._ended = False
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._whole = b""
        self._request_complete = False
        self._upload_chunked = False
        self._upload_started = False
        self._upload_blocked = False
        self._lacking = Cause.SATURATED
        self.queued_s = 0.0
        self._routed_s = self.started_s
        self._query: Query | None = None
        self._tried: list[int] = []
        self._resent = False
        self._connection: ReplicaConnection | None = None
        self._dial: Dial | None = None
        self._leg: PrefillLeg | None = None
        self._params: bytes | None = None
        self._redone = False
        self._peeking = False
        self._response: ResponseHead | None = None
        self._observer: StreamObserver | None = None
        self._holding = False
        self._held: list[bytes] = []
        self._held_bytes = 0
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
    def bytes_out(self) -> int:
        """Bytes sent to the client."""
        return self._answer.bytes_out

    @property
    def streaming(self) -> bool:
        """The answer is an event stream."""
        return self._observer is not None

    @property
    def routed_s(self) -> float:
        """When a replica was asked for first: monotonic seconds."""
        return self._routed_s

    def heard_from(self, replica: Replica, since_s: float) -> bool:
        """Say whether a replica has sent bytes of this answer since a time."""
        assignment = self.assignment
        return (
            assignment is not None
            and assignment.replica is replica
            and self.phase in (Phase.HELD, Phase.STREAMING)
            and self._last_byte_s >= since_s
        )

    def begin(self) -> None:
        """The request's turn has come (with pipelining, after the answers before it)."""
        self._begun = True
        if not self._request_complete:
            # The rest of a body that has waited for its turn has been held up here, not by the client.
            self._last_byte_s = self._plane.now()
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
        if handling is Handling.STREAM or self._request_complete:
            self._have_request()

    def request_body(self, data: bytes) -> None:
        """Body bytes of the request."""
        self.bytes_in += len(data)
        if self._ended:
            return
        self._last_byte_s = self._plane.now()
        limit = self._plane.limits.max_body_bytes
        if self._begun and self._handling is Handling.STREAM:
            if self.bytes_in > limit:
                self._failed(Cause.UPLOAD_TOO_LARGE)
            else:
                self._upload(data)
            return
        self._body.append(data)
        self._body_bytes += len(data)
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
        self._failed(Cause.CLIENT_LEFT)

    def client_writable(self, writable: bool) -> None:
        """The client's socket can, or cannot, take more: carry the pressure on to the replica."""
        self._client_writable = writable
        if not writable:
            self._paused_since_s = self._plane.now()
        else:
            self._last_byte_s = self._plane.now()
        connection = self._connection
        if connection is not None:
            if writable:
                connection.resume()
            else:
                connection.pause()

    # -- from request to attempt

    def _have_request(self) -> None:
        """The request is complete, or its body streams through: answer it here or route it."""
        try:
            self._handle()
        except Exception:
            # In the parser's callback an exception would pass for bytes that are not HTTP.
            logger.exception("request %s failed inside the gateway", self.request_id.decode("latin-1"))
            self.broken_inside()

    def _handle(self) -> None:
        handling = self._handling
        if handling is Handling.STREAM:
            self._route(None)
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self._whole = body
        if handling is Handling.LOCAL:
            self.status, payload = self._plane.answer_locally(self.head)
            keep_alive = self._keep_alive()
            self._answer.json(self.status, payload, keep_alive)
            self._close(Outcome.LOCAL)
            self._client.finished(keep_alive)
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
        source = self._plane.token_source
        if source is not None and parsed is not None:
            path = self.head.path.decode("latin-1")
            if source.fetch(path, parsed, partial(self._have_tokens, parsed)):
                return
        self._route(parsed)

    def _have_tokens(self, body: RequestBody, tokens: TokenPrompt | None) -> None:
        """The prompt's tokens are there, or will not be in time: go on."""
        if self._ended:
            return
        try:
            self._route(body, tokens)
        except Exception:
            logger.exception("request %s failed inside the gateway", self.request_id.decode("latin-1"))
            self.broken_inside()

    def _route(self, body: RequestBody | None, tokens: TokenPrompt | None = None) -> None:
        plane = self._plane
        try:
            head = self.head
            query = self._query = plane.router.query(body, head.headers, head.targets, self.started_s, tokens)
        except UnknownModel as unknown:
            self._refuse(errors.unknown_model(unknown.model))
            return
        except InvalidTarget as invalid:
            self._refuse(errors.invalid_target(invalid.header))
            return
        if body is not None and body.transfer_params and plane.router.fleet.divided:
            self._refuse(errors.TRANSFER_PARAMS)
            return
        if head.content_encoding:
            # Nothing can be put into a compressed body.
            query.divisible = False
        if query.rewritten_model is not None:
            self._whole = query.rewritten_body(self._whole)
        if plane.asks_usage and body is not None and body.stream and not body.include_usage:
            asking = plane.asking_usage(head, self._whole)
            if asking is not None:
                self._whole, self._usage_added = asking, True
        self._routed_s = plane.now()
        self.phase = Phase.QUEUED
        queue = plane.queue
        if (queue.waiting and queue.has_line(query.model)) or not self.offer_room():
            if queue.enter(query.model, self):
                self.queued_s = self._routed_s
            else:
                self._failed(self._lacking)

    def offer_room(self) -> bool:
        """Go to a replica if one has room now; False if none has."""
        if self._ended:
            return True
        assert self._query is not None
        try:
            assignment = self._plane.router.assign(self._query, (), self._plane.now())
        except Saturated:
            self._lacking = Cause.SATURATED
            return False
        except TargetsOutOfReach as refusal:
            self._failed(Cause.OUT_OF_REACH, refusal.retry_after_s)
            return True
        except NoReplica:
            self._lacking = Cause.NO_REPLICA
            return False
        except Exception:
            logger.exception("request %s cannot be routed", self.request_id.decode("latin-1"))
            self.broken_inside()
            return True
        if self.queued_s:
            self._plane.tally.queue_wait_s.add(self._plane.now() - self.queued_s)
        self._attempt(assignment)
        return True

    def _attempt(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.attempts += 1
        self._tried.append(assignment.slot)
        if assignment.hand_off is None:
            self._connect()
        else:
            self._prefill(assignment.hand_off)

    # -- the prompt, where another replica computes it

    def _prefill(self, hand_off: HandOff) -> None:
        """Send the prompt to the replica that computes it, and with a push connector the request to the other."""
        plane, replica, connector = self._plane, hand_off.replica, hand_off.settings.connector
        self.phase = Phase.PREFILL
        self._last_byte_s = plane.now()
        body = prefill_body(self._whole, transfer=connector != "shared_storage")
        head = replica_request_head(
            self.head,
            replica.host_header,
            replica.base_path.encode(),
            plane.replica_authorization(replica, self.head),
            self.request_id,
            len(body),
        )
        needs_params = connector != "shared_storage"
        leg = self._leg = PrefillLeg(self, plane.pool(replica), head, body, plane.now, needs_params=needs_params)
        plane.tally.prefill_legs[plane.metric_name(replica)] += 1
        leg.start()
        if connector == "nixl_push" and self._leg is leg:
            identity = plane.router.hand_offs.identity(replica)
            if identity is not None:
                self._params = pushed_params(identity, self.request_id)
                self._connect()

    def prefilled(self, leg: PrefillLeg, answer: Prefilled) -> None:
        """The prompt is computed: have it fetched."""
        assignment = self.assignment
        if leg is not self._leg or assignment is None or assignment.hand_off is None:
            return
        self._leg = None
        plane, hand_off = self._plane, assignment.hand_off
        hand_off.returned(plane.now(), answer.prompt_tokens, answer.cached_tokens)
        plane.tally.prefill_leg_s.add(hand_off.observed_s or 0.0)
        plane.queue.room_may_be()
        connector = hand_off.settings.connector
        if connector == "nixl_push" and answer.identity is not None:
            plane.router.hand_offs.identify(hand_off.replica, answer.identity)
        if self.phase is not Phase.PREFILL:
            return
        if connector == "nixl_push" and answer.identity is not None:
            self._params = pushed_params(answer.identity, self.request_id)
        elif connector == "nixl":
            self._params = answer.params
        self._connect()

    def prefill_failed(self, leg: PrefillLeg, cause: Cause, retry_after: bytes) -> None:
        """The prompt is not computed: let one replica do everything."""
        assignment = self.assignment
        if leg is not self._leg or assignment is None or assignment.hand_off is None:
            return
        self._leg = None
        plane, hand_off = self._plane, assignment.hand_off
        hand_off.ended(plane.now(), failures.TABLE[Phase.PREFILL, cause].verdict)
        plane.tally.prefill_failures[plane.metric_name(hand_off.replica), cause] += 1
        if cause is Cause.BUSY:
            plane.replica_busy(hand_off, retry_after)
        if self._replayable():
            self._begin_anew(cause, whole=True)

    def _begin_anew(self, cause: Cause, *, whole: bool) -> None:
        """Route the request again because its hand-off has failed; the replica that was to answer may be chosen again.

        Args:
            cause: why, for the metrics.
            whole: one replica computes prompt and answer.
        """
        plane, query, assignment = self._plane, self._query, self.assignment
        assert query is not None
        assert assignment is not None
        plane.tally.hand_off_fallbacks[cause] += 1
        self._tried.remove(assignment.slot)
        try:
            following = plane.router.assign(query, self._tried, plane.now(), whole=whole)
        except NoReplica:
            # Everything is full, with this very request among what fills it: stay where it is.
            self._tried.append(assignment.slot)
            self._forget_attempt()
            if assignment.hand_off is not None:
                assignment.hand_off.ended(plane.now(), Verdict.CANCELLED)
                assignment.hand_off = None
            self._connect()
            return
        except Exception:
            logger.exception("request %s cannot be routed again", self.request_id.decode("latin-1"))
            self.broken_inside()
            return
        self._detach(Verdict.CANCELLED, keep_prefix=False)
        self._forget_attempt()
        self.attempts -= 1
        self._attempt(following)

    def _forget_attempt(self) -> None:
        """Forget what belongs to one attempt."""
        if self._leg is not None:
            self._leg.abandon()
            self._leg = None
        if self._dial is not None:
            self._dial.exchange = None
            self._dial = None
        if self._connection is not None:
            self._connection.abandon()
            self._connection = None
        self._params = None
        self._response = None
        self._observer = None
        self._peeking = False
        self._held = []
        self._held_bytes = 0
        self._resent = False

    def _connect(self) -> None:
        assert self.assignment is not None
        self.phase = Phase.CONNECTING
        pool = self._plane.pool(self.assignment.replica)
        # A body that streams through cannot be sent twice, nor can parameters of a hand-off be used twice, so they are
        # not risked on a connection that may be stale.
        fresh = self._resent or self._handling is Handling.STREAM or self._params is not None
        connection = None if fresh else pool.acquire()
        if connection is not None:
            self.connected(connection)
        else:
            self._dial = pool.dial(self)

    def connected(self, connection: ReplicaConnection) -> None:
        """A connection is there: send the request."""
        assert self.assignment is not None
        self._dial = None
        hand_off = self.assignment.hand_off
        if hand_off is not None:
            now = self._plane.now()
            if hand_off.expired(now):
                connection.pool.release(connection)
                again, self._redone = not self._redone, True
                self._begin_anew(Cause.PREFILL_EXPIRED, whole=not again)
                return
            hand_off.fetching_s = now
        self._connection = connection
        self.phase = Phase.WAITING
        self.sent_s = self._last_byte_s = self._plane.now()
        replica = self.assignment.replica
        streamed = self._handling is Handling.STREAM
        body = self._whole if self._params is None else with_transfer_params(self._whole, self._params)
        length = self.head.content_length if streamed else len(body)
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
            self._let_upload_go_on()
            connection.send(self, head)
            pending, self._body = self._body, []
            for data in pending:
                self._upload(data)
            if self._request_complete and self._upload_chunked:
                connection.write(b"0\r\n\r\n")
        else:
            connection.send(self, head, body)

    def _upload(self, data: bytes) -> None:
        connection = self._connection
        if connection is None:
            # Not connected yet: hold what one read brought, and read no further.
            self._body.append(data)
            self._hold_upload()
            return
        self._upload_started = True
        if self._upload_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        connection.write(data)

    def replica_writable(self, writable: bool) -> None:
        """The replica can, or cannot, take more of an upload."""
        if self._handling is not Handling.STREAM:
            return
        # The time that counts from now on is the other side's.
        self._last_byte_s = self._plane.now()
        if writable:
            self._let_upload_go_on()
        else:
            self._hold_upload()

    def _hold_upload(self) -> None:
        if not self._upload_blocked:
            self._upload_blocked = True
            self._client.pause()

    def _let_upload_go_on(self) -> None:
        if self._upload_blocked:
            self._upload_blocked = False
            self._client.resume()

    # -- events of the replica side

    def connect_failed(self, cause: Cause) -> None:
        """No connection to the replica."""
        self._dial = None
        self._failed(cause)

    def replica_failed(self, cause: Cause) -> None:
        """The connection broke."""
        self._connection = None
        if cause is Cause.STALE and self._plane.now() - self.sent_s > failures.STALE_WITHIN_S:
            cause = Cause.RESET
        self._failed(cause)

    def response_head(self, head: ResponseHead) -> None:
        """The replica's response begins."""
        self._last_byte_s = self._plane.now()
        self._response = head
        self.phase = Phase.HELD
        self.status = head.status
        cause = failures.STATUS_CAUSES.get(head.status)
        if cause is not None:
            if cause is Cause.SERVER_ERROR and self._params is not None and self._hand_off_failed():
                return
            if cause is Cause.BUSY and self.assignment is not None:
                self._plane.replica_busy(self.assignment, head.retry_after)
            if self._retry_elsewhere(failures.TABLE[Phase.HELD, cause]):
                return
        if head.event_stream:
            # vLLM begins a stream before it has fetched the KV, and tells of a failure in its first event.
            self._peeking = self._params is not None and not head.encoded
            if not self._peeking:
                self._begin_stream(head)
        else:
            limit = self._plane.limits.max_held_bytes
            known = head.content_length
            self._holding = known <= limit if known is not None else b"json" in head.content_type
            if not self._holding:
                self._relay_head()
        if not self._client_writable and self._connection is not None:
            self._connection.pause()

    def _begin_stream(self, head: ResponseHead) -> None:
        self._peeking = False
        self._observer = StreamObserver()
        # With a length stated, or under compression, the event that nobody asked for has to stay.
        removable = self._usage_added and head.content_length is None and not head.encoded
        self._out = UsageFilter(self._answer) if removable else self._answer
        self._relay_head()

    def _first_event(self, data: bytes) -> bytes:
        """Hold a stream back until its first event is there; return what may be relayed, b"" for nothing yet."""
        self._held.append(data)
        begun = b"".join(self._held)
        if b"\n\n" not in begun and len(begun) < _MAX_EVENT_BYTES:
            return b""
        if begun.lstrip().startswith(_ERROR_EVENT) and _SERVER_FAULT.search(begun) and self._hand_off_failed():
            return b""
        self._held = []
        head = self._response
        assert head is not None
        self._begin_stream(head)
        return begun

    def _hand_off_failed(self) -> bool:
        """The replica may have failed because the KV could not be fetched: compute the prompt where the answer is.

        It says nothing about the replica, and it may be asked again, without parameters.
        """
        assignment = self.assignment
        if assignment is None or assignment.hand_off is None or not self._replayable():
            return False
        self._plane.router.hand_offs.failed(assignment.hand_off, self._plane.now())
        self._begin_anew(Cause.HAND_OFF_FAILED, whole=True)
        return True

    def response_body(self, data: bytes) -> None:
        """Body bytes of the response."""
        now = self._last_byte_s = self._plane.now()
        if self._holding:
            self._held.append(data)
            self._held_bytes += len(data)
            if self._held_bytes > self._plane.limits.max_held_bytes:
                self._relay_head()
                held, self._held = b"".join(self._held), []
                self._answer.relay(held)
            return
        if self._peeking:
            data = self._first_event(data)
            if not data:
                return
        self._out.relay(data)
        observer = self._observer
        if observer is not None:
            assignment = self.assignment
            assert assignment is not None
            if observer.feed(data):
                self.first_token_s = now
                assignment.first_token(now)
                if assignment.hand_off is not None and assignment.hand_off.fetching_s is not None:
                    self._plane.tally.handed_off(
                        assignment.hand_off.transfer_bytes, now - assignment.hand_off.fetching_s
                    )
            self.last_token_s = assignment.step_seen_s[assignment.slot] = now

    def response_end(self) -> None:
        """The replica's response is complete, or its connection ended a body that has no other end."""
        self._connection = None
        head = self._response
        assert head is not None
        if self._peeking:
            # No event at all.
            held, self._held = b"".join(self._held), []
            self._begin_stream(head)
            if held:
                self._out.relay(held)
        if self._cut_short(head):
            self._failed(Cause.RESET)
            return
        observer = self._observer
        tail = observer.tail() if observer is not None else b""
        if self._holding:
            body = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            self._held = []
            self._answer.relay_whole(head, body, self._keep_alive(), self._begin_answer())
            self.usage = usage_in(body) if head.status < 300 else None
        else:
            if isinstance(self._out, UsageFilter):
                self._out.flush()
            self._answer.end()
            if observer is not None:
                self.usage = usage_in(tail)
        status = head.status
        if status < 400:
            verdict, outcome = Verdict.OK, Outcome.OK
            assignment = self.assignment
            if observer is None and assignment is not None:
                # A whole answer ends with a step, as a token does.
                assignment.step_seen_s[assignment.slot] = self._last_byte_s
            if observer is not None and observer.failed:
                # An error event inside a 200. Only the code can tell whose fault it is.
                verdict = Verdict.SERVER_ERROR if _SERVER_FAULT.search(tail) else Verdict.CLIENT_ERROR
                outcome = Outcome.BROKEN
        else:
            outcome = Outcome.CLIENT_ERROR if status < 500 else Outcome.SERVER_ERROR
            cause = failures.STATUS_CAUSES.get(status)
            # A 501, say, is no fault: the engine does not do this at all, and is well.
            verdict = failures.TABLE[Phase.HELD, cause].verdict if cause is not None else Verdict.CLIENT_ERROR
        self._detach(verdict, keep_prefix=status < 400)
        self._close(outcome)
        self._client.finished(self._keep_alive() and not self._answer.until_close)

    def _cut_short(self, head: ResponseHead) -> bool:
        """Say whether a body that ends with its connection ended before its time: a replica that died."""
        if head.content_length is not None or head.chunked or head.bodiless(self.method):
            return False
        if self._observer is not None:
            return not self._observer.ended_properly()
        if not self._holding or b"json" not in head.content_type or head.encoded:
            return False
        try:
            orjson.loads(b"".join(self._held))
        except orjson.JSONDecodeError:
            return True
        return False

    def tick(self, now_s: float) -> None:
        """Look at the limits; called a few times a second for every exchange under way."""
        if self._ended or not self._begun:
            return
        limits = self._plane.limits
        phase = self.phase
        idle_s = now_s - self._last_byte_s
        if limits.deadline_s and now_s - self.started_s > limits.deadline_s:
            self._failed(Cause.DEADLINE)
        elif not self._client_writable:
            if now_s - self._paused_since_s > limits.client_stall_timeout_s:
                self._failed(Cause.CLIENT_STALLED)
        elif phase is Phase.READING:
            if idle_s > limits.body_timeout_s:
                self._failed(Cause.UPLOAD_STALLED)
        elif phase is Phase.QUEUED:
            if now_s - self.queued_s > limits.queue_wait_s:
                self._failed(self._lacking)
            elif self._query is not None and (targets := self._query.targets) is not None and targets.overdue(now_s):
                self._failed(Cause.OUT_OF_REACH)
        elif phase is Phase.WAITING:
            if self._handling is Handling.STREAM and not self._request_complete and not self._upload_blocked:
                if idle_s > limits.body_timeout_s:
                    self._failed(Cause.UPLOAD_STALLED)
            elif idle_s > limits.first_byte_timeout_s:
                self._failed(Cause.FIRST_BYTE_TIMEOUT)
            elif self.assignment is not None:
                self.assignment.presume(now_s)
        elif phase not in (Phase.CONNECTING, Phase.PREFILL) and idle_s > limits.silence_timeout_s:
            self._failed(Cause.SILENCE)
        if self._leg is not None:
            self._leg.tick(now_s, limits)

    def cut(self) -> None:
        """The drain limit has passed: end now."""
        self._failed(Cause.DRAIN)

    def broken_inside(self) -> None:
        """The gateway itself has failed on this request: end it whatever its state, and say so if that is possible."""
        if self._ended:
            return
        self._detach(Verdict.CANCELLED, keep_prefix=False)
        self.error_code = errors.INTERNAL.code
        if self._answer.begun:
            self._close(Outcome.BROKEN)
            self._client.abort(reset=True)
            return
        self.status = errors.INTERNAL.status
        self._answer.error(errors.INTERNAL, keep_alive=False)
        self._close(Outcome.FAILED)
        self._client.finished(False)

    # -- failures

    def _failed(self, cause: Cause, retry_after_s: int | None = None) -> None:
        if self._ended:
            return
        rule = failures.TABLE[self.phase, cause]
        action = rule.action
        if action is Action.RESEND:
            if self._resend():
                return
            action = rule.otherwise
        elif action is Action.RETRY_ELSEWHERE:
            if self._retry_elsewhere(rule):
                return
            action = rule.otherwise
        gave_up = cause is Cause.CLIENT_LEFT or cause is Cause.DEADLINE
        verdict = Verdict.TIMEOUT if gave_up and self._hung() else rule.verdict
        self._detach(verdict, keep_prefix=self.first_token_s is not None)
        self.error_code = rule.code
        if action is Action.ABORT:
            self._close(Outcome.CANCELLED)
            if cause is not Cause.CLIENT_LEFT:
                self._client.abort(reset=True)
            return
        error = errors.from_rule(rule, retry_after_s or self._plane.limits.retry_after_s)
        if action is Action.BREAK_STREAM:
            self._break(error)
            return
        self._held = []
        self.status = error.status
        keep_alive = self._keep_alive()
        self._answer.error(error, keep_alive)
        self._close(Outcome.FAILED if self.attempts and error.status >= 500 else Outcome.REFUSED)
        self._client.finished(keep_alive)

    def _hung(self) -> bool:
        """Say whether the replica has shown no sign of life since it got this stream, for too long; see `failures`."""
        assignment, query = self.assignment, self._query
        if assignment is None or query is None or not query.stream or self.first_token_s is not None:
            return False
        if self.phase is not Phase.WAITING and self.phase is not Phase.STREAMING:
            return False
        waited_s = self._plane.now() - self.sent_s
        longest_s = max(failures.HUNG_AFTER_S, failures.HUNG_AFTER_PREDICTIONS * assignment.predicted_ttft_s)
        return waited_s > longest_s and assignment.step_seen_s[assignment.slot] < self.sent_s

    def _resend(self) -> bool:
        """Send the request to the same replica once more on a new connection, if that has not been done already."""
        if self._resent or not self._replayable():
            return False
        self._resent = True
        self._connect()
        return True

    def _retry_elsewhere(self, rule: failures.Rule) -> bool:
        """Start another attempt on a replica that has not been tried, if all that limits retries allows it."""
        plane = self._plane
        if not self._replayable() or self._query is None or not plane.may_retry(self):
            return False
        try:
            assignment = plane.router.assign(self._query, self._tried, plane.now())
        except NoReplica:
            return False
        except Exception:
            # In the replica's callback it would end up as another failure of the replica, and be met again.
            logger.exception("request %s cannot be routed again", self.request_id.decode("latin-1"))
            return False
        plane.retried(self)
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
        return not self._answer.begun and not self._upload_started

    def _detach(self, verdict: Verdict, *, keep_prefix: bool) -> None:
        """Leave the replica, or the queue: release what was charged, and end the connection if one is in use."""
        if self.phase is Phase.QUEUED and self._query is not None:
            self._plane.queue.leave(self._query.model, self)
        if self._dial is not None:
            self._dial.exchange = None
            self._dial = None
        if self._leg is not None:
            self._leg.abandon()
            self._leg = None
        self._params = None
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
                cached_tokens=usage.cached_tokens if usage is not None else None,
            )
            self._plane.queue.room_may_be()

    def _break(self, error: GatewayError) -> None:
        observer, head = self._observer, self._response
        if (
            observer is not None
            and head is not None
            # Where a length was promised, or the events are compressed, a plain event would be damage, not news.
            and head.content_length is None
            and not head.encoded
            and not head.bodiless(self.method)
        ):
            event = error.event()
            if isinstance(self._out, UsageFilter):
                self._out.flush()
            self._answer.relay(event if observer.at_event_boundary() else b"\n\n" + event)
        self._close(Outcome.BROKEN)
        self._client.abort(reset=self._answer.until_close)

    # -- answers

    def _refuse(self, error: GatewayError) -> None:
        """Answer with an error before any replica has been asked for."""
        self.status = error.status
        self.error_code = error.code
        keep_alive = self._keep_alive() and not error.close
        self._answer.error(error, keep_alive)
        self._close(Outcome.REFUSED)
        self._client.finished(keep_alive)

    def _keep_alive(self) -> bool:
        """A request that was not read to its end leaves its bytes on the connection, which cannot be used again."""
        return self.head.keep_alive and self._request_complete and not self._plane.draining

    def _relay_head(self) -> None:
        """Pass on the response's head; no other replica can answer from here on."""
        response = self._response
        assert response is not None
        self._holding = False
        self._answer.relay_head(response, self._keep_alive(), self._begin_answer())

    def _begin_answer(self) -> bytes:
        """Enter the phase in which bytes have been sent; return what the gateway says of itself in the head."""
        self.phase = Phase.STREAMING
        # No retry from here on: half a megabyte of prompt need not live as long as its stream.
        self._whole = b""
        return self._plane.response_headers(self.assignment) if self.assignment is not None else b""

    def _close(self, outcome: Outcome) -> None:
        if self._ended:
            return
        self._ended = True
        self.outcome = outcome
        self._whole = b""
        self._body = []
        if self._begun:
            self._plane.exchange_ended(self)
