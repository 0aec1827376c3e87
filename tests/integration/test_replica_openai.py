"""The official `openai` package against a simulated replica."""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncIterator

import openai
import pytest

from loadtests.replica import ReplicaConfig, RunningReplica, start_replica

MODEL = "llama-3.1-8b"


@pytest.fixture
async def replica() -> AsyncIterator[RunningReplica]:
    async with await start_replica(ReplicaConfig(speedup=100, loras=("sql",))) as replica:
        yield replica


@pytest.fixture
async def client(replica: RunningReplica) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=replica.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=7
    )
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].message.content or "") == 7 * 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7


async def test_chat_without_a_limit_ends_by_itself(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 256


async def test_streamed_chat_says_the_same(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=20, n=2
    )
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=20,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts = ["", ""]
    reasons = {}
    usage = None
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert reasons == {0: "length", 1: "length"}
    assert usage is not None
    assert whole.usage is not None
    assert usage.total_tokens == whole.usage.total_tokens


async def test_next_turn_hits_the_whole_turn_before(client: openai.AsyncOpenAI) -> None:
    question = {"role": "user", "content": "Tell me about block boundaries. " * 30}
    first = await client.chat.completions.create(model=MODEL, messages=[question], max_tokens=100)  # type: ignore[list-item]
    assert first.usage is not None
    turn = [
        question,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    second = await client.chat.completions.create(model=MODEL, messages=turn, max_tokens=1)  # type: ignore[arg-type]
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    # The last token of the answer was never computed.
    assert second.usage.prompt_tokens_details.cached_tokens == (first.usage.total_tokens - 1) // 16 * 16


async def test_adapter_shares_no_block_with_its_base(client: openai.AsyncOpenAI) -> None:
    cached = []
    for model in (MODEL, "sql", "sql"):
        answer = await client.completions.create(model=model, prompt="z" * 640, max_tokens=1)
        assert answer.model == model
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 0, 144]


async def test_completions(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=5)
    assert [choice.index for choice in whole.choices] == [0, 1]
    stream = await client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=5, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


async def test_token_ids_stand_for_their_text(client: openai.AsyncOpenAI, replica: RunningReplica) -> None:
    text = "a prompt of some length, ünïcode included. " * 10
    ids = replica.replica.tokenizer.from_text(text.encode()).ids()
    from_text = await client.completions.create(model=MODEL, prompt=text, max_tokens=5)
    from_ids = await client.completions.create(model=MODEL, prompt=ids, max_tokens=5)
    assert from_ids.choices[0].text == from_text.choices[0].text
    assert from_ids.usage is not None
    assert from_ids.usage.prompt_tokens == len(ids)
    assert from_ids.usage.prompt_tokens_details is not None
    assert (from_ids.usage.prompt_tokens_details.cached_tokens or 0) > 0


async def test_embeddings(client: openai.AsyncOpenAI) -> None:
    answer = await client.embeddings.create(model=MODEL, input=["one", "two", "one"], dimensions=16)
    first, second, third = (item.embedding for item in answer.data)
    assert len(first) == 16
    assert first == third != second
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-5)
    assert answer.usage.prompt_tokens == 3
    encoded = await client.embeddings.create(model=MODEL, input="one", dimensions=16, encoding_format="base64")
    # The package says list, and hands over what it asked for.
    packed = base64.b64decode(str(encoded.data[0].embedding))
    assert list(struct.unpack("<16f", packed)) == pytest.approx(first)


async def test_models(client: openai.AsyncOpenAI) -> None:
    cards = {card.id: card.model_dump() async for card in client.models.list()}
    assert set(cards) == {MODEL, "sql"}
    assert cards["sql"]["parent"] == MODEL


async def test_responses(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(model=MODEL, input="Hello", instructions="Be brief.", max_output_tokens=6)
    assert whole.status == "incomplete"
    stream = await client.responses.create(
        model=MODEL, input="Hello", instructions="Be brief.", max_output_tokens=6, stream=True
    )
    text = ""
    kinds = []
    async for event in stream:
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == whole.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"


async def test_errors_are_openais(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.completions.create(model="nope", prompt="x")
    with pytest.raises(openai.BadRequestError, match="too large"):
        await client.completions.create(model=MODEL, prompt="x", max_tokens=1_000_000)
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model=MODEL, messages=[])


async def test_api_key() -> None:
    async with await start_replica(ReplicaConfig(api_key="secret")) as replica:
        for key, allowed in (("secret", True), ("wrong", False)):
            async with openai.AsyncOpenAI(base_url=replica.url + "/v1", api_key=key) as client:
                if allowed:
                    await client.models.list()
                else:
                    with pytest.raises(openai.AuthenticationError):
                        await client.models.list()
