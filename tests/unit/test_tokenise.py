"""Text to tokens: pieces with a memory are equal to the whole; what the engine is given is what is tokenised here."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import model_files
from tokenizers import Tokenizer

from gateway.prompt.tokenise.model_files import load_model
from gateway.prompt.tokenise.text import TextTokens

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(Path(model_files.__file__).parent.glob("*.py"))]


def _qwen_like() -> Tokenizer:
    return model_files.byte_level_bpe(TEXTS)


def _with_greedy_tokens() -> Tokenizer:
    """Special tokens that take white space on their right (Phi-3) and on their left."""
    tokenizer = model_files.byte_level_bpe(TEXTS)
    model_files.add(tokenizer, "<|end|>", rstrip=True)
    model_files.add(tokenizer, "<mask>", lstrip=True)
    return tokenizer


KINDS: dict[str, tuple[Callable[[], Tokenizer], list[str]]] = {
    "byte-level BPE": (_qwen_like, list(model_files.CHATML_SPECIAL)),
    "greedy special tokens": (_with_greedy_tokens, [*model_files.CHATML_SPECIAL, "<|end|>", "<mask>"]),
    "SentencePiece, legacy": (lambda: model_files.sentencepiece_like(TEXTS, True), ["<s>", "</s>"]),
    "SentencePiece": (lambda: model_files.sentencepiece_like(TEXTS, False), ["<s>", "</s>"]),
    "bytes": (model_files.byte_tokenizer, []),
}
_made: dict[str, TextTokens] = {}


def tokens_of(kind: str, cache_bytes: int = 1 << 20) -> TextTokens:
    if cache_bytes != 1 << 20:
        return TextTokens(KINDS[kind][0](), cache_bytes)
    if kind not in _made:
        _made[kind] = TextTokens(KINDS[kind][0](), cache_bytes)
    return _made[kind]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_pieces_are_equal_to_the_whole(kind: str, data: st.DataObject) -> None:
    special = KINDS[kind][1]
    text = data.draw(
        st.lists(
            st.one_of(
                st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12),
                st.sampled_from([" ", "\n", "  ", "\n\n", "\t", "user\n", "<|im_", "|>", "e\u0301", "İ", "▁", "x = 1"]),
                st.sampled_from(special or [""]),
            ),
            max_size=20,
        ).map("".join)
    )
    tokens = tokens_of(kind)
    for add_special_tokens in (False, True):
        if text:
            assert tokens.encode(text, add_special_tokens) == tokens.whole(text, add_special_tokens)
    assert tokens.encode(text, False) == tokens.whole(text, False)  # from memory now


@pytest.mark.parametrize("kind", [kind for kind, (_, special) in KINDS.items() if special])
def test_the_usual_tokenizers_are_cut(kind: str) -> None:
    assert tokens_of(kind).cuts


def test_the_next_turn_tokenises_only_what_is_new() -> None:
    tokens = tokens_of("byte-level BPE", 2 << 20)
    turns = ["<|im_start|>system\n" + "You are helpful. " * 500 + "<|im_end|>\n"]
    for turn in range(10):
        turns.append(f"<|im_start|>user\nQuestion {turn}: {'why? ' * 100}<|im_end|>\n")
        before = tokens.misses
        tokens.encode("".join(turns) + "<|im_start|>assistant\n", False)
        # System, its end, question, head of the answer; later the last answer and the next question.
        assert tokens.misses - before == (4 if turn == 0 else 2)
        turns.append(f"<|im_start|>assistant\nAnswer {turn}<|im_end|>\n")


def test_the_memory_is_bounded() -> None:
    tokens = tokens_of("byte-level BPE", 10_000)
    generator = random.Random(1)
    for _ in range(200):
        text = "<|im_start|>" + "".join(generator.choices("abc def\n", k=200))
        assert tokens.encode(text, False) == tokens.whole(text, False)
        assert tokens.held_bytes <= 10_000
    assert tokens.encode("<|im_start|>" + "x " * 20_000, False)  # larger than the memory
    assert tokens.held_bytes <= 10_000


def test_a_token_that_must_stand_between_words_prevents_cuts() -> None:
    tokenizer = model_files.byte_level_bpe(TEXTS)
    model_files.add(tokenizer, "STOP", single_word=True)
    tokens = TextTokens(tokenizer, 1 << 20)
    assert not tokens.cuts
    for text in ("<|im_start|>STOP<|im_end|>", "nonSTOP<|im_start|> STOP "):
        assert tokens.encode(text, False) == tokens.whole(text, False)


def test_truncation_and_padding_of_the_file_do_not_count(tmp_path: Path) -> None:
    tokenizer = model_files.byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    model = load_model(model_files.write_model(tmp_path, tokenizer))
    assert len(model.text.encode("abcdefgh", False)) == 8 * 4


def test_model_files(tmp_path: Path) -> None:
    directory = model_files.write_model(tmp_path / "m", model_files.byte_tokenizer(), "from config {{ bos_token }}")
    messages = {"messages": [{"role": "user", "content": "x"}]}
    model = load_model(directory / "tokenizer.json")
    assert model.template is not None
    assert model.template.render(messages) == "from config <|endoftext|>"
    (directory / "chat_template.jinja").write_text("from file {{ eos_token }}")
    model = load_model(directory)
    assert model.template is not None
    assert model.template.render(messages) == "from file <|im_end|>"
    other = tmp_path / "other.jinja"
    other.write_text("given")
    model = load_model(directory, other)
    assert model.template is not None
    assert model.template.render(messages) == "given"
    bare = model_files.write_model(tmp_path / "bare", model_files.byte_tokenizer(), None)
    assert load_model(bare).template is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    several = model_files.write_model(tmp_path / "several", model_files.byte_tokenizer(), None, chat_template=named)
    model = load_model(several)
    assert model.template is not None
    assert model.template.render(messages) == "plain"


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_model(tmp_path)
    broken = model_files.write_model(tmp_path / "broken", model_files.byte_tokenizer(), "{% for %}")
    with pytest.raises(ValueError, match="chat template, line 1"):
        load_model(broken)
