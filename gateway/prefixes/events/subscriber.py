"""Follows the KV events of all replicas: sockets to streams, streams to maps.

One `Feed` per replica, with a stream per data-parallel rank. A stream hears its engine through a socket of its own that
the gateway connects, or through the one the gateway has bound for engines that connect themselves; there the topic and
the rank in the message tell whose it is. Replays use a socket each time, so that a late answer is nobody's.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

import zmq

from gateway.prefixes.events.block_map import DEFAULT_MAX_BLOCKS, BlockMap, Chain, free_slowly
from gateway.prefixes.events.sockets import Reader, monitor, replayer, subscriber
from gateway.prefixes.events.sources import Source
from gateway.prefixes.events.stream import Stream
from gateway.prefixes.events.wire import REPLAY_END, BadMessageError, Batch, read_batch, read_sequence, replay_request

logger = logging.getLogger(__name__)

REPLAY_SILENCE_S = 2.0
"""A replay without a message for so long has failed. vLLM looks for requests every 0.1 s."""
_FREE_PER_TURN = 4000
_FREE_EVERY_S = 0.005


class _Line:
    """One stream with its sockets."""

    def __init__(self, owner: "Subscriber", name: str, source: Source, blocks: BlockMap) -> None:
        self.source = source
        self.stream = Stream(blocks, source.replay_endpoint is not None)
        self._owner = owner
        self._name = name
        self._readers: list[Reader] = []
        self._replay: Reader | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._cleared = 0
        self._heard_s = 0.0  # when the replay last said something
        if source.endpoint is not None:
            socket = subscriber(owner.context, source.topic)
            self._readers.append(monitor(socket, self._connected, self._disconnected))
            self._readers.append(Reader(socket, self._receive))
            try:
                socket.connect(source.endpoint)
            except zmq.ZMQError:
                self.close()
                raise
        else:
            self._connected()

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        self._end_replay()

    def restarted(self) -> None:
        self.stream.restarted()
        self.settle()

    def compare(self, engine_blocks: int) -> None:
        garbage = self.stream.blocks.compare(engine_blocks)
        if garbage:
            logger.warning(
                "the exact map of %s (rank %d) had more blocks than the engine", self._name, self.source.rank
            )
            self._owner.free(list(garbage))

    def heard(self, sequence: int, batch: Batch | None) -> None:
        if batch is not None:
            self.stream.lag_s = time.time() - batch.sent_s
        self.stream.live_message(sequence, batch)
        self.settle()

    def settle(self) -> None:
        """Do what the stream wants after it has been told something."""
        stream = self.stream
        first = stream.take_request()
        if first is not None:
            self._start_replay(first)
        garbage = stream.take_garbage()
        if garbage:
            self._owner.free(garbage)
        if stream.clears != self._cleared:
            self._cleared = stream.clears
            logger.info("the exact map of %s (rank %d) starts anew", self._name, self.source.rank)

    def _connected(self) -> None:
        self.stream.connected()
        self.settle()

    def _disconnected(self) -> None:
        self.stream.disconnected()

    def _receive(self, frames: list[bytes]) -> None:
        message = _read(frames)
        if message is None or message[0] < 0:
            self.stream.bad_messages += 1
            return
        self.heard(*message)

    def _start_replay(self, first: int) -> None:
        self._end_replay()
        endpoint = self.source.replay_endpoint
        assert endpoint is not None, "a stream that cannot replay has asked for one"
        self._replay = Reader(replayer(self._owner.context, endpoint), self._replayed)
        self._replay.send(replay_request(first))
        self._timer = self._owner.loop.call_later(self._owner.replay_silence_s, self._replay_timeout)
        self._heard_s = time.monotonic()

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _replayed(self, frames: list[bytes]) -> None:
        self._heard_s = time.monotonic()
        stream = self.stream
        message = _read(frames)
        if message is None:
            stream.bad_messages += 1
            return
        sequence, batch = message
        if sequence == REPLAY_END:
            self._end_replay()
            stream.replay_ended()
        else:
            stream.replayed_message(sequence, batch)
        self.settle()

    def _replay_timeout(self) -> None:
        silent_s = time.monotonic() - self._heard_s
        left_s = self._owner.replay_silence_s - silent_s
        if left_s > 0.001:
            self._timer = self._owner.loop.call_later(left_s, self._replay_timeout)
            return
        self._timer = None
        self._end_replay()
        logger.warning("%s (rank %d) does not answer a replay of its KV events", self._name, self.source.rank)
        self.stream.replay_failed()
        self.settle()


class Feed:
    """The events of one replica.

    Attributes:
        sources: its publishers.
        streams: the same, in order of rank.
    """

    def __init__(self, sources: Sequence[Source], lines: Sequence[_Line]) -> None:
        self.sources = tuple(sources)
        self.streams = tuple(line.stream for line in lines)
        self._lines = lines

    @property
    def live(self) -> bool:
        """The maps of all ranks are current."""
        return all(stream.live for stream in self.streams)

    @property
    def sure(self) -> bool:
        """The maps of all ranks are current and lack nothing."""
        return all(stream.sure for stream in self.streams)

    def restarted(self) -> None:
        """The replica's process is a new one."""
        for line in self._lines:
            line.restarted()

    def compare(self, engine_blocks: int) -> None:
        """Hold the maps against the size of the replica's memory, all ranks together."""
        for line in self._lines:
            line.compare(engine_blocks // len(self._lines))


class Subscriber:
    """All feeds. Use it on one event loop.

    Attributes:
        bound_port: port on which engines are waited for; None if they are not.
        unknown_messages: messages of engines nobody has told of.
        bad_messages: messages on the bound socket that cannot be read.
    """

    def __init__(
        self,
        chain: Chain,
        bind: str | None = None,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        replay_silence_s: float = REPLAY_SILENCE_S,
    ) -> None:
        """Begin without feeds; must be called with a running event loop.

        Args:
            chain: names prefixes of tokens.
            bind: endpoint to bind for engines that connect themselves, `tcp://*:5557`; None for none.
            max_blocks: blocks remembered per engine.
            replay_silence_s: a replay without a message for so long has failed.

        Raises:
            OSError: the endpoint cannot be bound.
        """
        self.loop = asyncio.get_running_loop()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.replay_silence_s = replay_silence_s
        self.unknown_messages = 0
        self.bad_messages = 0
        self.bound_port: int | None = None
        self._chain = chain
        self._max_blocks = max_blocks
        self._feeds: list[Feed] = []
        self._by_topic: dict[tuple[bytes, int], _Line] = {}
        self._garbage: list[object] = []
        self._freeing: asyncio.TimerHandle | None = None
        self._bound: Reader | None = None
        if bind is not None:
            self._bind(bind)

    def open(self, name: str, sources: Sequence[Source]) -> Feed:
        """Follow a replica.

        Args:
            name: the replica's, for the log.
            sources: its publishers.

        Raises:
            ValueError: an endpoint is malformed.
        """
        lines: list[_Line] = []
        try:
            for source in sources:
                lines.append(_Line(self, name, source, BlockMap(self._chain, self._max_blocks)))
        except zmq.ZMQError as error:
            for line in lines:
                line.close()
            raise ValueError(f"endpoint {source.endpoint} or {source.replay_endpoint}: {error}") from error
        for line in lines:
            if line.source.endpoint is None:
                self._by_topic[line.source.topic.encode(), line.source.rank] = line
        feed = Feed(sources, lines)
        self._feeds.append(feed)
        return feed

    def close_feed(self, feed: Feed) -> None:
        """Stop following a replica."""
        if feed in self._feeds:
            self._feeds.remove(feed)
            for line in feed._lines:
                line.close()
                self.free(list(line.stream.blocks.clear(complete=False)))
                key = (line.source.topic.encode(), line.source.rank)
                if self._by_topic.get(key) is line:
                    del self._by_topic[key]

    def close(self) -> None:
        """Close everything at once."""
        for feed in list(self._feeds):
            self.close_feed(feed)
        if self._bound is not None:
            self._bound.close()
        if self._freeing is not None:
            self._freeing.cancel()
        self.context.destroy(linger=0)

    def free(self, garbage: list[object]) -> None:
        """Free what a cleared map has left behind, little by little."""
        self._garbage.extend(garbage)
        if self._freeing is None:
            self._freeing = self.loop.call_later(_FREE_EVERY_S, self._free)

    def _free(self) -> None:
        self._freeing = None
        if free_slowly(self._garbage, _FREE_PER_TURN):
            self._freeing = self.loop.call_later(_FREE_EVERY_S, self._free)

    def _bind(self, endpoint: str) -> None:
        socket = subscriber(self.context, "")
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.context.destroy(linger=0)
            raise OSError(error.errno, f"cannot bind {endpoint} for KV events: {error}") from error
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        port = bound.rpartition(b":")[2].rstrip(b"\0")
        self.bound_port = int(port) if port.isdigit() else None
        self._bound = Reader(socket, self._receive)

    def _receive(self, frames: list[bytes]) -> None:
        message = _read(frames)
        if message is None or message[0] < 0 or message[1] is None:
            self.bad_messages += 1
            return
        sequence, batch = message
        line = self._by_topic.get((frames[0], batch.rank)) if batch is not None else None
        if line is None:
            self.unknown_messages += 1
            return
        line.heard(sequence, batch)


def _read(frames: list[bytes]) -> tuple[int, Batch | None] | None:
    """Sequence number and batch of a message, live or replayed: the last two frames. None if it is no message."""
    if len(frames) < 3:
        return None
    try:
        sequence = read_sequence(frames[-2])
    except BadMessageError:
        return None
    if sequence == REPLAY_END:
        return sequence, None
    try:
        return sequence, read_batch(frames[-1])
    except BadMessageError:
        return sequence, None
