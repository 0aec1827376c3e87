"""Choosing among candidates that are equally good."""

from collections.abc import Sequence
from random import Random


def draw(slots: Sequence[int], values: Sequence[float], best: float, random: Random) -> tuple[int, int]:
    """Draw one of the slots whose value is the best.

    A fixed choice among equals would send every burst to the same replica, from every gateway at once.

    Args:
        slots: candidate slots.
        values: one per slot.
        best: the least or the greatest of `values`.
        random: source of the draw; not used when there is only one.

    Returns:
        The slot drawn, and how many were equal.
    """
    ties = values.count(best)
    position = values.index(best)
    if ties > 1:
        for _ in range(int(random.random() * ties)):
            position = values.index(best, position + 1)
    return slots[position], ties
