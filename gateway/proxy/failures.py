"""What a failure means: the one table that decides it (phase x cause -> action).

Two rules:
- Everything that decides between "try another replica", "answer the client" and "break the stream" stands in this
  file. The exchange reports (phase, cause) and does as it is told.
- This file knows no sockets, no clocks and no counters. Whether a retry is still *possible* (attempts, budget,
  deadline, another candidate) is the exchange's to say; what should happen if it is not stands in the same row.

Theory of operation. An attempt passes through the phases below in order. The line that matters is between HELD and
STREAMING: up to HELD no byte of an answer has reached the client, so the request may run again elsewhere without the
client noticing; from STREAMING on it may not, because a generation would be delivered twice. A replica's complete
answers (4xx among them) are not failures and never get here, save the statuses that say "not me, not now".
"""

from dataclasses import dataclass
from enum import StrEnum

from gateway.replicas.breaker import Outcome as Verdict


class Phase(StrEnum):
    """How far a request has come."""

    READING = "reading"
    """Its body is being read, or has just been; no replica has been chosen."""
    QUEUED = "queued"
    """It is complete, or streams through, and no replica has room for it."""
    PREFILL = "prefill"
    """Its prompt is being computed by another replica than the one that will answer; that one has seen nothing yet."""
    CONNECTING = "connecting"
    """A connection to the replica is being made; it has seen nothing."""
    WAITING = "waiting"
    """The request is on its way or with the replica; no response head yet."""
    HELD = "held"
    """A response has begun, but nothing of it has been sent to the client."""
    STREAMING = "streaming"
    """Response bytes have been sent to the client."""


class Cause(StrEnum):
    """What happened."""

    SATURATED = "saturated"
    """Replicas could serve it, and all of them are at their limit: at once, or still after the longest wait."""
    NO_REPLICA = "no_replica"
    """No replica that could serve it is up: now, or still after the longest wait."""
    OUT_OF_REACH = "out_of_reach"
    """No replica is predicted to keep its latency targets, or the time for the first token has passed in the queue; and
    it is to be refused then."""
    REFUSED = "refused"
    """The connection could not be made."""
    CONNECT_TIMEOUT = "connect_timeout"
    NO_SOCKET = "no_socket"
    """This machine has no socket left (file descriptors, ports, memory): no fault of the replica."""
    STALE = "stale"
    """A reused keep-alive connection was closed before any byte of a response: the replica may never have seen the
    request (RFC 9112 section 9.3.1: a client may retry when a persistent connection closes early)."""
    RESET = "reset"
    """The connection was lost, or the response ended before it was complete."""
    FIRST_BYTE_TIMEOUT = "first_byte_timeout"
    SILENCE = "silence"
    """No byte for longer than the limit between two bytes of a response."""
    DEADLINE = "deadline"
    """The request's overall deadline has passed."""
    BAD_RESPONSE = "bad_response"
    """The replica's bytes are not HTTP."""
    SERVER_ERROR = "server_error"
    """Status 500, 502 or 504."""
    BUSY = "busy"
    """Status 429 or 503: back-pressure, not a fault."""
    PREFILL_REFUSED = "prefill_refused"
    """A prefill replica answered with another status than 200."""
    PREFILL_USELESS = "prefill_useless"
    """A prefill replica's answer does not say where the KV is: it runs another connector, or none."""
    PREFILL_EXPIRED = "prefill_expired"
    """The KV of the prompt may be gone by now: the lease has nearly run out."""
    HAND_OFF_FAILED = "hand_off_failed"
    """The replica that was to fetch the KV of a prompt answered with a server error: it may not have got it."""
    UPLOAD_STALLED = "upload_stalled"
    """The client stopped sending in the middle of a request body."""
    UPLOAD_TOO_LARGE = "upload_too_large"
    """A body of unknown length, streamed through, went over the limit."""
    CLIENT_LEFT = "client_left"
    CLIENT_STALLED = "client_stalled"
    """The client has not read for longer than the limit."""
    DRAIN = "drain"
    """The gateway is stopping and its drain limit has passed."""


