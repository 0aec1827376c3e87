"""Canonical form of messages and their content parts, as OpenAI's and Anthropic's APIs write them.

The marks and the rules they follow are explained in `canonical`.
"""

from collections.abc import Callable
from typing import Any

import orjson
from xxhash import xxh3_128_digest

TOOLS = b"\xffT"
MESSAGE = b"\xffm"  # followed by the role
NAME = b"\xffn"
CALL_ID = b"\xffk"
REASONING = b"\xffr"
TEXT = b"\xfft"
REFUSAL = b"\xfff"
CALLS = b"\xffc"
MEDIA = b"\xffi"  # followed by the digest of the content or URL
OTHER = b"\xffo"  # followed by the digest of JSON

ROLES = ("user", "assistant", "system", "developer", "tool")
TEXT_HEADS = {role: MESSAGE + role.encode() + TEXT for role in ROLES}
"""How a message of one text begins."""

Document = dict[str, Any]
Append = Callable[[bytes], None]

Written = tuple[bytes, list[tuple[int, bytes]], int, int, int, int]
"""Messages as `gateway.prompt.native.read_chat` has written them: the bytes of those that it knows; where in these the
others stand, each as JSON; where the last answer begins, in those bytes and among the others, and where it ends."""


class NoFormError(Exception):
    """The body has no canonical form: the replica will refuse it, or its prompt is not in it."""


def sorted_json(value: object) -> bytes:
    """JSON without white space, keys sorted. Raises `orjson.JSONEncodeError` when nested too deep."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def utf8(value: object) -> bytes:
    """The bytes of a string; `NoFormError` for anything else."""
    if type(value) is not str:
        raise NoFormError
    return value.encode()


def write_messages(messages: object, parts: list[bytes]) -> tuple[int, int, int]:
    """Write messages in order.

    Args:
        messages: a chat's `messages`.
        parts: receives the bytes.

    Returns:
        Number of media parts; and where in `parts` the last answer begins and ends that something follows, 0 and 0 if
        there is none.

    Raises:
        NoFormError: if anything is not as the API has it.
    """
    if type(messages) is not list or not messages:
        raise NoFormError
    append = parts.append
    media = begin = end = 0
    begun = -1
    for message in messages:
        if type(message) is not dict:
            raise NoFormError
        role = message.get("role")
        content = message.get("content")
        if type(role) is not str:
            raise NoFormError
        if role == "assistant":
            if begun < 0:
                begun = len(parts)
        elif begun >= 0:
            begin, end, begun = begun, len(parts), -1
        if len(message) == 2 and type(content) is str:
            append(TEXT_HEADS.get(role) or MESSAGE + role.encode() + TEXT)
            append(content.encode())
        else:
            append(MESSAGE + role.encode())
            media += _write_fields(message, content, append)
    return media, begin, end


def write_rest(written: Written, parts: list[bytes]) -> tuple[int, int, int]:
    """Write messages of which most are written already.

    Args:
        written: those, and the rest as JSON.
        parts: receives the bytes.

    Returns:
        Number of media parts; and where in the bytes of all messages the last answer begins and ends that something
        follows, 0 and 0 if there is none.

    Raises:
        NoFormError: if a message is not as the API has it.
    """
    data, rest, begin, rest_before_begin, end, rest_before_end = written
    if not rest:
        parts.append(data)
        return 0, begin, end
    media = done = 0
    for number, (position, json) in enumerate(rest):
        parts.append(data[done:position])
        done = position
        message: list[bytes] = []
        media += write_messages([orjson.loads(json)], message)[0]
        size_bytes = sum(map(len, message))
        if number < rest_before_begin:
            begin += size_bytes
        if number < rest_before_end:
            end += size_bytes
        parts += message
    parts.append(data[done:])
    return media, begin, end


def write_content(content: object, append: Append) -> int:
    """Write a message's content, a string or a list of parts; returns the number of media parts."""
    if type(content) is str:
        append(TEXT)
        append(content.encode())
        return 0
    if type(content) is not list:
        raise NoFormError
    media = 0
    for part in content:
        if type(part) is str:
            append(TEXT)
            append(part.encode())
            continue
        if type(part) is not dict:
            raise NoFormError
        kind = part.get("type")
        if type(kind) is not str:
            if kind is not None:
                raise NoFormError
            # vLLM infers the type of a part without one.
            kind = "text" if "text" in part else ""
        media += _PARTS.get(kind, write_other)(part, append)
    return media


