"""Puts one publisher's messages in order and keeps its map true. No sockets here, and no clock.

A publisher numbers its messages from 0. Two channels bring them: the live one, which may drop but never reorders, and
the replay of what the publisher still has, on request. What can go wrong, and what is done:

    number as expected            applied
    number too high               gap: the missing ones are asked for; live ones wait meanwhile
      the replay has them         applied in order, then those that waited
      it has them only in part    asked again (a publisher drops what its socket cannot take), as long as it helps
      it does not, or no answer   the map is emptied, and goes on incomplete
    number not above the last     the publisher has started again: the map is emptied, all is asked for from 0
      live one
    below the expected, but new   was replayed already: left out
      on the live channel
    cannot be read                counted and left out

A publisher that has started again may have got further than the old one before anything is heard of it. So a replay
begins one message early: if that one has another timestamp than the one applied, it is another publisher's.
"""

from collections import deque
from enum import StrEnum

from gateway.prefixes.events.block_map import BlockMap
from gateway.prefixes.events.wire import Batch

MAX_WAITING = 20_000
"""Live messages that may wait for a replay."""
_MAX_ATTEMPTS = 3
"""Replays in a row that bring nothing new."""


class Phase(StrEnum):
    """What the stream is doing."""

    NEW = "new"
    """Nothing has been heard."""
    LIVE = "live"
    """Messages are applied as they come."""
    REPLAYING = "replaying"
    """Missing ones have been asked for."""


