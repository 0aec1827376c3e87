"""The default: where the first token comes soonest, at the least cost to everyone else.

Rule: minimise over the candidates

    predicted TTFT, of which waiting for KV memory counts wait_price only
      + prefill_price x own prefill seconds       the work is taken from everybody: its shadow price
      + tied_price x avoidable prefill seconds x min(requests tied, seconds they save) meanwhile       who is tied waits
      + eviction_price x reuse x own prefill seconds       where the cache is full: what is driven out is computed again
      + queue_price x own prefill seconds x requests waiting       as many are expected to wait behind it
      + decode_price x delay put on running decodes
      + batch_price x decode step squared over idle step       a large batch makes its answers, and steps to join, slow
      + memory_price x share of KV memory this request would overcommit

Reuse is the share of prompt tokens that have lately been found cached where requests went. Memory is overcommitted when
what is in flight, at its full length and with this request, does not fit; then requests wait, or are preempted, for
tens of seconds.

Why not TTFT alone: two replicas with equal queues look alike to the request, but computing a prefix twice costs the
fleet twice. Minimising TTFT greedily fragments prefixes over the fleet until every cache holds everything and none
holds enough (Mooncake, FAST'25, Algorithm 1, is the greedy form). So own prefill has a shadow price beyond its part in
the request's own TTFT, and it rises with the load of the replica:

- queue_price, by the requests before their first token. All who come while this prompt waits or is computed start later
  by its own prefill. The server is first come, first served, so by Little's law (J. Little, "A proof for the queuing
  formula L = lambda W", 1961) those who come during a wait are as many, on average, as are found in the queue. Under
  overload this term decides: long prompts keep away from queues of many short ones, as where jobs are assigned to
  servers by size (M. Harchol-Balter, M. Crovella, C. Murta, "On choosing a task assignment policy for a distributed
  server system", 1999), but no sizes have to be set.
- decode_price, by the answers that run: each of their streams stands still for as long as the prompt is computed.
- eviction_price, where the cache is full: what a prompt drives out is computed again if it comes again, and then others
  wait for that as well, when the fleet has least to spare: it counts several times.
- tied_price, on an idle replica as well, for what another need not compute: those who come while it is computed, and
  whose prefix is cached there, wait for what is left of it. If r of them come a second and it takes s seconds, these
  are r s, and each waits for half of s; those behind them wait as well, so it is that divided by the share of time the
  replica is idle (the busy period of M/G/1). Nobody loses more than what the prefix saves: then it is computed again
  elsewhere. So short prompts pay next to nothing, a conversation that moves pays for all it takes along, and a first
  copy on a replica that nobody is tied to costs nothing more.
- prefill_price, for those who are not tied: a copy takes memory, and the replica may be wanted meanwhile.

Why waiting for memory counts so little: a request that leaves a replica without memory takes its whole prompt's worth
of memory elsewhere instead of the little it needs beside the cached part, and the wait moves with it. Counted in full,
a fleet that is short of memory ends up with all prefixes everywhere and room for none.

Why the batch counts, and a large one more than in proportion: replicas that hold a prefix most requests share would
otherwise serve them all, in ever larger batches, because a copy of the prefix never pays for itself within one request.

Costs that differ by less than predictions are worth are ties. Of two of these, drawn at random, the one is taken whose
cache would lose what has not been used for longest, or has room: all caches together then lose what one large cache
would. Drawn, because several gateways with the same view would otherwise herd, and two are nearly as good as all (M.
Mitzenmacher, "The power of two choices in randomized load balancing", 2001). Workers that share their load each have
replicas of their own (`Candidates.preferred`), and draw from those first: requests that come at the same moment, before
one worker can know what another does, then still go to different replicas.
"""

from random import Random

from policies.types import Candidates, Choice, Column, FloorPrices, Request

_TIE = 0.02
"""Relative difference of costs that decides nothing."""

_REUSE_STEP = 0.01
"""Weight of one request in the moving share of cached prompt tokens."""


