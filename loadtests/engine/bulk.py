"""How many decode steps an engine may do at once, and how long they take.

A waiting request that does not fit now does not fit before a running one finishes: the batch, and with it the budget,
stays the same, and every block the decodes take is one less for it, be it a free one or one of its own hits. So only
the end of a decode, the end of memory and the caller's horizon bound the steps.
"""

from __future__ import annotations

import math

from gateway.estimator.roofline import StepCost
from loadtests.engine.decodes import Decodes


def bulk_steps(
    cost: StepCost,
    decodes: Decodes,
    free_blocks: int,
    first_s: float,
    max_steps: int,
    max_duration_s: float,
) -> int:
    """Decode steps to do at once, the first of which is scheduled already.

    Args:
        cost: step times.
        decodes: the batch, none of whose members is at its end.
        free_blocks: blocks left after the first step.
        first_s: duration of the first step.
        max_steps: at most so many steps.
        max_duration_s: the first step that ends at or after it is the last.
    """
    steps = min(max_steps, decodes.steps_to_finish())
    if max_duration_s < math.inf and steps > 1:
        steps = _steps_lasting(cost, decodes, steps, max_duration_s, first_s)
    if steps > 1:
        steps = 1 + decodes.steps_within(1, steps - 1, free_blocks)
    return steps


def bulk_duration_s(cost: StepCost, decodes: Decodes, steps: int, first_s: float) -> float:
    """Duration of so many decode steps: each reads one token of KV per sequence more than the one before."""
    more_s = cost.kv_s_per_token * len(decodes)
    return steps * first_s + more_s * (steps * (steps - 1) / 2)


def _steps_lasting(cost: StepCost, decodes: Decodes, limit: int, duration_s: float, first_s: float) -> int:
    """The least number of decode steps, at most `limit`, that lasts at least `duration_s`."""
    if bulk_duration_s(cost, decodes, limit, first_s) < duration_s:
        return limit
    low, high = 1, limit
    while low < high:
        middle = (low + high) >> 1
        if bulk_duration_s(cost, decodes, middle, first_s) < duration_s:
            low = middle + 1
        else:
            high = middle
    return low
