"""Reading traces of the Mooncake format."""

import json
from pathlib import Path

import pytest

from loadtests.trace import TraceError, TraceRequest, parse_line, read_trace

ROW = {"timestamp": 0, "input_length": 1000, "output_length": 7, "hash_ids": [0, 5]}


def row(**changes: object) -> bytes:
    return json.dumps({**ROW, **changes}).encode()


def test_a_row_and_its_partial_last_block() -> None:
    request = parse_line(row(timestamp=27000), "t:1")
    assert request == TraceRequest(timestamp=27000, input_length=1000, output_length=7, hash_ids=[0, 5])
    assert request.block_lengths() == [512, 488]


def test_a_full_last_block() -> None:
    assert parse_line(row(input_length=1024), "t:1").block_lengths() == [512, 512]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "Invalid JSON"),
        (b"[1]", "Input should be an object"),
        (b"\xff{}", "Invalid JSON"),
        (b'{"timestamp": 1}', "input_length: Field required"),
        (row(input_length=0), "input_length: Input should be greater"),
        (row(input_length=True), "input_length: Input should be a valid integer"),
        (row(input_length="1000"), "input_length: Input should be a valid integer"),
        (row(timestamp=-1), "timestamp: Input should be greater"),
        (row(output_length=-1), "output_length: Input should be greater"),
        (row(hash_ids=[0, -5]), "hash_ids.1: Input should be greater"),
        (row(hash_ids=[0]), "input_length 1000 needs 2 hash_ids of 512 tokens, found 1"),
        (row(hash_ids=[0, 1, 2]), "input_length 1000 needs 2 hash_ids of 512 tokens, found 3"),
    ],
)
def test_a_bad_line_says_where_and_what(line: bytes, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse_line(line, "trace.jsonl:7")
    assert str(caught.value).startswith("trace.jsonl:7: ")
    assert message in str(caught.value)


def test_a_file_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join([row(timestamp=5, output_length=1), b"", row(timestamp=3), row(timestamp=5)]) + b"\n")
    assert [(r.timestamp, r.output_length) for r in read_trace(path)] == [(3, 7), (5, 1), (5, 7)]
    assert [r.timestamp for r in read_trace(path, limit=1)] == [3]


def test_the_line_number_counts_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(row() + b"\n\n" + b"oops\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl:3: Invalid JSON"):
        read_trace(path)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"\n")
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(empty)
