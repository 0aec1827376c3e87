"""Endpoints that answer with numbers: embeddings, pooling, classification, scores, ranks.

A prompt costs its prefill and nothing else. The numbers are made up, equal for equal texts.
"""

from __future__ import annotations

import base64
import hashlib
import math
import struct
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from loadtests.replica.answering import answer_id, json_response
from loadtests.replica.errors import ApiError, invalid, missing, read_body
from loadtests.replica.parameters import chat_prompt, text_prompts
from loadtests.replica.replica import REPLICA, Replica
from loadtests.replica.tokens import Tokens

_DEFAULT_DIMENSIONS = 256
_MAX_DIMENSIONS = 8192
_SEPARATOR = b"\n"


async def embeddings(request: web.Request) -> web.Response:
    """POST /v1/embeddings."""
    return await _vectors(request, "embd", "embedding", "embedding")


async def pooling(request: web.Request) -> web.Response:
    """POST /pooling."""
    return await _vectors(request, "pool", "pooling", "data")


async def classify(request: web.Request) -> web.Response:
    """POST /classify."""
    replica, body, model = await _opened(request)
    prompts = text_prompts(body, "input", replica.tokenizer)
    await _prefill(replica, body, prompts)
    data = []
    for index, prompt in enumerate(prompts):
        first = _unit_numbers(prompt.data, 2)[0] / 2 + 0.5
        label = "LABEL_0" if first >= 0.5 else "LABEL_1"
        data.append({"index": index, "label": label, "probs": [first, 1 - first], "num_classes": 2})
    return json_response(_list(request, "classify", model, data, prompts))


async def score(request: web.Request) -> web.Response:
    """POST /score and /v1/score: one text against one or several."""
    replica, body, model = await _opened(request)
    first = _texts(body, "text_1", "queries")
    second = _texts(body, "text_2", "documents")
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise ApiError(400, "Input lengths must be either 1:1, 1:N or N:N", param="text_1")
    pairs = list(zip(first, second, strict=True))
    prompts = [_pair(replica, one, other) for one, other in pairs]
    await _prefill(replica, body, prompts)
    data = [
        {"index": index, "object": "score", "score": _similarity(one, other)}
        for index, (one, other) in enumerate(pairs)
    ]
    return json_response(_list(request, "score", model, data, prompts))


async def rerank(request: web.Request) -> web.Response:
    """POST /rerank, /v1/rerank and /v2/rerank."""
    replica, body, model = await _opened(request)
    query = _texts(body, "query")[0]
    documents = _texts(body, "documents")
    prompts = [_pair(replica, query, document) for document in documents]
    await _prefill(replica, body, prompts)
    results = [
        {"index": index, "document": {"text": text}, "relevance_score": _similarity(query, text)}
        for index, text in enumerate(documents)
    ]
    results.sort(key=lambda result: -float(str(result["relevance_score"])))
    top_n = body.get("top_n")
    tokens = sum(prompt.count for prompt in prompts)
    return json_response(
        {
            "id": answer_id(request, "rerank"),
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "results": results[:top_n] if isinstance(top_n, int) and top_n > 0 else results,
        }
    )


async def _opened(request: web.Request) -> tuple[Replica, dict[str, Any], str]:
    replica = request.app[REPLICA]
    body = await read_body(request)
    model, _ = replica.model(body)
    return replica, body, model


async def _vectors(request: web.Request, prefix: str, kind: str, field: str) -> web.Response:
    replica, body, model = await _opened(request)
    if "messages" in body:
        prompts = [chat_prompt(body, replica.tokenizer)]
    else:
        prompts = text_prompts(body, "input", replica.tokenizer)
    dimensions = body.get("dimensions") or _DEFAULT_DIMENSIONS
    if not isinstance(dimensions, int) or not 0 < dimensions <= _MAX_DIMENSIONS:
        invalid("dimensions", f"dimensions must be 1 to {_MAX_DIMENSIONS}.", dimensions)
    as_base64 = body.get("encoding_format") == "base64"
    await _prefill(replica, body, prompts)
    data = []
    for index, prompt in enumerate(prompts):
        vector = _unit_numbers(prompt.data, dimensions)
        value: list[float] | str = vector
        if as_base64:
            value = base64.b64encode(struct.pack(f"<{dimensions}f", *vector)).decode()
        data.append({"index": index, "object": kind, field: value})
    return json_response(_list(request, prefix, model, data, prompts))


def _list(
    request: web.Request, prefix: str, model: str, data: list[dict[str, Any]], prompts: Sequence[Tokens]
) -> dict[str, Any]:
    tokens = sum(prompt.count for prompt in prompts)
    return {
        "id": answer_id(request, prefix),
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }


async def _prefill(replica: Replica, body: dict[str, Any], prompts: Sequence[Tokens]) -> None:
    root = replica.root(body, "")
    for prompt in prompts:
        replica.limit_tokens(prompt, None, 1)
    generations = [replica.submit(prompt, root, b"", 1) for prompt in prompts]
    try:
        for generation in generations:
            await generation.done
    finally:
        for generation in generations:
            replica.driver.abort(generation)


def _texts(body: dict[str, Any], *fields: str) -> list[str]:
    for field in fields:
        value = body.get(field)
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            return [str(item.get("text", "")) if isinstance(item, dict) else str(item) for item in value]
    raise missing(body, fields[0])


def _pair(replica: Replica, one: str, other: str) -> Tokens:
    text = one.encode(errors="replace") + _SEPARATOR + other.encode(errors="replace")
    return replica.tokenizer.from_text(text)


def _similarity(one: str, other: str) -> float:
    """Share of common words, with a little noise against ties."""
    words, others = set(one.lower().split()), set(other.lower().split())
    common = len(words & others) / max(1, len(words | others))
    noise = _unit_numbers(f"{one}\0{other}".encode(errors="replace"), 2)[0]
    return min(1.0, max(0.0, 0.1 + 0.8 * common + 0.05 * noise))


def _unit_numbers(name: bytes, count: int) -> list[float]:
    """A vector of length one that follows from `name`."""
    raw = struct.unpack(f"<{count}h", hashlib.shake_256(name).digest(2 * count))
    numbers = [value or 1 for value in raw]
    norm = math.sqrt(sum(value * value for value in numbers))
    return [value / norm for value in numbers]
