"""The rings: bytes that several workers write and read in one memory, each its own, without locks."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sharing import rings as rings_module
from gateway.sharing.board import Board, open_memory
from gateway.sharing.rings import MOST_BYTES, PLACE_BYTES, Rings

PLACES = 3
SMALL_RING, SMALL_MESSAGE = 120, 20

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("tell"), st.integers(0, PLACES - 1), st.integers(0, SMALL_MESSAGE)),
        st.tuples(st.just("read"), st.integers(0, PLACES - 1), st.integers(1, 9)),
        st.tuples(st.just("join"), st.integers(0, PLACES - 1), st.just(0)),
    ),
    max_size=80,
)


@pytest.fixture
def small() -> Iterator[memoryview]:
    """Memory for rings that are soon full."""
    with mock.patch.multiple(rings_module, RING_BYTES=SMALL_RING, MOST_BYTES=SMALL_MESSAGE, PLACE_BYTES=8 + SMALL_RING):
        yield memoryview(bytearray(PLACES * (8 + SMALL_RING)))


def read(rings: Rings, most: int = 1 << 30) -> list[tuple[int, bytes | None]]:
    found = []
    for item in rings.news():
        found.append(item)
        if len(found) == most:
            break
    return found


@given(OPERATIONS)
def test_all_hear_everything_in_order_or_that_they_have_missed_something(operations: list[tuple[Any, ...]]) -> None:
    with mock.patch.multiple(rings_module, RING_BYTES=SMALL_RING, MOST_BYTES=SMALL_MESSAGE, PLACE_BYTES=8 + SMALL_RING):
        memory = memoryview(bytearray(PLACES * (8 + SMALL_RING)))
        workers = [Rings(memory, place) for place in range(PLACES)]
        told: list[list[bytes]] = [[] for _ in range(PLACES)]
        # By reader and writer: how many of its messages the reader has heard, or missed.
        heard = [[0] * PLACES for _ in range(PLACES)]
        for number, (what, place, value) in enumerate(operations):
            if what == "tell":
                message = bytes([number]) * value
                workers[place].tell(message)
                told[place].append(message)
            elif what == "join":
                # A worker that takes the place of one that died writes on behind it, and asks for nothing of before.
                workers[place] = Rings(memory, place)
                heard[place] = [len(messages) for messages in told]
            else:
                hear(workers[place], place, value, told, heard[place])
        for place, worker in enumerate(workers):
            hear(worker, place, 1 << 30, told, heard[place])
            assert not worker.has_news
            assert all(heard[place][writer] == len(told[writer]) for writer in range(PLACES) if writer != place)


def hear(worker: Rings, own: int, most: int, told: list[list[bytes]], heard: list[int]) -> None:
    for writer, message in read(worker, most):
        assert writer != own
        unheard = told[writer][heard[writer] :]
        if message is None:
            assert sum(len(message) + 12 for message in unheard) > SMALL_RING - SMALL_MESSAGE - 12
            heard[writer] = len(told[writer])
        else:
            assert message == unheard[0]
            heard[writer] += 1


def test_who_is_on_the_way_over_the_oldest_has_not_been_heard_wrongly(small: memoryview) -> None:
    writer, reader = Rings(small, 0), Rings(small, 1)
    for number in range(3):
        writer.tell(bytes([number]) * 8)
    # As if the process had been stopped before its head went on; the third message is a little written over.
    writer._memory[45] ^= 1
    assert read(reader) == [(0, bytes(8)), (0, b"\1" * 8), (0, None)]
    writer.tell(b"next")
    assert read(reader) == [(0, b"next")]


def test_a_message_that_was_never_finished_is_written_over(small: memoryview) -> None:
    writer, reader = Rings(small, 0), Rings(small, 1)
    writer._put(0, 0, b"\xff" * 30)
    assert not reader.has_news
    Rings(small, 0).tell(b"another")
    assert read(reader) == [(0, b"another")]


def test_a_length_that_cannot_be_is_not_read(small: memoryview) -> None:
    writer, reader = Rings(small, 0), Rings(small, 1)
    writer.tell(b"message")
    writer._memory[:4] = b"\xff" * 4
    assert read(reader) == [(0, None)]


def test_what_is_too_long_is_refused() -> None:
    rings = Rings(memoryview(bytearray(PLACE_BYTES)), 0)
    rings.tell(bytes(MOST_BYTES))
    with pytest.raises(ValueError, match="MOST_BYTES"):
        rings.tell(bytes(MOST_BYTES + 1))


_HAMMER = """
import sys
from gateway.sharing.board import Board
rings = Board(int(sys.argv[1]), 0).rings
for number in range(1, 100_001):
    rings.tell(b"%06d" % number * (number % 50 + 1))
"""


def test_another_process_writes_while_this_one_reads() -> None:
    descriptor = open_memory(2)
    rings = Board(descriptor, 1).rings
    process = subprocess.Popen([sys.executable, "-c", _HAMMER, str(descriptor)], pass_fds=(descriptor,))
    last = heard = 0
    missed = True
    while True:
        ended = process.poll() is not None
        for place, message in rings.news():
            assert place == 0
            if message is None:
                missed = True
                continue
            number = int(message[:6])
            assert message == b"%06d" % number * (number % 50 + 1)
            assert number > last if missed else number == last + 1
            last, missed = number, False
            heard += 1
        if ended:
            break
    assert process.returncode == 0
    assert last == 100_000 or missed
    assert heard > 1000
    os.close(descriptor)
