"""What the workers of one gateway have outstanding, in memory that all of them see: nobody tells, everybody looks.

Requests of the same moment go to different workers. What a message says of the first is read after the last has been
sent somewhere; what stands here is read when the next decision is made. Workers of other gateways are told and heard
through Redis (`gateway.sharing.loads`).

On the conversation trace (9 requests at once every three seconds; the first 4,000, in simulation) four workers with it
have a mean TTFT of 538 ms, without it 685, and one worker has 537.

Behind the board, in the same memory, are the rings by which workers tell each other of prefixes
(`gateway.sharing.rings`).

Layout, all of it 8-byte words
    heads    a place each: how many times its row has changed
    rows     a place each:
        writer     whose row it is; 0 for nobody's
        entries    how many there are
        ring       of each of the last changes, which entry it was; the n-th change is at n modulo its length
        entry      version, the replica's identity, its load (the fields of `Load`), version again

Who writes what: each worker its own row, and the supervisor the row of a worker that has died. A writer changes the
entry from its front to its end, then the ring, then the head; a reader begins with the head, and reads an entry's last
version, then what it says, then its first. An entry whose versions differ is being written; the head will change once
more when that is done, so a reader goes by it. There are no locks: a worker that is killed holds none, and what it
wrote last is cleared.

Memory that is not used is not there: an entry takes its place when the first request goes to its replica.
"""

import mmap
import os
import struct
import tempfile
from typing import NamedTuple

from gateway.replicas.load import Load
from gateway.sharing.rings import PLACE_BYTES, Rings

ENTRIES = 2048
"""Replicas of which a worker can say something; it says nothing of more."""
_RING = 64
_SAYS = struct.Struct("=Q2q5d")
_ENTRY_WORDS = 1 + _SAYS.size // 8 + 1
_WRITER, _COUNT, _RING_BEGIN = 0, 1, 2
_ENTRIES_BEGIN = _RING_BEGIN + _RING
_ROW_WORDS = _ENTRIES_BEGIN + ENTRIES * _ENTRY_WORDS
_ROW_BYTES = 8 * (1 + _ROW_WORDS)


class News(NamedTuple):
    """What has changed in a row.

    Attributes:
        place: the row.
        writer: whose it is; 0 if nobody's.
        anew: whether this is all there is, and what was known of the row before is not true any more.
        loads: by the replica's identity.
    """

    place: int
    writer: int
    anew: bool
    loads: dict[int, Load]