class PredictedTTFT:
    """Least predicted time to first token plus the price of the work. See the module for the rule."""

    name = "predicted_ttft"
    reads = frozenset(
        {
            Column.PREDICTED_TTFT_S,
            Column.OWN_PREFILL_S,
            Column.DECODE_DELAY_S,
            Column.BATCH_COST_S,
            Column.TIED_PER_S,
            Column.TIED_SAVED,
            Column.MEMORY_WAIT_S,
            Column.MATCHED_TOKENS,
            Column.KV_CAPACITY_TOKENS,
            Column.KV_ROOM_TOKENS,
            Column.CACHE_FULL,
            Column.CACHE_OLDEST_USE,
            Column.IN_FLIGHT,
            Column.DECODES,
        }
    )

    def __init__(
        self,
        seed: int = 0,
        prefill_price: float = 0.1,
        eviction_price: float = 4.0,
        decode_price: float = 0.025,
        batch_price: float = 5.0,
        memory_price: float = 10.0,
        wait_price: float = 0.03,
        queue_price: float = 1.0,
        tied_price: float = 2.0,
    ) -> None:
        """Make the policy.

        Args:
            seed: for ties.
            prefill_price: seconds of cost per second of own prefill (lambda).
            eviction_price: the same for what it drives out, where the cache is full and all of it is used again.
            decode_price: seconds of cost per second of delay summed over running decodes (mu).
            batch_price: seconds of cost per second of decode step with all in flight, times that over an idle step.
            memory_price: seconds of cost per overcommitted share of the replica's KV memory.
            wait_price: seconds of cost per second of waiting for KV memory.
            queue_price: seconds of cost per second of own prefill and request before its first token.
            tied_price: seconds of cost per second of own prefill and request tied to the replica expected during it, or
                second of prefill that their prefixes save.
        """
        self._random = Random(seed)
        self.prefill_price = prefill_price
        self.eviction_price = eviction_price
        self.decode_price = decode_price
        self.batch_price = batch_price
        self.memory_price = memory_price
        self.wait_price = wait_price
        self.queue_price = queue_price
        self.tied_price = tied_price
        self._reuse = 0.0

    def copy(self) -> "PredictedTTFT":
        """Return another that would choose the same next, and draw the same."""
        other = PredictedTTFT(
            0,
            self.prefill_price,
            self.eviction_price,
            self.decode_price,
            self.batch_price,
            self.memory_price,
            self.wait_price,
            self.queue_price,
            self.tied_price,
        )
        other._random.setstate(self._random.getstate())
        other._reuse = self._reuse
        return other

    def floor_prices(self) -> FloorPrices:
        """Return what `choose` makes of the columns at least; to be kept in step with it."""
        return FloorPrices(
            own_prefill=self.prefill_price,
            own_prefill_where_full=self.eviction_price * self._reuse,
            own_prefill_per_waiting=self.queue_price,
            batch=self.batch_price,
            decode=self.decode_price,
        )

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick the candidate of least cost."""
        ttft, own, delay = candidates.predicted_ttft_s, candidates.own_prefill_s, candidates.decode_delay_s
        step, waits, matched = candidates.batch_cost_s, candidates.memory_wait_s, candidates.matched_tokens
        in_flight, decodes = candidates.in_flight, candidates.decodes
        queue_price, full = self.queue_price, candidates.cache_full
        capacity, room = candidates.kv_capacity_tokens, candidates.kv_room_tokens
        prefill_price, decode_price = self.prefill_price, self.decode_price
        tied, saved, tied_price = candidates.tied_per_s, candidates.tied_saved, self.tied_price
        eviction_price = self.eviction_price * self._reuse
        batch_price = self.batch_price
        needed = request.prompt_tokens + request.expected_output_tokens
        best_cost = better = alike = float("inf")
        best = other = candidates.slots[0]
        ties = 1
        preferred, own_best, own_other, own_ties = candidates.preferred, best, best, 0
        slots, looked_at = candidates.slots, 0
        least_own = candidates.least_own_prefill_s
        if least_own is None:
            least_own = min([own[slot] for slot in slots])
        while slots:
            looked_at += len(slots)
            for slot in slots:
                work = own[slot]
                cost = ttft[slot] + prefill_price * work + decode_price * delay[slot] + batch_price * step[slot]
                avoidable = work - least_own
                if avoidable > 0.0:
                    # Who is tied waits for what is left of it, or goes elsewhere and computes the prefix again.
                    wait, lost = tied[slot] * avoidable, saved[slot]
                    cost += tied_price * (wait if wait < lost else lost) * avoidable
                waiting = in_flight[slot] - decodes[slot]
                if waiting:
                    cost += queue_price * waiting * work
                left = room[slot]
                if full[slot]:
                    cost += eviction_price * work
                if left < needed:
                    over = needed - matched[slot] - left
                    if over > 0.0:
                        cost += self.memory_price * over / capacity[slot]
                        if waits[slot]:
                            cost -= (1.0 - self.wait_price) * waits[slot]
                if cost < better:
                    best_cost, best, other, ties = cost, slot, slot, 1
                    better, alike = cost * (1.0 - _TIE), cost * (1.0 + _TIE)
                    if preferred:
                        own_best, own_other, own_ties = slot, slot, 1 if preferred[slot] else 0
                elif cost <= alike:
                    # Reservoir sampling: each of k ties is kept with probability 1/k.
                    ties += 1
                    if self._random.random() * ties < 1.0:
                        best = slot
                    if self._random.random() * ties < 1.0:
                        other = slot
                    if preferred and preferred[slot]:
                        own_ties += 1
                        if self._random.random() * own_ties < 1.0:
                            own_best = slot
                        if self._random.random() * own_ties < 1.0:
                            own_other = slot
            slots = candidates.more(better) if candidates.more is not None else ()
        if own_ties:
            best, other = own_best, own_other
        if best != other and candidates.cache_oldest_use[other] < candidates.cache_oldest_use[best]:
            best = other
        if request.prompt_tokens > 0.0:
            self._reuse += _REUSE_STEP * (matched[best] / request.prompt_tokens - self._reuse)
        terms = {
            "cost_s": best_cost,
            "ttft_s": ttft[best],
            "own_prefill_s": own[best],
            "decode_delay_s": delay[best],
            "batch_cost_s": step[best],
            "matched_tokens": matched[best],
            "least_own_prefill_s": least_own,
            "tied_per_s": tied[best],
            "tied_saved": saved[best],
            "eviction_price": eviction_price,
        }
        if waits[best]:
            terms["memory_wait_s"] = waits[best]
        if candidates.total:
            terms["candidates"], terms["evaluated"] = candidates.total, looked_at
        return Choice(
            best, "least predicted cost" if ties == 1 else f"least predicted cost, one of {ties} alike", terms
        )
