"""Every workload by its name."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtests.workloads.conversations import AgentLoops, Chat, DocumentQuestions
from loadtests.workloads.files import read_load
from loadtests.workloads.ladder import STEPS_37, Ladder
from loadtests.workloads.prefixes import Bursts, MixedLengths, NoReuse, SharedPrefixes, ViralPrefix
from loadtests.workloads.types import Load, Workload

WORKLOADS: Mapping[str, Workload] = {
    "b2b-saas": Ladder(),
    "b2b-saas-37": Ladder(
        groups=83, prompts_per_group=3, system_tokens=8000, question_tokens=1000, output_tokens=1000, steps=STEPS_37
    ),
    "shared-prefixes": SharedPrefixes(),
    "chat": Chat(),
    "agent-loops": AgentLoops(),
    "document-questions": DocumentQuestions(),
    "no-reuse": NoReuse(),
    "viral-prefix": ViralPrefix(),
    "mixed-lengths": MixedLengths(),
    "bursts": Bursts(),
}
"""The workloads with their default parameters."""


def with_params(workload: Workload, params: Sequence[str]) -> Workload:
    """A workload with other parameters.

    Args:
        workload: one of `WORKLOADS`.
        params: `name=value` words.

    Raises:
        ValueError: malformed, no such parameter, or not a value of its type.
    """
    known = {field.name: field for field in dataclasses.fields(workload)}
    changes: dict[str, Any] = {}
    for word in params:
        name, separator, value = word.partition("=")
        if not separator or name not in known:
            raise ValueError(f"expected name=value with one of {', '.join(known)}, got {word!r}")
        kind: type[Any] = type(getattr(workload, name))
        try:
            changes[name] = kind(value)
        except ValueError:
            raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r}") from None
    return dataclasses.replace(workload, **changes)


def load_named(name: str, params: Sequence[str], seed: int, limit: int | None = None) -> Load:
    """Draw a workload or read a trace file.

    Args:
        name: a key of `WORKLOADS`, or the path of a file.
        params: `name=value` words for a workload.
        seed: of a workload.
        limit: keep only so many of the first requests, or what is left of a session that has begun by then.

    Raises:
        ValueError: neither a workload nor a file, or parameters that do not fit.
        OSError: the file cannot be read.
    """
    workload = WORKLOADS.get(name)
    if workload is None:
        path = Path(name)
        if not path.exists():
            raise ValueError(f"{name!r} is neither a file nor a workload; workloads: {', '.join(WORKLOADS)}")
        if params:
            raise ValueError("--param is for workloads, not for files")
        return read_load(path, limit)
    load = dataclasses.replace(with_params(workload, params).load(seed), name=name)
    return load if limit is None else load.first(limit)
