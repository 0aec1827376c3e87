"""Clients as people use them: the openai package, aiohttp and curl, each in its own ways of speaking HTTP."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import openai
import pytest
from support.gateways import CHAT, RunningGateway, running_gateway, session
from support.stub_replica import DONE, Call, StubReplica, event, role_event, token_event

CURL = shutil.which("curl")


# -- openai


@pytest.fixture
async def api(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="sk-test", max_retries=0) as client:
        yield client


async def test_openai_chat(api: openai.AsyncOpenAI, replica: StubReplica) -> None:
    answer = await api.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}])
    assert answer.choices[0].message.content == "Hi"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 10
    # The client has no key of the replica, and sends its own to the gateway only.
    assert replica.requests[0].header("authorization") is None
    assert replica.requests[0].header("x-stainless-lang") == "python"


async def test_openai_streams(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
    for _ in range(2):
        stream = await api.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hello"}], stream=True
        )
        texts = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
        assert texts == ["", "a", "b"]
    await gateway.until_idle()
    assert [line["outcome"] for line in gateway.log_lines()] == ["ok", "ok"]


async def test_openai_leaves_a_stream(api: openai.AsyncOpenAI, replica: StubReplica) -> None:
    async def script(call: Call) -> None:
        call.stream_head()
        call.chunk(role_event() + token_event("a"))
        await call.gone.wait()

    replica.script = script
    stream = await api.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}], stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content == "a":
            break
    await stream.close()
    await replica.until(lambda: replica.aborted_seen == 1)


async def test_openai_gets_its_own_exceptions(api: openai.AsyncOpenAI, replica: StubReplica) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await api.chat.completions.create(model="nope", messages=[])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await api.chat.completions.create(model=7, messages=[])  # type: ignore[call-overload]
    assert (bad.value.code, bad.value.param) == ("invalid_type", "model")

    async def overloaded(call: Call) -> None:
        call.json({"error": {"message": "busy"}}, 429, "retry-after: 7\r\n")

    replica.script = overloaded
    with pytest.raises(openai.RateLimitError) as limited:
        await api.chat.completions.create(model="m", messages=[])
    assert limited.value.response.headers["retry-after"] == "7"

    async def broken(call: Call) -> None:
        call.stream_head()
        call.chunk(role_event() + token_event("a"))
        call.chunk(event({"error": {"message": "engine dead", "code": 500}}) + DONE)
        call.end_chunks()

    replica.script = broken
    stream = await api.chat.completions.create(model="m", messages=[], stream=True)
    with pytest.raises(openai.APIError, match="engine dead"):
        async for _ in stream:
            pass


async def test_openai_notices_a_stream_cut_off(api: openai.AsyncOpenAI, replica: StubReplica) -> None:
    async def script(call: Call) -> None:
        call.stream_head()
        call.chunk(role_event() + token_event("a"))
        call.close()

    replica.script = script
    stream = await api.chat.completions.create(model="m", messages=[], stream=True)
    texts: list[str | None] = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content)

    with pytest.raises(openai.APIError):
        await read()
    assert texts == ["", "a"]


async def test_openai_without_a_valid_key(replica: StubReplica) -> None:
    options = {"auth": {"client_keys": ["sk-right"]}}
    async with running_gateway([replica], options) as gateway:
        for key, allowed in (("sk-right", True), ("sk-wrong", False)):
            async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
                if allowed:
                    assert [model.id async for model in client.models.list()] == ["m"]
                else:
                    with pytest.raises(openai.AuthenticationError):
                        await client.models.list()


async def test_openai_other_endpoints(api: openai.AsyncOpenAI, replica: StubReplica) -> None:
    assert (await api.models.retrieve("m")).id == "m"

    async def script(call: Call) -> None:
        call.json(
            {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}], "text": "hello"}
        )

    replica.script = script
    assert (await api.embeddings.create(model="m", input="x", encoding_format="float")).data[0].embedding == [0.5]
    heard = await api.audio.transcriptions.create(model="m", file=("a.wav", b"RIFF" * 1000))
    assert heard.text == "hello"
    assert (replica.requests[-1].header("content-type") or "").startswith("multipart/form-data")
    assert b"RIFF" * 1000 in replica.requests[-1].body


# -- aiohttp


async def test_aiohttp_chunked_compressed_and_reused(gateway: RunningGateway, replica: StubReplica) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in json.dumps(CHAT).partition("messages"):
            yield piece.encode()

    async with session() as client:
        url = f"{gateway.url}/v1/chat/completions"
        headers = {"content-type": "application/json"}
        for _ in range(3):
            async with client.post(url, data=pieces(), headers=headers) as response:
                assert response.status == 200
            async with client.post(url, json=CHAT, compress="gzip") as response:
                assert response.status == 200
            async with client.post(url, json=CHAT, expect100=True) as response:
                assert response.status == 200
        async with client.head(f"{gateway.url}/health") as response:
            assert response.status == 200
    assert gateway.gateway.tally.connections == 1
    assert [seen.json == CHAT for seen in replica.requests if seen.header("content-encoding") is None] == [True] * 6


async def test_aiohttp_websockets_are_declined(gateway: RunningGateway, replica: StubReplica) -> None:
    async with session() as client:
        with pytest.raises(aiohttp.WSServerHandshakeError) as declined:
            await client.ws_connect(f"{gateway.url}/v1/realtime")
        assert declined.value.status == 200
    assert replica.requests[0].header("upgrade") is None


# -- curl


async def curl(*arguments: str, data: bytes = b"") -> tuple[int, bytes, str]:
    """Run curl; return its exit code, the body and what it says of the exchange."""
    if CURL is None:
        pytest.skip("curl is not installed")
    process = await asyncio.create_subprocess_exec(
        CURL, "-sS", "-v", "--max-time", "20", *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, log = await process.communicate(data)
    assert process.returncode is not None
    return process.returncode, out, log.decode("latin-1")


JSON_TYPE = ("-H", "Content-Type: application/json")


async def test_curl_post_and_stream(gateway: RunningGateway) -> None:
    url = f"{gateway.url}/v1/chat/completions"
    code, out, _ = await curl(url, *JSON_TYPE, "-d", json.dumps(CHAT))
    assert code == 0
    assert json.loads(out)["choices"][0]["message"]["content"] == "Hi"
    code, out, _ = await curl(url, "-N", *JSON_TYPE, "-d", json.dumps({**CHAT, "stream": True}))
    assert code == 0
    assert out.endswith(DONE)


async def test_curl_sends_a_large_body_after_100_continue(
    gateway: RunningGateway, replica: StubReplica, tmp_path: Path
) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 1_500_000}]}).encode()
    file = tmp_path / "body.json"
    file.write_bytes(body)
    url = f"{gateway.url}/v1/chat/completions"
    for extra in ((), ("-H", "Transfer-Encoding: chunked")):
        code, _, log = await curl(url, *JSON_TYPE, "-H", "Expect: 100-continue", *extra, "--data-binary", f"@{file}")
        assert code == 0
        assert "HTTP/1.1 100 Continue" in log
        assert "HTTP/1.1 200 OK" in log or "HTTP/1.1 200 X" in log
        assert replica.requests[-1].body == body


async def test_curl_in_http_1_0(gateway: RunningGateway) -> None:
    url = f"{gateway.url}/v1/chat/completions"
    for body, end in ((CHAT, b"}"), ({**CHAT, "stream": True}, DONE)):
        code, out, log = await curl("--http1.0", url, *JSON_TYPE, "-d", json.dumps(body))
        assert code == 0
        assert out.endswith(end)
        assert "transfer-encoding" not in log.lower()


async def test_curl_offers_http_2(gateway: RunningGateway) -> None:
    code, out, log = await curl("--http2", f"{gateway.url}/v1/chat/completions", *JSON_TYPE, "-d", json.dumps(CHAT))
    if "does not support" in log or code == 1:
        pytest.skip("this curl has no HTTP/2")
    assert code == 0
    assert json.loads(out)["choices"][0]["message"]["content"] == "Hi"


async def test_curl_uploads_a_form(gateway: RunningGateway, replica: StubReplica, tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    file.write_bytes(b"RIFF" * 100_000)
    code, _, _ = await curl(f"{gateway.url}/v1/audio/transcriptions", "-F", "model=m", "-F", f"file=@{file}")
    assert code == 0
    assert b"RIFF" * 100_000 in replica.requests[0].body


async def test_curl_reports_a_stream_cut_off(gateway: RunningGateway, replica: StubReplica) -> None:
    async def script(call: Call) -> None:
        call.stream_head(framing)
        data = role_event() + token_event("a")
        if framing:
            call.chunk(data)
        else:
            call.send(data)
        call.close()

    replica.script = script
    body = json.dumps({**CHAT, "stream": True})
    for version in ("--http1.1", "--http1.0"):
        for framing in ("transfer-encoding: chunked\r\n", ""):
            code, out, _ = await curl(version, "-N", f"{gateway.url}/v1/chat/completions", *JSON_TYPE, "-d", body)
            # 18: transfer closed with outstanding read data remaining; 56: failure in receiving network data.
            assert code in (18, 56), (version, framing)
            assert b"[DONE]" not in out
            if version == "--http1.1":
                assert b'"code":"replica_connection_lost"' in out
