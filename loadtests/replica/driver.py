"""The engine in real time: steps are computed when they start, and what they emit is told when they end.

The engine's clock is virtual and runs `speedup` times as fast as the wall's. A step starts where the one
before ended on that clock, however late the event loop woke up, so delays of the loop do not add up. Steps
shorter than about a millisecond of wall time are done several at a time, and nothing wakes up while the
engine is idle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from loadtests.engine import Engine, EngineRequest, StepResult
from loadtests.replica.metrics import ReplicaMetrics


class StepFeed(Protocol):
    """Somebody who wants to hear what every step did; `loadtests.replica.kv_events.KvFeed` is one."""

    def stepped(self, result: StepResult) -> None:
        """A step is over."""

    def told(self) -> None:
        """All steps done so far have been told."""

    def aborted(self, request: EngineRequest) -> None:
        """A request has been dropped."""


_WAKE_UP_S = 0.001
_MAX_CATCH_UP_S = 0.05
_MAX_STEPS = 1 << 30


class Generation:
    """One request in the driver's hands, with its times on the engine's clock."""

    __slots__ = (
        "admitted_s",
        "arrival_s",
        "done",
        "first_token_s",
        "natural_end",
        "on_progress",
        "reported",
        "request",
    )

    def __init__(
        self,
        request: EngineRequest,
        arrival_s: float,
        done: asyncio.Future[None],
        natural_end: bool,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.request = request
        self.done = done
        """Resolved when the last token is out, cancelled by an abort."""
        self.natural_end = natural_end
        self.on_progress = on_progress
        self.reported = 0
        """Tokens `on_progress` has been told of."""
        self.arrival_s = arrival_s
        self.admitted_s = arrival_s
        self.first_token_s = arrival_s


class Driver:
    """Runs one engine in real time on the running event loop.

    Args:
        engine: the engine, fed through the driver only.
        speedup: engine seconds per wall second.
        metrics: where times and tokens are counted.
        wall_clock: seconds from any start.
    """

    def __init__(
        self,
        engine: Engine,
        speedup: float,
        metrics: ReplicaMetrics,
        wall_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self._speedup = speedup
        self._wall_clock = wall_clock
        self._origin_s = wall_clock()
        self._clock_s = 0.0
        """Engine time at which the steps in `_results` begin."""
        self._results: list[StepResult] = []
        self._generations: dict[EngineRequest, Generation] = {}
        self._streaming: dict[EngineRequest, Generation] = {}
        """Generations with a first token and somebody who wants to hear of every one."""
        self.feed: StepFeed | None = None
        self._loop = asyncio.get_running_loop()
        self._wake_up: asyncio.Handle | None = None

    @property
    def in_flight(self) -> int:
        """Generations that are not done."""
        return len(self._generations)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do and nothing to wake up for."""
        return self._wake_up is None

    def submit(
        self,
        request: EngineRequest,
        *,
        natural_end: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> Generation:
        """Hand a request to the engine.

        Args:
            request: what to compute.
            natural_end: the answer ends by itself, not because of the client's limit.
            on_progress: called with the number of tokens emitted so far whenever there are more.

        Raises:
            ValueError: the engine refuses it.
        """
        self.engine.add(request)
        now_s = self._now_s()
        generation = Generation(request, now_s, self._loop.create_future(), natural_end, on_progress)
        self._generations[request] = generation
        if self._wake_up is None:
            self._clock_s = max(self._clock_s, now_s)
            # Not at once: the other prompts of the same HTTP request belong into the same step.
            self._wake_up = self._loop.call_soon(self._plan)
        return generation

    def abort(self, generation: Generation) -> bool:
        """Drop a generation that nobody waits for any more. Returns whether it was not done yet."""
        request = generation.request
        if self._generations.pop(request, None) is None:
            return False
        self._streaming.pop(request, None)
        self.engine.abort(request.id)
        if self.feed is not None:
            self.feed.aborted(request)
        self.metrics.finished["abort"] += 1
        generation.done.cancel()
        return True

    def close(self) -> None:
        """Stop the clock and drop everything."""
        if self._wake_up is not None:
            self._wake_up.cancel()
        for generation in list(self._generations.values()):
            self.abort(generation)

    def _now_s(self) -> float:
        return (self._wall_clock() - self._origin_s) * self._speedup

    def _plan(self) -> None:
        """Compute the next steps and sleep until they are over."""
        late_s = min(self._now_s() - self._clock_s, _MAX_CATCH_UP_S * self._speedup)
        least_s = max(_WAKE_UP_S * self._speedup, late_s)
        elapsed_s = 0.0
        while elapsed_s < least_s:
            result = self.engine.step(_MAX_STEPS, least_s - elapsed_s)
            if result is None:
                break
            elapsed_s += result.duration_s
            self._results.append(result)
        if not self._results:
            self._wake_up = None
            return
        wait_s = (self._clock_s + elapsed_s - self._now_s()) / self._speedup
        self._wake_up = self._loop.call_later(max(0.0, wait_s), self._deliver)

    def _deliver(self) -> None:
        """The planned steps are over: tell what they emitted."""
        results, self._results = self._results, []
        finished: list[Generation] = []
        for result in results:
            self._account(result, finished)
        if self.feed is not None:
            self.feed.told()
        engine = self.engine
        for request, generation in list(self._streaming.items()):
            emitted = engine.emitted_tokens(request)
            if emitted > generation.reported and generation.on_progress is not None:
                generation.reported = emitted
                generation.on_progress(emitted)
        for generation in finished:
            self._streaming.pop(generation.request, None)
            if not generation.done.done():
                generation.done.set_result(None)
        self._plan()

    def _account(self, result: StepResult, finished: list[Generation]) -> None:
        start_s = self._clock_s
        self._clock_s = end_s = start_s + result.duration_s
        metrics, generations = self.metrics, self._generations
        steps = result.steps
        step_s = result.duration_s / steps / self._speedup
        metrics.iteration_tokens.observe(result.prefill_tokens + result.decodes, steps)
        metrics.generation_tokens += result.decodes * steps + len(result.first_tokens) + len(result.resumed)
        if result.decodes:
            metrics.itl.observe(step_s, result.decodes * steps)
        for request in result.admitted:
            generation = generations.get(request)
            if generation is not None and not request.preemptions:
                generation.admitted_s = start_s
        for request in result.first_tokens:
            metrics.prompt_tokens += request.prompt_tokens
            metrics.cached_prompt_tokens += request.cached_tokens
            if request.external_tokens:
                # vLLM counts the last token of the prompt as external too, though it is computed again.
                metrics.external_prompt_tokens += request.external_tokens - request.cached_tokens
            generation = generations.get(request)
            if generation is not None:
                generation.first_token_s = end_s
                # While the loop catches up, a step may begin before the arrival of a request it serves.
                metrics.ttft.observe(max(0.0, end_s - generation.arrival_s) / self._speedup)
                if generation.on_progress is not None:
                    self._streaming[request] = generation
        if self.feed is not None:
            self.feed.stepped(result)
        for request in result.finished:
            generation = generations.pop(request, None)
            if generation is not None:
                self._count_finished(generation, end_s)
                finished.append(generation)

    def _count_finished(self, generation: Generation, end_s: float) -> None:
        request, metrics, speedup = generation.request, self.metrics, self._speedup
        metrics.finished["stop" if generation.natural_end else "length"] += 1
        decode_s = (end_s - generation.first_token_s) / speedup
        for name, value in (
            ("e2e_request_latency_seconds", (end_s - generation.arrival_s) / speedup),
            ("request_queue_time_seconds", (generation.admitted_s - generation.arrival_s) / speedup),
            ("request_inference_time_seconds", (end_s - generation.admitted_s) / speedup),
            ("request_prefill_time_seconds", (generation.first_token_s - generation.admitted_s) / speedup),
            ("request_decode_time_seconds", decode_s),
            ("request_prompt_tokens", request.prompt_tokens),
            ("request_generation_tokens", request.max_tokens),
            ("request_params_max_tokens", request.max_tokens),
            ("request_num_preemptions", request.preemptions),
            ("request_prefill_kv_computed_tokens", request.prompt_tokens - request.cached_tokens),
        ):
            metrics.observe(name, value)
        if request.max_tokens > 1:
            metrics.observe("request_time_per_output_token_seconds", decode_s / (request.max_tokens - 1))
