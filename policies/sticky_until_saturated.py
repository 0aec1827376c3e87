"""llm-d's present default: stay with the replicas that hold the prompt until they are a long way behind.

Rule:
1. A replica is warm when it holds at least 0.8 of the prompt (inclusive).
2. If there are warm and cold replicas and the least busy warm one has more than tau = 286,720 uncached tokens in
   flight beyond the least busy cold one (strictly), the warm set is saturated and all candidates stay in. Otherwise,
   if there is a warm replica, only the warm ones do.
3. Of those left, the least uncached tokens in flight plus own uncached tokens; more than 4,194,304 count as that many.
   Ties at random.
Tokens are in flight from the decision until the first streamed chunk, so they measure prefill work only.

Sources, llm-d/llm-d-router, pkg/epp/framework/plugins: scheduling/filter/prefixcacheaffinity (README.md, plugin.go:
steps 1 and 2), scheduling/scorer/tokenload/token_load.go (step 3), requestcontrol/dataproducer/inflightload/README.md
(release at the first chunk); llm-d/llm-d, guides/optimized-baseline/router/optimized-baseline.values.yaml (0.8 and
`maxTokensInFlightPenalty: 286720`; it names the approximate index). The filter's own default is a penalty of 18 s at
15,928 tokens/s, 286,704 tokens. Zero means: always stay.
Differences: llm-d takes equal scores in turn. Answers that are not streamed release their tokens when the gateway
believes their prefill done, there at the end of the answer. With `index="approximate"` the request's own tokens come
from that index, those in flight from the gateway's count.

Use it where prefill is the bottleneck and prefixes are long. It sees neither decodes nor memory.
"""

from random import Random

from policies.cached_share import cached_shares
from policies.draw import draw
from policies.types import Candidates, Choice, Column, Request

QUEUE_LIMIT_TOKENS = 4_194_304.0
"""Beyond this many tokens in flight replicas are alike: 128 requests of 32 K (`tokenQueueThresholdDefault`)."""


class StickyUntilSaturated:
    """Warm replicas first, by uncached tokens in flight. See the module for the rule."""

    name = "sticky_until_saturated"

    def __init__(
        self,
        seed: int = 0,
        affinity_threshold: float = 0.8,
        saturation_tokens: float = 286_720.0,
        index: str = "gateway",
        lru_blocks: int = 31_250,
        block_tokens: int = 64,
    ) -> None:
        """Make the policy.

        Args:
            seed: for ties.
            affinity_threshold: cached share of the prompt from which a replica is warm.
            saturation_tokens: tau; 0 to stay with the warm ones whatever happens.
            index: `gateway` or `approximate`.
            lru_blocks: blocks per replica of the approximate index.
            block_tokens: tokens per block of the approximate index.

        Raises:
            ValueError: unknown index.
        """
        self._random = Random(seed)
        self.affinity_threshold = affinity_threshold
        self.saturation_tokens = saturation_tokens
        self._shares = cached_shares(index, lru_blocks, block_tokens)
        self.reads = self._shares.reads | {Column.PREFILL_TOKENS}

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick the least tokens in flight within the warm set, or outside of it too."""
        slots, in_flight = candidates.slots, candidates.prefill_tokens
        shares = self._shares.shares(request, candidates)
        threshold = self.affinity_threshold
        warm = [position for position, share in enumerate(shares) if share >= threshold]
        reason = "no replica holds the prompt: least prefill work"
        positions: list[int] | range = range(len(slots))
        if warm:
            reason = "least prefill work among those that hold the prompt"
            saturated = False
            if len(warm) < len(slots) and self.saturation_tokens > 0.0:
                least_warm = min(in_flight[slots[position]] for position in warm)
                least_cold = min(
                    in_flight[slot] for slot, share in zip(slots, shares, strict=True) if share < threshold
                )
                saturated = least_warm - least_cold > self.saturation_tokens
            if saturated:
                reason = "those that hold the prompt are saturated: least prefill work"
            else:
                positions = warm
        tokens = request.prompt_tokens
        loads = [
            min(in_flight[slots[position]] + tokens * (1.0 - shares[position]), QUEUE_LIMIT_TOKENS)
            for position in positions
        ]
        position, _ = draw(positions, loads, min(loads), self._random)
        slot = slots[position]
        self._shares.chosen(request, slot)
        return Choice(
            slot,
            reason,
            {
                "cached_share": shares[position],
                "prefill_tokens": in_flight[slot],
                "own_uncached_tokens": tokens * (1.0 - shares[position]),
                "warm": len(warm),
            },
        )

    def forget(self, slot: int) -> None:
        """Forget what the replica held."""
        self._shares.forget(slot)
