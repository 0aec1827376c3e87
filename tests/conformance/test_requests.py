"""What of a request reaches the replica, and in what form: RFC 9110 on intermediaries, over real sockets."""

import json

from support.gateways import CHAT, RunningGateway, running_gateway
from support.raw_client import chunk, chunked, get, post, raw_client, request
from support.stub_replica import Call, StubReplica

BODY = json.dumps(CHAT).encode()
PATH = "/v1/chat/completions"


# -- targets


async def test_targets_pass_as_they_came(gateway: RunningGateway, replica: StubReplica) -> None:
    targets = [
        "/v1/x?limit=1&after=%20a&raw='\"<>\\^`{|}",
        "/v1/x?",
        "/v1/%7Euser/a%2Fb",
        "/v1/x;v=1/y:z@!$&()*+,=",
        "/v1/x//y",
    ]
    async with raw_client(gateway.port) as client:
        for target in targets:
            assert (await client.ask(get(target))).status == 200
        # RFC 9112 section 3.2.2: "When an origin server receives a request with an absolute-form of request-target, the
        # origin server MUST ignore the received Host header field (if any) and instead use the host information of the
        # request-target."
        assert (await client.ask(get("http://elsewhere.test:81/v1/x?a"))).status == 200
        assert (await client.ask(get("HTTPS://elsewhere.test/v1/x"))).status == 200
    assert [seen.target for seen in replica.requests] == [*targets, "/v1/x?a", "/v1/x"]
    assert {seen.header("host") for seen in replica.requests} == {f"127.0.0.1:{replica.port}"}


async def test_targets_that_are_refused(gateway: RunningGateway, replica: StubReplica) -> None:
    for target in ("*", "ftp://a/v1/x", "http:///v1/x", "http://user@a/v1/x", "/v1/x#y", "/v1/../x", "/v1/%2e%2E/x"):
        async with raw_client(gateway.port) as client:
            response = await client.ask(request("OPTIONS" if target == "*" else "GET", target))
            assert (response.status, response.code) == (400, "invalid_target"), target
            assert await client.ended()
    assert replica.requests == []


async def test_operations_of_a_replica_cannot_be_reached(gateway: RunningGateway, replica: StubReplica) -> None:
    async with raw_client(gateway.port) as client:
        for target in (
            "/sleep",
            "/metrics",
            "/reset_prefix_cache",
            "/v1/load_lora_adapter",
            "/v1/load%5Flora_adapter",
            "/%76%31/unload_lora%5fadapter?x=1",
            "http://elsewhere.test/v1/load_lora_adapter",
            "//v1/load_lora_adapter",
            "/v1/../sleep",
        ):
            response = await client.ask(post(target, b"{}"))
            assert response.status in (400, 404), target
            if response.header("connection") == "close":
                break
    assert replica.requests == []


# -- Host


async def test_hosts_that_are_refused(gateway: RunningGateway, replica: StubReplica) -> None:
    for lines in (
        [],
        ["Host: a", "Host: a"],
        ["Host: a", "host: b"],
        ["Host: a b"],
        ["Host: user@a"],
        ["Host: a/b"],
        ["Host: a\\b"],
        ["Host: \xe9"],
    ):
        async with raw_client(gateway.port) as client:
            data = "\r\n".join(["GET /v1/x HTTP/1.1", *lines, "", ""]).encode("latin-1")
            response = await client.ask(data)
            assert (response.status, response.code) == (400, "invalid_host"), lines
            assert await client.ended()
    assert replica.requests == []


# -- headers


async def test_hop_by_hop_headers_stop_here(gateway: RunningGateway, replica: StubReplica) -> None:
    async with raw_client(gateway.port) as client:
        data = post(
            PATH,
            BODY,
            "Connection: X-Hop, Keep-Alive",
            "connection: x-hop-too",
            "X-Hop: 1",
            "X-Hop-Too: 2",
            "Keep-Alive: timeout=5",
            "Proxy-Connection: keep-alive",
            "Proxy-Authorization: Basic c2VjcmV0",
            "TE: trailers",
            "Trailer: X-T",
            "X-End: 3",
        )
        assert (await client.ask(data)).status == 200
        # The connection header named nothing that the next request has lost.
        assert (await client.ask(post(PATH, BODY, "X-Hop: 1"))).status == 200
    first, second = replica.requests
    assert {name for name, _ in first.headers} == {"host", "content-type", "content-length", "x-end", "x-request-id"}
    assert second.header("x-hop") == "1"


