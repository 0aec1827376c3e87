"""Trace files of several formats as loads; the format is told by the file itself."""

from pathlib import Path

from loadtests.workloads import mooncake
from loadtests.workloads.types import Load


def read_load(path: Path, limit: int | None = None) -> Load:
    """Read a trace file."""
    return mooncake.read(path, limit)
