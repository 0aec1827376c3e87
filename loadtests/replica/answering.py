"""From parsed parameters to an answer, whole or streamed, in whatever dialect.

A dialect (chat, completions, ...) knows the bytes; what is here is common to them: submit the prompts, tell
of tokens in chunks of the stream interval, and give back what is not needed when the client leaves.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import orjson
from aiohttp import web

from loadtests.replica.driver import Generation
from loadtests.replica.faults import NO_FAULTS
from loadtests.replica.kv_transfer import LoadFailed
from loadtests.replica.replica import FAULTS, REPLICA, Replica
from loadtests.replica.tokens import Tokens
from loadtests.replica.wire import DONE_EVENT, Wire, open_stream

EVENT_STREAM = "text/event-stream; charset=utf-8"


@dataclass(slots=True)
class Choice:
    """One answer to one prompt."""

    index: int
    prompt: Tokens
    text: bytes
    """ASCII, every token the same number of bytes."""
    max_tokens: int
    finish_reason: str
    generation: Generation | None = None
    remote_cached_tokens: int | None = None
    sent_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, of the replica that computed the prompt."""
        if self.remote_cached_tokens is not None:
            return self.remote_cached_tokens
        return self.generation.request.cached_tokens if self.generation is not None else 0


@dataclass(slots=True)
class Job:
    """A request of any generating endpoint, checked."""

    prompts: Sequence[Tokens]
    max_tokens: Sequence[int]
    """Per prompt."""
    root: int
    natural_end: bool
    """The answers end by themselves, not because of the client's limit."""
    n: int = 1
    stream: bool = False
    transfer: Mapping[str, Any] | None = None
    """What the request asks of the KV connector."""
    name: str = ""
    """The answer's id."""
    created: int = field(default_factory=lambda: int(time.time()))


class Dialect(Protocol):
    """How an endpoint writes answers."""

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def opening(self, choice: Choice) -> list[bytes]:
        """Events before the first token of a choice."""

    def piece(self, choice: Choice, start: int, end: int) -> list[bytes]:
        """Events that carry tokens `start` to `end` of a choice, and its end if they are the last."""

    def closing(self, choices: Sequence[Choice]) -> list[bytes]:
        """Events after the last token of all."""


async def answer(request: web.Request, job: Job, dialect: Dialect) -> web.StreamResponse:
    """Compute a job and answer it."""
    replica = request.app[REPLICA]
    choices = _choices(replica, job)
    replica.metrics.observe("request_params_n", job.n)
    if job.stream:
        return await _stream(request, replica, job, choices, dialect)
    try:
        external_tokens = await _fetched(replica, job, choices)
        hold = _holds(replica, job)
        await _submit(replica, job, choices, external_tokens, hold=hold)
    except BaseException:
        _abandon(replica, choices)
        raise
    body = dialect.whole(choices)
    generation = choices[0].generation
    if hold and replica.kv_transfer is not None and generation is not None:
        name = f"{job.name}-{os.urandom(4).hex()}"
        body["kv_transfer_params"] = replica.kv_transfer.hold(name, generation.request)
    return json_response(body)


def _holds(replica: Replica, job: Job) -> bool:
    """Whether the blocks of a request are kept for another replica. Only one token is ever generated then."""
    wanted = job.transfer is not None and bool(job.transfer.get("do_remote_decode"))
    return wanted and replica.kv_transfer is not None and not job.stream and list(job.max_tokens) == [1] and job.n == 1


async def _fetched(replica: Replica, job: Job, choices: Sequence[Choice]) -> int:
    """Fetch the KV of a prompt if the request says where it is; return the tokens that came.

    Raises:
        LoadFailed: it cannot be had, and is not to be computed instead.
    """
    params, transfer = job.transfer, replica.kv_transfer
    if params is None or transfer is None or not params.get("do_remote_prefill"):
        return 0
    prompt = choices[0].prompt
    try:
        right = await transfer.fetch(params, prompt.count)
    except LoadFailed:
        if replica.config.kv_load_failure_policy == "recompute":
            return 0
        raise
    for choice in choices:
        choice.remote_cached_tokens = int(params.get("remote_prefill_cached_tokens") or 0)
        if not right:
            # What the blocks hold by now is another prompt's: tokens come out, and they are wrong.
            choice.text = choice.text[::-1]
    return prompt.count


