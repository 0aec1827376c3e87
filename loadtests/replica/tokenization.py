"""POST /tokenize, /detokenize and /v1/chat/completions/render: the tokeniser over HTTP, no engine."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from loadtests.replica.answering import answer_id, json_response
from loadtests.replica.errors import missing, read_body
from loadtests.replica.parameters import chat_prompt, text_prompts, token_limit
from loadtests.replica.replica import REPLICA


async def tokenize(request: web.Request) -> web.Response:
    """Token ids of `prompt` or `messages`."""
    replica = request.app[REPLICA]
    body = await read_body(request)
    replica.model(body)
    if "messages" in body:
        tokens = chat_prompt(body, replica.tokenizer)
    else:
        tokens = text_prompts(body, "prompt", replica.tokenizer)[0]
    ids = tokens.ids()
    texts = [replica.tokenizer.piece(token) for token in ids] if body.get("return_token_strs") else None
    return json_response(
        {"count": tokens.count, "max_model_len": replica.max_model_len, "tokens": ids, "token_strs": texts}
    )


async def detokenize(request: web.Request) -> web.Response:
    """The text of `tokens`."""
    replica = request.app[REPLICA]
    body = await read_body(request)
    replica.model(body)
    if body.get("tokens") is None:
        raise missing(body, "tokens")
    tokens = text_prompts(body, "tokens", replica.tokenizer)[0]
    return json_response({"prompt": replica.tokenizer.text(tokens)})


async def render_chat_completion(request: web.Request) -> web.Response:
    """What a chat would ask of the engine."""
    replica = request.app[REPLICA]
    body = await read_body(request)
    model, _ = replica.model(body)
    tokens = chat_prompt(body, replica.tokenizer)
    asked = token_limit(body, "max_completion_tokens", "max_tokens")
    max_tokens = replica.limit_tokens(tokens, asked, replica.max_model_len)
    sampling: dict[str, Any] = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": body.get("temperature", 1.0),
        "top_p": body.get("top_p", 1.0),
        "min_p": 0.0,
        "stop": [],
        "stop_token_ids": [],
        "max_tokens": max_tokens,
        "output_kind": 2,
        "skip_clone": True,
        "bad_words": [],
        "skip_reading_prefix_cache": False,
    }
    return json_response(
        {
            "request_id": answer_id(request, "chatcmpl"),
            "token_ids": tokens.ids(),
            "token_offsets": None,
            "features": None,
            "content_parts": None,
            "sampling_params": sampling,
            "model": model,
            "reasoning_ended": None,
            "reasoning_parser_kwargs": None,
            "return_token_ids": None,
            "output_mode": "tokens",
            "stream": bool(body.get("stream")),
            "stream_options": body.get("stream_options"),
            "cache_salt": body.get("cache_salt"),
            "priority": 0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }
    )
