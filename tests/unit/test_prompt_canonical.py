import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.prompt.blocks import BlockSchedule, PromptKey
from gateway.prompt.body import parse_body
from gateway.prompt.canonical import canonical_prompt

# Speed is measured elsewhere; a busy machine must not fail a property.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, GENERATE = "/v1/messages", "/inference/v1/generate"

SMALL = BlockSchedule(block_bytes=8, growth=4, max_block_bytes=64)

Json = dict[str, Any]


def key(document: Json, path: str = CHAT) -> PromptKey:
    prompt = parse_body(path, json.dumps(document).encode(), SMALL).prompt
    assert prompt is not None
    return prompt


def data(document: Json, path: str = CHAT) -> bytes:
    canonical = canonical_prompt(path, document)
    assert canonical is not None
    return canonical[0]


def chat(*messages: Json, **fields: object) -> Json:
    return {"model": "m", "messages": list(messages), **fields}


def say(role: str, content: object, **fields: object) -> Json:
    return {"role": role, "content": content, **fields}


def assert_shared(first: PromptKey, second: PromptKey, at_least: int, at_most: int) -> None:
    """The hashes two prompts share are a common beginning that covers so many bytes, to a block."""
    same = 0
    while same < min(len(first.hashes), len(second.hashes)) and first.hashes[same] == second.hashes[same]:
        same += 1
    assert not set(first.hashes[same:]) & set(second.hashes[same:])
    assert SMALL.covered_bytes(same) <= at_most
    assert SMALL.covered_bytes(same + 1) > at_least


def assert_continues(turns: Sequence[Json], bodies: Callable[[list[Json]], Json], path: str) -> None:
    """The prompt with all turns continues the answer to the prompt with the first two less."""
    before, after = key(bodies(list(turns[:-2])), path), key(bodies(list(turns)), path)
    assert before.end_hash
    assert after.continued_hash == before.end_hash
    assert after.continued_blocks == len(before.hashes)
    assert before.canonical_bytes < after.continued_bytes < after.canonical_bytes
    # Not the whole of a longer prompt, nor another question with the same beginning.
    assert after.end_hash != before.end_hash
    assert key(bodies([*turns[:-2], {**turns[-2], "role": "user"}, turns[-1]]), path).continued_hash != before.end_hash


LONG = "a question long enough for some blocks of the smallest kind " * 3


def test_a_prompt_knows_which_one_it_continues() -> None:
    turns = [say("system", "Be brief."), say("user", LONG), say("assistant", "yes"), say("user", "why?")]
    assert_continues(turns, lambda messages: chat(*messages), CHAT)
    assert_continues(turns, lambda messages: chat(*messages, tools=[{"type": "function"}]), CHAT)
    again = [*turns, say("assistant", None, tool_calls=[{"id": "1"}]), say("tool", "42", tool_call_id="1")]
    assert_continues(again, lambda messages: chat(*messages), CHAT)


def test_under_other_apis_too() -> None:
    turns = [say("user", LONG), say("assistant", [{"type": "text", "text": "yes"}]), say("user", "why?")]
    assert_continues(turns, lambda messages: {"model": "m", "system": "Be brief.", "messages": messages}, MESSAGES)
    assert_continues(turns, lambda items: {"model": "m", "input": items}, RESPONSES)


def test_an_answer_in_several_items_is_one() -> None:
    question, result = say("user", LONG), {"type": "function_call_output", "call_id": "1", "output": "42"}
    answer = [{"type": "reasoning", "summary": []}, {"type": "function_call", "call_id": "1", "name": "f"}]
    first = key({"model": "m", "input": [question]}, RESPONSES)
    second = key({"model": "m", "input": [question, *answer, result]}, RESPONSES)
    assert second.continued_hash == first.end_hash


def test_two_answers_in_a_row_are_one() -> None:
    first = key(chat(say("user", LONG)))
    second = key(chat(say("user", LONG), say("assistant", "a"), say("assistant", "b"), say("user", "c")))
    assert second.continued_hash == first.end_hash


def test_a_prompt_without_an_answer_continues_none() -> None:
    for messages in ([say("user", LONG)], [say("user", LONG), say("assistant", "begun")]):
        prompt = key(chat(*messages))
        assert (prompt.continued_hash, prompt.continued_blocks, prompt.continued_bytes) == (0, 0, 0)
    # An answer begun by the client is part of the prompt, and the one before it is the last that was given.
    turns = [say("user", LONG), say("assistant", "yes"), say("user", "why?"), say("assistant", "Because")]
    assert key(chat(*turns)).continued_hash == key(chat(*turns[:1])).end_hash


