"""The one change the gateway makes to a body outside disaggregation: an alias becomes the model's own name."""

import re

import orjson

_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')


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
    name = orjson.dumps(model)
    for match in reversed(list(_MODEL.finditer(body))):
        spliced = body[: match.start(1)] + name + body[match.end(1) :]
        try:
            if orjson.loads(spliced) == wanted:
                return spliced
        except orjson.JSONDecodeError:
            continue
    return orjson.dumps(wanted)
