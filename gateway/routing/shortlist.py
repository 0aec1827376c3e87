"""Which candidates can be the cheapest at all: the few of a large fleet that a policy has to look at.

Theory of operation
- Replicas without the prompt's prefix differ for a request only in their load. So they are kept in the order of what
  that load costs any request at least, repaired at events, and a decision walks up this order until nothing further on
  can be cheaper than what it has found. What holds more of the prompt than the others is looked at in any case.
- Costs have a part that the policy prices by own prefill (see `FloorPrices`), so replicas are in groups that share
  what it is multiplied with: hardware, corrections (about), requests waiting, whether the cache is full. Each has an
  order of its own, and the walk merges them.

The bound, in the terms of `Predictor.fill`, with a = ahead + running x decode; K, P: KV tokens and prompt tokens; k:
seconds per KV token; idle = weights + overhead; b: the price of the batch:

    TTFT >= constant + overhead + context x k + max(own + a, weights)
    max(own + a, weights) >= max(own, weights) + max(a - spare, 0), where spare = max(weights - own, 0)
    b (idle + (K + P) k)^2 / idle >= b (idle + P k)^2 / idle + b (2 K k + K^2 k^2 / idle)

The delay of running decodes is their number times own, times its price d. The order is made with the own prefill u that
is usual of late, and what a smaller one makes less of it is spare, too: at most d (u - own) times the most that run in
the group. What a larger one makes more of it is part of the base: at least d (own - u) times the least that run.

The progress of the prompt being computed and the phase of the step change with time, and stay out: ahead is at least
the queue without its head, the phase at least nothing. So

    cost >= base(P, matched) + max(load - spare, 0),
    load = a + context x k + b (2 K k + K^2 k^2 / idle) + d u running

with a base that all of a group share, or at least: that of its least factors. Nothing is lost as long as the walk goes
on until the bound is above what the policy was satisfied with. Who ends it before loses at most the difference.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Sequence
from heapq import heapify, heappop, heapreplace
from math import inf
from random import Random

from gateway.estimator.predictor import Predictor
from gateway.estimator.roofline import StepCost
from gateway.replicas.kv_memory import KvMemory
from gateway.replicas.load import LoadLedger
from policies.types import FloorPrices

MOST_WAITING = 4
"""Groups are told apart by requests waiting up to this many."""

_REBUILD_SHARE = 0.25
"""Share of the replicas that have changed from which sorting all again is cheaper."""

_RECENT_STEP = 0.02

_USUAL = 1.4
"""Factor by which own prefill of late may differ from that which the order is made with."""

_MANY = 1 << 30

_Entry = tuple[float, float, int]
"""Load in seconds, a random number, slot: equals are in random order, another one on every gateway."""

_Head = tuple[float, int, int, float, float, list[_Entry]]
"""Bound of the next in a group, number of the group, position, base, spare, the group's order."""


class _Group:
    """Replicas that share a base."""

    __slots__ = (
        "_compute",
        "_constant_s",
        "_memory",
        "_most_memory",
        "constants",
        "full",
        "least_running",
        "most_running",
        "order",
        "slot",
        "waiting",
    )

    def __init__(self, slot: int, waiting: int, full: bool) -> None:
        self.slot = slot  # one whose uncorrected constants all share
        self.waiting = waiting
        self.full = full
        self.order: list[_Entry] = []
        self.clear()

    def clear(self) -> None:
        """Nobody is in it."""
        self.order.clear()
        self._compute = self._memory = self._constant_s = inf
        self._most_memory = 0.0
        self.most_running, self.least_running = 0, _MANY
        self.constants: tuple[float, float, float, float, float, float, float] | None = None

    def cover(self, compute: float, memory: float, constant_s: float, running: int) -> None:
        """One more is in it, with these corrections and answers running."""
        if running > self.most_running:
            self.most_running = running
        if running < self.least_running:
            self.least_running = running
        if compute < self._compute or memory < self._memory or constant_s < self._constant_s:
            self._compute, self._memory = min(compute, self._compute), min(memory, self._memory)
            self._constant_s = min(constant_s, self._constant_s)
            self.constants = None
        if memory > self._most_memory:
            self._most_memory = memory
            self.constants = None

    def settle(self, cost: StepCost) -> tuple[float, float, float, float, float, float, float]:
        """Return the least of all constants in it.

        Returns:
            Seconds per token, pair, KV token, read of the weights, and idle step; constant and overhead; and the
            longest read of the weights.
        """
        memory = self._memory
        weights_s, overhead_s = memory * cost.weights_s, memory * cost.overhead_s
        self.constants = (
            self._compute * cost.prefill_s_per_token,
            self._compute * cost.attention_s_per_pair,
            memory * cost.kv_s_per_token,
            weights_s,
            weights_s + overhead_s,
            self._constant_s + overhead_s,
            self._most_memory * cost.weights_s,
        )
        return self.constants


