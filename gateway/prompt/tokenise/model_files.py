"""The files of a model that make its tokens: tokenizer.json, tokenizer_config.json, the chat template."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway.prompt.tokenise.chat_template import ChatTemplate
from gateway.prompt.tokenise.text import TextTokens

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelTokens:
    """What is needed to tokenise one model's prompts.

    Attributes:
        text: tokenises text.
        template: renders chats; None if the model has no template.
    """

    __slots__ = ("template", "text")

    def __init__(self, text: TextTokens, template: ChatTemplate | None) -> None:
        self.text = text
        self.template = template


def load_model(path: Path, chat_template: Path | None = None, cache_bytes: int = 64 << 20) -> ModelTokens:
    """Read a model's tokenizer and template.

    Args:
        path: the model's directory, or its tokenizer.json; the other files are looked for beside it.
        chat_template: a Jinja file to use instead of the model's own, as vLLM's `--chat-template`.
        cache_bytes: memory for tokens of text seen before.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not what it should be.
    """
    directory = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file}: there is no tokenizer here")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        # The library raises plain Exception for whatever is wrong with the file.
        raise ValueError(f"{file}: {error}") from error
    config = _read_json(directory / "tokenizer_config.json")
    source = _template_source(directory, config, chat_template)
    template = ChatTemplate(source, _special_tokens(config)) if source is not None else None
    return ModelTokens(TextTokens(tokenizer, cache_bytes), template)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"{path}: not an object")
    return document


def _template_source(directory: Path, config: dict[str, Any], override: Path | None) -> str | None:
    if override is not None:
        return override.read_text(encoding="utf-8")
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for given in (config.get("chat_template"), _read_json(directory / "chat_template.json").get("chat_template")):
        if isinstance(given, list):
            # Several by name; vLLM takes the default one (and, where there is one, `tool_use` for tools).
            named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
            given = named.get("default")
        if isinstance(given, str):
            return given
    return None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