class Action(StrEnum):
    """What the exchange does."""

    RETRY_ELSEWHERE = "retry elsewhere"
    """Send the request to a replica that has not been tried."""
    SERVE_WHOLE = "serve whole"
    """Let one replica compute prompt and answer. Costs neither an attempt nor retry budget: it was planned for."""
    PREFILL_AGAIN = "prefill again"
    """Begin anew with the first of the two requests, once."""
    RESEND = "resend"
    """Send it once more to the same replica on a fresh connection; costs neither an attempt nor retry budget."""
    ANSWER = "answer"
    """Answer the client with the row's status in OpenAI's error shape."""
    PASS_THROUGH = "pass through"  # noqa: S105 - no password
    """Relay the replica's own answer."""
    BREAK_STREAM = "break stream"
    """SSE: a final error event. Then the connection is cut so that no client takes the answer for complete."""
    ABORT = "abort"
    """Nobody reads an answer any more: the replica's work is aborted, the client's connection reset if it is open."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row.

    Attributes:
        action: the preferred action.
        otherwise: what to do when it is not possible.
        status, code, message: the gateway's own answer, where one is made.
        verdict: what it says about the replica, for passive health.
    """

    action: Action
    otherwise: Action
    status: int
    code: str
    message: str
    verdict: Verdict


_W, _Z, _R, _S, _A, _P, _B, _X = (
    Action.SERVE_WHOLE,
    Action.PREFILL_AGAIN,
    Action.RETRY_ELSEWHERE,
    Action.RESEND,
    Action.ANSWER,
    Action.PASS_THROUGH,
    Action.BREAK_STREAM,
    Action.ABORT,
)
_FULL = (429, "replicas_saturated", "All replicas that serve this model are at their limit; try again later.")
_NONE = (503, "no_replica_available", "No replica can serve this model at the moment; try again later.")
_LATE_ANYWHERE = (
    429,
    "slo_out_of_reach",
    "No replica can meet this request's latency targets at the moment; try again later, or ask for less.",
)
_UNREACHABLE = (502, "replica_unreachable", "The replica serving this model could not be reached.")
_SLOW_CONNECT = (
    504,
    "replica_connect_timeout",
    "The replica serving this model did not accept a connection in time.",
)
_SOCKETS = (503, "gateway_out_of_sockets", "The gateway cannot open more connections; try again later.")
_CUT = (502, "replica_connection_lost", "The replica closed the connection before its answer was complete.")
_SLOW = (504, "replica_timeout", "The replica did not begin to answer in time.")
_SILENT = (504, "replica_silent", "The replica stopped sending before its answer was complete.")
_LATE = (504, "deadline_exceeded", "The request's deadline passed before the answer was complete.")
_GARBLED = (502, "replica_bad_response", "The replica sent a response that is not valid HTTP.")
_STOPPING = (503, "gateway_stopping", "The gateway is shutting down; send the request again.")
_FAILED = (502, "replica_error", "The replica failed to serve the request.")
_BUSY = (503, "replica_busy", "The replica is overloaded; try again later.")
_SLOW_BODY = (408, "request_timeout", "The request body did not arrive in time.")
_LARGE_BODY = (413, "body_too_large", "The request body is larger than the gateway accepts.")
_GONE = (499, "client_left", "The client left.")
_STALLED = (499, "client_stalled", "The client stopped reading.")

B, Q, C, W, H, S = Phase.READING, Phase.QUEUED, Phase.CONNECTING, Phase.WAITING, Phase.HELD, Phase.STREAMING
F = Phase.PREFILL

