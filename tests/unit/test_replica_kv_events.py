"""The simulated replica's KV events: vLLM's bytes, and what the engine did."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadtests.replica.kv_events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, is_bound

RECORDED = [
    json.loads(line) for line in (Path(__file__).parent / "data" / "vllm_kv_events.jsonl").read_text().splitlines()
]
KINDS = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved, "AllBlocksCleared": AllBlocksCleared}


@pytest.mark.parametrize(
    "record",
    [r for r in RECORDED if "payload_hex" in r and not any("session_id" in e for e in r["batch"][1])],
    ids=lambda r: r["seq"],
)
def test_batches_are_encoded_as_vllm_does(record: dict[str, Any]) -> None:
    import msgspec

    sent_s, events, rank = record["batch"]
    made = [KINDS[e["type"]](**{name: value for name, value in e.items() if name != "type"}) for e in events]
    assert msgspec.msgpack.encode(Batch(sent_s, made, rank)).hex() == record["payload_hex"]


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [("tcp://*:5557", True), ("tcp://[::]:5557", True), ("ipc:///tmp/x", True), ("tcp://10.0.0.1:5557", False)],
)
def test_which_endpoints_are_bound(endpoint: str, bound: bool) -> None:
    assert is_bound(endpoint) is bound
