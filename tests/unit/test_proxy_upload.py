"""A body that streams through: framing, back-pressure, and when it can no longer be sent again."""

import pytest
from support.exchanges import Bench, FakeClient, FakeTransport, chunk

from gateway.proxy.heads import RequestHead
from gateway.proxy.upload import Upload
from gateway.proxy.upstream import ReplicaConnection


def connection_to_write() -> tuple[ReplicaConnection, FakeTransport]:
    connection, transport = ReplicaConnection(Bench().pool()), FakeTransport()
    connection.connection_made(transport)
    return connection, transport


def upload_of(*headers: tuple[bytes, bytes], pending: tuple[bytes, ...] = ()) -> tuple[Upload, FakeClient]:
    client = FakeClient()
    return Upload(client, RequestHead(b"POST", b"/v1/x", list(headers), False, True), list(pending)), client


CHUNKED = (b"transfer-encoding", b"chunked")


@pytest.mark.parametrize(
    ("headers", "length", "sent"),
    [
        ((CHUNKED,), None, chunk(b"ab") + chunk(b"c") + chunk(b"")),
        (((b"content-length", b"3"),), 3, b"abc"),
        ((), 0, b"abc"),
    ],
)
def test_it_goes_in_chunks_only_where_no_length_is_known(
    headers: tuple[tuple[bytes, bytes], ...], length: int | None, sent: bytes
) -> None:
    upload, _ = upload_of(*headers)
    assert upload.length == length
    connection, transport = connection_to_write()
    upload.pass_on(b"ab", connection)
    upload.pass_on(b"c", connection)
    upload.end(connection)
    assert transport.sent == sent


def test_what_comes_before_the_connection_waits_and_stops_the_client() -> None:
    upload, client = upload_of(CHUNKED, pending=(b"before",))
    assert not client.paused
    upload.pass_on(b"one", None)
    assert client.paused
    assert upload.blocked
    assert not upload.started, "it can still be sent elsewhere"
    upload.let_go_on()
    assert not client.paused
    connection, transport = connection_to_write()
    upload.pass_on_pending(connection)
    assert transport.sent == chunk(b"before") + chunk(b"one")
    assert upload.started
    upload.pass_on_pending(connection)
    assert transport.sent == chunk(b"before") + chunk(b"one"), "nothing is sent twice"


def test_an_end_before_the_connection_is_not_written_anywhere() -> None:
    upload, _ = upload_of(CHUNKED)
    upload.end(None)
    assert not upload.started


def test_holding_twice_is_let_go_once() -> None:
    upload, client = upload_of(CHUNKED)
    upload.hold()
    upload.hold()
    upload.let_go_on()
    assert not client.paused
    assert not upload.blocked
