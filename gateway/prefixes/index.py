"""Which replica holds which prompt prefix, as far as this process knows.

One compressed prefix tree per replica, addressed by hash instead of by walking. A block hash names a whole prefix,
so a dict from hash to tree segment answers "does the replica hold this prefix" in one step, and because a replica
that holds a prefix holds all shorter ones, bisecting a prompt's hashes finds the longest match.

Rules that everything here keeps:

- A segment is a run of blocks that were last used by the same request. Requests that share only part of a segment
  split it; a request that goes on where an unshared segment ends extends it.
- Segments are ordered by last use, a parent after its children. The first in that order is therefore always a
  leaf, and evicting block by block from its end is exact LRU with tails before roots, as in vLLM's block pool.
- What is inserted and touched costs new blocks (in C) plus the segments on the path, never the matched blocks.

- Requests in flight hold the segments on their path, as the engine's block pool counts references: what is held is in
  use, cannot be evicted, and counts once however many hold it. Letting go counts as use, for the engine too queues
  blocks for eviction when they are freed.

- An engine has its answers in its cache, too, and a conversation's next prompt repeats the last one. `answered` puts
  behind an answered prompt one block that stands for its end and the answer. Whoever continues the answer knows that
  block's hash (`PromptKey.continued_hash`), asks `holds`, and replaces it by the blocks of the longer prompt.

There is no map from hash to replicas over all blocks: `_roots` knows who holds a prompt's first block, and only
those are asked. Forgetting a replica drops its tree; what it leaves in `_roots` is ignored from then on, and
removed in slices.

Segments refer to each other by number, and keep their hashes in arrays: a million blocks then are nothing to the
cycle collector, whose full pass would otherwise stop the event loop for 100 ms.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol

from mypy_extensions import mypyc_attr

DEFAULT_CAPACITY_BYTES = 1 << 20
"""Canonical bytes a replica is believed to hold until it says more: 262,144 tokens of four bytes. Less than common
deployments have (an 8B model on an 80 GB card holds about 450,000 tokens), because believing in too much is what
makes approximate routing collapse."""

_SWEEP_PER_INSERT = 64

_FULL_SHARE = 0.9
"""Share of the capacity from which on a replica's cache counts as full: the rest is answers."""


class Schedule(Protocol):
    """Where prompts are cut into blocks; `gateway.prompt.blocks.BlockSchedule` is one."""

    offsets: list[int]

    def covered_bytes(self, blocks: int) -> int:
        """Bytes covered by the first `blocks` blocks; `offsets` reaches at least that far afterwards."""
        ...


class _Segment:
    """A run of blocks of one replica, from depth `start` on."""

    __slots__ = ("children", "hashes", "holders", "number", "parent", "shown", "start", "told", "used")

    def __init__(self, number: int, hashes: "array[int]", start: int, parent: int) -> None:
        self.number = number
        self.hashes = hashes
        self.start = start
        self.parent = parent  # 0: none
        self.children: set[int] | None = None
        self.used = 0  # by which insertion, last
        self.holders = 0  # requests in flight whose prompt it is part of
        # Where in the shared log anybody last told its blocks, and that it was used; see `shared.py`.
        self.told = self.shown = 0


class _Replica:
    """What one replica is believed to hold."""

    __slots__ = ("answers_count", "blocks", "capacity_bytes", "held_bytes", "last_number", "segments")

    def __init__(self, capacity_bytes: int) -> None:
        self.blocks: dict[int, int] = {}
        self.segments: OrderedDict[int, _Segment] = OrderedDict()
        self.last_number = 0
        self.held_bytes = 0
        self.capacity_bytes = capacity_bytes
        self.answers_count = True


