"""Traces in the Mooncake format as loads."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from loadtests.trace import BLOCK_TOKENS, TraceRequest, read_trace
from loadtests.workloads.prompt import Part, Prompt
from loadtests.workloads.types import Load, Session, Stage, Turn

# Block ids of a trace are small or 64 bits wide; answers are numbered from here so that none is taken for a block.
_ANSWERS = 1 << 63


def load_of(trace: Sequence[TraceRequest], name: str) -> Load:
    """The requests of a trace, open loop.

    Answers are contents of their own: where a later prompt repeats one, the trace says so with block ids that do not
    tell which of their tokens were the answer.

    Args:
        trace: requests in order of arrival.
        name: name of the load.
    """
    inseparable = _inseparable(request.hash_ids for request in trace)
    sessions = []
    for number, request in enumerate(trace):
        turn = Turn(Prompt(_parts(request, inseparable)), max(request.output_length, 1), _ANSWERS + number)
        sessions.append(Session((request.timestamp - trace[0].timestamp) / 1000.0, (turn,)))
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


def _inseparable(prompts: Iterable[Sequence[int]]) -> set[int]:
    """Blocks that always follow the same block, which nothing else ever follows.

    They may be written as the continuation of that block. Most blocks of a trace are such, and prompts of a few long
    parts are cheaper to name than prompts of many short ones.
    """
    many = -1
    before: dict[int, int] = {}
    after: dict[int, int] = {}
    for hash_ids in prompts:
        previous = many
        for hash_id in hash_ids:
            if before.setdefault(hash_id, previous) != previous:
                before[hash_id] = many
            if previous != many and after.setdefault(previous, hash_id) != hash_id:
                after[previous] = many
            previous = hash_id
    return {block for block, previous in before.items() if previous != many and after[previous] == block}


def _parts(request: TraceRequest, inseparable: set[int]) -> list[Part]:
    parts: list[Part] = []
    first, blocks = 0, 0
    for hash_id in request.hash_ids:
        if blocks and hash_id in inseparable:
            blocks += 1
            continue
        if blocks:
            parts.append(Part(first % _ANSWERS, blocks * BLOCK_TOKENS))
        first, blocks = hash_id, 1
    rest = request.input_length - BLOCK_TOKENS * (len(request.hash_ids) - blocks)
    parts.append(Part(first % _ANSWERS, rest))
    return parts
