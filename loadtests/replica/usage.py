"""The usage of an answer: how many tokens, and how many of them were cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtests.replica.answering import Choice
from loadtests.replica.replica import Replica


def prompt_tokens(choices: Sequence[Choice]) -> int:
    """Prompt tokens of an answer; a prompt with several choices counts once."""
    return sum(choice.prompt.count for choice in _one_per_prompt(choices))


def cached_tokens(choices: Sequence[Choice]) -> int:
    """Prompt tokens of an answer that were found in the prefix cache."""
    return sum(choice.cached_tokens for choice in _one_per_prompt(choices))


def _one_per_prompt(choices: Sequence[Choice]) -> list[Choice]:
    return list({id(choice.prompt): choice for choice in reversed(choices)}.values())


def continuous_usage(choice: Choice, completion: int) -> bytes:
    """The usage so far, as a field of a chunk."""
    prompt = choice.prompt.count
    return (
        b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,'
        b'"completion_tokens_details":null}' % (prompt, prompt + completion, completion)
    )


def usage(
    replica: Replica, choices: Sequence[Choice], details: dict[str, Any], *, streamed: bool = False
) -> dict[str, Any]:
    """The usage of an answer.

    Args:
        replica: whose answer.
        choices: the choices of the answer.
        details: what follows `cached_tokens` in the details of the prompt.
        streamed: in the final chunk of a stream, where fields without a value are left out.
    """
    prompt = prompt_tokens(choices)
    completion = sum(choice.max_tokens for choice in choices)
    body: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    if replica.config.enable_prompt_tokens_details:
        body["prompt_tokens_details"] = {"cached_tokens": cached_tokens(choices), **details}
    elif not streamed:
        body["prompt_tokens_details"] = None
    if not streamed:
        body["completion_tokens_details"] = None
    return body


def answer_ids(replica: Replica, text: bytes) -> list[int]:
    """Token ids of made-up text."""
    return replica.tokenizer.from_text(text).ids()
