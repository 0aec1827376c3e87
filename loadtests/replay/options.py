"""From the words of a command line to replicas, policies and incidents."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from gateway.estimator.hardware import hardware
from gateway.estimator.model import model
from gateway.estimator.roofline import StepCost, kv_capacity_tokens, step_cost
from gateway.replicas.spec import Role
from loadtests.engine import EngineLimits
from loadtests.replay.presets import PRESETS, Preset
from loadtests.replay.settings import Incident, ReplicaModel, Slo
from policies.catalog import make_policy
from policies.types import Policy

_INCIDENT = re.compile(r"(\d+)@(\d+(?:\.\d*)?|\.\d+)s?")


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What may be said about a fleet; None where nothing was said, and a preset or the default decides.

    Args:
        preset: name of a preset.
        replicas: how many.
        prefill: how many of them, the first ones, do nothing but prefill; the others then decode.
        hardware: card names, repeated in turn over the replicas.
        model: name or config.json.
        tensor_parallel: cards per replica.
        kv_tokens: KV memory of each replica.
        cost: `name=value` pairs that replace constants of the engines, see `costs`.
        overhead_ms: constant part of every step.
        max_batched_tokens: tokens per step.
        max_sequences: requests that run at a time.
        predictor_cost: as `cost`, for what the gateway assumes.
        predictor_unknown: the gateway is told neither hardware nor model.
    """

    preset: str | None = None
    replicas: int | None = None
    prefill: int = 0
    hardware: str | None = None
    model: str | None = None
    tensor_parallel: int | None = None
    kv_tokens: int | None = None
    cost: str | None = None
    overhead_ms: float | None = None
    max_batched_tokens: int = 8192
    max_sequences: int = 256
    predictor_cost: str | None = None
    predictor_unknown: bool = False


def fleet(options: FleetOptions) -> list[ReplicaModel]:
    """The replicas described by options.

    Raises:
        ValueError: an unknown name or a malformed value.
    """
    preset = Preset()
    if options.preset is not None:
        if options.preset not in PRESETS:
            raise ValueError(f"unknown preset {options.preset!r}; known: {', '.join(PRESETS)}")
        preset = PRESETS[options.preset]
    count = options.replicas or preset.replicas or 8
    if options.prefill >= count:
        raise ValueError(f"{options.prefill} prefill replicas leave none of {count} to answer")
    names = card_names(options.hardware or preset.hardware or "h100-sxm")
    shape_name = options.model or preset.model or "llama-3.1-8b"
    degree = options.tensor_parallel or preset.tensor_parallel or 1
    # Constants of a preset belong to its cards and its model.
    own_engine = options.hardware is not None or options.model is not None or options.tensor_parallel is not None
    shape = model(shape_name)
    replicas = []
    for number in range(count):
        name = names[number % len(names)]
        card = hardware(name)
        implied = step_cost(card, shape, degree)
        cost = implied if preset.cost is None or own_engine else preset.cost
        if options.overhead_ms is not None:
            cost = replace(cost, overhead_s=options.overhead_ms / 1000.0)
        if options.cost is not None:
            cost = costs(options.cost, cost)
        assumed = None if cost == implied or options.overhead_ms is not None else cost
        if options.predictor_cost is not None:
            assumed = costs(options.predictor_cost, cost)
        unknown = options.predictor_unknown
        replicas.append(
            ReplicaModel(
                cost=cost,
                limits=EngineLimits(
                    options.kv_tokens or preset.kv_tokens or kv_capacity_tokens(card, shape, degree),
                    max_batched_tokens=options.max_batched_tokens,
                    max_sequences=options.max_sequences,
                ),
                hardware=None if unknown else name,
                model=None if unknown else shape_name,
                tensor_parallel=degree,
                assumed_cost=None if unknown else assumed,
                role=Role.MIXED if not options.prefill else Role.PREFILL if number < options.prefill else Role.DECODE,
                kv_bytes_per_token=float(shape.kv_bytes_per_token),
            )
        )
    return replicas


