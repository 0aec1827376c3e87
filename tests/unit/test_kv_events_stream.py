"""One publisher's messages in order: gaps, replays, restarts, duplicates, what cannot be read. No sockets.

`Publisher` is a vLLM publisher as a list: it numbers messages, keeps the last ones for replay, and may start again.
"""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prefixes.events.block_map import BlockMap
from gateway.prefixes.events.stream import MAX_WAITING, Phase, Stream
from gateway.prefixes.events.wire import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event
from gateway.prompt.token_chain import TokenChain, TokenPrompt, pack


def block(number: int) -> list[int]:
    return [number, number]


def stored(number: int) -> BlockStored:
    return BlockStored([number], None, block(number), 2, medium="GPU")


def removed(number: int) -> BlockRemoved:
    return BlockRemoved([number], medium="GPU")


def name(number: int) -> int:
    return TokenPrompt(pack(block(number))).hashes(2)[0]


class Publisher:
    """A publisher, and the truth about its cache."""

    clock = 0.0

    def __init__(self, buffer: int = 1000) -> None:
        self.sent: list[tuple[int, Batch]] = []
        self.buffer = buffer
        self.held: dict[int, int] = {}

    def publish(self, *events: Event) -> tuple[int, Batch]:
        Publisher.clock += 1.0
        for event in events:
            if isinstance(event, BlockStored):
                self.held[event.token_ids[0]] = self.held.get(event.token_ids[0], 0) + 1
            elif isinstance(event, BlockRemoved):
                number = event.block_hashes[0]
                assert isinstance(number, int)
                self.held[number] -= 1
            else:
                self.held.clear()
        message = (len(self.sent), Batch(Publisher.clock, list(events), 0))
        self.sent.append(message)
        return message

    def truth(self) -> frozenset[int]:
        return frozenset(name(number) for number, count in self.held.items() if count)

    def answer(self, stream: Stream, first: int, drop: set[int] | None = None) -> None:
        """Answer a replay."""
        for sequence, batch in self.sent[-self.buffer :]:
            if sequence >= first and sequence not in (drop or ()):
                stream.replayed_message(sequence, batch)
                if stream.phase is not Phase.REPLAYING or stream.take_request_pending():
                    return
        stream.replay_ended()


class FollowedStream(Stream):
    """A stream whose wish for a replay can be looked at."""

    __slots__ = ()

    def take_request_pending(self) -> bool:
        return self._replay_from is not None


def new(can_replay: bool = True) -> FollowedStream:
    return FollowedStream(BlockMap(TokenChain()), can_replay)


def settle(stream: Stream, publisher: Publisher, limit: int = 20) -> None:
    """Answer replays until none is asked for."""
    for _ in range(limit):
        first = stream.take_request()
        if first is None:
            return
        publisher.answer(stream, first)
    raise AssertionError("asks for ever")


def test_from_the_first_message_on_nothing_is_missing() -> None:
    stream, publisher = new(can_replay=False), Publisher()
    stream.live_message(*publisher.publish(stored(1), stored(2)))
    stream.live_message(*publisher.publish(removed(1)))
    assert stream.sure
    assert stream.blocks.hashes() == publisher.truth() == frozenset({name(2)})
    assert (stream.messages, stream.events, stream.gaps) == (2, 3, 0)


def test_a_gateway_that_comes_later_asks_for_what_was_before() -> None:
    stream, publisher = new(), Publisher()
    publisher.publish(stored(1))
    publisher.publish(stored(2), removed(1))
    stream.connected()
    stream.live_message(*publisher.publish(stored(3)))  # meanwhile
    assert not stream.live
    assert stream.blocks.hashes() == frozenset()
    settle(stream, publisher)
    assert stream.sure
    assert stream.blocks.hashes() == publisher.truth()
    assert stream.gaps == 0
    assert stream.duplicates == 1  # the replay had it too


def test_an_engine_that_has_told_nothing_has_nothing() -> None:
    stream, publisher = new(), Publisher()
    stream.connected()
    settle(stream, publisher)
    assert stream.sure
    stream.live_message(*publisher.publish(stored(1)))
    assert stream.blocks.hashes() == publisher.truth()


