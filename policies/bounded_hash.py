"""Consistent hashing with bounded loads: the same prompt head on the same replica until that has too much.

Rule: a ring of hashes with 256 points per replica, entered at the hash of adapter and prompt head. With `total`
requests in flight on the `n` candidates, walk from point to point until a replica has

    in flight + 1 <= (total + 1) / n x 1.25

and take that; with nothing in flight anywhere, take the first. When no replica passes, as with few requests on many
replicas, take the first as well.

Sources: substratusai/kubeai, internal/loadbalancer/balance_chwbl.go (the rule above, `chwblLoadOK`, and the default
endpoint) and api/k8s/v1/model_types.go (125 %, 256 points, 100 characters); V. Mirrokni, M. Thorup, M. Zadimoghaddam,
"Consistent hashing with bounded loads", SODA 2018.
Differences: KubeAI's key is the adapter and the first 100 characters of the first user message, or of a text prompt;
here it is the head of the canonical prompt (adapter and tools included, system message first), so conversations under
a long common system message share a key. KubeAI divides the percentage by 100 in integers (group.go), which makes
its default a factor of 1; `load_factor=1.0` behaves like that.

Use it for many conversations whose heads differ: no map of prefixes is needed, and no replica is overloaded for long.
"""

from policies.ring import HashRing, hash_number
from policies.types import Candidates, Choice, Column, Request


class BoundedHash:
    """Ring on the prompt head with a bound on load. See the module for the rule."""

    name = "bounded_hash"
    reads = frozenset({Column.IN_FLIGHT})

    def __init__(self, seed: int = 0, load_factor: float = 1.25, virtual_nodes: int = 256) -> None:
        """Make the policy.

        Args:
            seed: not used: nothing here is random.
            load_factor: how far above the mean a replica's load may be; at least 1.
            virtual_nodes: points per replica on the ring.

        Raises:
            ValueError: if the factor would let nobody pass.
        """
        if load_factor < 1.0:
            raise ValueError(f"load_factor must be at least 1, got {load_factor}")
        self._load_factor = load_factor
        self._ring = HashRing(virtual_nodes)

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick the first candidate at or after the key whose load is within the bound."""
        slots, in_flight = candidates.slots, candidates.in_flight
        self._ring.select(slots, candidates.names)
        walk = self._ring.walk(hash_number(request.prefix_hash))
        first = next(walk)
        loads = [in_flight[slot] for slot in slots]
        total = sum(loads)
        limit = (total + 1) / len(slots) * self._load_factor
        terms = {"in_flight": in_flight[first], "limit": limit}
        if total == 0 or in_flight[first] + 1 <= limit:
            return Choice(first, "hash of the prompt's head", terms)
        # Nobody within the bound: known without a walk over all points.
        if min(loads) + 1 > limit:
            return Choice(first, "hash of the prompt's head; no replica is within the bound", terms)
        slot = next(slot for slot in walk if in_flight[slot] + 1 <= limit)
        terms["in_flight"] = in_flight[slot]
        return Choice(slot, "next on the ring: the prompt's own replica is above the bound", terms)

    def forget(self, slot: int) -> None:
        """Take the replica off the ring."""
        self._ring.forget(slot)
