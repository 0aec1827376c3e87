"""What vLLM's KV-event publisher puts on the wire (`vllm/distributed/kv_events.py`). Pure.

A message has three frames: topic, sequence number (8 bytes, big-endian, from 0 per engine process and data-parallel
rank), payload. The payload is MessagePack: a batch of a timestamp, events, and the rank.

vLLM 0.32 writes the batch as an array and each event as a map with its `type`; earlier versions wrote events as arrays
too, later ones write both as maps. All of them are read. Fields with their default value are left out, and fields
nobody knows are skipped.
"""

from typing import Any, TypeVar

import msgspec

BlockHash = int | bytes
"""The engine's name of a block: 64 bits as a number, or the digest, as the engine is set."""

REPLAY_END = -1
"""Sequence number of the message that ends a replay."""


class BadMessageError(Exception):
    """Bytes that are no message of this kind."""


class BlockStored(msgspec.Struct, tag="BlockStored", tag_field="type", gc=False):
    """Blocks have become reusable. They follow each other; a hash stands for one physical block."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", tag_field="type", gc=False):
    """Physical blocks have been taken for something else."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type", gc=False):
    """The cache is empty."""


class _StoredArray(BlockStored, tag="BlockStored", tag_field="type", array_like=True, gc=False):
    pass


class _RemovedArray(BlockRemoved, tag="BlockRemoved", tag_field="type", array_like=True, gc=False):
    pass


class _ClearedArray(AllBlocksCleared, tag="AllBlocksCleared", tag_field="type", array_like=True, gc=False):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared
_ArrayEvent = _StoredArray | _RemovedArray | _ClearedArray
_E = TypeVar("_E")


class _Batch(msgspec.Struct, gc=False):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class _BatchArray(_Batch, array_like=True, gc=False):
    pass


class _BatchOfArrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_ArrayEvent]
    data_parallel_rank: int | None = None


class _BatchOfRaw(msgspec.Struct, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _BatchOfRawArray(_BatchOfRaw, array_like=True, gc=False):
    pass


class Batch:
    """Events of one engine step.

    Attributes:
        sent_s: the engine's clock when it was made, seconds since the epoch.
        events: in order.
        rank: data-parallel rank; 0 where there is none.
        bad_events: events in it that could not be read, an unknown kind for example.
    """

    __slots__ = ("bad_events", "events", "rank", "sent_s")

    def __init__(self, sent_s: float, events: "list[Event]", rank: int | None, bad_events: int = 0) -> None:
        self.sent_s = sent_s
        self.events = events
        self.rank = rank or 0
        self.bad_events = bad_events


_whole: tuple[Any, ...] = (
    msgspec.msgpack.Decoder(_BatchArray),
    msgspec.msgpack.Decoder(_BatchOfArrays),
    msgspec.msgpack.Decoder(_Batch),
)
_raw: tuple[Any, ...] = (msgspec.msgpack.Decoder(_BatchOfRawArray), msgspec.msgpack.Decoder(_BatchOfRaw))
_single: tuple[Any, ...] = (
    msgspec.msgpack.Decoder(Event),
    msgspec.msgpack.Decoder(_ArrayEvent),
)


def read_batch(payload: bytes) -> Batch:
    """Decode a payload. Events that cannot be read are left out and counted.

    Raises:
        BadMessageError: it is no batch at all.
    """
    for decoder in _whole:
        try:
            batch = decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        return Batch(batch.ts, batch.events, batch.data_parallel_rank)
    for decoder in _raw:
        try:
            batch = decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        events = [event for raw in batch.events if (event := _read_event(raw)) is not None]
        return Batch(batch.ts, events, batch.data_parallel_rank, len(batch.events) - len(events))
    raise BadMessageError(f"{len(payload)} bytes that are no batch of KV events")


def _read_event(raw: msgspec.Raw) -> Event | None:
    for decoder in _single:
        try:
            event: Event = decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        return event
    return None


def read_sequence(frame: bytes) -> int:
    """Decode a sequence number, `REPLAY_END` included.

    Raises:
        BadMessageError: it is none.
    """
    if len(frame) != 8:
        raise BadMessageError(f"a sequence number of {len(frame)} bytes")
    return int.from_bytes(frame, "big", signed=True)


def replay_request(first: int) -> list[bytes]:
    """Frames that ask a publisher for all it still has from a sequence number on."""
    return [b"", first.to_bytes(8, "big")]
