"""Heads by worked examples. The sentence of the RFC stands above the check that follows from it."""

import pytest

from gateway.proxy import errors
from gateway.proxy.heads import (
    _IN_REQUESTS,
    Header,
    RequestHead,
    ResponseHead,
    _Kinds,
    replica_request_head,
)
from gateway.proxy.routes import Handling, Routes

HOST: Header = (b"Host", b"gateway.example")


def request(
    *headers: Header, method: bytes = b"POST", target: bytes = b"/v1/chat/completions", version_1_0: bool = False
) -> RequestHead:
    """A head as llhttp reports it, with a Host unless the test brings its own."""
    lines = headers if any(name.lower() == b"host" for name, _ in headers) or version_1_0 else (HOST, *headers)
    return RequestHead(method, target, lines, version_1_0, not version_1_0)


def lines(head: bytes) -> list[bytes]:
    return head.split(b"\r\n")


def test_a_request_as_the_openai_client_sends_it() -> None:
    head = request(
        (b"Accept", b"application/json"),
        (b"Authorization", b"Bearer sk-1"),
        (b"Content-Length", b"42"),
        (b"Content-Type", b"application/json"),
        (b"X-Stainless-Lang", b"python"),
        (b"x-request-id", b"abc"),
    )
    assert head.error is None
    assert (head.method, head.target, head.path) == (b"POST", b"/v1/chat/completions", b"/v1/chat/completions")
    assert (head.content_length, head.chunked, head.has_body) == (42, False, True)
    assert (head.authorization, head.request_id, head.content_type) == (b"Bearer sk-1", b"abc", b"application/json")
    sent = replica_request_head(head, b"10.0.0.1:8000", b"", b"authorization: Bearer replica\r\n", b"abc", 42)
    assert lines(sent) == [
        b"POST /v1/chat/completions HTTP/1.1",
        b"host: 10.0.0.1:8000",
        b"Accept: application/json",
        b"Content-Type: application/json",
        b"X-Stainless-Lang: python",
        b"authorization: Bearer replica",
        b"x-request-id: abc",
        b"content-length: 42",
        b"",
        b"",
    ]


def test_a_head_without_any_header_that_passes() -> None:
    sent = replica_request_head(request(), b"r", b"/base", b"", b"id", 0)
    assert sent == (
        b"POST /base/v1/chat/completions HTTP/1.1\r\nhost: r\r\nx-request-id: id\r\ncontent-length: 0\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("method", "headers", "body_bytes", "framing"),
    [
        (b"GET", (), 0, b""),
        (b"GET", ((b"Content-Length", b"3"),), 3, b"content-length: 3"),
        (b"POST", (), 0, b"content-length: 0"),
        (b"POST", ((b"Transfer-Encoding", b"chunked"),), 7, b"content-length: 7"),
        (b"POST", ((b"Transfer-Encoding", b"chunked"),), None, b"transfer-encoding: chunked"),
        # What was received is what counts, not what was declared: an alias may have been replaced in the body.
        (b"POST", ((b"Content-Length", b"10"),), 12, b"content-length: 12"),
    ],
)
def test_framing_is_made_anew(
    method: bytes, headers: tuple[Header, ...], body_bytes: int | None, framing: bytes
) -> None:
    sent = replica_request_head(request(*headers, method=method), b"r", b"", b"", b"id", body_bytes)
    framed = [line for line in lines(sent) if line.lower().startswith((b"content-length", b"transfer-encoding"))]
    assert framed == ([framing] if framing else [])


# RFC 9110 section 7.6.1: "Intermediaries MUST parse a received Connection header field before a message is forwarded
# and, for each connection-option in this field, remove any header or trailer field(s) from the message with the same
# name as the connection-option, and then remove the Connection header field itself".
def test_headers_named_by_connection_stay_behind() -> None:
    head = request(
        (b"X-Hop", b"1"),
        (b"connection", b"x-HOP ,\tX-Other"),
        (b"Connection", b"close"),
        (b"x-other", b"2"),
        (b"X-End-To-End", b"3"),
        (b"X-Hop-Not", b"4"),
    )
    assert head.passed == b"X-End-To-End: 3\r\nX-Hop-Not: 4\r\n"


