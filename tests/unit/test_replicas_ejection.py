"""The breakers on a fleet, in virtual time: a request is `gateway.replicas` seen from the exchange."""

import heapq
import itertools
import logging
from collections.abc import Callable

import pytest

from gateway.replicas.breaker import BreakerSettings, Outcome, State
from gateway.replicas.ejection import Attempt, Ejector
from gateway.replicas.registry import Fleet, Replica, ReplicaSpec


class VirtualTime:
    """A clock and its timers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> "VirtualTimer":
        entry = (self.now_s + delay_s, next(self._order), callback)
        heapq.heappush(self._due, entry)
        return VirtualTimer(lambda: self._due.remove(entry) if entry in self._due else None)

    def pass_(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._due and self._due[0][0] <= end_s:
            self._due.sort()
            self.now_s, _, callback = self._due.pop(0)
            callback()
        self.now_s = end_s

    @property
    def pending(self) -> int:
        return len(self._due)


class VirtualTimer:
    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel


class Scene:
    def __init__(self, replicas: int, settings: BreakerSettings | None = None) -> None:
        self.time = VirtualTime()
        self.fleet = Fleet()
        self.events: list[str] = []
        first = self.add() if replicas else None
        self.ejector = Ejector(self.fleet, settings or BreakerSettings(consecutive_failures=2), self.time.call_later)
        self.replicas = [*([first] if first else []), *(self.add() for _ in range(replicas - 1))]
        self.fleet.on_change(lambda kind, replica: self.events.append(f"{kind} {replica.name}"))

    def add(self) -> Replica:
        replica = self.fleet.add(ReplicaSpec(f"http://r{len(self.fleet.by_slot)}.example", models=("m",)))
        self.fleet.set_up(replica, True)
        return replica

    def slots(self) -> list[int]:
        return list(self.fleet.route_slots("m"))

    def request(self, slot: int, outcome: Outcome) -> None:
        self.end(self.begin(slot), outcome)

    def begin(self, slot: int) -> Attempt:
        replica = self.fleet.by_slot[slot]
        assert replica is not None
        return self.ejector.begin(replica)

    def end(self, attempt: Attempt, outcome: Outcome) -> None:
        self.ejector.record(attempt, outcome, self.time.now_s)

    def eject(self, slot: int) -> None:
        self.request(slot, Outcome.TIMEOUT)
        self.request(slot, Outcome.TIMEOUT)


def test_a_replica_that_answers_health_but_no_requests_is_ejected_tried_and_restored() -> None:
    scene = Scene(3)
    scene.eject(0)
    assert scene.slots() == [1, 2]
    scene.time.pass_(9.9)
    assert scene.slots() == [1, 2]
    scene.time.pass_(0.2)
    assert scene.slots() == [0, 1, 2]
    trial = scene.begin(0)
    assert scene.slots() == [1, 2]
    scene.end(trial, Outcome.OK)
    assert scene.slots() == [0, 1, 2]
    assert scene.events == ["ejected replica-1", "restored replica-1"]


def test_a_failed_trial_ejects_for_longer_and_says_so_once_per_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene(2)
    scene.eject(0)
    scene.time.pass_(10)
    scene.request(0, Outcome.SERVER_ERROR)
    scene.time.pass_(19.9)
    assert scene.slots() == [1]
    scene.time.pass_(0.2)
    assert scene.slots() == [0, 1]
    scene.request(0, Outcome.OK)
    assert [record.getMessage() for record in caplog.records] == [
        "replica-1 is ejected for 10 s, last failure: timeout",
        "replica-1 is ejected for 20 s, last failure: server_error",
        "replica-1 is restored",
    ]
    assert scene.events == ["ejected replica-1", "restored replica-1"]


def test_a_neutral_trial_opens_the_next() -> None:
    scene = Scene(2)
    scene.eject(0)
    scene.time.pass_(10)
    trial = scene.begin(0)
    assert scene.slots() == [1]
    scene.end(trial, Outcome.CLIENT_ERROR)
    assert scene.slots() == [0, 1]


def test_a_trial_ends_with_the_first_byte_not_with_the_stream() -> None:
    scene = Scene(2)
    scene.eject(0)
    scene.time.pass_(10)
    trial = scene.begin(0)
    scene.ejector.answered(trial)
    assert scene.slots() == [0, 1]
    scene.end(trial, Outcome.CUT)
    assert scene.slots() == [1]


def test_the_only_replica_is_never_ejected() -> None:
    scene = Scene(1)
    for _ in range(20):
        scene.request(0, Outcome.CONNECT_ERROR)
    assert scene.slots() == [0]
    assert scene.events == []
    assert scene.time.pending == 0


def test_half_of_a_pool_stays_and_the_next_goes_when_another_is_back() -> None:
    scene = Scene(4)
    for slot in range(4):
        scene.eject(slot)
    assert scene.slots() == [2, 3]
    scene.time.pass_(10)
    scene.request(0, Outcome.OK)
    scene.request(2, Outcome.TIMEOUT)
    assert scene.slots() == [0, 1, 3]  # 1 is open for its trial


def test_those_left_going_down_brings_the_ejected_back_as_a_last_resort() -> None:
    scene = Scene(2)
    scene.eject(0)
    scene.fleet.set_up(scene.replicas[1], False)
    assert scene.slots() == [0]
    scene.request(0, Outcome.TIMEOUT)
    assert scene.ejector.state(scene.replicas[0]) is State.EJECTED
    scene.request(0, Outcome.OK)
    assert scene.ejector.state(scene.replicas[0]) is State.CLOSED
    assert scene.time.pending == 0


@pytest.mark.parametrize("how", ["restarted", "down and up"])
def test_a_fresh_process_gets_its_trial_at_once(how: str) -> None:
    scene = Scene(2)
    scene.eject(0)
    if how == "restarted":
        scene.fleet.restarted(scene.replicas[0])
    else:
        scene.fleet.set_up(scene.replicas[0], False)
        scene.fleet.set_up(scene.replicas[0], True)
    assert scene.slots() == [0, 1]
    scene.begin(0)
    assert scene.slots() == [1]


def test_the_end_of_an_early_trial_is_not_mistaken_for_the_end_of_the_next_ejection() -> None:
    scene = Scene(2)
    scene.eject(0)
    scene.time.pass_(5)
    scene.fleet.restarted(scene.replicas[0])
    scene.request(0, Outcome.TIMEOUT)
    scene.time.pass_(19.9)
    assert scene.slots() == [1]
    scene.time.pass_(0.2)
    assert scene.slots() == [0, 1]


def test_an_attempt_counts_once() -> None:
    scene = Scene(2)
    attempt = scene.begin(0)
    for _ in range(10):
        scene.end(attempt, Outcome.TIMEOUT)
    assert scene.slots() == [0, 1]


def test_what_an_old_replica_did_does_not_touch_the_next_in_its_slot(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene(3)
    attempts = [scene.begin(0) for _ in range(4)]
    scene.eject(0)
    scene.fleet.remove("replica-1")
    assert scene.time.pending == 0
    fresh = scene.add()
    assert fresh.slot == 0
    for attempt in attempts:
        scene.end(attempt, Outcome.CUT)
    scene.end(scene.ejector.begin(scene.replicas[0]), Outcome.CUT)
    scene.ejector.answered(attempts[0])
    assert scene.slots() == [0, 1, 2]
    assert scene.ejector.state(fresh) is State.CLOSED
    scene.time.pass_(100)
    assert scene.slots() == [0, 1, 2]
    assert "restored" not in caplog.text


def test_close_cancels_what_is_scheduled() -> None:
    scene = Scene(2)
    scene.eject(0)
    assert scene.time.pending == 1
    scene.ejector.close()
    assert scene.time.pending == 0
