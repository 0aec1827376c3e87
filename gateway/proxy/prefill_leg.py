"""The first of the two requests of a hand-off: the prompt to a prefill replica.

Rules:
- As the exchange, this file touches no sockets. It is what a `ReplicaConnection` talks to while the prompt is computed.
- It ends in exactly one call on its owner, `prefilled` or `prefill_failed`, or in none after `abandon`.
- What a failure means stands in `failures.TABLE`, in the rows of phase `prefill`. Nothing of this request ever reaches
  the client, so the answer to any failure is to serve the request whole.

A reused connection that was closed while idle is replaced once, as for any request.
"""

from collections.abc import Callable
from typing import Protocol

from gateway.prompt.hand_off import Prefilled, read_prefilled
from gateway.proxy.failures import STALE_WITHIN_S, STATUS_CAUSES, Cause
from gateway.proxy.heads import ResponseHead
from gateway.proxy.limits import PlaneLimits
from gateway.proxy.upstream import Dial, ReplicaConnection, ReplicaPool

_MAX_ANSWER_BYTES = 16 << 20
"""An answer of one token and the block ids of a long prompt is a hundredth of this."""


class LegOwner(Protocol):
    """Who waits for a prompt to be computed."""

    def prefilled(self, leg: "PrefillLeg", answer: Prefilled) -> None:
        """The prompt is computed."""

    def prefill_failed(self, leg: "PrefillLeg", cause: Cause, retry_after: bytes) -> None:
        """The prompt is not computed, or cannot be fetched; `retry_after` as the replica sent it."""


class PrefillLeg:
    """One prompt on its way through one prefill replica."""

    __slots__ = (
        "_body",
        "_connection",
        "_dial",
        "_head",
        "_needs_params",
        "_now",
        "_owner",
        "_pieces",
        "_pool",
        "_resent",
        "_response",
        "_seen_s",
        "_size",
        "ended",
        "method",
    )

    def __init__(
        self,
        owner: LegOwner,
        pool: ReplicaPool,
        head: bytes,
        body: bytes,
        now: Callable[[], float],
        *,
        needs_params: bool,
    ) -> None:
        """Prepare the request.

        Args:
            owner: told how it ends.
            pool: connections to the prefill replica.
            head, body: the request, ready to send.
            now: monotonic clock.
            needs_params: an answer without usable `kv_transfer_params` is a failure.
        """
        self.method = b"POST"
        self.ended = False
        self._owner = owner
        self._pool = pool
        self._head = head
        self._body = body
        self._now = now
        self._needs_params = needs_params
        self._connection: ReplicaConnection | None = None
        self._dial: Dial | None = None
        self._response: ResponseHead | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._resent = False
        self._seen_s = now()

    def start(self) -> None:
        """Send the request."""
        connection = None if self._resent else self._pool.acquire()
        if connection is not None:
            self.connected(connection)
        else:
            self._dial = self._pool.dial(self)

    def abandon(self) -> None:
        """Nobody waits any more: the replica sees its client leave, and aborts the work and holds nothing."""
        self.ended = True
        if self._dial is not None:
            self._dial.exchange = None
            self._dial = None
        connection = self._connection
        if connection is not None:
            self._connection = None
            connection.abandon()

    def tick(self, now_s: float, limits: PlaneLimits) -> None:
        """Look at the limits in time."""
        if self.ended or self._connection is None:
            return
        idle_s = now_s - self._seen_s
        if self._response is None:
            if idle_s > limits.first_byte_timeout_s:
                self._fail(Cause.FIRST_BYTE_TIMEOUT)
        elif idle_s > limits.silence_timeout_s:
            self._fail(Cause.SILENCE)

    # -- ResponseSink

    @property
    def request_complete(self) -> bool:
        """The whole request has been sent: it goes out at once."""
        return True

    def connected(self, connection: ReplicaConnection) -> None:
        """A connection is there: send the request."""
        self._dial = None
        self._connection = connection
        self._seen_s = self._now()
        connection.send(self, self._head, self._body)

    def connect_failed(self, cause: Cause) -> None:
        """No connection could be made."""
        self._dial = None
        self._fail(cause)

    def response_head(self, head: ResponseHead) -> None:
        """The answer begins."""
        self._seen_s = self._now()
        self._response = head
        cause = STATUS_CAUSES.get(head.status)
        if cause is None and (head.status >= 300 or head.encoded):
            cause = Cause.PREFILL_REFUSED
        if cause is not None:
            self._fail(cause, head.retry_after)

    def response_body(self, data: bytes, chunk: bytes = b"") -> None:
        """Bytes of the answer."""
        self._seen_s = self._now()
        self._pieces.append(data)
        self._size += len(data)
        if self._size > _MAX_ANSWER_BYTES:
            self._fail(Cause.BAD_RESPONSE)

    def response_end(self) -> None:
        """The answer is complete."""
        self._connection = None
        if self.ended:
            return
        try:
            answer = read_prefilled(b"".join(self._pieces))
        except ValueError:
            self._fail(Cause.PREFILL_USELESS)
            return
        if self._needs_params and answer.params is None:
            self._fail(Cause.PREFILL_USELESS)
            return
        self.ended = True
        self._owner.prefilled(self, answer)

    def replica_failed(self, cause: Cause) -> None:
        """The connection broke."""
        self._connection = None
        if cause is Cause.STALE:
            if not self._resent and self._now() - self._seen_s <= STALE_WITHIN_S:
                self._resent = True
                self.start()
                return
            cause = Cause.RESET
        self._fail(cause)

    def replica_writable(self, writable: bool) -> None:
        """The request is written as a whole; there is nothing to hold back."""

    def _fail(self, cause: Cause, retry_after: bytes = b"") -> None:
        if self.ended:
            return
        self.abandon()
        self._owner.prefill_failed(self, cause, retry_after)