# RFC 9110 section 7.6.1: "intermediaries SHOULD remove or replace field(s) that are known to require removal before
# forwarding, whether or not they appear as a connection-option".
@pytest.mark.parametrize(
    "name",
    [
        b"Connection",
        b"Keep-Alive",
        b"Proxy-Connection",
        b"Proxy-Authorization",
        b"Proxy-Authenticate",
        b"TE",
        b"Trailer",
        b"Transfer-Encoding",
        b"Upgrade",
        b"HTTP2-Settings",
        b"Expect",
        b"Host",
        b"Content-Length",
    ],
)
@pytest.mark.parametrize("spelled", [bytes.lower, bytes.upper, bytes.title, bytes.swapcase])
def test_hop_by_hop_headers_stay_behind(name: bytes, spelled: object) -> None:
    assert callable(spelled)
    value = {b"Content-Length": b"1", b"Transfer-Encoding": b"chunked"}.get(name, b"a")
    assert request((spelled(name), value), (b"X-A", b"b")).passed == b"X-A: b\r\n"


def test_client_credentials_never_pass_by_themselves() -> None:
    head = request((b"AUTHORIZATION", b"Bearer sk-client"), (b"X-Api-Key", b"sk-client"))
    assert head.passed == b""
    assert b"sk-client" not in replica_request_head(head, b"r", b"", b"", b"id", 0)


def test_other_headers_pass_byte_for_byte() -> None:
    head = request((b"X-ODD-case", b"a  b\t\xff\xe9"), (b"x-dup", b"1"), (b"X-Dup", b"2"), (b"X-Empty", b""))
    assert head.passed == b"X-ODD-case: a  b\t\xff\xe9\r\nx-dup: 1\r\nX-Dup: 2\r\nX-Empty: \r\n"


# RFC 9110 section 5.3: "a recipient MAY combine multiple field lines within a field section that have the same field
# name into one field line [...] by appending each subsequent field line value to the initial field line value in
# order, separated by a comma".
def test_repeated_special_headers_are_joined() -> None:
    head = request((b"authorization", b"Bearer a"), (b"Authorization", b"Bearer b"), (b"content-encoding", b"gzip"))
    assert head.authorization == b"Bearer a, Bearer b"
    assert head.content_encoding == b"gzip"


def test_header_lookup_by_lower_case_name() -> None:
    head = request((b"X-Session", b"a"), (b"x-session", b"b \t"))
    assert head.headers[b"x-session"] == b"b"
    assert head.headers.get(b"x-absent") is None
    assert set(head.headers) == {b"host", b"x-session"}
    assert len(head.headers) == 2


# -- request framing


# RFC 9112 section 6.1: "A server or client that receives an HTTP/1.0 message containing a Transfer-Encoding header
# field MUST treat the message as if the framing is faulty".
def test_transfer_encoding_in_http_1_0_is_refused() -> None:
    assert request((b"Transfer-Encoding", b"chunked"), version_1_0=True).error is errors.BAD_HTTP


# RFC 9112 section 6.1: "A server that receives a request message with a transfer coding it does not understand SHOULD
# respond with 501 (Not Implemented)." The header is not forwarded, so a coding below `chunked` would be lost.
@pytest.mark.parametrize("codings", [(b"gzip, chunked",), (b"identity", b"chunked"), (b"chunked", b"chunked")])
def test_transfer_codings_below_chunked_are_refused(codings: tuple[bytes, ...]) -> None:
    assert request(*((b"Transfer-Encoding", coding) for coding in codings)).error is errors.UNKNOWN_CODING


# RFC 9112 section 6.3: "If a Transfer-Encoding header field is present in a request and the chunked transfer coding is
# not the final encoding [...] the server MUST respond with the 400 (Bad Request) status code".
@pytest.mark.parametrize("codings", [(b"gzip",), (b"xchunked",), (b"chunked", b"gzip"), (b"chunked;q=1",), (b"",)])
def test_transfer_codings_that_leave_the_end_open_are_refused(codings: tuple[bytes, ...]) -> None:
    assert request(*((b"Transfer-Encoding", coding) for coding in codings)).error is errors.BAD_HTTP


@pytest.mark.parametrize("value", [b"chunked", b"Chunked", b"CHUNKED \t"])
def test_chunked_in_any_spelling(value: bytes) -> None:
    head = request((b"Transfer-Encoding", value))
    assert head.error is None
    assert head.chunked
    assert head.has_body


