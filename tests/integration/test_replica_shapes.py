"""The simulated replica against raw answers of vLLM 0.32: status, headers, keys in order, types, error texts."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from loadtests.replica import ReplicaConfig, RunningReplica, start_replica

SAMPLES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "vllm_answers.json").read_text())
TOO_LONG = json.dumps({"model": "tiny", "prompt": list(range(10, 8956)), "max_tokens": 4})

# Made up per process, or by another tokeniser: the type counts, not the value.
FREE = {
    "id",
    "created",
    "created_at",
    "content",
    "text",
    "token_ids",
    "prompt_token_ids",
    "tokens",
    "token_strs",
    "count",
    "prompt",
    "system_fingerprint",
    "prompt_tokens",
    "total_tokens",
    "input_tokens",
    "root",
    "request_id",
}


@pytest.fixture
async def replica() -> AsyncIterator[RunningReplica]:
    config = ReplicaConfig(speedup=100, served_model_names=("tiny",), max_model_len=8192)
    async with await start_replica(config) as replica:
        yield replica


def assert_alike(ours: Any, theirs: Any, where: str) -> None:
    name = re.split(r"[.\[]", where)[-1]
    if isinstance(theirs, dict):
        assert isinstance(ours, dict), where
        assert list(ours) == list(theirs), where
        for key, value in theirs.items():
            assert_alike(ours[key], value, f"{where}.{key}")
    elif isinstance(theirs, list) and name not in ("tokens", "token_ids", "prompt_token_ids", "token_strs"):
        assert isinstance(ours, list), where
        assert len(ours) == len(theirs), where
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_alike(one, other, f"{where}[{i}]")
    elif name in FREE:
        assert type(ours) is type(theirs), where
    else:
        assert ours == theirs, where


def events(body: str) -> list[Any]:
    blocks = body.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


@pytest.mark.parametrize("name", SAMPLES)
async def test_answers_like_vllm(replica: RunningReplica, name: str) -> None:
    sample = SAMPLES[name]
    data = TOO_LONG if name == "err_toolong" else sample["request_body"]
    async with (
        aiohttp.ClientSession(skip_auto_headers=["content-type"]) as session,
        session.request(
            sample["method"],
            replica.url + sample["path"],
            data=data.encode() if data is not None else None,
            headers={"content-type": "application/json"} | sample["request_headers"] if data else {},
        ) as response,
    ):
        text = await response.text()
        assert response.status == sample["status"], text
        assert {key.lower() for key in response.headers} == set(sample["headers"])
        assert response.headers.get("content-type") == sample["content_type"]
        if sample["content_type"] is None:
            assert text == ""
        elif sample["content_type"].startswith("text/event-stream"):
            assert_alike(events(text), sample["body"], "event")
        else:
            assert_alike(json.loads(text), sample["body"], "body")


async def test_every_event_is_one_http_chunk(replica: RunningReplica) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 5, "stream": True})
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            replica.url + "/v1/completions", data=body, headers={"content-type": "application/json"}
        ) as response,
    ):
        chunks = []
        chunk = b""
        async for data, end in response.content.iter_chunks():
            chunk += data
            if end:
                chunks.append(chunk)
                chunk = b""
    assert len(chunks) == 6
    assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in chunks)


async def test_request_id_names_the_answer(replica: RunningReplica) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            replica.url + "/v1/completions",
            json={"prompt": "x", "max_tokens": 1},
            headers={"x-request-id": "mine"},
        ) as response,
    ):
        assert response.headers["x-request-id"] == "mine"
        assert (await response.json())["id"] == "cmpl-mine"
