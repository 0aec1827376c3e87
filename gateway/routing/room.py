"""Which of the replicas that could serve a request should be given one more now.

Three reasons speak against a replica:
- It has as many requests as it may have (`max_in_flight`). This one is hard.
- It has just answered 429 or 503. As long as it asks to be spared, others are preferred.
- It has just come up. A policy that goes by load sees an idle replica and would send it everything at once, all of it
  uncached; so the requests it may have at a time grow over some seconds to what the others have (Envoy's slow start).
The last two are preferences: where nothing else is left, they give way.

Everything is kept per slot. As long as no slot has a reason, a request pays for one look at an empty set.
"""

from collections.abc import Sequence

_TOGETHER = 0.05
"""Share of the slow start within which replicas count as having come up at the same time."""


class Room:
    """The reasons, by slot."""

    __slots__ = (
        "_alike",
        "_alike_until_s",
        "_in_flight",
        "_limits",
        "_marked",
        "_slow_start_s",
        "_spared_until_s",
        "_warming_since_s",
    )

    def __init__(self, in_flight: Sequence[int], slow_start_s: float = 0.0) -> None:
        """Begin without replicas.

        Args:
            in_flight: column of requests sent and not ended, kept by the load ledger.
            slow_start_s: how long a replica that comes up takes to its full share; 0 for none.
        """
        self._in_flight = in_flight
        self._slow_start_s = slow_start_s
        self._limits: dict[int, int] = {}
        self._spared_until_s: dict[int, float] = {}
        # The time is that of the first request after it came up: nothing was sent before.
        self._warming_since_s: dict[int, float | None] = {}
        self._marked: set[int] = set()
        # Slots of which none is behind the others, however warm they are, and until when none needs to be looked at.
        self._alike: Sequence[int] = ()
        self._alike_until_s = 0.0

    def copy(self) -> "Room":
        """Return another that knows the same, to be asked without consequences."""
        other = Room(self._in_flight, self._slow_start_s)
        other._limits.update(self._limits)
        other._spared_until_s.update(self._spared_until_s)
        other._warming_since_s.update(self._warming_since_s)
        other._marked.update(self._marked)
        return other

    @property
    def spared(self) -> Sequence[int]:
        """Slots that have asked for a pause."""
        return tuple(self._spared_until_s)

    def slow_start(self, seconds: float) -> None:
        """Change how long replicas that come up take to their full share; 0 for none."""
        self._slow_start_s = seconds
        self._alike = ()
        if not seconds:
            slots = list(self._warming_since_s)
            self._warming_since_s.clear()
            for slot in slots:
                self._mark(slot)

    def limit(self, slot: int, max_in_flight: int | None) -> None:
        """Say how many requests a replica may have at once; None for any number."""
        if max_in_flight is None:
            self._limits.pop(slot, None)
        else:
            self._limits[slot] = max_in_flight
        self._mark(slot)

    def came_up(self, slot: int) -> None:
        """A replica is up, again or for the first time: let it warm up."""
        if self._slow_start_s:
            self._warming_since_s[slot] = None
            self._mark(slot)

    def spare(self, slot: int, until_s: float) -> None:
        """A replica has asked for a pause."""
        self._spared_until_s[slot] = max(until_s, self._spared_until_s.get(slot, 0.0))
        self._mark(slot)

    def forget(self, slot: int) -> None:
        """The slot's replica is gone."""
        self._limits.pop(slot, None)
        self._spared_until_s.pop(slot, None)
        self._warming_since_s.pop(slot, None)
        self._marked.discard(slot)
        self._alike = ()

    def among(self, slots: Sequence[int], now_s: float) -> Sequence[int]:
        """Return those of the slots that should be chosen from; empty when all are at their limit.

        Args:
            slots: replicas that could serve the request.
            now_s: monotonic seconds.
        """
        if not self._marked or self._marked.isdisjoint(slots):
            return slots
        in_flight, limits = self._in_flight, self._limits
        if limits:
            slots = [slot for slot in slots if slot not in limits or in_flight[slot] < limits[slot]]
        if len(slots) < 2:
            return slots
        if self._spared_until_s:
            slots = self._not_spared(slots, now_s)
        if self._warming_since_s and not (slots is self._alike and now_s < self._alike_until_s):
            slots = self._warm_enough(slots, now_s)
        return slots

    def _not_spared(self, slots: Sequence[int], now_s: float) -> Sequence[int]:
        until_s = self._spared_until_s
        for slot in [slot for slot in slots if until_s.get(slot, now_s) < now_s]:
            del until_s[slot]
            self._mark(slot)
        return [slot for slot in slots if slot not in until_s] or slots

    def _warm_enough(self, slots: Sequence[int], now_s: float) -> Sequence[int]:
        since_s, whole_s = self._warming_since_s, self._slow_start_s
        ages_s: list[float] = []
        for slot in slots:
            started_s = since_s.get(slot, -whole_s)
            if started_s is None:
                started_s = since_s[slot] = now_s
            age_s = now_s - started_s
            if age_s >= whole_s:
                age_s = whole_s
                if slot in since_s:
                    del since_s[slot]
                    self._mark(slot)
            ages_s.append(age_s)
        # Replicas that came up together warm up together, and behind those that were there before them.
        oldest_s = max(ages_s)
        together_s = oldest_s - _TOGETHER * whole_s
        first = [self._in_flight[slot] for slot, age_s in zip(slots, ages_s, strict=True) if age_s >= together_s]
        if len(first) == len(slots):
            # They stay together: all become older at the same pace, until the first is warm.
            self._alike, self._alike_until_s = slots, now_s + whole_s - oldest_s
            return slots
        mean = sum(first) / len(first)
        return [
            slot
            for slot, age_s in zip(slots, ages_s, strict=True)
            if age_s >= together_s or self._in_flight[slot] < max(1.0, mean * age_s / oldest_s)
        ]

    def _mark(self, slot: int) -> None:
        self._alike = ()
        if slot in self._limits or slot in self._spared_until_s or slot in self._warming_since_s:
            self._marked.add(slot)
        else:
            self._marked.discard(slot)