def test_a_publisher_that_has_forgotten_its_beginning_leaves_the_map_incomplete() -> None:
    stream, publisher = new(), Publisher(buffer=2)
    for number in range(5):
        publisher.publish(stored(number))
    stream.connected()
    settle(stream, publisher)
    assert stream.live
    assert not stream.sure
    assert stream.blocks.hashes() == frozenset({name(3), name(4)})
    stream.live_message(*publisher.publish(AllBlocksCleared(), stored(9)))
    assert stream.sure
    assert stream.blocks.hashes() == publisher.truth()


def test_without_replay_the_first_message_decides_whether_the_map_is_complete() -> None:
    stream, publisher = new(can_replay=False), Publisher()
    publisher.publish(stored(1))
    stream.live_message(*publisher.publish(stored(2)))
    assert stream.live
    assert not stream.sure


def test_a_gap_is_filled_by_a_replay() -> None:
    stream, publisher = new(), Publisher()
    stream.live_message(*publisher.publish(stored(1)))
    settle(stream, publisher)
    publisher.publish(stored(2))  # lost
    publisher.publish(removed(1))  # lost
    stream.live_message(*publisher.publish(stored(3)))
    assert stream.take_request_pending()
    stream.live_message(*publisher.publish(stored(4)))
    settle(stream, publisher)
    assert stream.sure
    assert stream.blocks.hashes() == publisher.truth()
    assert (stream.gaps, stream.clears) == (1, 0)


def test_a_gap_that_no_replay_can_fill_empties_the_map() -> None:
    stream, publisher = new(can_replay=False), Publisher()
    stream.live_message(*publisher.publish(stored(1)))
    publisher.publish(removed(1))  # lost
    stream.live_message(*publisher.publish(stored(3)))
    assert (stream.gaps, stream.clears, stream.replays) == (1, 1, 0)
    assert stream.live
    assert not stream.sure
    assert stream.blocks.hashes() == frozenset({name(3)})


def test_a_gap_whose_messages_the_publisher_has_no_more_empties_the_map() -> None:
    stream, publisher = new(), Publisher(buffer=2)
    stream.live_message(*publisher.publish(stored(1)))
    settle(stream, publisher)
    for number in range(2, 7):
        publisher.publish(stored(number))  # all lost
    stream.live_message(*publisher.publish(stored(7)))
    settle(stream, publisher)
    assert stream.clears == 1
    assert not stream.sure
    assert stream.blocks.hashes() == frozenset({name(6), name(7)})


def test_a_replay_without_an_answer_empties_the_map_and_life_goes_on() -> None:
    stream, publisher = new(), Publisher()
    stream.live_message(*publisher.publish(stored(1)))
    settle(stream, publisher)
    publisher.publish(stored(2))
    stream.live_message(*publisher.publish(stored(3)))
    assert stream.take_request() == 0
    stream.live_message(*publisher.publish(stored(4)))
    stream.replay_failed()
    assert stream.take_request() is None
    assert stream.clears == 1
    assert stream.blocks.hashes() == frozenset({name(3), name(4)})
    stream.live_message(*publisher.publish(removed(3)))
    assert stream.blocks.hashes() == frozenset({name(4)})


def test_a_replay_with_a_hole_is_asked_for_again() -> None:
    """A ROUTER socket drops what it cannot take, in the middle of a replay."""
    stream, publisher = new(), Publisher()
    for number in range(6):
        publisher.publish(stored(number))
    stream.connected()
    assert stream.take_request() == 0
    publisher.answer(stream, 0, drop={2, 3})
    assert stream.take_request() == 1
    publisher.answer(stream, 1)
    assert stream.take_request() is None
    assert stream.sure
    assert stream.blocks.hashes() == publisher.truth()


def test_a_sequence_that_starts_again_is_another_process() -> None:
    stream, publisher = new(can_replay=False), Publisher()
    for number in range(4):
        stream.live_message(*publisher.publish(stored(number)))
    publisher = Publisher()
    stream.live_message(*publisher.publish(stored(8)))
    assert (stream.restarts, stream.gaps) == (1, 0)
    assert stream.sure
    assert stream.blocks.hashes() == publisher.truth()


def test_a_restart_whose_first_messages_were_missed() -> None:
    stream, publisher = new(), Publisher()
    for number in range(6):
        stream.live_message(*publisher.publish(stored(number)))
        settle(stream, publisher)
    publisher = Publisher()
    publisher.publish(stored(7))
    publisher.publish(stored(8))
    stream.live_message(*publisher.publish(stored(9)))
    settle(stream, publisher)
    assert stream.restarts == 1
    assert stream.sure
    assert stream.blocks.hashes() == publisher.truth()


