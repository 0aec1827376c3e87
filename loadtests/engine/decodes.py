"""The decoding sequences of an engine, kept virtual: a step costs the events in it, not the sequences.

Every member emits one token in every step, so its context length, the step in which it ends and the steps in
which it needs a new block all follow from when it joined. What is kept is the sum of the contexts, a heap of
finish steps, and the members by the phase (step modulo block size) in which they cross a block boundary.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from loadtests.engine.types import EngineRequest, Phase


class Decodes:
    """Sequences that decode, in the order in which they were scheduled.

    Args:
        block_size_tokens: tokens per KV block.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self.steps = 0
        """Steps of the engine so far."""
        self.context_tokens = 0
        """Tokens of KV the members hold, summed."""
        self._block_size = block_size_tokens
        self._members: dict[EngineRequest, None] = {}
        self._phases: list[dict[EngineRequest, None]] = [{} for _ in range(block_size_tokens)]
        self._finishes: list[tuple[int, int, EngineRequest]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(self._members)

    def last(self) -> EngineRequest:
        """The member scheduled last."""
        return next(reversed(self._members))

    def join(self, request: EngineRequest, context_tokens: int) -> None:
        """A request whose prompt is computed starts to decode with the next step."""
        request.phase = Phase.DECODE
        request.joined_step = self.steps
        request.joined_context = context_tokens
        request.finish_step = self.steps + request.max_tokens - request.emitted
        self.context_tokens += context_tokens
        self._members[request] = None
        self._phases[self._phase(request)][request] = None
        heapq.heappush(self._finishes, (request.finish_step, request.admission, request))

    def leave(self, request: EngineRequest) -> int:
        """A member stops to decode. Returns the tokens of its context; updates what it has emitted."""
        context_tokens = self.context(request)
        request.emitted = self.emitted(request)
        self.context_tokens -= context_tokens
        del self._members[request]
        del self._phases[self._phase(request)][request]
        return context_tokens

    def context(self, request: EngineRequest) -> int:
        """Tokens of KV a member holds."""
        return request.joined_context + self.steps - request.joined_step

    def emitted(self, request: EngineRequest) -> int:
        """Tokens a member has emitted."""
        return request.emitted + self.steps - request.joined_step

    def at_block_boundary(self) -> dict[EngineRequest, None]:
        """Members whose blocks are all full: they need a new one in the next step."""
        return self._phases[(self.steps + 1) % self._block_size]

    def steps_to_finish(self) -> int:
        """Steps until the next member ends, at least one."""
        finishes = self._finishes
        while True:
            finish_step, admission, request = finishes[0]
            if request.phase is Phase.DECODE and request.admission == admission:
                return finish_step - self.steps
            heapq.heappop(finishes)

    def blocks_needed(self, skip: int, steps: int) -> int:
        """New blocks the members need in so many steps, counted after the next `skip` ones."""
        cycles, rest = divmod(steps, self._block_size)
        first = self.steps + 1 + skip
        return cycles * len(self._members) + sum(
            len(self._phases[step % self._block_size]) for step in range(first, first + rest)
        )

    def steps_within(self, skip: int, steps: int, blocks: int) -> int:
        """How many of so many steps, counted after the next `skip` ones, need at most `blocks` new blocks."""
        if -(-steps // self._block_size) * len(self._members) <= blocks:
            return steps
        fit = min(steps, blocks // len(self._members) * self._block_size)
        blocks -= self.blocks_needed(skip, fit)
        while fit < steps:
            blocks -= len(self._phases[(self.steps + 1 + skip + fit) % self._block_size])
            if blocks < 0:
                break
            fit += 1
        return fit

    def advance(self, steps: int) -> None:
        """Every member emits one token per step."""
        self.steps += steps
        self.context_tokens += steps * len(self._members)

    def filled(self, steps: int) -> Iterator[EngineRequest]:
        """Members that filled one block or more in the last `steps` steps."""
        for offset in range(min(steps, self._block_size)):
            yield from self._phases[(self.steps - offset + 1) % self._block_size]

    def pop_finished(self) -> list[EngineRequest]:
        """Members that have emitted all their tokens, in the order of admission; they must leave."""
        finishes = self._finishes
        finished = []
        while finishes and finishes[0][0] <= self.steps:
            _, admission, request = heapq.heappop(finishes)
            if request.phase is Phase.DECODE and request.admission == admission:
                finished.append(request)
        return finished

    def _phase(self, request: EngineRequest) -> int:
        return (request.joined_step + 1 - request.joined_context) % self._block_size
