"""The bytes of the log entries, little-endian.

A prefix entry is the writer's number (u64) and then, per replica, a group: identity (u64), epoch in milliseconds (u64,
0 if the writer does not know), length of what follows (u32), records. A record is a block hash (u64), a depth (u32) and
a count (u16). With a count of `CUT`, the replica does not hold that block at that depth, nor what follows. Otherwise
`count` hashes (u64 each) follow: the replica holds them behind the first `depth` blocks, the last of which is the named
one, and all of these were just used.

A load entry is the writer's number (u64), the requests it has started in the last whole second (u32), the number of
prefix logs (u16; 0 if it tells of changes only), for each of these the bytes its writer wants kept (u32), and per
replica its identity (u64) and the fields of a `Load`: two u32,
five f32. After one that is not of changes only, replicas that are not in it have none.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from struct import error as struct_error

from gateway.replicas.load import Load

CUT = 0xFFFF
MAX_TAIL = 1024
"""Longest chain in one record; longer ones are several records, so that none takes long to take in."""

_WRITER = Struct("<Q")
_GROUP = Struct("<QQI")
_RECORD = Struct("<QIH")
_LOAD_HEAD = Struct("<QIH")
_LOAD = Struct("<QIIfffff")
_SWAP = sys.byteorder == "big"

Record = tuple[int, int, Sequence[int] | None]
"""Depth, block, and the tail; None for a cut."""

RECORD_BYTES = _RECORD.size


class BadEntry(ValueError):
    """The bytes are no entry."""


def pack_records(records: Iterable[Record]) -> bytes:
    """Return the bytes of records."""
    parts: list[bytes] = []
    for depth, block, tail in records:
        if tail is None:
            parts.append(_RECORD.pack(block, depth, CUT))
            continue
        for start in range(0, len(tail) or 1, MAX_TAIL):
            part = tail[start : start + MAX_TAIL]
            parent = tail[start - 1] if start else block
            parts.append(_RECORD.pack(parent, depth + start, len(part)))
            if part:
                hashes = array("Q", part)
                if _SWAP:
                    hashes.byteswap()
                parts.append(hashes.tobytes())
    return b"".join(parts)


def pack_entry(writer: int, groups: Iterable[tuple[int, int, bytes]]) -> bytes:
    """Return the bytes of a prefix entry.

    Args:
        writer: the worker's number.
        groups: identity, epoch in milliseconds, and packed records.
    """
    parts = [_WRITER.pack(writer)]
    for identity, epoch_ms, records in groups:
        parts.append(_GROUP.pack(identity, epoch_ms, len(records)))
        parts.append(records)
    return b"".join(parts)


def writer_of(entry: bytes) -> int:
    """Return the number of the worker that wrote an entry, of either kind.

    Raises:
        BadEntry: it is none.
    """
    if len(entry) < _WRITER.size:
        raise BadEntry
    return int(_WRITER.unpack_from(entry)[0])


def groups_of(entry: bytes) -> Iterator[tuple[int, int, memoryview]]:
    """Yield identity, epoch in milliseconds and packed records of a prefix entry's groups.

    Raises:
        BadEntry: it is none.
    """
    view = memoryview(entry)
    position, end = _WRITER.size, len(entry)
    try:
        while position < end:
            identity, epoch_ms, length = _GROUP.unpack_from(view, position)
            position += _GROUP.size
            if length > end - position:
                raise BadEntry
            yield identity, epoch_ms, view[position : position + length]
            position += length
    except struct_error as error:
        raise BadEntry from error


def records_of(records: memoryview) -> Iterator[tuple[int, int, "array[int] | None"]]:
    """Yield depth, block and tail (None for a cut) of packed records.

    Raises:
        BadEntry: they are none.
    """
    position, end = 0, len(records)
    unpack, size = _RECORD.unpack_from, _RECORD.size
    try:
        while position < end:
            block, depth, count = unpack(records, position)
            position += size
            if count == CUT:
                yield depth, block, None
                continue
            if 8 * count > end - position:
                raise BadEntry
            tail = array("Q")
            tail.frombytes(records[position : position + 8 * count])
            if _SWAP:
                tail.byteswap()
            position += 8 * count
            yield depth, block, tail
    except struct_error as error:
        raise BadEntry from error


def pack_loads(
    writer: int, started: int, loads: Iterable[tuple[int, Load]], budgets_bytes: Sequence[int] = ()
) -> bytes:
    """Return the bytes of a load entry.

    Args:
        writer: the worker's number.
        started: requests it has started in the last whole second.
        loads: replicas' identities and what is outstanding there.
        budgets_bytes: bytes the prefix logs are to keep; given when there is nothing outstanding anywhere else.
    """
    parts = [
        _LOAD_HEAD.pack(writer, started, len(budgets_bytes)),
        Struct(f"<{len(budgets_bytes)}I").pack(*budgets_bytes),
    ]
    for identity, load in loads:
        parts.append(
            _LOAD.pack(
                identity,
                load.in_flight,
                load.decodes,
                load.prefill_tokens,
                load.prefill_work_s,
                load.context_tokens,
                load.kv_tokens,
                load.kv_own_tokens,
            )
        )
    return b"".join(parts)


def loads_of(entry: bytes) -> tuple[int, tuple[int, ...], dict[int, Load]]:
    """Return requests started, budgets (none if it tells of changes only) and loads by identity of a load entry.

    Raises:
        BadEntry: it is none.
    """
    try:
        _, started, count = _LOAD_HEAD.unpack_from(entry)
        budgets: tuple[int, ...] = Struct(f"<{count}I").unpack_from(entry, _LOAD_HEAD.size)
        items = _LOAD.iter_unpack(memoryview(entry)[_LOAD_HEAD.size + 4 * count :])
        return started, budgets, {identity: Load(*fields) for identity, *fields in items}
    except struct_error as error:
        raise BadEntry from error
