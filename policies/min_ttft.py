"""Mooncake's scheduling: where the first token comes soonest, with no thought for anybody else.

Rule: for every candidate

    TTFT = queue + own prefill

where queue is the sum of the predicted prefills ahead and own prefill that of the uncached part of the prompt. With KV
transfer between replicas (`transfer_s_per_token`), a candidate whose own match is short, best match / own match >=
`balancing_threshold`, is taken to fetch the best match instead:

    TTFT = transfer of the difference + queue + own prefill after the best match

The least TTFT wins, ties at random.

Source: R. Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", arXiv 2407.00079,
Algorithm 1 and section 6.1 (as FAST '25: "Mooncake: Trading More Storage for Less Computation"). The threshold is set
by hand there and no value is given. Refusing with 429 what misses its SLO is admission, not choice, and not done here.
Differences: own prefill after the best match is taken from the best holder, as if the replicas were alike. The times
are the gateway's predictions instead of Mooncake's fitted tables, with the progress of the prompt being computed.

Use it for short queues and prompts with little in common. Greed fragments prefixes: sooner or later every replica has
computed everything, and none holds enough.
"""

from random import Random

from policies.draw import draw
from policies.types import Candidates, Choice, Column, Request


class MinTTFT:
    """Least queue plus own prefill. See the module for the rule."""

    name = "min_ttft"

    def __init__(
        self,
        seed: int = 0,
        transfer_s_per_token: float | None = None,
        balancing_threshold: float = 1.0,
    ) -> None:
        """Make the policy.

        Args:
            seed: for ties.
            transfer_s_per_token: seconds to fetch one token's KV from another replica; None where that is impossible.
            balancing_threshold: how many times longer the best match must be to be fetched; 1 to fetch always.

        Raises:
            ValueError: if the threshold is below 1.
        """
        if balancing_threshold < 1.0:
            raise ValueError(f"balancing_threshold must be at least 1, got {balancing_threshold}")
        self._random = Random(seed)
        self._transfer_s_per_token = transfer_s_per_token
        self._threshold = balancing_threshold
        self.reads = frozenset({Column.PREFILL_S, Column.OWN_PREFILL_S})
        if transfer_s_per_token is not None:
            self.reads |= {Column.MATCHED_TOKENS}

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick the least TTFT."""
        slots, ahead_s, own_s = candidates.slots, candidates.prefill_s, candidates.own_prefill_s
        if self._transfer_s_per_token is None:
            ttfts_s = [ahead_s[slot] + own_s[slot] for slot in slots]
        else:
            ttfts_s = self._with_transfer(candidates, self._transfer_s_per_token)
        least_s = min(ttfts_s)
        slot, _ = draw(slots, ttfts_s, least_s, self._random)
        return Choice(slot, "soonest first token", {"ttft_s": least_s, "queue_s": ahead_s[slot]})

    def _with_transfer(self, candidates: Candidates, transfer_s_per_token: float) -> list[float]:
        slots, ahead_s, own_s = candidates.slots, candidates.prefill_s, candidates.own_prefill_s
        matched = candidates.matched_tokens
        holder = max(slots, key=matched.__getitem__)
        best, after_best_s = matched[holder], own_s[holder]
        threshold = self._threshold
        return [
            ahead_s[slot] + own_s[slot]
            if best < threshold * matched[slot] or best == matched[slot]
            else ahead_s[slot] + after_best_s + (best - matched[slot]) * transfer_s_per_token
            for slot in slots
        ]
