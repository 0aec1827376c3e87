"""llm-d's weighted scores: a sum of what speaks for each replica.

Rule: each candidate gets

    3 x prefix + 2 x queue + 2 x memory

and the greatest sum wins, ties at random.
- prefix: matched blocks over the prompt's blocks (`prefix_score="share"`), or, in older releases with KV events,
  (matched - least) / (most - least) over the replicas that hold anything, 1 for all of them if they are equal and 0
  for the others (`prefix_score="range"`: the least of several holders then counts as little as no holder).
- queue: (longest - own) / (longest - shortest) of the engines' waiting queues, 1 if all are equal.
- memory: 1 - share of the engine's KV memory in use.
Queue and memory are what the engines' metrics last said; between two scrapes nothing moves them.

Sources, llm-d/llm-d-router, pkg/epp/framework/plugins/scheduling: scorer/prefix/plugin.go,
scorer/preciseprefixcache/utils.go (share), scorer/queuedepth/queue.go,
scorer/kvcacheutilization/kvcache_utilization.go, picker/maxscore/picker.go; llm-d/llm-d-inference-scheduler,
pkg/plugins/scorer/utils.go (range). The weights 3, 2, 2 are those of llm-d's published inference-scheduling
benchmarks; without weights in the configuration every scorer counts 1.
Differences: present releases take equal scores in turn, earlier ones at random, as here. They leave endpoints without
metrics unscored; here such a replica counts as idle. The prefix comes from the gateway's map or from a copy of llm-d's
approximate index (`index="approximate"`).

Use it as the strongest of the weighted families: good when prefixes are worth more than the differences in load, and
never when metrics are old.
"""

from random import Random

from policies.cached_share import cached_shares
from policies.draw import draw
from policies.types import Candidates, Choice, Column, Request


class WeightedScore:
    """Weighted sum of prefix, queue and memory scores. See the module for the rule."""

    name = "weighted_score"

    def __init__(
        self,
        seed: int = 0,
        prefix_weight: float = 3.0,
        queue_weight: float = 2.0,
        memory_weight: float = 2.0,
        prefix_score: str = "share",
        index: str = "gateway",
        lru_blocks: int = 31_250,
        block_tokens: int = 64,
    ) -> None:
        """Make the policy.

        Args:
            seed: for ties.
            prefix_weight: of the prefix score.
            queue_weight: of the queue score.
            memory_weight: of the memory score.
            prefix_score: `share` or `range`.
            index: `gateway` or `approximate`.
            lru_blocks: blocks per replica of the approximate index.
            block_tokens: tokens per block of the approximate index.

        Raises:
            ValueError: unknown prefix score or index.
        """
        if prefix_score not in ("share", "range"):
            raise ValueError(f"prefix_score must be share or range, got {prefix_score!r}")
        self._random = Random(seed)
        self._weights = (prefix_weight, queue_weight, memory_weight)
        self._by_range = prefix_score == "range"
        self._shares = cached_shares(index, lru_blocks, block_tokens)
        self.reads = self._shares.reads | {Column.ENGINE_WAITING, Column.ENGINE_KV_USAGE}

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick the greatest sum."""
        slots, usage = candidates.slots, candidates.engine_kv_usage
        waiting = [candidates.engine_waiting[slot] for slot in slots]
        shares = self._shares.shares(request, candidates)
        prefixes = _range_scores(shares) if self._by_range else shares
        prefix_weight, queue_weight, memory_weight = self._weights
        longest, shortest = max(waiting), min(waiting)
        if longest == shortest:
            scores = [
                prefix_weight * prefix + queue_weight + memory_weight * (1.0 - usage[slot])
                for slot, prefix in zip(slots, prefixes, strict=True)
            ]
        else:
            per_request = queue_weight / (longest - shortest)
            scores = [
                prefix_weight * prefix + per_request * (longest - queue) + memory_weight * (1.0 - usage[slot])
                for slot, prefix, queue in zip(slots, prefixes, waiting, strict=True)
            ]
        best = max(scores)
        slot, ties = draw(slots, scores, best, self._random)
        self._shares.chosen(request, slot)
        position = slots.index(slot)
        return Choice(
            slot,
            "greatest score" if ties == 1 else f"greatest score, one of {ties} alike",
            {
                "score": best,
                "cached_share": shares[position],
                "engine_waiting": waiting[position],
                "engine_kv_usage": usage[slot],
            },
        )

    def forget(self, slot: int) -> None:
        """Forget what the replica held."""
        self._shares.forget(slot)


def _range_scores(shares: list[float]) -> list[float]:
    held = [share for share in shares if share > 0.0]
    if not held:
        return shares
    least, most = min(held), max(held)
    if least == most:
        return [1.0 if share > 0.0 else 0.0 for share in shares]
    return [(share - least) / (most - least) if share > 0.0 else 0.0 for share in shares]
