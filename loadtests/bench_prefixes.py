"""Cost of prompt keys and of the prefix index: `python -m loadtests.bench_prefixes`.

Prints, for fixed 256-byte blocks and for the growing schedule, microseconds of parsing and hashing by prompt
length, of look-ups, insertions and evictions, and bytes of memory per (block, replica) entry. Times are the best of
many short runs, so that other load on the machine matters little. Memory is the growth of the resident set, with
everything the index keeps: keys, dictionaries, segments.
"""

import argparse
import gc
import os
import random
import resource
import timeit
from collections.abc import Callable
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from gateway.prefixes.index import PrefixIndex, Record
from gateway.prompt.blocks import BlockSchedule
from gateway.prompt.body import parse_body
from gateway.prompt.canonical import canonical_prompt

CHAT = "/v1/chat/completions"
SCHEDULES = {"fixed": BlockSchedule(growth=0), "growing": BlockSchedule()}
UNBOUNDED = 1 << 60


def best_us(call: Callable[[], object], number: int) -> float:
    """Least microseconds per call over 25 runs of `number` calls."""
    return min(timeit.repeat(call, number=number, repeat=25)) / number * 1e6


def once_us(call: Callable[[int], object], times: int) -> float:
    """Mean microseconds per call of `call(0)`, `call(1)`, ... when each can be made only once."""
    numbers = range(times)
    start = timeit.default_timer()
    for number in numbers:
        call(number)
    return (timeit.default_timer() - start) / times * 1e6


