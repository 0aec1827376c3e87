"""Anthropic's messages as the chat that vLLM makes of them (`vllm/entrypoints/anthropic/serving.py`, 0.32). Pure."""

from typing import Any

from gateway.prompt.tokenise.conversation import Document, NoTokensError

_BILLING_HEADER = "x-anthropic-billing-header"


def chat_of(document: Document, system_first: bool) -> Document:
    """Return the chat completion request for a request of the Messages API, as far as the prompt goes.

    Args:
        document: body of a request for `/v1/messages`.
        system_first: the chat template wants its system message first, so those among the messages join it.

    Raises:
        NoTokensError: `media` when there are images or documents in it, `form` when it is not of the API's form.
    """
    given = document.get("messages")
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise NoTokensError("form")
    system = _system_texts(document.get("system"))
    messages: list[Document] = []
    for message in given:
        if message.get("role") == "system":
            text = "".join(_system_texts(message.get("content")))
            if text and system_first:
                system.append(text)
            elif text:
                messages.append({"role": "system", "content": text})
        else:
            _convert(message, messages)
    if system:
        messages.insert(0, {"role": "system", "content": "".join(system)})
    chat: Document = {"messages": messages}
    for name in ("chat_template_kwargs", "cache_salt"):
        if document.get(name) is not None:
            chat[name] = document[name]
    effort = _effort(document)
    if effort is not None:
        chat["reasoning_effort"] = effort
    tools = document.get("tools")
    if tools:
        chat["tools"] = [_tool(tool) for tool in _dictionaries(tools)]
    return chat


def _system_texts(system: object) -> list[str]:
    if system is None or isinstance(system, str):
        return [system] if system and not system.startswith(_BILLING_HEADER) else []
    texts = []
    for block in _dictionaries(system):
        text = block.get("text")
        if block.get("type") == "text" and text:
            if not isinstance(text, str):
                raise NoTokensError("form")
            if not text.startswith(_BILLING_HEADER):
                texts.append(text)
    return texts


def _convert(message: Document, messages: list[Document]) -> None:
    """Add a message, and before it the tool messages its blocks become."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    parts: list[Document] = []
    calls: list[Document] = []
    reasoning: list[str] = []
    for block in _dictionaries(content):
        kind = block.get("type")
        if kind == "text":
            if block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
        elif kind == "thinking":
            reasoning.append(_text(block.get("thinking")))
        elif kind == "tool_use":
            function = {"name": block.get("name") or "", "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            if role != "user":
                raise NoTokensError("form")
            text = _result_text(block.get("content"))
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": text})
        elif kind not in ("redacted_thinking", "tool_reference"):
            raise NoTokensError("media")
    converted: Document = {"role": role}
    if reasoning:
        converted["reasoning"] = "".join(reasoning)
    if calls:
        converted["tool_calls"] = calls
    if parts:
        converted["content"] = parts[0]["text"] if len(parts) == 1 else parts
    if role != "user" or "content" in converted:
        messages.append(converted)


def _result_text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for item in _dictionaries(content):
        if item.get("type") != "text":
            raise NoTokensError("media")
        texts.append(_text(item.get("text", "")))
    return "\n".join(texts)


def _effort(document: Document) -> str | None:
    """How much the model should think, where the request says so in words the template understands."""
    thinking, output = document.get("thinking"), document.get("output_config")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        # What vLLM makes of it depends on a probe of the model's template.
        raise NoTokensError("template", "thinking is switched off")
    effort = output.get("effort") if isinstance(output, dict) else None
    return effort if isinstance(effort, str) else None


def _tool(tool: Document) -> Document:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    for optional in ("strict", "defer_loading"):
        if tool.get(optional) is not None:
            function[optional] = tool[optional]
    return {"type": "function", "function": function}


def _dictionaries(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise NoTokensError("form")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise NoTokensError("form")
    return value
