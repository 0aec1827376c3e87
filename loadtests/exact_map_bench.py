"""What the exact map costs: `python -m loadtests.exact_map_bench [--model DIR]`.

Three figures: KV events a second on one core, with memory per block; event-loop time per long prompt, cold and in the
next turn; and how long other work of the event loop is held up meanwhile.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import time
import tracemalloc
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import click
import uvloop
import zmq

from gateway.prefixes.events.block_map import BlockMap
from gateway.prefixes.events.sources import Source
from gateway.prefixes.events.subscriber import Subscriber
from gateway.prefixes.events.wire import BlockStored as StoredEvent
from gateway.prompt.token_chain import TokenChain, TokenPrompt
from gateway.prompt.tokenise.model_files import ModelTokens, load_model
from gateway.prompt.tokenise.pool import TokenPool
from loadtests.replica.kv_events import BlockRemoved, BlockStored, Publisher

BLOCK = 16
REPLICAS = 8
_WORDS = Path(__file__).read_text(encoding="utf-8").split() + Path(zmq.__file__).read_text(encoding="utf-8").split()


def _stored(number: int, blocks: int, parent: int | None) -> BlockStored:
    names = [(number << 20) + i + (1 << 62) for i in range(blocks)]
    tokens = [(number * 7919 + i * 31) % 150_000 for i in range(blocks * BLOCK)]
    return BlockStored(names, parent, tokens, BLOCK, None, "GPU", None, [None] * blocks, 0, "full_attention")


def _publish(endpoint: str, messages: int, prefill: bool, go: Event) -> None:
    """One engine in a process of its own: steps of 512 prefilled blocks, or of 32 decodes that fill a block each."""

    async def run() -> None:
        publisher = Publisher(endpoint, None, "kv@bench")
        go.wait()
        for number in range(messages):
            events: list[Any]
            events = [_stored(number, 512, None)] if prefill else [_stored(number * 32 + i, 1, None) for i in range(32)]
            if number >= 100:
                old = events_of(number - 100, prefill)
                events = [*(BlockRemoved([name], "GPU", 0) for name in old), *events]
            publisher.publish(events)
        await asyncio.sleep(2)
        publisher.close()

    asyncio.run(run())


def events_of(number: int, prefill: bool) -> list[int]:
    """Names of the blocks of a step."""
    if prefill:
        return [(number << 20) + i + (1 << 62) for i in range(512)]
    return [((number * 32 + i) << 20) + (1 << 62) for i in range(32)]


async def _follow(messages: int, prefill: bool) -> tuple[int, float, float]:
    """Blocks told, CPU seconds of this process for them (libzmq's threads included), longest hold-up of the loop."""
    subscriber = Subscriber(TokenChain(), bind="tcp://127.0.0.1:*")
    feed = subscriber.open("bench", [Source(0, "kv@bench", None, None)])
    stream = feed.streams[0]
    go = multiprocessing.get_context("spawn").Event()
    endpoint = f"tcp://127.0.0.1:{subscriber.bound_port}"
    process = multiprocessing.get_context("spawn").Process(target=_publish, args=(endpoint, messages, prefill, go))
    process.start()
    await asyncio.sleep(2)
    go.set()
    while not stream.messages:  # noqa: ASYNC110 - nothing tells of messages
        await asyncio.sleep(0.001)
    before = _cpu_s()
    last = time.perf_counter()
    worst = 0.0
    while stream.messages < messages:
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        worst, last = max(worst, now - last - 0.001), now
    cpu_s = _cpu_s() - before
    await asyncio.to_thread(process.join)
    told = stream.blocks.stored + stream.blocks.removed
    subscriber.close()
    return told, cpu_s, worst


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _memory(blocks: int) -> float:
    """Bytes per block of a map."""
    tracemalloc.start()
    held = BlockMap(TokenChain(), blocks + 1)
    for number in range(blocks // 512):
        made = _stored(number, 512, None)
        event = StoredEvent(list(made.block_hashes), None, made.token_ids, BLOCK, medium="GPU")
        held.apply([event])
        del made, event
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / len(held)


def _text(words: int, seed: int) -> str:
    return " ".join(_WORDS[(seed * 131 + i * (seed % 7 + 1)) % len(_WORDS)] for i in range(words))


def _match_all(maps: list[BlockMap], hashes: Sequence[int]) -> list[int]:
    return [held.match(hashes) for held in maps]


class _Clock:
    """CPU time of the event loop's thread in what is measured."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def of(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start_s = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self.spent_s += time.thread_time() - start_s

        return timed


async def _prompts(model: ModelTokens, tokens: int, rounds: int) -> dict[str, list[float]]:
    pool = TokenPool({"m": model}, threads=2, wait_s=30.0, block_tokens=lambda: (BLOCK,))
    maps = [BlockMap(TokenChain(), 1 << 20) for _ in range(REPLICAS)]
    figures: dict[str, list[float]] = {
        name: [] for name in ("loop cold", "loop next", "wait cold", "wait next", "held up")
    }
    loop = asyncio.get_running_loop()
    for round_number in range(rounds):
        words = int(tokens * 0.45)
        part = words // 12
        messages = [{"role": "system", "content": _text(part, round_number * 100)}]
        for turn in range(5):
            messages.append({"role": "user", "content": _text(part, round_number * 100 + turn * 2 + 1)})
            messages.append({"role": "assistant", "content": _text(part, round_number * 100 + turn * 2 + 2)})
        messages.append({"role": "user", "content": _text(part, round_number * 100 + 50)})
        for kind in ("cold", "next"):
            clock = _Clock()
            done: asyncio.Future[TokenPrompt | None] = loop.create_future()
            pool._deliver = clock.of(TokenPool._deliver.__get__(pool))  # type: ignore[method-assign]
            worst = 0.0
            started_s = time.perf_counter()
            clock.of(pool.fetch)("/v1/chat/completions", {"messages": list(messages)}, "m", "", done.set_result)
            while not done.done():
                before = time.perf_counter()
                await asyncio.sleep(0)
                worst = max(worst, time.perf_counter() - before)
            wait_s = time.perf_counter() - started_s
            prompt = done.result()
            assert prompt is not None
            hashes = prompt.hashes(BLOCK)
            assert hashes is not None
            if kind == "cold":
                for number, held in enumerate(maps):
                    held._held.update(dict.fromkeys(hashes[: len(hashes) * (number + 1) // REPLICAS], 1))
            clock.of(_match_all)(maps, hashes)
            figures[f"loop {kind}"].append(clock.spent_s * 1000)
            figures[f"wait {kind}"].append(wait_s * 1000)
            figures["held up"].append(worst * 1000)
            figures.setdefault("tokens", []).append(prompt.count)
            messages.append({"role": "assistant", "content": _text(100, round_number)})
            messages.append({"role": "user", "content": _text(40, round_number + 1)})
    pool.close()
    return figures


async def _run(model: Path | None, tokens: int, rounds: int) -> None:
    for prefill, messages in ((True, 400), (False, 6000)):
        told, cpu_s, worst_s = await _follow(messages, prefill)
        what = "steps of 512 prefilled blocks" if prefill else "steps of 32 decodes"
        click.echo(
            f"{what}: {told} blocks in {cpu_s:.3f} s of CPU, {told / cpu_s:,.0f} a second on one core; "
            f"the loop was held up for {worst_s * 1000:.1f} ms at most"
        )
    for blocks in (40_960, 102_400, 409_600):
        click.echo(f"a map of {blocks} blocks takes {_memory(blocks):.0f} bytes a block")
    if model is not None:
        figures = await _prompts(load_model(model), tokens, rounds)
        for name, values in figures.items():
            values.sort()
            click.echo(f"{name}: median {values[len(values) // 2]:.3f}, most {values[-1]:.3f} ms or tokens")


@click.command()
@click.option(
    "--model", type=click.Path(exists=True, path_type=Path), help="Directory with a tokenizer and a template."
)
@click.option("--tokens", default=30_000, help="Of a prompt, about.")
@click.option("--rounds", default=20, help="Conversations.")
def main(model: Path | None, tokens: int, rounds: int) -> None:
    """Measure what the exact map costs."""
    uvloop.run(_run(model, tokens, rounds))


if __name__ == "__main__":
    main()