@pytest.mark.parametrize(
    ("value", "length"), [(b"0", 0), (b"5 \t ", 5), (b"0005", 5), (b"18446744073709551615", 2**64 - 1)]
)
def test_content_length(value: bytes, length: int) -> None:
    head = request((b"Content-Length", value))
    assert (head.error, head.content_length, head.has_body) == (None, length, length > 0)


# RFC 9112 section 6.3: "If a message is received without Transfer-Encoding and with an invalid Content-Length header
# field, then the message framing is invalid and the recipient MUST treat it as an unrecoverable error".
# llhttp refuses most of these before; thousands of zeros it lets pass, and int() would raise.
@pytest.mark.parametrize("value", [b"+5", b"-5", b"5, 5", b"1_0", b"0x5", b"", b"5 5", b"0" * 5000 + b"5"])
def test_content_length_that_is_no_number(value: bytes) -> None:
    assert request((b"Content-Length", value)).error is errors.BAD_HTTP


# RFC 9110 section 10.1.1: "The Expect field value is case-insensitive."
@pytest.mark.parametrize(("value", "expected"), [(b"100-continue", True), (b"100-Continue ", True), (b"200-ok", False)])
def test_expect(value: bytes, expected: bool) -> None:
    assert request((b"Expect", value)).expect_continue is expected


# -- target and host


# RFC 9112 section 3.2.2: "a server MUST accept the absolute-form in requests even though most HTTP/1.1 clients will
# only send the absolute-form to a proxy."
@pytest.mark.parametrize(
    ("url", "target", "path"),
    [
        (b"/v1/models?limit=1&x=/../", b"/v1/models?limit=1&x=/../", b"/v1/models"),
        (b"http://elsewhere/v1/models?a", b"/v1/models?a", b"/v1/models"),
        (b"HTTPS://elsewhere:8443", b"/", b"/"),
        (b"http://elsewhere?a=b", b"/?a=b", b"/"),
        (b"/v1/models/org%2Fname", b"/v1/models/org%2Fname", b"/v1/models/org/name"),
        (b"/v1/%6Dodels", b"/v1/%6Dodels", b"/v1/models"),
        (b"/v1/files/a..b/.c", b"/v1/files/a..b/.c", b"/v1/files/a..b/.c"),
        (b"/v1/\"<>\\^`{|}'", b"/v1/\"<>\\^`{|}'", b"/v1/\"<>\\^`{|}'"),
    ],
)
def test_targets(url: bytes, target: bytes, path: bytes) -> None:
    head = request(target=url)
    assert (head.error, head.target, head.path) == (None, target, path)


@pytest.mark.parametrize(
    "url",
    [
        b"",
        b"*",
        b"example.com:443",
        b"ftp://elsewhere/v1/models",
        b"http:///v1/models",
        b"http://user:secret@elsewhere/v1/models",
        b"/v1/models#fragment",
        b"/v1/a b",
        b"/v1/a\r\nX: y",
        b"/v1/\xc3\xa9",
        b"/v1/\x7f",
        b"/v1/../sleep",
        b"/v1/%2e%2e/sleep",
        b"/v1/x%2f..%2fsleep",
        b"/v1/x/..",
        b"/./v1/models",
    ],
)
def test_targets_that_are_refused(url: bytes) -> None:
    assert request(target=url).error is errors.BAD_TARGET


@pytest.mark.parametrize("value", [b"a", b"a:80", b"[::1]:8000", b"", b"a.example \t"])
def test_hosts(value: bytes) -> None:
    assert request((b"Host", value)).error is None


# RFC 9112 section 3.2: "A server MUST respond with a 400 (Bad Request) status code to any HTTP/1.1 request message that
# lacks a Host header field and to any request message that contains more than one Host header field line or a Host
# header field with an invalid field value."
@pytest.mark.parametrize(
    "headers",
    [
        (),
        (HOST, HOST),
        ((b"Host", b"a b"),),
        ((b"Host", b"a/b"),),
        ((b"Host", b"user@a"),),
        ((b"Host", b"\xe9"),),
    ],
)
def test_hosts_that_are_refused(headers: tuple[Header, ...]) -> None:
    assert RequestHead(b"GET", b"/v1/models", headers, False, True).error is errors.BAD_HOST


