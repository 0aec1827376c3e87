"""A policy that knows more than any gateway can: it shows what better predictions could bring, and is no candidate.

`perfect_knowledge` takes the least TTFT + own prefill + 0.02 x delay put on decodes + 10 x memory overcommitted, with
the truth in place of every prediction: what each engine has cached at this moment and will have cached when the
request's turn comes, the rest of the step under way, the queue in its order with the steps that it will take, the
lengths of all answers to come, and with them the memory they will need. It does not know future arrivals, and it is
greedy: a policy that gives up some TTFT now may beat it later. Where it loses to a peer, such a rule is at fault and
not what it is told; what a policy of the same rule loses to it is the fault of the predictions.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Protocol

from gateway.estimator.roofline import attention_pairs
from loadtests.engine import Engine, EngineRequest
from loadtests.replay.engines import SimulatedReplica
from loadtests.replay.options import policy
from loadtests.replay.replay import Replay
from loadtests.workloads.prompt import Part
from policies.types import Candidates, Choice, Column, Policy, Request

INFORMED = "perfect_knowledge"

_BLOCK_TOKENS = 16
_TIGHT = 0.5
"""Share of memory in use below which nobody looks at what it will grow to."""


class NeedsReplay(Protocol):
    """A policy that looks into the replay it runs in."""

    def attach(self, replay: Replay) -> None:
        """Called before the replay runs."""
        ...


class Informed:
    """Least TTFT and price of the work, from true figures. See the module.

    Args:
        seed: for ties.
        prefill_price: seconds of cost per second of own prefill.
        decode_price: seconds of cost per second of delay summed over running decodes.
        memory_price: seconds of cost per overcommitted share of the replica's KV memory.
    """

    name = INFORMED
    reads: frozenset[Column] = frozenset()

    def __init__(
        self, seed: int, prefill_price: float = 1.0, decode_price: float = 0.02, memory_price: float = 10.0
    ) -> None:
        self._random = Random(seed)
        self._prices = prefill_price, decode_price, memory_price
        self._replay: Replay | None = None
        self._planned: dict[int, int] = {}
        """By the last hash of a sequence: blocks it was going to find cached when it was assigned."""

    def attach(self, replay: Replay) -> None:
        """Look into this replay from now on."""
        self._replay = replay

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick the candidate of least true cost."""
        replay = self._replay
        assert replay is not None
        turn = replay.assigning.turn
        hashes = turn.prompt.extended(Part(turn.answer, turn.output_tokens)).names_every(_BLOCK_TOKENS)
        tokens = turn.prompt.tokens
        prefill_price, decode_price, memory_price = self._prices
        costs = []
        hits = []
        for slot in candidates.slots:
            replica = replay.replicas[slot]
            engine = replica.engine
            hit = self._hit(engine, hashes, (tokens - 1) // _BLOCK_TOKENS)
            ttft_s = self._ttft_s(replica, request.now_s, tokens, hit)
            cached = hit * _BLOCK_TOKENS
            own_s = engine.cost.prefill_compute_s(tokens - cached, cached)
            cost_s = ttft_s + own_s * (prefill_price + decode_price * engine.decoding)
            over = self._overcommitted(engine, tokens - cached + turn.output_tokens)
            costs.append(cost_s + memory_price * over)
            hits.append(hit)
        least = min(costs)
        place = self._random.choice([place for place, cost in enumerate(costs) if cost == least])
        if hashes:
            self._planned[hashes[-1]] = hits[place]
        return Choice(candidates.slots[place], "least true cost")

    def _hit(self, engine: Engine, hashes: Sequence[int], most: int) -> int:
        """Blocks that are cached, or will have been computed by requests ahead, when a prompt's turn comes."""
        hit = engine.pool.match(hashes, most)
        for ahead in (*engine.waiting_requests(), *_prefilling(engine)):
            if hit < most:
                hit = max(hit, min(common_blocks(hashes, ahead.block_hashes, hit), most))
        return hit

    def _ttft_s(self, replica: SimulatedReplica, now_s: float, tokens: int, hit: int) -> float:
        """Seconds until the first token: the rest of the step under way, and the steps through the queue."""
        engine = replica.engine
        seconds = max(replica.ends_s - now_s, 0.0) if replica.ends_s is not None else 0.0
        queue = [(each.target_tokens - each.computed_tokens, each.computed_tokens) for each in _prefilling(engine)]
        for waiting in engine.waiting_requests():
            target = waiting.prompt_tokens + waiting.emitted
            planned = self._planned.get(waiting.block_hashes[-1], 0) if waiting.block_hashes else 0
            held = max(engine.pool.match(waiting.block_hashes, (target - 1) // _BLOCK_TOKENS), planned)
            queue.append((target - held * _BLOCK_TOKENS, held * _BLOCK_TOKENS))
        queue.append((tokens - hit * _BLOCK_TOKENS, hit * _BLOCK_TOKENS))
        decodes, context = engine.decoding, engine.context_tokens
        place, (left, computed) = 0, queue[0]
        while place < len(queue):
            budget = max(engine.limits.max_batched_tokens - decodes, 1)
            new, pairs, joined = 0, 0.0, 0
            while place < len(queue) and new < budget:
                chunk = min(left, budget - new)
                pairs += attention_pairs(chunk, computed)
                new += chunk
                left -= chunk
                computed += chunk
                if left == 0:
                    joined += computed
                    place += 1
                    if place < len(queue):
                        left, computed = queue[place]
            seconds += engine.cost.step_s(new + decodes, pairs, context)
            context += decodes + joined
        return seconds

    def _overcommitted(self, engine: Engine, own_tokens: int) -> float:
        """Share of memory that will be lacking at the worst moment, if nobody else comes."""
        pool = engine.pool
        if pool.used_blocks < _TIGHT * pool.total_blocks:
            return 0.0
        used = pool.used_blocks * _BLOCK_TOKENS + own_tokens
        for waiting in engine.waiting_requests():
            used += waiting.prompt_tokens + waiting.max_tokens
        # All decodes advance together: memory peaks just before one of them ends.
        running = sorted(
            (each.max_tokens - engine.emitted_tokens(each), each.prompt_tokens - each.cached_tokens + each.max_tokens)
            for each in engine.running_requests()
        )
        peak, alive, grown = used, len(running), 0
        for remaining, freed in running:
            used += alive * (remaining - grown)
            grown = remaining
            peak = max(peak, used)
            used -= freed
            alive -= 1
        return max(peak / (pool.total_blocks * _BLOCK_TOKENS) - 1.0, 0.0)


def _prefilling(engine: Engine) -> list[EngineRequest]:
    """The request whose prompt is being computed, if there is one: it is the last of those that run."""
    if engine.running == engine.decoding:
        return []
    return engine.running_requests()[-1:]


def common_blocks(one: Sequence[int], other: Sequence[int], least: int = 0) -> int:
    """Length of the common beginning of two chains of hashes, of which the first `least` are known to be cached."""
    most = min(len(one), len(other))
    if most <= least or one[least] != other[least]:
        return least
    # A hash names all before it, so equal ones come first.
    return bisect_right(range(most), False, key=lambda place: one[place] != other[place])


BOUNDS: Mapping[str, Callable[[int], Policy]] = {INFORMED: Informed}


def make_any_policy(text: str, seed: int) -> Policy:
    """A bound by its name, or a policy of the catalogue.

    Raises:
        ValueError: unknown name or option.
    """
    bound = BOUNDS.get(text)
    return policy(text, seed) if bound is None else bound(seed)
