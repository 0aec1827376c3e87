"""A request body, parsed once: the few fields the gateway acts on, and the key of its prompt.

What the replica validates is left to the replica. Only what would make the gateway misread the request is
refused here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import orjson

from gateway.prompt.blocks import DEFAULT_SCHEDULE, BlockSchedule, PromptKey, prompt_key
from gateway.prompt.canonical import canonical_prompt, pool_seed
from gateway.prompt.messages import Written
from gateway.prompt.speedups import read_chat

_CHAT_PATHS = frozenset({"/v1/chat/completions", "/v1/messages"})

_MAX_NATIVE_BYTES = 1 << 20
"""Of larger bodies orjson does all: the other parser keeps 15 bytes for each of the longest it has seen."""


class InvalidBody(ValueError):
    """The body cannot be served: answer 400 with these parts of OpenAI's error object."""

    def __init__(self, message: str, param: str | None, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


@dataclass(slots=True, init=False)
class RequestBody:
    """What the gateway reads of a request body."""

    model: str | None
    stream: bool
    include_usage: bool
    """The client asked for a usage chunk at the end of the stream."""
    max_tokens: int | None
    """The request's own limit on output tokens; None when it states none (or nonsense)."""
    n: int
    """Answers asked for."""
    user: str | None
    prompt: PromptKey | None
    """None when the body has no canonical prompt; such requests are routed by load."""
    document: dict[str, Any] | None
    """The whole body, if asked for: whoever tokenises the prompt takes it."""
    divisible: bool
    """Its prompt may be computed on one replica and its answer on another."""
    transfer_params: bool
    """It has `kv_transfer_params` of its own."""

    def __init__(
        self,
        model: str | None,
        stream: bool,
        include_usage: bool,
        max_tokens: int | None,
        n: int,
        user: str | None,
        prompt: PromptKey | None,
        document: dict[str, Any] | None = None,
        divisible: bool = False,
        transfer_params: bool = False,
    ) -> None:
        """Put together what has been read."""
        self.model = model
        self.stream = stream
        self.include_usage = include_usage
        self.max_tokens = max_tokens
        self.n = n
        self.user = user
        self.prompt = prompt
        self.document = document
        self.divisible = divisible
        self.transfer_params = transfer_params


def parse_body(
    path: str,
    body: bytes | bytearray | memoryview,
    schedule: BlockSchedule = DEFAULT_SCHEDULE,
    served_names: Mapping[str, str] | None = None,
    keep_document: bool = False,
) -> RequestBody:
    """Parse a JSON request body.

    Args:
        path: path of the request, without query; it says where the prompt is.
        body: the bytes as received.
        schedule: where canonical prompts are cut into blocks.
        served_names: model aliases and what they stand for, so that a prompt has one key under all of its
            model's names.
        keep_document: whether the result keeps the whole body.

    Raises:
        InvalidBody: if the body is not a JSON object in UTF-8, or `model` or `stream` has the wrong type.
    """
    document: Any = None
    written: Written | None = None
    if not keep_document:
        document, written = _read_chat(path, body)
    if document is None:
        try:
            document = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            _refuse_json(body, error)
    if type(document) is not dict:
        message = f"The request body must be a JSON object, but is {_type_name(document)}."
        raise InvalidBody(message, None, "invalid_json")
    get = document.get
    model = get("model")
    if model is not None and type(model) is not str:
        _refuse_type("model", "a string", model)
    stream = get("stream")
    include_usage = False
    if stream is True:
        options = get("stream_options")
        include_usage = type(options) is dict and options.get("include_usage") is True
    elif stream is None:
        stream = False
    elif stream is not False:
        _refuse_type("stream", "a boolean", stream)
    max_tokens = get("max_completion_tokens")
    if max_tokens is None:
        max_tokens = get("max_tokens")
        if max_tokens is None:
            max_tokens = get("max_output_tokens")
            if max_tokens is None and type(sampling := get("sampling_params")) is dict:
                max_tokens = sampling.get("max_tokens")
    if type(max_tokens) is not int or max_tokens < 0:
        max_tokens = None
    n, user = get("n"), get("user")
    prompt = None
    salt = get("cache_salt")
    canonical = canonical_prompt(path, document, written)
    if canonical is not None and (salt is None or type(salt) is str):
        name = model or ""
        if served_names:
            name = served_names.get(name, name)
        data, exact_tokens, media, answer = canonical
        prompt = prompt_key(data, pool_seed(name, salt), exact_tokens, media, schedule, answer)
        # vLLM, `SamplingParams.skip_reading_prefix_cache`: with logprobs of the prompt the cache is not read. `echo`
        # asks for them when there are logprobs at all.
        if get("prompt_logprobs") is not None or (
            get("echo") is True and (get("logprobs") is not None or get("top_logprobs") is not None)
        ):
            prompt.computed_anew = True
    return RequestBody(
        model,
        stream,
        include_usage,
        max_tokens,
        n if type(n) is int and n > 0 else 1,
        user if type(user) is str else None,
        prompt,
        document if keep_document else None,
        prompt is not None and is_divisible(path, document, prompt),
        get("kv_transfer_params") is not None,
    )


def _read_chat(path: str, body: bytes | bytearray | memoryview) -> tuple[dict[str, Any] | None, Written | None]:
    """Parse a chat without making objects of its messages; None and None where that is not possible."""
    if read_chat is None or type(body) is not bytes or path not in _CHAT_PATHS or len(body) > _MAX_NATIVE_BYTES:
        return None, None
    read = read_chat(body)
    if read is None:
        return None, None
    document, nested, written = read
    for name, json, is_sorted in nested:
        if is_sorted and name == "tools" and len(json) > 2:
            # Often long, and nobody but the canonical form is interested.
            document[name] = orjson.Fragment(json)
        else:
            document[name] = orjson.loads(json)
    return document, written


_DIVISIBLE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})


