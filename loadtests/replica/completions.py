"""POST /v1/completions."""

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
    choices_per_prompt,
    stream_options,
    text_prompts,
    token_limit,
)
from loadtests.replica.replica import REPLICA, Replica
from loadtests.replica.usage import answer_ids, continuous_usage, usage
from loadtests.replica.wire import DONE_EVENT

_DEFAULT_MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    """Complete text or token ids."""
    replica = request.app[REPLICA]
    body = await read_body(request)
    model, lora = replica.model(body)
    options = stream_options(body)
    prompts = text_prompts(body, "prompt", replica.tokenizer)
    asked = token_limit(body, "max_tokens")
    job = Job(
        prompts=prompts,
        max_tokens=[replica.limit_tokens(prompt, asked, _DEFAULT_MAX_TOKENS) for prompt in prompts],
        root=replica.root(body, lora),
        natural_end=False,
        n=choices_per_prompt(body),
        stream=options.stream,
        transfer=asked_of(body),
        name=answer_id(request, "cmpl"),
    )
    token_ids = bool(body.get("return_token_ids"))
    dialect = _Completion(replica, job.name, model, job, options, token_ids)
    return await answer(request, job, dialect)


class _Completion:
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
        self._head = b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[' % (
            orjson.dumps(name),
            job.created,
            orjson.dumps(model),
        )

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(choice) for choice in choices],
            "service_tier": None,
            "system_fingerprint": self._replica.fingerprint,
            "usage": usage(self._replica, choices, {"created_cache_tokens": None, "multimodal_tokens": None}),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.text.decode(),
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "token_ids": answer_ids(self._replica, choice.text) if self._token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": choice.prompt.ids() if self._token_ids else None,
            "routed_experts": None,
        }

    def opening(self, choice: Choice) -> list[bytes]:
        return []

    def piece(self, choice: Choice, start: int, end: int) -> list[bytes]:
        text = choice.text[start * self._width : end * self._width]
        reason = b'"%b"' % choice.finish_reason.encode() if end == choice.max_tokens else b"null"
        ids = prompt_ids = b"null"
        if self._token_ids:
            ids = orjson.dumps(answer_ids(self._replica, text))
            prompt_ids = orjson.dumps(choice.prompt.ids()) if not start else prompt_ids
        running = continuous_usage(choice, end) if self._options.continuous_usage else b""
        return [
            b'%b{"index":%d,"text":"%b","logprobs":null,"finish_reason":%b,"stop_reason":null,'
            b'"prompt_token_ids":%b,"token_ids":%b}]%b}\n\n'
            % (self._head, choice.index, text, reason, prompt_ids, ids, running)
        ]

    def closing(self, choices: Sequence[Choice]) -> list[bytes]:
        if not self._options.include_usage:
            return [DONE_EVENT]
        return [
            b'%b],"usage":%b,"system_fingerprint":"%b"}\n\n'
            % (
                self._head,
                orjson.dumps(usage(self._replica, choices, {}, streamed=True)),
                self._replica.fingerprint.encode(),
            ),
            DONE_EVENT,
        ]
