"""NVIDIA Dynamo's cost in KV blocks, and the product that needs no weights.

`kv_cost`: the least

    prefill_load_scale x max(queued prefill blocks + prompt blocks - overlap_credit x matched blocks, 0)
      + decode blocks

with both factors 1, ties at random; with a temperature above 0 drawn from a softmax of the negative cost, scaled to
the range of the costs. Decode blocks are those of the prompts in flight, a shared block once, that the request would
not use itself. Dynamo's worked case, prefill 8, 5, 2 and decode 10, 5, 9 blocks: costs 18, 10, 11; the second is
chosen.

Sources: ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector/default.rs (cost, random ties, softmax) and config.rs
(defaults), docs/design_docs/router_design.md (the worked case).
Differences: Dynamo's decode blocks are all that would be in use with the request there; its own blocks are the same
for everybody and left out here. Which requests have ended is guessed, see `ActiveBlocks`. Answers are not counted, as
without `router_track_output_blocks`. Host and disk tiers, taints and the decay of the overlap credit are not rebuilt.

`lmetric`: the least

    (queued prefill tokens + own uncached tokens) x (running decodes + 1)

ties by requests in flight, then at random. Source: D. Zhang et al., "LMetric: Simple is Better. Multiplication May Be
All You Need for LLM Request Scheduling", arXiv 2603.15202 (new prefill tokens times batch size; read in abstract).
Two ports leave the queued tokens out and take requests in flight as the batch: sgl-project/sglang,
sgl-model-gateway/src/policies/lmetric.rs, and llm-d/llm-d-router, pkg/epp/framework/plugins/scheduling/scorer/lmetric.

Use kv_cost where prefill and memory are both scarce and replicas alike; a cached token is worth one token of
anybody's context. lmetric has nothing to tune and does well on conversations.
"""

from math import exp
from random import Random

from policies.draw import draw
from policies.peer_blocks import ActiveBlocks
from policies.types import Candidates, Choice, Column, Request

BLOCK_TOKENS = 16.0
"""vLLM's block size; costs scale with it, choices do not depend on it."""


class KvCost:
    """Least cost in KV blocks. See the module for the rule."""

    name = "kv_cost"
    reads = frozenset({Column.PREFILL_TOKENS, Column.MATCHED_TOKENS, Column.IN_FLIGHT})

    def __init__(
        self,
        seed: int = 0,
        prefill_load_scale: float = 1.0,
        overlap_credit: float = 1.0,
        temperature: float = 0.0,
    ) -> None:
        """Make the policy.

        Args:
            seed: for ties and for the softmax.
            prefill_load_scale: what a block of prefill costs, a block held being 1.
            overlap_credit: share of a matched block that counts as computed, 0 to 1.
            temperature: 0 for the least cost; higher is more random.

        Raises:
            ValueError: a factor out of range.
        """
        if prefill_load_scale < 0.0 or temperature < 0.0 or not 0.0 <= overlap_credit <= 1.0:
            raise ValueError("prefill_load_scale and temperature must not be negative, overlap_credit within 0 and 1")
        self._random = Random(seed)
        self.prefill_load_scale = prefill_load_scale
        self.overlap_credit = overlap_credit
        self.temperature = temperature
        self._active = ActiveBlocks()

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick the least cost, or draw by it."""
        slots = candidates.slots
        queued, matched, in_flight = candidates.prefill_tokens, candidates.matched_tokens, candidates.in_flight
        scale, credit, tokens = self.prefill_load_scale, self.overlap_credit, request.prompt_tokens
        prefills = [queued[slot] + tokens - credit * matched[slot] for slot in slots]
        if min(prefills) < 0.0:
            prefills = [max(prefill, 0.0) for prefill in prefills]
        active, hashes, offsets = self._active, request.block_hashes, request.block_offsets
        held: list[float] = [active.keep(slot, in_flight[slot]) for slot in slots]
        per_byte = tokens / request.canonical_bytes if hashes else 0.0
        shared = active.shared(hashes, offsets)
        if shared:
            held = [own - shared.get(slot, 0) * per_byte for slot, own in zip(slots, held, strict=True)]
        costs = [(scale * prefill + decode) / BLOCK_TOKENS for prefill, decode in zip(prefills, held, strict=True)]
        least = min(costs)
        if self.temperature == 0.0:
            slot, ties = draw(slots, costs, least, self._random)
            reason = "least cost" if ties == 1 else f"least cost, one of {ties} alike"
        else:
            slot = slots[self._sample(costs, least)]
            reason = "drawn by cost"
        position = slots.index(slot)
        active.start(slot, hashes, offsets, per_byte, tokens)
        return Choice(
            slot,
            reason,
            {
                "cost_blocks": costs[position],
                "prefill_blocks": prefills[position] / BLOCK_TOKENS,
                "decode_blocks": held[position] / BLOCK_TOKENS,
            },
        )

    def forget(self, slot: int) -> None:
        """Forget the replica's requests."""
        self._active.forget(slot)

    def _sample(self, costs: list[float], least: float) -> int:
        spread = max(costs) - least
        if spread == 0.0:
            return int(self._random.random() * len(costs))
        weights = [exp((least - cost) / (spread * self.temperature)) for cost in costs]
        return self._random.choices(range(len(costs)), weights)[0]


class LMetric:
    """Least product of prefill work and batch. See the module for the rule."""

    name = "lmetric"
    reads = frozenset({Column.PREFILL_TOKENS, Column.MATCHED_TOKENS, Column.DECODES, Column.IN_FLIGHT})

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick the least product."""
        slots, in_flight = candidates.slots, candidates.in_flight
        queued, matched, decodes = candidates.prefill_tokens, candidates.matched_tokens, candidates.decodes
        tokens = request.prompt_tokens
        products = [(queued[slot] + tokens - matched[slot]) * (decodes[slot] + 1) for slot in slots]
        least = min(products)
        if products.count(least) == 1:
            slot = slots[products.index(least)]
        else:
            alike = [slot for slot, product in zip(slots, products, strict=True) if product == least]
            loads = [in_flight[slot] for slot in alike]
            slot, _ = draw(alike, loads, min(loads), self._random)
        return Choice(
            slot,
            "least prefill work times batch",
            {"product": least, "prefill_tokens": queued[slot] + tokens - matched[slot], "decodes": decodes[slot]},
        )
