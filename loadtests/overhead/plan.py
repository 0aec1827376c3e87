"""What is measured: settings of a benchmark and the loads of one round."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from loadtests.overhead.job import Outcome
from loadtests.overhead.prompts import ACTIVE_CONVERSATIONS, TURNS

Part = Literal["idle", "streams", "requests", "latency"]
PARTS: tuple[Part, ...] = ("streams", "requests", "latency", "idle")

RunKind = Literal["idle", "streams", "requests", "latency", "direct"]
"""`direct` is the load of `latency` on the stub itself."""

SHORT_PROMPT_KB = 1
"""Prompts of the streams and of the latency."""
REPLICAS = 8
LOAD_SHARE = 0.5
"""Part of its saturation at which a gateway's latency is measured."""
_REQUESTS_APART = ACTIVE_CONVERSATIONS * TURNS * 1_000_000
"""Loads of the same prompts begin this far from each other, so that no prompt comes twice."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a whole benchmark."""

    gateways: tuple[str, ...]
    rounds: int = 5
    seconds: float = 3.0
    warmup_s: float = 1.0
    sizes_kb: tuple[int, ...] = (1, 8, 32, 128, 512)
    streams: tuple[int, ...] = (64, 512)
    parts: tuple[Part, ...] = PARTS
    connections: int = 16
    interval_ms: float = 20.0
    """Between two events of a stream."""
    use_wrk: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One load, driven through every gateway in turn before the next begins."""

    kind: Part
    size: int = 0
    """KB of the prompts, or streams."""
    first_request: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one gateway."""

    round: int
    gateway: str
    kind: RunKind
    size: int
    outcome: Outcome
    calls: dict[str, int] = field(default_factory=dict)
    """What the stub replicas were asked meanwhile, by path."""


def steps(settings: Settings) -> list[Step]:
    """The loads of one round, in order.

    Streams come first because memory is measured with them, when no long prompt has been seen. The latency follows the
    requests of the short prompt, whose saturation it needs, and both come before the long prompts, after which routers
    with radix trees are busy evicting for a while.
    """
    sizes = list(settings.sizes_kb) if "requests" in settings.parts else []
    if SHORT_PROMPT_KB in sizes or "latency" in settings.parts:
        sizes = [SHORT_PROMPT_KB, *(size for size in sizes if size != SHORT_PROMPT_KB)]
    plan: list[tuple[Part, int]] = []
    if "streams" in settings.parts:
        plan += [("streams", count) for count in settings.streams]
    plan += [("requests", size) for size in sizes[:1]]
    if "latency" in settings.parts:
        plan.append(("latency", SHORT_PROMPT_KB))
    if "idle" in settings.parts:
        plan.append(("idle", 0))
    plan += [("requests", size) for size in sizes[1:]]
    return [Step(kind, size, number * _REQUESTS_APART) for number, (kind, size) in enumerate(plan)]


def order(gateways: Sequence[str], round_: int) -> Iterator[str]:
    """The gateways in the order of a round: each is first in its turn."""
    start = round_ % len(gateways)
    yield from gateways[start:]
    yield from gateways[:start]


def run_count(settings: Settings) -> int:
    """Loads on gateways in the whole benchmark, for a progress bar."""
    per_gateway = sum(1 for step in steps(settings) if step.kind != "idle")
    idle = sum(1 for step in steps(settings) if step.kind == "idle")
    return settings.rounds * (per_gateway * len(settings.gateways) + idle)
