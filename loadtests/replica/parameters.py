"""Parameters that several endpoints share, checked as vLLM checks them. Unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtests.replica.errors import ApiError, invalid, missing, validation_error
from loadtests.replica.template import render_chat
from loadtests.replica.tokens import Tokenizer, Tokens


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Whether to stream, and what of the usage."""

    stream: bool
    include_usage: bool
    continuous_usage: bool


def stream_options(body: Mapping[str, Any]) -> StreamOptions:
    """`stream` and `stream_options` of a body."""
    stream = bool(body.get("stream"))
    options = body.get("stream_options")
    if options and not stream:
        raise ApiError(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
    if not isinstance(options, Mapping):
        return StreamOptions(stream, False, False)
    include_usage = bool(options.get("include_usage"))
    return StreamOptions(stream, include_usage, include_usage and bool(options.get("continuous_usage_stats")))


def token_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields that is set: the client's limit of the answer."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise validation_error("int_type", f"body.{name}", "Input should be a valid integer", repr(value))
        if value < 1:
            invalid(name, f"{name} must be at least 1, got {value}.", value)
        return value
    return None


def choices_per_prompt(body: Mapping[str, Any]) -> int:
    """`n`, once the other sampling parameters make sense."""
    temperature = body.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        value = float(temperature)
        invalid("temperature", f"temperature must be non-negative, got {value}.", value)
    n = body.get("n")
    if n is None:
        return 1
    if not isinstance(n, int) or isinstance(n, bool):
        raise validation_error("int_type", "body.n", "Input should be a valid integer", repr(n))
    if n < 1:
        invalid("n", f"n must be at least 1, got {n}.", n)
    return n


def chat_prompt(body: dict[str, Any], tokenizer: Tokenizer) -> Tokens:
    """The prompt of a body with `messages`."""
    if "messages" not in body:
        raise missing(body, "messages")
    messages = body["messages"]
    if not isinstance(messages, list):
        raise validation_error(
            "list_type", "body.messages", "Input should be a valid list", f"<{type(messages).__name__}>"
        )
    if not all(isinstance(message, dict) for message in messages):
        given = f"<list of {len(messages)} items>"
        raise validation_error("dict_type", "body.messages", "Input should be a valid dictionary", given)
    if not messages:
        raise ApiError(400, "List should have at least 1 item after validation, not 0", param="messages")
    tools = body.get("tools")
    text = render_chat(
        messages,
        tools if isinstance(tools, list) else None,
        tokenizer.width,
        add_generation_prompt=body.get("add_generation_prompt") is not False,
    )
    return tokenizer.from_text(text)


def text_prompts(body: dict[str, Any], field: str, tokenizer: Tokenizer) -> list[Tokens]:
    """The prompts of a field that holds text, token ids, or a list of either."""
    if body.get(field) is None:
        raise missing(body, field)
    value = body[field]
    if isinstance(value, str):
        return [_text(value, field, tokenizer)]
    if not isinstance(value, list):
        raise _no_string(field, value)
    if value and _is_token(value[0]):
        return [_ids(value, field, tokenizer)]
    prompts = []
    for item in value:
        if isinstance(item, str):
            prompts.append(_text(item, field, tokenizer))
        elif isinstance(item, list):
            prompts.append(_ids(item, field, tokenizer))
        else:
            raise _no_string(field, item)
    if not prompts:
        raise ApiError(400, f"Please provide at least one {field}.", param=field)
    return prompts


def _text(value: str, field: str, tokenizer: Tokenizer) -> Tokens:
    if not value:
        raise ApiError(400, "The decoder prompt cannot be empty", param=field)
    return tokenizer.from_text(value.encode(errors="replace"))


def _ids(value: Sequence[Any], field: str, tokenizer: Tokenizer) -> Tokens:
    if not value:
        raise ApiError(400, "The decoder prompt cannot be empty", param=field)
    try:
        return tokenizer.from_ids(value)
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error), param=field) from None


def _no_string(field: str, value: object) -> ApiError:
    return validation_error("string_type", f"body.{field}", "Input should be a valid string", repr(value)[:100])


def _is_token(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
