"""Prompts as chat messages, for load over HTTP: equal parts become equal text.

A part's text is that of the trace synthesiser, block by block, each block named by the part's content and its number.
Parts of one role that follow each other are one message.
"""

from itertools import groupby
from operator import attrgetter

from xxhash import xxh3_64_intdigest

from loadtests.synthesis import PromptSynthesizer
from loadtests.trace import BLOCK_TOKENS
from loadtests.workloads.prompt import Part, Prompt

# A tool's message would need the call it answers; a user's has the same tokens.
_ROLES = {"system": "system", "assistant": "assistant"}


def part_text(part: Part, synthesizer: PromptSynthesizer) -> str:
    """Text of a part, of the synthesiser's bytes per token; that of a shorter part of its content is a prefix of it."""
    blocks = -(-part.tokens // BLOCK_TOKENS)
    content = part.content.to_bytes(8, "little")
    ids = [xxh3_64_intdigest(content, number) for number in range(blocks)]
    return synthesizer.text(ids, part.tokens)


def chat_messages(prompt: Prompt, synthesizer: PromptSynthesizer) -> list[dict[str, str]]:
    """The `messages` of a chat completion request."""
    return [
        {
            "role": _ROLES.get(role, "user"),
            "content": "".join(part_text(part, synthesizer) for part in parts),
        }
        for role, parts in groupby(prompt.parts, key=attrgetter("role"))
    ]
