"""Trace files of several formats as loads; the format is told by the file itself."""

from pathlib import Path

import orjson

from loadtests.trace import TraceError
from loadtests.workloads import azure, mooncake, session_trace
from loadtests.workloads.types import Load


def read_load(path: Path, limit: int | None = None) -> Load:
    """Read a trace file.

    Args:
        path: `.csv` for lengths as Azure publishes them, `.json` for conversations as vLLM's benchmark takes them, and
            otherwise JSON lines: in the Mooncake format if the first has `hash_ids` and no `session_id`, else sessions
            as AIPerf takes them.
        limit: keep only the first arrivals (lines, conversations).

    Raises:
        TraceError: the file cannot be read or is malformed.
    """
    if path.suffix == ".csv":
        return azure.read(path, limit)
    if path.suffix == ".json":
        return session_trace.read_conversations(path, limit)
    if _has_sessions(path):
        return session_trace.read_rows(path, limit)
    return mooncake.read(path, limit)


def _has_sessions(path: Path) -> bool:
    try:
        with path.open("rb") as lines:
            first = next((line for line in lines if line.strip()), b"")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    try:
        row = orjson.loads(first)
    except orjson.JSONDecodeError:
        return False
    return isinstance(row, dict) and ("session_id" in row or "hash_ids" not in row)