async def test_connection_cannot_name_what_the_gateway_needs(gateway: RunningGateway, replica: StubReplica) -> None:
    async with raw_client(gateway.port) as client:
        data = post(PATH, BODY, "Connection: host, content-length, x-request-id, authorization", "x-request-id: mine")
        assert (await client.ask(data)).header("x-request-id") == "mine"
    (seen,) = replica.requests
    assert seen.body == BODY
    assert seen.header("host") == f"127.0.0.1:{replica.port}"
    assert seen.header("x-request-id") == "mine"


async def test_other_headers_pass_unchanged(gateway: RunningGateway, replica: StubReplica) -> None:
    async with raw_client(gateway.port) as client:
        lines = ["X-One:  spaced  out", "x-dup: 1", "X-Dup: 2", "X-Empty:", "Cookie: a=b; c=d", "X-Latin: caf\xe9"]
        await client.ask(post(PATH, BODY, *lines))
    (seen,) = replica.requests
    assert [value for name, value in seen.headers if name == "x-dup"] == ["1", "2"]
    assert seen.header("x-one") == "spaced  out"
    assert seen.header("x-empty") == ""
    assert seen.header("cookie") == "a=b; c=d"
    assert seen.header("x-latin") == "caf\xe9"


# -- Upgrade


async def test_an_upgrade_is_ignored(gateway: RunningGateway, replica: StubReplica) -> None:
    h2c = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAA")
    async with raw_client(gateway.port) as client:
        for data in (
            post(PATH, BODY, *h2c),
            chunked(PATH, chunk(BODY) + b"0\r\n\r\n", *h2c),
            post(PATH, get("/v1/smuggled"), *h2c, content_type="text/plain"),
            get("/v1/x", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
            post(PATH, BODY),
        ):
            response = await client.ask(data)
            assert response.status == 200
            assert response.header("upgrade") is None
    assert [seen.body for seen in replica.requests] == [BODY, BODY, get("/v1/smuggled"), b"", BODY]
    for seen in replica.requests:
        assert seen.header("upgrade") is None
        assert seen.header("http2-settings") is None


# -- Expect


async def test_expect_100_continue(gateway: RunningGateway, replica: StubReplica) -> None:
    # RFC 9110 section 10.1.1: "A server that receives a 100-continue expectation in an HTTP/1.0 request MUST ignore
    # that expectation." And: "A server MAY omit sending a 100 (Continue) response if it has already received some or
    # all of the content".
    async with raw_client(gateway.port) as client:
        for value in ("100-continue", "100-Continue "):
            data = post(PATH, BODY, f"Expect: {value}")
            await client.send(data[: -len(BODY)])
            assert (await client.response()).status == 100
            await client.send(BODY)
            assert (await client.response()).status == 200
        await client.send(post(PATH, BODY)[: -len(BODY)], BODY)
        assert (await client.response()).status == 200
        # Nothing to wait for.
        assert (await client.ask(get("/v1/x", "Expect: 100-continue"))).status == 200
    assert all(seen.header("expect") is None for seen in replica.requests)
    assert replica.requests_seen == 4
    async with raw_client(gateway.port) as client:
        data = b"POST %b HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % (PATH.encode(), len(BODY))
        await client.send(data)
        await client.send(BODY)
        assert (await client.response()).status == 200


async def test_a_refusal_comes_instead_of_100_continue(replica: StubReplica) -> None:
    options = {"limits": {"max_body_bytes": 1024}, "auth": {"client_keys": ["k"]}}
    async with running_gateway([replica], options) as gateway:
        for lines, status in ((["Authorization: Bearer k"], 413), ([], 401)):
            async with raw_client(gateway.port) as client:
                await client.send(request("POST", PATH, "Expect: 100-continue", "Content-Length: 2000", *lines))
                response = await client.response()
                assert (response.status, response.header("connection")) == (status, "close")
                assert await client.ended()
    assert replica.requests == []


async def test_100_continue_waits_for_its_turn(gateway: RunningGateway, replica: StubReplica) -> None:
    async with raw_client(gateway.port) as client:
        await client.send(post(PATH, BODY) + post(PATH, BODY, "Expect: 100-continue")[: -len(BODY)])
        assert (await client.response()).status == 200
        assert (await client.response()).status == 100
        await client.send(BODY)
        assert (await client.response()).status == 200


async def test_the_uploaded_stream_gets_its_100_continue(gateway: RunningGateway, replica: StubReplica) -> None:
    async with raw_client(gateway.port) as client:
        data = post("/v1/audio/transcriptions", b"x" * 9, "Expect: 100-continue", content_type="multipart/form-data")
        await client.send(data[:-9])
        assert (await client.response()).status == 100
        await client.send(b"x" * 9)
        assert (await client.response()).status == 200
    assert replica.requests[0].body == b"x" * 9


# -- methods


async def test_head_is_answered_as_get_without_a_body(gateway: RunningGateway, replica: StubReplica) -> None:
    async def script(call: Call) -> None:
        call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 12345\r\netag: x\r\n\r\n")

    replica.script = script
    async with raw_client(gateway.port) as client:
        for _ in range(2):
            response = await client.ask(request("HEAD", "/v1/x"), "HEAD")
            assert (response.status, response.header("content-length"), response.header("etag")) == (200, "12345", "x")
        for target in ("/health", "/v1/models", "/nowhere"):
            head = await client.ask(request("HEAD", target), "HEAD")
            full = await client.ask(get(target))
            assert (head.status, head.header("content-length")) == (full.status, str(len(full.body)))


async def test_options_needs_no_key(replica: StubReplica) -> None:
    # A browser's preflight carries no credentials (Fetch standard, CORS-preflight fetch).
    async def script(call: Call) -> None:
        call.send(b"HTTP/1.1 200 OK\r\naccess-control-allow-origin: *\r\ncontent-length: 0\r\n\r\n")

    replica.script = script
    options = {"auth": {"client_keys": ["k"]}}
    async with running_gateway([replica], options) as gateway, raw_client(gateway.port) as client:
        response = await client.ask(request("OPTIONS", PATH, "Origin: http://a"))
        assert (response.status, response.header("access-control-allow-origin")) == (200, "*")
        assert (await client.ask(get("/v1/x"))).status == 401
    assert [seen.method for seen in replica.requests] == ["OPTIONS"]


async def test_all_methods_of_the_api_pass(gateway: RunningGateway, replica: StubReplica) -> None:
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    async with raw_client(gateway.port) as client:
        for method in methods:
            data = request(method, "/v1/x", "Content-Length: 2", "Content-Type: application/json") + b"{}"
            assert (await client.ask(data)).status == 200
    assert [(seen.method, seen.body) for seen in replica.requests] == [(method, b"{}") for method in methods]


async def test_refusals_keep_the_connection_if_they_can(replica: StubReplica) -> None:
    async with (
        running_gateway([replica], {"auth": {"client_keys": ["k"]}}) as gateway,
        raw_client(gateway.port) as client,
    ):
        key = "Authorization: Bearer k"
        assert (await client.ask(get("/v1/x"))).status == 401
        assert (await client.ask(get("/nowhere", key))).status == 404
        assert (await client.ask(post(PATH, b"{", key))).status == 400
        assert (await client.ask(post(PATH, b"", key))).code == "invalid_json"
        assert (await client.ask(post(PATH, b"{}", key))).code == "missing_required_parameter"
        assert (await client.ask(post(PATH, b'{"model":"nope"}', key))).status == 404
        assert (await client.ask(post(PATH, BODY, key))).status == 200
