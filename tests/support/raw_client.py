"""A client that sends whatever bytes a test likes, and reads responses without any parser of the gateway's."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import orjson

_WITHIN_S = 10.0


@dataclass
class Response:
    """One response.

    Attributes:
        status, reason: of the status line.
        headers: name in lower case and value, in order.
        body: with chunk framing taken off.
        complete: the body ended as its framing promised, and not because the connection did.
    """

    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    complete: bool = True

    def header(self, name: str) -> str | None:
        values = self.all(name)
        assert len(values) <= 1, f"{name} stands there {len(values)} times"
        return values[0] if values else None

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def code(self) -> str:
        """The code of an error in OpenAI's shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        code: str = error["code"]
        return code


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *segments: bytes) -> None:
        for segment in segments:
            self.writer.write(segment)
            await self.writer.drain()

    async def response(self, method: str = "GET") -> Response:
        """Read one response, interim ones included.

        Raises:
            EOFError: the connection ended instead.
        """
        async with asyncio.timeout(_WITHIN_S):
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise
                raise EOFError from None
            status_line, *lines = head[:-4].decode("latin-1").split("\r\n")
            version, status, reason = status_line.split(" ", 2)
            assert version == "HTTP/1.1"
            headers = [(name.lower(), value) for name, _, value in (line.partition(": ") for line in lines)]
            response = Response(int(status), reason, headers)
            if method == "HEAD" or response.status in (100, 103, 204, 304):
                return response
            length, coding = response.header("content-length"), response.header("transfer-encoding")
            assert length is None or coding is None
            try:
                if coding is not None:
                    assert coding == "chunked"
                    while size := int((await self.reader.readuntil(b"\r\n"))[:-2], 16):
                        response.body += await self.reader.readexactly(size)
                        assert await self.reader.readexactly(2) == b"\r\n"
                    assert await self.reader.readexactly(2) == b"\r\n"
                elif length is not None:
                    response.body = await self.reader.readexactly(int(length))
                else:
                    response.body = await self.reader.read()
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                response.complete = False
                if response.body == b"" and isinstance(error, asyncio.IncompleteReadError) and length is not None:
                    response.body = error.partial
            return response

    async def ask(self, data: bytes, method: str = "GET") -> Response:
        """Send bytes and read the response."""
        await self.send(data)
        return await self.response(method)

    async def ended(self) -> bool:
        """Wait for the end of the connection; True if it was a proper one, False for a reset. No byte may come."""
        async with asyncio.timeout(_WITHIN_S):
            try:
                assert await self.reader.read() == b""
            except ConnectionError:
                return False
            return True

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await self.writer.wait_closed()


@asynccontextmanager
async def raw_client(
    port: int, tls: ssl.SSLContext | None = None, server_hostname: str | None = None
) -> AsyncIterator[RawClient]:
    """Connect to a port of this machine."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=tls, server_hostname=server_hostname, limit=1 << 22
    )
    client = RawClient(reader, writer)
    try:
        yield client
    finally:
        await client.close()


def get(target: str, *headers: str, version: str = "HTTP/1.1") -> bytes:
    """A GET request."""
    return request("GET", target, *headers, version=version)


def request(method: str, target: str, *headers: str, version: str = "HTTP/1.1") -> bytes:
    """A head with a Host."""
    return "\r\n".join([f"{method} {target} {version}", "Host: gateway.test", *headers, "", ""]).encode("latin-1")


def post(target: str, body: bytes, *headers: str, content_type: str = "application/json") -> bytes:
    """A POST request with Content-Length."""
    return request("POST", target, f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *headers) + body


def chunked(target: str, chunks: bytes, *headers: str, content_type: str = "application/json") -> bytes:
    """A POST request with chunks as given, the last one not included."""
    head = request("POST", target, f"Content-Type: {content_type}", "Transfer-Encoding: chunked", *headers)
    return head + chunks


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
