"""One JSON line per request, written by a thread of its own: a pipe that nobody reads must not stop the event loop.

Several workers write to one pipe. POSIX keeps apart what is written in pieces of up to PIPE_BUF bytes, so whole lines
are written in such pieces; a line longer than that goes alone.
"""

import logging
import select
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

import orjson

_log = logging.getLogger(__name__)

_MAX_PENDING = 50_000
_FLUSH_S = 0.2
_PIECE_BYTES = getattr(select, "PIPE_BUF", 512)
"""512 is the least that POSIX allows."""


class RequestLog:
    """A bounded queue of records and the thread that writes them.

    Attributes:
        dropped: records lost because the reader of the stream was too slow, or has gone.
    """

    def __init__(
        self,
        stream: IO[bytes] | None = None,
        max_pending: int = _MAX_PENDING,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        """Start without a thread.

        Args:
            stream: where lines go; standard output by default.
            max_pending: records kept for a slow reader.
            fields: stand in every line.
        """
        self._stream: IO[bytes] = stream if stream is not None else sys.stdout.buffer
        self._max_pending = max_pending
        self._fields = dict(fields or {})
        self._pending: deque[dict[str, Any]] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def start(self) -> None:
        """Start writing."""
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def add(self, record: dict[str, Any]) -> None:
        """Queue one record; never blocks."""
        if len(self._pending) >= self._max_pending:
            self.dropped += 1
            return
        self._pending.append(record)

    def stop(self) -> None:
        """Write what is left, for as long as a second at most."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stop.wait(_FLUSH_S)
            try:
                self._write()
            except (OSError, ValueError) as error:
                # Nobody reads any more; requests go on without a log.
                _log.warning("the request log has ended: %s", error)
                self._max_pending = 0
                self.dropped += len(self._pending)
                self._pending.clear()
                return

    def _write(self) -> None:
        pending, fields = self._pending, self._fields
        lines: list[bytes] = []
        size = 0
        while pending:
            line = _line({**pending.popleft(), **fields})
            if size + len(line) > _PIECE_BYTES and lines:
                self._write_piece(lines)
                lines, size = [], 0
            lines.append(line)
            size += len(line)
        self._write_piece(lines)

    def _write_piece(self, lines: list[bytes]) -> None:
        self._stream.write(b"".join(lines))
        self._stream.flush()


def _line(record: dict[str, Any]) -> bytes:
    """Return a record as one line; JSON escapes whatever could end it early."""
    try:
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE, default=str)
    except orjson.JSONEncodeError:
        # A field that JSON cannot hold must not cost the others, or the thread.
        return orjson.dumps({key: ascii(value) for key, value in record.items()}, option=orjson.OPT_APPEND_NEWLINE)