def test_http_1_0_needs_no_host_but_no_two_either() -> None:
    assert RequestHead(b"GET", b"/v1/models", (), True, False).error is None
    assert RequestHead(b"GET", b"/v1/models", (HOST, HOST), True, False).error is errors.BAD_HOST


# RFC 9110 section 9.1: "An origin server that receives a request method that is unrecognized or not implemented SHOULD
# respond with the 501 (Not Implemented) status code."
@pytest.mark.parametrize("method", [b"CONNECT", b"TRACE", b"PROPFIND", b"PURGE", b"DESCRIBE", b"SOURCE"])
def test_methods_that_are_not_for_replicas(method: bytes) -> None:
    assert request(method=method).error is errors.UNKNOWN_METHOD


@pytest.mark.parametrize("value", [b"a" * 129, b"a b", b"a\r\nx: y", b"\xc3\xa9", b"a;b", b'"', b"", b"a" * 4096])
def test_request_ids_that_are_replaced(value: bytes) -> None:
    assert not request((b"x-request-id", value)).valid_request_id()


@pytest.mark.parametrize("value", [b"req_1", b"a" * 128, b"urn:uuid:6e8bc430-9c3a-11d9", b"user@host/1+2=3 "])
def test_request_ids_that_are_kept(value: bytes) -> None:
    assert request((b"x-request-id", value)).valid_request_id()


def test_what_is_learned_of_spellings_is_bounded() -> None:
    kinds = _Kinds({b"host": 11})
    for i in range(5000):
        assert kinds.learn(b"x-%d" % i) == 0
    assert kinds.learn(b"HosT") == 11
    assert kinds.learn(b"x" * 70000) == 0
    assert len(kinds.passing) + len(kinds.special) <= 2048
    assert max(map(len, kinds.passing)) <= 64


def test_an_unknown_spelling_is_treated_alike_before_and_after_it_is_learned() -> None:
    name = b"CoNtEnT-LeNgTh"
    assert name not in _IN_REQUESTS.special
    first, second = request((name, b"7")), request((name, b"7"))
    assert name in _IN_REQUESTS.special
    assert (first.content_length, first.passed) == (second.content_length, second.passed) == (7, b"")


# -- routes


@pytest.mark.parametrize(
    ("method", "target", "headers", "handling"),
    [
        (b"GET", b"/health", (), Handling.LOCAL),
        (b"HEAD", b"/v1/models", (), Handling.LOCAL),
        (b"GET", b"/v1/models/org%2Fname", (), Handling.LOCAL),
        (b"GET", b"/v1/modelsx", (), Handling.PLAIN),
        (b"POST", b"/v1/chat/completions", ((b"Content-Length", b"2"),), Handling.JSON),
        (b"POST", b"/v1/chat/completions", (), Handling.JSON),
        (b"POST", b"/v1/completions", ((b"Transfer-Encoding", b"chunked"),), Handling.JSON),
        (
            b"POST",
            b"/v1/x",
            ((b"Content-Length", b"2"), (b"Content-Type", b"Application/JSON ; charset=utf-8")),
            Handling.JSON,
        ),
        (b"POST", b"/v1/x", ((b"Content-Length", b"2"), (b"Content-Type", b"application/x+json")), Handling.JSON),
        (
            b"POST",
            b"/v1/audio/transcriptions",
            ((b"Content-Length", b"2"), (b"Content-Type", b"multipart/form-data; boundary=x")),
            Handling.STREAM,
        ),
        (b"GET", b"/v1/responses/resp_1", (), Handling.PLAIN),
        (b"POST", b"/v1/responses/resp_1/cancel", ((b"Content-Type", b"text/plain"),), Handling.PLAIN),
        (b"POST", b"/tokenize", ((b"Content-Length", b"2"),), Handling.JSON),
        (b"POST", b"/sleep", (), Handling.NOT_FOUND),
        (b"GET", b"/metrics", (), Handling.NOT_FOUND),
        (b"GET", b"/", (), Handling.NOT_FOUND),
        (b"POST", b"//v1/chat/completions", (), Handling.NOT_FOUND),
        (b"POST", b"/v1/load_lora_adapter", (), Handling.NOT_FOUND),
        # Blocked paths stay blocked however they are written: uvicorn decodes them.
        (b"POST", b"/v1/load%5Flora_adapter", (), Handling.NOT_FOUND),
        (b"POST", b"/%76%31/unload_lora_adapter?x", (), Handling.NOT_FOUND),
    ],
)
def test_handling(method: bytes, target: bytes, headers: tuple[Header, ...], handling: Handling) -> None:
    head = request(*headers, method=method, target=target)
    assert head.error is None
    assert Routes().handling(head) is handling


