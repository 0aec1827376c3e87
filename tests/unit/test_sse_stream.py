"""What the benchmark client reads off a stream, for every way the network may cut it."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.sse_stream import ChatResult, StreamObserver, answer_text, carries_token


def event(**fields: object) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def delta(**fields: object) -> bytes:
    return event(choices=[{"index": 0, "delta": fields}])


ROLE = delta(role="assistant", content="")
DONE = b"data: [DONE]\n\n"
USAGE = event(
    choices=[],
    usage={"prompt_tokens": 90, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}},
)
STREAM = [ROLE, delta(content="one"), delta(content=" two"), delta(content=" three"), USAGE, DONE]


def observe(pieces: list[bytes]) -> ChatResult:
    """Feed pieces at 1 s, 2 s, ..."""
    result = ChatResult(sent_s=0.0)
    observer = StreamObserver(result)
    for moment, piece in enumerate(pieces, start=1):
        observer.feed(piece, float(moment))
    observer.finish()
    return result


def test_a_whole_stream() -> None:
    result = observe(STREAM)
    assert result.error is None
    assert result.ttft_s == 2.0  # the role chunk at 1 s is no token
    assert list(result.chunk_times_s) == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert (result.prompt_tokens, result.completion_tokens, result.cached_tokens) == (90, 3, 64)


@given(st.data())
def test_the_cuts_of_the_network_do_not_matter(data: st.DataObject) -> None:
    whole = b"".join(STREAM)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=12)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    result = observe(pieces)
    assert result.error is None
    assert (result.prompt_tokens, result.completion_tokens, result.cached_tokens) == (90, 3, 64)
    first_token_end = len(ROLE) + len(STREAM[1]) - 1  # the event's line is whole with its first newline
    expected = 1 + sum(cut < first_token_end for cut in cuts)
    assert result.ttft_s == float(expected)


def test_carriage_returns() -> None:
    assert observe([piece.replace(b"\n", b"\r\n") for piece in STREAM]).error is None


@pytest.mark.parametrize(
    "fields",
    [{"content": "x"}, {"reasoning": "x"}, {"reasoning_content": "x"}, {"tool_calls": [{"index": 0}]}],
)
def test_what_counts_as_a_token(fields: dict[str, object]) -> None:
    assert carries_token({"choices": [{"delta": fields}]})


@pytest.mark.parametrize(
    "chunk",
    [
        {},
        {"choices": None},
        {"choices": []},
        {"choices": [{"delta": None}]},
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"text": ""}]},
    ],
)
def test_what_does_not(chunk: dict[str, object]) -> None:
    assert not carries_token(chunk)


def test_text_completions_have_tokens_too() -> None:
    assert carries_token({"choices": [{"text": " se"}]})


def test_comments_and_broken_events_are_passed_over() -> None:
    result = observe([b": ping\n\n", b"data: {broken\n\n", b"data: 7\n\n", *STREAM])
    assert (result.error, result.ttft_s) == (None, 5.0)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        (STREAM[:-1], "truncated"),
        ([], "truncated"),
        ([ROLE, USAGE, DONE], "no_content"),
        ([ROLE, delta(content="x"), DONE], "no_usage"),
    ],
)
def test_streams_that_end_badly(pieces: list[bytes], error: str) -> None:
    assert observe(pieces).error == error


def test_an_error_event_is_named() -> None:
    result = observe([*STREAM[:3], event(error={"message": "replica left", "type": "server_error"})])
    assert (result.error, result.detail) == ("error_event", "replica left")


def test_usage_without_details_has_no_cached_tokens() -> None:
    usage = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": None})
    result = observe([ROLE, delta(content="x"), usage, DONE])
    assert (result.error, result.prompt_tokens, result.cached_tokens) == (None, 9, 0)


def test_usage_is_found_behind_a_long_stream() -> None:
    result = observe([b"".join([ROLE, *[delta(content="word " * 40)] * 500, USAGE, DONE])])
    assert (result.error, result.completion_tokens) == (None, 3)


def test_time_per_output_token() -> None:
    result = observe([ROLE, delta(content="a"), delta(content="b"), delta(content="c") + USAGE + DONE])
    assert result.tpot_s == (4.0 - 2.0) / 2
    assert observe([ROLE, delta(content="a") + event(usage={"completion_tokens": 1}) + DONE]).tpot_s is None


def test_the_answer() -> None:
    assert answer_text(b"".join(STREAM)) == "one two three"
    assert answer_text(b"") == ""
