"""The gateway's parts, wired as `gateway.app` wires them, around a simulated clock."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.estimator.predictor import Predictor, ReplicaClass
from gateway.estimator.roofline import StepCost
from gateway.prefixes.index import PrefixIndex
from gateway.prompt.blocks import BlockSchedule, PromptKey
from gateway.prompt.body import RequestBody
from gateway.prompt.tokens import TokensPerByte
from gateway.proxy.retry_budget import RetryBudget
from gateway.replicas.breaker import BreakerSettings
from gateway.replicas.ejection import Ejector
from gateway.replicas.load import LoadLedger
from gateway.replicas.registry import Fleet
from gateway.replicas.spec import ReplicaSpec
from gateway.routing.hand_off import HandOffRules
from gateway.routing.router import Router
from gateway.routing.slo import ModelTargets, SloRules
from loadtests.replay.events import Events
from loadtests.replay.settings import ReplaySettings
from loadtests.workloads.prompt import Prompt
from policies.types import Policy

MODEL = "replayed"
_ANSWERED = 1 << 59
"""Tells the end of a prompt from a block that happens to end there."""
BYTES_PER_TOKEN = 4
"""Canonical bytes that stand for one token: the map's blocks are laid over prompts as they are over live ones."""


class TunedPredictor(Predictor):
    """A predictor that starts from given constants for some slots, right or wrong."""

    def __init__(self, costs: Sequence[StepCost | None], token_budget: int) -> None:
        super().__init__(token_budget)
        self._given = costs

    def configure(
        self, slot: int, replica_class: ReplicaClass, cost: StepCost | None = None, token_budget: int | None = None
    ) -> None:
        """Set the class of the replica in a slot, with the slot's own constants if it has any."""
        super().configure(slot, replica_class, self._given[slot] if cost is None else cost, token_budget)


class PromptKeys:
    """Keys of prompts, cut where the live gateway cuts them.

    Args:
        schedule: where that is.
        answers: they name the answer that a prompt continues. Where events tell of the blocks of answers these are in
            the map already.
    """

    def __init__(self, schedule: BlockSchedule, *, answers: bool = True) -> None:
        self._schedule = schedule
        self._answers = answers
        self._positions: list[int] = []

    def key(self, prompt: Prompt) -> PromptKey:
        """The key of a prompt, as of a body of token ids: its length is known."""
        positions = self._reaching(prompt.tokens)
        hashes = prompt.names_at(positions)
        length = prompt.tokens * BYTES_PER_TOKEN
        key = PromptKey(hashes, length, prompt.tokens, 0, hashes[0] if hashes else prompt.name)
        if hashes and self._answers:
            key.end_hash = prompt.name ^ _ANSWERED
            begin, end = prompt.last_answer
            if begin >= positions[0]:
                key.continued_hash = prompt.names_at((begin,))[0] ^ _ANSWERED
                key.continued_blocks = bisect_right(positions, begin)
                key.continued_bytes = end * BYTES_PER_TOKEN
        return key

    def positions(self, tokens: int) -> list[int]:
        """Where blocks end in a prompt of so many tokens, in tokens from its start."""
        positions = self._reaching(tokens)
        return positions[: bisect_right(positions, tokens)]

    def _reaching(self, tokens: int) -> list[int]:
        """Ends of blocks up to `tokens` and somewhat beyond."""
        positions = self._positions
        while not positions or positions[-1] <= tokens:
            positions.append(self._schedule.covered_bytes(len(positions) + 1) // BYTES_PER_TOKEN)
        return positions


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """One gateway without its sockets."""

    fleet: Fleet
    ejector: Ejector
    router: Router
    retry_budget: RetryBudget
    keys: PromptKeys


def wire(settings: ReplaySettings, policy: Policy, events: Events) -> GatewayParts:
    """Make a gateway for the replicas of a replay; all of them are up."""
    fleet = Fleet()
    for number, model in enumerate(settings.replicas):
        fleet.add(
            ReplicaSpec(
                url=f"http://replica-{number}",
                name=f"replica-{number}",
                models=(MODEL,),
                hardware=model.hardware,
                model_shape=model.model,
                tensor_parallel=model.tensor_parallel,
                role=model.role,
                max_num_batched_tokens=model.limits.max_batched_tokens,
            )
        )
    ejector = Ejector(fleet, BreakerSettings(), events.call_later)
    schedule = BlockSchedule()
    budget = settings.replicas[0].limits.max_batched_tokens
    router = Router(
        fleet,
        LoadLedger(),
        ejector,
        PrefixIndex(schedule),
        TokensPerByte(),
        TunedPredictor([model.assumed_cost for model in settings.replicas], budget),
        policy,
        schedule,
        feedback=settings.feedback and not settings.kv_events,
        seed=settings.seed,
    )
    router.slo.use(SloRules(ModelTargets(refuse=settings.slo_routing == "refuse")))
    router.hand_offs.use(HandOffRules(settings.hand_off))
    for replica in fleet.replicas.values():
        fleet.set_up(replica, True)
    retries = settings.retries
    retry_budget = RetryBudget(retries.budget_share, retries.budget_min_per_s, lambda: events.now_s)
    keys = PromptKeys(schedule, answers=not settings.kv_events)
    return GatewayParts(fleet, ejector, router, retry_budget, keys)


def body_of(key: PromptKey, user: str | None, max_tokens: int | None) -> RequestBody:
    """The body of a streamed chat request, parsed."""
    return RequestBody(
        model=MODEL,
        stream=True,
        include_usage=True,
        max_tokens=max_tokens,
        n=1,
        user=user,
        prompt=key,
        divisible=True,
    )
