"""Tokens off the event loop: in time, late, too many, wrong, not to be had."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import model_files
from support.waiting import eventually

from gateway.prompt.token_chain import TokenPrompt, pack
from gateway.prompt.tokenise import pool as pool_module
from gateway.prompt.tokenise.model_files import ModelTokens, load_model
from gateway.prompt.tokenise.pool import TokenPool

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelTokens:
    return load_model(model_files.write_model(tmp_path_factory.mktemp("m"), model_files.byte_tokenizer()))


def chat(text: str = "hello") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def fetched(pool: TokenPool, path: str, document: dict[str, Any], adapter: str = "") -> TokenPrompt | None:
    done: asyncio.Future[TokenPrompt | None] = asyncio.get_running_loop().create_future()
    assert pool.fetch(path, document, "m", adapter, done.set_result)
    return await done


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Work in the threads waits for this."""
    event = threading.Event()
    original = pool_module.prompt_tokens

    def slow(*arguments: Any) -> TokenPrompt:
        assert event.wait(20)
        return original(*arguments)

    monkeypatch.setattr(pool_module, "prompt_tokens", slow)
    yield event
    event.set()


async def test_a_prompt_of_each_kind(model: ModelTokens) -> None:
    pool = TokenPool({"m": model}, wait_s=20.0, block_tokens=lambda: (4,))
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    expected = TokenPrompt(pack(list(text.encode()))).hashes(4)
    for path, document in (
        (CHAT, chat()),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": [text]}),
        ("/v1/completions", {"prompt": list(text.encode())}),
        ("/inference/v1/generate", {"token_ids": list(text.encode())}),
    ):
        tokens = await fetched(pool, path, document)
        assert tokens is not None
        assert tokens.count == len(text)
        assert tokens.hashes(4) == expected
        assert tokens.hashes(8) is None  # sealed: the tokens are not kept
    assert pool.tokenised == {"m": 5}
    salted = await fetched(pool, CHAT, {**chat(), "cache_salt": "s"}, "ada")
    assert salted is not None
    assert salted.hashes(4) == TokenPrompt(pack(list(text.encode())), "ada", "s").hashes(4)
    pool.close()


async def test_a_prompt_with_rendered_images(model: ModelTokens) -> None:
    pool = TokenPool({"m": model}, wait_s=20.0, block_tokens=lambda: (4,))
    features = {"mm_hashes": {"image": ["f00d"]}, "mm_placeholders": {"image": [{"offset": 2, "length": 3}]}}
    document = {"token_ids": list(range(12)), "features": features}
    tokens = await fetched(pool, "/inference/v1/generate", document)
    assert tokens is not None
    assert tokens.hashes(4) == TokenPrompt(pack(range(12)), media=[("f00d", 2, 3)]).hashes(4)
    pool.close()


@pytest.mark.parametrize(
    ("path", "document", "reason"),
    [
        ("/v1/responses", {"input": "x"}, "api"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "media"),
        (CHAT, {"messages": []}, "form"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "several_prompts"),
        ("/v1/completions", {"prompt": []}, "form"),
        ("/v1/completions", {"prompt": [-1]}, "form"),
        ("/v1/completions", {"prompt": "x", "truncate_prompt_tokens": 4}, "truncation"),
        ("/v1/completions", {"prompt": "x", "cache_salt": 3}, "form"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"mm_hashes": {"image": ["x"]}}}, "media"),
        (
            "/inference/v1/generate",
            {
                "token_ids": [1],
                "features": {"mm_hashes": {"i": ["x"]}, "mm_placeholders": {"i": [{"offset": -1, "length": 1}]}},
            },
            "media",
        ),
    ],
)
async def test_prompts_whose_tokens_cannot_be_had(
    model: ModelTokens, path: str, document: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = TokenPool({"m": model}, wait_s=20.0)
    for _ in range(2):
        assert await fetched(pool, path, document) is None
    assert pool.fallbacks == {("m", reason): 2}
    assert [record.levelno for record in caplog.records if reason in record.message] == [logging.WARNING]
    pool.close()


async def test_late_tokens_are_not_waited_for_but_kept_for_the_next_turn(
    model: ModelTokens, gate: threading.Event
) -> None:
    pool = TokenPool({"m": model}, wait_s=0.001)
    assert await fetched(pool, CHAT, chat("late")) is None
    assert pool.fallbacks == {("m", "late"): 1}
    gate.set()
    await eventually(lambda: pool.late_done["m"] == 1)
    pool.close()


async def test_only_so_many_at_a_time(model: ModelTokens, gate: threading.Event) -> None:
    pool = TokenPool({"m": model}, threads=1, wait_s=20.0, max_waiting=2)
    loop = asyncio.get_running_loop()
    waiting: list[asyncio.Future[TokenPrompt | None]] = [loop.create_future() for _ in range(2)]
    for future in waiting:
        assert pool.fetch(CHAT, chat(), "m", "", future.set_result)
    assert not pool.fetch(CHAT, chat(), "m", "", lambda tokens: None)
    assert pool.fallbacks == {("m", "busy"): 1}
    gate.set()
    assert all(tokens is not None for tokens in await asyncio.gather(*waiting))
    assert await fetched(pool, CHAT, chat()) is not None
    pool.close()


async def test_counts_that_differ_from_the_engines(model: ModelTokens) -> None:
    pool = TokenPool({"m": model}, wait_s=20.0)
    tokens = await fetched(pool, CHAT, chat())
    assert tokens is not None
    for _ in range(4):
        pool.learn("m", tokens, tokens.count + 1)
    pool.learn("m", tokens, tokens.count)  # one that agrees clears the doubt
    for _ in range(4):
        pool.learn("m", tokens, tokens.count + 1)
    assert not pool.distrusted("m")
    assert await fetched(pool, CHAT, chat()) is not None
    pool.learn("m", tokens, tokens.count + 1)
    assert pool.distrusted("m")
    assert not pool.fetch(CHAT, chat(), "m", "", lambda tokens: None)
    assert pool.fallbacks == {("m", "mismatch"): 1}
    assert not pool.distrusted("other")
    pool.close()


async def test_a_fault_inside_is_one_requests_fault(model: ModelTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = TokenPool({"m": model}, wait_s=20.0)

    def broken(*arguments: Any) -> TokenPrompt:
        raise RuntimeError("bug")

    with monkeypatch.context() as patched:
        patched.setattr(pool_module, "prompt_tokens", broken)
        assert await fetched(pool, CHAT, chat()) is None
    assert pool.fallbacks == {("m", "error"): 1}
    assert await fetched(pool, CHAT, chat()) is not None
    pool.close()


def test_a_template_that_no_model_has(tmp_path: Path) -> None:
    bare = load_model(model_files.write_model(tmp_path, model_files.byte_tokenizer(), None))

    async def run() -> None:
        pool = TokenPool({"m": bare}, wait_s=20.0)
        assert await fetched(pool, CHAT, chat()) is None
        assert pool.fallbacks == {("m", "template"): 1}
        assert await fetched(pool, "/v1/completions", {"prompt": "x"}) is not None
        pool.close()

    asyncio.run(run())
