"""One decision as it was made: what `warmgate explain` takes apart later.

Nothing is worked out here. At the decision, what the next request would overwrite is copied, as it is: the columns of
the candidates, and which sets of replicas were left over on the way. The terms of the cost come out of that when
somebody asks, through the policy's own code (`gateway.routing.explain`).
"""

from array import array
from collections.abc import Sequence
from typing import Any

from gateway.replicas.registry import Fleet
from gateway.routing.hand_off import Plan
from gateway.routing.pairing import Difference
from policies.types import Choice, Column, Policy

COPIED = (
    Column.IN_FLIGHT,
    Column.DECODES,
    Column.PREFILL_TOKENS,
    Column.KV_ROOM_TOKENS,
    Column.CACHE_FULL,
    Column.ENGINE_KV_USAGE,
    Column.TIED_PER_S,
    Column.TIED_SAVED,
    Column.MATCHED_TOKENS,
    Column.MEMORY_WAIT_S,
    Column.PREFILL_S,
    Column.OWN_PREFILL_S,
    Column.PREDICTED_TTFT_S,
    Column.DECODE_DELAY_S,
    Column.BATCH_COST_S,
)
"""The order of `Copy.columns`."""


_COUNTS = 2
"""So many of these, the first, are whole numbers."""
_PREDICTED_FROM = COPIED.index(Column.OWN_PREFILL_S)


class Copy:
    """The columns of one moment, in one piece: thousands of these are kept, and are not to be a hundred objects each.

    Attributes:
        slots: the candidates that were looked at; of many, not all.
        whole: columns are indexed by slot; else by position in `slots`.
    """

    __slots__ = ("_ahead", "_predicted", "_values", "slots", "whole")

    def __init__(self, slots: Sequence[int], whole: bool, values: bytes, ahead: bool, predicted: bool) -> None:
        """Keep values.

        Args:
            slots: as the attribute.
            whole: as the attribute.
            values: the columns of `COPIED`, one after the other, all of one length, as doubles.
            ahead: work ahead had been filled.
            predicted: so had predictions.
        """
        self.slots = slots
        self.whole = whole
        self._values = values
        self._ahead = ahead
        self._predicted = predicted

    @property
    def columns(self) -> list[Sequence[Any]]:
        """The columns in the order of `COPIED`; what had not been filled is empty."""
        numbers = array("d", self._values)
        width = len(numbers) // len(COPIED)
        found: list[Sequence[Any]] = []
        for number, column in enumerate(COPIED):
            values = numbers[number * width : (number + 1) * width].tolist()
            if number < _COUNTS:
                found.append([int(value) for value in values])
            elif column is Column.CACHE_FULL:
                found.append([bool(value) for value in values])
            elif (column is Column.PREFILL_S and not self._ahead) or (
                number >= _PREDICTED_FROM and not self._predicted
            ):
                found.append(())
            else:
                found.append(values)
        return found


class Standing:
    """What was known of each replica from one change of the fleet to the next. Shared by all decisions between them.

    Attributes:
        replicas: by slot: name, URL, role, models, most requests at a time, and what keeps it from requests, or "".
        capacity_tokens: KV memory, by slot.
    """

    __slots__ = ("capacity_tokens", "replicas")

    def __init__(self, fleet: Fleet, capacity_tokens: Sequence[float]) -> None:
        self.capacity_tokens = tuple(capacity_tokens)
        self.replicas: dict[int, tuple[str, str, str, frozenset[str], int | None, str]] = {}
        for replica in fleet.by_slot:
            if replica is not None:
                state = ""
                if replica.draining:
                    state = "draining"
                elif not replica.up:
                    state = "down: health probes fail"
                elif replica.ejected:
                    state = "ejected: its circuit breaker is open"
                spec = replica.spec
                self.replicas[replica.slot] = (
                    replica.name,
                    replica.base_url,
                    spec.role,
                    frozenset(replica.listing.objects),
                    spec.max_in_flight,
                    state,
                )


class Decision:
    """Which replica a request went to, and out of what.

    Attributes:
        policy: the policy that chose.
        now_s: when: monotonic seconds.
        model: the name it was routed by.
        prompt_tokens, output_tokens: of the request, as estimated.
        standing: the replicas.
        routable: slots that could serve the model.
        roomy: those of them that had room.
        spared: slots that had asked for a pause.
        slots: those the policy could choose from.
        tried: slots of earlier attempts.
        copy: the columns.
        predicted: the predictions in them are of this request.
        choice: the policy's.
        error: median error for which predictions were not followed; None if they were.
        outlook: what was predicted of its latency targets; None without any.
        plan: the hand-off; None if one replica serves the whole request.
        considered: what was found of hand-offs, taken or not; None if none was worth it.
        final: that, or the plan's.
        slot: where it was sent; to be answered, if there is a plan.
        cached_tokens, own_prefill_s, ttft_s, memory_wait_s, ahead_s: of this slot, without regard to the plan.
        before: the decision about the attempt before.
        failure: what became of this attempt, if another followed.
    """

    __slots__ = (
        "ahead_s",
        "before",
        "cached_tokens",
        "choice",
        "considered",
        "copy",
        "error",
        "failure",
        "final",
        "memory_wait_s",
        "model",
        "now_s",
        "outlook",
        "output_tokens",
        "own_prefill_s",
        "plan",
        "policy",
        "predicted",
        "prompt_tokens",
        "roomy",
        "routable",
        "slot",
        "slots",
        "spared",
        "standing",
        "tried",
        "ttft_s",
    )

    def __init__(
        self,
        policy: Policy,
        now_s: float,
        model: str | None,
        prompt_tokens: float,
        output_tokens: float,
        standing: Standing,
        routable: Sequence[int],
        roomy: Sequence[int],
        spared: Sequence[int],
        slots: Sequence[int],
        tried: Sequence[int],
        copy: Copy,
        predicted: bool,
        choice: Choice,
        error: float | None,
        outlook: str | None,
    ) -> None:
        self.policy = policy
        self.now_s = now_s
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.standing = standing
        self.routable = routable
        self.roomy = roomy
        self.spared = spared
        self.slots = slots
        self.tried = tried
        self.copy = copy
        self.predicted = predicted
        self.choice = choice
        self.error = error
        self.outlook = outlook
        self.slot = choice.slot
        self.plan: Plan | None = None
        self.considered: Plan | Difference | None = None
        self.final = choice
        self.cached_tokens = 0.0
        self.ahead_s = 0.0
        self.own_prefill_s = 0.0
        self.ttft_s = 0.0
        self.memory_wait_s = 0.0
        self.before: Decision | None = None
        self.failure: str | None = None
