"""The load's side of sharing: what this worker has outstanding, and what others have. No I/O and no clock.

Workers of one gateway see each other's load on a board (`gateway.sharing.board`): what one has started, another knows
at its next decision, and that something has ended, then too, or where very much ends, some milliseconds later. What
follows is about all others, who are told.

Between two entries all workers see the same state, and all would send what comes next to the same replica: what one
sees as a gap that two requests fill, eight requests of four workers fall into. So each expects the others to do as it
does: for every request it starts, the work of so many more counts on that replica as there are requests of others for
one of its own, until their entries tell what they did. In bursts where one worker puts 1.06 to 1.07 times the mean on
one replica, four put 1.34 to 1.37 times it there without this, and 1.15 to 1.24 with it (test_sharing_loads.py).

And each has a part of the replicas that it takes first where several are alike (`LoadLedger.preferred`): requests of
the same moment then go to different ones before anybody could tell of them. On the conversation trace, whose requests
come in bursts, four workers that know nothing of each other's load have a median TTFT of 256 ms with this and 312
without; one worker has 244.
"""

from collections import deque
from collections.abc import Callable, Iterable

from gateway.replicas.load import NO_LOAD, Load, LoadLedger, Ticket
from gateway.replicas.registry import Change, Fleet, Replica
from gateway.sharing.board import Board
from gateway.sharing.layout import replica_identity
from gateway.sharing.messages import loads_of, pack_loads, writer_of
from gateway.sharing.pace import Pace

HEARTBEAT_S = 1.0
"""How often all of a worker's load is told, changed or not."""
EXPIRE_S = 3.0
"""A worker not heard for so long has no load."""
TELL_EVERY_S = 0.025
TELL_EVERY_S_PER_WORKER = 0.005
"""With many workers each tells less often, so that all of them together do not tell more than 200 times a second."""
_PROGRESS_EVERY = 2.0
"""How many times that passes before it is told again how far prompts are, if nothing else has happened."""
_SAVED = 12.0
"""Entries that a worker may write at once after a pause: of a burst, too, others hear in milliseconds.

On the conversation trace (9 requests every three seconds, in simulation 1.5 ms apart; the first 4,000) four workers had
a mean TTFT of 650 ms with 4 and 10 ms between all reads, 577 with 4 and reads at once, 543 with 12. One worker: 537.
"""

_EXPECTED_FOR_S = 0.03
"""An expectation is given up between one and two times this later; about how long it takes to hear from others. Or
when this worker has nothing in flight any more: who does as it does has not, either."""
_LEFT = 64
"""So many workers that have left the board are not believed to be alive because of what they still had written."""
_LOOK_EVERY_S, _SAVED_LOOKS = 0.002, 64.0
"""How often news on the board are taken in at decisions, on average and at once: it takes up to 0.1 ms of CPU time, and
a worker may make some thousand decisions a second."""
_POST_EVERY_S, _SAVED_POSTS = 0.005, 32.0
"""How often first tokens and ends are posted on the board as they happen, on average and at once; the others are posted
with the next entry. A post takes 10 us of CPU time where nothing is compiled."""
_PRIOR = 10.0
"""Requests a second that every worker is taken to start besides those it tells: after a pause all are alike."""


class _Worker:
    """Another worker; a near one is on the board."""

    __slots__ = ("budgets_bytes", "heard_s", "loads", "near", "started")

    def __init__(self) -> None:
        self.near = False
        self.started = 0
        self.heard_s = 0.0
        self.loads: dict[int, Load] = {}
        self.budgets_bytes: tuple[int, ...] = ()