def policy(text: str, seed: int) -> Policy:
    """A policy by its name, with options of its constructor if need be: `name:option=value:option=value`.

    Raises:
        ValueError: unknown name or option.
    """
    name, *pairs = text.split(":")
    options: dict[str, Any] = {}
    for pair in pairs:
        option, separator, value = pair.partition("=")
        if not separator:
            raise ValueError(f"expected policy:option=value, got {text!r}")
        options[option.strip()] = _value(value.strip())
    return make_policy(name.strip(), seed, options)


def _value(text: str) -> Any:
    """A number or a truth value if the text is one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def card_names(text: str) -> list[str]:
    """Names of cards separated by commas, where a card given by its values has commas of its own."""
    names: list[str] = []
    for piece in text.split(","):
        if "=" in piece and names and "=" in names[-1] and piece.split("=")[0] not in names[-1]:
            names[-1] += f",{piece}"
        else:
            names.append(piece.strip())
    return names


def costs(text: str, base: StepCost) -> StepCost:
    """Step constants as changes to others.

    Args:
        text: `name=value` pairs separated by commas: names are those of `StepCost`, values seconds, or `*factor` for
            a multiple of the base's. `scale=factor` multiplies all constants.
        base: what is changed.

    Raises:
        ValueError: an unknown name or a malformed value.
    """
    known = [field.name for field in fields(StepCost)]
    changed: dict[str, float] = {}
    scale = 1.0
    for pair in text.split(","):
        name, _, value = pair.strip().partition("=")
        if name != "scale" and name not in known:
            raise ValueError(f"unknown cost {name!r}; known: scale, {', '.join(known)}")
        try:
            number = float(value.removeprefix("*"))
        except ValueError:
            raise ValueError(f"cost {name} must be a number, got {value!r}") from None
        if not number >= 0.0:
            raise ValueError(f"cost {name} must not be negative, got {value!r}")
        if name == "scale":
            scale = number
        else:
            changed[name] = number * getattr(base, name) if value.startswith("*") else number
    result = replace(base, **changed)
    if scale == 1.0:
        return result
    times = [name for name in known if name.endswith(("_s", "_s_per_token", "_s_per_pair"))]
    return replace(result, **{name: scale * getattr(result, name) for name in times})


def incidents(ends: Sequence[str], starts: Sequence[str], replicas: int) -> list[Incident]:
    """Incidents from `slot@seconds` words.

    Raises:
        ValueError: malformed, or no such slot.
    """
    result = []
    for words, is_start in ((ends, False), (starts, True)):
        for word in words:
            match = _INCIDENT.fullmatch(word)
            if match is None:
                raise ValueError(f"expected slot@seconds, got {word!r}")
            slot = int(match[1])
            if slot >= replicas:
                raise ValueError(f"there is no slot {slot} among {replicas} replicas")
            result.append(Incident(slot, float(match[2]), is_start))
    return sorted(result, key=lambda incident: incident.at_s)


def slos(ttft_ms: str, tpot_ms: str) -> list[Slo]:
    """What sessions ask for in turn, from numbers separated by commas; a single number goes with each of the others.

    Raises:
        ValueError: not positive numbers, or two lists of different lengths.
    """
    ttfts, tpots = _milliseconds(ttft_ms), _milliseconds(tpot_ms)
    length = max(len(ttfts), len(tpots))
    if not {len(ttfts), len(tpots)} <= {1, length}:
        raise ValueError(f"{len(ttfts)} TTFT limits and {len(tpots)} TPOT limits do not go together")
    return [Slo(ttfts[number % len(ttfts)], tpots[number % len(tpots)]) for number in range(length)]


def _milliseconds(text: str) -> list[float]:
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"expected milliseconds separated by commas, got {text!r}") from None
    if not all(0.0 < number < 1e7 for number in numbers):
        raise ValueError(f"milliseconds must be positive and below 10,000,000, got {text!r}")
    return numbers
