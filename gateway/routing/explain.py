"""A decision taken apart for people: every candidate with its load and its cost, who was left out, and one sentence.

Everything comes from what the decision kept (`gateway.routing.decision`), so it is about that moment, and not about
the fleet as it is now. Costs are worked out here, by the policy's own code. What comes out is JSON's own types.
"""

from collections.abc import Sequence
from typing import Any

from gateway.routing.decision import COPIED, Decision, Standing
from gateway.routing.pairing import Difference
from policies.cost_terms import TTFT, CostTerms
from policies.types import Candidates, Column, Request

MOST_SHOWN = 24
"""Candidates of a decision that are given with all their numbers: the cheapest, and the one chosen."""

ALIKE = 0.04
"""Costs that differ by less may have been a tie for the default policy: one of them within 2 % of a second, and that
within 2 % of a third."""

_AT_ONCE_S = 1e-5
"""First tokens that differ by less come at the same time."""

_WORDS = {
    TTFT: "its first token",
    "prefill_work": "the price of its prefill work",
    "queue": "those who wait behind it",
    "eviction": "what its full cache would have to drive out",
    "decode_delay": "the delay of answers that run there",
    "batch": "the size of its batch",
    "memory": "KV memory it does not have",
    "memory_wait": "its wait for KV memory",
}


def explained(decision: Decision) -> list[dict[str, Any]]:
    """Explain the decisions about a request's attempts, the first one first.

    Args:
        decision: about the last attempt.
    """
    found: list[Decision] = []
    each: Decision | None = decision
    while each is not None:
        found.append(each)
        each = each.before
    return [explain(one) for one in reversed(found)]


def explain(decision: Decision) -> dict[str, Any]:
    """Explain one decision."""
    standing = decision.standing.replicas
    candidates = _candidates(decision)
    chosen = next(one for one in candidates if one["chosen"])
    shown = candidates[:MOST_SHOWN]
    if chosen not in shown:
        shown = [*shown[:-1], chosen]
    by_load = decision.error is not None
    return {
        "policy": decision.policy.name,
        "fallback_to_load": by_load,
        "model": decision.model,
        "prompt_tokens": round(decision.prompt_tokens),
        "expected_output_tokens": round(decision.output_tokens),
        "replica": standing[decision.slot][0],
        "url": standing[decision.slot][1],
        "reason": decision.final.reason,
        "terms": dict(decision.final.terms),
        "why": in_words(decision, candidates),
        "expected_cached_tokens": int(decision.plan.matched_tokens if decision.plan else decision.cached_tokens),
        "predicted_ttft_s": decision.plan.ttft_s if decision.plan else decision.ttft_s,
        "latency_targets": decision.outlook,
        "candidates": shown,
        "candidates_not_shown": len(decision.roomy if _shortlisted(decision) else decision.slots) - len(shown),
        "left_out": left_out(decision),
        "hand_off": _hand_off(decision),
        "failure": decision.failure,
    }


def left_out(decision: Decision) -> list[dict[str, str]]:
    """Return the replicas that could not be chosen, and why."""
    choosable = set(decision.roomy if _shortlisted(decision) else decision.slots)
    plan = decision.plan
    if plan is not None:
        choosable |= {plan.prefill_slot, plan.decode_slot}
    routable, roomy = set(decision.routable), set(decision.roomy)
    in_flight = decision.copy.columns[0] if decision.copy.whole else ()
    found = []
    for slot, (name, url, role, models, limit, state) in decision.standing.replicas.items():
        if slot in choosable:
            continue
        if slot in decision.tried:
            why = "already tried for this request"
        elif slot in roomy:
            why = "kept for requests with tighter latency targets, or does not keep this one's"
            if decision.outlook is None:
                why = "waits for KV of a hand-off, which a long prompt would hold up"
        elif slot in routable:
            why = "warming up (slow start)"
            if limit is not None and (slot >= len(in_flight) or in_flight[slot] >= limit):
                why = f"saturated: at its limit of {limit} requests"
            elif slot in decision.spared:
                why = "asked for a pause (429 or 503)"
        else:
            why = why_not(decision.model, role, models, state) or "could not be chosen"
        found.append({"replica": name, "url": url, "why": why})
    return found


