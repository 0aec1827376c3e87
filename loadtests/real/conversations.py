"""Conversations with long system prompts of their own, some at once: the workload of the comparison.

A few workers each take a conversation that is not under way, in random order, send its next turn, and put it back. The
random order matters: conversations taken in turn would meet round robin's replicas in turn, and look like affinity.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import orjson

from loadtests.sse_stream import ChatResult, StreamObserver

_TEXT = (
    "the request reaches a replica that holds its prefix and computes only what is new because every block before it "
    "stays in memory until another needs the room so the answer begins sooner while others wait for less work to end "
    "import return class value number list table order north river light paper window silver garden winter letter"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class ConversationLoad:
    """Parameters of the workload.

    Args:
        sessions: conversations.
        turns: requests of each.
        system_words: length of each system prompt.
        question_words: length of each question.
        answer_tokens: length of each answer.
        at_once: requests under way at a time.
    """

    sessions: int = 12
    turns: int = 4
    system_words: int = 620
    question_words: int = 30
    answer_tokens: int = 32
    at_once: int = 2


@dataclass(slots=True)
class Turn:
    """One request and what became of it."""

    number: int
    """0 for the first of its conversation."""
    result: ChatResult


@dataclass(slots=True)
class _Session:
    messages: list[dict[str, str]]
    turns: int = 0


async def converse(http: aiohttp.ClientSession, url: str, model: str, load: ConversationLoad, seed: int) -> list[Turn]:
    """Run the workload once; returns all requests in the order in which they ended.

    Args:
        http: sends the requests.
        url: where to.
        model: name of the model.
        load: the workload.
        seed: of texts and order; another seed shares no prefix with this one.

    Raises:
        RuntimeError: a request failed.
    """
    draw = random.Random(seed)
    waiting = [
        _Session([{"role": "system", "content": f"{seed}.{number} {_text(draw, load.system_words)}"}])
        for number in range(load.sessions)
    ]
    done: list[Turn] = []

    async def work() -> None:
        while waiting:
            session = waiting.pop(draw.randrange(len(waiting)))
            session.messages.append({"role": "user", "content": _text(draw, load.question_words)})
            result, answer = await ask(http, url, _body(model, session.messages, load.answer_tokens))
            done.append(Turn(session.turns, result))
            session.messages.append({"role": "assistant", "content": answer})
            session.turns += 1
            if session.turns < load.turns:
                waiting.append(session)

    await asyncio.gather(*(work() for _ in range(load.at_once)))
    return done


async def ask(http: aiohttp.ClientSession, url: str, body: bytes) -> tuple[ChatResult, str]:
    """Send one streamed chat request; returns what was measured, and the answer's text.

    Raises:
        RuntimeError: it failed.
    """
    result = ChatResult(sent_s=time.monotonic())
    observer = StreamObserver(result)
    stream = bytearray()
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    async with http.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
        result.status = response.status
        result.replica = response.headers.get("x-warmgate-replica")
        async for data in response.content.iter_any():
            observer.feed(data, time.monotonic())
            stream += data
    observer.finish()
    result.ended_s = time.monotonic()
    if result.status != 200 or result.error is not None:
        raise RuntimeError(f"{url}: {result.status} {result.error} {result.detail or bytes(stream[:200])!r}")
    return result, _answer(bytes(stream))


def _answer(stream: bytes) -> str:
    events = (line[5:].strip() for line in stream.split(b"\n") if line.startswith(b"data:"))
    choices = (choice for event in events if event != b"[DONE]" for choice in orjson.loads(event)["choices"])
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(_WORDS, k=words))


def _body(model: str, messages: Sequence[dict[str, str]], answer_tokens: int) -> bytes:
    return orjson.dumps(
        {
            "model": model,
            "messages": messages,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
