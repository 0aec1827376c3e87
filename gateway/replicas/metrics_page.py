"""From a vLLM `/metrics` page to the few facts the gateway uses. Pure.

A page has 60 KB and 800 lines, of which nine matter. One search over the page picks those before anything is parsed:
parsing the whole page would hold the event loop for more than 10 ms. Names and labels of a line are the same at every
scrape, so they are parsed once, and a scrape reads the values behind them.

Rules
- Missing is not zero: a fact the page does not tell is None.
- Several engines (data parallelism, label `engine`) are summed; usage is their mean weighted by capacity.
- Where a page has an old and a new name of the same thing, the new one counts and the old one is not added.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

RUNNING = ("vllm:num_requests_running",)
WAITING = ("vllm:num_requests_waiting",)
# New names first. gpu_* are those of vLLM before 0.10.
USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
PREFIX_QUERIES = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries",
)
PREFIX_HITS = (
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_hits",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits",
)
CACHE_CONFIG = ("vllm:cache_config_info",)
PROCESS_START = ("process_start_time_seconds",)

_NAMESPACE = "vllm:"


def _wanted_lines() -> re.Pattern[bytes]:
    names = (*RUNNING, *WAITING, *USAGE, *PREFIX_QUERIES, *PREFIX_HITS, *CACHE_CONFIG)
    # The namespace stands before the names and not in each: most lines have it, and it is compared once.
    choices = "|".join(re.escape(name.removeprefix(_NAMESPACE)) for name in names)
    others = "|".join(map(re.escape, PROCESS_START))
    # The byte after the name keeps out the longer names (num_requests_waiting_by_reason, ..._created).
    return re.compile(rf"\n((?:{_NAMESPACE}(?:{choices})|{others})[{{ ][^\n]*)".encode())


_WANTED_LINES = _wanted_lines()
_CONFIG_HEAD = CACHE_CONFIG[0].encode()


@dataclass(frozen=True, slots=True)
class ScrapedState:
    """What a replica's metrics last said. None where they did not say, or said it too long ago."""

    running: int | None = None
    """Requests in the engines' batches."""
    waiting: int | None = None
    """Requests in the engines' queues."""
    kv_usage: float | None = None
    """Share of KV memory in use, 0 to 1."""
    prefix_queries_tokens: float | None = None
    """Counter: prompt tokens looked up in the prefix cache."""
    prefix_hits_tokens: float | None = None
    """Counter: prompt tokens found there."""
    kv_capacity_tokens: int | None = None
    """Tokens of KV memory of all engines."""
    block_size_tokens: int | None = None
    """Tokens per KV block."""
    num_gpu_blocks: int | None = None
    """KV blocks of all engines."""
    process_start_s: float | None = None
    """When the server process started, seconds since the epoch. A change means a restart."""
    scraped_at_s: float | None = None
    """The gateway's monotonic clock at the scrape."""

    def aged(self) -> "ScrapedState":
        """The state once its measurements are too old: they are None, the engine's constants remain."""
        return replace(
            self,
            running=None,
            waiting=None,
            kv_usage=None,
            prefix_queries_tokens=None,
            prefix_hits_tokens=None,
        )


NOTHING_SCRAPED = ScrapedState()


def read_metrics(page: bytes, now_s: float) -> ScrapedState:
    """Read one metrics page.

    Args:
        page: the body, in Prometheus or OpenMetrics text format.
        now_s: the gateway's monotonic clock, kept as `scraped_at_s`.

    Raises:
        ValueError: when a wanted line is malformed.
    """
    engines: list[_EngineCache] = []
    samples: dict[str, list[_Sample]] = {}
    for line in _WANTED_LINES.findall(b"\n" + page):
        if line.startswith(_CONFIG_HEAD):
            engines.append(_read_engine_cache(line))
        else:
            name, sample = _read_sample(line)
            if math.isfinite(sample.value):
                samples.setdefault(name, []).append(sample)

    block_sizes = [engine.block_size_tokens for engine in engines if engine.block_size_tokens is not None]
    start = [sample.value for sample in _first(samples, PROCESS_START)]
    return ScrapedState(
        running=_as_int(_total(_first(samples, RUNNING))),
        waiting=_as_int(_total(_first(samples, WAITING))),
        kv_usage=_mean_usage(_first(samples, USAGE), engines),
        prefix_queries_tokens=_total(_first(samples, PREFIX_QUERIES)),
        prefix_hits_tokens=_total(_first(samples, PREFIX_HITS)),
        kv_capacity_tokens=_sum_known(engine.capacity_tokens for engine in engines),
        block_size_tokens=block_sizes[0] if block_sizes else None,
        num_gpu_blocks=_sum_known(engine.num_gpu_blocks for engine in engines),
        process_start_s=start[0] if start else None,
        scraped_at_s=now_s,
    )


