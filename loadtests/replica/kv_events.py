"""The replica's KV-event feed, as vLLM 0.32 publishes it (`vllm/distributed/kv_events.py`): same bytes, same sockets.

A PUB socket sends one message per engine step that stored or evicted blocks, numbered from 0; a ROUTER socket sends the
last of them again to whoever asks. An endpoint with a wildcard is bound, another one connected to.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from gateway.prefixes.events.sockets import Reader
from loadtests.engine import EngineRequest, StepResult, StoredBlocks

BUFFER_STEPS = 10_000
HWM = 100_000
_END = (-1).to_bytes(8, "big", signed=True)


class _Event(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    pass


class BlockStored(_Event, omit_defaults=True, gc=False):
    """Fields in vLLM's order."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(_Event, omit_defaults=True, gc=False):
    """One hash per event."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event, omit_defaults=True, gc=False):
    """The cache is empty."""


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step did."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """The tokens of a request, prompt and answer, and what else is in its block hashes."""

    data: bytes
    width: int
    lora: str
    cache_salt: str

    def ids(self, first: int, end: int) -> list[int]:
        """Token ids of a range."""
        data, width = self.data, self.width
        return [int.from_bytes(data[i : i + width], "little") for i in range(first * width, end * width, width)]


class Publisher:
    """The sockets of one engine. On the running event loop."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str,
        rank: int = 0,
        buffer_steps: int = BUFFER_STEPS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Bind or connect.

        Args:
            endpoint: of the events; port 0 for a free one.
            replay_endpoint: of the replays; None for none.
            topic: what messages begin with.
            rank: data-parallel rank.
            buffer_steps: messages kept for replays.
            clock: seconds since the epoch.

        Raises:
            OSError: an endpoint is taken.
        """
        self.topic = topic
        self.rank = rank
        self.drop = 0
        """So many of the next messages are not sent, but kept for replays."""
        self._clock = clock
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._sequence = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replay: Reader | None = None
        self.replay_endpoint: str | None = None
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(HWM)
            self._pub.setsockopt(zmq.LINGER, 0)
            if is_bound(endpoint):
                self.endpoint = _bind(self._pub, endpoint)
            else:
                self._pub.connect(endpoint)
                self.endpoint = endpoint
            if replay_endpoint is not None:
                self._router = self._context.socket(zmq.ROUTER)
                self._router.set_hwm(HWM)
                self.replay_endpoint = _bind(self._router, replay_endpoint)
                self._replay = Reader(self._router, self._asked)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"{endpoint}, {replay_endpoint}: {error}") from error

    def publish(self, events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        """Send a batch."""
        payload = self._encoder.encode(Batch(self._clock(), list(events), self.rank))
        sequence, self._sequence = self._sequence, self._sequence + 1
        if self.drop:
            self.drop -= 1
        else:
            self.send_raw(sequence, payload)
        self._buffer.append((sequence, payload))

    def send_raw(self, sequence: int, payload: bytes) -> None:
        """Send bytes that may be no batch."""
        self._pub.send_multipart([self.topic.encode(), sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    def source(self) -> dict[str, Any]:
        """What GET /kv_event_sources tells of this publisher."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": self._buffer.maxlen,
            "hwm": HWM,
            "max_queue_size": 100_000,
            "topic": self.topic,
        }

    def close(self) -> None:
        """Close the sockets."""
        if self._replay is not None:
            self._replay.close()
        self._pub.close(linger=0)
        self._context.destroy(linger=0)

    def _asked(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            return
        client, _, first = frames
        start = int.from_bytes(first, "big")
        for sequence, payload in self._buffer:
            if sequence >= start:
                self._router.send_multipart(
                    [client, b"", self.topic.encode(), sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK
                )
        self._router.send_multipart([client, b"", b"", _END, b""], zmq.NOBLOCK)


class KvFeed:
    """Turns what the engine did into events."""

    def __init__(self, publisher: Publisher, block_size: int) -> None:
        self.publisher = publisher
        self._block_size = block_size
        self._sequences: dict[EngineRequest, TokenSequence] = {}
        self._aborted: list[EngineRequest] = []
        self._cleared = False
        self._removed: list[int] = []

    def submitted(self, request: EngineRequest, data: bytes, width: int, lora: str, cache_salt: str) -> None:
        """A request has been handed to the engine.

        Args:
            request: the request.
            data: tokens of prompt and answer.
            width: bytes per token.
            lora: adapter, or "".
            cache_salt: salt, or "".
        """
        self._sequences[request] = TokenSequence(data, width, lora, cache_salt)

    def aborted(self, request: EngineRequest) -> None:
        """A request has been dropped. Steps that are done but not told yet may still speak of it."""
        self._aborted.append(request)

    def stepped(self, result: StepResult) -> None:
        """A step is over."""
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        if self._cleared:
            events.append(AllBlocksCleared())
            self._cleared = False
        removed, self._removed = self._removed, []
        for block_hash in (*removed, *result.removed):
            events.append(BlockRemoved([block_hash], "GPU", 0))
        for stored in result.stored:
            events.append(self._stored(stored))
        for request in result.finished:
            self._sequences.pop(request, None)
        if events:
            self.publisher.publish(events)

    def told(self) -> None:
        """All steps done so far have been told."""
        for request in self._aborted:
            self._sequences.pop(request, None)
        self._aborted.clear()

    def reset(self, removed: list[int], idle: bool) -> None:
        """The prefix cache has been reset; told with the next step, as vLLM does.

        Args:
            removed: blocks that were forgotten.
            idle: no request held any, so that the cache is empty now.
        """
        if idle:
            self._cleared = True
            self._removed.clear()
        else:
            self._removed.extend(removed)

    def _stored(self, stored: StoredBlocks) -> BlockStored:
        sequence = self._sequences[stored.request]
        size, first, end = self._block_size, stored.first_block, stored.end_block
        lora, salt = sequence.lora, sequence.cache_salt
        keys: list[list[Any] | None] = [[lora] if lora else None for _ in range(first, end)]
        if salt and first == 0:
            keys[0] = [*(keys[0] or ()), salt]
        return BlockStored(
            list(stored.hashes),
            stored.parent_hash,
            sequence.ids(first * size, end * size),
            size,
            1 if lora else None,
            "GPU",
            lora or None,
            keys,
            0,
            "full_attention",
        )


def is_bound(endpoint: str) -> bool:
    """Whether vLLM would bind an endpoint; it connects to others."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind, and return the endpoint with its port."""
    socket.bind(endpoint.removesuffix(":0") + ":*" if endpoint.endswith(":0") else endpoint)
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    port = bound.rstrip(b"\0").rpartition(b":")[2].decode()
    return f"{endpoint.rpartition(':')[0]}:{port}" if endpoint.endswith(":0") else endpoint
