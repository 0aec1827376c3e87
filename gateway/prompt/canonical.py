"""The canonical form of a prompt: bytes that are equal exactly when the engine would see the same prompt.

Three properties carry everything built on it:

1. A longer prompt extends the bytes of the shorter one: a conversation's next turn, a completion's longer
   text, a longer list of token ids. Hence nothing states a length ahead of content, and nothing closes the
   last field.
2. How the JSON was written does not matter: white space, key order, escapes, null or absent fields.
3. No content can pass for structure. A field starts with the byte 0xFF and a letter, and UTF-8 never contains
   0xFF. The only raw bytes are media digests (16 bytes after their mark) and token ids (4 each, to the end).

The order is that of prompts as common chat templates render them: what the template itself is given, tools,
then messages. The Anthropic and Responses forms follow what vLLM makes of such requests
(`vllm/entrypoints/anthropic/serving.py`, `vllm/entrypoints/openai/responses/`), so that a conversation
without tools has one form under every API.
"""

import sys
from array import array
from collections.abc import Callable

import orjson
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from gateway.prompt.messages import (
    CALL_ID,
    CALLS,
    MESSAGE,
    REASONING,
    TEXT_HEADS,
    TOOLS,
    Append,
    Document,
    NoFormError,
    Written,
    sorted_json,
    utf8,
    write_content,
    write_messages,
    write_other,
    write_rest,
)

Canonical = tuple[bytes, int | None, int, tuple[int, int] | None]
"""Canonical bytes; number of tokens when the prompt is token ids, else None; number of media parts; where in the bytes
the last answer of the model stands that something follows, `(0, 0)` if there is none, None if there are no turns.

The bytes before that answer are those of the request that it answered."""

_HEAD = b"\xffh"  # followed by the name of a request field
_HEAD_VALUE = b"\xffv"
_PROMPT = b"\xffp"  # text of a completion
_TOKENS = b"\xffx"  # token ids, to the end

# Request fields of vLLM that change the beginning of the rendered prompt. `add_generation_prompt` and
# `continue_final_message` only change its end, `tool_choice` and `response_format` nothing.
_HEAD_FIELDS = (
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "output_config",
    "reasoning",
    "reasoning_effort",
    "truncate_prompt_tokens",
    "truncation_side",
)
_HEAD_FIELD_SET = frozenset(_HEAD_FIELDS)

# Claude Code sends a line with a per-request hash as first block of `system`. vLLM drops it before rendering
# (vllm-project/vllm#36829); so must we, or no two requests of a session would share a block.
_BILLING_HEADER = "x-anthropic-billing-header"

_ASSISTANT = MESSAGE + b"assistant"

_SEPARATOR_ID = 0xFFFFFFFF  # between lists of token ids; not an id itself
_SEPARATOR = b"\xff\xff\xff\xff"


def canonical_prompt(path: str, document: Document, written: Written | None = None) -> Canonical | None:
    """Canonical form of the prompt in a request body.

    Args:
        path: path of the request, without query.
        document: the parsed body.
        written: its `messages`, if they are not in `document`.

    Returns:
        None when requests of this path have no canonical form (embeddings, unknown paths), when the prompt is
        malformed, and when part of it is not in the body (`previous_response_id`, prompt embeddings).
    """
    form = _FORMS.get(path)
    if form is None:
        return None
    try:
        return form(document, written)
    except (NoFormError, orjson.JSONEncodeError):  # the latter: nested deeper than orjson writes
        return None


def pool_seed(model: str, cache_salt: str | None = None) -> int:
    """Seed of the hash chain: prompts of different models, adapters or salts share no block.

    Args:
        model: the served model's or adapter's name, aliases resolved.
        cache_salt: vLLM's `cache_salt`.
    """
    seed = xxh3_64_intdigest(model)
    return seed if cache_salt is None else xxh3_64_intdigest(cache_salt, seed)


def _write_head(document: Document, append: Append) -> None:
    """Write what the template is given besides messages, and the tools."""
    if not _HEAD_FIELD_SET.isdisjoint(document):
        for name in _HEAD_FIELDS:
            value = document.get(name)
            if value is None or value == {} or value == []:
                continue
            json = sorted_json(value)
            append(_HEAD + name.encode() + _HEAD_VALUE)
            # The template is long and not part of the prompt: its digest keeps it out of the token estimate.
            append(xxh3_128_digest(json) if name == "chat_template" else json)
    tools = document.get("tools")
    if tools:
        append(TOOLS)
        append(sorted_json(tools))


def _chat(document: Document, written: Written | None) -> Canonical:
    parts: list[bytes] = []
    _write_head(document, parts.append)
    return _messages(document, written, parts)


def _messages(document: Document, written: Written | None, parts: list[bytes]) -> Canonical:
    """Write the messages behind what `parts` has, and join it all."""
    if written is None:
        return _conversation(parts, *write_messages(document.get("messages"), parts))
    before = sum(map(len, parts))
    media, begin, end = write_rest(written, parts)
    return b"".join(parts), None, media, (before + begin, before + end) if end else (0, 0)


