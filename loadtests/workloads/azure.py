"""Traces of lengths only, as Azure publishes them: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

Source: Azure/AzurePublicDataset, AzureLLMInferenceDataset2023 and 2024. Such traces do not say what prompts share, so
here they share nothing.
"""

import csv
from datetime import datetime
from pathlib import Path

from loadtests.trace import TraceError
from loadtests.workloads.prompt import Part, Prompt
from loadtests.workloads.types import Load, Session, Stage, Turn

_COLUMNS = ("timestamp", "contexttokens", "generatedtokens")


def read(path: Path, limit: int | None = None) -> Load:
    """Read a trace of lengths.

    Args:
        path: CSV file; the columns are found by name in any case, timestamps are ISO 8601 dates or plain seconds.
        limit: keep only the first arrivals.

    Raises:
        TraceError: the file cannot be read, lacks a column, or has a bad line.
    """
    rows: list[tuple[float, int, int]] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.reader(lines)
            header = [name.strip().lower() for name in next(reader, [])]
            missing = [name for name in _COLUMNS if name not in header]
            if missing:
                raise TraceError(f"{path}: the header lacks {', '.join(missing)}")
            at, prompt, output = (header.index(name) for name in _COLUMNS)
            for row in reader:
                if not row:
                    continue
                try:
                    rows.append((_seconds(row[at]), max(int(row[prompt]), 1), max(int(row[output]), 1)))
                except (ValueError, IndexError) as error:
                    raise TraceError(f"{path}:{reader.line_num}: {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: {error}") from None
    if not rows:
        raise TraceError(f"{path}: the trace holds no request")
    rows.sort()
    rows = rows[:limit]
    sessions = [
        Session(at_s - rows[0][0], (Turn(Prompt([Part(2 * number, prompt_tokens)]), output_tokens, 2 * number + 1),))
        for number, (at_s, prompt_tokens, output_tokens) in enumerate(rows)
    ]
    return Load(path.stem, (Stage("trace", sessions),))


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text.strip()).timestamp()
