"""Routers with nothing around them: no sockets, no timers, no engines."""

from collections.abc import Callable, Iterable
from typing import Any

from gateway.estimator.predictor import Predictor
from gateway.prefixes.index import PrefixIndex
from gateway.prompt.blocks import BlockSchedule
from gateway.prompt.tokens import TokensPerByte
from gateway.replicas.breaker import BreakerSettings
from gateway.replicas.ejection import Ejector
from gateway.replicas.load import LoadLedger
from gateway.replicas.registry import Fleet
from gateway.replicas.spec import ReplicaSpec, Role
from gateway.routing.router import Router
from policies.types import Policy


class Timer:
    """One that never goes off."""

    def cancel(self) -> None: ...


def call_later(delay_s: float, callback: Callable[..., Any], *args: Any) -> Timer:
    return Timer()


def fleet_of(cards: Iterable[str | None], roles: Iterable[Role] | None = None) -> Fleet:
    """Replicas r0, r1, ... that are up and serve model m, an 8B model; of unknown shape where the card is None."""
    fleet = Fleet()
    cards = list(cards)
    roles = [Role.MIXED] * len(cards) if roles is None else list(roles)
    for number, (card, role) in enumerate(zip(cards, roles, strict=True)):
        spec = ReplicaSpec(
            url=f"http://r{number}",
            name=f"r{number}",
            models=("m",),
            role=role,
            hardware=card,
            model_shape="llama-3.1-8b" if card else None,
        )
        fleet.set_up(fleet.add(spec), True)
    return fleet


def h100s(count: int) -> Fleet:
    """So many H100s."""
    return fleet_of(["h100-sxm"] * count)


def router_over(
    fleet: Fleet,
    policy: Policy,
    schedule: BlockSchedule,
    *,
    ledger: LoadLedger | None = None,
    index: PrefixIndex | None = None,
    seed: int = 0,
) -> Router:
    """A router that has seen nothing yet."""
    return Router(
        fleet,
        LoadLedger() if ledger is None else ledger,
        Ejector(fleet, BreakerSettings(), call_later),
        PrefixIndex(schedule) if index is None else index,
        TokensPerByte(),
        Predictor(),
        policy,
        schedule,
        seed=seed,
    )