class Stream:
    """One publisher: an engine, or one data-parallel rank of it.

    After every call, `replay_from` says whether a replay must be (re)started: the caller takes it with `take_request`.

    Attributes:
        blocks: the map.
        phase: see `Phase`.
        messages, events, gaps, replays, clears, restarts, duplicates, bad_messages, bad_events: counters.
        last_sent_s: timestamp of the last batch applied, by the engine's clock; None before the first.
        lag_s: from the timestamp of the last live batch to when it was heard; set by whoever has a clock.
    """

    __slots__ = (
        "_applied_sent_s",
        "_attempts",
        "_can_replay",
        "_checking",
        "_garbage",
        "_hole",
        "_last_live",
        "_next",
        "_noticed",
        "_progress",
        "_replay_from",
        "_waiting",
        "bad_events",
        "bad_messages",
        "blocks",
        "clears",
        "duplicates",
        "events",
        "gaps",
        "lag_s",
        "last_sent_s",
        "messages",
        "phase",
        "replays",
        "restarts",
    )

    def __init__(self, blocks: BlockMap, can_replay: bool) -> None:
        """Begin.

        Args:
            blocks: an empty map.
            can_replay: missing messages can be asked for.
        """
        self.blocks = blocks
        self.phase = Phase.NEW
        self.messages = self.events = self.gaps = self.replays = self.clears = 0
        self.restarts = self.duplicates = self.bad_messages = self.bad_events = 0
        self.last_sent_s: float | None = None
        self.lag_s: float | None = None
        self._can_replay = can_replay
        self._next: int | None = None
        self._last_live = -1
        self._waiting: deque[tuple[int, Batch | None]] = deque()
        self._replay_from: int | None = None
        self._checking = False
        self._progress = False
        self._hole = False
        self._attempts = 0
        self._applied_sent_s: float | None = None  # timestamp of message `_next - 1`
        self._noticed = False
        self._garbage: list[object] = []

    @property
    def live(self) -> bool:
        """The map is current."""
        return self.phase is Phase.LIVE

    @property
    def sure(self) -> bool:
        """The map is current and lacks nothing: what it does not have, the engine does not have."""
        return self.phase is Phase.LIVE and self.blocks.complete

    def take_request(self) -> int | None:
        """Return the number from which a replay must be asked for now; None if none is due. A running one ends."""
        first, self._replay_from = self._replay_from, None
        return first

    def take_garbage(self) -> list[object]:
        """Return what clearing has left behind, for `free_slowly`."""
        garbage = self._garbage
        if garbage:
            self._garbage = []
        return garbage

    # -- what happens

    def connected(self) -> None:
        """The live channel is there, for the first time or again: learn what was missed."""
        if self._can_replay:
            self._attempts = 0
            self._ask()

    def disconnected(self) -> None:
        """The live channel is gone. What the map says may be old from now on."""
        if self.phase is Phase.LIVE:
            self.phase = Phase.NEW

    def restarted(self) -> None:
        """It is known from elsewhere that the engine is a new process."""
        if self._can_replay:
            self._restart()
            self._ask()
        elif self._noticed:
            # What has been applied since is of the new one, and could not be asked for again.
            self._noticed = False
        else:
            self._restart()

    def live_message(self, sequence: int, batch: Batch | None) -> None:
        """A message of the live channel; `batch` is None if it cannot be read."""
        self.messages += 1
        if sequence <= self._last_live:
            self._restart()
            self._noticed = True
            self._next = 0
            self.blocks.complete = True
        self._last_live = sequence
        if self.phase is Phase.REPLAYING:
            self._waiting.append((sequence, batch))
            if len(self._waiting) > MAX_WAITING:
                self._give_up()
            return
        if self.phase is Phase.NEW:
            if self._can_replay and self._next is None:
                self._waiting.append((sequence, batch))
                self._ask()
                return
            self.phase = Phase.LIVE
        expected = self._next
        if expected is None:
            self.blocks.complete = sequence == 0
        elif sequence < expected:
            self.duplicates += 1
            return
        elif sequence > expected:
            self.gaps += 1
            self._waiting.append((sequence, batch))
            if self._can_replay:
                self._attempts = 0
                self._ask()
            else:
                self._give_up()
            return
        self._apply(sequence, batch)

    def replayed_message(self, sequence: int, batch: Batch | None) -> None:
        """A message of the replay that was asked for last."""
        if self.phase is not Phase.REPLAYING:
            return
        expected = self._next
        if self._checking:
            self._checking = False
            if expected is not None and sequence == expected - 1:
                if batch is None or self._applied_sent_s is None or batch.sent_s == self._applied_sent_s:
                    return
                self._restart()
                self._ask()
                return
        if expected is None:
            # The first of all: a publisher that still has number 0 can tell everything.
            self.blocks.complete = sequence == 0
        elif sequence < expected:
            return
        elif sequence > expected:
            if self._progress:
                self._hole = True
                return
            # It begins too late: what was between is lost.
            self._clear(complete=False)
        self._progress = True
        self._apply(sequence, batch)

    def replay_ended(self) -> None:
        """The replay that was asked for last is over."""
        if self.phase is not Phase.REPLAYING:
            return
        if self._checking:
            # Not even the last message that was applied: another publisher, that has told less so far.
            self._restart()
            self._ask()
            return
        if self._next is None:
            # It has told nothing yet, so its cache is empty.
            self._next = 0
            self.blocks.complete = True
        if self._progress:
            self._attempts = 0
        if self._hole:
            self._ask()
            return
        self._go_on()

    def replay_failed(self) -> None:
        """No answer in time."""
        if self.phase is not Phase.REPLAYING:
            return
        if self._progress:
            # Its end was among what the publisher dropped.
            self._attempts = 0
            self._ask()
        else:
            self._give_up()

    # -- inside

    def _ask(self) -> None:
        """Have a replay asked for, unless that has not helped."""
        self._attempts += 1
        if self._attempts > _MAX_ATTEMPTS:
            self._give_up()
            return
        self.replays += 1
        self.phase = Phase.REPLAYING
        self._progress = self._hole = False
        self._checking = bool(self._next)
        self._replay_from = self._next - 1 if self._next else 0

    def _give_up(self) -> None:
        """Go on without what is missing."""
        self._replay_from = None
        self._attempts = 0
        waiting = self._waiting
        if self._next is None:
            if waiting:
                self._next = waiting[0][0]
                self.blocks.complete = self._next == 0
        elif waiting and waiting[0][0] > self._next:
            self._clear(complete=False)
            self._next = waiting[0][0]
        else:
            # Nothing is known to be missing; only that it cannot be known.
            self.blocks.complete = False
        self._go_on()

    def _go_on(self) -> None:
        """Apply what has waited, and be live; or have a replay asked for, if something is missing still."""
        self.phase = Phase.LIVE
        waiting = self._waiting
        while waiting:
            sequence, batch = waiting[0]
            expected = self._next
            if expected is not None and sequence > expected:
                self.gaps += 1
                if self._can_replay:
                    self._ask()
                    return
                self._clear(complete=False)
            elif expected is not None and sequence < expected:
                waiting.popleft()
                self.duplicates += 1
                continue
            waiting.popleft()
            self._apply(sequence, batch)

    def _apply(self, sequence: int, batch: Batch | None) -> None:
        self._next = sequence + 1
        self._applied_sent_s = None
        if batch is None:
            self.bad_messages += 1
            return
        self.events += len(batch.events)
        self.bad_events += batch.bad_events
        self.last_sent_s = self._applied_sent_s = batch.sent_s
        garbage = self.blocks.apply(batch.events)
        if garbage:
            self._garbage.extend(garbage)

    def _clear(self, complete: bool) -> None:
        self.clears += 1
        self._garbage.extend(self.blocks.clear(complete))

    def _restart(self) -> None:
        """Another publisher: nothing of the old one counts any more."""
        self.restarts += 1
        self._clear(complete=False)
        self._waiting.clear()
        self._next = None
        self._last_live = -1
        self._replay_from = None
        self._attempts = 0
        self.last_sent_s = self._applied_sent_s = None
        if self.phase is Phase.REPLAYING:
            self.phase = Phase.NEW
