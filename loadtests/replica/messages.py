"""POST /v1/messages: Anthropic's Messages API, text in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from loadtests.replica.answering import Choice, Job, answer, answer_id
from loadtests.replica.errors import missing, read_body
from loadtests.replica.parameters import chat_prompt, token_limit
from loadtests.replica.replica import REPLICA, Replica
from loadtests.replica.usage import cached_tokens, prompt_tokens


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer in the manner of Anthropic's Messages API."""
    replica = request.app[REPLICA]
    body = await read_body(request)
    model, lora = replica.model(body)
    asked = token_limit(body, "max_tokens")
    if asked is None:
        raise missing(body, "max_tokens")
    chat = dict(body)
    if body.get("system") and isinstance(body.get("messages"), list):
        chat["messages"] = [{"role": "system", "content": body["system"]}, *body["messages"]]
    prompt = chat_prompt(chat, replica.tokenizer)
    job = Job(
        prompts=[prompt],
        max_tokens=[replica.limit_tokens(prompt, asked, asked)],
        root=replica.root(body, lora),
        natural_end=False,
        stream=bool(body.get("stream")),
    )
    return await answer(request, job, _Message(replica, answer_id(request, "chatcmpl"), model))


class _Message:
    def __init__(self, replica: Replica, name: str, model: str) -> None:
        self._replica = replica
        self._id = name
        self._model = model
        self._width = replica.tokenizer.width

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": choices[0].text.decode()}],
            "model": self._model,
            "stop_reason": "max_tokens",
            "usage": self._usage(choices, choices[0].max_tokens),
        }

    def opening(self, choice: Choice) -> list[bytes]:
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage([choice], 0),
        }
        return [
            _event("message_start", message=message),
            _event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        ]

    def piece(self, choice: Choice, start: int, end: int) -> list[bytes]:
        text = choice.text[start * self._width : end * self._width].decode()
        return [_event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})]

    def closing(self, choices: Sequence[Choice]) -> list[bytes]:
        return [
            _event("content_block_stop", index=0),
            _event(
                "message_delta",
                delta={"stop_reason": "max_tokens", "stop_sequence": None},
                usage=self._usage(choices, choices[0].max_tokens),
            ),
            _event("message_stop"),
        ]

    def _usage(self, choices: Sequence[Choice], output: int) -> dict[str, int]:
        if not self._replica.config.enable_prompt_tokens_details:
            return {"input_tokens": prompt_tokens(choices), "output_tokens": output}
        cached = cached_tokens(choices)
        return {
            # Anthropic counts the cached ones apart.
            "input_tokens": prompt_tokens(choices) - cached,
            "output_tokens": output,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))
