"""A configuration that changes under a running gateway: replicas, policy and keys, without breaking a stream."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.gateways import CHAT, running_gateway, session
from support.raw_client import post, raw_client
from support.serving import Served, serving
from support.stub_replica import DONE, Call, MakeStub, Script, StubReplica, answer, role_event, token_event
from support.waiting import eventually

from gateway.config import Config

PATH = "/v1/chat/completions"
STREAM = post(PATH, json.dumps({**CHAT, "stream": True}).encode())


@pytest.fixture
async def stub() -> AsyncIterator[MakeStub]:
    made: list[StubReplica] = []

    async def make(script: Script = answer, port: int = 0) -> StubReplica:
        replica = await StubReplica(script=script).start(port)
        made.append(replica)
        return replica

    yield make
    for replica in made:
        await replica.stop()


class Held:
    """A stream that goes on until the test ends it."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        call.stream_head()
        call.chunk(role_event())
        call.chunk(token_event("a"))
        await self.end.wait()
        call.chunk(token_event("b"))
        call.chunk(DONE)
        call.end_chunks()


def config(replicas: list[dict[str, Any]], **sections: Any) -> Config:
    return Config.model_validate(
        {
            "listen": {"host": "127.0.0.1", "port": 0},
            "admin": {"port": 0},
            "scrape": {"interval_s": 0},
            "timeouts": {"drain_s": 0},
            "health": {"interval_s": 0.02},
            "replicas": replicas,
            **sections,
        }
    )


async def ask(url: str, headers: dict[str, str] | None = None) -> tuple[int, str | None]:
    async with session() as client, client.post(url + PATH, json=CHAT, headers=headers) as response:
        await response.read()
        return response.status, response.headers.get("x-warmgate-replica")


async def test_a_replica_leaves_while_it_streams_and_another_comes(stub: MakeStub) -> None:
    leaving, coming = await stub(Held()), await stub()
    async with running_gateway([leaving], {"health": {"interval_s": 0.02}}) as gateway:
        inside = gateway.gateway
        async with raw_client(gateway.port) as client:
            await client.send(STREAM)
            await client.reader.readuntil(b'"a"')
            await inside.reload(config([{"url": coming.url}]))
            await eventually(lambda: inside.fleet.any_routable)
            assert await ask(gateway.url) == (200, "replica-2")
            # No probe reaches it any more: its connections are closed but for the one that streams.
            probes = leaving.heads_seen
            later = coming.heads_seen + 5
            await coming.until(lambda: coming.heads_seen >= later)
            assert leaving.heads_seen == probes
            async with session() as admin, admin.get(f"{gateway.admin_url}/metrics") as response:
                assert 'replica="replica-1"' not in await response.text()
            assert isinstance(leaving.script, Held)
            leaving.script.end.set()
            rest = await client.reader.readuntil(b"0\r\n\r\n")
            assert DONE in rest
        await gateway.until_idle()
        gateway.assert_idle()
        async with session() as admin, admin.get(f"{gateway.admin_url}/metrics") as response:
            page = await response.text()
        assert 'replica="replica-1"' not in page, "nor when the stream has ended"
        assert 'replica="replica-2"' in page
        assert [line["outcome"] for line in gateway.log_lines()] == ["ok", "ok"]


async def test_a_replica_that_stays_keeps_what_is_known_of_it(stub: MakeStub) -> None:
    replica = await stub()
    async with running_gateway([replica], {"health": {"interval_s": 0.02}}) as gateway:
        inside = gateway.gateway
        document = {"model": "m", "messages": [{"role": "user", "content": "Long. " * 3000}]}
        async with session() as client:
            async with client.post(gateway.url + PATH, json=document) as response:
                assert response.headers["x-warmgate-expected-cached-tokens"] == "0"
            before = inside.fleet.replicas["replica-1"]
            await inside.reload(config([{"url": replica.url, "api_key": "sk-new", "max_in_flight": 7}]))
            assert inside.fleet.replicas == {"replica-1": before}
            assert before.up
            async with client.post(gateway.url + PATH, json=document) as response:
                assert int(response.headers["x-warmgate-expected-cached-tokens"]) > 0
        assert replica.requests[-1].header("authorization") == "Bearer sk-new"
        assert inside.router.room._limits == {0: 7}


