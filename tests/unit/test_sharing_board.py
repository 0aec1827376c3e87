"""The board: memory that several workers write and read, each its own row, without locks."""

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.replicas.load import NO_LOAD, Load
from gateway.sharing import board as board_module
from gateway.sharing.board import Board, open_memory

PLACES = 3


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = open_memory(PLACES)
    yield descriptor
    os.close(descriptor)


def load_of(number: int) -> Load:
    return Load(number, number % 3, 10.5 * number, 0.25 * number, 7.0 * number, 3.5 * number, 1.5 * number)


class View:
    """What somebody knows who reads all news."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.rows: dict[int, tuple[int, dict[int, Load]]] = {}

    def read(self) -> dict[int, dict[int, Load]]:
        for place, writer, anew, loads in self.board.news():
            known = {} if anew else self.rows[place][1]
            self.rows[place] = (writer, known | loads)
        return {
            writer: {identity: load for identity, load in loads.items() if load.in_flight}
            for writer, loads in self.rows.values()
            if writer
        }


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("post"), st.integers(0, PLACES - 1), st.integers(1, 6), st.integers(0, 5)),
        st.tuples(st.just("replace"), st.integers(0, PLACES - 1)),
        st.tuples(st.just("clear"), st.integers(0, PLACES - 1)),
        st.tuples(st.just("read"), st.integers(0, PLACES - 1)),
        st.tuples(st.just("many"), st.integers(0, PLACES - 1), st.integers(1, 3)),
    ),
    max_size=60,
)


@given(OPERATIONS, st.sampled_from([3, 2048]))
def test_who_reads_now_and_then_knows_what_was_posted_last(operations: list[tuple[Any, ...]], entries: int) -> None:
    with mock.patch.object(board_module, "ENTRIES", entries):
        descriptor = open_memory(PLACES)
        try:
            _compare(operations, descriptor, entries)
        finally:
            os.close(descriptor)


def _compare(operations: list[tuple[Any, ...]], descriptor: int, entries: int) -> None:
    numbers = iter(range(1, 1000))
    truth: dict[int, dict[int, Load]] = {}
    writers: dict[int, int] = {}
    boards: dict[int, Board] = {}
    views = {place: View(Board(descriptor, place)) for place in range(PLACES)}
    supervisor = Board(descriptor)

    def enter(place: int) -> None:
        truth.pop(writers.get(place, 0), None)
        boards[place] = Board(descriptor, place)
        writers[place] = next(numbers)
        boards[place].enter(writers[place])
        truth[writers[place]] = {}

    def post(place: int, identity: int, number: int) -> None:
        known = truth[writers[place]]
        if number == 0:
            known.pop(identity, None)
        elif identity in known or len(known) < entries:
            known[identity] = load_of(number)
        boards[place].post(identity, load_of(number) if number else NO_LOAD)

    for what, place, *details in operations:
        match what:
            case "replace":
                enter(place)
            case "clear":
                truth.pop(writers.pop(place, 0), None)
                boards.pop(place, None)
                supervisor.clear(place)
            case "post" if place in boards:
                post(place, *details)
            case "many" if place in boards:
                for number in range(30 * details[0]):  # more than the ring remembers, at last
                    post(place, 1 + number % 5, 1 + number % 7)
            case "read":
                others = {writer: loads for at, writer in writers.items() if at != place for loads in [truth[writer]]}
                assert views[place].read() == others
    for place, view in views.items():
        assert view.read() == {writer: truth[writer] for at, writer in writers.items() if at != place}
        assert view.board.news() == []


def test_what_one_says_oneself_is_no_news(memory: int) -> None:
    one, other = Board(memory, 0), Board(memory, 1)
    one.enter(7)
    one.post(11, load_of(1))
    assert not one.has_news
    other.enter(8)
    assert one.has_news
    one.post(11, load_of(2))
    assert [news.writer for news in one.news()] == [8]
    assert not one.has_news


def test_an_entry_that_is_being_written_is_read_when_it_has_been(memory: int) -> None:
    writer, view = Board(memory, 0), View(Board(memory, 1))
    writer.enter(7)
    writer.post(11, load_of(1))
    assert view.read() == {7: {11: load_of(1)}}
    whole = bytes(writer._memory)
    writer.post(11, load_of(2))
    # As if the process had been stopped between the entry's first version and its last.
    place = bytes(writer._memory).rindex(struct.pack("=Q", 11)) - 8
    last = place + 8 + board_module._SAYS.size
    version = bytes(writer._memory[last : last + 8])
    writer._memory[last : last + 8] = whole[last : last + 8]
    assert view.read() == {7: {11: load_of(1)}}
    writer._memory[last : last + 8] = version
    writer.post(12, load_of(3))
    writer.post(11, load_of(4))
    assert view.read() == {7: {11: load_of(4), 12: load_of(3)}}


_HAMMER = """
import sys
from gateway.replicas.load import Load
from gateway.sharing.board import Board
board = Board(int(sys.argv[1]), 0)
board.enter(5)
for number in range(1, 30_001):
    board.post(number % 40, Load(number, number, *[float(number)] * 5))
"""


def test_another_process_writes_while_this_one_reads(memory: int) -> None:
    view = View(Board(memory, 1))
    process = subprocess.Popen([sys.executable, "-c", _HAMMER, str(memory)], pass_fds=(memory,))
    reads = 0
    while process.poll() is None:
        for loads in view.read().values():
            for identity, load in loads.items():
                assert len(set(load)) == 1, "halves of two entries"
                assert load.in_flight % 40 == identity
        reads += 1
    assert process.returncode == 0
    assert reads > 10
    found = view.read()[5]
    assert {load.in_flight for load in found.values()} == set(range(29_961, 30_001))
