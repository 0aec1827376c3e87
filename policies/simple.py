"""The policies everyone has, as baselines: random, round robin, least outstanding, power of two choices.

Sources: M. Mitzenmacher, "The power of two choices in randomized load balancing", IEEE TPDS 12(10), 2001; nginx
`least_conn`; Envoy `LEAST_REQUEST`. Requests in flight are counted at selection, so a burst spreads before the first
answer. Ties are broken at random: a fixed order would send every burst to the first replica.
"""

from random import Random

from policies.types import Candidates, Choice, Column, Request


class RandomChoice:
    """Uniformly random. Use it as the floor of a comparison."""

    name = "random"
    reads: frozenset[Column] = frozenset()

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick any candidate."""
        slots = candidates.slots
        return Choice(slots[int(self._random.random() * len(slots))], "random")


class RoundRobin:
    """Each candidate in turn. Fair in counts, blind to load and cache."""

    name = "round_robin"
    reads: frozenset[Column] = frozenset()

    def __init__(self, seed: int = 0) -> None:
        self._last = -1

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick the next slot after the last one chosen, so that replicas may come and go between requests."""
        slots = candidates.slots
        for slot in slots:
            if slot > self._last:
                self._last = slot
                return Choice(slot, "next in turn")
        self._last = slots[0]
        return Choice(slots[0], "next in turn")


class LeastOutstanding:
    """Fewest requests in flight, ties random. Good when requests are alike."""

    name = "least_outstanding"
    reads = frozenset({Column.IN_FLIGHT})

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick a candidate with the fewest requests in flight."""
        in_flight = candidates.in_flight
        slots = candidates.slots
        least = min(in_flight[slot] for slot in slots)
        tied = [slot for slot in slots if in_flight[slot] == least]
        slot = tied[0] if len(tied) == 1 else tied[int(self._random.random() * len(tied))]
        return Choice(slot, "fewest requests in flight", {"in_flight": least})


class PowerOfTwo:
    """Two at random, the one with fewer requests in flight. Nearly least_outstanding, and it does not herd."""

    name = "power_of_two"
    reads = frozenset({Column.IN_FLIGHT})

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Draw two different candidates; with equal load the first drawn wins, which is random already."""
        slots = candidates.slots
        if len(slots) == 1:
            return Choice(slots[0], "only candidate")
        first, second = self._random.sample(slots, 2)
        in_flight = candidates.in_flight
        slot = second if in_flight[second] < in_flight[first] else first
        return Choice(slot, "fewer requests in flight of two", {"in_flight": in_flight[slot]})
