"""The prefix map's side of sharing: what waits to be told, what has been told, and whose life it was about.

No clock, and no I/O: `gateway.sharing.sharing` carries the entries.

Workers of one gateway tell each other every change at once, through memory (`gateway.sharing.rings`), and read that
before each decision. What comes through Redis from these later is known, and passed over. Not so for `_SETTLED_S` after
a worker has been heard for the first time, something of what it said was missed, or a replica has joined: what is not
known yet is in what it writes to Redis then. What is told again after a loss goes through Redis alone.
"""

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gateway.prefixes.shared import Log, SharedIndex
from gateway.replicas.registry import Change, Fleet, Replica
from gateway.sharing.layout import replica_identity
from gateway.sharing.messages import (
    MAX_TAIL,
    RECORD_BYTES,
    BadEntry,
    Record,
    groups_of,
    pack_entry,
    pack_records,
    records_of,
    writer_of,
)
from gateway.sharing.rings import Rings

logger = logging.getLogger(__name__)

ENTRY_BYTES = 8192
"""An entry is closed when it has so many, so that none takes long to take in."""
ENTRY_OVERHEAD_BYTES = 32
"""What Redis needs for an entry beside its bytes, about."""
WAITING_BYTES = 4 << 20
"""What may wait to be written. Beyond that the oldest is dropped, and told again when Redis is back."""
LEAST_BUDGET_BYTES = 64 << 10
_BYTES_PER_BLOCK, _BYTES_PER_SEGMENT = 32, 64
"""What a log keeps: four times its hashes, twice its records' heads. Blocks in use are told again after half of that,
so if all of them are in use all the time, half of what is written is new."""
_MARK_BYTES = 4096
_SIZED_PARTS = 16
"""What is alive is counted whenever so large a part of the log is new."""
_NOTICED = 1
"""In an epoch's lowest bit: it began with a restart that somebody noticed, so even who knows no earlier epoch has
something to forget. Without it, a process start has become known, of a process that may have been there all along."""
_SAME_RESTART_MS = 2_000
_SAME_RESTART_S = 10.0
"""A restart noticed by another worker and by this one within so long is one, if the process does not tell its start."""
_SETTLED_S = 10.0
"""What has been told in memory is written to Redis by then; if not, because Redis is away, it is in memory alone."""
_LOOK_MESSAGES = 16
"""What one look takes in at most, so that it takes no longer than about a millisecond; the rest is for the next."""


class _Known:
    """A replica of this gateway's, as all know it."""

    __slots__ = ("adopted_s", "epoch_ms", "identity", "replica", "shard", "slot")

    def __init__(self, replica: Replica, shards: int) -> None:
        self.replica = replica
        self.slot = replica.slot
        self.identity = replica_identity(replica.base_url)
        self.shard = self.identity % shards
        self.epoch_ms = 0  # not known
        self.adopted_s = float("-inf")


_Waiting = tuple[int, int, Record]
"""Identity, epoch in milliseconds, record."""


class _Shard:
    """One log."""

    __slots__ = ("loaded", "log", "marks", "orphans", "retelling", "sized_at", "told_new_epoch", "waiting")

    def __init__(self) -> None:
        self.log = Log(LEAST_BUDGET_BYTES)
        self.waiting: deque[_Waiting] = deque()
        self.marks: deque[tuple[int, str]] = deque()
        """Positions of entries, and their ids: where the log may be cut."""
        self.loaded = False
        self.retelling: Iterator[int] | None = None
        self.sized_at = self.log.position
        self.orphans: list[tuple[int, int, int, int, array[int]]] = []
        """Depth, identity, epoch, block and tail of what was read before its parent, while loading."""
        self.told_new_epoch: set[int] = set()


@dataclass(slots=True)
class Batch:
    """An entry on its way."""

    shard: int
    payload: bytes
    records: list[_Waiting]


