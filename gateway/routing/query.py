"""One request as the router sees it."""

from gateway.prompt.blocks import PromptKey
from gateway.prompt.rewrite import replace_model
from gateway.prompt.token_chain import TokenPrompt
from policies.slo import Targets
from policies.types import Request


class Query:
    """One request as the router sees it.

    Attributes:
        model: the name to route by, aliases resolved; None for requests that name none.
        pool: base model, for metrics and for what is learned per model.
        key: the prompt key; None when the body has no canonical prompt.
        request: what the policy may know.
        stream: the client asked for a stream.
        rewritten_model: the name that must replace an alias in the body; None to forward the body as it is.
        targets: its latency targets; None if it has none.
        tokens: the prompt as the engine will see it; None where that is not known.
        divisible: its prompt may be computed on one replica and its answer on another.
    """

    __slots__ = (
        "divisible",
        "key",
        "max_tokens",
        "model",
        "pool",
        "request",
        "rewritten_model",
        "stream",
        "targets",
        "tokens",
    )

    def __init__(
        self,
        model: str | None,
        pool: str,
        key: PromptKey | None,
        request: Request,
        stream: bool,
        max_tokens: int | None,
        rewritten_model: str | None,
        targets: Targets | None = None,
        tokens: TokenPrompt | None = None,
        divisible: bool = False,
    ) -> None:
        self.model = model
        self.pool = pool
        self.key = key
        self.request = request
        self.stream = stream
        self.max_tokens = max_tokens
        self.rewritten_model = rewritten_model
        self.targets = targets
        self.tokens = tokens
        self.divisible = divisible

    def rewritten_body(self, body: bytes) -> bytes:
        """Return the body with the alias replaced by the model's own name."""
        return body if self.rewritten_model is None else replace_model(body, self.rewritten_model)
