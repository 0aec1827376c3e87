"""POST /inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from loadtests.replica.answering import Choice, Job, answer, answer_id
from loadtests.replica.errors import missing, read_body
from loadtests.replica.parameters import choices_per_prompt, text_prompts, token_limit
from loadtests.replica.replica import REPLICA, Replica
from loadtests.replica.usage import answer_ids, usage

_DEFAULT_MAX_TOKENS = 16


async def generate(request: web.Request) -> web.StreamResponse:
    """Generate after token ids. Always whole: streaming of this endpoint is not simulated."""
    replica = request.app[REPLICA]
    body = await read_body(request)
    model, lora = replica.model(body)
    if "sampling_params" not in body:
        raise missing(body, "sampling_params")
    sampling = body["sampling_params"] if isinstance(body["sampling_params"], dict) else {}
    prompts = text_prompts(body, "token_ids", replica.tokenizer)[:1]
    asked = token_limit(sampling, "max_tokens")
    job = Job(
        prompts=prompts,
        max_tokens=[replica.limit_tokens(prompts[0], asked, _DEFAULT_MAX_TOKENS)],
        root=replica.root(body, lora),
        natural_end=False,
        n=choices_per_prompt(sampling),
    )
    return await answer(request, job, _Generated(replica, answer_id(request, "generate-tokens"), model, job))


class _Generated:
    def __init__(self, replica: Replica, name: str, model: str, job: Job) -> None:
        self._replica = replica
        self._id = name
        self._model = model
        self._created = job.created

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        details = {"created_cache_tokens": None, "multimodal_tokens": None}
        return {
            "request_id": self._id,
            "model": self._model,
            "created": self._created,
            "usage": usage(self._replica, choices, details),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [
                {
                    "index": choice.index,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": None,
                    "token_ids": answer_ids(self._replica, choice.text),
                    "routed_experts": None,
                    "sampling_mask": None,
                    "weight_versions": [{"version": "default", "start": 0, "end": choice.max_tokens}],
                    "logprobs": None,
                }
                for choice in choices
            ],
        }

    def opening(self, choice: Choice) -> list[bytes]:
        return []

    def piece(self, choice: Choice, start: int, end: int) -> list[bytes]:
        return []

    def closing(self, choices: Sequence[Choice]) -> list[bytes]:
        return []
