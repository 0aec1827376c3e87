"""Chats are rendered as vLLM renders them."""

from typing import Any

import pytest

from gateway.prompt.tokenise.chat_template import ChatTemplate
from gateway.prompt.tokenise.conversation import NoTokensError, conversation

SHOW = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
PARTS = (
    "{%- for message in messages %}[{{ message['role'] }}:"
    "{%- if message['content'] is string %}{{ message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}<{{ part['text'] }}>{%- endfor %}{%- endif %}]{%- endfor %}"
)


def render(source: str, messages: list[Any], **fields: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render({"messages": messages, **fields})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_content_as_text_and_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}, {"text": "d"}]
    assert render(SHOW, [user("x"), user(parts), user(None)]) == "[user:x][user:a\nb\nc\nd][user:]>"
    assert render(PARTS, [user("x"), user(parts)]) == "[user:<x>][user:<a><b><c><d>]"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (SHOW, False),
        (PARTS, True),
        (
            "{% set ms = messages[1:] %}{% for m in ms %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}",
            True,
        ),
        ("{% for m in messages %}{% for c in m.content | list %}{{ c }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}", True),
        (
            "{% macro show(what) %}{% for c in what %}{{ c }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro show(what) %}{% for c in what %}{{ c }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.tool_calls) }}{% endfor %}",
            False,
        ),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}", False),
    ],
)
def test_which_templates_go_through_parts(source: str, parts: bool) -> None:
    assert ChatTemplate(source, {}).content_parts is parts


def test_the_generation_prompt_can_be_left_out() -> None:
    assert render(SHOW, [user("x")], add_generation_prompt=False) == "[user:x]"


def test_white_space_and_special_tokens_and_functions() -> None:
    source = "  {% if true %}\n{{ bos_token }}\n  {% endif %}\n{{ tools | tojson }}"
    tool = {"function": {"parameters": {"a": "ü<"}, "name": "f", "unknown": 1}, "type": "function"}
    rendered = render(source, [user("x")], tools=[tool])
    function = '{"name": "f", "description": null, "parameters": {"a": "ü<"}}'
    assert rendered == '<s>\n[{"type": "function", "function": ' + function + "}]"


def test_generation_marks_and_loop_controls() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert render(source, [user("a"), user("b"), user("c")]) == "ab"


def test_tool_calls_and_reasoning() -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}"
        "({{ m.reasoning_content }}{{ m.reasoning }})[{{ m.content }}]{{ m.tool_call_id }}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
        {"role": "assistant", "content": "x", "tool_calls": []},
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "text", "text": "p"}, {"type": "text", "text": "q"}],
        },
        {"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": "no json"}}]},
    ]
    assert render(source, messages) == '{"a": [1]}(rr)[]()[x]()[p\nq]1{}()[]'


def test_developer_messages_become_one_system_message_where_the_template_does_not_know_them() -> None:
    messages = [{"role": "system", "content": "s"}, user("u"), {"role": "developer", "content": "d"}]
    assert render(SHOW, messages) == "[system:s\n\nd][user:u]>"
    assert render("{# 'developer' #}" + SHOW, messages) == "[system:s][user:u][developer:d]>"


def test_the_billing_line_is_dropped() -> None:
    messages = [{"role": "system", "content": "x-anthropic-billing-header: cch=1;\nrest"}, user("u")]
    assert render(SHOW, messages) == "[system:rest][user:u]>"
    messages[0]["content"] = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "s"}]
    assert render(SHOW, messages) == "[system:s][user:u]>"


def test_variables_of_the_request() -> None:
    source = "{{ enable_thinking }}{{ reasoning_effort }}{{ documents }}{{ messages | length }}"
    assert render(source, [user("x")], chat_template_kwargs={"enable_thinking": False}) == "FalseNone1"
    assert render(source, [user("x")], reasoning_effort="low") == "TruelowNone1"
    # What the template does not ask for it does not get, and what is the template's own is not the request's to set.
    assert render(source, [user("x")], chat_template_kwargs={"messages": [], "other": 1}) == "None1"


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "data:"}}])]}, "media"),
        ({"messages": []}, "form"),
        ({"messages": "hello"}, "form"),
        ({"messages": [{"content": "x"}]}, "form"),
        ({"messages": [user([3])]}, "form"),
        ({"messages": [user("x")], "chat_template": "mine"}, "template"),
        ({"messages": [user("x")], "continue_final_message": True}, "template"),
        ({"messages": [user("x")], "truncate_prompt_tokens": 5}, "truncation"),
        ({"messages": [user("x")], "tools": "none"}, "form"),
        ({"messages": [user("x")], "tools": [{"type": "web_search"}]}, "form"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "form"),
    ],
)
def test_what_cannot_be_rendered(document: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoTokensError) as raised:
        ChatTemplate(SHOW, {}).render(document)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[7].content.x.y }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
    ],
    ids=["refuses", "stumbles", "tries to get out of the sandbox", "changes what it is given"],
)
def test_templates_that_fail(source: str) -> None:
    with pytest.raises(NoTokensError) as raised:
        render(source, [user("x")])
    assert raised.value.reason == "template"


def test_the_clients_messages_are_not_changed() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    conversation(messages, content_parts=False, developer=False)
    assert messages == [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert call["function"]["arguments"] == "{}"  # type: ignore[index]
