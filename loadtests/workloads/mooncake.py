"""Traces in the Mooncake format as loads."""

from collections.abc import Iterable
from pathlib import Path

from loadtests.trace import TraceRequest, read_trace
from loadtests.workloads.prompt import Part, Prompt
from loadtests.workloads.types import Load, Session, Stage, Turn

# Block ids of a trace are small or 64 bits wide; answers are numbered from here so that none is taken for a block.
_ANSWERS = 1 << 63


def load_of(trace: Iterable[TraceRequest], name: str) -> Load:
    """The requests of a trace, open loop.

    Answers are contents of their own: where a later prompt repeats one, the trace says so with block ids that do not
    tell which of their tokens were the answer.

    Args:
        trace: requests in order of arrival.
        name: name of the load.
    """
    sessions = []
    first_ms: float | None = None
    for number, request in enumerate(trace):
        if first_ms is None:
            first_ms = request.timestamp
        lengths = request.block_lengths()
        prompt = Prompt(
            Part(hash_id % _ANSWERS, tokens) for hash_id, tokens in zip(request.hash_ids, lengths, strict=True)
        )
        turn = Turn(prompt, max(request.output_length, 1), _ANSWERS + number)
        sessions.append(Session((request.timestamp - first_ms) / 1000.0, (turn,)))
    return Load(name, (Stage("trace", sessions),))


def read(path: Path, limit: int | None = None) -> Load:
    """Read a trace file.

    Args:
        path: JSONL file in the Mooncake format.
        limit: keep only the first arrivals.

    Raises:
        TraceError: the file cannot be read or is malformed.
    """
    return load_of(read_trace(path, limit), path.stem)
