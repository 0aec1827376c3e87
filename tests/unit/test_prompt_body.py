import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.prompt.body import InvalidBody, RequestBody, parse_body

# Speed is measured elsewhere; a busy machine must not fail a property.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate", "/v1/embeddings")


def parse(document: dict[str, Any], path: str = CHAT) -> RequestBody:
    return parse_body(path, json.dumps(document).encode())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "not valid JSON"),
        (b'{"model": }', "line 1 column 11"),
        (b'{"a": 1} x', "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        (b'{"a": "\\ud800"}', "surrogate pair"),
        (b'{"a": "\\udc00 x"}', "surrogate pair"),
        (b"[" * 100_000, "depth"),
        (b'{"a":' * 2000 + b"1" + b"}" * 2000, "depth"),
        (b"[]", "an array"),
        (b"null", "null"),
        (b"7", "an integer"),
        (b"7.5", "a decimal"),
        (b'"text"', "a string"),
        (b"true", "a boolean"),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(InvalidBody, match=message) as refused:
        parse_body(CHAT, body)
    assert refused.value.param is None
    assert refused.value.code == "invalid_json"
    assert refused.value.message == str(refused.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", 7, "expected a string, but got an integer"),
        ("model", ["m"], "got an array"),
        ("stream", "true", "expected a boolean, but got a string"),
        ("stream", 1, "got an integer"),
        ("stream", {}, "got an object"),
    ],
)
def test_fields_the_gateway_acts_on_are_typed(field: str, value: object, message: str) -> None:
    with pytest.raises(InvalidBody, match=message) as refused:
        parse({field: value})
    assert refused.value.param == field
    assert refused.value.code == "invalid_type"
    assert refused.value.message.startswith(f"Invalid type for '{field}'")


def test_all_fields() -> None:
    body = parse(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "x" * 600}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 10,
            "max_completion_tokens": 20,
            "n": 3,
            "user": "u",
            "unknown": {"ignored": True},
        }
    )
    assert (body.model, body.stream, body.include_usage, body.max_tokens) == ("m", True, True, 20)
    assert (body.n, body.user) == (3, "u")
    assert body.prompt is not None
    assert len(body.prompt.hashes) == 2


def test_an_empty_object_has_neutral_values() -> None:
    body = parse({})
    assert body == RequestBody(None, False, False, None, 1, None, None)


def test_what_the_replica_validates_is_left_to_it() -> None:
    body = parse(
        {"model": "m", "messages": 7, "n": -1, "max_tokens": "many", "user": 5, "stream_options": [], "stream": None}
    )
    assert body == RequestBody("m", False, False, None, 1, None, None)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 0}, 0),
        ({"max_output_tokens": 6}, 6),
        ({"sampling_params": {"max_tokens": 4}}, 4),
        ({"sampling_params": 4}, None),
        ({"max_tokens": None, "max_completion_tokens": None}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": 1.5}, None),
    ],
)
def test_output_limit(document: dict[str, Any], expected: int | None) -> None:
    assert parse(document).max_tokens == expected


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": 1}, "yes"])
def test_usage_only_when_asked_for(options: object) -> None:
    assert not parse({"stream": True, "stream_options": options}).include_usage


def test_last_of_duplicate_keys_wins() -> None:
    assert parse_body(CHAT, b'{"model": "a", "model": "b"}').model == "b"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_will_do(kind: type[bytes | bytearray | memoryview]) -> None:
    assert parse_body(CHAT, kind(b'{"model": "m"}')).model == "m"
    with pytest.raises(InvalidBody, match="empty"):
        parse_body(CHAT, kind(b""))


def test_an_alias_shares_the_key_of_its_model() -> None:
    def hashes(model: str, names: dict[str, str] | None = None) -> list[int]:
        document = {"model": model, "messages": [{"role": "user", "content": "x" * 600}]}
        body = parse_body(CHAT, json.dumps(document).encode(), served_names=names)
        assert body.model == model
        assert body.prompt is not None
        return body.prompt.hashes

    assert hashes("alias", {"alias": "m"}) == hashes("m")
    assert hashes("alias") != hashes("m")


@pytest.mark.parametrize(
    ("fields", "computed_anew"),
    [
        ({}, False),
        ({"prompt_logprobs": None, "logprobs": 1}, False),
        ({"prompt_logprobs": 0}, True),
        ({"echo": True}, False),
        ({"echo": True, "logprobs": 0}, True),
        ({"echo": True, "top_logprobs": 2}, True),
        ({"echo": False, "logprobs": 1}, False),
    ],
)
def test_logprobs_of_the_prompt_are_computed_anew(fields: dict[str, Any], computed_anew: bool) -> None:
    key = parse({"model": "m", "prompt": "text", **fields}, "/v1/completions").prompt
    assert key is not None
    assert key.computed_anew is computed_anew


def test_a_salt_that_is_no_string_has_no_key() -> None:
    document: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "cache_salt": 7}
    assert parse(document).prompt is None


scalars = st.none() | st.booleans() | st.integers(-5, 5) | st.just(0.5) | st.sampled_from(["", "x", "user", "text"])
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
part_like = st.dictionaries(
    st.sampled_from(["type", "text", "role", "content", "name", "tool_calls", "image_url", "source", "uuid"]),
    st.sampled_from(["user", "text", "image_url", "tool_result", "message", "reasoning"]) | json_values,
    max_size=3,
)
message_like = st.fixed_dictionaries({"role": st.just("user"), "content": st.lists(part_like, max_size=2)})
prompt_like = json_values | st.lists(message_like | part_like, max_size=2)
FIELDS = ["messages", "prompt", "input", "token_ids", "system", "instructions", "tools", "features", "documents"]


@untimed
@given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(FIELDS), prompt_like, max_size=3))
def test_no_json_object_raises_anything(path: str, document: dict[str, Any]) -> None:
    body = parse(document, path)
    assert body.prompt is None or body.prompt.canonical_bytes > 0


@untimed
@given(st.binary(max_size=60))
def test_bytes_are_parsed_or_refused(body: bytes) -> None:
    outcome: RequestBody | InvalidBody
    try:
        outcome = parse_body(CHAT, body)
    except InvalidBody as refused:
        outcome = refused
    assert isinstance(outcome, RequestBody) or outcome.message