def who_could(standing: Standing, model: str | None, in_flight: Sequence[int]) -> list[dict[str, str]]:
    """Return all replicas with what keeps each from requests for a model now, "" where nothing does.

    Args:
        standing: the replicas.
        model: the name requests are routed by; None for any.
        in_flight: column of requests in flight.
    """
    found = []
    for slot, (name, url, role, models, limit, state) in standing.replicas.items():
        why = why_not(model, role, models, state)
        if not why and limit is not None and in_flight[slot] >= limit:
            why = f"saturated: at its limit of {limit} requests"
        found.append({"replica": name, "url": url, "why": why})
    return found


def why_not(model: str | None, role: str, models: frozenset[str], state: str) -> str:
    """Say what keeps a replica from the requests for a model; "" for nothing.

    Args:
        model: the name requests are routed by; None for any.
        role: of the replica.
        models: what it serves.
        state: what else keeps it, or "".
    """
    if state:
        return state
    if model is not None and model not in models:
        return f"does not serve {model}"
    return "wrong role: computes prompts only" if role == "prefill" else ""


def in_words(decision: Decision, candidates: list[dict[str, Any]]) -> str:
    """Say in one sentence why it went where it went.

    Args:
        decision: which.
        candidates: of it, the cheapest first.
    """
    chosen = next(one for one in candidates if one["chosen"])
    prompt = round(decision.prompt_tokens)
    facts = [f"holds {round(chosen['matched_tokens']):,} of {prompt:,} prompt tokens"] if prompt else []
    others = [one for one in candidates if not one["chosen"]]
    if not others:
        facts.append("it was the only candidate")
    elif chosen["cost"] is None:
        facts.append(decision.choice.reason)
    else:
        facts.append(_against(chosen, others[0], decision))
        holder = max(others, key=lambda one: float(one["matched_tokens"]))
        if holder["matched_tokens"] > chosen["matched_tokens"]:
            facts.append(_not_the_holder(chosen, holder))
    words = f"{chosen['replica']}: {'; '.join(facts)}"
    plan = decision.plan
    if plan is not None:
        prefill, decode = (decision.standing.replicas[slot][0] for slot in (plan.prefill_slot, plan.decode_slot))
        words = (
            f"{prefill} computes the prompt and {decode} answers, which costs {plan.cost_s:.3f} s against "
            f"{plan.whole_cost_s:.3f} s with all of it on {chosen['replica']}"
        )
        if decision.final.reason != "prefill elsewhere costs less":
            words += f" ({decision.final.reason})"
    return words


def _against(chosen: dict[str, Any], other: dict[str, Any], decision: Decision) -> str:
    """Compare with the cheapest of the others."""
    mine, its, name = chosen["cost"]["total"], other["cost"]["total"], other["replica"]
    unit = chosen["cost"]["unit"]
    if its < mine * (1.0 - ALIKE):
        return decision.choice.reason
    if its <= mine:
        return f"costs as much as {name}, or nearly, and was drawn"
    sooner_s = None
    if chosen["predicted_ttft_s"] is not None:
        sooner_s = other["predicted_ttft_s"] - chosen["predicted_ttft_s"]
    if sooner_s is None or not unit:
        return f"{decision.choice.reason}: {mine:g}{unit} against {its:g}{unit} on the next best, {name}"
    words = f"first token predicted {_time(abs(sooner_s))} {'sooner' if sooner_s > 0.0 else 'later'}"
    if abs(sooner_s) < _AT_ONCE_S:
        words = "first token predicted as soon"
    words += f" as on the next best, {name}" if words.endswith("soon") else f" than on the next best, {name}"
    terms, its_terms = chosen["cost"]["terms"], other["cost"]["terms"]
    saved = {key: its_terms.get(key, 0.0) - terms.get(key, 0.0) for key in {*terms, *its_terms} if key != TTFT}
    most = max(sorted(saved), key=lambda key: saved[key], default=None)
    if most is not None and saved[most] > max(sooner_s, 0.0):
        words += f", {'and' if sooner_s >= _AT_ONCE_S else 'but'} {_time(saved[most])} less for {_WORDS[most]}"
    return f"{words}; {_time(its - mine)} cheaper in all"


