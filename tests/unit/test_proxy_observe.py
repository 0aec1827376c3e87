"""What is learned from a passing stream. The `.sse` files are bodies that vLLM 0.32 sent, chunk framing taken off."""

from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.proxy.observe import StreamObserver, Usage, has_token, parse_usage, usage_in

DATA = Path(__file__).parent / "data"
CHAT = (DATA / "stream_chat.sse").read_bytes()
CHAT_USAGE_PER_CHUNK = (DATA / "stream_chat_usage_per_chunk.sse").read_bytes()
CHAT_TOKEN_IDS = (DATA / "stream_chat_token_ids.sse").read_bytes()
COMPLETIONS = (DATA / "stream_completions.sse").read_bytes()
STREAMS = [CHAT, CHAT_USAGE_PER_CHUNK, CHAT_TOKEN_IDS, COMPLETIONS]

ANTHROPIC = b"".join(
    b"event: %b\ndata: %b\n\n" % (orjson.loads(payload)["type"].encode(), payload)
    for payload in (
        b'{"type":"message_start","message":{"id":"m","role":"assistant","content":[],'
        b'"usage":{"input_tokens":16,"output_tokens":0,"cache_read_input_tokens":8}}}',
        b'{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}',
        b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hi"}}',
        b'{"type":"content_block_stop","index":0}',
        b'{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":4}}',
        b'{"type":"message_stop"}',
    )
)
RESPONSES = b"".join(
    b"event: %b\ndata: %b\n\n" % (orjson.loads(payload)["type"].encode(), payload)
    for payload in (
        b'{"type":"response.created","response":{"id":"r","status":"in_progress","error":null,"usage":null}}',
        b'{"type":"response.output_item.added","item":{"type":"message","content":[]}}',
        b'{"type":"response.output_text.delta","delta":"Hi"}',
        b'{"type":"response.output_text.done","text":"Hi"}',
        b'{"type":"response.completed","response":{"id":"r","error":null,"usage":{"input_tokens":16,'
        b'"input_tokens_details":{"cached_tokens":3,"input_tokens_per_turn":[]},"output_tokens":4,'
        b'"output_tokens_details":{"reasoning_tokens":0},"total_tokens":20},"user":null}}',
    )
)


def chunk(**delta: object) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": delta}]}) + b"\n\n"


ROLE = chunk(role="assistant", content="")
DONE = b"data: [DONE]\n\n"


def first_token_at(pieces: list[bytes]) -> int | None:
    """Index of the piece with which the observer sees the first token; it must say so only once."""
    observer = StreamObserver()
    seen = [i for i, piece in enumerate(pieces) if observer.feed(piece)]
    assert len(seen) <= 1
    assert observer.first_token_seen is bool(seen)
    return seen[0] if seen else None


def events(stream: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in stream.split(b"\n\n")[:-1]]


# -- the first token


@pytest.mark.parametrize(
    ("stream", "event"),
    [
        (CHAT, 1),
        (CHAT_USAGE_PER_CHUNK, 1),
        (CHAT_TOKEN_IDS, 1),
        (COMPLETIONS, 0),
        (ANTHROPIC, 2),
        (RESPONSES, 2),
    ],
)
def test_first_token_of_whole_streams(stream: bytes, event: int) -> None:
    assert first_token_at(events(stream)) == event


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "a"},
        {"content": " "},
        {"role": "assistant", "content": "a"},
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"refusal": "no"},
    ],
)
def test_what_is_a_token(delta: dict[str, object]) -> None:
    assert first_token_at([ROLE, chunk(**delta), DONE]) == 1


@pytest.mark.parametrize(
    "event",
    [
        ROLE,
        chunk(content=None, tool_calls=[]),
        b'data: {"choices":[]}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":0}}\n\n',
        b'data: {"choices":null}\n\n',
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"","token_ids":null}]}\n\n',
        b'data: {"choices":["x",7,null]}\n\n',
        b"data: [1]\n\n",
        b"data: nonsense {\n\n",
        b": comment with content\n\n",
        b'id: 1\nretry: 10\nevent: x\nfoo: {"choices":[{"delta":{"content":"a"}}]}\n\n',
        b'event: ping\ndata: {"type":"ping"}\n\n',
        DONE,
    ],
)
def test_what_is_no_token(event: bytes) -> None:
    assert first_token_at([event, event, chunk(content="a")]) == 2


def test_a_token_without_text_has_an_id() -> None:
    # The first bytes of a character: content is empty, but return_token_ids shows that a token has been generated.
    event = b'data: {"choices":[{"index":0,"delta":{"content":""},"token_ids":[190]}]}\n\n'
    assert first_token_at([ROLE, event]) == 1


