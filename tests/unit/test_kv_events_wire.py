"""KV events as vLLM 0.32 sent them, and in the encodings of other versions."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prefixes.events.wire import (
    REPLAY_END,
    AllBlocksCleared,
    BadMessageError,
    BlockRemoved,
    BlockStored,
    read_batch,
    read_sequence,
    replay_request,
)

RECORDED = [
    json.loads(line) for line in (Path(__file__).parent / "data" / "vllm_kv_events.jsonl").read_text().splitlines()
]


def _value(shown: Any) -> Any:
    """Bytes stand as {"__bytes__": hex} in the recording."""
    if isinstance(shown, dict) and "__bytes__" in shown:
        return bytes.fromhex(shown["__bytes__"])
    if isinstance(shown, dict):
        return {key: _value(value) for key, value in shown.items()}
    return [_value(value) for value in shown] if isinstance(shown, list) else shown


def _assert_same(event: object, shown: dict[str, Any]) -> None:
    assert type(event).__name__ == shown["type"]
    for name in ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_name", "extra_keys", "medium"):
        if name in shown:
            assert getattr(event, name) == shown[name], name
    for name in ("group_idx", "kv_cache_spec_kind", "lora_id"):
        if name in shown:
            assert getattr(event, name) == shown[name], name


@pytest.mark.parametrize("record", [record for record in RECORDED if "payload_hex" in record], ids=lambda r: r["seq"])
def test_recorded_bytes_are_read(record: dict[str, Any]) -> None:
    batch = read_batch(bytes.fromhex(record["payload_hex"]))
    sent_s, events, rank = record["batch"]
    assert (batch.sent_s, batch.rank, batch.bad_events) == (sent_s, rank, 0)
    assert len(batch.events) == len(events)
    for event, shown in zip(batch.events, events, strict=True):
        _assert_same(event, shown)


@pytest.mark.parametrize("batch_as", ["array", "map"])
@pytest.mark.parametrize("record", RECORDED, ids=lambda r: f"{r['engine']}-{r['seq']}")
def test_events_are_read_in_a_batch_that_is_an_array_or_a_map(record: dict[str, Any], batch_as: str) -> None:
    sent_s, events, rank = _value(record["batch"])
    whole = [sent_s, events, rank] if batch_as == "array" else {"ts": sent_s, "events": events, "data_parallel_rank": 3}
    batch = read_batch(msgspec.msgpack.encode(whole))
    assert batch.rank == (rank if batch_as == "array" else 3)
    for event, shown in zip(batch.events, events, strict=True):
        _assert_same(event, shown)


def test_events_as_arrays_of_earlier_versions() -> None:
    payload = msgspec.msgpack.encode(
        [7.5, [["BlockStored", [1, 2], None, [5, 6, 7, 8], 2, None], ["BlockRemoved", [1]], ["AllBlocksCleared"]]]
    )
    stored, removed, cleared = read_batch(payload).events
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.token_ids, stored.block_size) == ([1, 2], [5, 6, 7, 8], 2)
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [1]
    assert isinstance(cleared, AllBlocksCleared)


def test_an_event_of_an_unknown_kind_costs_only_itself() -> None:
    events = [{"type": "BlockMoved", "to": "disk"}, {"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU"}]
    batch = read_batch(msgspec.msgpack.encode([1.0, events, 0]))
    assert batch.bad_events == 1
    assert [type(event) for event in batch.events] == [BlockRemoved]


def test_unknown_fields_are_skipped() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU", "colour": "red"}
    assert read_batch(msgspec.msgpack.encode([1.0, [event], 0])).bad_events == 0


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_a_bad_message(payload: bytes) -> None:
    try:
        batch = read_batch(payload)
    except BadMessageError:
        return
    assert batch.sent_s is not None


@given(st.integers(0, 2**63 - 1))
def test_sequence_numbers(number: int) -> None:
    assert read_sequence(replay_request(number)[1]) == number


def test_the_end_of_a_replay() -> None:
    assert read_sequence(b"\xff" * 8) == REPLAY_END
    with pytest.raises(BadMessageError):
        read_sequence(b"\x00" * 7)
