"""Keys stay on their side, and nothing a client sends can forge a header or a log line."""

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.gateways import CHAT, RunningGateway, running_gateway, session
from support.raw_client import get, post, raw_client
from support.stub_replica import Call, StubReplica

BODY = json.dumps(CHAT).encode()
PATH = "/v1/chat/completions"
CLIENT_KEY = "sk-client-6f1c"
OTHER_CLIENT_KEY = "sk-client-77aa"
REPLICA_KEYS = ("sk-replica-1-9d2e", "sk-replica-2-4b8f")
SECRETS = (CLIENT_KEY, OTHER_CLIENT_KEY, *REPLICA_KEYS)
BEARER = f"Authorization: Bearer {CLIENT_KEY}"


def guarded(replicas: list[StubReplica], upstream: str = "replace") -> dict[str, Any]:
    """Client keys, and a key of its own for each replica."""
    return {
        "auth": {"client_keys": [CLIENT_KEY, OTHER_CLIENT_KEY], "upstream": upstream},
        "replicas": [
            {"url": replica.url, "api_key": key} for replica, key in zip(replicas, REPLICA_KEYS, strict=False)
        ],
    }


# -- who may come in


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (BEARER, 200),
        (f"authorization: bearer  {CLIENT_KEY} ", 200),
        (f"Authorization: Bearer {OTHER_CLIENT_KEY}", 200),
        (f"x-api-key: {CLIENT_KEY}", 200),  # as Anthropic's clients send it
        ("X: y", 401),
        ("Authorization: Bearer", 401),
        ("Authorization: Bearer ", 401),
        (f"Authorization: Basic {CLIENT_KEY}", 401),
        (f"Authorization: {CLIENT_KEY}", 401),
        (f"Authorization: Bearer {CLIENT_KEY[:-1]}", 401),
        (f"Authorization: Bearer {CLIENT_KEY}x", 401),
        (f"Authorization: Bearer {CLIENT_KEY.upper()}", 401),
        (f"Authorization: Bearer {CLIENT_KEY}\r\nAuthorization: Bearer {CLIENT_KEY}", 401),
        (f"Authorization: Bearer {REPLICA_KEYS[0]}", 401),
        (f"Authorization: Bearer wrong\r\nx-api-key: {CLIENT_KEY}", 401),
        ("x-api-key: \xff\xfe", 401),
        ("x-api-key: ", 401),
    ],
)
async def test_client_keys(replica: StubReplica, line: str, status: int) -> None:
    async with running_gateway([replica], guarded([replica])) as gateway, raw_client(gateway.port) as client:
        head, body = post(PATH, b"").removesuffix(b"\r\n"), BODY
        head = head.replace(b"Content-Length: 0", b"Content-Length: %d" % len(body))
        response = await client.ask(head + line.encode("latin-1") + b"\r\n\r\n" + body)
        assert response.status == status
        if status == 401:
            assert response.code == "invalid_api_key"
            # RFC 9110 section 15.5.2: "The server generating a 401 response MUST send a WWW-Authenticate header field".
            assert (response.header("www-authenticate") or "").startswith("Bearer ")
    assert replica.requests_seen == (status == 200)


async def test_health_is_open_and_the_rest_is_not(replica: StubReplica) -> None:
    async with running_gateway([replica], guarded([replica])) as gateway, raw_client(gateway.port) as client:
        assert (await client.ask(get("/health"))).status == 200
        for target in ("/v1/models", "/v1/models/m", "/version", "/nowhere", "/health/x", "/health%2F..%2Fv1%2Fmodels"):
            assert (await client.ask(get(target))).status in (400, 401), target


# -- which key goes where


