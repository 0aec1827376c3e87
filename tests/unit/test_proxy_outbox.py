"""Writes are held back until the event loop's turn ends."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.outbox import Outbox, Writer
from tests.support.exchanges import FakeTransport


class Loop:
    """Of an event loop, only its turns."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def turn(self) -> None:
        due = list(self.soon)
        self.soon.clear()
        for call in due:
            call()


class Bench:
    def __init__(self, connections: int = 1) -> None:
        self.loop = Loop()
        self.outbox = Outbox()
        self.outbox.open(self.loop.soon.append)
        self.transports = [FakeTransport() for _ in range(connections)]
        self.writers = [Writer(self.outbox, transport) for transport in self.transports]


def test_nothing_leaves_before_the_turn_ends_and_then_in_one_write() -> None:
    bench = Bench()
    bench.writers[0].write(b"head ")
    bench.writers[0].write(b"body")
    assert bench.transports[0].sent == b""
    assert len(bench.loop.soon) == 1
    bench.loop.turn()
    assert bench.transports[0].sent == b"head body"
    assert bench.transports[0].writes == 1


def test_one_call_per_turn_serves_all_connections() -> None:
    bench = Bench(3)
    for number, writer in enumerate(bench.writers):
        writer.write(b"%d" % number)
    assert len(bench.loop.soon) == 1
    bench.loop.turn()
    assert [transport.sent for transport in bench.transports] == [b"0", b"1", b"2"]
    bench.writers[1].write(b"again")
    bench.loop.turn()
    assert bench.transports[1].sent == b"1again"


def test_until_it_is_opened_and_once_it_is_closed_writes_go_through() -> None:
    transport, outbox, loop = FakeTransport(), Outbox(), Loop()
    writer = Writer(outbox, transport)
    writer.write(b"a")
    assert transport.sent == b"a"
    outbox.open(loop.soon.append)
    writer.write(b"b")
    assert transport.sent == b"a"
    outbox.close()
    assert transport.sent == b"ab"
    writer.write(b"c")
    assert transport.sent == b"abc"
    loop.turn()
    assert transport.sent == b"abc"


def test_what_is_dropped_is_not_sent() -> None:
    bench = Bench(2)
    for writer in bench.writers:
        writer.write(b"x")
    bench.writers[0].drop()
    bench.loop.turn()
    assert [transport.sent for transport in bench.transports] == [b"", b"x"]


def test_a_transport_that_has_been_closed_meanwhile_is_not_written_to() -> None:
    bench = Bench(2)
    for writer in bench.writers:
        writer.write(b"x")
    bench.transports[0].abort()
    bench.loop.turn()
    assert [transport.sent for transport in bench.transports] == [b"", b"x"]


def test_a_connection_whose_write_fails_does_not_keep_the_others_bytes(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(3)

    def fail() -> None:
        raise RuntimeError("broken transport")

    bench.transports[1].when_full = fail
    for writer in bench.writers:
        writer.write(b"x")
    bench.loop.turn()
    assert bench.transports[2].sent == b"x"
    assert "could not be written" in caplog.text


def test_back_pressure_begins_before_the_turn_ends() -> None:
    """One that takes nothing must be known to the exchange before megabytes are held for it."""
    bench, paused = Bench(), list[bool]()
    bench.transports[0].when_full = lambda: paused.append(True)
    bench.writers[0].write(bytes(60 << 10))
    assert not paused
    bench.writers[0].write(bytes(10 << 10))
    assert paused
    assert len(bench.transports[0].sent) == 70 << 10
    bench.loop.turn()
    assert bench.transports[0].writes == 1


def test_what_a_write_leads_to_is_sent_in_the_next_turn() -> None:
    bench = Bench(2)
    bench.transports[0].when_full = lambda: bench.writers[1].write(b"answer")
    bench.writers[0].write(b"x")
    bench.loop.turn()
    assert bench.transports[1].sent == b""
    bench.loop.turn()
    assert bench.transports[1].sent == b"answer"


@given(
    st.lists(
        st.one_of(st.tuples(st.integers(0, 2), st.integers(1, 50_000)), st.just("turn"), st.just("flush")), max_size=40
    )
)
def test_every_connection_gets_its_bytes_in_order(steps: list[object]) -> None:
    bench, expected, counter = Bench(3), [b"", b"", b""], 0
    for step in steps:
        if isinstance(step, tuple):
            number, size = step
            counter += 1
            data = b"%d," % counter * (size // 4 + 1)
            expected[number] += data
            bench.writers[number].write(data)
        elif step == "turn":
            bench.loop.turn()
            assert [transport.sent for transport in bench.transports] == expected
        else:
            bench.writers[0].flush()
            assert bench.transports[0].sent == expected[0]
    bench.loop.turn()
    assert [transport.sent for transport in bench.transports] == expected
