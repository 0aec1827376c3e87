"""The prefix index of a worker that shares what it learns: what it has to tell others, and what others have told.

The contract with whoever changes the index
- `insert`, `undo` and `truncate` mean the same as in a process of its own, and besides tell the journal. Whatever
  corrects the map (decisions, cached tokens reported by engines) calls these and need not know of sharing.
- `forget` tells nobody. That a replica has restarted is known by its epoch, which the sharing layer keeps; that it has
  left this gateway's configuration is no news for others.
- What engines tell in KV events is not in here and is not shared: every worker follows the feeds itself and keeps it
  apart (`gateway.prefixes.events`). The byte blocks of such replicas are shared as all others: they count for prompts
  without tokens, and when the feed is not live.
- `graft`, `adopt`, `prune` and `clear` are for what others have told, and are not told again.

What is told is a chain of blocks behind a parent, as a log of all workers' changes (`gateway.sharing`). A log is cut
off at its old end. So each segment remembers where in the log, in bytes, anybody last told its blocks, and that it was
used; and

- a segment used again after a sixteenth of the log is told again, by the hash of its last block alone: others count it
  as used, too;
- one whose blocks were last told in the older half of the log is told again in full, with all below. Half, so that a
  parent's blocks are there as long as its children's.

What has not been used for that long is lost to workers that start later, and to nobody else.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

from mypy_extensions import mypyc_attr

from gateway.prefixes.index import (
    DEFAULT_CAPACITY_BYTES,
    PrefixIndex,
    Record,
    Schedule,
    _depth,
    _Replica,
    _Segment,
    _segment_at,
    _split,
)

_START = 1 << 40
"""Logs begin here, so that 0, what nobody has told, is always too long ago."""


class Log:
    """Where a log's end is, and what is long ago. Positions are bytes since any beginning.

    Attributes:
        position: the end.
        recent_from: what was told after this need not be told to be used again.
        kept_from: blocks told after this need not be told again.
    """

    __slots__ = ("_budget_bytes", "kept_from", "position", "recent_from")

    def __init__(self, budget_bytes: int) -> None:
        """Begin a log that keeps its last `budget_bytes`."""
        self.position = _START
        self._budget_bytes = budget_bytes
        self.advance(0)

    @property
    def budget_bytes(self) -> int:
        """What the log keeps."""
        return self._budget_bytes

    def resize(self, budget_bytes: int) -> None:
        """Say how much the log keeps from now on."""
        self._budget_bytes = budget_bytes
        self.advance(0)

    def advance(self, length_bytes: int) -> None:
        """Something has been appended."""
        self.position = position = self.position + length_bytes
        self.recent_from = position - self._budget_bytes // 16
        self.kept_from = position - self._budget_bytes // 2

    def lost(self) -> None:
        """Nothing is left of what has been told."""
        self.advance(self._budget_bytes)


class Journal(Protocol):
    """Who is told of changes."""

    def extended(self, slot: int, depth: int, parent: int, tail: Sequence[int]) -> None:
        """The replica holds blocks and was just used.

        Args:
            slot: replica slot.
            depth: number of blocks before these, which others know.
            parent: hash of the last of those; 0 at depth 0.
            tail: the blocks; empty if only use is told. It will not change.
        """
        ...

    def cut(self, slot: int, depth: int, block: int) -> None:
        """The replica does not hold `block`, at `depth`, nor what follows it."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class SharedIndex(PrefixIndex):
    """A prefix index that keeps a journal. See the module for what is told.

    Attributes:
        journal: who is told; None for nobody.
        logs: by slot, the log in which its replica is told of. Set by the sharing layer.
        clock: goes up with every insertion; segments are stamped with it.
    """

    def __init__(self, schedule: Schedule, default_capacity_bytes: int = DEFAULT_CAPACITY_BYTES) -> None:
        """Make an empty index; the arguments are those of `PrefixIndex`."""
        super().__init__(schedule, default_capacity_bytes)
        self.journal: Journal | None = None
        self.logs: list[Log] = []

    @property
    def clock(self) -> int:
        """Number of the last insertion."""
        return self._clock

    def segments(self, slot: int) -> int:
        """Number of runs of blocks the replica is believed to hold."""
        return len(self._replicas[slot].segments) if slot < len(self._replicas) else 0

    # -- changes made here

    def insert(self, slot: int, hashes: list[int], continued: int = 0) -> Record:
        """Insert, and tell what of it others may not know."""
        record = super().insert(slot, hashes, continued)
        if self.journal is None or not hashes:
            return record
        replica = self._replicas[slot]
        segment = _segment_at(replica, hashes[-1], len(hashes) - 1)
        if segment is not None:
            log = self.logs[slot]
            recent = segment.shown > log.recent_from
            depth = _untold_from(replica, segment, log, record.matched_blocks)
            _stamp(replica, segment, log, depth)
            if depth < len(hashes) or not recent:
                if depth:
                    self.journal.extended(slot, depth, hashes[depth - 1], hashes[depth:])
                else:
                    self.journal.extended(slot, 0, 0, hashes)
        return record

    def answered(self, record: Record, answer: int) -> None:
        """Put an answer behind its prompt, and tell of it."""
        segment = self._answered(record, answer)
        if self.journal is not None and segment is not None:
            hashes = record.hashes
            if answer in self._replicas[record.slot].blocks:
                self.journal.extended(record.slot, len(hashes), hashes[-1], [answer])

    def undo(self, record: Record) -> None:
        """Undo, and tell what is gone."""
        slot, hashes = record.slot, record.hashes
        before = _depth(self._replicas[slot].blocks, hashes)
        super().undo(record)
        depth = _depth(self._replicas[slot].blocks, hashes)
        if depth < before:
            self._tell_cut(slot, hashes, depth)

    def truncate(self, slot: int, hashes: list[int], depth: int) -> None:
        """Truncate, and tell what is gone."""
        known = slot < len(self._replicas) and depth < len(hashes) and hashes[depth] in self._replicas[slot].blocks
        super().truncate(slot, hashes, depth)
        if known:
            self._tell_cut(slot, hashes, depth)

    def _tell_cut(self, slot: int, hashes: Sequence[int], depth: int) -> None:
        if self.journal is not None:
            self.journal.cut(slot, depth, hashes[depth])

    # -- changes others have told of

    def graft(self, slot: int, depth: int, parent: int, tail: "array[int]") -> bool:
        """Learn from another worker that a replica holds blocks and was just used.

        Args:
            slot: replica slot.
            depth: number of blocks before these.
            parent: hash of the last of those; meaningless at depth 0.
            tail: the blocks; empty if only use is told.

        Returns:
            False if the parent is not known here, and nothing was learned.
        """
        if self._forgotten:
            self.sweep(1)
        place = self._place(slot, depth, parent, tail)
        if place is None:
            return False
        replica, segment, matched, rest = place
        self._clock += 1
        last = self._enter(slot, replica, segment, matched, rest)
        _stamp(replica, last, self.logs[slot], depth)
        return True

    def adopt(self, slot: int, depth: int, parent: int, tail: "array[int]") -> bool:
        """Learn that a replica held blocks long ago: they are the first to be evicted. As `graft` otherwise."""
        place = self._place(slot, depth, parent, tail)
        if place is None:
            return False
        replica, segment, matched, rest = place
        if segment is not None and not segment.used:
            # Split off just now, so last in order: used now, or the order would not be that of use.
            self._enter(slot, replica, segment, matched, ())
        if rest:
            self._add_run(slot, replica, segment, matched, rest)
            self._evict(slot, replica)
        return True

    def _place(
        self, slot: int, depth: int, parent: int, tail: "array[int]"
    ) -> tuple[_Replica, _Segment | None, int, list[int]] | None:
        """Where blocks told by others belong: behind which segment, how many are before them, which of them are new."""
        replica = self._replica(slot)
        hashes = tail.tolist()
        segment: _Segment | None = None
        if depth and (segment := _segment_at(replica, parent, depth - 1)) is None:
            return None
        if hashes and hashes[0] in replica.blocks:
            known = _depth(replica.blocks, hashes)
            depth += known
            if (segment := _segment_at(replica, hashes[known - 1], depth - 1)) is None:
                return None
            hashes = hashes[known:]
        # Offsets must be there for all of the path, whose beginning may never have been a prompt of this worker's.
        self._schedule.covered_bytes(depth)
        if segment is not None and depth < segment.start + len(segment.hashes):
            segment = _split(replica, segment, depth)
        return replica, segment, depth, hashes

    def clear(self, slot: int) -> None:
        """Learn from another worker that a replica has restarted: what it held is gone, what it can hold is not."""
        capacity_bytes = self._replica(slot).capacity_bytes
        self.forget(slot)
        self.set_capacity(slot, capacity_bytes)

    def prune(self, slot: int, depth: int, block: int) -> None:
        """Learn from another worker that a replica does not hold a block, nor what follows it.

        Args:
            slot: replica slot.
            depth: number of blocks before it.
            block: its hash.
        """
        if slot < len(self._replicas):
            segment = _segment_at(self._replicas[slot], block, depth)
            if segment is not None:
                self._prune(slot, self._replicas[slot], segment, depth)

    # -- telling again

    def retell(self, slot: int, since: int | None) -> Iterator[int]:
        """Tell the journal again what a replica holds: oldest use first, parents before their children.

        Whatever anybody tells meanwhile is left out.

        Args:
            slot: replica slot.
            since: what has been used after this `clock`, told or not; None for what was told before now, or never.

        Yields:
            Blocks told since the last yield: a place to pause.
        """
        if slot >= len(self._replicas) or self.journal is None:
            return
        replica = self._replicas[slot]
        segments = replica.segments
        numbers: list[int] = []
        if since is not None:
            for number in reversed(segments):
                segment = segments[number]
                if segment.used <= since:
                    break
                segment.told = 0
                numbers.append(number)
            numbers.reverse()
        else:
            numbers.extend(segments)
        log = self.logs[slot]
        begun = log.position
        for number in numbers:
            top = segments.get(number)
            if self._replicas[slot] is not replica:
                return
            if top is None or top.told >= begun:
                continue
            parts: list[Sequence[int]] = []
            while True:
                parts.append(top.hashes)
                top.told = top.shown = log.position
                parent = segments.get(top.parent)
                if parent is None or parent.told >= begun:
                    break
                top = parent
            tail = [block for part in reversed(parts) for block in part]
            self.journal.extended(slot, top.start, parent.hashes[-1] if parent is not None else 0, tail)
            yield len(tail)


def _untold_from(replica: _Replica, segment: _Segment | None, log: Log, depth: int) -> int:
    """How many blocks of the path before `depth` have been told not long ago."""
    kept_from, segments = log.kept_from, replica.segments
    while segment is not None:
        if segment.told <= kept_from and segment.start < depth:
            depth = segment.start
        segment = segments.get(segment.parent)
    return depth


def _stamp(replica: _Replica, segment: _Segment | None, log: Log, depth: int) -> None:
    """Mark a path as used, and what begins at `depth` or later as told; a part of a segment does not count."""
    position, segments = log.position, replica.segments
    while segment is not None:
        segment.shown = position
        if segment.start >= depth:
            segment.told = position
        segment = segments.get(segment.parent)
