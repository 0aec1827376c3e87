"""A gateway that follows the KV events of simulated replicas: what it promises is what they have."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import model_files
from support.gateways import RunningGateway, running_gateway, session
from support.waiting import eventually

from gateway.app import validate
from gateway.config import Config
from gateway.routing.kv_events import KvEvents
from loadtests.replica.config import ReplicaConfig
from loadtests.replica.server import RunningReplica, start_replica

BLOCK = 16
# The simulated replica's own template, at one byte per token.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = model_files.byte_tokenizer()
    return model_files.write_model(tmp_path_factory.mktemp("model"), tokenizer, TEMPLATE)


def replica_config(**options: Any) -> ReplicaConfig:
    defaults = {
        "kv_events": True,
        "speedup": 300.0,
        "kv_tokens": 60_000,
        "bytes_per_token": 1,
        "loras": ("ada",),
    }
    return ReplicaConfig(**{**defaults, **options})


@asynccontextmanager
async def fleet(*configs: ReplicaConfig) -> AsyncIterator[list[RunningReplica]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(await start_replica(config)) for config in configs]


def options(model: Path | None, **more: Any) -> dict[str, Any]:
    files = {"models": {"llama-3.1-8b": {"path": str(model)}}} if model is not None else {}
    return {
        "kv_events": {"enabled": True},
        "tokenizer": {"wait_ms": 2000, **files},
        "routing": {"slow_start_s": 0},
        **more,
    }


def events(running: RunningGateway) -> KvEvents:
    assert running.gateway.exact is not None
    return running.gateway.exact.events


async def all_live(running: RunningGateway, number: int) -> None:
    followed = events(running)
    await eventually(lambda: len(followed.feeds) == number and all(feed.live for feed in followed.feeds.values()))


async def current(running: RunningGateway, replicas: list[RunningReplica]) -> None:
    """All that the engines have done is told and known."""
    await eventually(lambda: all(r.replica.driver.idle for r in replicas))
    for replica in replicas:
        feed = replica.replica.kv_feed
        assert feed is not None
        followed = next(f for r, f in events(running).feeds.items() if r.port == replica.port)
        await eventually(lambda f=followed, p=feed.publisher: f.streams[0]._next in (p._sequence, None))
    events(running)._tick()


async def ask(
    client: aiohttp.ClientSession, running: RunningGateway, path: str, body: dict[str, Any]
) -> tuple[int, int, str]:
    """Promised and actual cached tokens, and the replica."""
    async with client.post(running.url + path, json={"max_tokens": 20, **body}) as response:
        answer = json.loads(await response.read())
        assert response.status == 200, answer
        details = answer["usage"].get("prompt_tokens_details") or {}
        promised = int(response.headers["x-warmgate-expected-cached-tokens"])
        return promised, details.get("cached_tokens") or 0, response.headers["x-warmgate-replica"]


def chat(messages: list[tuple[str, str]], **fields: Any) -> dict[str, Any]:
    return {
        "model": "llama-3.1-8b",
        "messages": [{"role": role, "content": content} for role, content in messages],
        **fields,
    }


async def test_promises_are_kept_to_the_token(model: Path) -> None:
    """Conversations, adapters and salts; each promise is compared with what the engine then finds."""
    system = "You are a helpful assistant of a company that sells umbrellas. " * 10
    configs = [replica_config(), replica_config()]
    async with fleet(*configs) as replicas, running_gateway([r.url for r in replicas], options(model)) as running:
        await all_live(running, 2)
        exact = running.gateway.exact
        assert exact is not None
        async with session() as client:
            promised_tokens = 0
            for kind in ({}, {"model": "ada"}, {"cache_salt": "tenant"}):
                for conversation in range(3):
                    messages = [("system", system), ("user", f"Question {conversation} of {kind}? " * 5)]
                    for turn in range(3):
                        await current(running, replicas)
                        promised, cached, _ = await ask(
                            client, running, "/v1/chat/completions", {**chat(messages), **kind}
                        )
                        assert promised == cached, (kind, conversation, turn)
                        promised_tokens += promised
                        messages += [("assistant", f"Answer {turn}."), ("user", f"And {turn}? " * 20)]
            assert promised_tokens > 3000
            assert sum(exact.pool.tokenised.values()) == 27
            assert not exact.pool.fallbacks
            page = (await (await client.get(running.admin_url + "/metrics")).text()).splitlines()
            assert 'warmgate_prompts_tokenised_total{model="llama-3.1-8b"} 27.0' in page
            assert 'warmgate_kv_events_live{rank="0",replica="replica-1"} 1.0' in page


async def test_token_ids_need_no_tokenizer_and_text_falls_back_visibly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fleet(replica_config()) as replicas, running_gateway([replicas[0].url], options(None)) as running:
        await all_live(running, 1)
        exact = running.gateway.exact
        assert exact is not None
        async with session() as client:
            ids = [65 + i % 40 for i in range(400)]
            for expected in (0, 384):
                await current(running, replicas)
                body = {"model": "llama-3.1-8b", "prompt": ids}
                assert (await ask(client, running, "/v1/completions", body))[:2] == (expected, expected)
            body = {"model": "llama-3.1-8b", "token_ids": ids, "sampling_params": {"max_tokens": 4}}
            assert (await ask(client, running, "/inference/v1/generate", body))[0] == 384
            for _ in range(2):
                await ask(client, running, "/v1/chat/completions", chat([("user", "hello")]))
            assert exact.pool.fallbacks == {("llama-3.1-8b", "no_tokenizer"): 2}
            said = [record.message for record in caplog.records if "no_tokenizer" in record.message]
            assert len(said) == 1
            page = await (await client.get(running.admin_url + "/metrics")).text()
            assert 'warmgate_prompts_by_byte_blocks_total{model="llama-3.1-8b",reason="no_tokenizer"} 2.0' in page


async def test_an_eviction_is_known_at_once(model: Path) -> None:
    """The byte map believes in what the engine has dropped; events do not."""
    config = replica_config(kv_tokens=1600, max_model_len=1600)
    async with fleet(config) as replicas, running_gateway([replicas[0].url], options(model)) as running:
        await all_live(running, 1)
        async with session() as client:
            first = chat([("user", "a" * 900)])
            await ask(client, running, "/v1/chat/completions", first)
            await current(running, replicas)
            await ask(client, running, "/v1/chat/completions", chat([("user", "b" * 1400)]))
            await current(running, replicas)
            promised, cached, _ = await ask(client, running, "/v1/chat/completions", first)
            assert promised == cached < 900


async def test_a_prefix_computed_behind_the_gateways_back_is_found(model: Path) -> None:
    configs = [replica_config(), replica_config()]
    async with fleet(*configs) as replicas, running_gateway([r.url for r in replicas], options(model)) as running:
        await all_live(running, 2)
        body = chat([("user", "a long question " * 60)], max_tokens=4)
        async with session() as client:
            async with client.post(replicas[1].url + "/v1/chat/completions", json=body) as response:
                assert response.status == 200
            await current(running, replicas)
            promised, cached, name = await ask(client, running, "/v1/chat/completions", body)
            assert promised == cached > 900
            assert name == "replica-2"


@pytest.mark.interpreted
async def test_replicas_without_events_are_matched_by_byte_blocks_beside_others(model: Path) -> None:
    configs = [replica_config(), replica_config(kv_events=False)]
    async with fleet(*configs) as replicas, running_gateway([r.url for r in replicas], options(model)) as running:
        await all_live(running, 1)
        columns = running.gateway.router._columns
        text = "some words of a prompt, " * 100
        async with session() as client:
            for replica in replicas:  # the gateway sends it once to each
                others = [r for r in running.gateway.fleet.replicas.values() if r.port != replica.port]
                running.gateway.fleet.set_draining(others[0], True)
                await ask(client, running, "/v1/completions", {"model": "llama-3.1-8b", "prompt": text})
                running.gateway.fleet.set_draining(others[0], False)
            await current(running, replicas[:1])
        seen: list[list[float]] = []
        fill = columns.fill

        def spy(*arguments: Any, **named: Any) -> Any:
            candidates = fill(*arguments, **named)
            seen.append(list(columns.matched_tokens))
            return candidates

        columns.fill = spy  # type: ignore[method-assign]
        async with session() as client:
            await ask(client, running, "/v1/completions", {"model": "llama-3.1-8b", "prompt": text})
        assert seen[0][0] == (len(text) - 1) // BLOCK * BLOCK  # exact
        assert 0 < seen[0][1] <= len(text)  # byte blocks
        assert columns.matched_tokens == [0.0, 0.0]


async def test_tokens_that_come_too_late_are_not_waited_for(model: Path) -> None:
    async with (
        fleet(replica_config()) as replicas,
        running_gateway([replicas[0].url], options(model, tokenizer={"wait_ms": 0})) as running,
    ):
        await all_live(running, 1)
        exact = running.gateway.exact
        assert exact is not None
        # Another model's tokenizer is of no use to this one.
        assert exact.pool.models == {}
        from gateway.prompt.tokenise.model_files import load_model

        exact._models["llama-3.1-8b"] = load_model(model)
        async with session() as client:
            await ask(client, running, "/v1/chat/completions", chat([("user", "x" * 200_00)]))
        assert exact.pool.fallbacks["llama-3.1-8b", "late"] == 1
        await eventually(lambda: exact.pool.late_done["llama-3.1-8b"] == 1)


async def test_another_tokenizer_than_the_engines_is_found_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = model_files.write_model(tmp_path, model_files.byte_tokenizer(), TEMPLATE.replace("assistant", "model"))
    async with fleet(replica_config()) as replicas, running_gateway([replicas[0].url], options(wrong)) as running:
        await all_live(running, 1)
        exact = running.gateway.exact
        assert exact is not None
        async with session() as client:
            for number in range(7):
                await ask(client, running, "/v1/chat/completions", chat([("user", f"hello {number}")]))
        assert exact.pool.distrusted("llama-3.1-8b")
        assert exact.pool.fallbacks == {("llama-3.1-8b", "mismatch"): 2}
        assert sum("counts other tokens" in record.message for record in caplog.records) == 1


async def test_a_client_that_leaves_while_its_prompt_is_tokenised(model: Path) -> None:
    async with fleet(replica_config()) as replicas, running_gateway([replicas[0].url], options(model)) as running:
        await all_live(running, 1)
        exact = running.gateway.exact
        assert exact is not None
        held: list[Any] = []
        exact.pool._deliver = lambda *arguments: held.append(arguments)  # type: ignore[method-assign]
        async with session() as client:
            asking = asyncio.ensure_future(ask(client, running, "/v1/chat/completions", chat([("user", "x")])))
            await eventually(lambda: held)
            asking.cancel()
            await eventually(lambda: running.gateway.tally.in_progress == 0)
        del exact.pool._deliver  # type: ignore[attr-defined]
        for arguments in held:
            exact.pool._deliver(*arguments)
        assert replicas[0].replica.traffic.requests_seen == 0
        running.assert_idle()


async def test_removing_a_replica_ends_its_feed(model: Path) -> None:
    configs = [replica_config(), replica_config()]
    async with fleet(*configs) as replicas, running_gateway([r.url for r in replicas], options(model)) as running:
        await all_live(running, 2)
        running.gateway.fleet.remove("replica-1")
        assert [replica.name for replica in events(running).feeds] == ["replica-2"]


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    base = {"replicas": [{"url": "http://127.0.0.1:1"}], "kv_events": {"enabled": True}}
    validate(Config.model_validate(base))
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.models\.m"):
        validate(Config.model_validate({**base, "tokenizer": {"models": {"m": {"path": str(tmp_path / "none")}}}}))
    bound = {**base, "kv_events": {"enabled": True, "bind": "tcp://*:5557"}, "listen": {"workers": 2}}
    with pytest.raises(ValueError, match=r"kv_events\.bind"):
        validate(Config.model_validate(bound | {"redis": "redis://localhost"}))