class Record:
    """One insertion, to be undone if the request never reaches prefill."""

    __slots__ = ("_held_by", "_leaf", "_used", "continues", "hashes", "matched_blocks", "slot", "used_before")

    def __init__(self, slot: int, hashes: list[int], matched_blocks: int, used: int) -> None:
        self.slot = slot
        self.hashes = hashes
        self.matched_blocks = matched_blocks
        """Blocks the replica was believed to hold before."""
        self.used_before = 0
        """By which insertion the last of those had been used last; counts up over all slots."""
        self.continues = False
        """The replica was believed to have given the answer that this prompt continues."""
        self._used = used
        self._held_by: _Replica | None = None
        self._leaf = 0  # the last segment it holds

    @property
    def held(self) -> bool:
        """The map keeps it for a request in flight."""
        return self._held_by is not None


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixIndex:
    """Block hashes held by each replica slot, least recently used first out.

    All methods are synchronous and meant for one event loop. Hashes are those of `BlockSchedule.hashes`; a
    record keeps the list it was made with, which must not change afterwards.
    """

    def __init__(self, schedule: Schedule, default_capacity_bytes: int = DEFAULT_CAPACITY_BYTES) -> None:
        """Make an empty index.

        Args:
            schedule: gives the length of blocks; all hashes must come from the same one.
            default_capacity_bytes: canonical bytes a slot may hold until `set_capacity`.
        """
        self._schedule = schedule
        self._default_capacity_bytes = default_capacity_bytes
        self._replicas: list[_Replica] = []
        self.in_use_bytes: list[int] = []
        """By slot: canonical bytes of prompts that requests in flight hold, shared ones once."""
        self.oldest_use: list[float] = []
        """By slot: by which insertion that was used last which goes next. While there is room, below 0: the share of
        the capacity that is left, negative. As of the last insertion."""
        self._roots: dict[int, tuple[int, ...]] = {}
        self._alone: list[tuple[int]] = []  # shared by all first blocks that one replica holds
        self._forgotten: deque[tuple[int, _Replica]] = deque()
        self._clock = 0

    def match(self, hashes: list[int]) -> list[tuple[int, int]]:
        """Longest prefix held, per replica.

        Args:
            hashes: the block hashes of a prompt.

        Returns:
            `(slot, blocks)` for each slot that holds at least the first block, in no order; slots that are no
            candidates for the request included.
        """
        if not hashes:
            return []
        holders = self._roots.get(hashes[0])
        if holders is None:
            return []
        matches = []
        replicas = self._replicas
        length = len(hashes)
        backwards: list[int] | None = None
        depth = 0
        for slot in holders:
            blocks = replicas[slot].blocks
            # Replicas that hold only the common system prompt all end where the last one did.
            if not (depth and hashes[depth - 1] in blocks and (depth == length or hashes[depth] not in blocks)):
                if backwards is None:
                    backwards = hashes[::-1]
                depth = length - bisect_left(backwards, True, key=blocks.__contains__)
            if depth:
                matches.append((slot, depth))
        return matches

    def holds(self, slot: int, answer: int) -> bool:
        """Whether the replica is believed to hold an answer: the hash given to `answered`."""
        replica = self._replicas[slot]
        return replica.answers_count and answer in replica.blocks

    def count_answers(self, slot: int, count: bool) -> None:
        """Say whether prompts that continue the replica's answers find these in its cache; they do until told."""
        self._replica(slot).answers_count = count

    def answered(self, record: Record, answer: int) -> None:
        """Believe that the replica holds the answer to the prompt of an insertion, too.

        That is no use of the prompt, but part of the one that ends with it (`release`).

        Args:
            record: the insertion.
            answer: a hash for the prompt's unfinished block and the answer.
        """
        self._answered(record, answer)

    def _answered(self, record: Record, answer: int) -> _Segment | None:
        """Put an answer behind its prompt; return the segment it is in, None if it has been put nowhere."""
        slot, hashes = record.slot, record.hashes
        replica = self._replicas[slot]
        if answer in replica.blocks or not hashes:
            return None
        segment = _segment_at(replica, hashes[-1], len(hashes) - 1)
        if segment is None:
            return None
        if segment.children is not None or segment.hashes[-1] != hashes[-1]:
            if segment.hashes[-1] != hashes[-1]:
                segment = _split(replica, segment, len(hashes))
            self._clock += 1
            return self._enter(slot, replica, segment, len(hashes), [answer])
        segment.hashes.append(answer)
        replica.blocks[answer] = segment.number
        added = self._schedule.covered_bytes(len(hashes) + 1) - self._schedule.offsets[len(hashes)]
        replica.held_bytes += added
        if segment.holders:
            self.in_use_bytes[slot] += added
        self._evict(slot, replica)
        return segment

    def insert(self, slot: int, hashes: list[int], continued: int = 0) -> Record:
        """Believe from now on that the replica holds this prompt, and that it was just used.

        Args:
            slot: replica slot; new slots are made as needed.
            hashes: the block hashes of the prompt.
            continued: hash of the answer that the prompt continues; 0 if it continues none.

        Returns:
            The record to `undo`, if the replica turns out not to have computed the prompt.
        """
        if self._forgotten:
            self.sweep(_SWEEP_PER_INSERT)
        replica = self._replica(slot)
        self._clock = used = self._clock + 1
        continues = continued != 0 and continued in replica.blocks
        if continues:
            self._replace(slot, replica, continued)
        matched = _depth(replica.blocks, hashes)
        record = Record(slot, hashes, matched, used)
        record.continues = continues
        segment = None
        if matched:
            segment = _segment_at(replica, hashes[matched - 1], matched - 1)
            if segment is None:
                return record
            record.used_before = segment.used
            if matched < segment.start + len(segment.hashes):
                segment = _split(replica, segment, matched)
        self._enter(slot, replica, segment, matched, hashes[matched:] if matched else hashes)
        return record

    def _replace(self, slot: int, replica: _Replica, answer: int) -> None:
        """Drop the block of an answer: the prompt that continues it has real ones for the same bytes."""
        segment = replica.segments[replica.blocks[answer]]
        if segment.children is None and segment.hashes[-1] == answer:
            self._cut(slot, replica, segment, segment.start + len(segment.hashes) - 1)

    def hold(self, record: Record) -> bool:
        """The request of an insertion is in flight: what it uses cannot be evicted until `release`.

        Returns:
            Whether another request in flight holds all of it already.
        """
        slot, hashes = record.slot, record.hashes
        replica = self._replicas[slot]
        segment = _segment_at(replica, hashes[-1], len(hashes) - 1)
        if segment is None:
            return False
        record._held_by, record._leaf = replica, segment.number
        shared = segment.holders > 0
        while segment is not None:
            if not segment.holders:
                self.in_use_bytes[slot] += self._bytes(segment)
            segment.holders += 1
            segment = replica.segments.get(segment.parent)
        return shared

    def release(self, record: Record) -> None:
        """The request has ended: what it held and nobody else holds may be evicted. Without effect the second time."""
        slot, replica = record.slot, record._held_by
        record._held_by = None
        if replica is None or replica is not self._replicas[slot]:
            return
        segments = replica.segments
        segment = segments.get(record._leaf)
        while segment is not None:
            segments.move_to_end(segment.number)
            segment.holders -= 1
            if not segment.holders:
                self.in_use_bytes[slot] -= self._bytes(segment)
            segment = segments.get(segment.parent)
        self._evict(slot, replica)

    def in_use_blocks(self, slot: int, hashes: list[int], depth: int) -> int:
        """How many of the first `depth` blocks, all of them there, requests in flight hold."""
        if not depth or slot >= len(self._replicas):
            return 0
        replica = self._replicas[slot]
        segment = _segment_at(replica, hashes[depth - 1], depth - 1)
        while segment is not None:
            if segment.holders:
                return min(segment.start + len(segment.hashes), depth)
            segment = replica.segments.get(segment.parent)
        return 0

    def undo(self, record: Record) -> None:
        """Take an insertion back: what it added and no later request has used is gone.

        Evictions it caused and the recency it gave to blocks that were there before stay. Without effect after
        `forget`, and the second time.
        """
        slot, hashes = record.slot, record.hashes
        replica = self._replicas[slot]
        depth = _depth(replica.blocks, hashes)
        while depth > record.matched_blocks:
            segment = _segment_at(replica, hashes[depth - 1], depth - 1)
            if segment is None or segment.used != record._used or segment.children is not None:
                return
            depth = max(segment.start, record.matched_blocks)
            self._cut(slot, replica, segment, depth)
        self._evict(slot, replica)

    def truncate(self, slot: int, hashes: list[int], depth: int) -> None:
        """Learn that the replica holds no more than the first `depth` blocks of this prompt.

        Everything that continues the blocks beyond is dropped with them.
        """
        if slot >= len(self._replicas) or depth >= len(hashes):
            return
        replica = self._replicas[slot]
        segment = _segment_at(replica, hashes[depth], depth)
        if segment is not None:
            self._prune(slot, replica, segment, depth)

    def _prune(self, slot: int, replica: _Replica, segment: _Segment, depth: int) -> None:
        """Drop a segment's blocks from `depth` on, and everything below them."""
        below = [segment]
        for parent in below:
            below.extend(replica.segments[number] for number in parent.children or ())
        for child in below[:0:-1]:
            self._cut(slot, replica, child, child.start)
        self._cut(slot, replica, segment, depth)
        self._evict(slot, replica)

    def expire(self, slot: int, before: int, budget: int) -> None:
        """Learn that what was last used earlier than some insertion has been evicted.

        Args:
            slot: replica slot.
            before: number of the insertion, as in `Record.used_before`.
            budget: segments to drop at most.
        """
        if slot >= len(self._replicas):
            return
        replica = self._replicas[slot]
        segments = replica.segments
        while budget > 0 and segments:
            segment = segments[next(iter(segments))]
            if segment.used >= before:
                break
            budget -= 1
            self._cut(slot, replica, segment, segment.start)
        self._evict(slot, replica)

    def forget(self, slot: int) -> None:
        """Forget all of a replica, its capacity too. The slot may be used again at once."""
        if slot < len(self._replicas):
            replica = self._replicas[slot]
            self._replicas[slot] = _Replica(self._default_capacity_bytes)
            self.in_use_bytes[slot] = 0
            self.oldest_use[slot] = -1.0
            if replica.segments:
                self._forgotten.append((slot, replica))

    def sweep(self, budget: int) -> bool:
        """Free what forgotten replicas left behind; insertions do this too, little by little.

        Args:
            budget: segments to free at most.

        Returns:
            Whether anything is left.
        """
        while self._forgotten and budget > 0:
            slot, dead = self._forgotten[0]
            alive = self._replicas[slot].blocks
            while dead.segments and budget > 0:
                budget -= 1
                _, segment = dead.segments.popitem()
                if segment.start == 0 and segment.hashes[0] not in alive:
                    self._remove_root(slot, segment.hashes[0])
                for block in segment.hashes:
                    dead.blocks.pop(block, None)
            if not dead.segments:
                self._forgotten.popleft()
        return bool(self._forgotten)

    def set_capacity(self, slot: int, capacity_bytes: int) -> None:
        """Say how many canonical bytes of prompts the replica's KV memory can hold."""
        replica = self._replica(slot)
        replica.capacity_bytes = capacity_bytes
        self._evict(slot, replica)

    def held_bytes(self, slot: int) -> int:
        """Canonical bytes the replica is believed to hold."""
        return self._replicas[slot].held_bytes if slot < len(self._replicas) else 0

    def full(self, slot: int) -> bool:
        """Whether the replica is believed to hold about as much as it can."""
        replica = self._replicas[slot]
        return replica.held_bytes > _FULL_SHARE * replica.capacity_bytes

    def blocks(self, slot: int) -> int:
        """Number of blocks the replica is believed to hold."""
        return len(self._replicas[slot].blocks) if slot < len(self._replicas) else 0

    def _replica(self, slot: int) -> _Replica:
        replicas = self._replicas
        while slot >= len(replicas):
            self._alone.append((len(replicas),))
            replicas.append(_Replica(self._default_capacity_bytes))
            self.in_use_bytes.append(0)
            self.oldest_use.append(-1.0)
        return replicas[slot]

    def _enter(
        self, slot: int, replica: _Replica, segment: _Segment | None, matched: int, tail: Sequence[int]
    ) -> _Segment | None:
        """Put blocks behind the `matched` first ones, which end where the segment does, and mark the path as used.

        Returns:
            The path's last segment, which may have been evicted again.
        """
        if tail:
            if segment is not None and segment.children is None:
                segment.hashes.extend(tail)
                if segment.holders:
                    covered = self._schedule.covered_bytes(matched + len(tail))
                    self.in_use_bytes[slot] += covered - self._schedule.offsets[matched]
                replica.blocks.update(dict.fromkeys(tail, segment.number))
                self._count(replica, matched, len(tail))
            else:
                segment = self._add_run(slot, replica, segment, matched, tail)
        last, used, segments = segment, self._clock, replica.segments
        while segment is not None:
            segment.used = used
            segments.move_to_end(segment.number)
            segment = segments.get(segment.parent)
        self._evict(slot, replica)
        if replica.held_bytes <= _FULL_SHARE * replica.capacity_bytes:
            self.oldest_use[slot] = replica.held_bytes / max(replica.capacity_bytes, 1) - 1.0
        elif segments:
            self.oldest_use[slot] = float(segments[next(iter(segments))].used)
        return last

    def _add_run(
        self, slot: int, replica: _Replica, parent: _Segment | None, matched: int, tail: Sequence[int]
    ) -> _Segment:
        """Put blocks behind the `matched` first ones as a segment of their own, never used yet and first in order."""
        segment = _add_segment(replica, parent, array("Q", tail), matched)
        replica.segments.move_to_end(segment.number, last=False)
        if not matched:
            self._add_root(slot, tail[0])
        replica.blocks.update(dict.fromkeys(tail, segment.number))
        self._count(replica, matched, len(tail))
        return segment

    def _count(self, replica: _Replica, matched: int, blocks: int) -> None:
        """Count blocks behind the `matched` first ones."""
        replica.held_bytes += self._schedule.covered_bytes(matched + blocks) - self._schedule.offsets[matched]

    def _add_root(self, slot: int, block: int) -> None:
        holders = self._roots.get(block)
        if holders is None:
            self._roots[block] = self._alone[slot]
        elif slot not in holders:  # it may be, from before the slot was forgotten
            self._roots[block] = (*holders, slot)

    def _remove_root(self, slot: int, block: int) -> None:
        holders = tuple(holder for holder in self._roots.get(block, ()) if holder != slot)
        if not holders:
            self._roots.pop(block, None)
        else:
            self._roots[block] = self._alone[holders[0]] if len(holders) == 1 else holders

    def _evict(self, slot: int, replica: _Replica) -> None:
        """Drop what is more than the replica can hold, or than requests in flight hold if that is more still.

        To be called where it has come to hold more, and where less is in use.
        """
        if replica.held_bytes <= replica.capacity_bytes:
            return
        offsets = self._schedule.offsets
        segments = replica.segments
        most, spared = max(replica.capacity_bytes, self.in_use_bytes[slot]), 0
        while replica.held_bytes > most and segments:
            segment = segments[next(iter(segments))]
            if segment.holders and spared <= len(segments):
                # Its parents are in use as well, and come after it.
                segments.move_to_end(segment.number)
                spared += 1
                continue
            end = segment.start + len(segment.hashes)
            # As many of its blocks as may stay.
            allowed = offsets[end] - (replica.held_bytes - most)
            depth = max(segment.start, bisect_right(offsets, allowed, segment.start, end) - 1)
            self._cut(slot, replica, segment, depth)

    def _cut(self, slot: int, replica: _Replica, segment: _Segment, depth: int) -> None:
        """Drop a leaf's blocks from `depth` on, and the leaf itself when nothing is left of it."""
        offsets = self._schedule.offsets
        hashes, start = segment.hashes, segment.start
        dropped = offsets[start + len(hashes)] - offsets[depth]
        replica.held_bytes -= dropped
        if segment.holders:
            self.in_use_bytes[slot] -= dropped
        drop = replica.blocks.pop
        for block in hashes[depth - start :]:
            drop(block, None)
        if depth > start:
            del hashes[depth - start :]
            return
        del replica.segments[segment.number]
        if segment.holders:
            # Who held it will not find it any more, and so never let go of its parents.
            self._let_go(slot, replica, segment.parent, segment.holders)
        parent = replica.segments.get(segment.parent)
        if parent is None:
            self._remove_root(slot, hashes[0])
        elif parent.children is not None:
            parent.children.discard(segment.number)
            if not parent.children:
                parent.children = None

    def _let_go(self, slot: int, replica: _Replica, number: int, holders: int) -> None:
        segment = replica.segments.get(number)
        while segment is not None:
            segment.holders -= holders
            if not segment.holders:
                self.in_use_bytes[slot] -= self._bytes(segment)
            segment = replica.segments.get(segment.parent)

    def _bytes(self, segment: _Segment) -> int:
        offsets = self._schedule.offsets
        return offsets[segment.start + len(segment.hashes)] - offsets[segment.start]


