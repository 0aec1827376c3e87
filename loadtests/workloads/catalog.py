"""Every workload by its name, and files by their format."""

from collections.abc import Sequence
from pathlib import Path

from loadtests.workloads import mooncake
from loadtests.workloads.types import Load


def load_named(name: str, params: Sequence[str], seed: int, limit: int | None = None) -> Load:
    """Draw a workload or read a trace."""
    return mooncake.read(Path(name), limit)