async def test_policy_keys_limits_and_queue_change(stub: MakeStub) -> None:
    replica = await stub()
    urls = [{"url": replica.url}]
    async with running_gateway([replica], {"auth": {"client_keys": ["old"]}}) as gateway:
        inside = gateway.gateway
        assert (await ask(gateway.url, {"authorization": "Bearer old"}))[0] == 200
        new = config(
            urls,
            auth={"client_keys": ["new"]},
            routing={"policy": "round_robin", "response_headers": False},
            limits={"max_body_bytes": 1024},
            queue={"max_requests": 5},
            aliases={"gpt": "m"},
            paths={"blocked": ["/v1/completions"]},
        )
        await inside.reload(new)
        assert (await ask(gateway.url, {"authorization": "Bearer old"}))[0] == 401
        assert await ask(gateway.url, {"authorization": "Bearer new"}) == (200, None)
        assert inside.router.policy.name == "round_robin"
        assert inside.plane.queue.max_requests == 5
        async with session() as client:
            headers = {"authorization": "Bearer new"}
            async with client.post(gateway.url + PATH, json={**CHAT, "x": "y" * 2000}, headers=headers) as response:
                assert response.status == 413
            async with client.post(gateway.url + PATH, json={**CHAT, "model": "gpt"}, headers=headers) as response:
                assert response.status == 200
            async with client.post(gateway.url + "/v1/completions", json={"model": "m"}, headers=headers) as response:
                assert response.status == 404
            async with client.get(gateway.admin_url + "/admin/config") as response:
                shown = await response.json()
            assert shown["routing"]["policy"] == "round_robin"
            assert "new" not in json.dumps(shown["auth"])


async def test_a_name_that_is_taken_is_refused_before_anything_has_changed(stub: MakeStub) -> None:
    one, two = await stub(), await stub()
    async with running_gateway([one]) as gateway:
        inside = gateway.gateway
        wanted = config([{"url": two.url, "name": "replica-1"}, {"url": one.url}], routing={"policy": "random"})
        with pytest.raises(ValueError, match="replica-1"):
            await inside.reload(wanted)
        assert inside.router.policy.name == "predicted_ttft"
        assert [replica.spec.url for replica in inside.fleet.replicas.values()] == [one.url]
        assert (await ask(gateway.url))[0] == 200


async def test_waiting_requests_go_to_a_replica_that_is_added(stub: MakeStub) -> None:
    replica = await stub(Held())
    options = {
        "replicas": [{"url": replica.url, "max_in_flight": 1}],
        "queue": {"max_requests": 5},
        "health": {"interval_s": 0.02},
    }
    async with running_gateway([replica], options) as gateway, raw_client(gateway.port) as client:
        await client.send(STREAM)
        await client.reader.readuntil(b'"a"')
        waiting = asyncio.create_task(ask(gateway.url))
        await eventually(lambda: gateway.gateway.plane.queue.waiting)
        added = await stub()
        replicas = [{"url": replica.url, "max_in_flight": 1}, {"url": added.url}]
        await gateway.gateway.reload(config(replicas, queue={"max_requests": 5}))
        assert await waiting == (200, "replica-2")


# -- a process and its file


def write(served: Served, **changes: Any) -> None:
    document = json.loads(served.config.read_text())
    aside = served.config.with_suffix(".new")
    aside.write_text(json.dumps({**document, **changes}))
    aside.replace(served.config)


async def test_a_signal_and_a_changed_file_are_followed_and_a_bad_one_is_not(stub: MakeStub, tmp_path: Path) -> None:
    one, two = await stub(Held()), await stub()
    async with serving({"replicas": [{"url": one.url}]}, tmp_path) as served, raw_client(served.port) as client:
        await client.send(STREAM)
        await client.reader.readuntil(b'"a"')

        served.config.write_text("replicas: [")
        served.signal(signal.SIGHUP)
        await served.until_said("refused, the old one stays in force")
        assert (await served.admin("/ready"))[0] == 200

        served.config.write_text(json.dumps({"replicas": [{"url": one.url}]}))
        write(served, replicas=[{"url": two.url}], health={"interval_s": 0.05}, scrape={"interval_s": 0})
        served.signal(signal.SIGHUP)
        await served.until_said("configuration is in force: 1 replicas")
        await two.until(lambda: two.heads_seen > 0)
        async with asyncio.timeout(5):
            while (await ask(served.url))[0] != 200:
                pass
        assert one.requests_seen == 1

        # Without a signal: the file is looked at about once a second.
        write(served, routing={"policy": "round_robin"})
        await served.until_said("policy round_robin is in force")
        assert "listen has changed and takes effect at the next start" in "\n".join(served.log)

        assert isinstance(one.script, Held)
        one.script.end.set()
        assert DONE in await client.reader.readuntil(b"0\r\n\r\n")
        served.signal()
        assert await served.exit_code() == 0