class LoadShare:
    """Tells a ledger's own load, and puts that of others into it."""

    def __init__(self, ledger: LoadLedger, fleet: Fleet, writer: int, board: Board | None = None) -> None:
        """Follow a fleet.

        Args:
            ledger: the load.
            fleet: the replicas.
            writer: this worker's number.
            board: of the gateway's workers; None if there is one worker.
        """
        self._board = board
        # By place on the board. Who has left it may still be heard of for a moment.
        self._near: dict[int, int] = {}
        self._left: deque[int] = deque(maxlen=_LEFT)
        self._ledger = ledger
        self._fleet = fleet
        self._writer = writer
        self._workers: dict[int, _Worker] = {}
        self._slots: dict[int, int] = {}
        self._told: dict[int, Load] = {}
        self._heartbeat_s = float("-inf")
        self._started = 0
        self._started_before = 0
        self._echo = 0.0
        # What others are expected to have started, by slot: lately, and before that.
        self._expected: dict[int, Load] = {}
        self._expected_before: dict[int, Load] = {}
        self._turned_s = float("-inf")
        self._computing = False
        self._pace = Pace(_SAVED)
        self._looks = Pace(_SAVED_LOOKS)
        self._posts = Pace(_SAVED_POSTS)
        self.on_news: Callable[[], None] | None = None
        """Called when there is something to tell. It must be cheap."""
        if board is not None:
            board.enter(writer)
        ledger.on_start = self._on_start
        ledger.on_progress = self._on_progress
        for replica in fleet.replicas.values():
            self._changed(Change.ADDED, replica)
        fleet.on_change(self._changed)

    @property
    def workers(self) -> int:
        """Workers alive, this one included."""
        return len(self._workers) + 1

    @property
    def near_workers(self) -> int:
        """Of these, the workers on the board; this one if there is none."""
        return len(self._near) + 1

    @property
    def tell_every_s(self) -> float:
        """Seconds between two entries, where there is always something to tell."""
        return max(TELL_EVERY_S, TELL_EVERY_S_PER_WORKER * self.workers)

    def pace(self, now_s: float) -> tuple[float, float]:
        """Say when the next entry is due; called after each.

        Returns:
            Seconds to wait in any case, and seconds to wait after that unless there are news.
        """
        every_s = self.tell_every_s
        pause_s = self._pace.pause_s(now_s, every_s)
        due_s = now_s + _PROGRESS_EVERY * every_s if self._computing else self._heartbeat_s + HEARTBEAT_S
        if self._expected or self._expected_before:
            due_s = min(due_s, self._turned_s + _EXPECTED_FOR_S)
        return pause_s, max(due_s - now_s - pause_s, 0.0)

    def entry(self, now_s: float, budgets_bytes: list[int]) -> bytes | None:
        """Return the entry to write now; None if nothing has changed.

        Args:
            now_s: monotonic seconds.
            budgets_bytes: bytes the prefix logs are to keep, for this worker's part.
        """
        self._turn(now_s)
        told = self._told
        heartbeat = now_s - self._heartbeat_s >= HEARTBEAT_S
        # Whoever comes hears everything with the next heartbeat.
        heard = heartbeat or self._board is None or len(self._workers) > len(self._near)
        loads: list[tuple[int, Load]] = []
        self._computing = busy = False
        for identity, slot in self._slots.items():
            load = self._own(slot, now_s)
            if load.in_flight:
                busy = True
            if load.prefill_work_s:
                self._computing = True
            if self._board is not None:
                self._board.post(identity, load)
            if heard and (load != told.get(identity, NO_LOAD) or (heartbeat and load is not NO_LOAD)):
                told[identity] = load
                loads.append((identity, load))
        if not busy and (self._expected or self._expected_before):
            given_up = {**self._expected, **self._expected_before}
            self._expected, self._expected_before = {}, {}
            self._sum_all(given_up)
        if heartbeat:
            self._heartbeat_s = now_s
            self._started_before, self._started = self._started, 0
            self._weigh()
            return pack_loads(self._writer, self._started_before, loads, budgets_bytes)
        return pack_loads(self._writer, self._started_before, loads) if loads else None

    def farewell(self) -> bytes:
        """Return the entry of a worker that stops."""
        return pack_loads(self._writer, 0, (), [0])

    def retell(self) -> None:
        """Tell everything with the next entry."""
        self._heartbeat_s = float("-inf")

    def read(self, entry: bytes, now_s: float) -> int:
        """Take in an entry of another worker; return the writer's number.

        Args:
            entry: the bytes.
            now_s: monotonic seconds.

        Raises:
            BadEntry: it is none.
        """
        writer = writer_of(entry)
        if writer == self._writer or writer in self._left:
            return writer
        started, budgets, loads = loads_of(entry)
        worker = self._workers.get(writer)
        if worker is None or worker.started != started:
            if worker is None:
                worker = self._workers[writer] = _Worker()
                self._divide()
            worker.started = started
            self._weigh()
        worker.heard_s = now_s
        if budgets:
            worker.budgets_bytes = budgets
        if worker.near:
            return writer
        self._take_in(worker, loads, anew=bool(budgets))
        return writer

    def expire(self, now_s: float) -> None:
        """Forget workers that have not been heard for long, and what they were expected to do."""
        self.look()
        self._turn(now_s)
        for writer, worker in list(self._workers.items()):
            if now_s - worker.heard_s > EXPIRE_S and not worker.near:
                self._forget(writer)

    def look_now_and_then(self, now_s: float) -> None:
        """Take in what has changed on the board, unless that was done very often lately. Before decisions.

        Args:
            now_s: monotonic seconds.
        """
        if self._board is not None and self._board.has_news and self._looks.is_due(now_s, _LOOK_EVERY_S):
            self.look()

    def look(self) -> None:
        """Take in what has changed on the board."""
        if self._board is None or not self._board.has_news:
            return
        for place, writer, anew, loads in self._board.news():
            known = self._near.get(place)
            if known is not None and known != writer:
                del self._near[place]
                self._left.append(known)
                self._forget(known)
            if not writer:
                continue
            worker = self._workers.get(writer)
            if worker is None:
                worker = self._workers[writer] = _Worker()
                self._divide()
            if not worker.near:
                worker.near = True
                self._near[place] = writer
                self._weigh()
            self._take_in(worker, loads, anew=anew)

    def _take_in(self, worker: _Worker, loads: dict[int, Load], *, anew: bool) -> None:
        """Enter what has changed of a worker's load, or all of it."""
        changed = set(loads)
        if anew:
            changed |= worker.loads.keys()
            worker.loads = loads
        else:
            worker.loads.update(loads)
        for identity in changed:
            self._sum(identity)

    def _forget(self, writer: int) -> None:
        worker = self._workers.pop(writer)
        self._weigh()
        self._divide()
        for identity in worker.loads:
            self._sum(identity)

    def _own(self, slot: int, now_s: float) -> Load:
        """Return this worker's load on a replica, without what the engine has already done: nobody waits for that."""
        ledger = self._ledger
        load = ledger.own(slot)
        if not load.prefill_work_s:
            return load
        in_flight, decodes, prefill_tokens, prefill_work_s, context_tokens, kv_tokens, kv_own_tokens = load
        others_s = ledger.prefill_work_s[slot] - prefill_work_s
        ahead_s = max(ledger.prefill_ahead_s(slot, now_s) - others_s, 0.0)
        return Load(in_flight, decodes, prefill_tokens, ahead_s, context_tokens, kv_tokens, kv_own_tokens)

    def budget_bytes(self, shard: int) -> int:
        """Return the most bytes that another worker wants a prefix log to keep."""
        return max(
            (worker.budgets_bytes[shard] for worker in self._workers.values() if shard < len(worker.budgets_bytes)),
            default=0,
        )

    def _weigh(self) -> None:
        """Count how many requests others start for one of this worker's; the echo is of those it does not see."""
        own = self._started_before + _PRIOR
        unseen = [worker.started + _PRIOR for worker in self._workers.values() if not worker.near]
        self._echo = min(sum(unseen) / own, len(unseen))
        self._ledger.workers_share = 1.0 + sum(worker.started + _PRIOR for worker in self._workers.values()) / own

    def _divide(self) -> None:
        """Say which replicas this worker takes first: the others, who know the same names, take others."""
        writers, identities = sorted([*self._workers, self._writer]), sorted(self._slots)
        place = writers.index(self._writer)
        for rank, identity in enumerate(identities):
            if len(writers) <= len(identities):
                mine = len(writers) > 1 and rank % len(writers) == place
            else:
                mine = place % len(identities) == rank
            self._ledger.preferred[self._slots[identity]] = mine

    def _on_start(self, ticket: Ticket, now_s: float) -> None:
        self._started += 1
        replica = self._fleet.by_slot[ticket.slot]
        if self._board is not None and replica is not None:
            self._board.post(replica_identity(replica.base_url), self._own(ticket.slot, now_s))
        self._say_news()
        if not self._echo:
            return
        if now_s - self._turned_s > 2 * _EXPECTED_FOR_S:
            self._turn(now_s)
        load, slot = ticket.load(self._echo), ticket.slot
        before = self._expected.get(slot)
        self._expected[slot] = load if before is None else _sum_of((before, load))
        self._ledger.expect(slot, load)

    def _on_progress(self, slot: int, now_s: float | None) -> None:
        if self._board is not None and now_s is not None and self._posts.is_due(now_s, _POST_EVERY_S):
            replica = self._fleet.by_slot[slot]
            if replica is not None:
                self._board.post(replica_identity(replica.base_url), self._own(slot, now_s))
        self._say_news()

    def _say_news(self) -> None:
        if self.on_news is not None:
            self.on_news()

    def _turn(self, now_s: float) -> None:
        """Give up what was expected before, if it is time."""
        if now_s - self._turned_s >= _EXPECTED_FOR_S:
            self._turned_s = now_s
            given_up, self._expected_before, self._expected = self._expected_before, self._expected, {}
            self._sum_all(given_up)

    def _sum_all(self, slots: Iterable[int]) -> None:
        for slot in slots:
            replica = self._fleet.by_slot[slot]
            if replica is not None:
                self._sum(replica_identity(replica.base_url))

    def _sum(self, identity: int) -> None:
        slot = self._slots.get(identity)
        if slot is None:
            return
        loads = []
        for worker in self._workers.values():
            load = worker.loads.get(identity)
            if load is not None and load.in_flight:
                loads.append(load)
        for expected in (self._expected, self._expected_before):
            if slot in expected:
                loads.append(expected[slot])
        if len(loads) > 1:
            self._ledger.set_others(slot, _sum_of(loads))
        else:
            self._ledger.set_others(slot, loads[0] if loads else NO_LOAD)

    def _changed(self, change: Change, replica: Replica) -> None:
        if change is Change.ADDED:
            identity = replica_identity(replica.base_url)
            self._slots[identity] = replica.slot
            self._ledger.open(replica.slot)
            self._sum(identity)
            self._divide()
        elif change is Change.REMOVED:
            identity = replica_identity(replica.base_url)
            self._slots.pop(identity, None)
            self._told.pop(identity, None)
            if self._board is not None:
                self._board.post(identity, NO_LOAD)
            self._expected.pop(replica.slot, None)
            self._expected_before.pop(replica.slot, None)
            self._divide()


def _sum_of(loads: Iterable[Load]) -> Load:
    in_flight = decodes = 0
    prefill_tokens = prefill_work_s = context_tokens = kv_tokens = kv_own_tokens = 0.0
    for load in loads:
        in_flight += load.in_flight
        decodes += load.decodes
        prefill_tokens += load.prefill_tokens
        prefill_work_s += load.prefill_work_s
        context_tokens += load.context_tokens
        kv_tokens += load.kv_tokens
        kv_own_tokens += load.kv_own_tokens
    return Load(in_flight, decodes, prefill_tokens, prefill_work_s, context_tokens, kv_tokens, kv_own_tokens)
