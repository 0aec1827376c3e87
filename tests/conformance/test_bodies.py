"""Request and response bodies: the replica gets, and the client gets, exactly what the other side has sent."""

import asyncio
import gzip
import hashlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
import zstandard
from support.gateways import CHAT, RunningGateway, running_gateway, session
from support.raw_client import chunk, chunked, get, post, raw_client, request
from support.stub_replica import Call, StubReplica

BODY = json.dumps(CHAT).encode()
PATH = "/v1/chat/completions"
MB = 1 << 20


def chat_of(size: int) -> bytes:
    """A chat request of a size, whose text is not all alike."""
    text = hashlib.sha256(str(size).encode()).hexdigest() * (size // 64 + 1)
    frame = json.dumps({"model": "m", "messages": [{"role": "user", "content": ""}]})
    return frame.replace('""', json.dumps(text[: size - len(frame)])).encode()


# -- request bodies


Serve = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def plain_replica(answer: Serve) -> AsyncIterator[str]:
    """A replica for tests of how bytes travel: `answer` gets each request's head, and reads and writes the rest itself.

    Probes are answered. Yields the URL.
    """
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith((b"GET /health ", b"GET /v1/models ", b"GET /metrics ")):
                    writer.write(json_answer({"data": [{"id": "m"}]}))
                else:
                    await answer(head, reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()


def json_answer(payload: object) -> bytes:
    body = json.dumps(payload).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def body_of(head: bytes, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Read a request's body in pieces, keeping none."""
    if b"\r\ntransfer-encoding: chunked" in head:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        assert await reader.readexactly(2) == b"\r\n"
        return
    left = int(head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0] or 0)
    while left:
        data = await reader.readexactly(min(left, 65536))
        left -= len(data)
        yield data


async def digest(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with length and hash of what has arrived."""
    sha256, size = hashlib.sha256(), 0
    async for data in body_of(head, reader):
        sha256.update(data)
        size += len(data)
    chunked = b"\r\ntransfer-encoding: chunked" in head
    writer.write(json_answer({"sha256": sha256.hexdigest(), "bytes": size, "chunked": chunked}))


@pytest.mark.parametrize("megabytes", [1, 8, 32])
@pytest.mark.parametrize("kind", ["application/json", "application/octet-stream"])
async def test_large_bodies(megabytes: int, kind: str) -> None:
    body = chat_of(megabytes * MB)

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 300_000):
            yield body[at : at + 300_000]

    async with plain_replica(digest) as url, running_gateway([url]) as gateway, session() as client:
        for data in (io.BytesIO(body), pieces()):
            headers = {"content-type": kind}
            async with client.post(f"{gateway.url}{PATH}", data=data, headers=headers) as response:
                assert response.status == 200
                answer = await response.json()
            assert answer["bytes"] == len(body)
            assert answer["sha256"] == hashlib.sha256(body).hexdigest()
            # JSON is read before it is routed, so its length is known; a stream keeps its form.
            assert answer["chunked"] is (kind != "application/json" and not isinstance(data, io.BytesIO))


async def test_bytes_that_another_parser_would_write_differently(gateway: RunningGateway, replica: StubReplica) -> None:
    bodies = [
        b'{"model":"m","messages":[],"unknown":{"x":[1,2.50,1e5,-0]},"big":123456789012345678901234567890}',
        b'{"model":"m","messages":[],"dup":1,"dup":2}',
        b' {\t"model" :\r\n"m" , "messages":[ ] } \n',
        b'{"model":"m","messages":[{"role":"user","content":"\\u00e9\\/\xc3\xa9\\ud83d\\ude00"}]}',
    ]
    async with raw_client(gateway.port) as client:
        for body in bodies:
            assert (await client.ask(post(PATH, body))).status == 200
    assert [seen.body for seen in replica.requests] == bodies


async def test_encoded_bodies_are_read_and_pass_as_they_are(replica: StubReplica) -> None:
    options = {"limits": {"max_body_bytes": MB}}
    async with running_gateway([replica], options) as gateway, raw_client(gateway.port) as client:
        for name, body in (("gzip", gzip.compress(BODY)), ("zstd", zstandard.ZstdCompressor().compress(BODY))):
            assert (await client.ask(post(PATH, body, f"Content-Encoding: {name}"))).status == 200
            seen = replica.requests[-1]
            assert (seen.body, seen.header("content-encoding")) == (body, name)
            # They have been read: an unknown model inside is found.
            other = BODY.replace(b'"m"', b'"nope"')
            encode = gzip.compress if name == "gzip" else zstandard.ZstdCompressor().compress
            assert (await client.ask(post(PATH, encode(other), f"Content-Encoding: {name}"))).code == "model_not_found"
        for name, body, code in (
            ("br", BODY, "unsupported_encoding"),
            ("gzip", BODY, "invalid_encoding"),
            ("gzip", gzip.compress(bytes(2 * MB)), "body_too_large"),
            ("gzip, gzip", gzip.compress(gzip.compress(BODY)), "unsupported_encoding"),
        ):
            assert (await client.ask(post(PATH, body, f"Content-Encoding: {name}"))).code == code
    assert replica.requests_seen == 2


async def test_multipart_uploads_are_streamed(gateway: RunningGateway, replica: StubReplica) -> None:
    audio = hashlib.sha256(b"audio").digest() * 100_000
    async with session() as client:
        form = aiohttp.FormData()
        form.add_field("model", "m")
        form.add_field("file", io.BytesIO(audio), filename="a.wav", content_type="audio/wav")
        async with client.post(f"{gateway.url}/v1/audio/transcriptions", data=form) as response:
            assert response.status == 200
    (seen,) = replica.requests
    assert (seen.header("content-type") or "").startswith("multipart/form-data; boundary=")
    assert audio in seen.body
    (line,) = gateway.log_lines()
    assert line["bytes_in"] == len(seen.body)


async def test_an_upload_reaches_the_replica_before_it_is_complete() -> None:
    got = asyncio.Event()

    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pieces = body_of(head, reader)
        assert await anext(pieces) == b"first"
        got.set()
        assert [piece async for piece in pieces] == [b"second"]
        writer.write(json_answer({}))

    async with plain_replica(answer) as url, running_gateway([url]) as gateway, raw_client(gateway.port) as client:
        await client.send(chunked("/v1/audio/transcriptions", chunk(b"first"), content_type="multipart/form-data"))
        async with asyncio.timeout(5):
            await got.wait()
        await client.send(chunk(b"second") + b"0\r\n\r\n")
        assert (await client.response()).status == 200


async def test_an_upload_without_a_length_or_an_end_is_forwarded_in_chunks(
    gateway: RunningGateway, replica: StubReplica
) -> None:
    async with raw_client(gateway.port) as client:
        for chunks, body in ((chunk(b"abc") + b"0\r\nX-T: y\r\n\r\n", b"abc"), (b"0\r\n\r\n", b"")):
            await client.ask(chunked("/v1/files", chunks, content_type="text/plain"))
            seen = replica.requests[-1]
            assert (seen.header("transfer-encoding"), seen.header("content-length")) == ("chunked", None)
            assert seen.body == body


# -- response bodies


async def test_answers_pass_unchanged(gateway: RunningGateway, replica: StubReplica) -> None:
    packed = gzip.compress(b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}')
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\nvary: x\r\n"
    framed = [
        b"content-length: %d\r\n\r\n%b" % (len(packed), packed),
        b"transfer-encoding: chunked\r\n\r\n" + chunk(packed[:9]) + chunk(packed[9:]) + b"0\r\n\r\n",
        b"transfer-encoding: chunked\r\ntrailer: x-t\r\n\r\n" + chunk(packed) + b"0;e\r\nX-T: a\r\n\r\n",
        b"connection: close\r\n\r\n" + packed,
    ]

    async def script(call: Call) -> None:
        call.send(head + framed[replica.requests_seen - 1])
        if b"connection: close" in framed[replica.requests_seen - 1]:
            call.close()

    replica.script = script
    async with raw_client(gateway.port) as client:
        for _ in framed:
            response = await client.ask(post(PATH, BODY, "Accept-Encoding: gzip"))
            assert response.complete
            assert response.body == packed
            assert response.header("content-encoding") == "gzip"
            assert response.header("vary") == "x"
            assert response.header("content-length") == str(len(packed))
            assert response.header("trailer") is None
    assert replica.requests[0].header("accept-encoding") == "gzip"


# RFC 9112 section 6.3: "Any response to a HEAD request and any response with a 1xx (Informational), 204 (No Content),
# or 304 (Not Modified) status code is always terminated by the first empty line after the header fields".
@pytest.mark.parametrize(
    ("head", "status", "length"),
    [
        (b"HTTP/1.1 204 No Content\r\nx: y\r\n\r\n", 204, None),
        (b"HTTP/1.1 204 No Content\r\nx: y\r\ncontent-length: 0\r\n\r\n", 204, None),
        (b"HTTP/1.1 304 Not Modified\r\nx: y\r\netag: a\r\n\r\n", 304, None),
        (b"HTTP/1.1 304 Not Modified\r\nx: y\r\ncontent-length: 99\r\n\r\n", 304, "99"),
        (b"HTTP/1.1 200 OK\r\nx: y\r\ncontent-length: 0\r\n\r\n", 200, "0"),
    ],
)
async def test_answers_without_a_body(
    gateway: RunningGateway, replica: StubReplica, head: bytes, status: int, length: str | None
) -> None:
    async def script(call: Call) -> None:
        call.send(head)

    replica.script = script
    async with raw_client(gateway.port) as client:
        for _ in range(2):
            response = await client.ask(get("/v1/x"))
            assert (response.status, response.header("x"), response.header("content-length")) == (status, "y", length)
            assert response.header("transfer-encoding") is None
    assert replica.connections == 2  # one for the probes, one for both requests


async def test_interim_answers_are_not_the_answer(gateway: RunningGateway, replica: StubReplica) -> None:
    async def script(call: Call) -> None:
        call.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n")
        call.json({"ok": True})

    replica.script = script
    async with raw_client(gateway.port) as client:
        for _ in range(2):
            assert (await client.ask(post(PATH, BODY))).json == {"ok": True}


async def test_switching_protocols_is_no_answer(gateway: RunningGateway, replica: StubReplica) -> None:
    async def script(call: Call) -> None:
        call.send(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n\x81\x00")

    replica.script = script
    async with raw_client(gateway.port) as client:
        response = await client.ask(get("/v1/x", "Connection: upgrade", "Upgrade: websocket"))
        assert (response.status, response.code) == (502, "replica_bad_response")


async def test_a_stream_for_an_http_1_0_client_ends_with_its_connection(
    gateway: RunningGateway, replica: StubReplica
) -> None:
    async with raw_client(gateway.port) as client:
        body = json.dumps({**CHAT, "stream": True}).encode()
        await client.send(
            b"POST %b HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n" % (PATH.encode(), len(body))
        )
        await client.send(body)
        response = await client.response()
        assert response.header("transfer-encoding") is None
        assert response.header("connection") == "close"
        assert response.body.endswith(b"data: [DONE]\n\n")


async def test_an_answer_before_the_upload_is_complete() -> None:
    """A replica that refuses an upload at its head: the client gets to read why."""

    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 415 Unsupported Media Type\r\ncontent-length: 2\r\n\r\nno")
        await reader.read()

    async with plain_replica(answer) as url, running_gateway([url]) as gateway, raw_client(gateway.port) as client:
        head = request("POST", "/v1/audio/transcriptions", "Content-Type: audio/wav", "Content-Length: 1000000")
        await client.send(head, b"x" * 100_000)
        response = await client.response()
        assert (response.status, response.body) == (415, b"no")
        assert response.header("connection") == "close"
        await client.send(b"x" * 100_000)
        assert await client.ended()
        await gateway.until_idle()
        gateway.assert_idle()


async def test_a_redirect_does_not_tell_the_address_of_the_replica(
    gateway: RunningGateway, replica: StubReplica
) -> None:
    # Starlette redirects a path with a slash too many to an absolute URL made of the Host header.
    async def script(call: Call) -> None:
        host = call.seen.header("host")
        call.send(
            f"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://{host}/v1/x\r\ncontent-length: 0\r\n\r\n".encode()
        )

    replica.script = script
    async with raw_client(gateway.port) as client:
        response = await client.ask(get("/v1/x/"))
        assert (response.status, response.header("location")) == (307, "/v1/x")
