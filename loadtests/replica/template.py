"""The chat template: messages to text, in the manner of ChatML.

A conversation's next turn starts with the text of the turn before and its answer. Answers start at a token
boundary (blanks fill the piece before), so the next turn has the very tokens that the engine computed while
it decoded. Real templates get the same from special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import xxhash


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    token_bytes: int,
    *,
    add_generation_prompt: bool = True,
) -> bytes:
    """The prompt of a chat.

    Args:
        messages: OpenAI's messages; content as a string or in parts.
        tools: definitions of tools, in front of everything else.
        token_bytes: piece length of the tokeniser.
        add_generation_prompt: end with the head of the assistant's message.
    """
    text = bytearray()
    if tools:
        text += b"<|im_start|>system\n# Tools\n" + orjson.dumps(tools) + b"<|im_end|>\n"
    for message in messages:
        role = str(message.get("role", "user"))
        _open(text, role, token_bytes)
        _content(text, message.get("content"))
        if message.get("tool_calls"):
            text += orjson.dumps(message["tool_calls"])
        text += b"<|im_end|>\n"
    if add_generation_prompt:
        _open(text, "assistant", token_bytes)
    return bytes(text)


def _open(text: bytearray, role: str, token_bytes: int) -> None:
    text += b"<|im_start|>" + _utf8(role) + b"\n"
    if role == "assistant":
        text += b" " * (-len(text) % token_bytes)


def _content(text: bytearray, content: Any) -> None:
    if isinstance(content, str):
        text += _utf8(content)
    elif isinstance(content, list):
        for part in content:
            _part(text, part)
    elif content is not None:
        text += orjson.dumps(content)


def _part(text: bytearray, part: Any) -> None:
    if isinstance(part, str):
        text += _utf8(part)
        return
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        text += _utf8(part["text"])
        return
    # Images and other media count as a placeholder that names their content or address.
    kind = str(part.get("type", "media")) if isinstance(part, Mapping) else "media"
    text += b"<|" + _utf8(kind) + b":" + xxhash.xxh3_128_hexdigest(orjson.dumps(part)).encode() + b"|>"


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