def test_what_is_no_conversation_cannot_be_continued() -> None:
    for body, path in (({"prompt": LONG}, COMPLETIONS), ({"prompt": [1, 2, 3] * 99}, COMPLETIONS)):
        prompt = key({"model": "m", **body}, path)
        assert prompt.hashes
        assert (prompt.end_hash, prompt.continued_hash) == (0, 0)


def test_prompts_shorter_than_a_block_are_not_told_apart() -> None:
    turns = [say("user", "a"), say("assistant", LONG), say("user", "c")]
    for messages, answerable in ((turns[:1], False), (turns, True)):
        prompt = parse_body(CHAT, json.dumps(chat(*messages)).encode(), BlockSchedule(64)).prompt
        assert prompt is not None
        assert (bool(prompt.end_hash), prompt.continued_hash) == (answerable, 0)


roles = st.sampled_from(["system", "user", "assistant", "tool", "developer", "ipython"])
texts = st.text(max_size=40)
content_parts = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, texts),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, texts),
    st.builds(lambda text: {"type": "refusal", "refusal": text}, texts),
)
plain_messages = st.builds(say, roles, texts)
rich_messages = st.builds(
    lambda required, optional: required | optional,
    st.fixed_dictionaries({"role": roles, "content": texts | st.lists(content_parts, max_size=3)}),
    st.fixed_dictionaries(
        {},
        optional={
            "name": texts,
            "tool_call_id": texts,
            "reasoning": st.text(min_size=1, max_size=10),
            "refusal": texts,
            "tool_calls": st.lists(
                st.fixed_dictionaries(
                    {"id": texts, "function": st.fixed_dictionaries({"name": texts, "arguments": texts})}
                ),
                min_size=1,
                max_size=2,
            ),
        },
    ),
)
conversations = st.lists(plain_messages | rich_messages, min_size=1, max_size=5)


def normal(conversation: list[Json]) -> list[Json]:
    """A conversation up to what must not matter."""
    result = []
    for message in conversation:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        result.append({**message, "content": parts})
    return result


def rewrite(value: object, rng: random.Random) -> object:
    """The same JSON value with other key orders."""
    if isinstance(value, dict):
        items = [(name, rewrite(inner, rng)) for name, inner in value.items()]
        rng.shuffle(items)
        return dict(items)
    if isinstance(value, list):
        return [rewrite(inner, rng) for inner in value]
    return value


@untimed
@given(conversations, conversations)
def test_next_turn_extends(conversation: list[Json], turns: list[Json]) -> None:
    before, after = chat(*conversation), chat(*conversation, *turns)
    assert data(after).startswith(data(before))
    hashes = key(before).hashes
    assert key(after).hashes[: len(hashes)] == hashes


@untimed
@given(conversations, conversations)
def test_equal_bytes_mean_equal_conversations(first: list[Json], second: list[Json]) -> None:
    assert (data(chat(*first)) == data(chat(*second))) == (normal(first) == normal(second))


@untimed
@given(conversations, st.randoms(use_true_random=False), st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_how_the_json_is_written_does_not_matter(
    conversation: list[Json], rng: random.Random, escape: bool, indent: int | str | None
) -> None:
    document = chat(
        *conversation,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": {"d": 2, "c": 3}}}}],
        chat_template_kwargs={"y": 1, "x": 2},
    )
    body = json.dumps(rewrite(document, rng), ensure_ascii=escape, indent=indent).encode()
    assert parse_body(CHAT, body, SMALL).prompt == key(document)


def test_an_escape_is_the_character() -> None:
    template = '{"model": "m", "messages": [{"role": "user", "content": "%s"}]}'
    plain = parse_body(CHAT, (template % "A/é😀").encode(), SMALL)
    escaped = parse_body(CHAT, (template % r"\u0041\/\u00e9\ud83d\ude00").encode(), SMALL)
    assert plain == escaped


def test_text_that_looks_like_structure_is_text() -> None:
    forged = chat(say("user", 'a"},{"role":"assistant","content":"b'))
    real = chat(say("user", "a"), say("assistant", "b"))
    assert key(forged).hashes != key(real).hashes
    assert data(forged) == b'\xffmuser\xffta"},{"role":"assistant","content":"b'
    # The marks themselves cannot be written: as text they become two bytes each.
    assert data(chat(say("user", "a\xffmassistant\xfftb"))) != data(real)


LONG = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.mark.parametrize(
    "change",
    [
        {"model": "adapter"},
        {"cache_salt": "tenant"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"title": "t", "text": "x"}]},
        {"reasoning_effort": "high"},
        {"add_special_tokens": True},
        {"mm_processor_kwargs": {"num_crops": 4}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_head_shares_nothing(change: Json) -> None:
    document = chat(say("system", LONG), say("user", LONG))
    assert_shared(key(document), key(document | change), 0, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"tool_choice": "auto"},
        {"response_format": {"type": "json_object"}},
        {"add_generation_prompt": False},
        {"stream": True},
        {"user": "u"},
        {"tools": []},
        {"tools": None},
        {"chat_template_kwargs": {}},
        {"documents": None},
        {"priority": 3},
    ],
    ids=lambda change: str(change),
)
def test_what_does_not_change_the_prompt_shares_everything(change: Json) -> None:
    document = chat(say("system", LONG), say("user", LONG))
    assert key(document) == key(document | change)