@dataclass(slots=True)
class PrefixCounts:
    """What has happened, for metrics."""

    written: int = 0
    dropped: int = 0
    applied: int = 0
    orphans: int = 0
    bad_entries: int = 0
    retold: int = 0
    restarts: int = 0
    near: int = 0
    near_missed: int = 0


class PrefixShare:
    """Keeps the journal of a `SharedIndex`, and takes in what others have told.

    Attributes:
        counts: what has happened.
        lossy: something has been dropped since this was last set to False.
    """

    def __init__(
        self,
        index: SharedIndex,
        fleet: Fleet,
        shards: int,
        max_bytes: int,
        writer: int,
        rings: Rings | None = None,
    ) -> None:
        """Follow a fleet, and become the index's journal.

        Args:
            index: the prefix map.
            fleet: the replicas.
            shards: number of logs.
            max_bytes: what all logs together may keep.
            writer: this worker's number.
            rings: where the workers of this gateway tell each other; None if there is one.
        """
        self.index = index
        self.counts = PrefixCounts()
        self.lossy = False
        self._fleet = fleet
        self._writer = writer
        self._most_bytes = max(max_bytes // shards, LEAST_BUDGET_BYTES)
        self._shards = [_Shard() for _ in range(shards)]
        self._by_slot: list[_Known | None] = []
        self._by_identity: dict[int, _Known] = {}
        self._waiting_bytes = 0
        self._rings = rings
        self._retelling = False
        # By place on the rings: who is there. By writer: since when nothing of what it said was missed.
        self._near: dict[int, int] = {}
        self._heard_since_s: dict[int, float] = {}
        self.on_news: Callable[[], None] | None = None
        """Called when there is something to tell, after a time with nothing. It must be cheap."""
        for replica in fleet.replicas.values():
            self._attach(replica)
        fleet.on_change(self._changed)
        index.journal = self

    # -- what this worker tells

    def extended(self, slot: int, depth: int, parent: int, tail: Sequence[int]) -> None:
        """Keep for the next entry; see `Journal`."""
        self._wait(slot, (depth, parent, tail), RECORD_BYTES + 8 * len(tail))

    def cut(self, slot: int, depth: int, block: int) -> None:
        """Keep for the next entry; see `Journal`."""
        self._wait(slot, (depth, block, None), RECORD_BYTES)

    def _wait(self, slot: int, record: Record, length_bytes: int) -> None:
        known = self._by_slot[slot]
        if known is None:
            return
        waiting = self._shards[known.shard].waiting
        waiting.append((known.identity, known.epoch_ms, record))
        if self._rings is not None and not self._retelling:
            self._tell_near(known, record)
        if not self._waiting_bytes and self.on_news is not None:
            self.on_news()
        self._waiting_bytes += length_bytes
        while self._waiting_bytes > WAITING_BYTES:
            longest = max(self._shards, key=lambda shard: len(shard.waiting)).waiting
            self._waiting_bytes -= _length_bytes(longest.popleft())
            self.counts.dropped += 1
            self.lossy = True

    def _tell_near(self, known: _Known, record: Record | None) -> None:
        """Tell the other workers of this gateway, if only that the replica lives its present life."""
        assert self._rings is not None
        for packed in (b"",) if record is None else (pack_records([part]) for part in _parts(record)):
            self._rings.tell(pack_entry(self._writer, [(known.identity, known.epoch_ms, packed)]))

    @property
    def waiting_bytes(self) -> int:
        """Bytes of records that wait to be written."""
        return self._waiting_bytes

    def take(self, shard: int) -> Batch | None:
        """Take the next entry of a log; None if there is nothing to tell. `put_back` if it could not be written."""
        state = self._shards[shard]
        waiting = state.waiting
        if not waiting and not state.told_new_epoch:
            return None
        records: list[_Waiting] = []
        groups: dict[tuple[int, int], list[Record]] = {}
        length = 0
        while waiting and length < ENTRY_BYTES:
            item = waiting.popleft()
            length += _length_bytes(item)
            records.append(item)
            groups.setdefault(item[:2], []).append(item[2])
        self._waiting_bytes -= length
        for identity in state.told_new_epoch:
            known = self._by_identity.get(identity)
            if known is not None:
                groups.setdefault((identity, known.epoch_ms), [])
        state.told_new_epoch.clear()
        packed = [(*key, pack_records(_without_repeats(group))) for key, group in groups.items()]
        return Batch(shard, pack_entry(self._writer, packed), records)

    def put_back(self, batch: Batch) -> None:
        """Return an entry that may not have been written."""
        self._shards[batch.shard].waiting.extendleft(reversed(batch.records))
        self._waiting_bytes += sum(map(_length_bytes, batch.records))
        # The replica's present epoch need not be in these records.
        self._shards[batch.shard].told_new_epoch.update(record[0] for record in batch.records)

    def trim_id(self, shard: int, others_bytes: int) -> str | None:
        """Return the id before which a log is to be cut off; None for not at all.

        Args:
            shard: which.
            others_bytes: what other workers want the log to keep.
        """
        state = self._shards[shard]
        if not state.loaded:
            return None
        keep = max(state.log.budget_bytes, others_bytes)
        marks = state.marks
        before = state.log.position - keep
        while len(marks) > 1 and marks[1][0] <= before:
            marks.popleft()
        return marks[0][1] if marks and marks[0][0] <= before else None

    def budgets_bytes(self) -> list[int]:
        """Bytes each log is to keep, for this worker's part; see `refresh`."""
        return [shard.log.budget_bytes for shard in self._shards]

    # -- what all have told

    def read(self, shard: int, entry_id: str, entry: bytes, only: int | None = None) -> int:
        """Take in an entry of a log.

        Args:
            shard: which log.
            entry_id: its place there.
            entry: its bytes.
            only: identity of the only replica to read of, when the log is read again.

        Returns:
            The writer's number, 0 if the entry is none.
        """
        state = self._shards[shard]
        if only is None:
            length = len(entry) + ENTRY_OVERHEAD_BYTES
            state.log.advance(length)
            if not state.marks or state.log.position - state.marks[-1][0] >= _MARK_BYTES:
                state.marks.append((state.log.position - length, entry_id))
            if state.log.position - state.sized_at > state.log.budget_bytes // _SIZED_PARTS:
                self._size(shard)
        try:
            writer = writer_of(entry)
            if only is not None or not (writer == self._writer or (state.loaded and self._has_heard(writer))):
                self.counts.applied += self._take_in_entry(entry, only, loading=not state.loaded)
        except BadEntry:
            self.counts.bad_entries += 1
            return 0
        return writer

    def _has_heard(self, writer: int) -> bool:
        """Whether all that a worker writes to Redis now was known before."""
        since_s = self._heard_since_s.get(writer)
        return since_s is not None and self._now_s - since_s > _SETTLED_S

    def look(self, now_s: float) -> bool:
        """Take in what other workers of this gateway have told. Before `read`, and before decisions.

        Args:
            now_s: monotonic seconds.

        Returns:
            Whether there is more.
        """
        rings = self._rings
        if rings is None or not rings.has_news:
            return False
        self._now_s = now_s
        for number, (place, message) in enumerate(rings.news(), 1):
            if message is None:
                self.counts.near_missed += 1
                self._heard_since_s.pop(self._near.pop(place, 0), None)
            else:
                self._hear(place, message)
            if number == _LOOK_MESSAGES:
                return rings.has_news
        return False

    def _hear(self, place: int, message: bytes) -> None:
        try:
            writer = writer_of(message)
            if self._near.get(place) != writer:
                self._heard_since_s.pop(self._near.get(place, 0), None)
                self._near[place] = writer
                self._heard_since_s[writer] = self._now_s
            self.counts.near += self._take_in_entry(message)
        except BadEntry:
            self.counts.bad_entries += 1

    def _take_in_entry(self, entry: bytes, only: int | None = None, *, loading: bool = False) -> int:
        """Take in what is about replicas known here, or about `only` one; return how many records.

        While a log is being loaded, blocks without a parent wait for it.
        """
        taken = 0
        for identity, epoch_ms, records in groups_of(entry):
            known = self._by_identity.get(identity)
            if known is not None and (only is None or only == identity) and self._lives(known, epoch_ms):
                taken += self._take_in(known, records, loading=loading)
        return taken

    def _take_in(self, known: _Known, records: memoryview, *, loading: bool) -> int:
        index, counts, slot, state = self.index, self.counts, known.slot, self._shards[known.shard]
        taken = 0
        for depth, block, tail in records_of(records):
            taken += 1
            if tail is None:
                index.prune(slot, depth, block)
            elif not index.graft(slot, depth, block, tail):
                if loading and tail:
                    state.orphans.append((depth, known.identity, known.epoch_ms, block, tail))
                else:
                    counts.orphans += 1
        return taken

    def loaded(self, shard: int) -> Iterator[None]:
        """A log has been read to its end: find the parents of what had none when it was read.

        The log begins where it was cut off. A parent that was told before that, and again after its children, is there
        now.

        Yields:
            After each: a place to pause.
        """
        state = self._shards[shard]
        state.loaded = True
        orphans, state.orphans = state.orphans, []
        orphans.sort(key=lambda orphan: orphan[0])
        for depth, identity, epoch_ms, block, tail in orphans:
            known = self._by_identity.get(identity)
            if known is None or known.epoch_ms != epoch_ms or not self.index.adopt(known.slot, depth, block, tail):
                self.counts.orphans += 1
            yield

    def is_loaded(self, shard: int) -> bool:
        """Whether a log has been read to its end once."""
        return self._shards[shard].loaded

    def lost(self, shard: int) -> None:
        """Nothing is left of a log."""
        state = self._shards[shard]
        state.marks.clear()
        state.retelling = None
        state.log.lost()
        # What waits would be told twice.
        for item in state.waiting:
            self._waiting_bytes -= _length_bytes(item)
        state.waiting.clear()

    def retell_some(self, shard: int, since: int | None, blocks: int) -> bool:
        """Go on telling again what the replicas of a log hold; see `SharedIndex.retell`.

        Args:
            shard: which log.
            since: as there. The same until the end.
            blocks: how many blocks to tell, about.

        Returns:
            False at the end.
        """
        state = self._shards[shard]
        if state.retelling is None:
            state.retelling = self._retell(shard, since)
        self._retelling = True
        try:
            for told in state.retelling:
                blocks -= told
                if blocks <= 0:
                    return True
        finally:
            self._retelling = False
        state.retelling = None
        return False

    def _retell(self, shard: int, since: int | None) -> Iterator[int]:
        for known in [known for known in self._by_identity.values() if known.shard == shard]:
            for blocks in self.index.retell(known.slot, since):
                self.counts.retold += 1
                yield blocks

    # -- lives

    def _lives(self, known: _Known, epoch_ms: int) -> bool:
        """Whether an entry is about the replica's present life; it may be the first to tell of that."""
        if epoch_ms > known.epoch_ms:
            self._begin(known, epoch_ms)
        # Workers that notice a restart at the same moment, without a process start, give it two times.
        return not epoch_ms or epoch_ms >= known.epoch_ms - _SAME_RESTART_MS

    def _begin(self, known: _Known, epoch_ms: int) -> None:
        if epoch_ms > known.epoch_ms + _SAME_RESTART_MS and (known.epoch_ms or epoch_ms & _NOTICED):
            self.index.clear(known.slot)
            self.counts.restarts += 1
            logger.info("%s has restarted: its part of the prefix map is empty", known.replica.name)
        known.epoch_ms = epoch_ms
        known.adopted_s = self._now_s

    _now_s = 0.0

    def restarted(self, replica: Replica, now_s: float, wall_ms: int) -> bool:
        """This worker has noticed a restart; tell the others, unless they have told it.

        Args:
            replica: which.
            now_s: monotonic seconds.
            wall_ms: milliseconds since 1970.

        Returns:
            Whether it is news. If not, the map is right already.
        """
        known = self._by_slot[replica.slot]
        if known is None:
            return True
        self._now_s = now_s
        start_s = replica.kv.process_start_s
        if start_s is not None:
            epoch_ms = int(start_s * 1000) | _NOTICED
            news = epoch_ms > known.epoch_ms + _SAME_RESTART_MS
        else:
            epoch_ms = max(wall_ms, known.epoch_ms) | _NOTICED
            news = now_s - known.adopted_s > _SAME_RESTART_S
        if news:
            known.epoch_ms = epoch_ms
            known.adopted_s = now_s
            self._shards[known.shard].told_new_epoch.add(known.identity)
            if self._rings is not None:
                self._tell_near(known, None)
        return news

    def refresh(self, now_s: float) -> None:
        """Look at what is not told by events: process starts, and how much is alive. About once a second.

        Args:
            now_s: monotonic seconds.
        """
        self._now_s = now_s
        for known in self._by_identity.values():
            start_s = known.replica.kv.process_start_s
            if start_s is not None and (epoch_ms := int(start_s * 1000) & ~_NOTICED) > known.epoch_ms:
                self._begin(known, epoch_ms)
        for shard in range(len(self._shards)):
            self._size(shard)

    def _size(self, shard: int) -> None:
        """Let a log keep what is alive in it, several times over."""
        index = self.index
        wanted = LEAST_BUDGET_BYTES
        for known in self._by_identity.values():
            if known.shard == shard:
                wanted += _BYTES_PER_BLOCK * index.blocks(known.slot) + _BYTES_PER_SEGMENT * index.segments(known.slot)
        state = self._shards[shard]
        state.sized_at = state.log.position
        state.log.resize(min(wanted, self._most_bytes))

    # -- the fleet

    def shard_of(self, replica: Replica) -> int:
        """The log a replica is told of in."""
        return replica_identity(replica.base_url) % len(self._shards)

    def _attach(self, replica: Replica) -> None:
        known = _Known(replica, len(self._shards))
        while len(self._by_slot) <= replica.slot:
            self._by_slot.append(None)
            self.index.logs.append(self._shards[0].log)
        self._by_slot[replica.slot] = known
        self._by_identity[known.identity] = known
        self.index.logs[replica.slot] = self._shards[known.shard].log

    def _changed(self, change: Change, replica: Replica) -> None:
        if change is Change.ADDED:
            self._attach(replica)
            # Others may have told of it before it was known here.
            self._heard_since_s = dict.fromkeys(self._heard_since_s, self._now_s)
        elif change is Change.REMOVED:
            known = self._by_slot[replica.slot]
            if known is not None:
                self._by_slot[replica.slot] = None
                self._by_identity.pop(known.identity, None)


def _parts(record: Record) -> Iterator[Record]:
    """Cut a record into such as fit into a message."""
    depth, block, tail = record
    if tail is None or len(tail) <= MAX_TAIL:
        yield record
        return
    for start in range(0, len(tail), MAX_TAIL):
        yield depth + start, tail[start - 1] if start else block, tail[start : start + MAX_TAIL]


def _length_bytes(item: _Waiting) -> int:
    tail = item[2][2]
    return RECORD_BYTES + (8 * len(tail) if tail else 0)


def _without_repeats(records: list[Record]) -> list[Record]:
    """Leave out all but the last of those that only tell of the same use."""
    last = {record[1]: number for number, record in enumerate(records) if record[2] is not None and not record[2]}
    return [
        record for number, record in enumerate(records) if record[2] is None or record[2] or last[record[1]] == number
    ]