def chat_body(length_bytes: int, rng: random.Random) -> bytes:
    """A chat of a system prompt and three turns, of about `length_bytes` bytes of text."""
    words = ["the", "of", "and", "route", "cache", "prefix", "token", "replica", "prefill", "decode", "memory", "batch"]

    def text(length: int) -> str:
        return " ".join(rng.choices(words, k=length // 4))[:length]

    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    messages = [{"role": role, "content": text(length_bytes // 6)} for role in roles]
    return orjson.dumps({"model": "m", "messages": messages, "stream": True, "max_tokens": 200})


def chain(blocks: int, rng: random.Random) -> list[int]:
    """Hashes as of an unseen prompt."""
    return [rng.getrandbits(60) for _ in range(blocks)]


def parsing_row(kilobytes: int, rng: random.Random) -> tuple[str, ...]:
    """Microseconds from body bytes to key, for one length of prompt."""
    body = chat_body(kilobytes * 1024, rng)
    document = orjson.loads(body)
    canonical = canonical_prompt(CHAT, document)
    assert canonical is not None
    data = canonical[0]
    fixed, growing = SCHEDULES["fixed"], SCHEDULES["growing"]
    calls: list[Callable[[], object]] = [
        lambda: orjson.loads(body),
        lambda: canonical_prompt(CHAT, document),
        lambda: fixed.hashes(data, 1),
        lambda: growing.hashes(data, 1),
        lambda: parse_body(CHAT, body, fixed),
        lambda: parse_body(CHAT, body, growing),
    ]
    return str(kilobytes), *(f"{best_us(call, max(2, 400 // kilobytes)):.1f}" for call in calls)


def parsing(rng: random.Random) -> Table:
    """Microseconds from body bytes to key."""
    table = Table(title="body to key, microseconds")
    for column in ("KB", "JSON parse", "canonical", "hash fixed", "hash growing", "total fixed", "total growing"):
        table.add_column(column, justify="right")
    for kilobytes in (1, 32, 128, 512):
        table.add_row(*parsing_row(kilobytes, rng))
    return table


def look_up_us(schedule: BlockSchedule, prompt: list[int], held: list[int], rng: random.Random) -> float:
    """Microseconds of `match` when replica `i` holds the first `held[i]` blocks of the prompt."""
    index = PrefixIndex(schedule, UNBOUNDED)
    for slot, blocks in enumerate(held):
        index.insert(slot, prompt[:blocks] if blocks else chain(4, rng))
    return best_us(lambda: index.match(prompt), 20)


def look_ups(rng: random.Random) -> Table:
    """Microseconds of `match` for a prompt of 512 KB (128 k tokens)."""
    table = Table(title="look-up of a 512 KB prompt, microseconds")
    for column in ("schedule", "blocks", "replicas", "none hold it", "all hold 1/4", "all hold all", "all differ"):
        table.add_column(column, justify="right")
    for name, schedule in SCHEDULES.items():
        blocks = len(schedule.hashes(bytes(512 * 1024), 1))
        prompt = chain(blocks, rng)
        for replicas in (8, 64, 1000):
            cases = [[share] * replicas for share in (0, blocks // 4, blocks)]
            cases.append([rng.randint(1, blocks) for _ in range(replicas)])
            costs = [look_up_us(schedule, prompt, held, rng) for held in cases]
            table.add_row(name, str(blocks), str(replicas), *(f"{cost:.1f}" for cost in costs))
    return table


def insertion_row(name: str, kilobytes: int, rng: random.Random) -> tuple[str, ...]:
    """Microseconds of `insert`, `undo` and eviction for prompts of one length."""
    schedule = SCHEDULES[name]
    blocks = len(schedule.hashes(bytes(kilobytes * 1024), 1))
    half = blocks // 2
    times = 200
    prompts = [chain(blocks, rng) for _ in range(times)]
    branches = [prompt[:half] + chain(blocks - half, rng) for prompt in prompts]
    index = PrefixIndex(schedule, UNBOUNDED)
    new = once_us(lambda i: index.insert(0, prompts[i]), times)
    again = once_us(lambda i: index.insert(0, prompts[i]), times)
    records: list[Record] = []
    branch = once_us(lambda i: records.append(index.insert(0, branches[i])), times)
    undo = once_us(lambda i: index.undo(records[i]), times)
    full = PrefixIndex(schedule, 4 * schedule.covered_bytes(blocks))
    for _ in range(4):
        full.insert(0, chain(blocks, rng))
    evicting = once_us(lambda i: full.insert(0, prompts[i]), times)
    return name, str(blocks), *(f"{cost:.1f}" for cost in (new, again, branch, undo, evicting))


def insertions(rng: random.Random) -> Table:
    """Microseconds of what changes the index."""
    table = Table(title="insertion, microseconds")
    for column in ("schedule", "blocks", "new", "again", "branch at half", "undo", "new, evicting as much"):
        table.add_column(column, justify="right")
    for name in SCHEDULES:
        for kilobytes in (1, 32, 512):
            table.add_row(*insertion_row(name, kilobytes, rng))
    return table


def resident_bytes() -> int:
    """Resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def fill(index: PrefixIndex, workload: str, entries: int, replicas: int, schedule: BlockSchedule) -> int:
    """Insert prompts until about `entries` (block, replica) pairs are held; returns how many are."""
    rng = random.Random(7)
    held = 0
    systems = [chain(len(schedule.hashes(bytes(24 * 1024), 1)), rng) for _ in range(16)]
    long = len(schedule.hashes(bytes(128 * 1024), 1))
    while held < entries:
        slot = rng.randrange(replicas)
        if workload == "documents":
            index.insert(slot, chain(long, rng))
            held += long
        else:
            # Each conversation starts with one of 16 system prompts and goes on for four turns of 2 KB.
            prompt = rng.choice(systems)
            for _ in range(4):
                prompt = prompt + chain(8, rng)
                index.insert(slot, prompt)
            held += 32
    return sum(index.blocks(slot) for slot in range(replicas))


def memory_row(name: str, workload: str, entries: int) -> tuple[str, ...]:
    """Bytes per entry, measured in a child process that does nothing else."""
    schedule = SCHEDULES[name]
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        before = resident_bytes()
        index = PrefixIndex(schedule, UNBOUNDED)
        held = fill(index, workload, entries, 64, schedule)
        gc.collect()
        growth = resident_bytes() - before
        start = timeit.default_timer()
        gc.collect()
        collect_ms = (timeit.default_timer() - start) * 1e3
        start = timeit.default_timer()
        index.forget(0)
        forget_us = (timeit.default_timer() - start) * 1e6
        os.write(writable, orjson.dumps([held, growth / held, collect_ms, forget_us]))
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        held, bytes_per_entry, collect_ms, forget_us = orjson.loads(pipe.read())
    os.waitpid(child, 0)
    return name, workload, f"{held:,}", f"{bytes_per_entry:.0f}", f"{collect_ms:.1f}", f"{forget_us:.1f}"


def memory(entries: int) -> Table:
    """Bytes per (block, replica) entry over 64 replicas."""
    table = Table(title="memory over 64 replicas")
    for column in ("schedule", "prompts", "entries", "bytes per entry", "full gc ms", "forget us"):
        table.add_column(column, justify="right")
    for name in SCHEDULES:
        for workload in ("documents", "conversations"):
            table.add_row(*memory_row(name, workload, entries))
    return table


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--entries", type=int, default=1_000_000, help="(block, replica) entries to measure memory at")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    console = Console()
    # Memory first: the children are copies of this process, and measure best while it is small.
    console.print(memory(arguments.entries))
    console.print(parsing(rng))
    console.print(look_ups(rng))
    console.print(insertions(rng))


if __name__ == "__main__":
    main()
