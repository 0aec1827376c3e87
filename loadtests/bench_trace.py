"""Drives a server with the arrivals of a trace, open loop: a slow server does not slow the arrivals down.

Or one after the other, each on a connection of its own, so that the workers of a gateway take turns: for comparing what
they decide with what one decides.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtests.sse_client import ChatClient
from loadtests.sse_stream import ChatResult
from loadtests.synthesis import PromptSynthesizer, chat_body
from loadtests.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """How to turn a trace into load."""

    model: str
    """Model name sent in the requests."""
    speed: float = 1.0
    """Arrivals come this many times faster than in the trace."""
    max_output_tokens: int | None = None
    """Longer answers of the trace are cut to this."""
    seed: int = 0
    """Seed of the prompt text."""
    bytes_per_token: int = 4
    """Prompt bytes that stand for one token of the trace."""
    serial: bool = False
    """Each request is sent when the one before has ended, whatever the trace says."""
    pause_s: float = 0.0
    """Between an end and the next request, where they are serial: the time in which workers hear of each other."""


@dataclass(slots=True)
class TraceRun:
    """Outcome of driving one trace."""

    results: list[ChatResult]
    """One per request of the trace, in order of ending."""
    dispatch_lags_s: list[float]
    """Seconds by which each request was sent after its arrival time, in the same order: whether the load
    generator kept up."""
    wall_s: float
    """Seconds from the first arrival to the last byte."""


class Progress:
    """Running totals of a run, for display."""

    __slots__ = (
        "cached_tokens",
        "done",
        "errors",
        "in_flight",
        "prompt_tokens",
        "total",
        "ttft_count",
        "ttft_sum_s",
    )

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = self.in_flight = self.errors = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.ttft_sum_s = 0.0
        self.ttft_count = 0

    def add(self, result: ChatResult) -> None:
        """Count a request that ended."""
        self.done += 1
        self.in_flight -= 1
        self.errors += result.error is not None
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.cached_tokens
        if result.ttft_s is not None:
            self.ttft_sum_s += result.ttft_s
            self.ttft_count += 1

    @property
    def mean_ttft_ms(self) -> float:
        """Mean TTFT so far, 0 before the first token."""
        return 1000 * self.ttft_sum_s / self.ttft_count if self.ttft_count else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Cached over prompt tokens so far."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


async def drive(
    client: ChatClient,
    trace: Sequence[TraceRequest],
    load: TraceLoad,
    on_change: Callable[[Progress], None] = lambda progress: None,
) -> TraceRun:
    """Send every request of a trace at its time and wait for all answers.

    Args:
        client: an entered client of the server under test.
        trace: requests in order of arrival; the first is sent at once.
        load: model, speed and prompt text.
        on_change: called after each request that was sent or has ended.
    """
    synthesizer = PromptSynthesizer(load.seed, load.bytes_per_token)
    progress = Progress(len(trace))
    results: list[ChatResult] = []
    lags_s: list[float] = []

    async def send(body: bytes, due_s: float) -> None:
        result = await client.chat(body)
        results.append(result)
        lags_s.append(max(0.0, result.sent_s - due_s))
        progress.add(result)
        on_change(progress)

    start_s = time.monotonic()
    first_ms = trace[0].timestamp if trace else 0.0
    async with asyncio.TaskGroup() as in_flight:
        for request in trace:
            # The prompt is written before its time comes, so that writing it does not delay the arrival.
            body = chat_body(
                synthesizer.text(request.hash_ids, request.input_length),
                load.model,
                _output_tokens(request, load),
            )
            if load.serial:
                progress.in_flight += 1
                await send(body, time.monotonic())
                await asyncio.sleep(load.pause_s)
                continue
            due_s = start_s + (request.timestamp - first_ms) / 1000 / load.speed
            await _sleep_until(due_s)
            in_flight.create_task(send(body, due_s))
            progress.in_flight += 1
            on_change(progress)
    return TraceRun(results, lags_s, time.monotonic() - start_s)


def _output_tokens(request: TraceRequest, load: TraceLoad) -> int:
    """Tokens to ask for: the trace's, within the cap, and at least the one that every engine makes."""
    limit = load.max_output_tokens
    return max(1, request.output_length if limit is None else min(request.output_length, limit))


async def _sleep_until(moment_s: float) -> None:
    delay_s = moment_s - time.monotonic()
    # Requests that are due together still let the tasks before them send.
    await asyncio.sleep(max(0.0, delay_s))