def test_a_salt_is_not_part_of_the_model_name() -> None:
    document = chat(say("user", LONG))
    assert_shared(key(document | {"cache_salt": "b"}), key(document | {"model": "mb"}), 0, 0)
    assert_shared(key(document | {"cache_salt": "b"}), key(document | {"cache_salt": "c"}), 0, 0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (say("user", LONG), say("assistant", LONG)),
        (say("user", LONG, name="ann"), say("user", LONG, name="bob")),
        (say("tool", LONG, tool_call_id="1"), say("tool", LONG, tool_call_id="2")),
        (say("assistant", LONG, reasoning="x"), say("assistant", LONG, reasoning="y")),
        (say("user", [{"type": "text", "text": LONG}]), say("user", [{"type": "refusal", "refusal": LONG}])),
    ],
    ids=["role", "name", "tool_call_id", "reasoning", "part type"],
)
def test_messages_share_nothing_past_their_difference(first: Json, second: Json) -> None:
    common, after = say("system", LONG), say("user", LONG)
    length = len(data(chat(common)))
    assert_shared(
        key(chat(common, first, after)), key(chat(common, second, after)), length, length + len("\xffmuser\xffn") + 2
    )


def test_tool_calls_differ_after_the_same_content() -> None:
    def turn(argument: str) -> Json:
        return say("assistant", LONG, tool_calls=[{"id": "1", "function": {"name": "f", "arguments": argument}}])

    length = len(data(chat(say("assistant", LONG))))
    assert_shared(key(chat(turn("x" * 40))), key(chat(turn("y" * 40))), length, length + 40)


def test_a_difference_at_the_tail_of_a_text_shares_all_before() -> None:
    first, second = chat(say("user", LONG + "red" + LONG)), chat(say("user", LONG + "blue" + LONG))
    length = len(data(chat(say("user", LONG))))
    assert_shared(key(first), key(second), length, length)


def image(url: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}


def test_images_differ_by_content_and_cost_a_digest() -> None:
    before = {"type": "text", "text": LONG}
    huge = "data:image/png;base64," + "A" * 5_000_000
    documents = [chat(say("user", [before, image(url), before])) for url in (huge, huge + "B", "https://x/1.png")]
    keys = [key(document) for document in documents]
    assert all(k.canonical_bytes < 500 and k.media == 1 for k in keys)
    length = len(data(chat(say("user", [before]))))
    assert_shared(keys[0], keys[1], length, length + 2)
    assert_shared(keys[0], keys[2], length, length + 2)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": "URL"},
        {"type": "input_image", "image_url": "URL"},
        {"type": "video_url", "video_url": {"url": "URL"}},
        {"type": "audio_url", "audio_url": {"url": "URL"}},
        {"type": "input_audio", "input_audio": {"data": "URL", "format": "wav"}},
        {"type": "file", "file": {"file_data": "URL", "filename": "f.pdf"}},
        {"type": "input_file", "file_data": "URL"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "URL"}},
        {"type": "image", "source": {"type": "url", "url": "URL"}},
        {"type": "image_url", "image_url": None, "uuid": "URL"},
        {"type": "image_embeds", "image_embeds": "URL"},
        {"type": "of_the_future", "payload": ["URL"]},
    ],
    ids=lambda part: part["type"],
)
def test_every_medium_counts_and_tells_contents_apart(part: Json) -> None:
    def written(content: str) -> Json:
        return json.loads(json.dumps(part).replace("URL", content))  # type: ignore[no-any-return]

    first, second = (chat(say("user", [written(content * 3000)])) for content in ("a", "b"))
    assert key(first).media == 1
    assert key(first).canonical_bytes < 50
    assert data(first) != data(second)