def open_memory(places: int) -> int:
    """Make memory for a board, and return its descriptor, which child processes may be given.

    Args:
        places: how many workers may be there at a time.

    Raises:
        OSError: there is no room for it.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("warmgate-board")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, places * (_ROW_BYTES + PLACE_BYTES))
    return descriptor


class Board:
    """One process' view of the board.

    Attributes:
        places: how many workers may be there at a time.
        rings: what they tell each other.
    """

    def __init__(self, descriptor: int, place: int = -1) -> None:
        """Look at the memory.

        Args:
            descriptor: of `open_memory`.
            place: this worker's own row; -1 for who only clears rows.

        Raises:
            OSError: it is no such memory.
        """
        memory = memoryview(mmap.mmap(descriptor, 0))
        self.places = len(memory) // (_ROW_BYTES + PLACE_BYTES)
        self._memory = memory[: self.places * _ROW_BYTES]
        self._words = self._memory.cast("Q")
        self.rings = Rings(memory[len(self._memory) :], place)
        self._own = place
        self._heads = self._memory[: 8 * self.places]
        # As they were when news were read, but for the own one.
        self._heads_seen = bytearray(8 * self.places)
        self._seen = memoryview(self._heads_seen).cast("Q")
        # By place: how many changes of the row are known, and whose it was then.
        self._changes = [0] * self.places
        self._writers = [0] * self.places
        # Of the own row: where entries are, and what they say.
        self._entries: dict[int, int] = {}
        self._posted: list[Load] = []

    def enter(self, writer: int) -> None:
        """Take the own row.

        Args:
            writer: this worker's number among all there are, not 0.
        """
        self.clear(self._own)
        self._words[self._row(self._own) + _WRITER] = writer
        self._turn(self._words[self._own] + 1)

    def clear(self, place: int) -> None:
        """Say that a row is nobody's: its worker has gone."""
        row = self._row(place)
        self._words[row + _WRITER] = self._words[row + _COUNT] = 0
        self._words[place] += 1

    def post(self, identity: int, load: Load) -> None:
        """Say what this worker has outstanding on a replica.

        Args:
            identity: the replica's.
            load: this worker's.
        """
        entry = self._entries.get(identity)
        if entry is None:
            if not load.in_flight:
                return
            if len(self._posted) == ENTRIES:
                self._compact()
                if len(self._posted) == ENTRIES:
                    return
            entry = self._entries[identity] = len(self._posted)
            self._posted.append(load)
        elif self._posted[entry] == load:
            return
        self._posted[entry] = load
        place, words = self._own, self._words
        row = self._row(place)
        change = words[place] + 1
        self._write(entry, identity, load, change)
        words[row + _COUNT] = len(self._posted)
        words[row + _RING_BEGIN + change % _RING] = entry
        self._turn(change)

    def _compact(self) -> None:
        """Make room: replicas come and go, and nobody need be told of those without load."""
        loads = {identity: self._posted[entry] for identity, entry in self._entries.items()}
        loads = {identity: load for identity, load in loads.items() if load.in_flight}
        self._entries = {identity: entry for entry, identity in enumerate(loads)}
        self._posted = list(loads.values())
        # More than the ring has: everybody reads it all.
        change = self._words[self._own] + _RING
        for entry, (identity, load) in enumerate(loads.items()):
            self._write(entry, identity, load, change)
        self._words[self._row(self._own) + _COUNT] = len(loads)
        self._turn(change)

    def _turn(self, change: int) -> None:
        """Say that the own row has changed; that is no news here."""
        self._words[self._own] = self._seen[self._own] = change

    def _write(self, entry: int, identity: int, load: Load, version: int) -> None:
        first = self._row(self._own) + _ENTRIES_BEGIN + entry * _ENTRY_WORDS
        last = first + _ENTRY_WORDS - 1
        self._words[first] = version
        self._memory[8 * first + 8 : 8 * last] = _SAYS.pack(identity, *load)
        self._words[last] = version

    @property
    def has_news(self) -> bool:
        """Whether others have changed anything since `news` was called; cheap."""
        return self._heads != self._heads_seen

    def news(self) -> list[News]:
        """Return what has changed since the last time."""
        found = []
        self._heads_seen[:] = self._heads
        for place, change in enumerate(self._seen):
            known = self._changes[place]
            if place == self._own or change == known:
                continue
            self._changes[place] = change
            words, row = self._words, self._row(place)
            writer, count = words[row + _WRITER], min(words[row + _COUNT], ENTRIES)
            # With half of the ring in hand: it may be written on meanwhile.
            anew = not writer or writer != self._writers[place] or not 0 < change - known <= _RING // 2
            self._writers[place] = writer
            changed = (
                range(count)
                if anew
                else {words[row + _RING_BEGIN + number % _RING] for number in range(known + 1, change + 1)}
            )
            loads = {}
            for entry in changed:
                first = row + _ENTRIES_BEGIN + entry * _ENTRY_WORDS
                version = words[first + _ENTRY_WORDS - 1]
                identity, *load = _SAYS.unpack_from(self._memory, 8 * first + 8)
                if version == words[first]:
                    loads[identity] = Load(*load)
            found.append(News(place, writer, anew, loads))
        return found

    def _row(self, place: int) -> int:
        return self.places + place * _ROW_WORDS
