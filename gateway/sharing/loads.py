"""The load's side of sharing: what this worker has outstanding, and what others have. No I/O and no clock."""

from gateway.replicas.load import NO_LOAD, Load, LoadLedger
from gateway.replicas.registry import Change, Fleet, Replica
from gateway.sharing.layout import replica_identity
from gateway.sharing.messages import loads_of, pack_loads, writer_of

HEARTBEAT_S = 1.0
"""How often all of a worker's load is told, changed or not."""
EXPIRE_S = 3.0
"""A worker not heard for so long has no load."""
TELL_EVERY_S = 0.02
TELL_EVERY_S_PER_WORKER = 0.005
"""With many workers each tells less often, so that all of them together do not tell more than 200 times a second."""


class _Worker:
    """Another worker."""

    __slots__ = ("budgets_bytes", "heard_s", "loads")

    def __init__(self) -> None:
        self.heard_s = 0.0
        self.loads: dict[int, Load] = {}
        self.budgets_bytes: tuple[int, ...] = ()


class LoadShare:
    """Tells a ledger's own load, and puts that of others into it."""

    def __init__(self, ledger: LoadLedger, fleet: Fleet, writer: int) -> None:
        """Follow a fleet.

        Args:
            ledger: the load.
            fleet: the replicas.
            writer: this worker's number.
        """
        self._ledger = ledger
        self._fleet = fleet
        self._writer = writer
        self._workers: dict[int, _Worker] = {}
        self._slots: dict[int, int] = {}
        self._told: dict[int, Load] = {}
        self._heartbeat_s = float("-inf")
        for replica in fleet.replicas.values():
            self._changed(Change.ADDED, replica)
        fleet.on_change(self._changed)

    @property
    def workers(self) -> int:
        """Workers alive, this one included."""
        return len(self._workers) + 1

    @property
    def tell_every_s(self) -> float:
        """Seconds between two entries."""
        return max(TELL_EVERY_S, TELL_EVERY_S_PER_WORKER * self.workers)

    def entry(self, now_s: float, budgets_bytes: list[int]) -> bytes | None:
        """Return the entry to write now; None if nothing has changed.

        Args:
            now_s: monotonic seconds.
            budgets_bytes: bytes the prefix logs are to keep, for this worker's part.
        """
        ledger, told = self._ledger, self._told
        heartbeat = now_s - self._heartbeat_s >= HEARTBEAT_S
        loads: list[tuple[int, Load]] = []
        for identity, slot in self._slots.items():
            load = ledger.own(slot)
            if load.prefill_work_s:
                # What the engine has already done of it is nobody's wait any more.
                others_s = ledger.prefill_work_s[slot] - load.prefill_work_s
                load = load._replace(prefill_work_s=max(ledger.prefill_ahead_s(slot, now_s) - others_s, 0.0))
            if load != told.get(identity, NO_LOAD) or (heartbeat and load is not NO_LOAD):
                told[identity] = load
                loads.append((identity, load))
        if heartbeat:
            self._heartbeat_s = now_s
            return pack_loads(self._writer, loads, budgets_bytes)
        return pack_loads(self._writer, loads) if loads else None

    def farewell(self) -> bytes:
        """Return the entry of a worker that stops."""
        return pack_loads(self._writer, (), [0])

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
        if writer == self._writer:
            return writer
        budgets, loads = loads_of(entry)
        worker = self._workers.get(writer)
        if worker is None:
            worker = self._workers[writer] = _Worker()
        worker.heard_s = now_s
        changed = set(loads)
        if budgets:
            worker.budgets_bytes = budgets
            changed |= worker.loads.keys()
            worker.loads = loads
        else:
            worker.loads.update(loads)
        for identity in changed:
            self._sum(identity)
        return writer

    def expire(self, now_s: float) -> None:
        """Forget workers that have not been heard for long."""
        for writer, worker in list(self._workers.items()):
            if now_s - worker.heard_s > EXPIRE_S:
                del self._workers[writer]
                for identity in worker.loads:
                    self._sum(identity)

    def budget_bytes(self, shard: int) -> int:
        """Return the most bytes that another worker wants a prefix log to keep."""
        return max(
            (worker.budgets_bytes[shard] for worker in self._workers.values() if shard < len(worker.budgets_bytes)),
            default=0,
        )

    def _sum(self, identity: int) -> None:
        slot = self._slots.get(identity)
        if slot is None:
            return
        loads = [worker.loads[identity] for worker in self._workers.values() if identity in worker.loads]
        total = NO_LOAD if not any(load.in_flight for load in loads) else Load(*map(sum, zip(*loads, strict=True)))
        self._ledger.set_others(slot, total)

    def _changed(self, change: Change, replica: Replica) -> None:
        if change is Change.ADDED:
            identity = replica_identity(replica.base_url)
            self._slots[identity] = replica.slot
            self._ledger.open(replica.slot)
            self._sum(identity)
        elif change is Change.REMOVED:
            identity = replica_identity(replica.base_url)
            self._slots.pop(identity, None)
            self._told.pop(identity, None)
