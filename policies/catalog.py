"""Every policy by its name."""

from collections.abc import Callable, Mapping
from typing import Any

from policies.predicted_ttft import PredictedTTFT
from policies.simple import LeastOutstanding, PowerOfTwo, RandomChoice, RoundRobin
from policies.types import Policy

POLICIES: Mapping[str, Callable[..., Policy]] = {
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "least_outstanding": LeastOutstanding,
    "power_of_two": PowerOfTwo,
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
