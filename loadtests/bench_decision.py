"""Cost of one routing decision: `python -m loadtests.bench_decision`.

Fleets of several sizes are brought to a steady load by the policy itself, in virtual time. Then, for every other
request, the decision is timed: match, candidate columns, policy. For those between, all of `Router.assign` is: the
decision, and the entries in load ledger, prefix map and memory account. Both are CPU time, medians and means of single
calls, the means without the longest hundredth. `evaluated` is how many candidates were looked at.

Workloads: `sessions` (conversations, each cached on a replica or two), `unique` (nothing shared) and `viral` (all
prompts begin with the same 1,000 tokens, which every replica comes to hold).
"""

import argparse
import heapq
import random
import time
from array import array
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from gateway.estimator.predictor import Predictor
from gateway.prefixes.index import PrefixIndex
from gateway.prompt.blocks import BlockSchedule, PromptKey
from gateway.prompt.body import RequestBody
from gateway.prompt.tokens import TokensPerByte
from gateway.replicas.breaker import BreakerSettings, Outcome
from gateway.replicas.ejection import Ejector
from gateway.replicas.load import LoadLedger
from gateway.replicas.registry import Fleet
from gateway.replicas.spec import ReplicaSpec
from gateway.routing.assignment import Assignment
from gateway.routing.router import Router
from policies.catalog import make_policy
from policies.types import Choice, Request

WORKLOADS = ("sessions", "unique", "viral")
TOKENS_PER_BYTE = 0.25
MEASURED_SHARE = 0.99
OUTPUT_TOKENS = 250
WARM_UP_S = 6.0
PROMPT_TOKENS = 6000


class _Timer:
    def cancel(self) -> None: ...


def _call_later(delay_s: float, callback: Callable[..., Any], *arguments: Any) -> _Timer:
    return _Timer()


