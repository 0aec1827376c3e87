"""The usage event that nobody asked for is taken out of a stream, wherever its bytes are cut."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exchanges import DONE, SSE_HEAD, TOKEN, Bench, FakeClient, chunk

from gateway.prompt.rewrite import with_usage
from gateway.proxy.answer import Answer
from gateway.proxy.heads import RequestHead
from gateway.proxy.usage_filter import UsageFilter

ROLE = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TRICK = b'data: {"choices":[{"index":0,"delta":{"content":"\\"choices\\":[],\\"usage\\":{\\n\\n"}}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}],"usage":null}\n\n'
USAGE = (
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":16,"completion_tokens":6,'
    b'"prompt_tokens_details":{"cached_tokens":0}},"system_fingerprint":"v"}\n\n'
)
SPACED = b'data: {"choices": [ ], "usage": {"prompt_tokens": 16, "completion_tokens": 6}}\n\n'
PING = b": ping\n\n"
STREAM = ROLE + TOKEN + TRICK + PING + FINISH + USAGE + DONE
EXPECTED = ROLE + TOKEN + TRICK + PING + FINISH + DONE


class Pieces:
    """A client's connection that keeps what it is sent, piece by piece."""

    peer = ""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        assert data
        self.pieces.append(data)

    def finished(self, keep_alive: bool) -> None:
        raise AssertionError

    def abort(self, *, reset: bool) -> None:
        raise AssertionError

    def pause(self) -> None:
        raise AssertionError

    def resume(self) -> None:
        raise AssertionError


def filtered(*reads: bytes) -> list[bytes]:
    """What each read becomes, and after them what was held."""
    client = Pieces()
    stream = UsageFilter(Answer(client, RequestHead(b"POST", b"/", [], False, True), b"id"))
    passed = []
    for read in reads:
        stream.relay(read)
        passed.append(b"".join(client.pieces))
        client.pieces.clear()
    stream.flush()
    passed.append(b"".join(client.pieces))
    return passed


@pytest.mark.parametrize("usage", [USAGE, SPACED, USAGE.replace(b"data: ", b"data:")])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_cut_at_every_byte(usage: bytes, line_end: bytes) -> None:
    stream, expected = (text.replace(b"\n", line_end) for text in (STREAM.replace(USAGE, usage), EXPECTED))
    for cut in range(1, len(stream)):
        assert b"".join(filtered(stream[:cut], stream[cut:])) == expected, cut
    assert b"".join(filtered(*(stream[at : at + 1] for at in range(len(stream))))) == expected


@given(st.lists(st.integers(0, len(STREAM)), max_size=12).map(sorted))
def test_cut_anywhere_any_number_of_times(cuts: list[int]) -> None:
    reads = [STREAM[a:b] for a, b in zip([0, *cuts], [*cuts, len(STREAM)], strict=True) if b > a]
    assert b"".join(filtered(*reads)) == EXPECTED


@given(st.lists(st.binary(min_size=1, max_size=20) | st.sampled_from([TOKEN, b"\n", b"\r\n", b"data:"]), max_size=8))
def test_a_stream_without_the_event_loses_and_gains_nothing(reads: list[bytes]) -> None:
    assert b"".join(filtered(*reads)) == b"".join(reads)


def test_whole_events_pass_in_the_read_they_came_in() -> None:
    reads = [ROLE, TOKEN + TOKEN, TRICK, FINISH, USAGE, DONE]
    assert filtered(*reads) == [ROLE, TOKEN + TOKEN, TRICK, FINISH, b"", DONE, b""]


def test_a_cut_event_passes_as_soon_as_it_shows_that_it_has_a_choice() -> None:
    at = TOKEN.index(b"{", 10) + 1
    assert filtered(TOKEN[: at - 1], TOKEN[at - 1 : at], TOKEN[at:]) == [b"", TOKEN[:at], TOKEN[at:], b""]


def test_what_is_not_that_event_is_not_held() -> None:
    for part in (b": pi", b"event: x", b"data: [DO", b"id: 1\ndata: {", b"\n"):
        assert filtered(part) == [part, b""]
    long = b'data: {"x":"' + b"a" * 20_000
    assert filtered(long, b'"}\n\n' + USAGE) == [long, b'"}\n\n', b""]


def test_an_event_without_choices_that_is_not_usage_stays() -> None:
    other = b'data: {"choices":[],"prompt_filter_results":[]}\n\n'
    null = b'data: {"choices":[],"usage":null}\n\n'
    damaged = b'data: {"choices":[],"usage":{\n\n'
    assert b"".join(filtered(other + null + damaged + USAGE)) == other + null + damaged


def test_what_is_held_at_the_end_goes_out() -> None:
    assert filtered(TOKEN + USAGE[:-1]) == [TOKEN, USAGE[:-1]]


# -- the request's side

