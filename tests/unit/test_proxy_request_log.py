"""The request log: whole lines, bounded memory, and no request that fails because of it."""

import io
import os
import select
import threading
from typing import Any

import orjson

from gateway.proxy.request_log import RequestLog


def test_one_line_per_record_whatever_is_in_it() -> None:
    stream = io.BytesIO()
    log = RequestLog(stream)
    records: list[dict[str, Any]] = [
        {"id": "a\r\nfake line", "path": "/v1/\x00\x1b[31m\u2028\u0085"},
        {"ratio": float("nan"), "none": None},
        {"odd": {1, 2}},
        {"surrogate": "\ud800"},
        {"huge": 1 << 70},
    ]
    for record in records:
        log.add(record)
    log._write()
    lines = stream.getvalue().split(b"\n")
    assert lines.pop() == b""
    assert len(lines) == len(records)
    assert orjson.loads(lines[0]) == records[0]
    assert b"\\r\\nfake" in lines[0]
    assert orjson.loads(lines[4]) == {"huge": str(1 << 70)}


def test_the_thread_writes_what_is_left_when_it_stops() -> None:
    stream = io.BytesIO()
    log = RequestLog(stream)
    log.start()
    for i in range(2500):
        log.add({"i": i})
    log.stop()
    assert [orjson.loads(line)["i"] for line in stream.getvalue().splitlines()] == list(range(2500))
    assert log.dropped == 0


class Stuck(io.BytesIO):
    """A pipe that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.released = threading.Event()

    def write(self, data: Any) -> int:
        self.entered.set()
        assert self.released.wait(10)
        return super().write(data)


def test_a_reader_that_is_stuck_costs_records_and_nothing_else() -> None:
    stream = Stuck()
    log = RequestLog(stream, max_pending=10)
    log.start()
    log.add({"i": 0})
    assert stream.entered.wait(10)
    for i in range(1, 31):
        log.add({"i": i})
    assert log.dropped == 20
    stream.released.set()
    log.stop()
    assert len(stream.getvalue().splitlines()) == 11


def test_a_reader_that_has_gone() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb", buffering=0) as stream:  # noqa: PTH123 - a descriptor, no path
        log = RequestLog(stream)
        log.start()
        log.add({"i": 0})
        assert log._thread is not None
        log._thread.join(10)
        assert not log._thread.is_alive()
        log.add({"i": 1})
        assert log.dropped == 1
        log.stop()


class Pieces(io.BytesIO):
    """Remembers what was written at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []

    def write(self, data: Any) -> int:
        self.pieces.append(bytes(data))
        return super().write(data)


def test_workers_share_a_pipe_without_breaking_each_others_lines() -> None:
    stream = Pieces()
    log = RequestLog(stream, fields={"worker": 2})
    lengths = [100, 3000, 900, 5000, *[200] * 50]
    for length in lengths:
        log.add({"path": "x" * length})
    log._write()
    records = [orjson.loads(line) for line in stream.getvalue().splitlines()]
    assert [(len(record["path"]), record["worker"]) for record in records] == [(length, 2) for length in lengths]
    assert all(piece.endswith(b"\n") for piece in stream.pieces)
    assert [piece for piece in stream.pieces if len(piece) > select.PIPE_BUF and piece.count(b"\n") > 1] == []
    assert len(stream.pieces) < 12
