"""Longest cached prefix, and nothing else.

Rule: the replicas that hold the longest prefix of the prompt, in tokens; of these the one with the fewest requests in
flight, ties at random.

Source: vllm-project/production-stack, src/vllm_router/routers/routing_logic.py, PrefixAwareRouter (longest match in a
hash trie that forgets nothing, ties at random, load not looked at).

It is here to be beaten. Whatever all prompts have in common, be it one block, makes the first replica that computed
it the owner of everything that comes: with requests one at a time, all of a trace whose rows begin with the same
block goes to one replica.
"""

from random import Random

from policies.draw import draw
from policies.types import Candidates, Choice, Column, Request


class PrefixOnly:
    """Longest prefix, ties by requests in flight. See the module for the rule and its trap."""

    name = "prefix_only"
    reads = frozenset({Column.MATCHED_TOKENS, Column.IN_FLIGHT})

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick the least loaded of those that hold the most."""
        slots, matched, in_flight = candidates.slots, candidates.matched_tokens, candidates.in_flight
        longest = max(matched[slot] for slot in slots)
        holders = [slot for slot in slots if matched[slot] == longest]
        loads = [in_flight[slot] for slot in holders]
        slot, _ = draw(holders, loads, min(loads), self._random)
        return Choice(slot, "longest prefix", {"matched_tokens": longest, "in_flight": in_flight[slot]})
