"""Work the gateway has sent to each replica and has not seen finished.

Counted at selection, released exactly once, kept in plain columns indexed by replica slot so that a policy
reads them without a copy. Time is passed in; there is no clock and no I/O here.

Theory of operation
- A request holds its prefill part (uncached tokens, predicted prefill seconds) until its first token, its KV
  tokens and its place in flight until it ends. Its Ticket knows what it holds and in which phase it is.
- Engines prefill first come, first served (vLLM V1's scheduler). The requests before their first token
  therefore form a queue per slot. Its head is the one being computed, since it was sent or since the last
  first token of that slot, whichever is later: that much of its work is done already.
- A prompt that another replica prefills waits in nobody's queue here: its ticket holds memory and its place in flight
  until the first token.
- A slot is used again when a replica leaves and another joins. `retire` starts a new generation; tickets of
  an older one release nothing.
- Sums of floats gather dust. Columns are set to exactly 0.0 when nothing is left that could have added to
  them.
- Other workers may send to the same replicas. What they have outstanding is in the columns too (`set_others`), so that
  a policy sees the sum; only the queue is this worker's own.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mypy_extensions import mypyc_attr

_WAITING, _DECODING, _FINISHED, _RESERVED = 0, 1, 2, 3


class Load(NamedTuple):
    """Outstanding work on one replica: a worker's own, or that of others. Units as in the ledger's columns."""

    in_flight: int = 0
    decodes: int = 0
    prefill_tokens: float = 0.0
    prefill_work_s: float = 0.0
    context_tokens: float = 0.0
    kv_tokens: float = 0.0
    kv_own_tokens: float = 0.0


NO_LOAD = Load()


class Ticket:
    """What one attempt of one request holds on one replica."""

    __slots__ = (
        "_context_tokens",
        "_generation",
        "_kv_own_tokens",
        "_kv_tokens",
        "_ledger",
        "_phase",
        "_prefill_s",
        "_prefill_tokens",
        "_started_s",
        "slot",
    )

    def __init__(
        self,
        ledger: "LoadLedger",
        slot: int,
        started_s: float,
        prefill_tokens: float,
        prefill_s: float,
        kv_tokens: float,
        kv_own_tokens: float,
        context_tokens: float,
    ) -> None:
        self.slot = slot
        self._ledger = ledger
        self._generation = ledger._generations[slot]
        self._started_s = started_s
        self._prefill_tokens = prefill_tokens
        self._prefill_s = prefill_s
        self._kv_tokens = kv_tokens
        self._kv_own_tokens = kv_own_tokens
        self._context_tokens = context_tokens
        self._phase = _WAITING

    def load(self, times: float) -> Load:
        """Return the work, not the places, of this many requests like this one before its first token."""
        return Load(
            prefill_tokens=times * self._prefill_tokens,
            prefill_work_s=times * self._prefill_s,
            kv_tokens=times * self._kv_tokens,
            kv_own_tokens=times * self._kv_own_tokens,
        )

    def first_token(self, now_s: float) -> None:
        """The first token has been seen: the prefill part is released, the request decodes. Idempotent."""
        phase = self._phase
        if phase not in (_WAITING, _RESERVED):
            return
        self._phase = _DECODING
        ledger, slot = self._ledger, self.slot
        if ledger._generations[slot] != self._generation:
            return
        ledger.touched.add(slot)
        ledger.decodes[slot] += 1
        ledger.context_tokens[slot] += self._context_tokens
        if phase == _WAITING:
            ledger._release_prefill(self, now_s)
        else:
            ledger.reserved[slot] -= 1
        if ledger.on_progress is not None:
            ledger.on_progress(slot, now_s)

    def finish(self, now_s: float | None = None) -> None:
        """The attempt has ended, in whatever phase: all it still holds is released. Idempotent.

        Args:
            now_s: when, if known. It matters only for a request that ends before its first token while it is
                being prefilled: the next one in the queue is then computed from this moment on.
        """
        phase = self._phase
        if phase == _FINISHED:
            return
        self._phase = _FINISHED
        ledger, slot = self._ledger, self.slot
        if ledger._generations[slot] != self._generation:
            return
        ledger.touched.add(slot)
        if phase == _WAITING:
            is_head = ledger._heads[slot] is self
            ledger._release_prefill(self, now_s if is_head else None)
        elif phase == _RESERVED:
            ledger.reserved[slot] -= 1
        else:
            decodes = ledger.decodes[slot] - 1
            ledger.decodes[slot] = decodes
            context_tokens = ledger.context_tokens[slot] - self._context_tokens
            ledger.context_tokens[slot] = max(context_tokens, 0.0) if decodes else 0.0
        left = ledger.in_flight[slot] - 1
        ledger.in_flight[slot] = left
        ledger.kv_tokens[slot] = (
            max(ledger.kv_tokens[slot] - self._kv_tokens, 0.0) if left else ledger._others[slot].kv_tokens
        )
        own_tokens = ledger.kv_own_tokens[slot] - self._kv_own_tokens
        ledger.kv_own_tokens[slot] = max(own_tokens, 0.0) if left else ledger._others[slot].kv_own_tokens
        if ledger.on_progress is not None:
            ledger.on_progress(slot, now_s)


@mypyc_attr(allow_interpreted_subclasses=True)
class LoadLedger:
    """Outstanding work per replica slot.

    The columns are the same list objects for ever; they only grow. Read them, never write to them.
    """

    __slots__ = (
        "_busy_since_s",
        "_generations",
        "_heads",
        "_others",
        "_queues",
        "context_tokens",
        "decodes",
        "in_flight",
        "kv_own_tokens",
        "kv_tokens",
        "on_look",
        "on_progress",
        "on_room",
        "on_start",
        "preferred",
        "prefill_started_s",
        "prefill_tokens",
        "prefill_work_s",
        "reserved",
        "step_seen_s",
        "touched",
        "workers_share",
    )

    def __init__(self) -> None:
        self.touched: set[int] = set()
        """Slots whose columns have changed; whoever follows them empties it."""
        self.on_room: Callable[[], None] | None = None
        """Called when others have less in flight than before: requests may wait for that."""
        self.on_start: Callable[[Ticket, float], None] | None = None
        """Called with every request counted, and when: others may be doing the same."""
        self.on_progress: Callable[[int, float | None], None] | None = None
        """Called when something has changed that `on_start` is not called for: on which slot, and when if known."""
        self.on_look: Callable[[float], None] | None = None
        """Called before a decision, with the time: there may be news of others that are there to be read."""
        self.workers_share = 1.0
        """Requests that all workers start for one of this worker's. Written by whoever knows of the others."""
        self.in_flight: list[int] = []
        """Requests sent and not ended."""
        self.prefill_tokens: list[float] = []
        """Uncached prompt tokens of requests before their first token."""
        self.prefill_work_s: list[float] = []
        """Predicted prefill seconds of requests before their first token, nothing taken off for progress."""
        self.prefill_started_s: list[float] = []
        """Predicted prefill seconds of all requests ever sent: how much it goes up tells what has come meanwhile."""
        self.preferred: list[bool] = []
        """Taken first where candidates are alike: other workers have others. Written by whoever knows of these."""
        self.reserved: list[int] = []
        """Requests of this worker whose prompt another replica computes, before their first token."""
        self.decodes: list[int] = []
        """Requests past their first token."""
        self.context_tokens: list[float] = []
        """History one decode step reads: prompt and half the expected output of requests past their first token."""
        self.kv_tokens: list[float] = []
        """Prompt and expected output tokens of requests in flight."""
        self.kv_own_tokens: list[float] = []
        """Of those, what no other request shares: uncached prompt and expected output. Adds up to memory."""
        self.step_seen_s: list[float] = []
        """When a token of the replica was last seen: the end of an engine step. Written by whoever sees it."""
        self._generations: list[int] = []
        # OrderedDict, not dict: finding the first key of a dict after many removals walks over the holes.
        self._queues: list[OrderedDict[Ticket, None]] = []
        self._heads: list[Ticket | None] = []
        # Since when the head of the queue has been computed; meaningless without a head.
        self._busy_since_s: list[float] = []
        self._others: list[Load] = []

    def open(self, slot: int) -> None:
        """Make sure the columns have an entry for this slot.

        Args:
            slot: a slot the registry has given to a replica.
        """
        while len(self.in_flight) <= slot:
            self.in_flight.append(0)
            self.prefill_tokens.append(0.0)
            self.prefill_work_s.append(0.0)
            self.prefill_started_s.append(0.0)
            self.preferred.append(False)
            self.decodes.append(0)
            self.reserved.append(0)
            self.context_tokens.append(0.0)
            self.kv_tokens.append(0.0)
            self.kv_own_tokens.append(0.0)
            self.step_seen_s.append(0.0)
            self._generations.append(0)
            self._queues.append(OrderedDict())
            self._heads.append(None)
            self._busy_since_s.append(0.0)
            self._others.append(NO_LOAD)

    def retire(self, slot: int) -> None:
        """The slot's replica is gone: its columns are zeroed and its tickets release nothing any more."""
        if slot >= len(self.in_flight):
            return
        self._generations[slot] += 1
        self.touched.add(slot)
        self.in_flight[slot] = 0
        self.prefill_tokens[slot] = 0.0
        self.prefill_work_s[slot] = 0.0
        self.preferred[slot] = False
        self.decodes[slot] = 0
        self.reserved[slot] = 0
        self.context_tokens[slot] = 0.0
        self.kv_tokens[slot] = 0.0
        self.kv_own_tokens[slot] = 0.0
        self.step_seen_s[slot] = 0.0
        self._queues[slot] = OrderedDict()
        self._heads[slot] = None
        self._busy_since_s[slot] = 0.0
        self._others[slot] = NO_LOAD

    def set_others(self, slot: int, load: Load) -> None:
        """Say what other workers have outstanding on a slot's replica, all of them together.

        Args:
            slot: the replica's slot, opened before.
            load: theirs; takes the place of what was said before.
        """
        own, before = self.own(slot), self._others[slot]
        self._others[slot] = load
        self.touched.add(slot)
        self.in_flight[slot] = own.in_flight + load.in_flight
        self.decodes[slot] = own.decodes + load.decodes
        self.prefill_tokens[slot] = own.prefill_tokens + load.prefill_tokens
        self.prefill_work_s[slot] = own.prefill_work_s + load.prefill_work_s
        self.context_tokens[slot] = own.context_tokens + load.context_tokens
        self.kv_tokens[slot] = own.kv_tokens + load.kv_tokens
        self.kv_own_tokens[slot] = own.kv_own_tokens + load.kv_own_tokens
        if load.in_flight < before.in_flight and self.on_room is not None:
            self.on_room()

    def expect(self, slot: int, load: Load) -> None:
        """Expect others to have more outstanding than `set_others` has said; what it says next takes the place of this.

        Args:
            slot: the replica's slot.
            load: their work; no requests and decodes.
        """
        others = self._others[slot]
        self._others[slot] = Load(
            others.in_flight,
            others.decodes,
            others.prefill_tokens + load.prefill_tokens,
            others.prefill_work_s + load.prefill_work_s,
            others.context_tokens,
            others.kv_tokens + load.kv_tokens,
            others.kv_own_tokens + load.kv_own_tokens,
        )
        self.touched.add(slot)
        self.prefill_tokens[slot] += load.prefill_tokens
        self.prefill_work_s[slot] += load.prefill_work_s
        self.kv_tokens[slot] += load.kv_tokens
        self.kv_own_tokens[slot] += load.kv_own_tokens

    def own(self, slot: int) -> Load:
        """Return what this worker itself has outstanding on a slot's replica."""
        others = self._others[slot]
        in_flight = self.in_flight[slot] - others.in_flight
        if not in_flight:
            return NO_LOAD
        decodes = self.decodes[slot] - others.decodes
        waits = self._heads[slot] is not None
        return Load(
            in_flight,
            decodes,
            max(self.prefill_tokens[slot] - others.prefill_tokens, 0.0) if waits else 0.0,
            max(self.prefill_work_s[slot] - others.prefill_work_s, 0.0) if waits else 0.0,
            max(self.context_tokens[slot] - others.context_tokens, 0.0) if decodes else 0.0,
            max(self.kv_tokens[slot] - others.kv_tokens, 0.0),
            max(self.kv_own_tokens[slot] - others.kv_own_tokens, 0.0),
        )

    def start(
        self,
        slot: int,
        now_s: float,
        prompt_tokens: float,
        uncached_tokens: float,
        prefill_s: float,
        output_tokens: float,
        *,
        computed_elsewhere: bool = False,
    ) -> Ticket:
        """Count a request on a replica, at the moment it is selected.

        Args:
            slot: the replica's slot, opened before.
            now_s: monotonic seconds.
            prompt_tokens: tokens of the prompt.
            uncached_tokens: of those, the ones the replica must compute.
            prefill_s: predicted seconds for them, alone on the replica.
            output_tokens: expected tokens of the answer.
            computed_elsewhere: another replica prefills it: it takes memory here from now on, and no prefill.

        Returns:
            The ticket through which everything counted here is released.
        """
        # A prediction that is not a number must not poison the column for the requests after it.
        if not 0.0 <= prefill_s < 1e9:
            prefill_s = 0.0
        if not 0.0 <= uncached_tokens < 1e12:
            uncached_tokens = 0.0
        kv_tokens = prompt_tokens + output_tokens
        if not 0.0 <= kv_tokens < 1e12:
            kv_tokens = output_tokens = 0.0
        kv_own_tokens = uncached_tokens + output_tokens
        ticket = Ticket(
            self, slot, now_s, uncached_tokens, prefill_s, kv_tokens, kv_own_tokens, kv_tokens - output_tokens * 0.5
        )
        self.touched.add(slot)
        self.in_flight[slot] += 1
        self.kv_tokens[slot] += kv_tokens
        self.kv_own_tokens[slot] += kv_own_tokens
        if computed_elsewhere:
            ticket._phase = _RESERVED
            self.reserved[slot] += 1
            if self.on_progress is not None:
                self.on_progress(slot, now_s)
            return ticket
        self.prefill_tokens[slot] += uncached_tokens
        self.prefill_work_s[slot] += prefill_s
        self.prefill_started_s[slot] += prefill_s
        self._queues[slot][ticket] = None
        if self._heads[slot] is None:
            self._heads[slot] = ticket
            # An earlier first token on this slot cannot be later than this request.
            self._busy_since_s[slot] = now_s
        if self.on_start is not None:
            self.on_start(ticket, now_s)
        return ticket

    def prefill_ahead_s(self, slot: int, now_s: float) -> float:
        """Predicted seconds of prefill still ahead of a request that would be sent to the slot now.

        The outstanding work less the progress of the queue's head, which is at most the head's own work: a
        prediction that was too short never eats into the work of the others.
        """
        head = self._heads[slot]
        if head is None:
            return self.prefill_work_s[slot]
        progress_s = now_s - self._busy_since_s[slot]
        if progress_s <= 0.0:
            return self.prefill_work_s[slot]
        if progress_s > head._prefill_s:
            progress_s = head._prefill_s
        ahead_s = self.prefill_work_s[slot] - progress_s
        return ahead_s if ahead_s > 0.0 else 0.0

    def least_prefill_ahead_s(self, slot: int) -> float:
        """Seconds of prefill that `prefill_ahead_s` will not fall below by the mere passing of time."""
        head = self._heads[slot]
        if head is None:
            return self.prefill_work_s[slot]
        return max(self.prefill_work_s[slot] - head._prefill_s, 0.0)

    def fill_prefill_ahead_s(self, slots: Sequence[int], now_s: float, column: list[float]) -> None:
        """Write `prefill_ahead_s` of each of the slots into a column, in one call.

        Args:
            slots: the slots to compute.
            now_s: monotonic seconds.
            column: seconds by slot, long enough for the largest slot; other entries are left alone.
        """
        heads = self._heads
        work_s = self.prefill_work_s
        since_s = self._busy_since_s
        for slot in slots:
            head = heads[slot]
            if head is None:
                column[slot] = work_s[slot]  # that of others
                continue
            progress_s = now_s - since_s[slot]
            if progress_s > head._prefill_s:
                progress_s = head._prefill_s
            if progress_s > 0.0:
                ahead_s = work_s[slot] - progress_s
                column[slot] = ahead_s if ahead_s > 0.0 else 0.0
            else:
                column[slot] = work_s[slot]

    def _release_prefill(self, ticket: Ticket, now_s: float | None) -> None:
        """Take a ticket out of its slot's queue; `now_s` is when the engine turned to the next, if it did."""
        slot = ticket.slot
        queue = self._queues[slot]
        del queue[ticket]
        if not queue:
            self._heads[slot] = None
            others = self._others[slot]
            self.prefill_tokens[slot] = others.prefill_tokens
            self.prefill_work_s[slot] = others.prefill_work_s
            return
        self.prefill_tokens[slot] = max(self.prefill_tokens[slot] - ticket._prefill_tokens, 0.0)
        self.prefill_work_s[slot] = max(self.prefill_work_s[slot] - ticket._prefill_s, 0.0)
        head = next(iter(queue))
        since_s = self._busy_since_s[slot]
        if now_s is not None and now_s > since_s:
            since_s = now_s
        if head is not self._heads[slot]:
            self._heads[slot] = head
            since_s = max(since_s, head._started_s)
        self._busy_since_s[slot] = since_s
