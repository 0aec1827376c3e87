"""Where messages begin and end: RFC 9112, and nothing that two parsers could read in two ways."""

import json

from support.gateways import CHAT, RunningGateway
from support.raw_client import chunk, chunked, get, post, raw_client, request
from support.stub_replica import Call, StubReplica

BODY = json.dumps(CHAT).encode()
PATH = "/v1/chat/completions"
NEXT = get("/v1/smuggled")
"""What follows a request whose end is in doubt. It must never reach a replica."""


def with_lines(*lines: str, body: bytes = BODY) -> bytes:
    return request("POST", PATH, "Content-Type: application/json", *lines) + body


MALFORMED: dict[str, bytes] = {
    # RFC 9112 section 6.1: "A server MAY reject a request that contains both Content-Length and Transfer-Encoding or
    # process such a request in accordance with the Transfer-Encoding alone." Rejecting leaves no room for doubt.
    "length, then chunked": with_lines("Content-Length: 4", "Transfer-Encoding: chunked", body=b"0\r\n\r\n" + NEXT),
    "chunked, then length": with_lines("Transfer-Encoding: chunked", "Content-Length: 4", body=b"0\r\n\r\n" + NEXT),
    "length in a trailer": chunked(PATH, chunk(BODY) + b"0\r\nContent-Length: 4\r\n\r\n" + NEXT),
    # RFC 9112 section 6.3: "If a message is received without Transfer-Encoding and with an invalid Content-Length
    # header field, then the message framing is invalid and the recipient MUST treat it as an unrecoverable error".
    "two lengths": with_lines("Content-Length: 4", f"Content-Length: {len(BODY)}"),
    "the same length twice": with_lines(f"Content-Length: {len(BODY)}", f"Content-Length: {len(BODY)}"),
    "a list of lengths": with_lines(f"Content-Length: {len(BODY)}, {len(BODY)}"),
    "length with a plus": with_lines(f"Content-Length: +{len(BODY)}"),
    "negative length": with_lines("Content-Length: -1"),
    "length in hexadecimal": with_lines("Content-Length: 0x10"),
    "length with an underscore": with_lines("Content-Length: 1_0"),
    "length with a blank": with_lines("Content-Length: 1 0"),
    "empty length": with_lines("Content-Length: "),
    "length of 2^64": with_lines("Content-Length: 18446744073709551616"),
    "length with 5000 zeros": with_lines("Content-Length: " + "0" * 5000 + "5"),
    # RFC 9112 section 6.3: "If a Transfer-Encoding header field is present in a request and the chunked transfer coding
    # is not the final encoding, the message body length cannot be determined reliably; the server MUST respond with the
    # 400 (Bad Request) status code and then close the connection."
    "chunked is not last": with_lines("Transfer-Encoding: chunked, gzip", body=b"0\r\n\r\n" + NEXT),
    "chunked twice": with_lines("Transfer-Encoding: chunked, chunked", body=b"0\r\n\r\n" + NEXT),
    "chunked in two lines": with_lines("Transfer-Encoding: chunked", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "identity": with_lines("Transfer-Encoding: identity"),
    "something like chunked": with_lines("Transfer-Encoding: xchunked", body=b"0\r\n\r\n" + NEXT),
    "chunked with vertical tab": with_lines("Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n" + NEXT),
    "empty transfer coding": with_lines("Transfer-Encoding: ", body=b"0\r\n\r\n" + NEXT),
    "chunked in HTTP/1.0": b"POST %b HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" % PATH.encode()
    + chunk(BODY)
    + b"0\r\n\r\n",
    # RFC 9112 section 7.1: chunk-size = 1*HEXDIG, and the chunk ends with CRLF.
    "negative chunk": chunked(PATH, b"-1\r\n" + NEXT),
    "chunk with a plus": chunked(PATH, b"+1\r\nx\r\n0\r\n\r\n"),
    "chunk with 0x": chunked(PATH, b"0x1\r\nx\r\n0\r\n\r\n"),
    "chunk size that overflows": chunked(PATH, b"10000000000000001\r\nx\r\n0\r\n\r\n"),
    "empty chunk size": chunked(PATH, b"\r\nx\r\n0\r\n\r\n"),
    "blank before the chunk size": chunked(PATH, b" 1\r\nx\r\n0\r\n\r\n"),
    "blank behind the chunk size": chunked(PATH, b"1 \r\nx\r\n0\r\n\r\n"),
    "chunk longer than its size": chunked(PATH, b"1\r\nxy\r\n0\r\n\r\n"),
    "chunk without its CRLF": chunked(PATH, b"1\r\nx0\r\n\r\n"),
    "LF behind the chunk size": chunked(PATH, b"1\nx\r\n0\r\n\r\n"),
    "LF behind the chunk": chunked(PATH, b"1\r\nx\n0\r\n\r\n"),
    "LF in a chunk extension": chunked(PATH, b"1;a\nb\r\nx\r\n0\r\n\r\n"),
    "CR in a chunk extension": chunked(PATH, b"1;a\rb\r\nx\r\n0\r\n\r\n"),
    "LF at the end of the last chunk": chunked(PATH, b"1\r\nx\r\n0\n\n" + NEXT),
    # RFC 9112 section 5.2: "A server that receives an obs-fold in a request message that is not within a
    # "message/http" container MUST either reject the message [...] or replace each received obs-fold".
    "obs-fold": with_lines("X-A: a\r\n b", "Content-Length: 0", body=b""),
    "obs-fold in length": with_lines("Content-Length:\r\n 4"),
    "obs-fold in transfer coding": with_lines("Transfer-Encoding:\r\n chunked", body=b"0\r\n\r\n"),
    "obs-fold before the first header": f"POST {PATH} HTTP/1.1\r\n X: y\r\nHost: a\r\n\r\n".encode(),
    # RFC 9112 section 2.2: "a recipient MAY recognize a single LF as a line terminator". Not here: others do not.
    "LF behind the request line": b"GET /v1/x HTTP/1.1\nHost: a\r\n\r\n",
    "LF behind a header": b"GET /v1/x HTTP/1.1\r\nHost: a\nX: y\r\n\r\n",
    "LF for the empty line": b"GET /v1/x HTTP/1.1\r\nHost: a\r\n\n" + NEXT,
    "LF everywhere": b"GET /v1/x HTTP/1.1\nHost: a\n\n",
    # RFC 9112 section 2.2: "A recipient of such a bare CR MUST consider that element to be invalid or replace each bare
    # CR with SP before processing the element or forwarding the message."
    "CR in a header": with_lines("X-A: a\rContent-Length: 0", "Content-Length: 0", body=b""),
    "CR behind a header": with_lines("X-A: a\r", "Content-Length: 0", body=b""),
    "CR for CRLF": b"GET /v1/x HTTP/1.1\rHost: a\r\r",
    # RFC 9112 section 5.1: "A server MUST reject, with a response status code of 400 (Bad Request), any received
    # request message that contains whitespace between a header field name and colon."
    "blank before the colon": with_lines("Content-Length : 4"),
    "tab before the colon": with_lines("Transfer-Encoding\t: chunked"),
    "no name": with_lines(": a"),
    "no colon": with_lines("X-A"),
    "name that is no token": with_lines("X(A): b"),
    "name that is not ASCII": with_lines("X-\xe9: b"),
    # RFC 9110 section 5.5: "Field values containing CR, LF, or NUL characters are invalid and dangerous".
    "NUL in a header": with_lines("X-A: a\x00b"),
    "control byte in a header": with_lines("X-A: a\x01b"),
    "DEL in a header": with_lines("X-A: a\x7fb"),
    "NUL in the target": b"GET /v1/\x00 HTTP/1.1\r\nHost: a\r\n\r\n",
    "blank in the target": b"GET /v1/a b HTTP/1.1\r\nHost: a\r\n\r\n",
    "tab for a blank": b"GET\t/v1/x\tHTTP/1.1\r\nHost: a\r\n\r\n",
    "target that is not ASCII": b"GET /v1/\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n",
    "method in lower case": b"get /v1/x HTTP/1.1\r\nHost: a\r\n\r\n",
    "method that does not exist": b"FETCH /v1/x HTTP/1.1\r\nHost: a\r\n\r\n",
    "no version (HTTP/0.9)": b"GET /v1/x\r\n\r\n",
    "version 0.9": b"GET /v1/x HTTP/0.9\r\n\r\n",
    "version 1.2": b"GET /v1/x HTTP/1.2\r\nHost: a\r\n\r\n",
    "version with a blank behind": b"GET /v1/x HTTP/1.1 \r\nHost: a\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "no HTTP at all": b"EHLO example.com\r\n",
}


async def test_malformed_requests_are_refused_and_reach_no_replica(
    gateway: RunningGateway, replica: StubReplica
) -> None:
    for name, data in MALFORMED.items():
        async with raw_client(gateway.port) as client:
            response = await client.ask(data)
            assert (response.status, response.code) == (400, "invalid_http"), name
            assert response.header("connection") == "close", name
            assert await client.ended(), name
    assert replica.requests == []
    assert gateway.gateway.tally.bad_requests["invalid_http"] + sum(
        1 for line in gateway.log_lines() if line["status"] == 400
    ) == len(MALFORMED)


async def test_what_is_not_implemented(gateway: RunningGateway, replica: StubReplica) -> None:
    for data, status, code in (
        (with_lines("Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n" + NEXT), 501, "unknown_transfer_coding"),
        (
            with_lines("Transfer-Encoding: identity", "Transfer-Encoding: chunked", body=b"0\r\n\r\n" + NEXT),
            501,
            "unknown_transfer_coding",
        ),
        (request("TRACE", "/v1/x") + NEXT, 501, "unknown_method"),
        (request("CONNECT", "replica:8000") + NEXT, 501, "unknown_method"),
        (request("PROPFIND", "/v1/x") + NEXT, 501, "unknown_method"),
        (get("/v1/x", version="HTTP/2.0"), 505, "unsupported_http_version"),
    ):
        async with raw_client(gateway.port) as client:
            response = await client.ask(data)
            assert (response.status, response.code) == (status, code)
            assert response.header("connection") == "close"
            assert await client.ended()
    assert replica.requests == []


# -- what is allowed, if unusual


async def test_unusual_framing_that_is_valid(gateway: RunningGateway, replica: StubReplica) -> None:
    half = len(BODY) // 2
    pieces = b'%x;name=value;q="a\\"b"\r\n%b\r\n%X\r\n%b\r\n' % (half, BODY[:half], len(BODY) - half, BODY[half:])
    for data in (
        with_lines(f"Content-Length:   {len(BODY)} \t "),
        with_lines(f"Content-Length: 000{len(BODY)}"),
        with_lines(f"cOnTeNt-LeNgTh:{len(BODY)}"),
        b"\r\n\r\n" + with_lines(f"Content-Length: {len(BODY)}"),
        chunked(PATH, pieces + b"0\r\n\r\n"),
        chunked(PATH, pieces + b"00000;last\r\nX-Trailer: a\r\nX-Other:\r\n\r\n"),
        with_lines("Transfer-Encoding:\tCHUNKED  ", body=pieces + b"0\r\n\r\n"),
    ):
        async with raw_client(gateway.port) as client:
            # The connection survives: the end of each message is known.
            for _ in range(2):
                assert (await client.ask(data)).status == 200
    assert {seen.body for seen in replica.requests} == {BODY}
    for seen in replica.requests:
        assert seen.header("content-length") == str(len(BODY))
        assert seen.header("transfer-encoding") is None
        assert seen.header("x-trailer") is None


async def test_a_request_in_single_bytes(gateway: RunningGateway, replica: StubReplica) -> None:
    data = chunked(PATH, chunk(BODY[:9]) + chunk(BODY[9:]) + b"0\r\nX-T: a\r\n\r\n", "X-Empty:", "X-A:  b c ")
    async with raw_client(gateway.port) as client:
        await client.send(*(bytes([byte]) for byte in data))
        assert (await client.response()).status == 200
    (seen,) = replica.requests
    assert seen.body == BODY
    assert (seen.header("x-empty"), seen.header("x-a")) == ("", "b c")


async def test_a_get_with_a_body(gateway: RunningGateway, replica: StubReplica) -> None:
    async with raw_client(gateway.port) as client:
        for _ in range(2):
            data = request("GET", "/v1/x", "Content-Length: 2", "Content-Type: application/json") + b"{}"
            assert (await client.ask(data)).status == 200
    assert [seen.body for seen in replica.requests] == [b"{}", b"{}"]


# -- pipelining


async def test_pipelined_requests_are_answered_in_order(gateway: RunningGateway, replica: StubReplica) -> None:
    async def echo(call: Call) -> None:
        call.json({"target": call.seen.target})

    replica.script = echo
    async with raw_client(gateway.port) as client:
        await client.send(
            get("/v1/1")
            + post("/v1/2", BODY)
            + get("/health")
            + chunked("/v1/3", chunk(b"{") + chunk(b"}") + b"0\r\n\r\n")
            + request("HEAD", "/v1/4")
            + get("/nowhere")
            + get("/v1/5")
        )
        for method, status, target in (
            ("GET", 200, "/v1/1"),
            ("POST", 200, "/v1/2"),
            ("GET", 200, None),
            ("POST", 200, "/v1/3"),
            ("HEAD", 200, None),
            ("GET", 404, None),
            ("GET", 200, "/v1/5"),
        ):
            response = await client.response(method)
            assert response.status == status
            if target is not None:
                assert response.json == {"target": target}
    assert [seen.target for seen in replica.requests] == [f"/v1/{i}" for i in (1, 2, 3, 4, 5)]


async def test_a_bad_request_in_the_middle_costs_no_answer_before_it(
    gateway: RunningGateway, replica: StubReplica
) -> None:
    for bad in (b"GET /v1/x HTTP/1.1\nHost: a\n\n", chunked("/v1/x", b"zz\r\n"), with_lines("Content-Length: +1")):
        async with raw_client(gateway.port) as client:
            await client.send(get("/v1/good") + post("/v1/good", BODY) + bad + NEXT)
            assert (await client.response()).status == 200
            assert (await client.response()).status == 200
            refused = await client.response()
            assert (refused.status, refused.code) == (400, "invalid_http")
            assert await client.ended()
    assert {seen.target for seen in replica.requests} == {"/v1/good"}


async def test_a_hundred_pipelined_requests(gateway: RunningGateway, replica: StubReplica) -> None:
    async with raw_client(gateway.port) as client:
        await client.send(post("/v1/x", BODY) * 100)
        for _ in range(100):
            assert (await client.response()).status == 200
    assert replica.requests_seen == 100
    assert replica.in_flight_max == 1


# -- the end of connections


async def test_connection_close(gateway: RunningGateway) -> None:
    for option in ("close", "Close", "close, x", "keep-alive, close"):
        async with raw_client(gateway.port) as client:
            response = await client.ask(get("/v1/x", f"Connection: {option}") + NEXT)
            assert response.status == 200
            assert response.header("connection") == "close"
            assert await client.ended()


async def test_http_1_0_closes_by_default(gateway: RunningGateway, replica: StubReplica) -> None:
    async with raw_client(gateway.port) as client:
        response = await client.ask(b"GET /v1/x HTTP/1.0\r\n\r\n" + NEXT)
        assert (response.status, response.header("connection")) == (200, "close")
        assert await client.ended()
    assert [seen.target for seen in replica.requests] == ["/v1/x"]
    assert replica.requests[0].header("host") == f"127.0.0.1:{replica.port}"


async def test_http_1_0_with_keep_alive(gateway: RunningGateway) -> None:
    async with raw_client(gateway.port) as client:
        for _ in range(3):
            response = await client.ask(b"GET /v1/x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert (response.status, response.header("connection")) == (200, "keep-alive")


async def test_a_client_that_half_closes_has_left(gateway: RunningGateway, replica: StubReplica) -> None:
    async def never(call: Call) -> None:
        await call.gone.wait()

    replica.script = never
    async with raw_client(gateway.port) as client:
        await client.send(post(PATH, BODY))
        await replica.until(lambda: replica.in_flight == 1)
        client.writer.write_eof()
        assert await client.ended()
        await replica.until(lambda: replica.in_flight == 0)
    assert replica.aborted_seen == 1
    await gateway.until_idle()
    assert [line["outcome"] for line in gateway.log_lines()] == ["cancelled"]
