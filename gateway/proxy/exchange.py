"""One request and its answer: the state machine between a client connection and the replicas.

Rules:
- This file touches no sockets and no event loop. Bytes and failures come in as method calls from the two protocols;
  what goes out are calls on `ClientSide` and `ReplicaConnection`. Time is asked of `plane.now`.
- What a failure means stands in `failures.TABLE`; here it is only carried out.
- A replica is charged at selection (`router.assign`) and released exactly once (`Assignment.finish`), in `_detach`.
- Every exchange ends in `_close`, exactly once, which is also where it is counted and logged.

A request goes READING -> QUEUED -> ([PREFILL ->] CONNECTING -> WAITING -> HELD | STREAMING)* -> done; it stays QUEUED
only while no replica has room. Parts of the way have files of their own, and report back here:
- `intake`: READING, until it is known what the request asks for;
- `upload`: a body that is sent on while it comes;
- `remote_prefill`: PREFILL, where another replica computes the prompt;
- `reply`: HELD and STREAMING, what one replica's response goes through until it is the client's `answer`;
- `timeouts`: which limit in time has been passed.
"""

import logging
from typing import TYPE_CHECKING

from gateway.proxy import errors, failures
from gateway.proxy.answer import Answer, ClientSide
from gateway.proxy.errors import GatewayError
from gateway.proxy.failures import Action, Cause, Phase
from gateway.proxy.heads import RequestHead, ResponseHead, replica_request_head
from gateway.proxy.intake import Intake
from gateway.proxy.observe import Usage
from gateway.proxy.outcome import Outcome
from gateway.proxy.remote_prefill import RemotePrefill
from gateway.proxy.reply import Reply
from gateway.proxy.timeouts import hung, limit_passed
from gateway.proxy.upload import Upload
from gateway.proxy.upstream import Dial, ReplicaConnection
from gateway.replicas.breaker import Outcome as Verdict
from gateway.replicas.replica import Replica
from gateway.routing.assignment import Assignment
from gateway.routing.query import Query
from gateway.routing.refusals import NoReplica, Saturated, TargetsOutOfReach

if TYPE_CHECKING:
    from gateway.proxy.plane import DataPlane

logger = logging.getLogger(__name__)