def write_other(part: Document, append: Append) -> int:
    """Write something of unknown type as a digest; counts as one media part."""
    append(OTHER)
    append(xxh3_128_digest(sorted_json(part)))
    return 1


def _write_fields(message: Document, content: object, append: Append) -> int:
    get = message.get
    if (name := get("name")) is not None:
        append(NAME)
        append(utf8(name))
    if (call_id := get("tool_call_id")) is not None:
        append(CALL_ID)
        append(utf8(call_id))
    # Templates that keep reasoning render it ahead of the answer.
    if reasoning := get("reasoning") or get("reasoning_content"):
        append(REASONING)
        append(utf8(reasoning))
    media = 0 if content is None else write_content(content, append)
    if (refusal := get("refusal")) is not None:
        append(REFUSAL)
        append(utf8(refusal))
    if calls := get("tool_calls") or get("function_call"):
        append(CALLS)
        append(sorted_json(calls))
    if tools := get("tools"):
        append(TOOLS)
        append(sorted_json(tools))
    return media


def _text(part: Document, append: Append) -> int:
    append(TEXT)
    append(utf8(part.get("text")))
    return 0


def _refusal(part: Document, append: Append) -> int:
    append(REFUSAL)
    append(utf8(part.get("refusal")))
    return 0


def _thinking(part: Document, append: Append) -> int:
    append(REASONING)
    append(utf8(part.get("thinking")))
    return 0


def _not_rendered(part: Document, append: Append) -> int:
    return 0


def _tool_use(part: Document, append: Append) -> int:
    append(CALLS)
    append(sorted_json({"id": part.get("id"), "input": part.get("input"), "name": part.get("name")}))
    return 0


def _tool_result(part: Document, append: Append) -> int:
    append(CALL_ID)
    append(utf8(part.get("tool_use_id")))
    content = part.get("content")
    return 0 if content is None else write_content(content, append)


_MEDIA_FIELDS = {
    "image_url": "image_url",
    "video_url": "video_url",
    "audio_url": "audio_url",
    "input_audio": "input_audio",
    "file": "file",
    "image": "source",
    "document": "source",
    "input_image": "image_url",
    "input_file": "file_id",
}
"""Type of a media part and the field that holds the media."""


def _media(part: Document, append: Append) -> int:
    """Write 16 bytes for a medium of any size.

    vLLM identifies a part by its `uuid` when it has one, else by its content; a URL stands for its content.
    """
    payload = part.get("uuid")
    if payload is None:
        payload = part.get(_MEDIA_FIELDS[part["type"]])
        if type(payload) is dict:
            get = payload.get
            payload = get("url") or get("data") or get("file_data") or get("file_id")
        elif payload is None:
            payload = part.get("file_data") or part.get("file_url")
    if type(payload) is not str:
        return write_other(part, append)
    append(MEDIA)
    append(xxh3_128_digest(payload))
    return 1


_PARTS: dict[str, Callable[[Document, Append], int]] = {
    "text": _text,
    "input_text": _text,
    "output_text": _text,
    "summary_text": _text,
    "reasoning_text": _text,
    "refusal": _refusal,
    "thinking": _thinking,
    "redacted_thinking": _not_rendered,
    "tool_use": _tool_use,
    "tool_result": _tool_result,
    **dict.fromkeys(_MEDIA_FIELDS, _media),
}