def is_divisible(path: str, document: Mapping[str, Any], prompt: PromptKey) -> bool:
    """Say whether the prompt of a request may be computed on one replica and its answer on another.

    vLLM ties one hand-off to one sequence, and the prefill replica frees the blocks after the first read. So there must
    be one prompt and one answer, and the engine must not be asked for the logprobs of the prompt. An answer that has to
    be a tool call cannot be cut after one token: vLLM then fails to parse it. Media are left out because positions in
    tokens are not known.

    Args:
        path: path of the request, without query.
        document: its body.
        prompt: its prompt.
    """
    if path not in _DIVISIBLE_PATHS or prompt.media or prompt.computed_anew:
        return False
    get = document.get
    texts = get("prompt")
    return (
        (get("n") is None or get("n") == 1)
        and get("best_of") in (None, 1)
        and not get("use_beam_search")
        and not get("echo")
        and get("tool_choice") in (None, "auto", "none")
        # A list of numbers is one prompt in tokens; a list of anything else is several.
        and (type(texts) is not list or not texts or type(texts[0]) is int or len(texts) == 1)
    )


def _refuse_json(body: bytes | bytearray | memoryview, error: orjson.JSONDecodeError) -> NoReturn:
    if not bytes(body).strip():
        raise InvalidBody("The request body is empty; send a JSON object.", None, "invalid_json") from None
    reason = str(error)
    if "UTF-8" in reason and "BOM" not in reason:
        reason = "it is not UTF-8"
    elif "surrogate" in reason:
        reason = f"a \\u escape is half of a surrogate pair ({reason})"
    raise InvalidBody(f"The request body is not valid JSON: {reason}.", None, "invalid_json") from None


def _refuse_type(param: str, expected: str, value: object) -> NoReturn:
    message = f"Invalid type for '{param}': expected {expected}, but got {_type_name(value)} instead."
    raise InvalidBody(message, param, "invalid_type")


_TYPE_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def _type_name(value: object) -> str:
    return _TYPE_NAMES[type(value)]