def _not_the_holder(chosen: dict[str, Any], holder: dict[str, Any]) -> str:
    """Say why it did not go where most of its prompt is."""
    mine, its = chosen["cost"], holder["cost"]
    words = f"{holder['replica']} holds {round(holder['matched_tokens']):,}"
    if its["unit"] != "s":
        return words
    if its["total"] <= mine["total"]:
        return f"{words}, and costs as much, or nearly"
    excess = {key: its["terms"].get(key, 0.0) - mine["terms"].get(key, 0.0) for key in {*mine["terms"], *its["terms"]}}
    most = max(sorted(excess), key=lambda key: excess[key])
    return f"{words}, but costs {_time(its['total'] - mine['total'])} more, mostly for {_WORDS[most]}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{1000.0 * seconds:.{0 if seconds >= 0.01 else 2}f} ms"


def _shortlisted(decision: Decision) -> bool:
    return "evaluated" in decision.choice.terms


def _candidates(decision: Decision) -> list[dict[str, Any]]:
    """Return what was known of each candidate, the cheapest first."""
    copy, standing = decision.copy, decision.standing.replicas
    columns = copy.columns
    count = max(map(len, columns))
    capacity = decision.standing.capacity_tokens
    at = {slot: slot if copy.whole else position for position, slot in enumerate(copy.slots)}
    view = Candidates(slots=(), kv_capacity_tokens=capacity if copy.whole else [capacity[slot] for slot in copy.slots])
    for column, values in zip(COPIED, columns, strict=True):
        setattr(view, column, values or (0.0,) * count)
    known = {column for column, values in zip(COPIED, columns, strict=True) if values}
    request = Request(decision.prompt_tokens, decision.output_tokens, now_s=decision.now_s)
    terms = CostTerms(decision.policy, decision.choice.terms)
    found: list[dict[str, Any]] = []
    for slot, position in at.items():
        parts = terms.of(request, view, position)
        cost = None
        if terms.unit is not None:
            cost = {"total": sum(parts.values()), "unit": terms.unit, "terms": parts}
        memory_tokens, room_tokens = view.kv_capacity_tokens[position], view.kv_room_tokens[position]
        found.append(
            {
                "replica": standing[slot][0],
                "url": standing[slot][1],
                "chosen": slot == decision.choice.slot,
                "matched_tokens": view.matched_tokens[position],
                "uncached_tokens": decision.prompt_tokens - view.matched_tokens[position],
                "in_flight": view.in_flight[position],
                "running_decodes": view.decodes[position],
                "prefill_tokens_ahead": view.prefill_tokens[position],
                "prefill_ahead_s": view.prefill_s[position] if Column.PREFILL_S in known else None,
                "kv_use": view.engine_kv_usage[position] if Column.ENGINE_KV_USAGE in known else None,
                "kv_committed": (memory_tokens - room_tokens) / memory_tokens if memory_tokens else None,
                "cache_full": bool(view.cache_full[position]),
                "own_prefill_s": view.own_prefill_s[position] if decision.predicted else None,
                "predicted_ttft_s": view.predicted_ttft_s[position] if decision.predicted else None,
                "memory_wait_s": view.memory_wait_s[position] if decision.predicted else None,
                "decode_delay_s": view.decode_delay_s[position] if decision.predicted else None,
                "cost": cost,
            }
        )
    found.sort(key=lambda one: (one["cost"]["total"] if one["cost"] else 0.0, not one["chosen"]))
    return found


def _hand_off(decision: Decision) -> dict[str, Any] | None:
    """Return what was found of a hand-off, taken or not; None where none could be worth it."""
    considered, standing = decision.considered, decision.standing.replicas
    if considered is None:
        return None
    if isinstance(considered, Difference):
        return {"taken": False, "reason": f"no pair for a hand-off, {considered.text}"}
    return {
        "taken": considered.taken,
        "prefill_replica": standing[considered.prefill_slot][0],
        "decode_replica": standing[considered.decode_slot][0],
        "whole_replica": standing[decision.choice.slot][0],
        "reason": considered.reason,
        **considered.terms(),
    }
