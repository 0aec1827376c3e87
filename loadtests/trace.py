"""Reader of request traces in the Mooncake format.

One JSON object per line: `timestamp` (ms from the start of the trace), `input_length` and `output_length`
(tokens), and `hash_ids`, the chained ids of the prompt's 512-token blocks. Equal ids mean an equal prompt
up to the end of that block; the last block may be partial. Format and traces: kvcache-ai/Mooncake,
FAST25-release/traces.
"""

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

BLOCK_TOKENS = 512
"""Tokens of one block of `hash_ids`."""


class TraceError(ValueError):
    """A trace file cannot be read; the message names the file and the line."""


class TraceRequest(BaseModel):
    """One request of a trace, under the names of the format."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    timestamp: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Arrival, milliseconds from the start of the trace."""
    input_length: Annotated[int, Field(ge=1)]
    """Prompt tokens."""
    output_length: Annotated[int, Field(ge=0)]
    """Tokens of the answer."""
    hash_ids: list[Annotated[int, Field(ge=0, lt=2**64)]]
    """Ids of the prompt's blocks of `BLOCK_TOKENS` tokens, in order."""

    @model_validator(mode="after")
    def _blocks_cover_the_prompt(self) -> Self:
        expected = -(-self.input_length // BLOCK_TOKENS)
        if len(self.hash_ids) != expected:
            raise ValueError(
                f"input_length {self.input_length} needs {expected} hash_ids of {BLOCK_TOKENS} tokens, "
                f"found {len(self.hash_ids)}"
            )
        return self

    def block_lengths(self) -> list[int]:
        """Tokens of each block: all `BLOCK_TOKENS` but the last, which holds the rest."""
        lengths = [BLOCK_TOKENS] * len(self.hash_ids)
        lengths[-1] = self.input_length - BLOCK_TOKENS * (len(lengths) - 1)
        return lengths


def parse_line(line: bytes, where: str) -> TraceRequest:
    """Parse one line of a trace.

    Args:
        line: the JSON object, UTF-8.
        where: file and line for the message.

    Raises:
        TraceError: not JSON, a field is missing or out of range, or the blocks do not cover the prompt.
    """
    try:
        return TraceRequest.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise TraceError(f"{where}: {field + ': ' if field else ''}{message}") from None


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Read a trace in order of arrival.

    Args:
        path: JSONL file; blank lines are skipped.
        limit: keep only the first `limit` arrivals, all when None.

    Returns:
        Requests sorted by timestamp; equal timestamps keep the order of the file.

    Raises:
        TraceError: the file cannot be read, holds no request, or has a bad line.
    """
    requests: list[TraceRequest] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    requests.append(parse_line(line, f"{path}:{number}"))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    if not requests:
        raise TraceError(f"{path}: the trace holds no request")
    requests.sort(key=lambda request: request.timestamp)
    return requests[:limit]