class _Sample(NamedTuple):
    engine: str
    value: float


@dataclass(frozen=True, slots=True)
class _EngineCache:
    """One engine's `cache_config_info`, whose values are labels and may be the string "None"."""

    engine: str
    block_size_tokens: int | None
    num_gpu_blocks: int | None
    capacity_tokens: int | None


# The line is the same at every scrape of a process and dear to parse, with its forty labels.
@lru_cache(maxsize=1024)
def _read_engine_cache(line: bytes) -> _EngineCache:
    labels = _parse(line).labels
    block_size = _label_int(labels.get("block_size"))
    blocks = _label_int(labels.get("num_gpu_blocks"))
    # Newer engines tell the capacity itself. For hybrid models (several KV groups) it is not the product: a
    # block there does not hold block_size tokens of every layer.
    capacity = _label_int(labels.get("kv_cache_size_tokens"))
    if capacity is None and block_size is not None and blocks is not None:
        capacity = block_size * blocks
    return _EngineCache(labels.get("engine", "0"), block_size, blocks, capacity)


def _read_sample(line: bytes) -> tuple[str, _Sample]:
    head, _, value = line.rpartition(b" ")
    # What float() takes but the format does not, and tabs between numbers, are the parser's business.
    known = None if b"_" in value or b"\t" in value else _read_head(head)
    if known is None:
        sample = _parse(line)
        return sample.name, _Sample(_engine(sample), sample.value)
    name, engine = known
    return name, _Sample(engine, float(value))


@lru_cache(maxsize=4096)
def _read_head(head: bytes) -> tuple[str, str] | None:
    """Name and engine of what stands before the last space of a line; None if that is more than name and labels."""
    try:
        sample = _parse(head + b" 0")
    except ValueError:
        return None
    # With a time stamp or an exemplar in the line, the head has a number of its own.
    if sample.value != 0 or sample.timestamp is not None:
        return None
    return sample.name, _engine(sample)


def _engine(sample: Sample) -> str:
    return str(sample.labels.get("engine", "0"))


def _parse(line: bytes) -> Sample:
    # The parser wants whole lines, hence the line end.
    text = line.decode("utf-8", errors="replace") + "\n"
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            return sample
    raise ValueError(f"no sample in {text[:100]!r}")


def _first(samples: dict[str, list[_Sample]], names: tuple[str, ...]) -> list[_Sample]:
    for name in names:
        if name in samples:
            return samples[name]
    return []


def _total(samples: list[_Sample]) -> float | None:
    return sum(max(sample.value, 0.0) for sample in samples) if samples else None


def _as_int(value: float | None) -> int | None:
    return None if value is None else round(value)


def _sum_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean_usage(samples: list[_Sample], engines: list[_EngineCache]) -> float | None:
    if not samples:
        return None
    weights = {engine.engine: float(engine.capacity_tokens or 0) for engine in engines}
    weighted = [(weights.get(sample.engine, 0.0), sample.value) for sample in samples]
    if any(weight <= 0 for weight, _ in weighted):
        weighted = [(1.0, value) for _, value in weighted]
    mean = sum(weight * value for weight, value in weighted) / sum(weight for weight, _ in weighted)
    return min(max(mean, 0.0), 1.0)


def _label_int(text: str | None) -> int | None:
    """A positive whole number, or None for a missing label, "None", "0" or anything else."""
    if text is None or not (text.isascii() and text.isdecimal()):
        return None
    return int(text) or None