class Exchange:
    """One request from its head to its end.

    Attributes:
        head, method, request_id: what was asked, and the id that both sides are told.
        phase: how far it is.
        query: what the router is asked; None before that is known.
        assignment: its place on the replica of the last attempt.
        attempts: how many there were; a hand-off that fails is none.
        outcome, status, error_code, usage: how it ended, the last two where there is one.
        bytes_in: of its body.
        started_s, routed_s, queued_s, sent_s, first_token_s, last_token_s: when its head came, a replica was first
            asked for, it began to wait for room, it was last sent, and the answer's tokens were seen.
        last_byte_s: when anything last came from the side whose turn it is.
        paused_since_s: since when the client has taken no more bytes; None if it takes them.
        lacking: why no replica has taken it, while it waits for room.
        request_complete: all of it has been read.
    """

    __slots__ = (
        "_answer",
        "_begun",
        "_client",
        "_connection",
        "_dial",
        "_ended",
        "_intake",
        "_plane",
        "_redone",
        "_remote",
        "_reply",
        "_resent",
        "_tried",
        "_upload",
        "_usage_added",
        "_whole",
        "assignment",
        "attempts",
        "bytes_in",
        "error_code",
        "first_token_s",
        "head",
        "lacking",
        "last_byte_s",
        "last_token_s",
        "method",
        "outcome",
        "paused_since_s",
        "phase",
        "query",
        "queued_s",
        "request_complete",
        "request_id",
        "routed_s",
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
        self._usage_added = False
        self._begun = False
        self._ended = False
        self._intake: Intake | None = Intake(self, plane, head)
        self._whole = b""
        self.request_complete = False
        self._upload: Upload | None = None
        self.lacking = Cause.SATURATED
        self.queued_s = 0.0
        self.routed_s = self.started_s
        self.query: Query | None = None
        self._tried: list[int] = []
        self._resent = False
        self._connection: ReplicaConnection | None = None
        self._dial: Dial | None = None
        self._remote: RemotePrefill | None = None
        self._redone = False
        self._reply: Reply | None = None
        self.paused_since_s: float | None = None
        self.last_byte_s = self.started_s

    # -- events of the client side

    @property
    def client_address(self) -> str:
        """The client's address."""
        return self._client.peer

    @property
    def bytes_out(self) -> int:
        """Bytes sent to the client."""
        return self._answer.bytes_out

    @property
    def uploading(self) -> bool:
        """A body that streams through is not complete, and it is the client's turn to send."""
        upload = self._upload
        return upload is not None and not self.request_complete and not upload.blocked

    def heard_from(self, replica: Replica, since_s: float) -> bool:
        """Say whether a replica has sent bytes of this answer since a time."""
        assignment = self.assignment
        return (
            assignment is not None
            and assignment.replica is replica
            and self.phase in (Phase.HELD, Phase.STREAMING)
            and self.last_byte_s >= since_s
        )

    def begin(self) -> None:
        """The request's turn has come (with pipelining, after the answers before it)."""
        self._begun = True
        if not self.request_complete:
            # The rest of a body that has waited for its turn has been held up here, not by the client.
            self.last_byte_s = self._plane.now()
        self._plane.exchange_began(self)
        assert self._intake is not None
        self._intake.begin(self.request_complete)

    def request_body(self, data: bytes) -> None:
        """Body bytes of the request."""
        self.bytes_in += len(data)
        if self._ended:
            return
        self.last_byte_s = self._plane.now()
        upload = self._upload
        if upload is None:
            if self._intake is not None:
                self._intake.add(data)
        elif self.bytes_in > self._plane.limits.max_body_bytes:
            self._failed(Cause.UPLOAD_TOO_LARGE)
        else:
            upload.pass_on(data, self._connection)

    def request_end(self) -> None:
        """The request is complete."""
        self.request_complete = True
        if self._ended or not self._begun:
            return
        if self._upload is not None:
            self._upload.end(self._connection)
        elif self._intake is not None:
            self._intake.end()

    def client_gone(self) -> None:
        """The client has closed the connection."""
        self._failed(Cause.CLIENT_LEFT)

    def client_writable(self, writable: bool) -> None:
        """The client's socket can, or cannot, take more: carry the pressure on to the replica."""
        now_s = self._plane.now()
        if writable:
            self.paused_since_s = None
            self.last_byte_s = now_s
        else:
            self.paused_since_s = now_s
        connection = self._connection
        if connection is not None:
            if writable:
                connection.resume()
            else:
                connection.pause()

    # -- what the request asks for

    def refused(self, error: GatewayError, query: Query | None = None) -> None:
        """It cannot be served: say so before any replica has been asked for."""
        self.query = query
        self._end_with(error, Outcome.REFUSED, self._keep_alive() and not error.close)

    def answered(self, status: int, payload: bytes) -> None:
        """The gateway knows the answer itself."""
        self.status = status
        keep_alive = self._keep_alive()
        self._answer.json(status, payload, keep_alive)
        self._close(Outcome.LOCAL)
        self._client.finished(keep_alive)

    def send_continue(self) -> None:
        """The client may send the body."""
        self._client.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def body_streams(self, pending: list[bytes]) -> None:
        """The body is sent on while it comes."""
        self._upload = Upload(self._client, self.head, pending)

    def asked(self, query: Query, body: bytes, usage_added: bool) -> None:
        """A replica is to be asked: find one that has room."""
        plane = self._plane
        self._intake = None
        self.query = query
        self._whole = body
        self._usage_added = usage_added
        self.routed_s = plane.now()
        self.phase = Phase.QUEUED
        queue = plane.queue
        if (queue.waiting and queue.has_line(query.model)) or not self.offer_room():
            if queue.enter(query.model, self):
                self.queued_s = self.routed_s
            else:
                self._failed(self.lacking)

    # -- from request to attempt

    def offer_room(self) -> bool:
        """Go to a replica if one has room now; False if none has."""
        if self._ended:
            return True
        assert self.query is not None
        try:
            assignment = self._plane.router.assign(self.query, (), self._plane.now())
        except Saturated:
            self.lacking = Cause.SATURATED
            return False
        except TargetsOutOfReach as refusal:
            self._failed(Cause.OUT_OF_REACH, refusal.retry_after_s)
            return True
        except NoReplica:
            self.lacking = Cause.NO_REPLICA
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
        before = self.assignment
        if before is not None:
            assignment.decision.before = before.decision
        self.assignment = assignment
        self.attempts += 1
        self._tried.append(assignment.slot)
        hand_off = assignment.hand_off
        if hand_off is None:
            self._connect()
            return
        self.phase = Phase.PREFILL
        self.last_byte_s = self._plane.now()
        self._remote = RemotePrefill(self, self._plane, hand_off, self.request_id)
        self._remote.start(self.head, self._whole)

    # -- where another replica computes the prompt

    def prompt_ready(self) -> None:
        """The prompt is computed, or will be pushed to where the request is: send it."""
        self._connect()

    def prompt_failed(self, cause: Cause) -> None:
        """The prompt is not computed: let one replica do everything."""
        if self._replayable():
            self._begin_anew(cause, whole=True)

    def _begin_anew(self, cause: Cause, *, whole: bool) -> None:
        """Route the request again because its hand-off has failed; the replica that was to answer may be chosen again.

        Args:
            cause: why, for the metrics.
            whole: one replica computes prompt and answer.
        """
        plane, query, assignment = self._plane, self.query, self.assignment
        assert query is not None
        assert assignment is not None
        plane.tally.hand_off_fallbacks[cause] += 1
        self._tried.remove(assignment.slot)
        try:
            following = plane.router.assign(query, self._tried, plane.now(), whole=whole)
        except NoReplica:
            # Everything is full, with this very request among what fills it: stay where it is.
            self._tried.append(assignment.slot)
            self._drop_attempt()
            if assignment.hand_off is not None:
                assignment.hand_off.ended(plane.now(), Verdict.CANCELLED)
                assignment.hand_off = None
            self._connect()
            return
        except Exception:
            logger.exception("request %s cannot be routed again", self.request_id.decode("latin-1"))
            self.broken_inside()
            return
        assignment.decision.failure = cause
        self._detach(Verdict.CANCELLED, keep_prefix=False)
        self.attempts -= 1
        self._attempt(following)

    def _connect(self) -> None:
        assert self.assignment is not None
        self.phase = Phase.CONNECTING
        pool = self._plane.pool(self.assignment.replica)
        # What cannot be sent twice is not risked on a connection that may be stale.
        fresh = self._resent or self._upload is not None or self._fetches_kv()
        connection = None if fresh else pool.acquire()
        if connection is not None:
            self.connected(connection)
        else:
            self._dial = pool.dial(self)

    def connected(self, connection: ReplicaConnection) -> None:
        """A connection is there: send the request."""
        assert self.assignment is not None
        self._dial = None
        remote, upload = self._remote, self._upload
        if remote is not None and not remote.fetch(self._plane.now()):
            connection.pool.release(connection)
            again, self._redone = not self._redone, True
            self._begin_anew(Cause.PREFILL_EXPIRED, whole=not again)
            return
        self._connection = connection
        self.phase = Phase.WAITING
        self.sent_s = self.last_byte_s = self._plane.now()
        replica = self.assignment.replica
        body = self._whole if remote is None else remote.with_params(self._whole)
        head = replica_request_head(
            self.head,
            replica.host_header,
            replica.base_path.encode(),
            self._plane.replica_authorization(replica, self.head),
            self.request_id,
            len(body) if upload is None else upload.length,
        )
        if upload is None:
            connection.send(self, head, body)
            return
        upload.let_go_on()
        connection.send(self, head)
        upload.pass_on_pending(connection)
        if self.request_complete:
            upload.end(connection)

    def replica_writable(self, writable: bool) -> None:
        """The replica can, or cannot, take more of an upload."""
        upload = self._upload
        if upload is None:
            return
        # The time that counts from now on is the other side's.
        self.last_byte_s = self._plane.now()
        if writable:
            upload.let_go_on()
        else:
            upload.hold()

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
        self.last_byte_s = self._plane.now()
        self.phase = Phase.HELD
        self.status = head.status
        cause = failures.STATUS_CAUSES.get(head.status)
        if cause is not None:
            if cause is Cause.SERVER_ERROR and self._fetches_kv() and self._hand_off_failed():
                return
            if cause is Cause.BUSY and self.assignment is not None:
                self._plane.replica_busy(self.assignment, head.retry_after)
            if self._retry_elsewhere(failures.TABLE[Phase.HELD, cause], cause):
                return
        reply = self._reply = Reply(
            head,
            self.method,
            self._answer,
            self._plane.limits.max_held_bytes,
            self._fetches_kv(),
            self._usage_added,
        )
        if not reply.kept_back:
            self._pass_on(reply)
        if self.paused_since_s is not None and self._connection is not None:
            self._connection.pause()

    def _fetches_kv(self) -> bool:
        """Say whether the replica of this attempt fetches the prompt's KV from another, by parameters."""
        return self._remote is not None and self._remote.params is not None

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

    def response_body(self, data: bytes, chunk: bytes = b"") -> None:
        """Body bytes of the response, and the chunk in which they came if it is just that."""
        now = self.last_byte_s = self._plane.now()
        reply = self._reply
        assert reply is not None
        if reply.kept_back:
            data = reply.keep(data, self._plane.limits.max_held_bytes)
            if not data or (reply.begins_with_fault(data) and self._hand_off_failed()):
                return
            self._pass_on(reply)
            chunk = b""
        reply.out.relay(data, chunk)
        observer = reply.observer
        if observer is not None:
            assignment = self.assignment
            assert assignment is not None
            if observer.feed(data):
                self.first_token_s = now
                assignment.first_token(now)
                if self._remote is not None:
                    self._remote.first_token(now)
            self.last_token_s = assignment.step_seen_s[assignment.slot] = now

    def response_end(self) -> None:
        """The replica's response is complete, or its connection ended a body that has no other end."""
        self._connection = None
        reply = self._reply
        assert reply is not None
        if reply.kept_back and reply.stream:
            # No event at all.
            self._pass_on(reply)
        if reply.cut_short():
            self._failed(Cause.RESET)
            return
        if reply.kept_back:
            self.usage = reply.send_whole(self._keep_alive(), self._begin_answer())
        else:
            self.usage = reply.end()
        verdict, outcome = reply.result()
        answered = reply.head.status < 400
        assignment = self.assignment
        if answered and reply.observer is None and assignment is not None:
            # A whole answer ends with a step, as a token does.
            assignment.step_seen_s[assignment.slot] = self.last_byte_s
        self._detach(verdict, keep_prefix=answered)
        self._close(outcome)
        self._client.finished(self._keep_alive() and not self._answer.until_close)

    def tick(self, now_s: float) -> None:
        """Look at the limits; called a few times a second for every exchange under way."""
        if self._ended or not self._begun:
            return
        cause = limit_passed(self, self._plane.limits, now_s)
        if cause is not None:
            self._failed(cause)
        elif self.phase is Phase.WAITING and self.paused_since_s is None and not self.uploading:
            assert self.assignment is not None
            self.assignment.presume(now_s)
        if self._remote is not None:
            self._remote.tick(now_s)

    def cut(self) -> None:
        """The drain limit has passed: end now."""
        self._failed(Cause.DRAIN)

    def broken_inside(self) -> None:
        """The gateway itself has failed on this request: end it whatever its state, and say so if that is possible."""
        if self._ended:
            return
        self._detach(Verdict.CANCELLED, keep_prefix=False)
        if self._answer.begun:
            self.error_code = errors.INTERNAL.code
            self._close(Outcome.BROKEN)
            self._client.abort(reset=True)
        else:
            self._end_with(errors.INTERNAL, Outcome.FAILED, keep_alive=False)

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
            if self._retry_elsewhere(rule, cause):
                return
            action = rule.otherwise
        gave_up = cause is Cause.CLIENT_LEFT or cause is Cause.DEADLINE
        verdict = Verdict.TIMEOUT if gave_up and hung(self, self._plane.now()) else rule.verdict
        reply = self._reply
        self._detach(verdict, keep_prefix=self.first_token_s is not None)
        self.error_code = rule.code
        if action is Action.ABORT:
            self._close(Outcome.CANCELLED)
            if cause is not Cause.CLIENT_LEFT:
                self._client.abort(reset=True)
            return
        error = errors.from_rule(rule, retry_after_s or self._plane.limits.retry_after_s)
        if action is Action.BREAK_STREAM:
            if reply is not None:
                reply.break_off(error)
            self._close(Outcome.BROKEN)
            self._client.abort(reset=self._answer.until_close)
            return
        outcome = Outcome.FAILED if self.attempts and error.status >= 500 else Outcome.REFUSED
        self._end_with(error, outcome, self._keep_alive())

    def _resend(self) -> bool:
        """Send the request to the same replica once more on a new connection, if that has not been done already."""
        if self._resent or not self._replayable():
            return False
        self._resent = True
        self._connect()
        return True

    def _retry_elsewhere(self, rule: failures.Rule, cause: Cause) -> bool:
        """Start another attempt on a replica that has not been tried, if all that limits retries allows it."""
        plane = self._plane
        if not self._replayable() or self.query is None or not plane.may_retry(self):
            return False
        try:
            assignment = plane.router.assign(self.query, self._tried, plane.now())
        except NoReplica:
            return False
        except Exception:
            # In the replica's callback it would end up as another failure of the replica, and be met again.
            logger.exception("request %s cannot be routed again", self.request_id.decode("latin-1"))
            return False
        plane.retried(self)
        if self.assignment is not None:
            self.assignment.decision.failure = cause
        self._detach(rule.verdict, keep_prefix=False)
        self._attempt(assignment)
        return True

    def _replayable(self) -> bool:
        """Nothing has been sent that cannot be sent again, and nothing of an answer has reached the client."""
        return not self._answer.begun and (self._upload is None or not self._upload.started)

    def _detach(self, verdict: Verdict, *, keep_prefix: bool) -> None:
        """Leave the replica, or the queue: release what was charged, and end the connection if one is in use."""
        if self.phase is Phase.QUEUED and self.query is not None:
            self._plane.queue.leave(self.query.model, self)
        self._drop_attempt()
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

    def _drop_attempt(self) -> None:
        """Let go of all that belongs to one attempt, save what is charged for it."""
        if self._dial is not None:
            self._dial.exchange = None
            self._dial = None
        if self._remote is not None:
            self._remote.abandon()
            self._remote = None
        connection = self._connection
        if connection is not None:
            self._connection = None
            connection.abandon()
        self._reply = None
        self._resent = False

    # -- answers

    def _end_with(self, error: GatewayError, outcome: Outcome, keep_alive: bool) -> None:
        """Answer with an error of the gateway's own."""
        self.status = error.status
        self.error_code = error.code
        self._answer.error(error, keep_alive)
        self._close(outcome)
        self._client.finished(keep_alive)

    def _keep_alive(self) -> bool:
        """A request that was not read to its end leaves its bytes on the connection, which cannot be used again."""
        return self.head.keep_alive and self.request_complete and not self._plane.draining

    def _pass_on(self, reply: Reply) -> None:
        """Pass on a response from its head on; no other replica can answer any more."""
        reply.begin(self._keep_alive(), self._begin_answer())

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
        if self._intake is not None:
            self._intake.abandon()
            self._intake = None
        self._upload = None
        if self._begun:
            self._plane.exchange_ended(self)
