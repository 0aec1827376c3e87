"""Policies that know more than any gateway can: bounds for the targets, not candidates for the product."""

from collections.abc import Callable, Mapping

from loadtests.replay.options import policy
from policies.types import Policy

BOUNDS: Mapping[str, Callable[[int], Policy]] = {}


def make_any_policy(text: str, seed: int) -> Policy:
    """A bound by its name, or a policy of the catalogue.

    Raises:
        ValueError: unknown name or option.
    """
    bound = BOUNDS.get(text)
    return policy(text, seed) if bound is None else bound(seed)
