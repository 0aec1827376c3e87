"""The changes the gateway makes to a body outside disaggregation: an alias becomes the model's own name, and, where
that is configured, a stream is asked for its usage."""

import re

import orjson

_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')
# What says the same as no options at all. An object with anything else in it stays as the client wrote it.
_NO_OPTIONS = re.compile(rb'"stream_options"\s*:\s*(null|\{\s*\}|\{\s*"include_usage"\s*:\s*(?:false|null)\s*\})')
_USAGE_WANTED = b'{"include_usage":true}'


def replace_model(body: bytes, model: str) -> bytes:
    """Return the body with its top-level `model` replaced, every other byte as it was.

    A match inside a string or a nested object is told apart by parsing the outcome: only the splice that changes the
    top-level value, and nothing else, is taken. Duplicate keys end with the last one, as in the engine's parser.

    Args:
        body: a JSON object, parsed before.
        model: the new name.
    """
    wanted = orjson.loads(body)
    wanted["model"] = model
    spliced = _spliced(body, _MODEL, orjson.dumps(model), wanted)
    return spliced if spliced is not None else orjson.dumps(wanted)


def with_usage(body: bytes) -> bytes | None:
    """Return the body of a stream with `stream_options.include_usage` set, every other byte as it was.

    OpenAI's API reference, `stream_options`: "include_usage: If set, an additional chunk will be streamed before the
    data: [DONE] message", with the usage of the whole request and empty `choices`.

    Args:
        body: a JSON object with at least one key, parsed before.

    Returns:
        None if the client has set stream options of its own: what it asked for would then come out differently.
    """
    if b"stream_options" not in body and b"\\" not in body:
        return _appended(body)
    wanted = orjson.loads(body)
    if "stream_options" not in wanted:
        return _appended(body)
    wanted["stream_options"] = orjson.loads(_USAGE_WANTED)
    return _spliced(body, _NO_OPTIONS, _USAGE_WANTED, wanted)


def _appended(body: bytes) -> bytes:
    end = body.rindex(b"}")
    return body[:end] + b',"stream_options":' + _USAGE_WANTED + body[end:]


def _spliced(body: bytes, pattern: re.Pattern[bytes], value: bytes, wanted: object) -> bytes | None:
    """Put `value` in the place of the pattern's group where that makes the body mean `wanted`; None if nowhere."""
    for match in reversed(list(pattern.finditer(body))):
        spliced = body[: match.start(1)] + value + body[match.end(1) :]
        try:
            if orjson.loads(spliced) == wanted:
                return spliced
        except orjson.JSONDecodeError:
            continue
    return None
