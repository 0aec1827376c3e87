"""One policy against one load, from the first arrival to the last answer.

Theory of operation
- Arrivals, ends of engine steps, incidents and scrapes are events on one clock. At an arrival the gateway's router
  assigns the request as it would live, and the replica's engine queues it.
- At the end of a step its tokens are reported to the gateway, which releases and learns, and to the client, who may
  send the next turn of the session.
- An engine may do many decode steps as one event, up to the moment before which nothing can come in: the next known
  arrival or incident, and in closed loops the shortest think time from now.
- A replica that dies cuts its requests. Those without a first token are tried elsewhere, as the live exchange does with
  an answer that has not begun, by the same limits.
"""

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.proxy.failures import TABLE, Cause, Phase
from gateway.replicas.breaker import Outcome
from gateway.routing.assignment import Assignment
from gateway.routing.refusals import NoReplica, TargetsOutOfReach
from loadtests.engine import EngineRequest, StepResult
from loadtests.replay.arrivals import Arrivals, StageSpan
from loadtests.replay.class_gaps import ClassGaps
from loadtests.replay.engines import SimulatedReplica
from loadtests.replay.events import REPORT, Events
from loadtests.replay.kv_events import EventFeed
from loadtests.replay.prefill_legs import PrefillLegs
from loadtests.replay.record import RequestRecord, TokenGaps
from loadtests.replay.settings import ReplaySettings
from loadtests.replay.watch import Watch
from loadtests.replay.wiring import GatewayParts, body_of, wire
from loadtests.workloads.prompt import Part
from loadtests.workloads.types import Load, Session, Turn
from policies.types import Policy

NO_REPLICA = "no_replica"
REFUSED = "refused"

