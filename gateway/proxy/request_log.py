"""One JSON line per request, written by a thread of its own: a pipe that nobody reads must not stop the event loop.

The thread does nothing but write. Whatever else it did would hold the interpreter's lock, for up to five milliseconds
at a time, and keep the event loop waiting: lines are made where the records are, while these are still in the
processor's cache.

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
_SHARED_PIECE_BYTES = getattr(select, "PIPE_BUF", 512)
"""512 is the least that POSIX allows."""
_PIECE_BYTES = 1 << 18
"""Where nobody else writes: each piece costs the event loop a change of threads or two."""


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
            fields: stand in every line; with any, others are taken to write to the same pipe.
        """
        self._stream: IO[bytes] = stream if stream is not None else sys.stdout.buffer
        self._max_pending = max_pending
        self._fields = dict(fields or {})
        self._piece_bytes = _SHARED_PIECE_BYTES if fields else _PIECE_BYTES
        self._pending: deque[bytes] = deque()
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
        self._pending.append(_line({**record, **self._fields} if self._fields else record))

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
        pending, most = self._pending, self._piece_bytes
        lines: list[bytes] = []
        size = 0
        while pending:
            line = pending.popleft()
            if size + len(line) > most and lines:
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
