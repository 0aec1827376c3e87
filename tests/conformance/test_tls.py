"""TLS towards clients and towards replicas, with a CA of our own, and with client certificates (mTLS)."""

import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
from support.gateways import CHAT, running_gateway
from support.raw_client import get, post, raw_client
from support.stub_replica import DONE, Call, StubReplica, role_event, token_event

BODY = json.dumps(CHAT).encode()
STREAM_BODY = json.dumps({**CHAT, "stream": True}).encode()
PATH = "/v1/chat/completions"
StartReplica = Callable[..., Awaitable[StubReplica]]


@dataclass
class Authority:
    """A CA and where its files are."""

    ca: trustme.CA
    directory: Path

    @property
    def file(self) -> Path:
        path = self.directory / "ca.pem"
        self.ca.cert_pem.write_to_path(str(path))
        return path

    def certificate(self, name: str) -> dict[str, str]:
        """Certificate and key for a name or address, as files."""
        issued = self.ca.issue_cert(name)
        cert, key = self.directory / f"{name}.crt", self.directory / f"{name}.key"
        cert.unlink(missing_ok=True)
        for blob in issued.cert_chain_pems:
            blob.write_to_path(str(cert), append=True)
        issued.private_key_pem.write_to_path(str(key))
        return {"cert": str(cert), "key": str(key)}

    def server(self, name: str = "127.0.0.1", *, client_ca: trustme.CA | None = None) -> ssl.SSLContext:
        """What a replica listens with."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.ca.issue_cert(name).configure_cert(context)
        if client_ca is not None:
            client_ca.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self, name: str | None = None) -> ssl.SSLContext:
        """What a client connects with; with a certificate if it has a name."""
        context = ssl.create_default_context(cafile=str(self.file))
        if name is not None:
            self.ca.issue_cert(name).configure_cert(context)
        return context


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(trustme.CA(key_type=trustme.KeyType.ECDSA), tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    """Another CA, which nobody trusts."""
    directory = tmp_path / "stranger"
    directory.mkdir()
    return Authority(trustme.CA(key_type=trustme.KeyType.ECDSA), directory)


# -- towards clients


def listening(authority: Authority, client_ca: Path | None = None) -> dict[str, Any]:
    tls: dict[str, Any] = authority.certificate("127.0.0.1")
    if client_ca is not None:
        tls["client_ca"] = str(client_ca)
    return {"listen": {"host": "127.0.0.1", "port": 0, "tls": tls}}


async def test_clients_speak_tls(replica: StubReplica, authority: Authority) -> None:
    large = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 3_000_000}]}).encode()
    async with running_gateway([replica], listening(authority)) as gateway:
        async with raw_client(gateway.port, authority.client(), "127.0.0.1") as client:
            for body in (BODY, STREAM_BODY, large, BODY):
                response = await client.ask(post(PATH, body))
                assert response.status == 200
                assert response.complete
                assert replica.requests[-1].body == body
            # Several at once, and a bad one behind them.
            await client.send(post(PATH, BODY) * 3 + b"nonsense\r\n\r\n")
            for status in (200, 200, 200, 400):
                assert (await client.response()).status == status
            assert await client.ended()
        await gateway.until_idle()
        gateway.assert_idle()
        assert {line["client"] for line in gateway.log_lines()} == {"127.0.0.1"}


async def test_a_refusal_can_be_read_while_the_client_still_sends(replica: StubReplica, authority: Authority) -> None:
    # TLS cannot be half-closed, so this is the hard case.
    options = {**listening(authority), "limits": {"max_body_bytes": 50_000}}
    async with (
        running_gateway([replica], options) as gateway,
        raw_client(gateway.port, authority.client(), "127.0.0.1") as client,
    ):
        client.writer.write(post(PATH, b"x" * 60_000))
        assert (await client.response()).status == 413


async def test_a_tls_client_that_leaves_frees_the_replica(replica: StubReplica, authority: Authority) -> None:
    async def script(call: Call) -> None:
        call.stream_head()
        call.chunk(role_event() + token_event("a"))
        await call.gone.wait()

    replica.script = script
    async with running_gateway([replica], listening(authority)) as gateway:
        for leave in ("close", "abort"):
            async with raw_client(gateway.port, authority.client(), "127.0.0.1") as client:
                await client.send(post(PATH, STREAM_BODY))
                await client.reader.readuntil(b'"a"')
                if leave == "abort":
                    client.writer.transport.abort()
            await gateway.until_idle()
        await replica.until(lambda: replica.aborted_seen == 2)
        gateway.assert_idle()


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
async def test_a_broken_stream_does_not_look_complete_over_tls(
    replica: StubReplica, authority: Authority, version: str
) -> None:
    async def script(call: Call) -> None:
        call.stream_head()
        call.chunk(role_event() + token_event("a"))
        call.close()

    replica.script = script
    async with (
        running_gateway([replica], listening(authority)) as gateway,
        raw_client(gateway.port, authority.client(), "127.0.0.1") as client,
    ):
        await client.send(post(PATH, STREAM_BODY).replace(b"HTTP/1.1", version.encode()))
        response = await client.response()
        assert DONE not in response.body
        assert not response.complete


async def test_plain_http_on_a_tls_port_is_turned_away(replica: StubReplica, authority: Authority) -> None:
    async with running_gateway([replica], listening(authority)) as gateway:
        async with raw_client(gateway.port) as client:
            with pytest.raises((EOFError, ConnectionError)):
                await client.ask(get("/health"))
        async with raw_client(gateway.port, authority.client(), "127.0.0.1") as client:
            assert (await client.ask(get("/health"))).status == 200


async def test_a_handshake_must_be_done_in_time(replica: StubReplica, authority: Authority) -> None:
    options = {**listening(authority), "timeouts": {"head_s": 0.2}}
    async with running_gateway([replica], options) as gateway, raw_client(gateway.port) as client:
        assert await client.ended() in (True, False)


async def test_clients_without_a_certificate_are_turned_away(
    replica: StubReplica, authority: Authority, stranger: Authority
) -> None:
    async with running_gateway([replica], listening(authority, client_ca=authority.file)) as gateway:
        async with raw_client(gateway.port, authority.client("client.test"), "127.0.0.1") as client:
            assert (await client.ask(post(PATH, BODY))).status == 200
        unknown = authority.client()
        stranger.ca.issue_cert("client.test").configure_cert(unknown)
        for context in (authority.client(), unknown):
            # In TLS 1.3 the client learns of it with its first read.
            with pytest.raises((EOFError, ConnectionError, ssl.SSLError)):
                async with raw_client(gateway.port, context, "127.0.0.1") as client:
                    await client.ask(post(PATH, BODY))
        assert replica.requests_seen == 1


# -- towards replicas


async def ask_through(stub: StubReplica, tls: dict[str, str], host: str = "127.0.0.1") -> int:
    """Ask a gateway in front of an https replica; return the status.

    503 means that the probes have not got through: no replica has ever told of the model.
    """
    options = {"tls": tls, "health": {"startup_wait_s": 1.0}}
    async with running_gateway([f"https://{host}:{stub.port}"], options) as gateway, raw_client(gateway.port) as client:
        status = 0
        for body in (BODY, STREAM_BODY, BODY):
            response = await client.ask(post(PATH, body))
            status = response.status
            assert response.complete
        await gateway.until_idle()
        gateway.assert_idle()
    return status


async def test_replicas_behind_an_own_ca(
    start_replica: StartReplica, authority: Authority, stranger: Authority
) -> None:
    stub = await start_replica(authority.server())
    assert await ask_through(stub, {"ca": str(authority.file)}) == 200
    assert stub.requests_seen == 3
    assert stub.requests[0].header("host") == f"127.0.0.1:{stub.port}"
    # One connection for the probes, one for the three requests.
    assert stub.connections == 2
    # Whom the gateway does not trust gets no request, and the client no word of why.
    assert await ask_through(stub, {"ca": str(stranger.file)}) == 503
    assert await ask_through(stub, {}) == 503
    assert stub.requests_seen == 3


async def test_a_replica_with_the_name_of_another_gets_no_request(
    start_replica: StartReplica, authority: Authority
) -> None:
    stub = await start_replica(authority.server("other.test"))
    assert await ask_through(stub, {"ca": str(authority.file)}) == 503
    assert stub.requests_seen == 0


async def test_a_replica_that_is_replaced_by_a_stranger_gets_no_request(
    start_replica: StartReplica, authority: Authority, stranger: Authority
) -> None:
    stub = await start_replica(authority.server())
    options = {"tls": {"ca": str(authority.file)}, "health": {"interval_s": 60}}
    urls = [f"https://127.0.0.1:{stub.port}"]
    async with running_gateway(urls, options) as gateway, raw_client(gateway.port) as client:
        assert (await client.ask(post(PATH, BODY))).status == 200
        await stub.stop()
        other = await start_replica(stranger.server(), stub.port)
        response = await client.ask(post(PATH, BODY))
        assert (response.status, response.code) == (502, "replica_unreachable")
        assert other.requests_seen == 0


async def test_replicas_that_ask_for_a_certificate(start_replica: StartReplica, authority: Authority) -> None:
    stub = await start_replica(authority.server(client_ca=authority.ca))
    assert await ask_through(stub, {"ca": str(authority.file)}) == 503
    assert stub.requests_seen == 0
    assert await ask_through(stub, {"ca": str(authority.file), **authority.certificate("gateway.test")}) == 200
    assert stub.requests_seen == 3


async def test_http_and_https_replicas_side_by_side(start_replica: StartReplica, authority: Authority) -> None:
    stub, plain = await start_replica(authority.server()), await start_replica()
    options = {"tls": {"ca": str(authority.file)}, "routing": {"policy": "round_robin"}}
    urls: list[StubReplica | str] = [f"https://127.0.0.1:{stub.port}", plain]
    async with running_gateway(urls, options) as gateway, raw_client(gateway.port) as client:
        for _ in range(4):
            assert (await client.ask(post(PATH, BODY))).status == 200
    assert (stub.requests_seen, plain.requests_seen) == (2, 2)
