"""The simulated replica's tokeniser, chat template and block hashes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.replica.template import render_chat
from loadtests.replica.tokens import Tokenizer

BLOCK = 4


def make(width: int = 4, seed: int = 0) -> Tokenizer:
    return Tokenizer(width, BLOCK, seed)


def hashes(tokenizer: Tokenizer, text: bytes, answer: bytes = b"", root: int = 7) -> list[int]:
    return tokenizer.block_hashes(tokenizer.from_text(text), answer, root)


@given(text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), width=st.integers(1, 7))
def test_ids_and_text_convert_into_each_other(text: str, width: int) -> None:
    tokenizer = make(width)
    tokens = tokenizer.from_text(text.encode())
    ids = tokens.ids()
    assert len(ids) == tokens.count == -(-len(text.encode()) // width)
    assert tokenizer.from_ids(ids) == tokens
    assert tokenizer.text(tokens) == text


def test_ids_beyond_the_pieces_keep_apart() -> None:
    tokenizer = make(2)
    narrow, wide = tokenizer.from_ids([1, 2, 3, 4]), tokenizer.from_ids([1, 2, 3, 1 << 40])
    assert (narrow.count, wide.count) == (4, 4)
    assert wide.ids() == [1, 2, 3, 1 << 40]
    assert tokenizer.block_hashes(narrow, b"", 7) != tokenizer.block_hashes(wide, b"", 7)
    answer = tokenizer.answer(wide, 7, 0, 8)
    assert len(tokenizer.block_hashes(wide, answer, 7)) == 3


@pytest.mark.parametrize(("ids", "error"), [([-1], ValueError), ([1 << 64], ValueError), ([1, "a"], TypeError)])
def test_impossible_ids(ids: list[Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        make().from_ids(ids)


@given(head=st.binary(max_size=200), one=st.binary(max_size=50), other=st.binary(max_size=50))
def test_texts_share_exactly_the_blocks_of_their_common_prefix(head: bytes, one: bytes, other: bytes) -> None:
    tokenizer = make()
    first, second = head + one, head + other
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    shared = common // (4 * BLOCK)
    # Padding with zeros completes a piece, and so may a text that goes on with zeros.
    if first.rstrip(b"\0") == first and second.rstrip(b"\0") == second:
        a, b = hashes(tokenizer, first), hashes(tokenizer, second)
        assert a[:shared] == b[:shared]
        assert not set(a[shared:]) & set(b[shared:]) or first == second


def test_a_hash_names_its_whole_prefix() -> None:
    tokenizer = make()
    block = b"0123456789abcdef"
    assert hashes(tokenizer, block * 2)[1] != hashes(tokenizer, block)[0]
    assert len(set(hashes(tokenizer, block * 50))) == 50
    assert not set(hashes(tokenizer, block * 5, root=1)) & set(hashes(tokenizer, block * 5, root=2))


def test_roots_part_adapters_and_salts() -> None:
    tokenizer = make()
    roots = [tokenizer.root(*parts) for parts in (("", ""), ("a", ""), ("", "a"), ("a", "a"), ("b", ""))]
    assert len(set(roots)) == 5


@given(width=st.integers(1, 7), tokens=st.integers(1, 100))
def test_answers_are_repeatable_prefixes_in_plain_ascii(width: int, tokens: int) -> None:
    tokenizer = make(width)
    prompt = tokenizer.from_text(b"a prompt")
    answer = tokenizer.answer(prompt, 7, 0, tokens)
    assert len(answer) == tokens * width
    assert answer.isascii()
    assert b'"' not in answer
    assert b"\\" not in answer
    assert tokenizer.answer(prompt, 7, 0, tokens + 50).startswith(answer)


def test_answers_depend_on_prompt_choice_root_and_seed() -> None:
    tokenizer = make()
    prompt = tokenizer.from_text(b"a prompt")
    answers = {
        tokenizer.answer(prompt, 7, 0, 20),
        tokenizer.answer(prompt, 7, 1, 20),
        tokenizer.answer(prompt, 8, 0, 20),
        tokenizer.answer(tokenizer.from_text(b"another"), 7, 0, 20),
        make(seed=1).answer(prompt, 7, 0, 20),
    }
    assert len(answers) == 5


contents = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(system=contents, questions=st.lists(contents, min_size=1, max_size=4), width=st.integers(1, 7))
def test_next_turn_extends_the_tokens_and_hashes_of_turn_and_answer(
    system: str, questions: list[str], width: int
) -> None:
    tokenizer = make(width)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    before: list[int] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.from_text(render_chat(messages, None, width))
        now = tokenizer.block_hashes(prompt, b"", 7)
        assert now[: len(before)] == before
        answer = tokenizer.answer(prompt, 7, 0, 9)
        before = tokenizer.block_hashes(prompt, answer, 7)
        assert len(before) == (prompt.count + 9) // BLOCK
        messages.append({"role": "assistant", "content": answer.decode()})


@pytest.mark.parametrize(
    "change",
    [
        {"role": "assistant"},
        {"content": "hellp"},
        {"content": [{"type": "text", "text": "hello"}, {"type": "image_url", "image_url": {"url": "x"}}]},
        {"tool_calls": [{"id": "1"}]},
    ],
)
def test_what_differs_in_meaning_differs_in_text(change: dict[str, Any]) -> None:
    message = {"role": "user", "content": "hello"}
    assert render_chat([message], None, 4) != render_chat([message | change], None, 4)


def test_parts_of_text_are_their_text() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert render_chat([{"role": "user", "content": parts}], None, 4) == render_chat(
        [{"role": "user", "content": "hello"}], None, 4
    )


def test_images_differ_by_address_and_tools_come_first() -> None:
    def image(url: str) -> bytes:
        content = [{"type": "image_url", "image_url": {"url": url}}]
        return render_chat([{"role": "user", "content": content}], None, 4)

    assert image("a") != image("b")
    tools = [{"type": "function", "function": {"name": "look"}}]
    with_tools = render_chat([{"role": "user", "content": "hello"}], tools, 4)
    assert with_tools.index(b"look") < with_tools.index(b"hello")
