"""Names of prefixes stand for the tokens: equal where the tokens are equal, and nowhere else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.synthesis import PromptSynthesizer
from loadtests.workloads.messages import chat_messages, part_text
from loadtests.workloads.prompt import Part, Prompt

# Few contents and short parts, so that prompts do share beginnings, and part ways inside parts.
parts = st.builds(Part, content=st.integers(0, 3), tokens=st.integers(1, 9))
prompts = st.lists(parts, min_size=1, max_size=6)


def tokens(row: list[Part]) -> list[tuple[int, int]]:
    """A stand-in for the token ids: no two contents have a token in common."""
    return [(part.content, number) for part in row for number in range(part.tokens)]


def shared(first: list[Part], second: list[Part]) -> int:
    """Tokens that both prompts begin with, found in the naive way."""
    count = 0
    for one, other in zip(tokens(first), tokens(second), strict=False):
        if one != other:
            break
        count += 1
    return count


@given(prompts, prompts, st.integers(1, 5))
def test_block_names_are_equal_exactly_as_far_as_the_tokens_are(
    first: list[Part], second: list[Part], block_tokens: int
) -> None:
    one, other = Prompt(first).names_every(block_tokens), Prompt(second).names_every(block_tokens)
    assert len(one) == Prompt(first).tokens // block_tokens
    equal = [a == b for a, b in zip(one, other, strict=False)]
    assert sum(equal) == shared(first, second) // block_tokens
    assert equal == sorted(equal, reverse=True)
    assert len(set(one)) == len(one)


@given(prompts, st.integers(1, 5))
def test_names_at_any_positions_are_the_same_names(row: list[Part], step: int) -> None:
    prompt = Prompt(row)
    assert prompt.names_at(list(range(step, prompt.tokens + 3 * step, step))) == prompt.names_every(step)
    assert prompt.names_at([prompt.tokens]) == [prompt.name]


@given(prompts, prompts)
def test_a_longer_prompt_keeps_the_names(row: list[Part], more: list[Part]) -> None:
    prompt = Prompt(row)
    before = prompt.names_every(1)
    longer = prompt.extended(*more)
    assert longer.names_every(1) == Prompt(row + more).names_every(1)
    assert longer.names_every(1)[: prompt.tokens] == before == prompt.names_every(1)


def test_names_fit_the_gateways_hashes() -> None:
    prompt = Prompt(Part(content, 100_000) for content in range(50))
    assert all(0 <= name < 1 << 60 for name in prompt.names_every(4096))


def test_an_empty_part_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Prompt([Part(1, 0)])


def test_text_of_parts() -> None:
    synthesizer = PromptSynthesizer(seed=1)
    long, short = part_text(Part(7, 1500), synthesizer), part_text(Part(7, 700), synthesizer)
    assert len(long) == 6000
    assert long.startswith(short)
    assert part_text(Part(8, 700), synthesizer)[:16] != short[:16]


def test_messages_of_a_growing_conversation() -> None:
    synthesizer = PromptSynthesizer()
    first = Prompt([Part(1, 20, "system"), Part(2, 10), Part(3, 10)])
    second = first.extended(Part(4, 30, "assistant"), Part(5, 10, "tool"))
    before, after = chat_messages(first, synthesizer), chat_messages(second, synthesizer)
    assert [message["role"] for message in after] == ["system", "user", "assistant", "user"]
    assert after[: len(before)] == before
    assert len(before[1]["content"]) == 80