@pytest.mark.parametrize(
    ("upstream", "authorization", "api_key"),
    [
        ("replace", f"Bearer {REPLICA_KEYS[0]}", None),
        ("strip", None, None),
        ("pass", f"Bearer {CLIENT_KEY}", "other"),
    ],
)
async def test_what_a_replica_is_shown(
    replica: StubReplica, upstream: str, authorization: str | None, api_key: str | None
) -> None:
    options = guarded([replica], upstream)
    async with running_gateway([replica], options) as gateway, raw_client(gateway.port) as client:
        for data in (post(PATH, BODY, BEARER, "x-api-key: other"), get("/v1/x", BEARER, "X-API-KEY: other")):
            assert (await client.ask(data)).status == 200
    for seen in replica.requests:
        assert [value for name, value in seen.headers if name == "authorization"] == (
            [authorization] if authorization is not None else []
        )
        assert seen.header("x-api-key") == api_key


async def test_a_replica_without_a_key_is_shown_none(replica: StubReplica) -> None:
    options = {"auth": {"client_keys": [CLIENT_KEY]}}
    async with running_gateway([replica], options) as gateway, raw_client(gateway.port) as client:
        assert (await client.ask(post(PATH, BODY, BEARER))).status == 200
    assert replica.requests[0].header("authorization") is None


async def test_a_retry_takes_the_key_of_the_replica_it_goes_to(
    replica: StubReplica, start_replica: Callable[[], Awaitable[StubReplica]]
) -> None:
    async def fail(call: Call) -> None:
        call.json({"error": "no"}, 500)

    other = await start_replica()
    replica.script = other.script = fail
    options = guarded([replica, other])
    async with running_gateway([replica, other], options) as gateway, raw_client(gateway.port) as client:
        assert (await client.ask(post(PATH, BODY, BEARER))).status == 500
    for stub, key in zip((replica, other), REPLICA_KEYS, strict=True):
        assert [seen.header("authorization") for seen in stub.requests] == [f"Bearer {key}"]


async def test_no_key_is_ever_shown(replica: StubReplica, caplog: pytest.LogCaptureFixture) -> None:
    """Every answer, log line and admin page, of requests that go well and that go wrong."""
    caplog.set_level(logging.DEBUG)
    shown: list[bytes] = []
    options = {**guarded([replica]), "admin": {"port": 0, "key": "sk-admin"}}
    async with running_gateway([replica], options) as gateway:
        for data in (
            post(PATH, BODY, BEARER),
            post(PATH, b"{", BEARER),
            post(PATH, BODY.replace(b'"m"', b'"nope"'), BEARER),
            post(PATH, BODY, f"Authorization: Bearer {CLIENT_KEY}x"),
            get("/nowhere", BEARER),
            get("/v1/models", BEARER),
            get("/v1/x", BEARER, "Content-Length: +1"),
        ):
            async with raw_client(gateway.port) as client:
                response = await client.ask(data)
                shown += [repr(response.headers).encode(), response.body]
        await replica.stop()
        async with raw_client(gateway.port) as client:
            response = await client.ask(post(PATH, BODY, BEARER))
            assert response.status == 502
            shown += [repr(response.headers).encode(), response.body]
            assert str(replica.port).encode() not in b"".join(shown)
        async with session() as http:
            for path in ("/metrics", "/admin/replicas", "/admin/config", "/health", "/ready"):
                headers = {"authorization": "Bearer sk-admin"}
                async with http.get(gateway.admin_url + path, headers=headers) as answer:
                    shown.append(await answer.read())
        shown.append(json.dumps(gateway.log_lines()).encode())
        shown.append(caplog.text.encode())
    everything = b"".join(shown)
    assert b'"error": "replica_unreachable"' in everything
    for secret in (*SECRETS, "sk-admin"):
        assert secret.encode() not in everything, secret


# -- x-request-id


async def test_request_ids_that_are_kept(gateway: RunningGateway, replica: StubReplica) -> None:
    async with raw_client(gateway.port) as client:
        for value in ("req-1", "0" * 128, "a.b_c:d@e=f+g/h"):
            response = await client.ask(post(PATH, BODY, f"X-Request-Id: {value}"))
            assert response.header("x-request-id") == value
            assert replica.requests[-1].header("x-request-id") == value
            assert gateway.log_lines()[-1]["id"] == value


