"""Which paths are answered here, which go to a replica, and how their bodies are treated."""

from enum import StrEnum

from gateway.proxy.heads import RequestHead


class Handling(StrEnum):
    """What becomes of a request."""

    LOCAL = "local"
    """Answered by the gateway."""
    JSON = "json"
    """Buffered, parsed once, routed by its prompt."""
    PLAIN = "plain"
    """No body: routed by load."""
    STREAM = "stream"
    """A body that is not JSON: streamed through, routed by load."""
    NOT_FOUND = "not_found"


# vLLM's API outside /v1/. Its development and operations paths (/sleep, /reset_prefix_cache, /collective_rpc, /metrics,
# LoRA loading ...) act on one replica and are not for clients.
_ENGINE_PATHS = frozenset(
    {
        b"/tokenize",
        b"/detokenize",
        b"/pooling",
        b"/classify",
        b"/score",
        b"/rerank",
        b"/v2/rerank",
        b"/v2/embed",
        b"/invocations",
        b"/inference/v1/generate",
        b"/generative_scoring",
        b"/version",
        b"/load",
    }
)
_OPERATIONS = frozenset({b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"})
_STREAM_OPTIONS = frozenset({b"/v1/chat/completions", b"/v1/completions"})
_NEEDS_MODEL = frozenset(
    {
        b"/v1/chat/completions",
        b"/v1/completions",
        b"/v1/embeddings",
        b"/v1/responses",
        b"/v1/messages",
    }
)
_MODELS = b"/v1/models"
_MODELS_BELOW = b"/v1/models/"
_LOCAL = frozenset({b"/health", b"/ping", _MODELS})
_JSON = b"application/json"


class Routes:
    """The path table, with the configured additions."""

    def __init__(self, extra_paths: tuple[str, ...] = (), blocked_paths: tuple[str, ...] = ()) -> None:
        """Make the table.

        Args:
            extra_paths: further paths that go to a replica.
            blocked_paths: paths that do not.
        """
        self._passed = _ENGINE_PATHS | {p.encode() for p in extra_paths}
        self._blocked = (_OPERATIONS | {p.encode() for p in blocked_paths}) - {p.encode() for p in extra_paths}

    def handling(self, head: RequestHead) -> Handling:
        """Say what becomes of a request."""
        path = head.path
        if (path in _LOCAL or path.startswith(_MODELS_BELOW)) and head.method in (b"GET", b"HEAD"):
            return Handling.LOCAL
        if path in self._blocked:
            return Handling.NOT_FOUND
        if not path.startswith(b"/v1/") and path not in self._passed:
            return Handling.NOT_FOUND
        if not head.has_body:
            # A POST without a body is a JSON request without JSON: it gets a clear 400.
            return Handling.JSON if head.method == b"POST" and _is_json(head) else Handling.PLAIN
        return Handling.JSON if _is_json(head) else Handling.STREAM

    def needs_model(self, path: bytes) -> bool:
        """Say whether a JSON body on this path must name its model."""
        return path in _NEEDS_MODEL

    def has_stream_options(self, path: bytes) -> bool:
        """Say whether streams on this path have usage only if `stream_options` asks for it."""
        return path in _STREAM_OPTIONS


def _is_json(head: RequestHead) -> bool:
    kind = head.content_type
    if kind == _JSON:
        return True
    kind = kind.partition(b";")[0].strip().lower()
    return kind == b"" or kind == _JSON or kind.endswith(b"+json")
