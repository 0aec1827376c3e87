"""One replica's response to one attempt, on its way into the client's answer.

Rules:
- Until `begin` or `send_whole` nothing of it has reached the client, so that another replica can answer in its place
  unseen. Kept back that long is a plain JSON body of moderate size, to its end.
- A stream is passed on from its first byte, with one exception: where the KV of its prompt is fetched from another
  replica, from its first whole event. vLLM begins a stream before it has fetched the KV, and tells of a failure there.
- What is passed on is the replica's bytes, less the usage event that only the gateway has asked for.
- What a failure means is not decided here; this file says what the bytes show.
"""

import re

import orjson

from gateway.proxy.answer import Answer
from gateway.proxy.errors import GatewayError
from gateway.proxy.failures import STATUS_CAUSES, TABLE, Phase
from gateway.proxy.heads import ResponseHead
from gateway.proxy.observe import StreamObserver, Usage, usage_in
from gateway.proxy.outcome import Outcome
from gateway.proxy.usage_filter import UsageFilter
from gateway.replicas.breaker import Outcome as Verdict

# A server's error inside an event stream, as vLLM writes it: {"error": {..., "code": 500}}.
_SERVER_FAULT = re.compile(rb'"code"\s*:\s*"?5\d\d\b')
_ERROR_EVENT = b'data: {"error"'
_WELL = (Verdict.OK, Outcome.OK)
_MAX_EVENT_BYTES = 65536
"""A first event that is longer is no error."""


class Reply:
    """One response.

    Attributes:
        head: its head.
        stream: it is an event stream.
        kept_back: nothing of it has been passed on; bytes go to `keep`.
        out: where bytes go otherwise.
        observer: watches the stream, once it is passed on; None for other bodies.
    """

    __slots__ = (
        "_answer",
        "_kept",
        "_kept_bytes",
        "_method",
        "_usage_unasked",
        "head",
        "kept_back",
        "observer",
        "out",
        "stream",
    )

    def __init__(
        self,
        head: ResponseHead,
        method: bytes,
        answer: Answer,
        max_kept_bytes: int,
        fetches_kv: bool,
        usage_unasked: bool,
    ) -> None:
        """Begin with the head.

        Args:
            head: the replica's.
            method: of the request.
            answer: what it becomes part of.
            max_kept_bytes: how long a body of known length may be to be kept back.
            fetches_kv: the replica has to fetch the KV of the prompt from another one.
            usage_unasked: the client has not asked for the usage that the stream will contain.
        """
        self.head = head
        self.stream = head.event_stream
        self.out: Answer | UsageFilter = answer
        self.observer: StreamObserver | None = None
        self._answer = answer
        self._method = method
        self._usage_unasked = usage_unasked
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        if self.stream:
            self.kept_back = fetches_kv and not head.encoded
        else:
            known = head.content_length
            self.kept_back = known <= max_kept_bytes if known is not None else b"json" in head.content_type

    def keep(self, data: bytes, max_kept_bytes: int) -> bytes:
        """Keep a piece of the body back.

        Args:
            data: the piece.
            max_kept_bytes: how much of a body that is no stream may be kept.

        Returns:
            All that has been kept, when it should be kept no longer; b"" before.
        """
        self._kept.append(data)
        self._kept_bytes += len(data)
        if not self.stream:
            return self._take() if self._kept_bytes > max_kept_bytes else b""
        begun = self._take()
        if b"\n\n" in begun or len(begun) >= _MAX_EVENT_BYTES:
            return begun
        self._kept.append(begun)
        return b""

    def begins_with_fault(self, begun: bytes) -> bool:
        """Say whether the first event of a stream tells of a server's error.

        Args:
            begun: what `keep` has returned.
        """
        return self.stream and begun.lstrip().startswith(_ERROR_EVENT) and _SERVER_FAULT.search(begun) is not None

    def begin(self, keep_alive: bool, extra: bytes) -> None:
        """Pass the head on, and what is still kept; what follows goes to `out`.

        Args:
            keep_alive: the client's connection stays open.
            extra: header lines of the gateway's own, each with its line end.
        """
        head = self.head
        self.kept_back = False
        if self.stream:
            self.observer = StreamObserver()
            # With a length stated, or under compression, the event that nobody asked for has to stay.
            if self._usage_unasked and head.content_length is None and not head.encoded:
                self.out = UsageFilter(self._answer)
        self._answer.relay_head(head, keep_alive, extra)
        if self._kept:
            self.out.relay(self._take())

    # -- its end

    def cut_short(self) -> bool:
        """Say whether a body that ends with its connection ended before its time: a replica that died."""
        head = self.head
        if head.content_length is not None or head.chunked or head.bodiless(self._method):
            return False
        if self.observer is not None:
            return not self.observer.ended_properly()
        if not self.kept_back or b"json" not in head.content_type or head.encoded:
            return False
        try:
            orjson.loads(b"".join(self._kept))
        except orjson.JSONDecodeError:
            return True
        return False

    def send_whole(self, keep_alive: bool, extra: bytes) -> Usage | None:
        """Pass on a complete response that was kept back; return the usage in it.

        Args:
            keep_alive: the client's connection stays open.
            extra: header lines of the gateway's own, each with its line end.
        """
        body = self._take()
        self._answer.relay_whole(self.head, body, keep_alive, extra)
        return usage_in(body) if self.head.status < 300 else None

    def end(self) -> Usage | None:
        """Complete the answer whose body was passed on in pieces; return the usage in it."""
        if isinstance(self.out, UsageFilter):
            self.out.flush()
        self._answer.end()
        return usage_in(self.observer.tail()) if self.observer is not None else None

    def break_off(self, error: GatewayError) -> None:
        """Say in the stream itself that it is incomplete, where a client would understand."""
        head, observer = self.head, self.observer
        # Where a length was promised, or the events are compressed, a plain event would be damage, not news.
        if observer is None or head.content_length is not None or head.encoded or head.bodiless(self._method):
            return
        event = error.event()
        if isinstance(self.out, UsageFilter):
            self.out.flush()
        self._answer.relay(event if observer.at_event_boundary() else b"\n\n" + event)

    def result(self) -> tuple[Verdict, Outcome]:
        """Return what a complete response says about its replica, and how it lets the request end."""
        status = self.head.status
        if status >= 400:
            cause = STATUS_CAUSES.get(status)
            # A 501, say, is no fault: the engine does not do this at all, and is well.
            verdict = TABLE[Phase.HELD, cause].verdict if cause is not None else Verdict.CLIENT_ERROR
            return verdict, Outcome.CLIENT_ERROR if status < 500 else Outcome.SERVER_ERROR
        observer = self.observer
        if observer is not None and observer.failed:
            # An error event inside a 200. Only the code can tell whose fault it is.
            fault = _SERVER_FAULT.search(observer.tail()) is not None
            return Verdict.SERVER_ERROR if fault else Verdict.CLIENT_ERROR, Outcome.BROKEN
        return _WELL

    def _take(self) -> bytes:
        kept = self._kept[0] if len(self._kept) == 1 else b"".join(self._kept)
        self._kept = []
        return kept
