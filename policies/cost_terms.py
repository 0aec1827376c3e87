"""What a policy's cost of one candidate is made of, by the policy's own arithmetic.

A term is what the cost has more when only its price is in force: the policy is asked about the one candidate with all
prices at nothing, and again with each of them alone. Costs are sums, so the terms add up to the cost that the policy
minimised, and a change of its rule is a change here.
"""

from collections.abc import Mapping
from dataclasses import replace

from policies.predicted_ttft import PredictedTTFT
from policies.types import Candidates, Policy, Request
from policies.understudy import understudy

TTFT = "ttft"
_PRICES = {
    "prefill_work": "prefill_price",
    "tied": "tied_price",
    "queue": "queue_price",
    "eviction": "eviction_price",
    "decode_delay": "decode_price",
    "batch": "batch_price",
    "memory": "memory_price",
    "memory_wait": "wait_price",
}
_FREE = dict.fromkeys(_PRICES.values(), 0.0) | {"wait_price": 1.0}
"""With these, the cost is the predicted TTFT. The price of waiting is a share of it, and takes away what it is less."""

_OF_ONE = {"min_ttft": "ttft_s", "lmetric": "product", "least_outstanding": "in_flight"}
"""Other policies that minimise something, and the term of a choice that is it."""


class CostTerms:
    """Takes one policy's costs apart.

    Attributes:
        unit: of the costs: "s", or "" for a number that is none; None if the policy minimises nothing that a candidate
            has by itself.
    """

    def __init__(self, policy: Policy, terms: Mapping[str, float]) -> None:
        """Prepare.

        Args:
            policy: whose costs; as it was when it chose, save for what `terms` say.
            terms: of the choice that is to be explained.
        """
        self._alone: dict[str, PredictedTTFT] = {}
        self._other: Policy | None = None
        self._key = "cost_s"
        self._least_own_s = terms.get("least_own_prefill_s")
        self.unit: str | None = None
        if isinstance(policy, PredictedTTFT):
            self.unit = "s"
            self._alone[TTFT] = _priced({})
            for name, price in _PRICES.items():
                # What a full cache drives out is priced by how much was used again of late.
                value = terms["eviction_price"] if name == "eviction" else getattr(policy, price)
                self._alone[name] = _priced({price: value})
        elif policy.name in _OF_ONE and getattr(policy, "_transfer_s_per_token", None) is None:
            self._other, self._key = policy, _OF_ONE[policy.name]
            self.unit = "s" if self._key.endswith("_s") else ""

    def of(self, request: Request, candidates: Candidates, slot: int) -> dict[str, float]:
        """Return the terms of a candidate's cost; their sum is the cost.

        Args:
            request: the request.
            candidates: columns as the policy saw them.
            slot: which candidate.
        """
        one = replace(candidates, slots=(slot,), more=None, total=0, least_own_prefill_s=self._least_own_s)
        if self._other is not None:
            return {"cost": float(understudy(self._other).choose(request, one).terms[self._key])}
        if not self._alone:
            return {}
        costs = {}
        for name, policy in self._alone.items():
            policy._reuse = 1.0
            costs[name] = policy.choose(request, one).terms[self._key]
        ttft_s = costs.pop(TTFT)
        return {TTFT: ttft_s} | {name: cost_s - ttft_s for name, cost_s in costs.items() if cost_s != ttft_s}


def _priced(prices: Mapping[str, float]) -> PredictedTTFT:
    policy = PredictedTTFT()
    for price, value in {**_FREE, **prices}.items():
        setattr(policy, price, value)
    return policy
