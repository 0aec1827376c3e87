"""Anthropic's messages become the chat that vLLM makes of them."""

from typing import Any

import pytest

from gateway.prompt.tokenise.anthropic import chat_of
from gateway.prompt.tokenise.chat_template import ChatTemplate
from gateway.prompt.tokenise.conversation import NoTokensError

REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "{% endfor %}"
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def test_system_comes_first_without_the_billing_line() -> None:
    document = {
        "system": [text("x-anthropic-billing-header: cch=1"), text("You "), text("help.")],
        "messages": [user("hi")],
    }
    assert chat_of(document, False) == {"messages": [{"role": "system", "content": "You help."}, user("hi")]}
    assert chat_of({"system": "S", "messages": [user("hi")]}, False)["messages"][0]["content"] == "S"
    assert chat_of({"messages": [user("hi")]}, False) == {"messages": [user("hi")]}


def test_system_messages_among_the_others() -> None:
    document = {"system": "A", "messages": [user("hi"), {"role": "system", "content": [text("B")]}, user("more")]}
    assert [m["content"] for m in chat_of(document, False)["messages"]] == ["A", "hi", "B", "more"]
    assert [m["content"] for m in chat_of(document, True)["messages"]] == ["AB", "hi", "more"]


def test_which_templates_want_the_system_message_first() -> None:
    assert ChatTemplate(REFUSES, {}).system_first
    assert not ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}).system_first


def test_blocks_tools_and_results() -> None:
    document = {
        "messages": [
            user([text("a"), text("b")]),
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    text("let me look"),
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": [1]}},
                ],
            },
            user(
                [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [text("r1"), text("r2")]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "r3"},
                    text("and now?"),
                ]
            ),
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
            user([{"type": "tool_result", "tool_use_id": "t3"}]),
        ],
        "tools": [{"name": "look", "description": "d", "input_schema": {"type": "object"}}],
        "output_config": {"effort": "low"},
        "cache_salt": "s",
        "max_tokens": 5,
    }
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": {"at": [1]}}}
    assert chat_of(document, False) == {
        "messages": [
            user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
            {"role": "assistant", "reasoning": "hm", "tool_calls": [call], "content": "let me look"},
            {"role": "tool", "tool_call_id": "t1", "content": "r1\nr2"},
            {"role": "tool", "tool_call_id": "t2", "content": "r3"},
            user("and now?"),
            {"role": "assistant"},
            {"role": "tool", "tool_call_id": "t3", "content": ""},
        ],
        "tools": [
            {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
        ],
        "reasoning_effort": "low",
        "cache_salt": "s",
    }


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"messages": [user([{"type": "image", "source": {}}])]}, "media"),
        ({"messages": [user([{"type": "tool_result", "content": [{"type": "image"}]}])]}, "media"),
        ({"messages": "x"}, "form"),
        ({"messages": [user(3)]}, "form"),
        ({"messages": [user([{"type": "thinking"}])]}, "form"),
        ({"messages": [user("x")], "system": [3]}, "form"),
        ({"messages": [user("x")], "tools": [3]}, "form"),
        ({"messages": [user("x")], "thinking": {"type": "disabled"}}, "template"),
    ],
)
def test_what_has_no_tokens(document: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoTokensError) as raised:
        chat_of(document, False)
    assert raised.value.reason == reason
