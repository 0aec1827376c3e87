"""A request through the whole gateway to stub replicas, over real sockets."""

import json

from support.gateways import CHAT, running_gateway, session
from support.stub_replica import StubReplica
from yarl import URL


async def test_chat_json_passes_through() -> None:
    replica = await StubReplica().start()
    async with running_gateway([replica]) as gateway, session() as client:
        async with client.post(f"{gateway.url}/v1/chat/completions", json=CHAT) as response:
            assert response.status == 200
            assert (await response.json())["choices"][0]["message"]["content"] == "Hi"
            assert response.headers["x-warmgate-replica"] == "replica-1"
            assert response.headers["x-warmgate-policy"] == "predicted_ttft"
            assert float(response.headers["x-warmgate-predicted-ttft-ms"]) > 0
            assert response.headers["x-warmgate-expected-cached-tokens"] == "0"
            assert response.headers["x-request-id"].startswith("wg-")
        gateway.assert_idle()
        (line,) = gateway.log_lines()
        assert line["outcome"] == "ok"
        assert line["replica"] == "replica-1"
        assert line["prompt_tokens"] == 10
        assert line["cached_tokens"] == 0
    await replica.stop()


async def test_stream_bytes_arrive_unchanged() -> None:
    replica = await StubReplica().start()
    async with running_gateway([replica]) as gateway, session() as client:
        async with client.post(f"{gateway.url}/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            body = await response.read()
        assert body.endswith(b"data: [DONE]\n\n")
        assert body.count(b"data: ") == 5
        gateway.assert_idle()
        (line,) = gateway.log_lines()
        assert line["stream"] is True
        assert line["ttft_ms"] > 0
    await replica.stop()


async def test_the_body_is_forwarded_byte_for_byte() -> None:
    replica = await StubReplica().start()
    raw = (
        b'{ "model":"m",\n\t"messages":[{"role":"user","content":"\\u00e9\xc3\xa9"}],'
        b' "big":123456789012345678901234567890,'
        b'"dup":1,"dup":2, "unknown":{"x":[]} ,"temperature":0.10}'
    )
    async with running_gateway([replica]) as gateway, session() as client:
        headers = {"content-type": "application/json"}
        async with client.post(f"{gateway.url}/v1/chat/completions?q=1", data=raw, headers=headers) as response:
            assert response.status == 200
    assert replica.requests[0].body == raw
    assert replica.requests[0].target == "/v1/chat/completions?q=1"
    assert replica.requests[0].header("host") == f"127.0.0.1:{replica.port}"
    await replica.stop()


async def test_the_replica_that_holds_the_prefix_is_chosen() -> None:
    replicas = [await StubReplica().start() for _ in range(4)]
    document = "A long document. " * 2000
    async with running_gateway(replicas) as gateway, session() as client:
        chosen = set()
        for turn in range(8):
            body = {"model": "m", "messages": [{"role": "user", "content": document + str(turn)}]}
            async with client.post(f"{gateway.url}/v1/chat/completions", json=body) as response:
                chosen.add(response.headers["x-warmgate-replica"])
                expected = int(response.headers["x-warmgate-expected-cached-tokens"])
                assert (expected > 0) == (turn > 0)
        assert len(chosen) == 1
    for replica in replicas:
        await replica.stop()


async def test_models_are_merged_and_found_by_id() -> None:
    one = await StubReplica(models=[{"id": "org/a", "object": "model"}, {"id": "50%25", "object": "model"}]).start()
    two = await StubReplica(models=[{"id": "b", "object": "model"}, {"id": "lora", "parent": "b"}]).start()
    async with running_gateway([one, two], {"aliases": {"gpt": "b"}}) as gateway, session() as client:
        async with client.get(f"{gateway.url}/v1/models") as response:
            assert {model["id"] for model in (await response.json())["data"]} == {"org/a", "50%25", "b", "lora", "gpt"}
        async with client.get(f"{gateway.url}/v1/models/org/a") as response:
            assert (await response.json())["id"] == "org/a"
        # Percent-encoding is resolved once, not twice.
        encoded = URL(f"{gateway.url}/v1/models/50%2525", encoded=True)
        async with client.get(encoded) as response:
            assert (await response.json())["id"] == "50%25"
        async with client.get(f"{gateway.url}/v1/models/none") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "model_not_found"
        for model, replica in (("org/a", "replica-1"), ("b", "replica-2"), ("lora", "replica-2"), ("gpt", "replica-2")):
            async with client.post(f"{gateway.url}/v1/chat/completions", json={**CHAT, "model": model}) as response:
                assert response.headers["x-warmgate-replica"] == replica
        # An alias the replica does not know is replaced by the model's own name, and nothing else is touched.
        assert two.requests[-1].body == json.dumps({**CHAT, "model": "b"}).encode()
    await one.stop()
    await two.stop()


async def test_bad_input_is_refused_in_openai_shape_and_the_next_request_is_served() -> None:
    replica = await StubReplica().start()
    cases: list[tuple[bytes, int]] = [
        (b"{broken", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'"text"', 400),
        (b"", 400),
        (b'{"model":"m","messages":[{"role":"user","content":"\xff\xfe"}]}', 400),
        (b'{"messages":[]}', 400),
        (b'{"model":7}', 400),
        (b'{"model":"none","messages":[]}', 404),
        (b'{"model":"m","x":"' + b"y" * 5000 + b'"}', 413),
        (b"[" * 3000 + b"]" * 3000, 413),
    ]
    async with running_gateway([replica], {"limits": {"max_body_bytes": 4096}}) as gateway, session() as client:
        for body, status in cases:
            headers = {"content-type": "application/json"}
            async with client.post(f"{gateway.url}/v1/chat/completions", data=body, headers=headers) as response:
                assert response.status == status, body[:40]
                error = (await response.json())["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert "127.0.0.1" not in error["message"]
            async with client.post(f"{gateway.url}/v1/chat/completions", json=CHAT) as response:
                assert response.status == 200
        gateway.assert_idle()
        assert replica.requests_seen == len(cases)
    await replica.stop()


async def test_known_model_without_replicas_is_503_with_retry_after() -> None:
    replica = await StubReplica().start()
    options = {"health": {"interval_s": 0.05}}
    async with running_gateway([replica], options) as gateway, session() as client:
        await replica.stop()
        async with client.get(f"{gateway.admin_url}/ready") as response:
            ready = response.status
        while ready == 200:
            async with client.get(f"{gateway.admin_url}/ready") as response:
                ready = response.status
        async with client.post(f"{gateway.url}/v1/chat/completions", json=CHAT) as response:
            assert response.status == 503
            assert int(response.headers["retry-after"]) >= 1
            assert (await response.json())["error"]["code"] == "no_replica_available"
        gateway.assert_idle()


async def test_before_any_replica_was_heard_a_model_is_not_called_unknown() -> None:
    options = {"health": {"startup_wait_s": 0.1}}
    async with running_gateway(["http://127.0.0.1:9"], options) as gateway, session() as client:
        async with client.post(f"{gateway.url}/v1/chat/completions", json=CHAT) as response:
            assert response.status == 503
            assert int(response.headers["retry-after"]) >= 1
        gateway.assert_idle()


async def test_metrics_page_has_the_request() -> None:
    replica = await StubReplica().start()
    async with running_gateway([replica]) as gateway, session() as client:
        async with client.post(f"{gateway.url}/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            await response.read()
        async with client.get(f"{gateway.admin_url}/metrics") as response:
            page = await response.text()
    labels = 'outcome="ok",policy="predicted_ttft",replica="replica-1",status="200"'
    assert f"warmgate_requests_total{{{labels}}} 1.0" in page
    assert 'warmgate_ttft_prediction_absolute_error{quantile="0.5",replica="replica-1"}' in page
    assert 'warmgate_replica_in_flight{replica="replica-1"} 0.0' in page
    await replica.stop()


async def test_connections_to_replicas_are_reused() -> None:
    replica = await StubReplica().start()
    async with running_gateway([replica]) as gateway, session() as client:
        probes = replica.connections
        for stream in (False, True, False, True):
            async with client.post(f"{gateway.url}/v1/chat/completions", json={**CHAT, "stream": stream}) as response:
                await response.read()
        assert replica.connections == probes + 1
    await replica.stop()


async def test_dashboard_and_admin_api() -> None:
    replica = await StubReplica().start()
    async with running_gateway([replica]) as gateway, session() as client:
        async with client.get(f"{gateway.admin_url}/") as response:
            assert response.content_type == "text/html"
            assert "/admin/replicas" in await response.text()
        async with client.get(f"{gateway.admin_url}/admin/replicas") as response:
            (entry,) = (await response.json())["replicas"]
            assert (entry["name"], entry["up"], entry["models"]) == ("replica-1", True, ["m"])
    async with running_gateway([replica], {"admin": {"key": "k"}}) as gateway, session() as client:
        for headers, status in (({}, 401), ({"authorization": "Bearer x"}, 401), ({"authorization": "Bearer k"}, 200)):
            async with client.get(f"{gateway.admin_url}/admin/config", headers=headers) as response:
                assert response.status == status
                if status == 200:
                    assert "**" in (await response.json())["admin"]["key"]
    await replica.stop()
