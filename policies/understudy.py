"""Somebody to ask in a policy's place: chooses as it would choose next, and leaves it as it is.

A choice draws random numbers, and some policies learn from it. `understudy` returns another object that draws the same
numbers and knows the same. What a policy remembers of prompts may be millions of blocks, so it is not copied: the
understudy reads it, and does not write.
"""

import copy
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from policies.exploit_explore import ExploitExplore
from policies.peer_blocks import ActiveBlocks, UseBook
from policies.peer_index import BlockLru, OwnerTree
from policies.predicted_ttft import PredictedTTFT
from policies.ring import HashRing
from policies.types import Policy

_LEARNS = ("insert", "start", "forget")


class _ReadOnly:
    """A memory that is asked, and takes nothing in."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        return _nothing if name in _LEARNS else getattr(self._memory, name)


def _nothing(*arguments: Any) -> None:
    """Take something in that is not to be remembered."""


def understudy(policy: Policy) -> Policy:
    """Return a policy that makes the choice which a policy would make next.

    Args:
        policy: which; it is not changed, whatever is asked of the other. One choice may be asked of that.

    Raises:
        ValueError: the policy keeps something of which it is not known how to read it without changing it.
    """
    if isinstance(policy, PredictedTTFT):
        return policy.copy()
    if isinstance(policy, ExploitExplore):
        return _exploit_explore(policy)
    other: Policy = _copied(policy)
    return other


def _copied(thing: Any) -> Any:
    other = copy.copy(thing)
    for name, value in vars(thing).items():
        setattr(other, name, _kept(thing, name, value))
    return other


def _kept(owner: Any, name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, tuple, frozenset)):
        return value
    how = _HOW.get(type(value))
    if how is not None:
        return how(value)
    if type(value).__name__.endswith("Shares"):
        return _copied(value)
    raise ValueError(f"{type(owner).__name__}.{name} cannot be read without changing it")


def _ring(ring: HashRing) -> HashRing:
    other: HashRing = copy.copy(ring)
    for name, value in vars(ring).items():
        setattr(other, name, copy.copy(value))
    return other


def _active(active: ActiveBlocks) -> ActiveBlocks:
    """Requests in flight are few, and those that have ended are dropped by who asks: a copy."""
    other = ActiveBlocks()
    other._holders = dict(active._holders)
    for slot, held in active._active.items():
        mine = other._active[slot] = type(held)()
        mine.blocks = {block: list(entry) for block, entry in held.blocks.items()}
        mine.requests = deque(held.requests)
        mine.tokens = held.tokens
    return other


def _exploit_explore(policy: ExploitExplore) -> ExploitExplore:
    other: ExploitExplore = copy.copy(policy)
    loads = {slot: copy.copy(load) for slot, load in policy._loads.items()}
    mine = {id(load): loads[slot] for slot, load in policy._loads.items()}
    other._random = _random(policy._random)
    other._loads = loads
    # What was sent to replicas that have gone since counts for nobody.
    other._sent = deque((sent_s, mine.get(id(load), copy.copy(load)), work_s) for sent_s, load, work_s in policy._sent)
    other._book = _ReadOnly(policy._book)  # type: ignore[assignment]
    return other


def _random(random: Random) -> Random:
    other = Random()
    other.setstate(random.getstate())
    return other


_HOW: dict[type, Callable[[Any], Any]] = {
    Random: _random,
    HashRing: _ring,
    ActiveBlocks: _active,
    OwnerTree: _ReadOnly,
    BlockLru: _ReadOnly,
    UseBook: _ReadOnly,
}