def _conversation(parts: list[bytes], media: int, begin: int, end: int) -> Canonical:
    """Join the parts of a conversation; the last answer is in those from `begin` to `end`."""
    data = b"".join(parts)
    if not end:
        return data, None, media, (0, 0)
    after = len(data) - sum(map(len, parts[end:]))
    return data, None, media, (after - sum(map(len, parts[begin:end])), after)


def _anthropic(document: Document, written: Written | None) -> Canonical:
    parts: list[bytes] = []
    append = parts.append
    _write_head(document, append)
    system = document.get("system")
    if type(system) is str:
        if system:
            append(TEXT_HEADS["system"])
            append(system.encode())
    elif system is not None:
        # vLLM joins the blocks without a separator.
        append(TEXT_HEADS["system"])
        append(b"".join(_system_blocks(system)))
    return _messages(document, written, parts)


def _system_blocks(system: object) -> list[bytes]:
    blocks = []
    for block in _filled_list(system):
        if type(block) is not dict:
            raise NoFormError
        text = block.get("text")
        if type(text) is not str:
            raise NoFormError
        if not text.startswith(_BILLING_HEADER):
            blocks.append(text.encode())
    return blocks


def _responses(document: Document, written: Written | None) -> Canonical:
    get = document.get
    for elsewhere in ("previous_response_id", "conversation", "prompt"):
        if get(elsewhere) is not None:
            raise NoFormError
    parts: list[bytes] = []
    append = parts.append
    _write_head(document, append)
    if (instructions := get("instructions")) is not None:
        append(TEXT_HEADS["system"])
        append(utf8(instructions))
    items = get("input")
    media = begin = end = 0
    begun = -1
    if type(items) is str:
        append(TEXT_HEADS["user"])
        append(items.encode())
    else:
        for item in _filled_list(items):
            first = len(parts)
            media += _write_item(item, append)
            if parts[first].startswith(_ASSISTANT):
                if begun < 0:
                    begun = first
            elif begun >= 0:
                begin, end, begun = begun, first, -1
    return _conversation(parts, media, begin, end)


def _write_item(item: object, append: Append) -> int:
    if type(item) is not dict:
        raise NoFormError
    get = item.get
    kind, role = get("type"), get("role")
    if type(role) is str and (kind is None or kind == "message"):
        append(MESSAGE + role.encode())
        return write_content(get("content"), append)
    # An item's own `id` and `status` are not rendered.
    if kind == "function_call":
        append(MESSAGE + b"assistant" + CALLS)
        append(sorted_json({"arguments": get("arguments"), "id": get("call_id"), "name": get("name")}))
        return 0
    if kind == "function_call_output":
        append(MESSAGE + b"tool" + CALL_ID)
        append(utf8(get("call_id")))
        return write_content(get("output"), append)
    if kind == "reasoning":
        append(MESSAGE + b"assistant" + REASONING)
        return write_content(get("content") or get("summary") or [], append)
    append(MESSAGE)
    return write_other(item, append)


def _completion(document: Document, written: Written | None) -> Canonical:
    if document.get("prompt_embeds") is not None:
        raise NoFormError
    parts: list[bytes] = []
    append = parts.append
    _write_head(document, append)
    prompt = document.get("prompt")
    tokens = None
    if type(prompt) is str:
        append(_PROMPT)
        append(prompt.encode())
    else:
        prompts = _filled_list(prompt)
        if type(prompts[0]) is str:
            for text in prompts:
                append(_PROMPT)
                append(utf8(text))
        else:
            lists = prompts if type(prompts[0]) is list else [prompts]
            packed = [_token_bytes(ids) for ids in lists]
            append(_TOKENS)
            append(_SEPARATOR.join(packed))
            tokens = sum(map(len, packed)) // 4
    return b"".join(parts), tokens, 0, None


def _generate(document: Document, written: Written | None) -> Canonical:
    parts: list[bytes] = []
    features = document.get("features")
    if features is not None:
        # Images come rendered: place-holder ids among the tokens, and hashes of what they stand for.
        if type(features) is not dict:
            raise NoFormError
        parts.append(_HEAD + b"features" + _HEAD_VALUE)
        parts.append(sorted_json(features.get("mm_hashes")))
    packed = _token_bytes(document.get("token_ids"))
    parts.append(_TOKENS)
    parts.append(packed)
    return b"".join(parts), len(packed) // 4, 0, None


def _token_bytes(ids: object) -> bytes:
    """Four bytes per id, little-endian."""
    if type(ids) is not list or not ids:
        raise NoFormError
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError):
        raise NoFormError from None
    if sys.byteorder == "big":
        packed.byteswap()
    data = packed.tobytes()
    # The search is cheap and finds nothing in practice; only after it are the ids looked at one by one.
    if _SEPARATOR in data and _SEPARATOR_ID in ids:
        raise NoFormError
    return data


def _filled_list(value: object) -> list[object]:
    if type(value) is not list or not value:
        raise NoFormError
    return value


_FORMS: dict[str, Callable[[Document, Written | None], Canonical]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/messages": _anthropic,
    "/v1/responses": _responses,
    "/inference/v1/generate": _generate,
}
