"""POST /v1/responses: text in, text out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from loadtests.replica.answering import Choice, Job, answer, answer_id
from loadtests.replica.errors import missing, read_body, validation_error
from loadtests.replica.parameters import token_limit
from loadtests.replica.replica import REPLICA, Replica
from loadtests.replica.template import render_chat
from loadtests.replica.usage import cached_tokens, prompt_tokens


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer in the manner of OpenAI's Responses API."""
    replica = request.app[REPLICA]
    body = await read_body(request)
    model, lora = replica.model(body)
    tools = body.get("tools")
    text = render_chat(_messages(body), tools if isinstance(tools, list) else None, replica.tokenizer.width)
    prompt = replica.tokenizer.from_text(text)
    asked = token_limit(body, "max_output_tokens")
    job = Job(
        prompts=[prompt],
        max_tokens=[replica.limit_tokens(prompt, asked, replica.config.default_max_tokens)],
        root=replica.root(body, lora),
        natural_end=asked is None,
        stream=bool(body.get("stream")),
    )
    return await answer(request, job, _Response(replica, answer_id(request, "resp", "_"), model, job, body))


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    given = body.get("input")
    if given is None:
        raise missing(body, "input")
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        return messages
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise validation_error("string_type", "body.input", "Input should be a valid string", repr(given)[:100])
    for item in given:
        if "role" in item:
            messages.append({"role": item["role"], "content": item.get("content")})
        else:
            # Calls of tools and their results: whatever is in them is part of the prompt.
            messages.append({"role": item.get("type", "item"), "content": [item]})
    return messages


class _Response:
    def __init__(self, replica: Replica, name: str, model: str, job: Job, body: dict[str, Any]) -> None:
        self._replica = replica
        self._id = name
        self._item_id = f"msg_{os.urandom(8).hex()}"
        self._model = model
        self._created = job.created
        self._body = body
        self._width = replica.tokenizer.width
        self._events = 0

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        choice = choices[0]
        complete = choice.finish_reason == "stop"
        prompt = prompt_tokens(choices)
        cached = cached_tokens(choices) if self._replica.config.enable_prompt_tokens_details else 0
        response = self._frame("completed" if complete else "incomplete")
        response["output"] = [self._item(choice, "completed")]
        response["incomplete_details"] = None if complete else {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": choice.max_tokens,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": prompt + choice.max_tokens,
        }
        return response

    def _frame(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "created_at": self._created,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": self._model,
            "object": "response",
            "output": [],
            "parallel_tool_calls": True,
            "temperature": _float(body, "temperature"),
            "tool_choice": body.get("tool_choice") or ("auto" if body.get("tools") else "none"),
            "tools": body.get("tools") or [],
            "top_p": _float(body, "top_p"),
            "background": False,
            "max_output_tokens": body.get("max_output_tokens"),
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": None,
            "user": body.get("user"),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _item(self, choice: Choice | None, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "content": [] if choice is None else [_part(choice.text.decode())],
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._events, **fields})
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def opening(self, choice: Choice) -> list[bytes]:
        where = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return [
            self._event("response.created", response=self._frame("in_progress")),
            self._event("response.in_progress", response=self._frame("in_progress")),
            self._event("response.output_item.added", output_index=0, item=self._item(None, "in_progress")),
            self._event("response.content_part.added", **where, part=_part("")),
        ]

    def piece(self, choice: Choice, start: int, end: int) -> list[bytes]:
        text = choice.text[start * self._width : end * self._width].decode()
        return [
            self._event(
                "response.output_text.delta",
                item_id=self._item_id,
                output_index=0,
                content_index=0,
                delta=text,
                logprobs=[],
            )
        ]

    def closing(self, choices: Sequence[Choice]) -> list[bytes]:
        text = choices[0].text.decode()
        where = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        whole = self.whole(choices)
        return [
            self._event("response.output_text.done", **where, text=text, logprobs=[]),
            self._event("response.content_part.done", **where, part=_part(text)),
            self._event("response.output_item.done", output_index=0, item=whole["output"][0]),
            self._event(f"response.{whole['status']}", response=whole),
        ]


def _part(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def _float(body: dict[str, Any], name: str) -> float:
    value = body.get(name)
    return float(value) if isinstance(value, int | float) else 1.0
