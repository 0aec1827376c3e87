"""The scheduler of vLLM V1 as a pure step function.

A step, in this order (vllm/v1/core/sched/scheduler.py, `Scheduler.schedule`, first come first served):
1. The budget is `max_batched_tokens`. Running requests first, in order: one token for a decode, the rest of
   the prompt or of the budget for a prefill (chunked prefill). If one needs a block and none is free, the
   last running request is preempted: it loses its blocks and goes to the head of the queue.
2. Waiting requests, only if nothing was preempted, budget is left and fewer than `max_sequences` run: what
   the prefix cache holds of the prompt is not computed, but the last token always is. A request whose blocks
   do not fit stops the admission, whatever waits behind it.
3. The step takes `StepCost.step_s`. At its end full blocks become cached, requests whose prompt is computed
   emit their first token, decodes emit one, and finished requests free their blocks.

Not modelled: speculative decoding, priorities, sliding windows, and blocks that are found while the step
that computes them still runs (vLLM lets requests of one step share them; here they become findable at the
step's end).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

from gateway.estimator.roofline import StepCost, attention_pairs
from loadtests.engine.block_pool import BlockPool
from loadtests.engine.bulk import bulk_duration_s, bulk_steps
from loadtests.engine.decodes import Decodes
from loadtests.engine.types import EngineLimits, EngineRequest, Phase, StepResult, StoredBlocks


class Engine:
    """One engine: queue, running requests, KV blocks, counters.

    Args:
        cost: step times.
        limits: batch and memory limits.
        collect_events: fill `StepResult.stored` and `StepResult.removed`.
    """

    def __init__(self, cost: StepCost, limits: EngineLimits, *, collect_events: bool = False) -> None:
        self.cost = cost
        self.limits = limits
        self.collect_events = collect_events
        self.pool = BlockPool(limits.total_blocks)
        self.injected = 0
        self.completed = 0
        self.aborted = 0
        self.preemptions = 0
        self.prefix_queried_tokens = 0
        """Prompt tokens of requests scheduled for the first time."""
        self.prefix_hit_tokens = 0
        """Those of them that were cached."""
        self.computed_prompt_tokens = 0
        """Tokens prefilled, those computed again after a preemption included."""
        self.generated_tokens = 0
        self._block_size = limits.block_size_tokens
        self._requests: dict[str, EngineRequest] = {}
        self._waiting: OrderedDict[EngineRequest, None] = OrderedDict()
        self._prefilling: EngineRequest | None = None
        # At most one running request has an incomplete prompt: it took all the budget there was, and the
        # next step serves it before anything that waits. It is the last running one for the same reason.
        self._decodes = Decodes(limits.block_size_tokens)
        self._admissions = 0
        self._held: dict[EngineRequest, None] = {}

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests scheduled and not ended."""
        return len(self._decodes) + (self._prefilling is not None)

    @property
    def decoding(self) -> int:
        """Running requests whose prompt is computed."""
        return len(self._decodes)

    @property
    def context_tokens(self) -> int:
        """Tokens of KV the decoding requests hold, shared ones counted by everybody who holds them."""
        return self._decodes.context_tokens

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that requests hold, 0 to 1."""
        return self.pool.used_blocks / self.pool.total_blocks

    @property
    def steps(self) -> int:
        """Steps done so far."""
        return self._decodes.steps

    def emitted_tokens(self, request: EngineRequest) -> int:
        """Tokens a request has emitted."""
        return self._decodes.emitted(request) if request.phase is Phase.DECODE else request.emitted

    def waiting_requests(self) -> Iterable[EngineRequest]:
        """Requests in the queue, in order."""
        return self._waiting

    def running_requests(self) -> list[EngineRequest]:
        """Requests scheduled and not ended, in the order they were scheduled in."""
        running = list(self._decodes)
        if self._prefilling is not None:
            running.append(self._prefilling)
        return running

    def add(self, request: EngineRequest) -> None:
        """Queue a request; it may join the next step.

        Raises:
            ValueError: no tokens to compute or to emit, more than the KV memory holds, or an id in use.
        """
        if request.prompt_tokens < 1 or request.max_tokens < 1:
            raise ValueError(f"a request needs a prompt and a token to emit: {request}")
        if self._blocks(request.prompt_tokens + request.max_tokens - 1) > self.pool.total_blocks:
            raise ValueError(f"{self.limits.kv_capacity_tokens} tokens of KV do not hold the request: {request}")
        if request.id in self._requests or request.phase is not Phase.WAITING:
            raise ValueError(f"request {request.id!r} is already known")
        request.hashed_blocks = len(request.block_hashes) if self.limits.enable_prefix_caching else 0
        self._requests[request.id] = request
        self._waiting[request] = None
        self.injected += 1

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is and free what it holds. Returns whether it was still there."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.phase is Phase.WAITING:
            del self._waiting[request]
        else:
            self._leave(request)
        self._end(request, Phase.ABORTED)
        self.aborted += 1
        return True

    @property
    def held(self) -> int:
        """Finished requests whose blocks wait to be fetched."""
        return len(self._held)

    def release(self, request: EngineRequest) -> bool:
        """Free the blocks that a finished request holds for another engine. Returns whether it still held them."""
        if request not in self._held:
            return False
        del self._held[request]
        self._leave(request)
        return True

    def reset_prefix_cache(self) -> list[int]:
        """Forget all cached blocks that no request holds; return their hashes. Their removal is no event of a step."""
        removed = self.pool.removed = []
        self.pool.reset()
        self.pool.removed = None
        return removed

    def step(self, max_steps: int = 1, max_duration_s: float = math.inf) -> StepResult | None:
        """Run the next step, and more of the same kind if asked to.

        Further steps are only done as long as they are pure decode steps of the same batch: until a request
        finishes or memory runs out, whatever waits in the queue meanwhile. So a request added in between has
        to wait for the end of all of them, and callers bound them by the time of the next arrival.

        Args:
            max_steps: at most so many steps.
            max_duration_s: no further step once they have lasted so long: the first step that ends at or
                after it is the last.

        Returns:
            What happened, or None if the engine has nothing to do.
        """
        if not self._requests:
            return None
        collect = self.collect_events
        removed: list[int] | None = [] if collect else None
        self.pool.removed = removed
        preempted: list[EngineRequest] = []
        admitted: list[EngineRequest] = []
        chunks: list[tuple[EngineRequest, int]] = []

        self._schedule_decodes(preempted)
        decodes = len(self._decodes)
        self._schedule_prefilling(self.limits.max_batched_tokens - decodes, chunks, preempted)
        if self._waiting and not preempted:
            self._schedule_waiting(chunks, admitted)

        prefill_tokens = 0
        pairs = 0.0
        for request, chunk in chunks:
            prefill_tokens += chunk
            pairs += attention_pairs(chunk, request.computed_tokens)
        duration_s = self.cost.step_s(prefill_tokens + decodes, pairs, self._decodes.context_tokens)
        steps = 1
        # Without decodes the step is an idle one: blocks that are held for others keep what waits from beginning.
        if max_steps > 1 and decodes and not chunks and not preempted and not self._evictions_may_admit():
            steps = bulk_steps(self.cost, self._decodes, self.pool.free_blocks, duration_s, max_steps, max_duration_s)
            self.pool.take(self._decodes.blocks_needed(1, steps - 1))
            duration_s = bulk_duration_s(self.cost, self._decodes, steps, duration_s)

        stored: list[StoredBlocks] | None = [] if collect else None
        finished = self._finish_decodes(steps, stored)
        first_tokens, resumed = self._finish_chunks(chunks, stored, finished)
        self.computed_prompt_tokens += prefill_tokens
        self.generated_tokens += decodes * steps + len(first_tokens) + len(resumed)
        return StepResult(
            duration_s,
            steps,
            prefill_tokens,
            decodes,
            admitted,
            first_tokens,
            resumed,
            finished,
            preempted,
            stored or (),
            removed or (),
        )

    def _schedule_decodes(self, preempted: list[EngineRequest]) -> None:
        pool = self.pool
        needy = self._decodes.at_block_boundary()
        if len(needy) <= pool.free_blocks:
            if needy:
                pool.take(len(needy))
            return
        for request in list(needy):
            while request.phase is Phase.DECODE and not pool.free_blocks:
                self._preempt(preempted)
            if request.phase is not Phase.DECODE:
                # The last running request was this one: everybody behind it is preempted already.
                break
            pool.take(1)

    def _schedule_prefilling(
        self, budget: int, chunks: list[tuple[EngineRequest, int]], preempted: list[EngineRequest]
    ) -> None:
        request = self._prefilling
        if request is None:
            return
        chunk = min(request.target_tokens - request.computed_tokens, budget)
        blocks = self._blocks(request.computed_tokens + chunk)
        if blocks - request.blocks > self.pool.free_blocks:
            self._preempt(preempted)
            return
        self.pool.take(blocks - request.blocks)
        request.blocks = blocks
        chunks.append((request, chunk))

    def _schedule_waiting(self, chunks: list[tuple[EngineRequest, int]], admitted: list[EngineRequest]) -> None:
        pool = self.pool
        block_size = self._block_size
        budget = self.limits.max_batched_tokens - len(self._decodes) - sum(chunk for _, chunk in chunks)
        slots = self.limits.max_sequences - len(self._decodes) - len(chunks)
        while self._waiting and budget > 0 and slots > 0:
            request = next(iter(self._waiting))
            target = request.prompt_tokens + request.emitted
            hashes = request.block_hashes
            hit = pool.match(hashes, min((target - 1) // block_size, request.hashed_blocks))
            have = max(hit * block_size, min(request.external_tokens, target - 1))
            chunk = min(target - have, budget)
            blocks = self._blocks(have + chunk)
            if blocks - hit + pool.idle_blocks(hashes, hit) > pool.free_blocks:
                return
            del self._waiting[request]
            request.leaf = pool.acquire(hashes, hit)
            pool.take(blocks - hit)
            request.phase = Phase.PREFILL
            request.target_tokens = target
            request.computed_tokens = have
            request.blocks = blocks
            request.admission = self._admissions
            self._admissions += 1
            if not request.preemptions:
                request.cached_tokens = hit * block_size
                self.prefix_queried_tokens += target
                self.prefix_hit_tokens += request.cached_tokens
            budget -= chunk
            slots -= 1
            chunks.append((request, chunk))
            admitted.append(request)

    def _evictions_may_admit(self) -> bool:
        """Say whether the first in line may come to fit although nobody leaves.

        Its cached blocks that no request holds count against what is free. When decodes evict one of them, it finds
        fewer cached, or finds the copy that another request holds, and may need less.
        """
        if not self._waiting or len(self._decodes) >= self.limits.max_sequences:
            return False
        request = next(iter(self._waiting))
        target = request.prompt_tokens + request.emitted
        hashes = request.block_hashes
        hit = self.pool.match(hashes, min((target - 1) // self._block_size, request.hashed_blocks))
        return self.pool.idle_blocks(hashes, hit) > 0

    def _finish_decodes(self, steps: int, stored: list[StoredBlocks] | None) -> list[EngineRequest]:
        decodes = self._decodes
        decodes.advance(steps)
        if not decodes:
            return []
        for request in decodes.filled(steps):
            self._store(request, decodes.context(request), stored)
        finished = decodes.pop_finished()
        for request in finished:
            self._leave(request)
            self._end(request, Phase.FINISHED)
        self.completed += len(finished)
        return finished

    def _finish_chunks(
        self,
        chunks: list[tuple[EngineRequest, int]],
        stored: list[StoredBlocks] | None,
        finished: list[EngineRequest],
    ) -> tuple[list[EngineRequest], list[EngineRequest]]:
        first_tokens: list[EngineRequest] = []
        resumed: list[EngineRequest] = []
        self._prefilling = None
        for request, chunk in chunks:
            request.computed_tokens += chunk
            self._store(request, request.computed_tokens, stored)
            if request.computed_tokens < request.target_tokens:
                self._prefilling = request
                continue
            (resumed if request.emitted else first_tokens).append(request)
            request.emitted += 1
            if request.emitted == request.max_tokens:
                if request.hold:
                    self._held[request] = None
                else:
                    self._leave(request)
                self._end(request, Phase.FINISHED)
                self.completed += 1
                finished.append(request)
            else:
                self._decodes.join(request, request.computed_tokens)
        return first_tokens, resumed

    def _store(self, request: EngineRequest, context_tokens: int, stored: list[StoredBlocks] | None) -> None:
        """Cache the blocks of a request that are full and not cached yet."""
        leaf = request.leaf
        cached = leaf.end if leaf is not None else 0
        full = min(context_tokens // self._block_size, request.hashed_blocks)
        if full > cached:
            request.leaf = self.pool.store(leaf, request.block_hashes[cached:full])
            if stored is not None:
                stored.append(StoredBlocks(request, cached, full))

    def _preempt(self, preempted: list[EngineRequest]) -> None:
        request = self._prefilling or self._decodes.last()
        self._leave(request)
        request.phase = Phase.WAITING
        request.preemptions += 1
        request.external_tokens = 0
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)
        self.preemptions += 1
        preempted.append(request)

    def _leave(self, request: EngineRequest) -> None:
        """Take a running request out of the batch and free its blocks."""
        if request.phase is Phase.DECODE:
            blocks = self._blocks(self._decodes.leave(request))
        else:
            blocks = request.blocks
            if request is self._prefilling:
                self._prefilling = None
        cached = request.leaf.end if request.leaf is not None else 0
        self.pool.release(request.leaf, blocks - cached)
        request.leaf = None
        request.computed_tokens = 0

    def _end(self, request: EngineRequest, phase: Phase) -> None:
        request.phase = phase
        del self._requests[request.id]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