TABLE: dict[tuple[Phase, Cause], Rule] = {
    # phase, cause                  first choice, otherwise, answer, what it says of the replica
    (B, Cause.UPLOAD_STALLED): Rule(_A, _A, *_SLOW_BODY, Verdict.CANCELLED),
    (B, Cause.DEADLINE): Rule(_A, _A, *_LATE, Verdict.CANCELLED),
    (B, Cause.DRAIN): Rule(_A, _A, *_STOPPING, Verdict.CANCELLED),
    (Q, Cause.SATURATED): Rule(_A, _A, *_FULL, Verdict.CANCELLED),
    (Q, Cause.NO_REPLICA): Rule(_A, _A, *_NONE, Verdict.CANCELLED),
    (Q, Cause.OUT_OF_REACH): Rule(_A, _A, *_LATE_ANYWHERE, Verdict.CANCELLED),
    (Q, Cause.UPLOAD_TOO_LARGE): Rule(_A, _A, *_LARGE_BODY, Verdict.CANCELLED),
    (Q, Cause.DEADLINE): Rule(_A, _A, *_LATE, Verdict.CANCELLED),
    (Q, Cause.DRAIN): Rule(_A, _A, *_STOPPING, Verdict.CANCELLED),
    (F, Cause.REFUSED): Rule(_W, _W, *_UNREACHABLE, Verdict.CONNECT_ERROR),
    (F, Cause.CONNECT_TIMEOUT): Rule(_W, _W, *_SLOW_CONNECT, Verdict.CONNECT_ERROR),
    (F, Cause.NO_SOCKET): Rule(_W, _W, *_SOCKETS, Verdict.CANCELLED),
    (F, Cause.RESET): Rule(_W, _W, *_CUT, Verdict.CUT),
    (F, Cause.FIRST_BYTE_TIMEOUT): Rule(_W, _W, *_SLOW, Verdict.TIMEOUT),
    (F, Cause.SILENCE): Rule(_W, _W, *_SILENT, Verdict.TIMEOUT),
    (F, Cause.BAD_RESPONSE): Rule(_W, _W, *_GARBLED, Verdict.SERVER_ERROR),
    (F, Cause.SERVER_ERROR): Rule(_W, _W, *_FAILED, Verdict.SERVER_ERROR),
    (F, Cause.BUSY): Rule(_W, _W, *_BUSY, Verdict.BACKPRESSURE),
    (F, Cause.PREFILL_REFUSED): Rule(_W, _W, *_FAILED, Verdict.CLIENT_ERROR),
    (F, Cause.PREFILL_USELESS): Rule(_W, _W, *_FAILED, Verdict.CLIENT_ERROR),
    (F, Cause.DEADLINE): Rule(_A, _A, *_LATE, Verdict.CANCELLED),
    (F, Cause.DRAIN): Rule(_A, _A, *_STOPPING, Verdict.CANCELLED),
    (C, Cause.PREFILL_EXPIRED): Rule(_Z, _W, *_LATE, Verdict.CANCELLED),
    (C, Cause.REFUSED): Rule(_R, _A, *_UNREACHABLE, Verdict.CONNECT_ERROR),
    (C, Cause.CONNECT_TIMEOUT): Rule(_R, _A, *_SLOW_CONNECT, Verdict.CONNECT_ERROR),
    (C, Cause.NO_SOCKET): Rule(_R, _A, *_SOCKETS, Verdict.CANCELLED),
    (C, Cause.DEADLINE): Rule(_A, _A, *_LATE, Verdict.CANCELLED),
    (C, Cause.DRAIN): Rule(_A, _A, *_STOPPING, Verdict.CANCELLED),
    (C, Cause.UPLOAD_TOO_LARGE): Rule(_A, _A, *_LARGE_BODY, Verdict.CANCELLED),
    (W, Cause.STALE): Rule(_S, _A, *_CUT, Verdict.CANCELLED),
    (W, Cause.RESET): Rule(_R, _A, *_CUT, Verdict.CUT),
    (W, Cause.FIRST_BYTE_TIMEOUT): Rule(_R, _A, *_SLOW, Verdict.TIMEOUT),
    (W, Cause.BAD_RESPONSE): Rule(_R, _A, *_GARBLED, Verdict.SERVER_ERROR),
    (W, Cause.UPLOAD_STALLED): Rule(_A, _A, *_SLOW_BODY, Verdict.CANCELLED),
    (W, Cause.DEADLINE): Rule(_A, _A, *_LATE, Verdict.CANCELLED),
    (W, Cause.DRAIN): Rule(_A, _A, *_STOPPING, Verdict.CANCELLED),
    (W, Cause.UPLOAD_TOO_LARGE): Rule(_A, _A, *_LARGE_BODY, Verdict.CANCELLED),
    (H, Cause.HAND_OFF_FAILED): Rule(_W, _P, *_FAILED, Verdict.CANCELLED),
    (H, Cause.SERVER_ERROR): Rule(_R, _P, *_FAILED, Verdict.SERVER_ERROR),
    (H, Cause.BUSY): Rule(_R, _P, *_BUSY, Verdict.BACKPRESSURE),
    (H, Cause.RESET): Rule(_R, _A, *_CUT, Verdict.CUT),
    (H, Cause.SILENCE): Rule(_R, _A, *_SILENT, Verdict.TIMEOUT),
    (H, Cause.BAD_RESPONSE): Rule(_R, _A, *_GARBLED, Verdict.SERVER_ERROR),
    (H, Cause.DEADLINE): Rule(_A, _A, *_LATE, Verdict.CANCELLED),
    (H, Cause.DRAIN): Rule(_A, _A, *_STOPPING, Verdict.CANCELLED),
    (H, Cause.UPLOAD_TOO_LARGE): Rule(_A, _A, *_LARGE_BODY, Verdict.CANCELLED),
    (S, Cause.RESET): Rule(_B, _B, *_CUT, Verdict.CUT),
    (S, Cause.SILENCE): Rule(_B, _B, *_SILENT, Verdict.TIMEOUT),
    (S, Cause.BAD_RESPONSE): Rule(_B, _B, *_GARBLED, Verdict.SERVER_ERROR),
    (S, Cause.DEADLINE): Rule(_B, _B, *_LATE, Verdict.CANCELLED),
    (S, Cause.DRAIN): Rule(_B, _B, *_STOPPING, Verdict.CANCELLED),
    (S, Cause.UPLOAD_TOO_LARGE): Rule(_B, _B, *_LARGE_BODY, Verdict.CANCELLED),
    **{(any_phase, Cause.CLIENT_LEFT): Rule(_X, _X, *_GONE, Verdict.CANCELLED) for any_phase in Phase},
    **{(any_phase, Cause.CLIENT_STALLED): Rule(_X, _X, *_STALLED, Verdict.CANCELLED) for any_phase in Phase},
}
"""Pairs that are not here cannot happen; asking for one is a bug and raises KeyError."""

STALE_WITHIN_S = 1.0
"""A reused connection lost this soon after the request was written was closed while idle: the request crossed the close
on its way. One lost later had the request, and sending the same replica the same request again would be wrong."""

HUNG_AFTER_S = 30.0
HUNG_AFTER_PREDICTIONS = 5.0
"""Clients and deadlines are often more impatient than the first-byte timeout, so an engine that hangs while its server
answers probes might never be found out by timeouts. Hence one exception to the verdicts above: a stream that is given
up before its first token counts as a timeout if it has waited this long (and this many times longer than predicted),
and no token of any request has come from the replica in all that time."""

STATUS_CAUSES: dict[int, Cause] = {
    429: Cause.BUSY,
    500: Cause.SERVER_ERROR,
    502: Cause.SERVER_ERROR,
    503: Cause.BUSY,
    504: Cause.SERVER_ERROR,
}
"""Replica statuses that are looked up in the table; every other status is an answer and is relayed."""
