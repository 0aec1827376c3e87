"""Trace files: each format told by the file itself, and read into the same sessions of turns."""

import json
from pathlib import Path

import pytest

from loadtests.trace import TraceError
from loadtests.workloads.files import read_load
from loadtests.workloads.prompt import Part
from loadtests.workloads.types import Load, Session


def sessions(load: Load) -> list[Session]:
    (stage,) = load.stages
    return list(stage.sessions)


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mooncake(tmp_path: Path) -> None:
    path = written(
        tmp_path / "trace.jsonl",
        {"timestamp": 1000, "input_length": 1200, "output_length": 52, "hash_ids": [0, 1, 2]},
        {"timestamp": 1105, "input_length": 1800, "output_length": 0, "hash_ids": [0, 3, 4, 5]},
        {"timestamp": 1274, "input_length": 1300, "output_length": 9, "hash_ids": [0, 3, 6]},
    )
    load = read_load(path)
    assert load.name == "trace"
    assert [session.arrival_s for session in sessions(load)] == pytest.approx([0.0, 0.105, 0.274])
    first, second, third = (session.turns[0] for session in sessions(load))
    assert [turn.prompt.tokens for turn in (first, second, third)] == [1200, 1800, 1300]
    assert [turn.output_tokens for turn in (first, second, third)] == [52, 1, 9]
    blocks = [turn.prompt.names_every(512) for turn in (first, second, third)]
    assert blocks[0][0] == blocks[1][0] == blocks[2][0]
    assert blocks[1][1] == blocks[2][1]
    assert blocks[0][1] != blocks[1][1]
    # Blocks 1 and 2 never come without each other, and 4 and 5 neither: they are written as one part.
    assert first.prompt.parts == (Part(0, 512), Part(1, 688))
    assert second.prompt.parts == (Part(0, 512), Part(3, 512), Part(4, 776))


def test_mooncake_blocks_that_part_ways(tmp_path: Path) -> None:
    # Block 7 ends one prompt in the middle and is followed in another: the shorter is a prefix of the longer.
    path = written(
        tmp_path / "t.jsonl",
        {"timestamp": 0, "input_length": 612, "output_length": 1, "hash_ids": [6, 7]},
        {"timestamp": 0, "input_length": 1536, "output_length": 1, "hash_ids": [6, 7, 8]},
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [9, 8]},
    )
    short, long, other = (session.turns[0].prompt for session in sessions(read_load(path)))
    assert long.names_every(4)[:153] == short.names_every(4)
    assert not set(other.names_every(4)) & set(long.names_every(4))