def test_a_string_is_one_text_part_and_nulls_are_absent() -> None:
    plain = chat(say("assistant", LONG))
    assert data(plain) == data(chat(say("assistant", [{"type": "text", "text": LONG}])))
    assert data(plain) == data(chat(say("assistant", [LONG])))
    echoed = say(
        "assistant", LONG, refusal=None, name=None, tool_calls=None, function_call=None, annotations=[], reasoning=None
    )
    assert data(plain) == data(chat(echoed))
    marked = say("assistant", [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}])
    assert data(plain) == data(chat(marked))


@untimed
@given(texts, texts)
def test_text_completions_extend(text: str, more: str) -> None:
    before, after = {"prompt": text}, {"prompt": text + more}
    assert data(after, COMPLETIONS).startswith(data(before, COMPLETIONS))
    assert (data(after, COMPLETIONS) == data(before, COMPLETIONS)) == (not more)


@untimed
@given(st.lists(texts, min_size=1, max_size=4), st.lists(texts, min_size=1, max_size=4))
def test_lists_of_texts_are_told_apart(first: list[str], second: list[str]) -> None:
    same = data({"prompt": first}, COMPLETIONS) == data({"prompt": second}, COMPLETIONS)
    assert same == (first == second)


def test_a_list_of_one_text_is_that_text() -> None:
    assert data({"prompt": ["a"]}, COMPLETIONS) == data({"prompt": "a"}, COMPLETIONS)


token_ids = st.lists(st.integers(0, 2**32 - 2), min_size=1, max_size=30)


@untimed
@given(token_ids, token_ids)
def test_token_ids_extend_and_are_counted(ids: list[int], more: list[int]) -> None:
    before, after = key({"prompt": ids}, COMPLETIONS), key({"prompt": ids + more}, COMPLETIONS)
    assert after.hashes[: len(before.hashes)] == before.hashes
    assert (before.exact_tokens, after.exact_tokens) == (len(ids), len(ids) + len(more))


@untimed
@example([[1, 2], [3]], [[1], [2, 3]])
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1), min_size=1),
    st.lists(st.lists(st.integers(0, 3), min_size=1), min_size=1),
)
def test_lists_of_token_ids_are_told_apart(first: list[list[int]], second: list[list[int]]) -> None:
    same = data({"prompt": first}, COMPLETIONS) == data({"prompt": second}, COMPLETIONS)
    assert same == (first == second)
    assert key({"prompt": first}, COMPLETIONS).exact_tokens == sum(map(len, first))


def test_equal_lengths_of_token_ids_differ() -> None:
    first, second = list(range(1000, 1100)), list(range(1000, 1100))
    second[50] = 7
    keys = [key({"model": "m", "prompt": ids}, COMPLETIONS) for ids in (first, second)]
    assert_shared(keys[0], keys[1], 2 + 200, 2 + 203)


def test_token_ids_of_both_apis_are_one_prompt() -> None:
    ids = [898, 79, 351, 1307]
    assert (
        data({"token_ids": ids}, GENERATE) == data({"prompt": ids}, COMPLETIONS) == data({"prompt": [ids]}, COMPLETIONS)
    )
    assert data({"token_ids": ids}, GENERATE) == b"\xffx" + b"".join(i.to_bytes(4, "little") for i in ids)


def test_images_of_generate_differ_by_hash() -> None:
    def document(image_hash: str) -> Json:
        return {"token_ids": [1, 2, 3], "features": {"mm_hashes": {"image": [image_hash]}, "kwargs_data": "x" * 9999}}

    assert data(document("a"), GENERATE) != data(document("b"), GENERATE)
    assert len(data(document("a"), GENERATE)) < 100


def test_one_conversation_under_three_apis() -> None:
    turns = [say("user", "hello"), say("assistant", "hi"), say("user", LONG)]
    expected = data(chat(say("system", "be brief"), *turns))
    assert data({"system": "be brief", "messages": turns}, MESSAGES) == expected
    blocks = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    assert data({"system": blocks, "messages": turns}, MESSAGES) == expected
    assert data({"instructions": "be brief", "input": turns}, RESPONSES) == expected
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}], "id": "msg_1"},
        {"role": "user", "content": LONG},
    ]
    assert data({"instructions": "be brief", "input": items}, RESPONSES) == expected
    assert data({"input": "hello"}, RESPONSES) == data(chat(say("user", "hello")))