_REFUSED = TABLE[Phase.CONNECTING, Cause.REFUSED].verdict
_CUT = TABLE[Phase.WAITING, Cause.RESET].verdict


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay has to tell; `figures` makes sense of it."""

    load: Load
    policy: str
    settings: ReplaySettings
    records: list[RequestRecord]
    """Every request, in order of arrival."""
    gaps: TokenGaps
    spans: list[StageSpan]
    replicas: list[SimulatedReplica]
    decisions_s: "array[float]"
    """CPU seconds of each decision, match and prediction included."""
    fallback_decisions: int = 0
    """Requests that load decided, because predictions were too wrong."""
    class_gaps: Mapping[str, TokenGaps] = field(default_factory=dict)
    """Of the classes that the load names."""


class Replay:
    """Runs one policy on one load.

    Args:
        load: the requests.
        policy: a fresh policy.
        settings: everything else.
        on_end: called after each request that has ended.
        label: name of the run in reports; the policy's own if None.
    """

    def __init__(
        self,
        load: Load,
        policy: Policy,
        settings: ReplaySettings,
        on_end: Callable[[RequestRecord], None] = lambda record: None,
        label: str | None = None,
    ) -> None:
        self._load = load
        self._settings = settings
        self._on_end = on_end
        self._events = Events()
        self._gateway: GatewayParts = wire(settings, policy, self._events)
        self._router = self._gateway.router
        self._label = policy.name if label is None else label
        self._arrivals = Arrivals(load, settings.speed, self._events, self._arrive)
        self._replicas = [
            SimulatedReplica(slot, model, self._events, self._quiet_until, settings.kv_events)
            for slot, model in enumerate(settings.replicas)
        ]
        for replica in self._replicas:
            replica.on_step_end = self._step_ended
            replica.on_tokens = self._tokens_emitted
        self._watch = Watch(self._gateway.fleet, self._replicas, settings, self._events, lambda: self._arrivals.done)
        self._feeds = [
            EventFeed(
                self._router.index,
                self._gateway.keys,
                replica.slot,
                replica.model.limits.block_size_tokens,
                settings.kv_events_lost,
                settings.seed,
            )
            for replica in (self._replicas if settings.kv_events else ())
        ]
        # Sessions are known by identity: their prompts would make for long comparisons.
        self._slos = {
            id(session): settings.slos[number % len(settings.slos)]
            for number, session in enumerate(session for stage in load.stages for session in stage.sessions)
        }
        self._in_engines: dict[EngineRequest, RequestRecord] = {}
        self._legs = PrefillLegs(self._replicas, settings.hand_off, self._events, self._arrivals)
        self._legs.on_fetched = self._fetched
        self._legs.on_failed = self._serve_whole
        self._records: list[RequestRecord] = []
        self._gaps = TokenGaps()
        self._class_gaps = ClassGaps(len(self._replicas)) if load.request_classes else None
        self._decisions_s = array("d")
        self._requests = 0
        self.assigning: RequestRecord
        """The request that the policy is being asked about, for policies that are bounds and look into the replay."""

    @property
    def replicas(self) -> Sequence[SimulatedReplica]:
        """The replicas by slot."""
        return self._replicas

    def run(self) -> ReplayResult:
        """Replay the whole load."""
        self._watch.start()
        for incident in self._settings.incidents:
            # What a dying replica leaves behind is sent again at that moment.
            self._arrivals.expect(incident.at_s)
            call = self._start_replica if incident.starts else self._end_replica
            self._events.at(incident.at_s, REPORT, self._incident, call, self._replicas[incident.slot])
        self._arrivals.start()
        self._events.run()
        return ReplayResult(
            self._load,
            self._label,
            self._settings,
            self._records,
            self._gaps,
            self._arrivals.spans,
            self._replicas,
            self._decisions_s,
            sum(decisions for _, _, decisions in self._router.fallback.pools()),
            self._class_gaps.gaps if self._class_gaps is not None else {},
        )

    # -- a request

    def _arrive(self, session: Session, turn_number: int) -> None:
        turn = session.turns[turn_number]
        key = self._gateway.keys.key(turn.prompt)
        max_tokens = turn.output_tokens if self._settings.announce_output else None
        slo = self._slos[id(session)]
        asked = None if self._settings.slo_routing == "off" else (_header(slo.ttft_ms), _header(slo.tpot_ms))
        query = self._router.query(body_of(key, session.key, max_tokens), {}, asked, self._events.now_s)
        record = RequestRecord(session, turn_number, self._arrivals.stage, self._events.now_s, query, slo)
        self._records.append(record)
        self._gateway.retry_budget.deposit()
        try:
            assignment = self._assign(record)
        except TargetsOutOfReach:
            self._end(record, REFUSED)
            return
        if assignment is None:
            self._end(record, NO_REPLICA)
            return
        record.predicted_ttft_s = assignment.predicted_ttft_s
        self._attempt(record, assignment)

    def _assign(self, record: RequestRecord) -> Assignment | None:
        self.assigning = record
        began_s = time.thread_time()
        try:
            assignment = self._router.assign(record.query, record.tried, self._events.now_s)
        except TargetsOutOfReach:
            if record.attempts:
                return None
            raise
        except NoReplica:
            return None
        self._decisions_s.append(time.thread_time() - began_s)
        return assignment

    def _attempt(self, record: RequestRecord, assignment: Assignment) -> None:
        record.assignment = assignment
        record.attempts += 1
        record.slot = assignment.slot
        record.tried += (assignment.slot,)
        record.assigned_s = self._events.now_s
        record.expected_cached_tokens = assignment.expected_cached_tokens
        replica = self._replicas[assignment.slot]
        if not replica.alive:
            self._lost(record, _REFUSED)
            return
        if assignment.hand_off is not None:
            self._requests += 1
            self._legs.start(str(self._requests), record, assignment, assignment.hand_off)
            return
        self._add(record, assignment, self._engine_request(record.turn, replica))

    def _add(self, record: RequestRecord, assignment: Assignment, request: EngineRequest) -> None:
        replica = self._replicas[assignment.slot]
        try:
            replica.add(request)
        except ValueError:
            # A prompt that the engine can never hold: its server answers 400.
            assignment.finish(self._events.now_s, Outcome.CLIENT_ERROR, None, None, keep_prefix=False)
            self._end(record, Outcome.CLIENT_ERROR)
            return
        record.engine_request = request
        self._in_engines[request] = record

    def _fetched(self, record: RequestRecord, assignment: Assignment, prefilled: EngineRequest) -> None:
        """The KV of a prompt is where its answer will be made."""
        replica = self._replicas[assignment.slot]
        if not replica.alive:
            self._lost(record, _CUT)
            return
        record.disaggregated = True
        record.prefill_cached_tokens = prefilled.cached_tokens
        request = self._engine_request(record.turn, replica)
        request.external_tokens = request.prompt_tokens
        self._add(record, assignment, request)

    def _serve_whole(self, record: RequestRecord, assignment: Assignment) -> None:
        """A hand-off has failed: route the request again, as the live exchange does."""
        now_s = self._events.now_s
        record.tried = record.tried[:-1]
        try:
            following = self._router.assign(record.query, record.tried, now_s, whole=True)
        except NoReplica:
            record.tried += (assignment.slot,)
            self._lost(record, Outcome.CANCELLED)
            return
        assignment.finish(now_s, Outcome.CANCELLED, None, None, keep_prefix=False)
        record.attempts -= 1
        self._attempt(record, following)

    def _quiet_until(self) -> float:
        return min(self._arrivals.quiet_until(), self._legs.quiet_until())

    def _engine_request(self, turn: Turn, replica: SimulatedReplica) -> EngineRequest:
        self._requests += 1
        sequence = turn.prompt.extended(Part(turn.answer, turn.output_tokens, "assistant"))
        hashes = sequence.names_every(replica.model.limits.block_size_tokens)
        return EngineRequest(str(self._requests), turn.prompt.tokens, turn.output_tokens, hashes)

    def _lost(self, record: RequestRecord, verdict: Outcome) -> None:
        """The attempt has failed with its replica: try another, or give up."""
        failed = record.assignment
        assert failed is not None
        retries = self._settings.retries
        now_s = self._events.now_s
        streaming = record.first_token_s is not None
        assignment = None
        if (
            not streaming
            and record.attempts < retries.max_attempts
            and now_s - record.arrival_s <= retries.within_s
            and self._gateway.retry_budget.withdraw()
        ):
            assignment = self._assign(record)
        failed.finish(now_s, verdict, None, None, keep_prefix=streaming)
        if assignment is None:
            self._end(record, verdict)
        else:
            self._attempt(record, assignment)

    def _end(self, record: RequestRecord, error: Outcome | str | None) -> None:
        now_s = self._events.now_s
        record.ended_s = now_s
        record.error = error
        self._on_end(record)
        self._arrivals.turn_ended(record.session, record.turn_number, goes_on=error is None)

    # -- news of the engines

    def _tokens_emitted(self, replica: SimulatedReplica, emitted_s: float) -> None:
        """The end of a step shows in the tokens of its requests."""
        delay_s = self._settings.event_delay_s
        if delay_s > 0:
            self._events.at(emitted_s + delay_s, REPORT, self._step_seen, replica.slot, emitted_s + delay_s)
        else:
            self._step_seen(replica.slot, emitted_s)

    def _step_seen(self, slot: int, seen_s: float) -> None:
        self._router.ledger.step_seen_s[slot] = seen_s

    def _step_ended(self, replica: SimulatedReplica, result: StepResult, began_s: float) -> None:
        now_s = self._events.now_s
        in_engines = self._in_engines
        counted = not self._load.stages[self._arrivals.stage].warm_up
        if self._class_gaps is not None:
            self._class_gaps.step_ended(replica.slot, result, began_s, now_s, in_engines, counted=counted)
        if counted:
            gaps = self._gaps
            if result.decodes:
                gaps.add(result.duration_s / result.steps, result.decodes * result.steps)
            for request in result.preempted:
                if request.emitted:
                    gaps.preempted(request, began_s)
            for request in result.resumed:
                gaps.resumed(request, now_s)
        delay_s = self._settings.event_delay_s
        if self._feeds and (result.stored or result.removed or result.finished):
            if delay_s > 0:
                self._events.at(now_s + delay_s, REPORT, self._map_learns, replica.slot, result)
            else:
                self._map_learns(replica.slot, result)
        if not result.first_tokens and not result.finished:
            return
        if self._legs.under_way:
            self._legs.step_ended(result, delay_s)
        first = [
            (record, record.assignment) for record in map(in_engines.get, result.first_tokens) if record is not None
        ]
        ended = [in_engines.pop(request) for request in result.finished if request in in_engines]
        if delay_s > 0:
            self._events.at(now_s + delay_s, REPORT, self._tell, first, ended)
        else:
            self._tell(first, ended)

    def _map_learns(self, slot: int, result: StepResult) -> None:
        feed = self._feeds[slot]
        feed.apply(result.stored, result.removed)
        for request in result.finished:
            feed.ended(request)

    def _tell(self, first: list[tuple[RequestRecord, Assignment | None]], ended: list[RequestRecord]) -> None:
        """Tokens reach the gateway, and through it the client."""
        now_s = self._events.now_s
        for record, assignment in first:
            # News of an attempt that was lost meanwhile never arrives.
            if assignment is not None and record.assignment is assignment and not assignment.finished:
                record.first_token_s = now_s
                assignment.first_token(now_s)
        for record in ended:
            assignment, request = record.assignment, record.engine_request
            assert assignment is not None
            assert request is not None
            record.cached_tokens = request.cached_tokens
            if record.disaggregated and assignment.hand_off is not None:
                record.cached_tokens = record.prefill_cached_tokens
            assignment.finish(
                now_s,
                Outcome.OK,
                request.prompt_tokens,
                record.turn.output_tokens,
                keep_prefix=True,
                cached_tokens=request.cached_tokens,
            )
            self._end(record, None)

    # -- replicas come and go

    def _incident(self, call: Callable[[SimulatedReplica], None], replica: SimulatedReplica) -> None:
        self._arrivals.happened()
        call(replica)

    def _end_replica(self, replica: SimulatedReplica) -> None:
        if not replica.alive:
            return
        replica.die()
        if self._feeds:
            self._feeds[replica.slot].restarted()
        lost = [(request, record) for request, record in self._in_engines.items() if record.slot == replica.slot]
        for request, _ in lost:
            del self._in_engines[request]
            self._gaps.ended(request)
            if self._class_gaps is not None:
                self._class_gaps.ended(replica.slot, request)
        for _, record in lost:
            self._lost(record, _CUT)
        self._legs.replica_died(replica.slot)
        self._watch.died(replica)

    def _start_replica(self, replica: SimulatedReplica) -> None:
        if replica.alive:
            self._end_replica(replica)
        replica.start()
        self._watch.started(replica)


def _header(milliseconds: float) -> bytes:
    return b"%.3f" % milliseconds
