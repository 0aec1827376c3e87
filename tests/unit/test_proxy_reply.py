"""What becomes of a replica's response on its way: kept back, passed on, whole or cut short."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exchanges import DONE, TOKEN, FakeClient

from gateway.proxy.answer import Answer
from gateway.proxy.errors import INTERNAL
from gateway.proxy.heads import RequestHead, ResponseHead
from gateway.proxy.observe import Usage
from gateway.proxy.outcome import Outcome
from gateway.proxy.reply import Reply
from gateway.replicas.breaker import Outcome as Verdict

JSON = (b"content-type", b"application/json")
SSE = (b"content-type", b"text/event-stream")
CHUNKED = (b"transfer-encoding", b"chunked")
GZIP = (b"content-encoding", b"gzip")
FAULT = b'data: {"error":{"message":"KV load failure","code":500}}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
LIMIT = 100


def length(size: int) -> tuple[bytes, bytes]:
    return b"content-length", b"%d" % size


def reply_of(
    *headers: tuple[bytes, bytes],
    status: int = 200,
    method: bytes = b"POST",
    fetches_kv: bool = False,
    usage_unasked: bool = False,
) -> tuple[Reply, FakeClient]:
    client = FakeClient()
    answer = Answer(client, RequestHead(method, b"/v1/x", [], False, True), b"id")
    head = ResponseHead(status, b"OK", list(headers))
    return Reply(head, method, answer, LIMIT, fetches_kv=fetches_kv, usage_unasked=usage_unasked), client


@pytest.mark.parametrize(
    ("headers", "kept_back"),
    [
        ((JSON, length(LIMIT)), True),
        ((JSON, length(LIMIT + 1)), False),
        ((JSON, CHUNKED), True),
        ((JSON,), True),
        (((b"content-type", b"audio/wav"), length(LIMIT)), True),
        (((b"content-type", b"audio/wav"), CHUNKED), False),
        ((SSE, CHUNKED), False),
    ],
)
def test_moderate_bodies_are_kept_back_and_streams_are_not(
    headers: tuple[tuple[bytes, bytes], ...], kept_back: bool
) -> None:
    reply, client = reply_of(*headers)
    assert reply.kept_back is kept_back
    assert client.sent == b""


def test_a_body_is_kept_up_to_the_limit_and_then_goes_out_as_one() -> None:
    reply, client = reply_of(JSON, CHUNKED)
    assert reply.keep(b"a" * LIMIT, LIMIT) == b""
    assert reply.keep(b"b", LIMIT) == b"a" * LIMIT + b"b"
    assert client.sent == b""


def test_a_whole_body_gets_a_length_and_tells_its_usage() -> None:
    reply, client = reply_of(JSON, CHUNKED)
    body = b'{"usage":{"prompt_tokens":3,"completion_tokens":2}}'
    reply.keep(body[:10], LIMIT)
    reply.keep(body[10:], LIMIT)
    assert not reply.cut_short()
    assert reply.send_whole(True, b"") == Usage(3, 2, None)
    assert client.answer().body == body
    assert client.answer().headers["content-length"] == str(len(body))


def test_an_error_that_looks_like_it_had_usage_has_none() -> None:
    reply, _ = reply_of(JSON, CHUNKED, status=400)
    reply.keep(b'{"usage":{"prompt_tokens":3,"completion_tokens":2}}', LIMIT)
    assert reply.send_whole(True, b"") is None


# -- a stream for which KV is fetched


@given(st.integers(1, len(FAULT) - 1))
def test_the_first_event_is_kept_until_it_is_whole(cut: int) -> None:
    reply, client = reply_of(SSE, CHUNKED, fetches_kv=True)
    assert reply.kept_back
    assert reply.keep(FAULT[:cut], LIMIT) == b""
    begun = reply.keep(FAULT[cut:] + TOKEN, LIMIT)
    assert begun == FAULT + TOKEN
    assert reply.begins_with_fault(begun)
    assert client.sent == b""


@pytest.mark.parametrize("first", [TOKEN, FAULT.replace(b"500", b"400"), TOKEN + FAULT])
def test_only_a_fault_of_the_server_in_the_first_event_counts(first: bytes) -> None:
    reply, _ = reply_of(SSE, CHUNKED, fetches_kv=True)
    assert not reply.begins_with_fault(reply.keep(first, LIMIT))


def test_a_json_body_never_begins_with_a_fault() -> None:
    reply, _ = reply_of(JSON, CHUNKED)
    assert not reply.begins_with_fault(reply.keep(FAULT + b"x" * LIMIT, LIMIT))


def test_a_first_event_without_end_is_not_kept_for_ever() -> None:
    reply, _ = reply_of(SSE, CHUNKED, fetches_kv=True)
    assert reply.keep(b"d" * 65535, LIMIT) == b""
    assert reply.keep(b"d", LIMIT) == b"d" * 65536


def test_a_compressed_stream_cannot_be_looked_into() -> None:
    reply, _ = reply_of(SSE, CHUNKED, GZIP, fetches_kv=True)
    assert not reply.kept_back


def test_what_is_still_kept_goes_out_behind_the_head() -> None:
    reply, client = reply_of(SSE, CHUNKED, fetches_kv=True)
    reply.keep(b"data: half", LIMIT)
    reply.begin(True, b"")
    assert not reply.kept_back
    reply.out.relay(b" and half\n\n")
    reply.end()
    answer = client.answer()
    assert answer.complete
    assert answer.body == b"data: half and half\n\n"


# -- usage that only the gateway has asked for


@pytest.mark.parametrize(
    ("headers", "removed"),
    [((SSE, CHUNKED), True), ((SSE,), True), ((SSE, length(500)), False), ((SSE, CHUNKED, GZIP), False)],
)
def test_unasked_usage_is_read_and_left_out_where_that_can_be_done(
    headers: tuple[tuple[bytes, bytes], ...], removed: bool
) -> None:
    reply, client = reply_of(*headers, usage_unasked=True)
    reply.begin(True, b"")
    observer = reply.observer
    assert observer is not None
    for event in (TOKEN, USAGE, DONE):
        reply.out.relay(event)
        observer.feed(event)
    assert reply.end() == Usage(3, 2, None)
    assert (USAGE in client.answer().body) is not removed


# -- its end


@pytest.mark.parametrize(
    ("headers", "body", "cut"),
    [
        ((JSON,), b'{"a":', True),
        ((JSON,), b'{"a":1}', False),
        ((JSON, CHUNKED), b'{"a":', False),
        ((JSON, length(9)), b'{"a":', False),
        ((JSON, GZIP), b"\x1f\x8b", False),
    ],
)
def test_a_kept_body_that_ends_with_its_connection_is_checked(
    headers: tuple[tuple[bytes, bytes], ...], body: bytes, cut: bool
) -> None:
    reply, _ = reply_of(*headers)
    reply.keep(body, LIMIT)
    assert reply.cut_short() is cut


@pytest.mark.parametrize(("events", "cut"), [(TOKEN, True), (TOKEN + DONE, False)])
def test_a_stream_that_ends_with_its_connection_must_have_had_its_last_event(events: bytes, cut: bool) -> None:
    reply, _ = reply_of(SSE)
    reply.begin(True, b"")
    assert reply.observer is not None
    reply.observer.feed(events)
    assert reply.cut_short() is cut


@pytest.mark.parametrize(
    ("status", "verdict", "outcome"),
    [
        (200, Verdict.OK, Outcome.OK),
        (404, Verdict.CLIENT_ERROR, Outcome.CLIENT_ERROR),
        (429, Verdict.BACKPRESSURE, Outcome.CLIENT_ERROR),
        (500, Verdict.SERVER_ERROR, Outcome.SERVER_ERROR),
        (501, Verdict.CLIENT_ERROR, Outcome.SERVER_ERROR),
    ],
)
def test_what_a_complete_response_says(status: int, verdict: Verdict, outcome: Outcome) -> None:
    reply, _ = reply_of(JSON, CHUNKED, status=status)
    assert reply.result() == (verdict, outcome)


@pytest.mark.parametrize(
    ("event", "verdict"), [(FAULT, Verdict.SERVER_ERROR), (b'data: {"error":{"code":400}}\n\n', Verdict.CLIENT_ERROR)]
)
def test_an_error_event_breaks_a_200(event: bytes, verdict: Verdict) -> None:
    reply, _ = reply_of(SSE, CHUNKED)
    reply.begin(True, b"")
    assert reply.observer is not None
    reply.observer.feed(event)
    assert reply.result() == (verdict, Outcome.BROKEN)


@pytest.mark.parametrize(
    ("headers", "told"), [((SSE, CHUNKED), True), ((SSE, length(500)), False), ((SSE, CHUNKED, GZIP), False)]
)
def test_a_break_is_told_in_the_stream_where_that_is_no_damage(
    headers: tuple[tuple[bytes, bytes], ...], told: bool
) -> None:
    reply, client = reply_of(*headers)
    reply.begin(True, b"")
    before = client.sent
    reply.break_off(INTERNAL)
    assert (client.sent != before) is told