def test_only_the_first_requests(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [0]}
    assert read_load(written(tmp_path / "t.jsonl", row, row, row), 2).requests == 2


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:04.0319600,396,109\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
    )
    first, second = sessions(read_load(path))
    assert (first.arrival_s, first.turns[0].prompt.tokens, first.turns[0].output_tokens) == (0.0, 4808, 10)
    assert second.arrival_s == pytest.approx(0.052)
    assert second.turns[0].prompt.parts[0].content != first.turns[0].prompt.parts[0].content


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,ContextTokens\n0,1\n", "lacks generatedtokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n0,many,1\n", ":2: "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n0,1\n", ":2: "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ("", "lacks timestamp, contexttokens, generatedtokens"),
    ],
)
def test_azure_faults(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_load(path)


def test_sessions_of_lengths_accumulate(tmp_path: Path) -> None:
    path = written(
        tmp_path / "s.jsonl",
        {"session_id": "a", "timestamp": 5000, "input_length": 300, "output_length": 40},
        {"session_id": "b", "timestamp": 4000, "input_length": 700, "output_length": 1, "hash_ids": [1, 2]},
        {"session_id": "a", "delay": 2500, "input_length": 50, "output_length": 7},
    )
    b, a = sessions(read_load(path))
    assert (b.key, b.arrival_s, a.key, a.arrival_s) == ("b", 0.0, "a", 1.0)
    assert b.turns[0].prompt.parts == (Part(1, 512), Part(2, 188))
    first, second = a.turns
    assert second.think_s == 2.5
    assert second.prompt.parts[0] == first.prompt.parts[0]
    assert second.prompt.parts[1] == Part(first.answer, 40, "assistant")
    assert second.prompt.tokens == 300 + 40 + 50


def test_a_turn_with_a_timestamp_does_not_wait(tmp_path: Path) -> None:
    path = written(
        tmp_path / "s.jsonl",
        {"session_id": "a", "timestamp": 0, "input_length": 300, "output_length": 40},
        {"session_id": "a", "timestamp": 900, "input_length": 50, "output_length": 7},
    )
    first, second = sessions(read_load(path))
    assert (first.key, second.key, second.arrival_s) == ("a", "a", 0.9)
    assert second.turns[0].prompt.tokens == 390


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_recorded_messages(tmp_path: Path) -> None:
    opening = [message("system", "s" * 400), message("user", "u" * 40)]
    path = written(
        tmp_path / "s.jsonl",
        {"session_id": 1, "messages": opening, "output_length": 30, "timestamp": 0},
        {
            "session_id": 1,
            "messages": [*opening, message("assistant", "a" * 120), message("user", "v" * 9)],
            "output_length": 5,
            "delay": 1000,
        },
    )
    (session,) = sessions(read_load(path))
    first, second = session.turns
    assert [part.tokens for part in first.prompt.parts] == [100, 10]
    # The answer the engine makes is the one that the next turn repeats.
    assert second.prompt.parts[2] == Part(first.answer, 30, "assistant")
    assert second.prompt.parts[3].tokens == 3
    assert second.think_s == 1.0


def test_messages_as_deltas(tmp_path: Path) -> None:
    row = {"session_id": 1, "message_mode": "delta", "output_length": 30}
    path = written(
        tmp_path / "s.jsonl",
        {**row, "messages": [message("user", "u" * 40)]},
        {**row, "messages": [message("user", "v" * 40)], "delay": 10},
    )
    (session,) = sessions(read_load(path))
    assert [part.tokens for part in session.turns[1].prompt.parts] == [10, 30, 10]


def test_vllm_conversations(tmp_path: Path) -> None:
    path = tmp_path / "conversations.json"
    conversations = [
        {"id": "x", "messages": [message("user", "1" * 8), message("assistant", "2" * 16), message("user", "3" * 4),
                                 message("assistant", "4" * 8), message("user", "unanswered")]},
        {"id": "y", "messages": [message("user", "alone")]},
        {"messages": [message("user", "1" * 8), message("assistant", "5" * 4)]},
    ]  # fmt: skip
    path.write_text(json.dumps(conversations))
    first, second = sessions(read_load(path))
    assert [(turn.prompt.tokens, turn.output_tokens) for turn in first.turns] == [(2, 4), (7, 2)]
    assert first.turns[1].prompt.parts[1].content == first.turns[0].answer
    assert (first.key, second.key, second.arrival_s) == ("x", "2", 1.0)
    assert second.turns[0].prompt.name == first.turns[0].prompt.name


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"session_id": "a", "timestamp": 0}\n', ":1: a row needs input_length or messages"),
        ("a.jsonl", '{"session_id": "a", "input_length": 0}\n', ":1: input_length"),
        ("a.jsonl", '{"session_id": "a", "input_length": 1}\n{"inp\n', ":2: "),
        ("a.jsonl", "", "no request"),
        ("a.json", "{}", "a.json: "),
        ("a.json", "[]", "no conversation"),
    ],
)
def test_faults_name_file_and_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_load(path)


@pytest.mark.parametrize("name", ["none.jsonl", "none.json", "none.csv"])
def test_files_that_are_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError, match="none"):
        read_load(tmp_path / name)
