"""Prompts on prefill replicas, and their KV on its way.

A prefill engine makes one token and keeps the blocks. Then the KV moves: link latency, and what the decode replica
lacks over the link's rate. Transfers out of one replica share its link, so they queue for it. The blocks are free when
the transfer ends; the decode engine then computes the last token of the prompt only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.replicas.breaker import Outcome
from gateway.routing.assignment import Assignment
from gateway.routing.hand_off import HandOff, HandOffSettings
from loadtests.engine import Engine, EngineRequest, StepResult
from loadtests.replay.arrivals import Arrivals
from loadtests.replay.engines import SimulatedReplica
from loadtests.replay.events import ARRIVAL, REPORT, Events
from loadtests.replay.record import RequestRecord


@dataclass(slots=True)
class _Leg:
    record: RequestRecord
    assignment: Assignment
    hand_off: HandOff
    request: EngineRequest
    engine: Engine


class PrefillLegs:
    """All hand-offs of a replay that are under way."""

    def __init__(
        self, replicas: Sequence[SimulatedReplica], settings: HandOffSettings, events: Events, arrivals: Arrivals
    ) -> None:
        """Start with none.

        Args:
            replicas: by slot.
            settings: of the link.
            events: the clock.
            arrivals: told when requests will come to decode replicas.
        """
        self._replicas = replicas
        self._settings = settings
        self._events = events
        self._arrivals = arrivals
        self._legs: dict[EngineRequest, _Leg] = {}
        self._link_free_s = [0.0] * len(replicas)
        self.on_fetched: Callable[[RequestRecord, Assignment, EngineRequest], None] = lambda record, place, request: (
            None
        )
        self.on_failed: Callable[[RequestRecord, Assignment], None] = lambda record, place: None

    @property
    def under_way(self) -> bool:
        """Some prompt is being computed."""
        return bool(self._legs)

    def quiet_until(self) -> float:
        """Until when no prompt that is being computed now can come to a decode replica."""
        if not self._legs:
            return float("inf")
        now_s = self._events.now_s
        ends = (self._replicas[leg.hand_off.slot].ends_s for leg in self._legs.values())
        return min(now_s if end_s is None else end_s for end_s in ends) + self._settings.link_latency_s

    def start(self, name: str, record: RequestRecord, assignment: Assignment, hand_off: HandOff) -> None:
        """Give a prompt to its prefill replica.

        Args:
            name: unique id of the engine's request.
            record: the request.
            assignment: its place on the decode replica.
            hand_off: its place on the prefill replica.
        """
        replica = self._replicas[hand_off.slot]
        prompt = record.turn.prompt
        request = EngineRequest(
            name, prompt.tokens, 1, prompt.names_every(replica.model.limits.block_size_tokens), hold=True
        )
        leg = _Leg(record, assignment, hand_off, request, replica.engine)
        if not replica.alive:
            self._fail(leg, Outcome.CONNECT_ERROR)
            return
        try:
            replica.add(request)
        except ValueError:
            self._fail(leg, Outcome.CLIENT_ERROR)
            return
        self._legs[request] = leg

    def step_ended(self, result: StepResult, delay_s: float) -> None:
        """Prompts may have been computed; the gateway sees it after a delay."""
        for request in result.finished:
            leg = self._legs.pop(request, None)
            if leg is not None:
                at_s = self._events.now_s + delay_s
                self._arrivals.expect(at_s)
                self._events.at(at_s, ARRIVAL, self._computed, leg)

    def replica_died(self, slot: int) -> None:
        """The prompts on a replica are lost with it."""
        for leg in [leg for leg in self._legs.values() if leg.hand_off.slot == slot]:
            del self._legs[leg.request]
            self._fail(leg, Outcome.CUT)

    def _computed(self, leg: _Leg) -> None:
        self._arrivals.happened()
        if leg.assignment.finished:
            leg.engine.release(leg.request)
            return
        now_s, hand_off, request = self._events.now_s, leg.hand_off, leg.request
        hand_off.returned(now_s, request.prompt_tokens, request.cached_tokens)
        hand_off.fetching_s = now_s
        decode = self._replicas[leg.assignment.slot]
        block = decode.model.limits.block_size_tokens
        held = block * decode.engine.pool.match(request.block_hashes, (request.prompt_tokens - 1) // block)
        wire_s = (request.prompt_tokens - held) * decode.model.kv_bytes_per_token / self._settings.link_bytes_per_s
        begins_s = max(now_s + self._settings.link_latency_s, self._link_free_s[hand_off.slot])
        self._link_free_s[hand_off.slot] = begins_s + wire_s
        self._arrivals.expect(begins_s + wire_s)
        self._events.at(begins_s + wire_s, ARRIVAL, self._moved, leg)

    def _moved(self, leg: _Leg) -> None:
        self._arrivals.happened()
        replica = self._replicas[leg.hand_off.slot]
        leg.engine.release(leg.request)
        if leg.assignment.finished:
            return
        if replica.engine is not leg.engine:
            self._events.at(self._events.now_s, REPORT, self._fail, leg, Outcome.CANCELLED)
            return
        self.on_fetched(leg.record, leg.assignment, leg.request)

    def _fail(self, leg: _Leg, outcome: Outcome) -> None:
        leg.hand_off.ended(self._events.now_s, outcome)
        if not leg.assignment.finished:
            self.on_failed(leg.record, leg.assignment)