def test_any_choice_may_have_the_first_token() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":""}},{"index":1,"delta":{"content":"b"}}]}\n\n'
    assert first_token_at([ROLE, event]) == 1


def test_tool_use_is_the_first_token_of_an_anthropic_stream_without_text() -> None:
    start = b'data: {"type":"content_block_start","index":0,"content_block":{"type":"tool_use","name":"f"}}\n\n'
    assert first_token_at([b'data: {"type":"message_start"}\n\n', start]) == 1


@pytest.mark.parametrize(
    "separators", [(b"\n", b"\r\n"), (b"data: ", b"data:"), (b"\n\n", b"\n\n\n\n"), (b"data: ", b": ping\n\ndata: ")]
)
def test_line_ends_spacing_and_comments_do_not_matter(separators: tuple[bytes, bytes]) -> None:
    assert first_token_at([event.replace(*separators) for event in events(CHAT)]) == 1


@pytest.mark.parametrize("stream", [*STREAMS, ANTHROPIC, RESPONSES, CHAT.replace(b"\n", b"\r\n")])
def test_a_cut_at_any_byte_changes_nothing_but_the_piece(stream: bytes) -> None:
    whole = StreamObserver()
    whole.feed(stream)
    # The first token has passed when the line that holds it is complete.
    boundary = next(
        n for n in range(1, len(stream)) if stream[n - 1 : n] == b"\n" and StreamObserver().feed(stream[:n])
    )
    for cut in range(1, len(stream)):
        observer = StreamObserver()
        assert observer.feed(stream[:cut]) is (cut >= boundary)
        assert observer.feed(stream[cut:]) is (cut < boundary)
        assert usage_in(observer.tail()) == usage_in(whole.tail()) == usage_in(stream)
        assert observer.ended_properly()
        assert observer.at_event_boundary()


@settings(max_examples=50)
@given(st.data())
def test_however_a_stream_is_cut(data: st.DataObject) -> None:
    stream = data.draw(st.sampled_from([*STREAMS, RESPONSES]))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=60)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert first_token_at(pieces) is not None
    observer = StreamObserver()
    for piece in pieces:
        observer.feed(piece)
    assert observer.ended_properly()
    assert not observer.failed


def test_a_stream_that_comes_byte_by_byte() -> None:
    observer = StreamObserver()
    assert sum(observer.feed(bytes([byte])) for byte in CHAT_TOKEN_IDS) == 1
    assert usage_in(observer.tail()) == Usage(16, 4, 0)
    assert observer.ended_properly()


def test_a_character_cut_in_the_middle() -> None:
    event = "data: {}\n\n".format('{"choices":[{"delta":{"content":"\N{GRINNING FACE}"}}]}').encode()
    middle = event.index("\N{GRINNING FACE}".encode()) + 2
    assert first_token_at([ROLE, event[:middle], event[middle:]]) == 2


def test_a_line_of_700_kb() -> None:
    event = chunk(content="x" * 700_000)
    pieces = [event[i : i + 65536] for i in range(0, len(event), 65536)]
    assert first_token_at([ROLE, *pieces]) == len(pieces)


def test_a_line_without_end_is_not_kept() -> None:
    observer = StreamObserver()
    pieces = [b"data: " + b"x" * 65536] * 20
    assert sum(observer.feed(piece) for piece in pieces) == 1
    assert observer._pending == b""
    assert len(observer.tail()) <= 8 * 8192


# -- how it ends


def test_an_error_event_before_the_first_token() -> None:
    observer = StreamObserver()
    observer.feed(ROLE)
    assert not observer.failed
    assert not observer.feed(b'data: {"error":{"message":"engine dead","code":500}}\n\n' + DONE)
    assert observer.failed


@pytest.mark.parametrize(
    "error",
    [
        b'data: {"error":{"message":"engine dead","code":500}}\n\n' + DONE,
        b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"dead"}}\n\n',
        b'event: response.failed\ndata: {"type":"response.failed","response":{}}\n\n',
    ],
)
def test_an_error_event_in_the_middle_of_a_stream(error: bytes) -> None:
    observer = StreamObserver()
    for piece in (ROLE, chunk(content="a"), chunk(content="b"), error):
        observer.feed(piece)
    assert observer.failed


def test_text_about_errors_is_no_error() -> None:
    observer = StreamObserver()
    for text in ("hello", 'data: {"error": 1}', "\nevent: error", '"type":"error"', '"type":"response.failed"'):
        observer.feed(chunk(content=text))
    observer.feed(DONE)
    assert not observer.failed