def _depth(blocks: dict[int, int], hashes: list[int]) -> int:
    """Number of leading `hashes` among `blocks`."""
    if not hashes or hashes[0] not in blocks:
        return 0
    if hashes[-1] in blocks:
        return len(hashes)
    return len(hashes) - bisect_left(hashes[::-1], True, key=blocks.__contains__)


def _segment_at(replica: _Replica, block: int, position: int) -> _Segment | None:
    """The segment that holds a prompt's block at a position, None if the replica does not hold it.

    None as well when the hash is that of a block at another depth: 60 bits do not collide by chance, but may
    by intent, and such a prompt is not indexed.
    """
    number = replica.blocks.get(block)
    if number is None:
        return None
    segment = replica.segments[number]
    inside = position - segment.start
    if 0 <= inside < len(segment.hashes) and segment.hashes[inside] == block:
        return segment
    return None


def _add_segment(replica: _Replica, parent: _Segment | None, hashes: "array[int]", start: int) -> _Segment:
    """A new segment, last in order, known to its parent; its blocks are the caller's to enter."""
    replica.last_number = number = replica.last_number + 1
    segment = _Segment(number, hashes, start, 0 if parent is None else parent.number)
    replica.segments[number] = segment
    if parent is not None:
        if parent.children is None:
            parent.children = {number}
        else:
            parent.children.add(number)
    return segment


def _split(replica: _Replica, segment: _Segment, depth: int) -> _Segment:
    """Split a segment at `depth` and return its upper part, as a new segment last in order.

    The lower part keeps its place in the order, and with it its age and its children.
    """
    parent = replica.segments.get(segment.parent)
    inside = depth - segment.start
    head = _add_segment(replica, parent, segment.hashes[:inside], segment.start)
    head.children = {segment.number}
    head.holders = segment.holders
    head.told, head.shown = segment.told, segment.shown
    if parent is not None and parent.children is not None:
        parent.children.discard(segment.number)
    segment.hashes = segment.hashes[inside:]
    segment.start = depth
    segment.parent = head.number
    replica.blocks.update(dict.fromkeys(head.hashes, head.number))
    return head
