"""Cells on disk: one JSON file each.

A file is named by scenario, policy, seed and a digest of everything the cell was asked for: the scenario's fields, the
policy's options, the seed, the trace's bytes. A changed scenario is another cell. Changed code is not noticed: most
changes concern one policy, and its cells are dropped with `--fresh`; after a change of engine, workloads or columns
drop all with `--fresh all`. What the code was is noted in each cell, so that a report can tell when cells of one policy
come from different versions.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson

from loadtests.compare.cell import Cell
from loadtests.compare.scenario import DEFAULT_FLEET, TRACE, Scenario
from loadtests.replay.options import FleetOptions

_ROOT = Path(__file__).parents[2]
_SOURCES = ("policies", "gateway/estimator", "gateway/prefixes", "gateway/replicas", "gateway/routing")
_SIMULATOR = ("loadtests/engine", "loadtests/replay", "loadtests/workloads")

_IRRELEVANT = frozenset({"name", "group", "policies", "seeds", "fleet"})
"""Fields of a scenario that say nothing about a cell, or are looked at on their own."""


def digest_of_files(paths: Iterable[Path]) -> str:
    """A short digest of the bytes of files, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def source_digest() -> str:
    """A short digest of the code that decides what a cell says."""
    return digest_of_files(path for part in (*_SOURCES, *_SIMULATOR) for path in sorted((_ROOT / part).rglob("*.py")))


def _said(thing: Scenario | FleetOptions, default: Scenario | FleetOptions) -> dict[str, Any]:
    """Fields that differ from the defaults, so that a new option leaves the names of cells alone that do without it."""
    return {
        field.name: value
        for field in fields(thing)
        if field.name not in _IRRELEVANT and (value := getattr(thing, field.name)) != getattr(default, field.name)
    }


def key(cell: Cell, trace_digest: str) -> str:
    """The name of a cell's file, without its suffix.

    Args:
        cell: which.
        trace_digest: `digest_of_files` of the trace.
    """
    asked = {
        "scenario": _said(cell.scenario, Scenario("", cell.scenario.group, "")),
        "fleet": _said(cell.scenario.fleet, DEFAULT_FLEET),
        "policy": cell.policy,
        "seed": cell.seed,
        "trace": trace_digest if cell.scenario.workload == TRACE else None,
    }
    digest = hashlib.sha256(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)).hexdigest()[:8]
    policy = cell.policy.replace(":", "+")
    return f"{cell.scenario.name}--{policy}--{cell.seed}--{digest}"


class Cache:
    """A directory of cells.

    Args:
        directory: where; made if need be.
        trace: the trace file, if there is one.
    """

    def __init__(self, directory: Path, trace: Path | None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._trace_digest = digest_of_files([trace]) if trace is not None else ""

    def load(self, cell: Cell) -> dict[str, Any] | None:
        """What is stored of a cell; None if nothing is."""
        path = self._path(cell)
        if not path.exists():
            return None
        stored: dict[str, Any] = orjson.loads(path.read_bytes())
        return stored

    def store(self, cell: Cell, content: dict[str, Any]) -> None:
        """Keep a cell; a file is there as a whole or not at all."""
        path = self._path(cell)
        unfinished = path.with_suffix(".part")
        unfinished.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        unfinished.replace(path)

    def drop(self, cell: Cell) -> None:
        """Forget a cell."""
        self._path(cell).unlink(missing_ok=True)

    def _path(self, cell: Cell) -> Path:
        return self._directory / f"{key(cell, self._trace_digest)}.json"