@pytest.mark.parametrize(
    "value",
    ["a" * 129, "a" * 4096, "a b", "a;b", "\xe9t\xe9", "\t", "", "a%0d%0aSet-Cookie:x", '"}\\n{"id":"forged"}', "<b>"],
)
async def test_request_ids_that_are_replaced(gateway: RunningGateway, replica: StubReplica, value: str) -> None:
    async with raw_client(gateway.port) as client:
        response = await client.ask(post(PATH, BODY, f"x-request-id: {value}"))
        ours = response.header("x-request-id") or ""
        assert ours.startswith("wg-")
        assert [v for name, v in replica.requests[0].headers if name == "x-request-id"] == [ours]
        (line,) = gateway.log_lines()
        assert line["id"] == ours


async def test_two_request_ids_are_none(gateway: RunningGateway, replica: StubReplica) -> None:
    async with raw_client(gateway.port) as client:
        response = await client.ask(post(PATH, BODY, "x-request-id: a", "X-Request-Id: b"))
        assert (response.header("x-request-id") or "").startswith("wg-")
    assert len([name for name, _ in replica.requests[0].headers if name == "x-request-id"]) == 1


@pytest.mark.parametrize("value", ["a\rSet-Cookie: x", "a\nSet-Cookie: x", "a\x00", "a\r\n\r\nGET /v1/y HTTP/1.1"])
async def test_line_ends_in_an_id_are_no_header_and_no_log_line(
    gateway: RunningGateway, replica: StubReplica, value: str
) -> None:
    async with raw_client(gateway.port) as client:
        await client.send(post(PATH, BODY, f"x-request-id: {value}"))
        response = await client.response()
        assert response.header("set-cookie") is None
        assert response.status in (200, 400)
    assert all(seen.target != "/v1/y" and seen.header("set-cookie") is None for seen in replica.requests)
    await gateway.until_idle()
    for line in gateway.log_lines():
        assert "cookie" not in str(line).lower()


async def test_ids_of_different_requests_differ(gateway: RunningGateway) -> None:
    async with raw_client(gateway.port) as client:
        ids = [(await client.ask(get("/v1/x"))).header("x-request-id") for _ in range(20)]
    assert len(set(ids)) == 20


async def test_the_replica_s_own_id_does_not_double_ours(gateway: RunningGateway, replica: StubReplica) -> None:
    async def script(call: Call) -> None:
        call.json({}, headers="X-Request-Id: theirs\r\nx-warmgate-replica: forged\r\n")

    replica.script = script
    async with raw_client(gateway.port) as client:
        response = await client.ask(post(PATH, BODY, "x-request-id: mine"))
        assert response.all("x-request-id") == ["mine"]
        assert response.all("x-warmgate-replica") == ["replica-1"]


# -- other things a client can name


async def test_names_chosen_by_clients_are_escaped(gateway: RunningGateway) -> None:
    odd = 'x"}\n{"event":"forged"}\x1b[31m\u2028\u00e9'
    async with raw_client(gateway.port) as client:
        response = await client.ask(post(PATH, json.dumps({**CHAT, "model": odd}).encode()))
        assert (response.status, response.code) == (404, "model_not_found")
        assert odd in response.json["error"]["message"]
        response = await client.ask(post(PATH, json.dumps({**CHAT, "model": "y" * 5000}).encode()))
        assert len(response.body) < 1000
        await client.ask(get("/v1/%22%7D%0A%7B%1B"))
        await client.ask(get("/v1/" + "p" * 5000))
    lines = gateway.log_lines()
    assert len(lines) == 4
    assert all(line["event"] == "request" for line in lines)
    assert all(len(line["path"]) <= 256 for line in lines)
