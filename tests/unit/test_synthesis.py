"""Prompt text from block ids: what is shared in the trace is shared in the text, and nothing else."""

import subprocess
import sys

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.synthesis import HEAD_BYTES, PromptSynthesizer, chat_body

SYNTHESIZER = PromptSynthesizer(seed=1)
SAME = PromptSynthesizer(seed=1)
IDS = st.integers(0, 2**64 - 1)


@given(IDS)
def test_a_block_is_512_tokens_of_printable_ascii(hash_id: int) -> None:
    block = SYNTHESIZER.block(hash_id)
    assert len(block.encode("ascii")) == 512 * 4
    assert block.isprintable()
    assert block == SAME.block(hash_id)


@given(st.lists(IDS, min_size=2, max_size=50, unique=True))
def test_different_ids_differ_in_their_head(hash_ids: list[int]) -> None:
    assert len({SYNTHESIZER.block(hash_id)[:HEAD_BYTES] for hash_id in hash_ids}) == len(hash_ids)


def test_neighbouring_ids_differ_in_their_head() -> None:
    assert len({SYNTHESIZER.block(hash_id)[:HEAD_BYTES] for hash_id in range(20_000)}) == 20_000


def test_most_of_a_block_is_words_of_the_id() -> None:
    first, second = SYNTHESIZER.block(1), SYNTHESIZER.block(2)
    assert first[HEAD_BYTES:] != second[HEAD_BYTES:]
    assert 300 < len(first.split()) < 700


@given(st.lists(IDS, min_size=1, max_size=4), st.data())
def test_a_prompt_is_its_blocks_cut_to_length(hash_ids: list[int], data: st.DataObject) -> None:
    tokens = data.draw(st.integers(512 * (len(hash_ids) - 1) + 1, 512 * len(hash_ids)))
    text = SYNTHESIZER.text(hash_ids, tokens)
    assert len(text) == 4 * tokens
    assert "".join(map(SYNTHESIZER.block, hash_ids)).startswith(text)


def test_another_seed_is_another_text() -> None:
    assert PromptSynthesizer(seed=2).block(0)[:HEAD_BYTES] != SYNTHESIZER.block(0)[:HEAD_BYTES]


def test_bytes_per_token() -> None:
    assert len(PromptSynthesizer(bytes_per_token=3).text([8], 100)) == 300
    with pytest.raises(ValueError, match="at least 1"):
        PromptSynthesizer(bytes_per_token=0)


def test_blocks_that_do_not_cover_the_prompt() -> None:
    with pytest.raises(ValueError, match="do not cover 513 tokens"):
        SYNTHESIZER.text([1], 513)


def test_the_text_does_not_depend_on_the_process() -> None:
    program = "from loadtests.synthesis import PromptSynthesizer as P; print(P(seed=1).text([3, 4], 700), end='')"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout == SYNTHESIZER.text([3, 4], 700)


def test_the_request_streams_and_asks_for_usage_and_an_exact_length() -> None:
    body = orjson.loads(chat_body('say "hi"', "llama", 5))
    assert body["messages"] == [{"role": "user", "content": 'say "hi"'}]
    assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("llama", 5, True)
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
