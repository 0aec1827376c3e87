"""A hash ring: which replica a key belongs to, such that replicas may come and go and few keys move.

Each replica has many points on a circle of 64-bit hashes; a key belongs to the first point at or after its own hash
(Karger et al., "Consistent hashing and random trees", STOC 1997). A replica that leaves gives its share to the
others and moves nothing else. A ring of all replicas, walked until one of them is a candidate, gives the same answer
as a ring of the candidates alone, so health, retries and model pools need no ring of their own.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from xxhash import xxh64_intdigest


class HashRing:
    """Replica slots on a circle."""

    def __init__(self, virtual_nodes: int) -> None:
        """Make an empty ring.

        Args:
            virtual_nodes: points per replica; the shares differ by about 1 / sqrt(virtual_nodes).

        Raises:
            ValueError: if there would be none.
        """
        if virtual_nodes < 1:
            raise ValueError(f"virtual_nodes must be at least 1, got {virtual_nodes}")
        self._virtual_nodes = virtual_nodes
        self._points: list[int] = []
        self._slot_at: dict[int, int] = {}
        self._points_of: dict[int, list[int]] = {}
        self._candidates: Sequence[int] | None = None
        self._is_candidate: frozenset[int] = frozenset()

    def select(self, slots: Sequence[int], names: Sequence[str]) -> None:
        """Say which slots may be given from now on; those not seen before get their points.

        Args:
            slots: candidate slots. The same object is taken for the same selection.
            names: by slot, what the points are computed from; empty to take the slot numbers.
        """
        if slots is self._candidates:
            return
        self._candidates = slots
        self._is_candidate = frozenset(slots)
        new = [slot for slot in slots if slot not in self._points_of]
        for slot in new:
            name = names[slot] if names else str(slot)
            points = [xxh64_intdigest(f"{name}:{number}") for number in range(self._virtual_nodes)]
            # Of two replicas with a point in common, the first keeps it.
            points = [point for point in points if self._slot_at.setdefault(point, slot) == slot]
            self._points_of[slot] = points
            self._points += points
        if new:
            self._points.sort()

    def forget(self, slot: int) -> None:
        """Take a slot's points off the ring."""
        points = self._points_of.pop(slot, None)
        if points is not None:
            for point in points:
                self._slot_at.pop(point, None)
            self._points = [point for point in self._points if point in self._slot_at]
            self._candidates = None

    def walk(self, key: int) -> Iterator[int]:
        """Yield the selected slots from a key's place on, once around; a slot comes once for each of its points.

        Args:
            key: 64-bit hash of the key.
        """
        points, slot_at, is_candidate = self._points, self._slot_at, self._is_candidate
        start = bisect_left(points, key)
        for number in range(start - len(points), start):
            slot = slot_at[points[number]]
            if slot in is_candidate:
                yield slot


def hash_text(text: str) -> int:
    """Return the 64-bit ring position of a text."""
    return xxh64_intdigest(text)


def hash_number(number: int) -> int:
    """Return the 64-bit ring position of a number below 2**64, itself a hash of fewer bits or not."""
    return xxh64_intdigest(number.to_bytes(8, "little"))