@pytest.mark.parametrize("text", ["[DONE]", "\ndata: [DONE]\n\n", '{"type":"message_stop"}', "\nevent: message_stop\n"])
def test_text_about_an_ending_is_no_ending(text: str) -> None:
    observer = StreamObserver()
    observer.feed(chunk(content="a"))
    observer.feed(chunk(content=text))
    assert not observer.ended_properly()


@pytest.mark.parametrize(
    "ending",
    [
        DONE,
        b"data:[DONE]\n\n",
        b"data: [DONE]",
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
        b'data: {"type":"message_stop"}\n\n',
        b'event: response.incomplete\ndata: {"type":"response.incomplete"}\n\n',
        b'event: response.completed\ndata: {"type":"response.completed","x":"' + b"x" * 20000 + b'"}\n\n',
        b'event: response.completed\ndata: {"x":"' + b"x" * 20000 + b'","type":"response.completed"}\n\n',
    ],
)
def test_proper_endings(ending: bytes) -> None:
    observer = StreamObserver()
    observer.feed(chunk(content="a"))
    assert not observer.ended_properly()
    observer.feed(ending)
    assert observer.ended_properly()


@pytest.mark.parametrize(
    ("tail", "boundary"),
    [(b"", True), (b"data: 1\n\n", True), (b"data: 1\r\n\r\n", True), (b"data: 1\n", False), (b"data: 1", False)],
)
def test_event_boundaries(tail: bytes, boundary: bool) -> None:
    observer = StreamObserver()
    observer.feed(tail)
    assert observer.at_event_boundary() is boundary


# -- usage


def test_usage_at_the_end_of_streams() -> None:
    assert usage_in(CHAT) is None
    assert usage_in(CHAT_USAGE_PER_CHUNK) == Usage(16, 6, 0)
    assert usage_in(COMPLETIONS) == Usage(9, 4, 0)
    assert usage_in(RESPONSES) == Usage(16, 4, 3)


def test_usage_of_an_anthropic_stream_is_in_two_events() -> None:
    assert usage_in(ANTHROPIC) == Usage(24, 4, 8)


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (
            b'{"choices":[],"usage":{"prompt_tokens":16,"total_tokens":22,"completion_tokens":6,"prompt_tokens_details":'
            b'{"cached_tokens":4,"created_cache_tokens":0,"multimodal_tokens":null},"completion_tokens_details":null},'
            b'"prompt_logprobs":null}',
            Usage(16, 6, 4),
        ),
        (b'{"data":[],"usage":{"prompt_tokens":7,"total_tokens":7}}', Usage(7, 0, None)),
        (b'{"usage" :{"prompt_tokens":7}}', None),
        (b'{"usage":  {"input_tokens":5,"output_tokens":2,"cache_read_input_tokens":1}}', Usage(6, 2, 1)),
        (
            b'{"usage":{"input_tokens":16,"input_tokens_details":{"cached_tokens":8},"output_tokens":2}}',
            Usage(16, 2, 8),
        ),
        (b'{"usage":{"prompt_tokens":1,"completion_tokens":1},"x":{"usage":null}}', Usage(1, 1, None)),
        (b'{"usage":{"prompt_tokens":1', None),
        (b'{"usage":{"prompt_tokens":"1"}}', None),
        (b'{"usage":{"prompt_tokens":true}}', None),
        (b'{"usage":{"prompt_tokens":-1}}', None),
        (b'{"usage":[]}', None),
        (b"", None),
    ],
)
def test_usage_in_bodies(body: bytes, usage: Usage | None) -> None:
    assert usage_in(body) == usage


def test_text_about_usage_is_no_usage() -> None:
    body = orjson.dumps({"choices": [{"message": {"content": '{"usage":{"prompt_tokens":9,"completion_tokens":9}}'}}]})
    assert usage_in(body) is None


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), st.lists, max_leaves=4))
def test_usage_and_events_of_any_shape_raise_nothing(value: object) -> None:
    for shape in (value, {"usage": value}, {"choices": value}, {"choices": [{"delta": value}]}, {"type": value}):
        has_token(shape)
        parse_usage(shape)
    parse_usage({"prompt_tokens": value, "completion_tokens": value, "prompt_tokens_details": value})


def test_how_little_is_kept_after_the_first_token() -> None:
    observer = StreamObserver()
    for _ in range(1000):
        observer.feed(chunk(content="a" * 20_000))
    assert len(observer.tail()) <= 8 * 8192
