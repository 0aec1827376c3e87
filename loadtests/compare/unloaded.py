"""What no routing can beat: every request alone on the fleet's fastest replica, with all that came before cached.

The first token of a request needs the compute of the part of its prompt that no earlier prompt or answer began with, in
steps of the engine's token budget. Queues, decodes in the same step, evictions and copies of a prefix on other replicas
only add to that. So the mean of these times is below the mean TTFT of any policy, and what lies below it is out of
reach.

How far above it the best possible policy is cannot be told from here: requests do meet.
"""

from typing import Any

from gateway.estimator.roofline import StepCost, attention_pairs
from loadtests.bench_summary import Distribution
from loadtests.replay.settings import ReplicaModel
from loadtests.workloads.prompt import Part
from loadtests.workloads.types import Load

NAME = "unloaded_bound"
"""Stands for a policy in tables."""

_GRAIN_TOKENS = 64
"""Prefixes are compared at this spacing, and one more of it is taken for cached: the bound stays below."""


def unloaded_ttfts_s(load: Load, replicas: list[ReplicaModel]) -> list[float]:
    """TTFT of every measured request on an idle replica with one infinite cache.

    In loads of several turns sessions are taken one after the other, in order of their arrival: who pays for the first
    copy of a prefix that several sessions share is decided by that.

    Args:
        load: the requests.
        replicas: the fleet; a request has the fastest of them for itself.
    """
    costs = list({(replica.cost, replica.limits.max_batched_tokens): None for replica in replicas})
    cached: set[int] = set()
    ttfts_s = []
    for stage in load.stages:
        for session in stage.sessions:
            for turn in session.turns:
                names = turn.prompt.names_every(_GRAIN_TOKENS)
                known = sum(name in cached for name in names)
                held = min((known + 1) * _GRAIN_TOKENS, turn.prompt.tokens - 1) if known else 0
                answered = turn.prompt.extended(Part(turn.answer, turn.output_tokens))
                cached.update(answered.names_every(_GRAIN_TOKENS))
                if not stage.warm_up:
                    ttfts_s.append(min(alone_s(turn.prompt.tokens, held, cost, budget) for cost, budget in costs))
    return ttfts_s


def alone_s(prompt_tokens: int, cached_tokens: int, cost: StepCost, budget_tokens: int) -> float:
    """Seconds to the first token of a prompt on an idle engine.

    Args:
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that are cached.
        cost: step times.
        budget_tokens: tokens of a step.
    """
    seconds = 0.0
    while cached_tokens < prompt_tokens:
        chunk = min(budget_tokens, prompt_tokens - cached_tokens)
        seconds += cost.step_s(chunk, attention_pairs(chunk, cached_tokens), 0.0)
        cached_tokens += chunk
    return seconds


def unloaded_figures(load: Load, replicas: list[ReplicaModel]) -> dict[str, Any]:
    """The figures of a cell, as far as the bound has any."""
    ttft_ms = Distribution.of([1000.0 * value for value in unloaded_ttfts_s(load, replicas)])
    names = ("mean", "p50", "p90", "p95", "p99")
    return {"ttft_ms": {name: getattr(ttft_ms, name) for name in names}}
