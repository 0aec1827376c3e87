"""What a hand-off changes in bodies: the first request, what its answer brings, and the second request.

The second request is the client's own, byte for byte, with one member more. The first is written anew: nobody reads
its answer but the gateway. What could change the prompt is left as it is in both, because KV is right only for the very
prompt it was computed from.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

_MEMBER = re.compile(r'"kv_transfer_params"\s*:\s*')
_NULL_MEMBER = re.compile(rb'"kv_transfer_params"\s*:\s*null')
_DECODER = json.JSONDecoder()

# vLLM refuses some of these with one token or without a stream (min_tokens, stream_options), and the rest only makes
# the answer longer. None of them is part of the prompt.
_DROPPED = (
    "stream_options",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "n",
    "best_of",
)

IDENTITY = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size")
"""What of a prefill replica's parameters is the same for all its requests; a push needs nothing else of it."""


def prefill_body(body: bytes, *, transfer: bool) -> bytes:
    """Return the body of the first request: the client's, cut to one token and told to keep the KV.

    Args:
        body: the client's, a JSON object, parsed before.
        transfer: the connector goes by `kv_transfer_params`; False for one that finds KV by the prompt alone.
    """
    document: dict[str, Any] = orjson.loads(body)
    for name in _DROPPED:
        document.pop(name, None)
    document["max_tokens"] = 1
    if document.get("max_completion_tokens") is not None:
        document["max_completion_tokens"] = 1
    document["stream"] = False
    document.pop("kv_transfer_params", None)
    if transfer:
        document["kv_transfer_params"] = {"do_remote_decode": True}
    return orjson.dumps(document)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What the answer to the first request says.

    Attributes:
        params: its `kv_transfer_params` as they were written; None where there are none that could be used.
        identity: where the KV is, without what belongs to this one request; None with `params`.
        prompt_tokens, cached_tokens: of its usage, None where it does not say.
    """

    params: bytes | None
    identity: Mapping[str, Any] | None
    prompt_tokens: int | None
    cached_tokens: int | None


def read_prefilled(answer: bytes) -> Prefilled:
    """Read the answer to the first request.

    Raises:
        ValueError: it is not a JSON object.
    """
    document = orjson.loads(answer)
    if not isinstance(document, dict):
        raise ValueError("the answer is not an object")
    usage = document.get("usage")
    prompt_tokens = cached_tokens = None
    if isinstance(usage, dict):
        prompt_tokens = _count(usage.get("prompt_tokens"))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            cached_tokens = _count(details.get("cached_tokens"))
    params = document.get("kv_transfer_params")
    if not isinstance(params, dict) or not _usable(params):
        return Prefilled(None, None, prompt_tokens, cached_tokens)
    identity = {name: params[name] for name in IDENTITY if name in params}
    return Prefilled(_as_written(answer, params), identity, prompt_tokens, cached_tokens)


def _usable(params: dict[str, Any]) -> bool:
    """Without a remote request id the decode request hangs, and its end takes the whole engine with it."""
    names = (params.get("remote_request_id"), params.get("remote_engine_id"))
    return (
        params.get("do_remote_prefill") is True
        and all(isinstance(name, str) and name for name in names)
        and isinstance(params.get("remote_block_ids"), list)
    )


def _as_written(answer: bytes, params: dict[str, Any]) -> bytes:
    """Return the object's own bytes: no number and no order in it is to change on the way."""
    text = answer.decode()
    for match in reversed(list(_MEMBER.finditer(text))):
        try:
            _, end = _DECODER.raw_decode(text, match.end())
            written = text[match.end() : end].encode()
            if orjson.loads(written) == params:
                return written
        except json.JSONDecodeError:
            # Inside a string it is text that only looks like a member.
            continue
    return orjson.dumps(params)


def pushed_params(identity: Mapping[str, Any], request_id: bytes) -> bytes:
    """Return the parameters of a decode request into which a prefill replica pushes (NixlPushConnector).

    vLLM's examples/disaggregated, disagg_proxy_pushconnector_demo.py: the coordinates of the prefill replica and the
    request id that both requests have; no block ids, because the decode replica says where it wants them.
    """
    return orjson.dumps(
        {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            **identity,
            "remote_request_id": request_id.decode("latin-1"),
        }
    )


def with_transfer_params(body: bytes, params: bytes) -> bytes:
    """Return a body with `kv_transfer_params`, every other byte as it was.

    Args:
        body: a JSON object with at least one key, parsed before; has none of its own, or null.
        params: the member's value as JSON.
    """
    if b"kv_transfer_params" in body:
        for match in _NULL_MEMBER.finditer(body):
            spliced = body[: match.end() - 4] + params + body[match.end() :]
            if orjson.loads(spliced).get("kv_transfer_params") is not None:
                return spliced
    end = body.rindex(b"}")
    return body[:end] + b',"kv_transfer_params":' + params + body[end:]


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
