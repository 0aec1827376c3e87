"""The tokens of a request's prompt, whichever API it came by."""

from collections.abc import Callable
from typing import Any

from gateway.prompt.token_chain import MediaItem, TokenPrompt, pack
from gateway.prompt.tokenise.anthropic import chat_of
from gateway.prompt.tokenise.conversation import Document, NoTokensError
from gateway.prompt.tokenise.model_files import ModelTokens

_Tokens = tuple[bytes, tuple[MediaItem, ...]]


def prompt_tokens(path: str, document: Document, model: ModelTokens | None, adapter: str) -> TokenPrompt:
    """Tokenise a prompt. Takes milliseconds for long ones: not for the event loop.

    Args:
        path: path of the request, without query.
        document: the parsed body.
        model: the model's tokenizer; None if there is none, then only prompts of token ids have tokens.
        adapter: name of the adapter the request is for; "" for the base model.

    Raises:
        NoTokensError: the tokens cannot be had; its reason is one of `api`, `form`, `media`, `no_tokenizer`,
            `several_prompts`, `template`, `truncation`.
    """
    form = _FORMS.get(path)
    if form is None:
        raise NoTokensError("api")
    salt = document.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise NoTokensError("form")
    packed, media = form(document, model)
    return TokenPrompt(packed, adapter, salt, media)


def _chat(document: Document, model: ModelTokens | None) -> _Tokens:
    if model is None:
        raise NoTokensError("no_tokenizer")
    if model.template is None:
        raise NoTokensError("template", "the model has no chat template")
    text = model.template.render(document)
    return model.text.encode(text, document.get("add_special_tokens") is True), ()


def _messages(document: Document, model: ModelTokens | None) -> _Tokens:
    system_first = model is not None and model.template is not None and model.template.system_first
    return _chat(chat_of(document, system_first), model)


def _completion(document: Document, model: ModelTokens | None) -> _Tokens:
    if document.get("truncate_prompt_tokens") is not None:
        raise NoTokensError("truncation")
    if document.get("prompt_embeds") is not None:
        raise NoTokensError("media")
    prompt = document.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise NoTokensError("several_prompts")
        prompt = prompt[0]
    if isinstance(prompt, str):
        if model is None:
            raise NoTokensError("no_tokenizer")
        return model.text.encode(prompt, document.get("add_special_tokens") is not False), ()
    return _packed(prompt), ()


def _generate(document: Document, model: ModelTokens | None) -> _Tokens:
    features = document.get("features")
    return _packed(document.get("token_ids")), () if features is None else _media(features)


def _media(features: object) -> tuple[MediaItem, ...]:
    """Media of a prompt that comes rendered: what each is, and where its tokens are."""
    if not isinstance(features, dict):
        raise NoTokensError("form")
    hashes, places = features.get("mm_hashes"), features.get("mm_placeholders")
    if not isinstance(hashes, dict) or not isinstance(places, dict) or hashes.keys() != places.keys():
        raise NoTokensError("media")
    items: list[MediaItem] = []
    for kind, identifiers in hashes.items():
        ranges: Any = places[kind]
        try:
            for identifier, place in zip(identifiers, ranges, strict=True):
                first, length = place["offset"], place["length"]
                if not isinstance(identifier, str) or not isinstance(first, int) or not isinstance(length, int):
                    raise NoTokensError("media")
                items.append((identifier, first, length))
        except (TypeError, ValueError, KeyError):
            raise NoTokensError("media") from None
    if any(first < 0 or length < 1 for _, first, length in items):
        raise NoTokensError("media")
    return tuple(sorted(items, key=lambda item: item[1]))


def _packed(ids: object) -> bytes:
    if not isinstance(ids, list) or not ids:
        raise NoTokensError("form")
    try:
        return pack(ids)
    except ValueError:
        raise NoTokensError("form") from None


_FORMS: dict[str, Callable[[Document, ModelTokens | None], _Tokens]] = {
    "/v1/chat/completions": _chat,
    "/v1/messages": _messages,
    "/v1/completions": _completion,
    "/inference/v1/generate": _generate,
}
