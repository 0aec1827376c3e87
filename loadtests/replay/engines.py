"""One simulated replica: an engine on the simulated clock.

The engine computes a step when it begins; the step's news is told when it ends. Steps that only decode are done many at
a time, up to the next moment at which a request could come in: nothing that happens inside them can be seen.
"""

from collections.abc import Callable

from gateway.replicas.metrics_page import ScrapedState
from loadtests.engine import Engine, EngineRequest, StepResult
from loadtests.replay.events import STEP, Events
from loadtests.replay.settings import ReplicaModel

_MANY_STEPS = 1 << 30

TokensSeen = Callable[["SimulatedReplica", float], None]
StepEnd = Callable[["SimulatedReplica", StepResult, float], None]


class SimulatedReplica:
    """A replica's process, its engine, and the requests in it.

    Attributes:
        slot: its slot in the fleet.
        model: constants and limits.
        engine: the engine of the present process.
        alive: whether there is a process.
        started_s: when the process started.
        preemptions: of all its processes.
        ends_s: when the step under way ends; None while idle.
    """

    def __init__(
        self, slot: int, model: ReplicaModel, events: Events, quiet_until: Callable[[], float], collect_events: bool
    ) -> None:
        """Start a process.

        Args:
            slot: slot in the fleet.
            model: constants and limits.
            events: the clock.
            quiet_until: tells until when no request can come in.
            collect_events: the engine reports its KV events.
        """
        self.slot = slot
        self.model = model
        self._collect_events = collect_events
        self.engine = self._new_engine()
        self.alive = True
        self.started_s = 0.0
        self.ends_s: float | None = None
        self.on_step_end: StepEnd = lambda replica, result, began_s: None
        self.on_tokens: TokensSeen = lambda replica, emitted_s: None
        self._events = events
        self._quiet_until = quiet_until
        self._incarnation = 0
        self._scheduled = False
        self._preemptions_before = 0
        self._running = 0
        self._waiting = 0
        self._kv_usage = 0.0

    @property
    def preemptions(self) -> int:
        """Preemptions of all its processes."""
        return self._preemptions_before + self.engine.preemptions

    def add(self, request: EngineRequest) -> None:
        """Hand a request to the engine; it may join the next step.

        Raises:
            ValueError: the engine refuses it.
        """
        self.engine.add(request)
        if self.ends_s is None and not self._scheduled:
            self._scheduled = True
            self._events.at(self._events.now_s, STEP, self._begin, self._incarnation)

    def die(self) -> None:
        """The process ends; nothing of it is heard any more."""
        self.alive = False
        self._incarnation += 1
        self._preemptions_before += self.engine.preemptions
        self.engine = self._new_engine()
        self.ends_s = None
        self._scheduled = False
        self._running = self._waiting = 0
        self._kv_usage = 0.0

    def start(self) -> None:
        """A new process starts, with nothing cached."""
        self.alive = True
        self.started_s = self._events.now_s

    def metrics(self) -> ScrapedState:
        """What a scrape reads now: counts as of the end of the last step, as vLLM publishes them."""
        engine, limits = self.engine, self.model.limits
        return ScrapedState(
            running=self._running,
            waiting=self._waiting,
            kv_usage=self._kv_usage,
            prefix_queries_tokens=float(engine.prefix_queried_tokens),
            prefix_hits_tokens=float(engine.prefix_hit_tokens),
            kv_capacity_tokens=limits.total_blocks * limits.block_size_tokens,
            block_size_tokens=limits.block_size_tokens,
            num_gpu_blocks=limits.total_blocks,
            process_start_s=self.started_s,
            scraped_at_s=self._events.now_s,
        )

    def _new_engine(self) -> Engine:
        return Engine(self.model.cost, self.model.limits, collect_events=self._collect_events)

    def _begin(self, incarnation: int) -> None:
        if incarnation != self._incarnation:
            return
        self._scheduled = False
        now_s = self._events.now_s
        engine = self.engine
        context_tokens = engine.context_tokens
        result = engine.step(_MANY_STEPS, self._quiet_until() - now_s)
        if result is None:
            self.ends_s = None
            return
        self.ends_s = now_s + result.duration_s
        if result.steps > 1:
            # Nothing can come in before the last of them begins: what is known by then may be told at once. Its
            # tokens may be underway for a while, so the end of the one before is told too.
            decodes = result.decodes
            last_s = engine.cost.step_s(decodes, 0.0, context_tokens + decodes * (result.steps - 1))
            self.on_tokens(self, self.ends_s - last_s - (last_s - engine.cost.kv_s_per_token * decodes))
            self.on_tokens(self, self.ends_s - last_s)
        self._events.at(self.ends_s, STEP, self._end, incarnation, result, now_s)

    def _end(self, incarnation: int, result: StepResult, began_s: float) -> None:
        if incarnation != self._incarnation:
            return
        engine = self.engine
        self._running, self._waiting, self._kv_usage = engine.running, engine.waiting, engine.kv_usage
        if result.decodes or result.first_tokens or result.resumed:
            self.on_tokens(self, self._events.now_s)
        self.on_step_end(self, result, began_s)
        if incarnation == self._incarnation:
            self._begin(incarnation)
