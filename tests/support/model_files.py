"""Tokenizers and chat templates in directories as models have them. Nothing is downloaded."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im|>")
# The split of Qwen and others: contractions, words with one character before, digits one by one, white space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_model(directory: Path, tokenizer: Tokenizer, template: str | None = CHATML, **config: object) -> Path:
    """Write the files of a model; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    document = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}, **config}
    if template is not None:
        document["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(document))
    return directory


def byte_tokenizer() -> Tokenizer:
    """One token per byte, the byte's value its id: the simulated replica's tokens at one byte a token."""
    names = _byte_names()
    tokenizer = Tokenizer(models.BPE({name: byte for byte, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level_bpe(texts: Iterable[str], vocabulary: int = 1200, special: Iterable[str] = CHATML_SPECIAL) -> Tokenizer:
    """A tokenizer in the manner of Qwen's, trained on some text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sentencepiece_like(texts: Iterable[str], legacy: bool) -> Tokenizer:
    """A tokenizer in the manner of Llama 2's: spaces as a letter, one put in front, BOS before every prompt."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def add(tokenizer: Tokenizer, content: str, **options: bool) -> None:
    """Add a special token that differs from the usual ones."""
    tokenizer.add_special_tokens([AddedToken(content, **{"normalized": False, **options})])


def _regex(pattern: str) -> object:
    from tokenizers import Regex

    return Regex(pattern)


def _byte_names() -> list[str]:
    """GPT-2's names of the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    names, beyond = {byte: chr(byte) for byte in printable}, 0
    for byte in range(256):
        if byte not in names:
            names[byte] = chr(256 + beyond)
            beyond += 1
    return [names[byte] for byte in range(256)]