class Prompts:
    """Prompt keys of one workload."""

    def __init__(self, workload: str, replicas: int, tokens: int, rng: random.Random) -> None:
        schedule = BlockSchedule()
        self._length = int(tokens / TOKENS_PER_BYTE)
        self._blocks = len(schedule.hashes(bytes(self._length), 1))
        self._rng = rng
        self._head = self._chain(len(schedule.hashes(bytes(int(1000 / TOKENS_PER_BYTE)), 1)))
        self._workload = workload
        self._sessions = [self._chain(self._blocks * 3 // 4) for _ in range(2 * replicas)]

    def _chain(self, blocks: int) -> list[int]:
        return [self._rng.getrandbits(60) for _ in range(blocks)]

    def next(self) -> PromptKey:
        """Return the next request's key."""
        start: list[int] = []
        if self._workload == "sessions":
            start = self._rng.choice(self._sessions)
        elif self._workload == "viral":
            start = self._head
        hashes = start + self._chain(self._blocks - len(start))
        return PromptKey(hashes, self._length, None, 0, hashes[0])


class Bench:
    """One fleet under load.

    Args:
        replicas: how many.
        rate: requests per second and replica.
        workload: one of `WORKLOADS`.
        policy: name of the policy.
        seed: of everything.
    """

    def __init__(self, replicas: int, rate: float, workload: str, policy: str, seed: int) -> None:
        self._rng = random.Random(seed)
        self._fleet = Fleet()
        for number in range(replicas):
            spec = ReplicaSpec(
                url=f"http://r{number}",
                name=f"r{number}",
                models=("m",),
                hardware="h100-sxm",
                model_shape="llama-3.1-8b",
            )
            self._fleet.set_up(self._fleet.add(spec), True)
        schedule = BlockSchedule()
        self._policy = make_policy(policy, seed)
        self.router = Router(
            self._fleet,
            LoadLedger(),
            Ejector(self._fleet, BreakerSettings(), _call_later),
            PrefixIndex(schedule),
            TokensPerByte(),
            Predictor(),
            self._policy,
            schedule,
        )
        self._prompts = Prompts(workload, replicas, PROMPT_TOKENS, self._rng)
        self._now_s = 0.0
        self._gap_s = 1.0 / (replicas * rate)
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._entered = 0
        self.decisions_s, self.assignments_s, self.evaluated = array("d"), array("d"), array("d")
        for _ in range(max(int(WARM_UP_S * replicas * rate), 400)):
            self._step(timed=False)

    def run(self, requests: int) -> None:
        """Time so many requests."""
        for number in range(requests):
            self._step(timed=True, decision=number % 2 == 0)

    def _step(self, *, timed: bool, decision: bool = False) -> None:
        router, rng = self.router, self._rng
        self._now_s += self._gap_s
        while self._due and self._due[0][0] <= self._now_s:
            at_s, _, call = heapq.heappop(self._due)
            call(at_s)
        key = self._prompts.next()
        body = RequestBody(
            model="m", stream=True, include_usage=False, max_tokens=None, n=1, user=None, prompt=key, divisible=False
        )
        query = router.query(body, {})
        if timed and decision:
            began_s = time.thread_time()
            choice = self._decide(query.key, query.request)
            self.decisions_s.append(time.thread_time() - began_s)
            self.evaluated.append(choice.terms.get("evaluated", float(len(self._fleet.replicas))))
        began_s = time.thread_time()
        assignment = router.assign(query, (), self._now_s)
        if timed and not decision:
            self.assignments_s.append(time.thread_time() - began_s)
        ttft_s = assignment.predicted_ttft_s * rng.uniform(0.9, 1.1)
        self._at(self._now_s + ttft_s, lambda now_s: self._first_token(assignment, now_s))

    def _at(self, at_s: float, call: Callable[[float], None]) -> None:
        self._entered += 1
        heapq.heappush(self._due, (at_s, self._entered, call))

    def _first_token(self, assignment: Assignment, now_s: float) -> None:
        assignment.first_token(now_s)
        router, slot = self.router, assignment.slot
        router.ledger.step_seen_s[slot] = now_s
        step_s = router.predictor.uncorrected_step_s(
            slot, router.ledger.decodes[slot], router.ledger.context_tokens[slot]
        )
        # The prompts computed meanwhile take their time.
        busy_s = step_s * OUTPUT_TOKENS * self._rng.uniform(1.0, 1.5)
        self._at(
            now_s + busy_s,
            lambda at_s: assignment.finish(at_s, Outcome.OK, None, OUTPUT_TOKENS, keep_prefix=True),
        )

    def _decide(self, key: PromptKey | None, request: Request) -> Choice:
        """The part of `Router.assign` that chooses."""
        columns = self.router._columns
        request.now_s = self._now_s
        slots = self.router.room.among(self._fleet.route_slots("m"), self._now_s)
        try:
            candidates = columns.fill(slots, key, request.prompt_tokens, self._now_s, whole=False)
            return self._policy.choose(request, candidates)
        finally:
            columns.clear()


def microseconds(seconds: "array[float]") -> tuple[str, str]:
    """Median and trimmed mean."""
    ordered = sorted(seconds)
    kept = ordered[: max(int(MEASURED_SHARE * len(ordered)), 1)]
    return f"{ordered[len(ordered) // 2] * 1e6:.1f}", f"{sum(kept) / len(kept) * 1e6:.1f}"


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", default="8,64,1000", help="fleet sizes, separated by commas")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second and replica")
    parser.add_argument("--workload", default=",".join(WORKLOADS))
    parser.add_argument("--policy", default="predicted_ttft")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    table = Table(title=f"{arguments.policy}, microseconds")
    for column in ("workload", "replicas", "decision", "mean", "assign", "mean", "evaluated", "in flight"):
        table.add_column(column, justify="right")
    for workload in arguments.workload.split(","):
        for replicas in map(int, arguments.replicas.split(",")):
            bench = Bench(replicas, arguments.rate, workload, arguments.policy, arguments.seed)
            bench.run(arguments.requests)
            evaluated = sum(bench.evaluated) / len(bench.evaluated)
            table.add_row(
                workload,
                str(replicas),
                *microseconds(bench.decisions_s),
                *microseconds(bench.assignments_s),
                f"{evaluated:.1f}",
                f"{sum(bench.router.ledger.in_flight) / replicas:.1f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
