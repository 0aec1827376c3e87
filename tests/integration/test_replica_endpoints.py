"""The endpoints that no client package of ours speaks, odd bodies, and the metrics page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtests.replica import ReplicaConfig, RunningReplica, start_replica


@pytest.fixture
async def replica() -> AsyncIterator[RunningReplica]:
    async with await start_replica(ReplicaConfig(speedup=100)) as replica:
        yield replica


@pytest.fixture
async def session(replica: RunningReplica) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(replica.url) as session:
        yield session


async def post(session: aiohttp.ClientSession, path: str, body: Any) -> Any:
    async with session.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def metrics(session: aiohttp.ClientSession) -> dict[str, float]:
    async with session.get("/metrics") as response:
        text = await response.text()
    return {
        sample.name
        + "".join(f"|{value}" for key, value in sorted(sample.labels.items()) if key in LABELS): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


LABELS = ("finished_reason", "source", "num_gpu_blocks", "block_size")


@pytest.mark.parametrize("text", ["hello world", "häßlich 日本語 🎉", "x"])
async def test_tokenize_and_back(session: aiohttp.ClientSession, text: str) -> None:
    tokens = await post(session, "/tokenize", {"prompt": text})
    assert tokens["count"] == len(tokens["tokens"]) == -(-len(text.encode()) // 4)
    assert await post(session, "/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": text}


async def test_render_agrees_with_the_answers_usage(session: aiohttp.ClientSession) -> None:
    body = {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is this?"},
                    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
                ],
            },
        ],
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "max_tokens": 2,
    }
    rendered = await post(session, "/v1/chat/completions/render", body)
    answered = await post(session, "/v1/chat/completions", body)
    assert answered["usage"]["prompt_tokens"] == len(rendered["token_ids"])
    assert rendered["sampling_params"]["max_tokens"] == 2


async def test_salt_and_image_part_the_cache(session: aiohttp.ClientSession) -> None:
    async def cached(url: str, salt: str | None) -> int:
        image = {"type": "image_url", "image_url": {"url": url}}
        text = {"type": "text", "text": "word " * 200}
        body = {"messages": [{"role": "user", "content": [image, text]}], "max_tokens": 1, "cache_salt": salt}
        answer = await post(session, "/v1/chat/completions", body)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached("a", None) == 0
    assert await cached("a", None) > 200
    assert await cached("b", None) == 0
    assert await cached("a", "tenant") == 0
    assert await cached("a", "tenant") > 200


async def test_messages(session: aiohttp.ClientSession) -> None:
    body = {"system": "Be kind.", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    whole = await post(session, "/v1/messages", body)
    async with session.post("/v1/messages", json={**body, "stream": True}) as response:
        blocks = (await response.text()).split("\n\n")[:-1]
    events = [json.loads(block.partition("data: ")[2]) for block in blocks]
    assert [event["type"] for event in events][::9] == ["message_start", "message_stop"]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert whole["usage"]["cache_read_input_tokens"] == 0
    assert events[-2]["usage"] == whole["usage"] | {
        "input_tokens": whole["usage"]["input_tokens"] - 16,
        "cache_read_input_tokens": 16,
    }


async def test_generate(session: aiohttp.ClientSession) -> None:
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}}
    answer = await post(session, "/inference/v1/generate", body)
    completed = await post(session, "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True})
    assert answer["choices"][0]["token_ids"] == completed["choices"][0]["token_ids"]


async def test_scores_and_ranks(session: aiohttp.ClientSession) -> None:
    documents = ["nothing of the kind", "a red fox", "a red fox jumps"]
    scores = await post(session, "/score", {"text_1": "a red fox jumps", "text_2": documents})
    values = [item["score"] for item in scores["data"]]
    assert values[0] < values[1] < values[2] <= 1
    ranks = await post(session, "/v1/rerank", {"query": "a red fox jumps", "documents": documents, "top_n": 2})
    assert [result["index"] for result in ranks["results"]] == [2, 1]
    classes = await post(session, "/classify", {"input": documents})
    assert all(sum(item["probs"]) == pytest.approx(1) for item in classes["data"])
    pooled = await post(session, "/pooling", {"input": documents})
    assert len(pooled["data"]) == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b"\xff\xfe"),
        ("/v1/chat/completions", b"[]"),
        ("/v1/chat/completions", b"null"),
        ("/v1/chat/completions", b'"text"'),
        ("/v1/chat/completions", b"{}"),
        ("/v1/chat/completions", b'{"messages":"hi"}'),
        ("/v1/chat/completions", b'{"messages":["hi"]}'),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"x"}],"n":0}'),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"x"}],"n":"two"}'),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"x"}],"max_tokens":0}'),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1.5}'),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"x"}],"stream_options":{"a":1}}'),
        ("/v1/completions", b"{}"),
        ("/v1/completions", b'{"prompt":""}'),
        ("/v1/completions", b'{"prompt":[]}'),
        ("/v1/completions", b'{"prompt":[[]]}'),
        ("/v1/completions", b'{"prompt":{}}'),
        ("/v1/completions", b'{"prompt":[1,-1]}'),
        ("/v1/completions", b'{"prompt":[1,"a"]}'),
        ("/v1/completions", b'{"prompt":["a",1]}'),
        ("/v1/messages", b'{"messages":[{"role":"user","content":"x"}]}'),
        ("/v1/responses", b'{"input":5}'),
        ("/v1/embeddings", b'{"input":"x","dimensions":-1}'),
        ("/score", b'{"text_1":["a","b"],"text_2":["a","b","c"]}'),
        ("/inference/v1/generate", b'{"token_ids":[1]}'),
        ("/tokenize", b"{}"),
        ("/detokenize", b"{}"),
    ],
)
async def test_bad_bodies_are_400_and_the_next_request_is_served(
    session: aiohttp.ClientSession, path: str, body: bytes
) -> None:
    async with session.post(path, data=body, headers={"content-type": "application/json"}) as response:
        assert response.status == 400, await response.text()
        error = (await response.json())["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert error["code"] == 400
    await post(session, "/v1/completions", {"prompt": "x", "max_tokens": 1})


async def test_unusual_but_valid_bodies(session: aiohttp.ClientSession) -> None:
    for body in (
        {"prompt": [1 << 40, 5], "max_tokens": 3, "return_token_ids": True},
        {"prompt": "x", "stream": False, "stop": ["a"], "logprobs": 2, "unknown": {"a": 1}, "max_tokens": 1},
        {"prompt": "\x00nul and \ud800".encode(errors="ignore").decode(), "max_tokens": 1},
    ):
        await post(session, "/v1/completions", body)
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": None}],
        [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "4"}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA"}}]}],
        [{}],
    ]
    for messages in chats:
        await post(session, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})


async def test_metrics_count_what_happened(session: aiohttp.ClientSession, replica: RunningReplica) -> None:
    prompt = "p" * 1600
    for _ in range(2):
        await post(session, "/v1/completions", {"prompt": prompt, "max_tokens": 10})
    page = await metrics(session)
    assert page["vllm:prompt_tokens_total"] == page["vllm:prefix_cache_queries_total"] == 800
    assert page["vllm:prefix_cache_hits_total"] == page["vllm:prompt_tokens_cached_total"] == 384
    assert page["vllm:prompt_tokens_by_source_total|local_compute"] == 416
    assert page["vllm:generation_tokens_total"] == 20
    assert page["vllm:request_success_total|length"] == 2
    assert page["vllm:time_to_first_token_seconds_count"] == 2
    assert page["vllm:e2e_request_latency_seconds_count"] == 2
    assert page["vllm:inter_token_latency_seconds_count"] == 18
    assert page["vllm:request_time_per_output_token_seconds_count"] == 2
    assert page["vllm:iteration_tokens_total_sum"] == 416 + 18
    assert page["vllm:num_requests_running"] == page["vllm:num_requests_waiting"] == 0
    assert page[f"vllm:cache_config_info|16|{replica.engine.pool.total_blocks}"] == 1
    # At a hundred times its speed, the ten tokens take a hundredth of the engine's time.
    step_s = replica.engine.cost.decode_step_s(1, 400)
    assert page["vllm:inter_token_latency_seconds_sum"] == pytest.approx(18 * step_s / 100, rel=0.01)


async def test_metrics_show_the_load(replica: RunningReplica, session: aiohttp.ClientSession) -> None:
    body = {"prompt": "q" * 1600, "max_tokens": 100_000, "stream": True}
    async with session.post("/v1/completions", json=body) as response:
        await response.content.readuntil(b"\n\n")
        page = await metrics(session)
        assert page["vllm:num_requests_running"] == 1
        blocks = page["vllm:kv_cache_usage_perc"] * replica.engine.pool.total_blocks
        assert 25 < blocks == pytest.approx(round(blocks))
        async with session.get("/load") as load:
            assert await load.json() == {"server_load": 1}
        response.close()


async def test_stream_interval() -> None:
    async with (
        await start_replica(ReplicaConfig(speedup=100, stream_interval=10)) as replica,
        aiohttp.ClientSession(replica.url) as session,
        session.post("/v1/completions", json={"prompt": "x", "max_tokens": 25, "stream": True}) as response,
    ):
        blocks = (await response.text()).split("\n\n")[:-2]
    lengths = [len(json.loads(block.removeprefix("data: "))["choices"][0]["text"]) // 4 for block in blocks]
    assert lengths == [1, 10, 10, 4]


async def test_usage_without_details() -> None:
    config = ReplicaConfig(speedup=100, enable_prompt_tokens_details=False)
    async with await start_replica(config) as replica, aiohttp.ClientSession(replica.url) as session:
        answer = await post(session, "/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert answer["usage"]["prompt_tokens_details"] is None
        body = {"prompt": "x", "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
        async with session.post("/v1/completions", json=body) as response:
            blocks = (await response.text()).split("\n\n")
    usage = json.loads(blocks[-3].removeprefix("data: "))["usage"]
    assert usage == {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1}


async def test_http_10_client_gets_the_stream_unframed(replica: RunningReplica) -> None:
    reader, writer = await asyncio.open_connection(replica.host, replica.port)
    body = b'{"prompt":"x","max_tokens":2,"stream":true}'
    writer.write(
        b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    head, _, stream = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"transfer-encoding" not in head.lower()
    assert stream.count(b"\n\n") == 3
    assert stream.endswith(b"data: [DONE]\n\n")
