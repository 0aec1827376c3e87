"""What a chat template is given: the messages of a request, in the form the engine's template sees them. Pure.

The rules are those of vLLM 0.32 (`renderers/chat_utils.py`, `entrypoints/openai/chat_completion/protocol.py`):
content in parts becomes one text or parts of known form, depending on what the template expects; arguments of tool
calls become objects; reasoning has two names.
"""

import json
from collections.abc import Mapping
from typing import Any

Document = dict[str, Any]

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a text part and the field that holds the text."""
_BILLING_HEADER = "x-anthropic-billing-header"
"""Claude Code's line with a value per request, which vLLM drops (vllm-project/vllm#36829)."""


class NoTokensError(Exception):
    """The tokens of a prompt cannot be had. `reason` is a label of metrics."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


def conversation(messages: object, content_parts: bool, developer: bool) -> list[Document]:
    """Return the messages as the template sees them.

    Args:
        messages: as the client sent them.
        content_parts: the template goes through the parts of a content itself.
        developer: the template knows the role.

    Raises:
        NoTokensError: `media` when there are images or other media in it, `form` when it is not of the API's form.
    """
    if not isinstance(messages, list) or not messages:
        raise NoTokensError("form")
    seen = [_message(message, content_parts) for message in messages]
    if not developer and any(message["role"] == "developer" for message in seen):
        return _one_system_message(seen)
    return seen


def tools(document: Document) -> list[Document] | None:
    """Return the tools as the template sees them: vLLM's own order of fields, with those it knows."""
    given = document.get("tools")
    if not given:
        return None
    if not isinstance(given, list):
        raise NoTokensError("form")
    return [_tool(tool) for tool in given]


def template_variables(document: Document) -> Document:
    """Return what else the template is given.

    Raises:
        NoTokensError: `template` when the request brings its own template or continues a message.
    """
    if document.get("chat_template") is not None or document.get("continue_final_message"):
        raise NoTokensError("template")
    if document.get("truncate_prompt_tokens") is not None:
        raise NoTokensError("truncation")
    given = document.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping):
        raise NoTokensError("form")
    variables = dict(given)
    add = document.get("add_generation_prompt")
    variables["add_generation_prompt"] = True if add is None else add
    effort = document.get("reasoning_effort")
    if effort is not None:
        variables["reasoning_effort"] = effort
        variables.setdefault("enable_thinking", effort != "none")
    documents = document.get("documents")
    variables["documents"] = documents
    variables["tools"] = tools(document)
    return variables


def _message(message: object, content_parts: bool) -> Document:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise NoTokensError("form")
    role: str = message["role"]
    content = message.get("content")
    seen: Document
    if isinstance(content, str) and not (role == "system" and content.startswith(_BILLING_HEADER)):
        seen = {"role": role, "content": [{"type": "text", "text": content}] if content_parts else content}
    else:
        texts = _texts(content)
        if role == "system":
            texts = [rest for text in texts if (rest := _without_billing(text)) is not None]
        if content_parts:
            seen = {"role": role, "content": [{"type": "text", "text": text} for text in texts]}
        else:
            seen = {"role": role, "content": "\n".join(texts)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            seen["tool_calls"] = _calls(calls)
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            seen["reasoning"] = seen["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            seen["tool_call_id"] = message["tool_call_id"]
        if content_parts:
            seen["content"] = "\n".join(part["text"] for part in seen["content"])
    elif role == "developer":
        seen["tools"] = message.get("tools")
    if isinstance(message.get("name"), str):
        seen["name"] = message["name"]
    return seen


def _texts(content: object) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise NoTokensError("form")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise NoTokensError("form")
        kind = part.get("type", "text" if "text" in part else "")
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise NoTokensError("media")
        text = part.get(field)
        if text is None and kind in ("text", "refusal"):
            continue
        if not isinstance(text, str):
            raise NoTokensError("form")
        texts.append(text)
    return texts


def _without_billing(text: str) -> str | None:
    if not text.startswith(_BILLING_HEADER):
        return text
    return text.partition("\n")[2] or None


def _calls(calls: object) -> list[Document]:
    if not isinstance(calls, list):
        raise NoTokensError("form")
    seen = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise NoTokensError("form")
        function = dict(call["function"])
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments else {}
            except ValueError:
                arguments = {}
        function["arguments"] = arguments if isinstance(arguments, dict) else {}
        seen.append({**call, "function": function})
    return seen


def _tool(tool: object) -> Document:
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        raise NoTokensError("form")
    function = tool["function"]
    seen = {
        "name": function.get("name"),
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    for optional in ("strict", "defer_loading"):
        if function.get(optional) is not None:
            seen[optional] = function[optional]
    return {"type": tool.get("type", "function"), "function": seen}


def _one_system_message(seen: list[Document]) -> list[Document]:
    """Developer messages count as system messages where the template does not know them, and system messages as one."""
    renamed: list[Document] = []
    for message in seen:
        if message["role"] == "developer":
            message = {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        renamed.append(message)
    first = [index for index, message in enumerate(renamed) if message["role"] == "system"]
    if first == [0]:
        return renamed
    contents = []
    for index in first:
        content = renamed[index]["content"]
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        if text:
            contents.append(text)
    others = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(contents)}, *others]
