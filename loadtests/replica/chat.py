"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from loadtests.replica.answering import Choice, Job, answer, answer_id
from loadtests.replica.errors import read_body
from loadtests.replica.kv_transfer import asked_of
from loadtests.replica.parameters import (
    StreamOptions,
    chat_prompt,
    choices_per_prompt,
    stream_options,
    token_limit,
)
from loadtests.replica.replica import REPLICA, Replica
from loadtests.replica.usage import answer_ids, continuous_usage, usage
from loadtests.replica.wire import DONE_EVENT


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat."""
    replica = request.app[REPLICA]
    body = await read_body(request)
    model, lora = replica.model(body)
    options = stream_options(body)
    prompt = chat_prompt(body, replica.tokenizer)
    asked = token_limit(body, "max_completion_tokens", "max_tokens")
    job = Job(
        prompts=[prompt],
        max_tokens=[replica.limit_tokens(prompt, asked, replica.config.default_max_tokens)],
        root=replica.root(body, lora),
        natural_end=asked is None,
        n=choices_per_prompt(body),
        stream=options.stream,
        transfer=asked_of(body),
        name=answer_id(request, "chatcmpl"),
    )
    token_ids = bool(body.get("return_token_ids"))
    dialect = _Chat(replica, job.name, model, job, options, token_ids)
    return await answer(request, job, dialect)


class _Chat:
    def __init__(
        self, replica: Replica, name: str, model: str, job: Job, options: StreamOptions, token_ids: bool
    ) -> None:
        self._replica = replica
        self._id = name
        self._model = model
        self._created = job.created
        self._options = options
        self._token_ids = token_ids
        self._width = replica.tokenizer.width
        self._head = b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
            orjson.dumps(name),
            job.created,
            orjson.dumps(model),
        )

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        prompt_ids = choices[0].prompt.ids() if self._token_ids else None
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(choice) for choice in choices],
            "service_tier": None,
            "system_fingerprint": self._replica.fingerprint,
            "usage": usage(self._replica, choices, {"created_cache_tokens": 0, "multimodal_tokens": None}),
            "prompt_logprobs": None,
            "prompt_token_ids": prompt_ids,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {
                "role": "assistant",
                "content": choice.text.decode(),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "token_ids": answer_ids(self._replica, choice.text) if self._token_ids else None,
            "routed_experts": None,
        }

    def opening(self, choice: Choice) -> list[bytes]:
        ids = orjson.dumps(choice.prompt.ids()) if self._token_ids else b"null"
        return [
            b'%b{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]%b,'
            b'"prompt_token_ids":%b,"prompt_text":null}\n\n' % (self._head, choice.index, self._usage(choice, 0), ids)
        ]

    def piece(self, choice: Choice, start: int, end: int) -> list[bytes]:
        text = choice.text[start * self._width : end * self._width]
        ids = orjson.dumps(answer_ids(self._replica, text)) if self._token_ids else b"null"
        finish = fingerprint = b""
        reason = b"null"
        if end == choice.max_tokens:
            reason = b'"%b"' % choice.finish_reason.encode()
            finish = b',"stop_reason":null'
            if not self._options.include_usage:
                fingerprint = b',"system_fingerprint":"%b"' % self._replica.fingerprint.encode()
        return [
            b'%b{"index":%d,"delta":{"content":"%b"},"logprobs":null,"finish_reason":%b%b,"token_ids":%b}]%b%b}\n\n'
            % (self._head, choice.index, text, reason, finish, ids, self._usage(choice, end), fingerprint)
        ]

    def closing(self, choices: Sequence[Choice]) -> list[bytes]:
        if not self._options.include_usage:
            return [DONE_EVENT]
        final = usage(self._replica, choices, {"created_cache_tokens": 0}, streamed=True)
        return [
            b'%b],"usage":%b,"system_fingerprint":"%b"}\n\n'
            % (self._head, orjson.dumps(final), self._replica.fingerprint.encode()),
            DONE_EVENT,
        ]

    def _usage(self, choice: Choice, completion: int) -> bytes:
        return continuous_usage(choice, completion) if self._options.continuous_usage else b""
