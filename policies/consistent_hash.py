"""The same session on the same replica, whatever else happens.

Rule: a ring of hashes with 160 points per replica; a request goes to the replica of the first point at or after the
hash of its session key, or of the head of its prompt when it has no session. Load is never looked at. When a replica
comes or goes, only its own share of the keys moves. Requests with neither session nor prompt are spread at random.

Sources:
- vllm-project/router, src/policies/consistent_hash.rs (160 virtual nodes; its hash is mcrouter's furc hash, a detail
  not copied) and src/policies/hash_key.rs (keys: session headers, then `user` and the like in the body, then a hash
  of the whole body).
- vllm-project/production-stack, src/vllm_router/routers/routing_logic.py, SessionRouter (uhashring; without a session
  key it takes the replica with the fewest requests per second).
Differences: without a session both fall back to something that keeps nothing together; the head of the prompt does.
`prompt_key="whole"` hashes all of the prompt's full blocks, as vllm-router hashes the body.
Where vllm-router sends the keys of an unhealthy replica to the first healthy one, the ring is walked on, as it would
be if the replica had been removed.

Use it when clients name their sessions and sessions are many and alike. One heavy session, or one prompt head that
everybody shares, overloads its replica.
"""

from random import Random

from policies.ring import HashRing, hash_number, hash_text
from policies.types import Candidates, Choice, Column, Request


class ConsistentHash:
    """Ring on the session key, else on the prompt head. See the module for the rule."""

    name = "consistent_hash"
    reads: frozenset[Column] = frozenset()

    def __init__(self, seed: int = 0, virtual_nodes: int = 160, prompt_key: str = "head") -> None:
        """Make the policy.

        Args:
            seed: for requests without any key. The ring itself does not depend on it.
            virtual_nodes: points per replica on the ring.
            prompt_key: what of the prompt is hashed when there is no session: `head` or `whole`.

        Raises:
            ValueError: unknown prompt key.
        """
        if prompt_key not in ("head", "whole"):
            raise ValueError(f"prompt_key must be head or whole, got {prompt_key!r}")
        self._random = Random(seed)
        self._whole_prompt = prompt_key == "whole"
        self._ring = HashRing(virtual_nodes)

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick the first candidate at or after the key."""
        slots = candidates.slots
        if request.session:
            key, reason = hash_text(request.session), "hash of the session"
        elif self._whole_prompt and request.block_hashes:
            key, reason = hash_number(request.block_hashes[-1]), "hash of the prompt"
        elif request.prefix_hash:
            key, reason = hash_number(request.prefix_hash), "hash of the prompt's head"
        else:
            return Choice(slots[int(self._random.random() * len(slots))], "no session and no prompt: random")
        self._ring.select(slots, candidates.names)
        return Choice(next(self._ring.walk(key)), reason)

    def forget(self, slot: int) -> None:
        """Take the replica off the ring."""
        self._ring.forget(slot)
