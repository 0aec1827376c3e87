"""Every policy by its name."""

from collections.abc import Callable, Mapping
from typing import Any

from policies.bounded_hash import BoundedHash
from policies.cache_aware import CacheAware
from policies.consistent_hash import ConsistentHash
from policies.exploit_explore import ExploitExplore
from policies.kv_cost import KvCost, LMetric
from policies.min_ttft import MinTTFT
from policies.predicted_ttft import PredictedTTFT
from policies.prefix_only import PrefixOnly
from policies.simple import LeastOutstanding, PowerOfTwo, RandomChoice, RoundRobin
from policies.sticky_until_saturated import StickyUntilSaturated
from policies.types import Policy
from policies.weighted_score import WeightedScore

POLICIES: Mapping[str, Callable[..., Policy]] = {
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "least_outstanding": LeastOutstanding,
    "power_of_two": PowerOfTwo,
    "consistent_hash": ConsistentHash,
    "bounded_hash": BoundedHash,
    "prefix_only": PrefixOnly,
    "cache_aware": CacheAware,
    "weighted_score": WeightedScore,
    "sticky_until_saturated": StickyUntilSaturated,
    "kv_cost": KvCost,
    "lmetric": LMetric,
    "min_ttft": MinTTFT,
    "exploit_explore": ExploitExplore,
    "predicted_ttft": PredictedTTFT,
}


def make_policy(name: str, seed: int = 0, options: Mapping[str, Any] | None = None) -> Policy:
    """Make a policy.

    Args:
        name: a key of `POLICIES`.
        seed: of its random numbers.
        options: keyword arguments of the policy's constructor.

    Raises:
        ValueError: unknown name or option; the message lists what is known.
    """
    factory = POLICIES.get(name)
    if factory is None:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    try:
        return factory(seed=seed, **(options or {}))
    except TypeError as error:
        raise ValueError(f"policy {name}: {error}") from error
