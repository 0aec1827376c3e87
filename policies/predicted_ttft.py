"""The default: where the first token comes soonest, at the least cost to everyone else.

Rule: minimise over the candidates

    predicted TTFT
      + prefill_price x own prefill seconds       the work is taken from everybody: its shadow price
      + decode_price x delay put on running decodes
      + memory_price x share of KV memory this request would overcommit

Memory is overcommitted when what the engine uses (scraped), what its running answers will still grow by, and what this
request adds exceed what it has; then requests wait, or are preempted, for tens of seconds. Without scraped metrics the
requests' own uncached prompts and expected answers stand in; a prefix that many share counts once at most.

Why not TTFT alone: two replicas with equal queues look alike to the request, but computing a prefix twice costs the
fleet twice. Minimising TTFT greedily fragments prefixes over the fleet until every cache holds everything and none
holds enough (Mooncake, FAST'25, Algorithm 1, is the greedy form). With prefill_price >= 1 a cached prefix is left only
when the queue in front of it is longer than the work it saves twice over.

Ties within a relative epsilon are broken at random, so that several gateways with the same view do not herd.
"""

from random import Random

from policies.types import Candidates, Choice, Column, Request

_TIE = 1e-6


class PredictedTTFT:
    """Least predicted time to first token plus the price of the work. See the module for the rule."""

    name = "predicted_ttft"
    reads = frozenset(
        {
            Column.PREDICTED_TTFT_S,
            Column.OWN_PREFILL_S,
            Column.DECODE_DELAY_S,
            Column.MATCHED_TOKENS,
            Column.IN_FLIGHT,
            Column.DECODES,
            Column.PREFILL_TOKENS,
            Column.KV_OWN_TOKENS,
            Column.KV_CAPACITY_TOKENS,
            Column.ENGINE_KV_USAGE,
        }
    )

    def __init__(
        self,
        seed: int = 0,
        prefill_price: float = 1.0,
        decode_price: float = 0.02,
        memory_price: float = 10.0,
    ) -> None:
        """Make the policy.

        Args:
            seed: for ties.
            prefill_price: seconds of cost per second of own prefill (lambda).
            decode_price: seconds of cost per second of delay summed over running decodes (mu).
            memory_price: seconds of cost per overcommitted share of the replica's KV memory.
        """
        self._random = Random(seed)
        self.prefill_price = prefill_price
        self.decode_price = decode_price
        self.memory_price = memory_price

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick the candidate of least cost."""
        ttft, own, delay = candidates.predicted_ttft_s, candidates.own_prefill_s, candidates.decode_delay_s
        matched, capacity = candidates.matched_tokens, candidates.kv_capacity_tokens
        in_flight, decodes, prefill = candidates.in_flight, candidates.decodes, candidates.prefill_tokens
        own_kv, usage = candidates.kv_own_tokens, candidates.engine_kv_usage
        prefill_price, decode_price = self.prefill_price, self.decode_price
        output = request.expected_output_tokens
        needed = request.prompt_tokens + output
        best_cost = float("inf")
        best = candidates.slots[0]
        ties = 1
        for slot in candidates.slots:
            cost = ttft[slot] + prefill_price * own[slot] + decode_price * delay[slot]
            room = capacity[slot]
            running = decodes[slot]
            # Running answers are half done on average; those before their first token have everything to come.
            held = usage[slot] * room + (in_flight[slot] - 0.5 * running) * output + prefill[slot]
            if own_kv[slot] > held:
                held = own_kv[slot]
            over = held + needed - matched[slot] - room
            if over > 0.0:
                cost += self.memory_price * over / room
            if cost < best_cost * (1.0 - _TIE):
                best_cost, best, ties = cost, slot, 1
            elif cost <= best_cost * (1.0 + _TIE):
                # Reservoir sampling: each of k ties is kept with probability 1/k.
                ties += 1
                if self._random.random() * ties < 1.0:
                    best = slot
        return Choice(
            best,
            "least predicted cost" if ties == 1 else f"least predicted cost, one of {ties} alike",
            {
                "cost_s": best_cost,
                "ttft_s": ttft[best],
                "own_prefill_s": own[best],
                "decode_delay_s": delay[best],
                "matched_tokens": candidates.matched_tokens[best],
            },
        )