def json_response(body: object, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def answer_id(request: web.Request, prefix: str, joint: str = "-") -> str:
    """The id of an answer: the client's request id if it gave one, else random."""
    return f"{prefix}{joint}{client_request_id(request) or os.urandom(8).hex()}"


def client_request_id(request: web.Request) -> str | None:
    """The request id the client gave, if it gave one that JSON and headers can carry."""
    given = request.headers.get("x-request-id")
    return given if given and given.isascii() and given.isprintable() else None


def _choices(replica: Replica, job: Job) -> list[Choice]:
    choices: list[Choice] = []
    for prompt, max_tokens in zip(job.prompts, job.max_tokens, strict=True):
        for number in range(job.n):
            text = replica.tokenizer.answer(prompt, job.root, number, max_tokens)
            reason = "stop" if job.natural_end else "length"
            choices.append(Choice(len(choices), prompt, text, max_tokens, reason))
    return choices


async def _submit(replica: Replica, job: Job, choices: Sequence[Choice], external_tokens: int, *, hold: bool) -> None:
    for choice in choices:
        choice.generation = replica.submit(
            choice.prompt,
            job.root,
            choice.text,
            choice.max_tokens,
            natural_end=job.natural_end,
            external_tokens=external_tokens,
            hold=hold,
        )
    await _finished(choices)


async def _finished(choices: Sequence[Choice]) -> None:
    for choice in choices:
        if choice.generation is not None:
            await choice.generation.done


async def _finished_or_ended(choices: Sequence[Choice], wire: Wire) -> None:
    if wire.ended is None:
        await _finished(choices)
        return
    finished = asyncio.ensure_future(_finished(choices))
    try:
        await asyncio.wait((finished, wire.ended), return_when=asyncio.FIRST_COMPLETED)
    finally:
        finished.cancel()


def _abandon(replica: Replica, choices: Sequence[Choice]) -> None:
    """Drop what is not done: the client is gone."""
    for choice in choices:
        if choice.generation is not None and not replica.driver.abort(choice.generation):
            # Done, and its client has not been told where its blocks are.
            replica.engine.release(choice.generation.request)


async def _stream(
    request: web.Request, replica: Replica, job: Job, choices: Sequence[Choice], dialect: Dialect
) -> web.StreamResponse:
    interval = replica.config.stream_interval
    faults = request.get(FAULTS, NO_FAULTS)
    response, wire = await open_stream(request, {"content-type": EVENT_STREAM}, faults)

    def progress(choice: Choice, emitted: int) -> None:
        sent = choice.sent_tokens
        events: list[bytes] = []
        if not sent:
            events += dialect.opening(choice)
            events += dialect.piece(choice, 0, 1)
            sent = 1
        while emitted - sent >= interval:
            events += dialect.piece(choice, sent, sent + interval)
            sent += interval
        if emitted == choice.max_tokens and sent < emitted:
            events += dialect.piece(choice, sent, emitted)
            sent = emitted
        choice.sent_tokens = sent
        if events:
            wire.write(events)

    try:
        try:
            external_tokens = await _fetched(replica, job, choices)
        except LoadFailed as failure:
            wire.write([b"data: %b\n\n" % orjson.dumps(failure.body()), DONE_EVENT])
            await wire.finish()
            with suppress(ConnectionResetError):
                await response.write_eof()
            return response
        for choice in choices:
            choice.generation = replica.submit(
                choice.prompt,
                job.root,
                choice.text,
                choice.max_tokens,
                natural_end=job.natural_end,
                on_progress=partial(progress, choice),
                external_tokens=external_tokens,
            )
        await _finished_or_ended(choices, wire)
        if wire.ended is None or not wire.ended.done():
            wire.write(dialect.closing(choices))
            await wire.finish()
        with suppress(ConnectionResetError):
            await response.write_eof()
    finally:
        wire.close()
        _abandon(replica, choices)
    return response
