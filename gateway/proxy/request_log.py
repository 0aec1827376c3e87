"""One JSON line per request, written by a thread of its own: a pipe that nobody reads must not stop the event loop."""

import sys
import threading
from collections import deque
from typing import IO, Any

import orjson

_MAX_PENDING = 50_000
_FLUSH_S = 0.2


class RequestLog:
    """A bounded queue of records and the thread that writes them.

    Attributes:
        dropped: records lost because the reader of the stream was too slow.
    """

    def __init__(self, stream: IO[bytes] | None = None) -> None:
        """Start without a thread.

        Args:
            stream: where lines go; standard output by default.
        """
        self._stream: IO[bytes] = stream if stream is not None else sys.stdout.buffer
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
        if len(self._pending) >= _MAX_PENDING:
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
            except (OSError, ValueError):
                # Nobody reads any more; requests go on without a log.
                return

    def _write(self) -> None:
        pending = self._pending
        lines: list[bytes] = []
        while pending:
            lines.append(orjson.dumps(pending.popleft(), option=orjson.OPT_APPEND_NEWLINE, default=str))
            if len(lines) >= 1000:
                self._stream.write(b"".join(lines))
                lines.clear()
        if lines:
            self._stream.write(b"".join(lines))
        self._stream.flush()