def test_configured_paths() -> None:
    routes = Routes(("/custom", "/v1/load_lora_adapter"), ("/v1/embeddings",))
    assert routes.handling(request(target=b"/custom", method=b"GET")) is Handling.PLAIN
    assert routes.handling(request(target=b"/v1/load_lora_adapter")) is Handling.JSON
    assert routes.handling(request(target=b"/v1/embeddings")) is Handling.NOT_FOUND


# -- responses


def test_a_response_as_uvicorn_sends_it() -> None:
    head = ResponseHead(
        200,
        b"OK",
        [
            (b"date", b"Sun, 29 Nov 2026 14:13:25 GMT"),
            (b"server", b"uvicorn"),
            (b"content-length", b"276"),
            (b"content-type", b"application/json"),
            (b"x-request-id", b"theirs"),
        ],
    )
    assert head.passed == (
        b"date: Sun, 29 Nov 2026 14:13:25 GMT\r\nserver: uvicorn\r\ncontent-type: application/json\r\n"
    )
    assert (head.content_length, head.chunked, head.event_stream) == (276, False, False)


def test_response_headers_named_by_any_connection_line_stay_behind() -> None:
    head = ResponseHead(
        200, b"OK", [(b"Connection", b"x-a"), (b"X-A", b"1"), (b"X-B", b"2"), (b"connection", b"X-B, close")]
    )
    assert head.passed == b""


def test_a_replica_that_is_a_gateway_itself_does_not_answer_for_this_one() -> None:
    head = ResponseHead(200, b"OK", [(b"x-warmgate-replica", b"inner"), (b"X-Warmgate-Policy", b"p"), (b"x-w", b"1")])
    assert head.passed == b"x-w: 1\r\n"


@pytest.mark.parametrize("kind", [b"text/event-stream", b"Text/Event-Stream; charset=utf-8"])
def test_event_streams(kind: bytes) -> None:
    assert ResponseHead(200, b"OK", [(b"content-type", kind), (b"transfer-encoding", b"chunked")]).event_stream


# RFC 9112 section 6.3: "Any response to a HEAD request and any response with a 1xx (Informational), 204 (No Content),
# or 304 (Not Modified) status code is always terminated by the first empty line after the header fields".
@pytest.mark.parametrize(
    ("method", "status", "bodiless"),
    [(b"HEAD", 200, True), (b"GET", 204, True), (b"GET", 304, True), (b"GET", 103, True), (b"GET", 200, False)],
)
def test_answers_without_a_body(method: bytes, status: int, bodiless: bool) -> None:
    assert ResponseHead(status, b"", []).bodiless(method) is bodiless


@pytest.mark.parametrize(
    ("location", "passed"),
    [
        (b"http://10.0.0.7:8000/v1/models?x", b"/v1/models?x"),
        (b"HTTPS://10.0.0.7:8000/v1/models", b"/v1/models"),
        (b"/v1/models", b"/v1/models"),
        (b"https://login.example/?to=http://10.0.0.7:8000/", b"https://login.example/?to=http://10.0.0.7:8000/"),
        (b"http://10.0.0.7:80001/v1/models", b"http://10.0.0.7:80001/v1/models"),
    ],
)
def test_redirects_do_not_tell_the_address_of_a_replica(location: bytes, passed: bytes) -> None:
    head = ResponseHead(307, b"Temporary Redirect", [(b"location", location)], b"10.0.0.7:8000")
    assert head.passed == b"location: " + passed + b"\r\n"


def test_redirects_lose_the_base_path_of_a_replica() -> None:
    head = ResponseHead(307, b"", [(b"Location", b"http://lb.internal/team-a/v1/models")], b"lb.internal/team-a")
    assert head.passed == b"Location: /v1/models\r\n"