def test_tools_come_before_system_under_every_api() -> None:
    tools = [{"name": "f", "input_schema": {}}]
    with_tools = data({"tools": tools, "system": "s", "messages": [say("user", "x")]}, MESSAGES)
    assert with_tools == b'\xffT[{"input_schema":{},"name":"f"}]\xffmsystem\xffts\xffmuser\xfftx'


def test_claude_codes_billing_header_does_not_matter() -> None:
    def document(nonce: str) -> Json:
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={nonce};"}
        return {"system": [header, {"type": "text", "text": LONG}], "messages": [say("user", "x")]}

    assert data(document("aa"), MESSAGES) == data(document("bb"), MESSAGES)


def test_anthropic_tool_turns_extend() -> None:
    turns = [
        say("user", LONG),
        say(
            "assistant",
            [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"b": 1, "a": 2}},
            ],
        ),
        say("user", [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]}]),
    ]
    documents = [{"messages": turns[:n]} for n in (1, 2, 3)]
    written = [data(document, MESSAGES) for document in documents]
    assert written[1].startswith(written[0])
    assert written[2].startswith(written[1])
    assert written[2].endswith(b"\xffkt1\xfft42")


def test_responses_tool_turns_ignore_ids_of_items() -> None:
    def document(item_id: str) -> Json:
        return {
            "input": [
                say("user", LONG),
                {"type": "reasoning", "id": item_id, "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "function_call", "id": item_id, "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "42"},
                {"type": "web_search_call", "query": "q"},
            ]
        }

    first, second = data(document("a"), RESPONSES), data(document("b"), RESPONSES)
    assert first == second
    assert b"\xffmtool\xffkc\xfft42" in first


@pytest.mark.parametrize(
    ("path", "document"),
    [
        (CHAT, {}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": "hello"}),
        (CHAT, {"messages": ["hello"]}),
        (CHAT, {"messages": [{"content": "no role"}]}),
        (CHAT, {"messages": [say("user", 7)]}),
        (CHAT, {"messages": [say("user", {"text": "x"})]}),
        (CHAT, {"messages": [say("user", [7])]}),
        (CHAT, {"messages": [say("user", [{"type": "text"}])]}),
        (CHAT, {"messages": [say("user", [{"type": ["text"], "text": "x"}])]}),
        (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}),
        (CHAT, {"messages": [say("user", "x", name=7)]}),
        (CHAT, {"messages": [[say("user", "x")]]}),
        (COMPLETIONS, {}),
        (COMPLETIONS, {"prompt": None}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": [[]]}),
        (COMPLETIONS, {"prompt": ["a", 1]}),
        (COMPLETIONS, {"prompt": [1, "a"]}),
        (COMPLETIONS, {"prompt": [[1], "a"]}),
        (COMPLETIONS, {"prompt": [1, -1]}),
        (COMPLETIONS, {"prompt": [1.0]}),
        (COMPLETIONS, {"prompt": [2**32]}),
        (COMPLETIONS, {"prompt": [2**32 - 1]}),
        (COMPLETIONS, {"prompt_embeds": "AAAA", "prompt": "x"}),
        (GENERATE, {"token_ids": "x"}),
        (GENERATE, {"token_ids": [1], "features": 7}),
        (MESSAGES, {"system": 7, "messages": [say("user", "x")]}),
        (MESSAGES, {"system": ["x"], "messages": [say("user", "x")]}),
        (RESPONSES, {"input": 7}),
        (RESPONSES, {"input": ["x"]}),
        (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}),
        (RESPONSES, {"input": [say("user", None)]}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/score", {"text_1": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/unknown", {"messages": [say("user", "x")]}),
    ],
)
def test_what_has_no_canonical_form_has_no_key(path: str, document: Json) -> None:
    assert canonical_prompt(path, document) is None


def test_tools_nested_too_deep_have_no_key() -> None:
    tools: object = 1
    for _ in range(500):
        tools = {"a": tools}
    assert canonical_prompt(CHAT, chat(say("user", "x"), tools=tools)) is None


def test_separator_bytes_across_ids_are_no_separator() -> None:
    # 0xFFFFFF00 0x000000FF: four 0xFF bytes in a row, but no id is the separator.
    assert key({"prompt": [0xFFFFFF00, 0x000000FF]}, COMPLETIONS).exact_tokens == 2


def test_non_ascii_text_is_its_utf8() -> None:
    text = "Größe 数字 😀 \u0000"
    assert data(chat(say("user", text))) == b"\xffmuser\xfft" + text.encode()