class LoadOrder:
    """The replicas in the order of what their load costs a request.

    Attributes:
        touched: slots of which something has changed that neither ledger nor predictor knows.
    """

    def __init__(
        self, ledger: LoadLedger, memory: KvMemory, predictor: Predictor, cache_full: Sequence[bool], seed: int = 0
    ) -> None:
        """Start without replicas.

        Args:
            ledger: outstanding work.
            memory: KV memory.
            predictor: constants.
            cache_full: column of full caches.
            seed: of the order of equals.
        """
        self._ledger = ledger
        self._memory = memory
        self._predictor = predictor
        self._full = cache_full
        self._random = Random(seed)
        self._groups: dict[tuple[int, int, int, int, bool], _Group] = {}
        self._entries: list[tuple[_Group, _Entry] | None] = []
        self._opened: set[int] = set()
        self._prices: tuple[float, float] | None = None
        # Own prefill of late, and what of it the order was made with.
        self._recent_own_s = self._usual_own_s = 0.0
        self.touched: set[int] = set()

    def open(self, slot: int) -> None:
        """Make room for a slot whose replica is configured already."""
        while len(self._entries) <= slot:
            self._entries.append(None)
        self._opened.add(slot)
        self.touched.add(slot)

    def retire(self, slot: int) -> None:
        """The slot's replica is gone."""
        self._opened.discard(slot)
        self.touched.add(slot)

    def walk(
        self, prompt_tokens: float, matched_tokens: float, prices: FloorPrices, among: Container[int], taken: set[int]
    ) -> "Walk":
        """Begin a decision.

        Args:
            prompt_tokens: tokens of the prompt.
            matched_tokens: the most of it that is cached on any replica but those taken.
            prices: the policy's.
            among: the candidates.
            taken: candidates that are looked at in any case.
        """
        self._repair(prices)
        usual_own_s, decode_price, least_own_s = self._usual_own_s, prices.decode, inf
        heads: list[_Head] = []
        new_tokens = prompt_tokens - matched_tokens
        pairs = (matched_tokens + 0.5 * new_tokens) * new_tokens
        own_price, waiting_price, full_price = (
            prices.own_prefill,
            prices.own_prefill_per_waiting,
            prices.own_prefill_where_full,
        )
        for number, group in enumerate(self._groups.values()):
            order = group.order
            if order:
                per_token, per_pair, per_kv, weights_s, idle_s, rest_s, most_weights_s = (
                    group.constants or group.settle(self._predictor.cost(group.slot))
                )
                own_s = new_tokens * per_token + pairs * per_pair
                full_s = idle_s + prompt_tokens * per_kv
                price = own_price + group.waiting * waiting_price
                if group.full:
                    price += full_price
                base_s = (
                    rest_s
                    + (own_s if own_s > weights_s else weights_s)
                    + price * own_s
                    + prices.batch * (full_s * full_s / idle_s if idle_s else full_s)
                )
                spare_s = most_weights_s - own_s if own_s < most_weights_s else 0.0
                if own_s < usual_own_s:
                    spare_s += decode_price * group.most_running * (usual_own_s - own_s)
                else:
                    base_s += decode_price * group.least_running * (own_s - usual_own_s)
                if own_s < least_own_s:
                    least_own_s = own_s
                load_s = order[0][0] - spare_s
                heads.append((base_s + load_s if load_s > 0.0 else base_s, number, 0, base_s, spare_s, order))
        heapify(heads)
        if heads:
            self._recent_own_s += _RECENT_STEP * (least_own_s - self._recent_own_s)
        return Walk(heads, among, taken)

    def _repair(self, prices: FloorPrices) -> None:
        touched = self.touched
        for others in (self._ledger.touched, self._predictor.touched):
            if others:
                touched |= others
                others.clear()
        recent_s = self._recent_own_s
        if self._prices is None or not recent_s <= _USUAL * self._usual_own_s <= _USUAL * _USUAL * recent_s:
            self._usual_own_s = recent_s
            self._prices = None
        asked = (prices.batch, prices.decode)
        if self._prices != asked:
            self._prices = asked
            touched |= self._opened
        if not touched:
            return
        if len(touched) > _REBUILD_SHARE * len(self._opened) and len(touched) > 8:
            self._usual_own_s = recent_s
            self._rebuild()
        else:
            for slot in touched:
                self._move(slot)
        touched.clear()

    def _rebuild(self) -> None:
        # Groups that had nobody before are those of factors long past.
        self._groups = {key: group for key, group in self._groups.items() if group.order}
        for group in self._groups.values():
            group.clear()
        for slot in range(len(self._entries)):
            self._entries[slot] = None
        for slot in self._opened:
            group, entry = self._place(slot)
            self._entries[slot] = (group, entry)
            group.order.append(entry)
        for group in self._groups.values():
            group.order.sort()

    def _move(self, slot: int) -> None:
        place = self._entries[slot]
        if place is not None:
            group, entry = place
            order = group.order
            del order[bisect_left(order, entry)]
            self._entries[slot] = None
            if not order:
                group.clear()
        if slot in self._opened:
            group, entry = self._entries[slot] = self._place(slot)
            insort(group.order, entry)

    def _place(self, slot: int) -> tuple[_Group, _Entry]:
        """Find a slot's group, and its place in there."""
        ledger, predictor = self._ledger, self._predictor
        assert self._prices is not None
        batch_price, decode_price = self._prices
        _, _, weights_s, per_kv_s, overhead_s, constant_s, decode_s = predictor.constants(slot)
        running = ledger.decodes[slot]
        waiting = ledger.in_flight[slot] - running
        if waiting > MOST_WAITING:
            waiting = MOST_WAITING
        full = self._full[slot]
        key = (*predictor.kind(slot), waiting, full)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(slot, waiting, full)
        if not group.order:
            group.slot = slot
        group.cover(*predictor.factors(slot), constant_s, running)
        load_s = ledger.least_prefill_ahead_s(slot)
        if running:
            context_tokens = ledger.context_tokens[slot] + self._memory.context_shift_tokens[slot]
            load_s += running * (decode_s + decode_price * self._usual_own_s) + context_tokens * per_kv_s
        kv_s, idle_s = ledger.kv_tokens[slot] * per_kv_s, weights_s + overhead_s
        if kv_s:
            load_s += batch_price * (2.0 * kv_s + kv_s * kv_s / idle_s if idle_s else kv_s)
        return group, (load_s, self._random.random(), slot)


class Walk:
    """One decision's way up the order."""

    __slots__ = ("_among", "_heads", "_taken")

    def __init__(self, heads: list[_Head], among: Container[int], taken: set[int]) -> None:
        self._heads = heads
        self._among = among
        self._taken = taken

    def further(self, below_s: float, most: int) -> list[int]:
        """Return the next candidates whose cost may be below a limit; empty if there are none.

        Args:
            below_s: the limit.
            most: how many to return at most.
        """
        heads, among, taken = self._heads, self._among, self._taken
        found: list[int] = []
        while heads and len(found) < most:
            bound_s, number, position, base_s, spare_s, order = heads[0]
            if bound_s >= below_s:
                break
            slot = order[position][2]
            if slot in among and slot not in taken:
                found.append(slot)
            position += 1
            if position == len(order):
                heappop(heads)
            else:
                load_s = order[position][0] - spare_s
                bound_s = base_s + load_s if load_s > 0.0 else base_s
                heapreplace(heads, (bound_s, number, position, base_s, spare_s, order))
        return found