def test_a_restart_that_has_got_further_than_the_old_process_is_noticed_by_its_clock() -> None:
    stream, publisher = new(), Publisher()
    for number in range(2):
        stream.live_message(*publisher.publish(stored(number)))
        settle(stream, publisher)
    publisher = Publisher()
    for number in range(10, 15):
        publisher.publish(stored(number))
    stream.live_message(*publisher.publish(stored(15)))
    settle(stream, publisher)
    assert stream.restarts == 1
    assert stream.sure
    assert stream.blocks.hashes() == publisher.truth()


def test_a_reconnection_learns_what_was_missed_without_waiting_for_a_message() -> None:
    stream, publisher = new(), Publisher()
    stream.connected()
    settle(stream, publisher)
    stream.live_message(*publisher.publish(stored(1)))
    stream.disconnected()
    assert not stream.live
    publisher.publish(stored(2), removed(1))
    stream.connected()
    settle(stream, publisher)
    assert stream.sure
    assert stream.blocks.hashes() == publisher.truth()
    assert stream.restarts == 0


def test_a_reconnection_to_a_new_process_that_has_told_less() -> None:
    stream, publisher = new(), Publisher()
    stream.connected()
    settle(stream, publisher)
    for number in range(5):
        stream.live_message(*publisher.publish(stored(number)))
    stream.disconnected()
    publisher = Publisher()
    publisher.publish(stored(9))
    stream.connected()
    settle(stream, publisher)
    assert stream.restarts == 1
    assert stream.sure
    assert stream.blocks.hashes() == publisher.truth()


def test_a_restart_known_from_elsewhere() -> None:
    stream, publisher = new(), Publisher()
    stream.connected()
    settle(stream, publisher)
    stream.live_message(*publisher.publish(stored(1)))
    publisher = Publisher()
    publisher.publish(stored(2))
    stream.restarted()
    settle(stream, publisher)
    assert stream.sure
    assert stream.blocks.hashes() == publisher.truth()


def test_a_restart_known_from_elsewhere_after_it_was_noticed_keeps_what_cannot_be_asked_for() -> None:
    stream, publisher = new(can_replay=False), Publisher()
    stream.live_message(*publisher.publish(stored(1)))
    publisher = Publisher()
    stream.live_message(*publisher.publish(stored(2)))
    stream.restarted()
    assert stream.sure
    assert stream.blocks.hashes() == publisher.truth()
    stream.restarted()  # and another one, not noticed here
    assert stream.blocks.hashes() == frozenset()


def test_what_cannot_be_read_is_counted_and_left_out() -> None:
    stream, publisher = new(can_replay=False), Publisher()
    stream.live_message(*publisher.publish(stored(1)))
    stream.live_message(1, None)
    publisher.publish()
    stream.live_message(*publisher.publish(stored(3)))
    assert (stream.bad_messages, stream.gaps) == (1, 0)
    assert stream.blocks.hashes() == publisher.truth()


def test_too_many_waiting_for_a_replay() -> None:
    stream, publisher = new(), Publisher()
    publisher.publish(stored(0))
    for number in range(1, MAX_WAITING + 2):
        stream.live_message(*publisher.publish(stored(number), removed(number)))
    assert stream.phase is Phase.LIVE
    assert not stream.sure


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_lost_the_map_is_true_once_all_is_quiet(seed: int) -> None:
    """Losses, reconnections and restarts in any order."""
    generator = random.Random(seed)
    stream, publisher = new(), Publisher()
    stream.connected()
    number = 0
    for _ in range(generator.randrange(1, 60)):
        chance = generator.random()
        number += 1
        if chance < 0.05:
            stream.disconnected()
            publisher = Publisher()
            stream.connected()
        elif chance < 0.1:
            stream.disconnected()
            publisher.publish(stored(number))
            stream.connected()
        else:
            held = [n for n, count in publisher.held.items() if count]
            event = removed(generator.choice(held)) if held and generator.random() < 0.4 else stored(number)
            message = publisher.publish(event)
            if generator.random() < 0.8:
                stream.live_message(*message)
        if generator.random() < 0.7:
            settle(stream, publisher)
    settle(stream, publisher)
    stream.live_message(*publisher.publish(stored(number + 1)))
    settle(stream, publisher)
    assert stream.sure
    assert stream.blocks.hashes() == publisher.truth()
