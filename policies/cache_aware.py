"""SGLang's cache-aware routing: the owner of most of the prompt, until the fleet is out of balance.

Rule, in order:
1. If the greatest number of requests in flight exceeds the least by more than 64 *and* is more than 1.5 times the
   least (both strictly): the replica with the least.
2. Else look the prompt up in a prefix tree of all earlier decisions. If the matched share of the prompt is greater
   than 0.3 (strictly): the one owner of where the match ends. Other holders, and the owner's load, do not matter.
3. Else the replica with the least requests in flight.
In all three cases the tree learns the prompt for the replica chosen, so a miss seeds it. Of several replicas with the
least load the first is taken. If the owner is no candidate, the first candidate is taken and nothing is learned.

Sources: sgl-project/sglang, sgl-model-gateway/src/policies/cache_aware.rs and tree.rs; vllm-project/router,
src/policies/cache_aware.rs, forked from it. Defaults are those of both command lines (sglang_router/router_args.py:
0.3, 64, 1.5, trees of 2**26 characters); the Rust structures themselves default to 0.5, 32, 1.1, 10,000. The comment
at the head of cache_aware.rs says that a miss goes to the smallest tree; its code says the least load.
Differences: the match is counted in whole blocks, so prompts shorter than one never match; see `OwnerTree`. The
session map that vllm-router keeps beside the tree is `consistent_hash` here.

Use it as they do: prefixes that are a large part of the prompt, load that is far from the limit. Its owner rule sends
everything with a popular prefix to one replica until that is 64 requests ahead of another.
"""

from policies.peer_index import OwnerTree
from policies.types import Candidates, Choice, Column, Request


class CacheAware:
    """Longest match when balanced, least load when not. See the module for the rule."""

    name = "cache_aware"
    reads = frozenset({Column.IN_FLIGHT})

    def __init__(
        self,
        seed: int = 0,
        cache_threshold: float = 0.3,
        balance_abs_threshold: int = 64,
        balance_rel_threshold: float = 1.5,
        max_tree_bytes: int = 2**26,
    ) -> None:
        """Make the policy.

        Args:
            seed: not used: nothing here is random.
            cache_threshold: share of the prompt that must be exceeded for a match to count.
            balance_abs_threshold: requests in flight by which the busiest must exceed the idlest.
            balance_rel_threshold: factor by which the busiest must exceed the idlest.
            max_tree_bytes: canonical bytes remembered per replica.
        """
        self.cache_threshold = cache_threshold
        self.balance_abs_threshold = balance_abs_threshold
        self.balance_rel_threshold = balance_rel_threshold
        self._tree = OwnerTree(max_tree_bytes)

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick by the three rules, and learn."""
        slots, in_flight = candidates.slots, candidates.in_flight
        loads = [in_flight[slot] for slot in slots]
        least, most = min(loads), max(loads)
        if most - least > self.balance_abs_threshold and most > least * self.balance_rel_threshold:
            slot = slots[loads.index(least)]
            reason, terms = "out of balance: least load", {"least": float(least), "most": float(most)}
        else:
            depth, owner = self._tree.match(request.block_hashes)
            share = request.block_offsets[depth] / request.canonical_bytes if depth else 0.0
            terms = {"matched_share": share}
            if owner is not None and share > self.cache_threshold:
                if owner not in slots:
                    return Choice(slots[0], "the prefix's owner is no candidate: first candidate", terms)
                slot, reason = owner, "owner of the longest prefix"
            else:
                slot, reason = slots[loads.index(least)], "no prefix to speak of: least load"
        terms["in_flight"] = in_flight[slot]
        self._tree.insert(slot, request.block_hashes, request.block_offsets)
        return Choice(slot, reason, terms)

    def forget(self, slot: int) -> None:
        """Forget what the replica held."""
        self._tree.forget(slot)
