"""Traces of sessions: JSONL in AIPerf's extension of the Mooncake format, and vLLM's JSON of conversations.

AIPerf (ai-dynamo/aiperf, docs/benchmark-modes/trace-replay.md): rows with the same `session_id` are turns of one
session. A row has `output_length`, and either `input_length` with optional `hash_ids` (the text the turn adds; history
and answers stand before it), or `messages`: the whole history, or with `"message_mode": "delta"` what the turn adds. A
row with a `timestamp` is sent then, whatever became of the row before; one with a `delay` so long after the answer to
the row before; both in milliseconds.

vLLM (benchmarks/multi_turn, `--input-file` of conversations): a list of `{"id", "messages": [{"role", "content"}]}`.
There are no times in it; conversations begin one per second, and each turn comes as soon as the last is answered.

Text counts as one token per four bytes. Equal messages at the same place are equal prompts, and an answer that a later
turn repeats is the one the engine has just made.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from xxhash import xxh3_64_intdigest

from loadtests.trace import BLOCK_TOKENS, TraceError
from loadtests.workloads.prompt import Part, Prompt
from loadtests.workloads.types import Load, Session, Stage, Turn

_BYTES_PER_TOKEN = 4
_CONVERSATIONS_PER_S = 1.0
_MASK = (1 << 64) - 1

Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Message(BaseModel):
    """One chat message; content that is not text counts as its JSON."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: str
    content: Any = ""

    def part(self) -> Part:
        """The message as a part of a prompt."""
        text = self.content.encode() if isinstance(self.content, str) else orjson.dumps(self.content)
        content = xxh3_64_intdigest(text, xxh3_64_intdigest(self.role))
        return Part(content, max(-(-len(text) // _BYTES_PER_TOKEN), 1), self.role)


class Row(BaseModel):
    """One line of a session trace."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    session_id: str | int | None = None
    timestamp: Milliseconds | None = None
    delay: Milliseconds | None = None
    input_length: Count | None = None
    hash_ids: list[Annotated[int, Field(ge=0, le=_MASK)]] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    message_mode: Literal["history", "delta"] = "history"
    output_length: int = 1


class Conversation(BaseModel):
    """One conversation of vLLM's format."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    messages: list[Message]
    id: str | int | None = None


def read_rows(path: Path, limit: int | None = None) -> Load:
    """Read a session trace.

    Args:
        path: JSONL file.
        limit: keep only the first lines.

    Raises:
        TraceError: the file cannot be read, holds no request, or has a bad line.
    """
    rows: dict[str, list[Row]] = {}
    count = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                if count == limit:
                    break
                count += 1
                try:
                    row = Row.model_validate_json(line)
                except ValidationError as error:
                    raise TraceError(f"{path}:{number}: {_first(error)}") from None
                if row.messages is None and row.input_length is None:
                    raise TraceError(f"{path}:{number}: a row needs input_length or messages")
                key = f"line-{number}" if row.session_id is None else str(row.session_id)
                rows.setdefault(key, []).append(row)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    if not rows:
        raise TraceError(f"{path}: the trace holds no request")
    first_ms = min(
        (row.timestamp for group in rows.values() for row in group if row.timestamp is not None), default=0.0
    )
    sessions = [session for key, group in rows.items() for session in _sessions(key, group, first_ms)]
    sessions.sort(key=lambda session: session.arrival_s)
    return Load(path.stem, (Stage("trace", sessions),))


def read_conversations(path: Path, limit: int | None = None) -> Load:
    """Read conversations in vLLM's format.

    Args:
        path: JSON file.
        limit: keep only the first conversations.

    Raises:
        TraceError: the file cannot be read, is malformed, or holds no answered question.
    """
    try:
        conversations = TypeAdapter(list[Conversation]).validate_json(path.read_bytes())
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        raise TraceError(f"{path}: {_first(error)}") from None
    sessions: list[Session] = []
    for number, conversation in enumerate(conversations[:limit]):
        turns = []
        prompt = Prompt()
        for message in conversation.messages:
            part = message.part()
            if message.role == "assistant" and prompt.tokens:
                turns.append(Turn(prompt, part.tokens, part.content))
            prompt = prompt.extended(part)
        if turns:
            key = str(number if conversation.id is None else conversation.id)
            sessions.append(Session(len(sessions) / _CONVERSATIONS_PER_S, tuple(turns), key))
    if not sessions:
        raise TraceError(f"{path}: no conversation has an answer of the assistant")
    return Load(path.stem, (Stage("conversations", sessions),))


def _sessions(key: str, rows: Sequence[Row], first_ms: float) -> Iterable[Session]:
    """The rows of one session: turns that follow each other, in pieces that begin at given times."""
    arrival_s = 0.0
    turns: list[Turn] = []
    for number, (row, turn) in enumerate(zip(rows, _turns(key, rows), strict=True)):
        if row.timestamp is not None:
            if turns:
                yield Session(arrival_s, tuple(turns), key)
                turns = []
            arrival_s = (row.timestamp - first_ms) / 1000.0
        elif number == 0:
            arrival_s = 0.0
        turns.append(turn)
    yield Session(arrival_s, tuple(turns), key)


def _turns(key: str, rows: Sequence[Row]) -> Iterable[Turn]:
    context = Prompt()
    for number, row in enumerate(rows):
        if row.messages is not None and row.message_mode == "history":
            prompt = Prompt(message.part() for message in row.messages)
        else:
            prompt = context.extended(*_added(key, number, row))
        output_tokens = max(row.output_length, 1)
        following = rows[number + 1] if number + 1 < len(rows) else None
        answer = _recorded_answer(row, following)
        if answer is None:
            answer = xxh3_64_intdigest(f"{key}\0{number}\0answer")
        yield Turn(prompt, output_tokens, answer, (row.delay or 0.0) / 1000.0)
        context = prompt.extended(Part(answer, output_tokens, "assistant"))


def _added(key: str, number: int, row: Row) -> list[Part]:
    if row.messages is not None:
        return [message.part() for message in row.messages]
    assert row.input_length is not None
    if not row.hash_ids:
        return [Part(xxh3_64_intdigest(f"{key}\0{number}"), row.input_length)]
    parts = []
    left = row.input_length
    for hash_id in row.hash_ids[:-1]:
        if left <= BLOCK_TOKENS:
            break
        parts.append(Part(hash_id, BLOCK_TOKENS))
        left -= BLOCK_TOKENS
    parts.append(Part(row.hash_ids[-1], left))
    return parts


def _recorded_answer(row: Row, following: Row | None) -> int | None:
    """Content of the assistant's message that the next row's history has behind this row's."""
    if row.messages is None or following is None or following.messages is None:
        return None
    if following.message_mode == "delta" or following.messages[: len(row.messages)] != row.messages:
        return None
    added = following.messages[len(row.messages) :]
    return added[0].part().content if added and added[0].role == "assistant" else None


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return f"{field + ': ' if field else ''}{first['msg']}"