ADDED = b',"stream_options":{"include_usage":true}}'
BODIES = [
    (b'{"stream":true}', b'{"stream":true,"stream_options":{"include_usage":true}}'),
    (b' { "stream" : true\n} \n', b' { "stream" : true\n,"stream_options":{"include_usage":true}} \n'),
    (b'{"stream":true,"stream_options":null}', b'{"stream":true,"stream_options":{"include_usage":true}}'),
    (b'{"stream_options" : {} ,"n":1e0}', b'{"stream_options" : {"include_usage":true} ,"n":1e0}'),
    (b'{"stream_options":{"include_usage":false},"n":1}', b'{"stream_options":{"include_usage":true},"n":1}'),
    (
        b'{"p":"\\"stream_options\\":null"}',
        b'{"p":"\\"stream_options\\":null","stream_options":{"include_usage":true}}',
    ),
    (b'{"a":{"stream_options":null}}', b'{"a":{"stream_options":null},"stream_options":{"include_usage":true}}'),
    (b'{"stream_options":{"continuous_usage_stats":true}}', None),
    (b'{"stream_options":{"include_usage":false,"x":1}}', None),
    (b'{"stream\\u005foptions":{"x":1}}', None),
]


@pytest.mark.parametrize(("body", "expected"), BODIES)
def test_usage_is_asked_for_by_a_splice(body: bytes, expected: bytes | None) -> None:
    assert with_usage(body) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5) | st.just("stream_options"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("stream_options"), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3) | st.just("stream_options"), JSON, min_size=1), st.booleans())
def test_only_stream_options_change(document: dict[str, object], spaced: bool) -> None:
    body = json.dumps(document, indent=1 if spaced else None).encode()
    asking = with_usage(body)
    if asking is None:
        assert document["stream_options"] not in (None, {}, {"include_usage": False}, {"include_usage": None})
    else:
        assert orjson.loads(asking) == {**document, "stream_options": {"include_usage": True}}


# -- an exchange


def ask(bench: Bench, options: dict[str, object] | None = None, **fields: object) -> FakeClient:
    content = {"model": "m", "messages": [{"role": "user", "content": "Hello " * 100}], "stream": True, **fields}
    if options is not None:
        content["stream_options"] = options
    body = json.dumps(content).encode()
    exchange, client = bench.start((("content-type", "application/json"), ("content-length", str(len(body)))))
    exchange.request_body(body)
    exchange.request_end()
    return client


def test_usage_is_learned_and_the_client_sees_nothing_of_it() -> None:
    bench = Bench()
    bench.plane.asks_usage = True
    client = ask(bench)
    peer = bench.connect()
    _, _, body = peer.received.partition(b"\r\n\r\n")
    assert orjson.loads(body)["stream_options"] == {"include_usage": True}
    assert f"content-length: {len(body)}".encode() in peer.received.lower()
    peer.send(SSE_HEAD + chunk(TOKEN) + chunk(USAGE[:50]) + chunk(USAGE[50:] + DONE) + chunk(b""))
    answer = client.answer()
    assert (answer.complete, answer.body) == (True, TOKEN + DONE)
    usage = bench.exchanges[0].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (16, 6, 0)


def test_a_client_that_asks_gets_its_usage() -> None:
    bench = Bench()
    bench.plane.asks_usage = True
    client = ask(bench, {"include_usage": True})
    bench.connect().send(SSE_HEAD + chunk(TOKEN + USAGE + DONE) + chunk(b""))
    assert client.answer().body == TOKEN + USAGE + DONE


def test_off_by_default() -> None:
    bench = Bench()
    client = ask(bench)
    peer = bench.connect()
    assert b"stream_options" not in peer.received
    peer.send(SSE_HEAD + chunk(TOKEN + USAGE + DONE) + chunk(b""))
    assert client.answer().body == TOKEN + USAGE + DONE


def test_answers_that_are_no_streams_are_not_asked() -> None:
    bench = Bench()
    bench.plane.asks_usage = True
    ask(bench, stream=False)
    assert b"stream_options" not in bench.connect().received


def test_a_stream_that_breaks_loses_nothing_that_was_held() -> None:
    bench = Bench(replicas=1)
    bench.plane.asks_usage = True
    client = ask(bench)
    peer = bench.connect()
    peer.send(SSE_HEAD + chunk(TOKEN + USAGE[:40]))
    peer.lose(ConnectionResetError())
    body = client.answer().body
    assert body.startswith(TOKEN + USAGE[:40] + b"\n\n")
    assert b'"error"' in body


def test_a_length_that_was_promised_is_kept() -> None:
    bench = Bench()
    bench.plane.asks_usage = True
    client = ask(bench)
    stream = TOKEN + USAGE + DONE
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(stream)
    bench.connect().send(head + stream)
    answer = client.answer()
    assert (answer.complete, answer.body) == (True, stream)
