"""Exact facts of a trace: how much of it a prefix cache can serve, whatever the routing.

They bound what a benchmark may report: no fleet beats one infinite cache, and routing at random over N
replicas with infinite caches has an expected hit rate that follows from the repetition counts alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from loadtests.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class CacheHitRates:
    """Shares of the prompts served from the cache, 0 to 1."""

    token: float
    """Cached prompt tokens over prompt tokens."""
    block: float
    """Cached block references over block references."""


def infinite_cache_hit_rates(trace: Iterable[TraceRequest]) -> CacheHitRates:
    """Hit rates of one cache that never evicts and serves the trace in order.

    A request hits on its leading blocks that an earlier request held. This is the ceiling for any routing
    over any number of replicas.
    """
    seen: set[int] = set()
    hit_tokens = tokens = hit_blocks = blocks = 0
    for request in trace:
        leading = True
        for hash_id, length in zip(request.hash_ids, request.block_lengths(), strict=True):
            leading = leading and hash_id in seen
            if leading:
                hit_tokens += length
                hit_blocks += 1
        tokens += request.input_length
        blocks += len(request.hash_ids)
        seen.update(request.hash_ids)
    return CacheHitRates(
        token=hit_tokens / tokens if tokens else 0.0,
        block=hit_blocks / blocks if blocks else 0.0,
    )


def random_routing_block_hit_rate(trace: Iterable[TraceRequest], replicas: int) -> float:
    """Expected block hit rate under uniformly random routing over `replicas` infinite caches.

    A block that k earlier requests held is on the chosen replica with probability 1 - (1 - 1/N)^k; the
    ids are chained, so a replica that holds a block holds its prefix too. The result is the mean over
    block references.
    """
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {replicas}")
    missing = 1.0 - 1.0 / replicas
    earlier: dict[int, int] = {}
    expected_hits = 0.0
    blocks = 0
    for request in trace:
        for hash_id in request.hash_ids:
            expected_hits += 1.0 - missing ** earlier.get(hash_id, 0)
        for hash_id in request.hash_ids:
            earlier[hash_id] = earlier.get(hash_id, 0) + 1
        blocks += len(request.hash_ids)
    return expected_hits / blocks if blocks else 0.0
