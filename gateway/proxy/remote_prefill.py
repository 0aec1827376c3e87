"""The prompt of an attempt, computed by another replica than the one that answers (vLLM: remote prefill).

Rules:
- It belongs to one attempt. It sends the first of the two requests, as a `PrefillLeg`, and brings what the second one
  needs. The second request is the exchange's; when it may go out is said here, by `prompt_ready`.
- What it brings is used at most once: KV that has been read is freed, and parameters that point to freed blocks give
  wrong answers in silence. So a request with `params` travels on a connection of its own, which cannot be stale, and
  whatever goes wrong after it was sent, the prompt is computed again.
- It ends in `prompt_ready`, `prompt_failed`, or in neither after `abandon`. With a push connector the request may go
  out while the prompt is still being computed; then `prompt_failed` may follow `prompt_ready`.
"""

from typing import TYPE_CHECKING, Protocol

from gateway.prompt.hand_off import Prefilled, prefill_body, pushed_params, with_transfer_params
from gateway.proxy.failures import TABLE, Cause, Phase
from gateway.proxy.heads import RequestHead, replica_request_head
from gateway.proxy.prefill_leg import PrefillLeg
from gateway.routing.hand_off import HandOff

if TYPE_CHECKING:
    from gateway.proxy.plane import DataPlane


class PromptOwner(Protocol):
    """Who needs the prompt to be computed."""

    def prompt_ready(self) -> None:
        """The request may go to the replica that answers."""

    def prompt_failed(self, cause: Cause) -> None:
        """The prompt is not computed, or its KV cannot be fetched."""


class RemotePrefill:
    """One prompt computed elsewhere.

    Attributes:
        hand_off: what it holds on the replica that computes it.
        params: the `kv_transfer_params` of the request to the replica that answers; None before they are known, and
            with a connector that needs none.
    """

    __slots__ = ("_leg", "_owner", "_plane", "_request_id", "hand_off", "params")

    def __init__(self, owner: PromptOwner, plane: "DataPlane", hand_off: HandOff, request_id: bytes) -> None:
        """Prepare.

        Args:
            owner: told how it ends.
            plane: connections, counts and what is shared.
            hand_off: where the prompt is computed.
            request_id: both requests have it.
        """
        self._owner = owner
        self._plane = plane
        self._request_id = request_id
        self._leg: PrefillLeg | None = None
        self.hand_off = hand_off
        self.params: bytes | None = None

    def start(self, head: RequestHead, body: bytes) -> None:
        """Send the prompt to be computed; with a push connector the request may follow at once.

        Args:
            head, body: the client's request.
        """
        plane, replica, connector = self._plane, self.hand_off.replica, self.hand_off.settings.connector
        needs_params = connector != "shared_storage"
        body = prefill_body(body, transfer=needs_params)
        replica_head = replica_request_head(
            head,
            replica.host_header,
            replica.base_path.encode(),
            plane.replica_authorization(replica, head),
            self._request_id,
            len(body),
        )
        leg = self._leg = PrefillLeg(
            self, plane.pool(replica), replica_head, body, plane.now, needs_params=needs_params
        )
        plane.tally.prefill_legs[plane.metric_name(replica)] += 1
        leg.start()
        if connector == "nixl_push" and self._leg is leg:
            identity = plane.router.hand_offs.identity(replica)
            if identity is not None:
                self.params = pushed_params(identity, self._request_id)
                self._owner.prompt_ready()

    def tick(self, now_s: float) -> None:
        """Look at the limits in time."""
        if self._leg is not None:
            self._leg.tick(now_s, self._plane.limits)

    def abandon(self) -> None:
        """Nobody needs the prompt any more."""
        if self._leg is not None:
            self._leg.abandon()
            self._leg = None

    # -- the request to the replica that answers

    def fetch(self, now_s: float) -> bool:
        """The request is about to be sent; return False if the KV may be gone by the time it arrives."""
        if self.hand_off.expired(now_s):
            return False
        self.hand_off.fetching_s = now_s
        return True

    def with_params(self, body: bytes) -> bytes:
        """Return the body of the request: the client's, and how to get the KV."""
        return body if self.params is None else with_transfer_params(body, self.params)

    def first_token(self, now_s: float) -> None:
        """The KV has been fetched: the answer has begun."""
        fetching_s = self.hand_off.fetching_s
        if fetching_s is not None:
            self._plane.tally.handed_off(self.hand_off.transfer_bytes, now_s - fetching_s)

    # -- LegOwner

    def prefilled(self, leg: PrefillLeg, answer: Prefilled) -> None:
        """The prompt is computed: have it fetched."""
        if leg is not self._leg:
            return
        self._leg = None
        plane, hand_off = self._plane, self.hand_off
        hand_off.returned(plane.now(), answer.prompt_tokens, answer.cached_tokens)
        plane.tally.prefill_leg_s.add(hand_off.observed_s or 0.0)
        plane.queue.room_may_be()
        connector = hand_off.settings.connector
        if connector == "nixl_push" and answer.identity is not None:
            plane.router.hand_offs.identify(hand_off.replica, answer.identity)
        if self.params is not None:
            # The request has gone ahead.
            return
        if connector == "nixl_push" and answer.identity is not None:
            self.params = pushed_params(answer.identity, self._request_id)
        elif connector == "nixl":
            self.params = answer.params
        self._owner.prompt_ready()

    def prefill_failed(self, leg: PrefillLeg, cause: Cause, retry_after: bytes) -> None:
        """The prompt is not computed."""
        if leg is not self._leg:
            return
        self._leg = None
        plane, hand_off = self._plane, self.hand_off
        hand_off.ended(plane.now(), TABLE[Phase.PREFILL, cause].verdict)
        plane.tally.prefill_failures[plane.metric_name(hand_off.replica), cause] += 1
        if cause is Cause.BUSY:
            plane.replica_busy(hand_off, retry_after)
        self._owner.prompt_failed(cause)
