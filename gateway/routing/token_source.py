"""Tokens for the requests whose replicas can make use of them: those with a live feed of KV events.

Everything else is routed at once, by byte blocks. Why a request is, is counted by base model and reason.
"""

from gateway.prompt.body import RequestBody
from gateway.prompt.tokenise.pool import Done, TokenPool
from gateway.replicas.registry import Fleet
from gateway.routing.kv_events import KvEvents

NO_FEED = "no_feed"
NO_TOKENIZER = "no_tokenizer"


class FeedTokens:
    """See the module."""

    def __init__(self, fleet: Fleet, events: KvEvents, pool: TokenPool) -> None:
        self._fleet = fleet
        self._events = events
        self._pool = pool

    def fetch(self, path: str, body: RequestBody, done: Done) -> bool:
        """Ask for a prompt's tokens, see `gateway.routing.exact_match.TokenSource`."""
        document, body.document = body.document, None
        prompt = body.prompt
        if document is None or prompt is None or prompt.computed_anew:
            return False
        fleet = self._fleet
        model = fleet.resolve(body.model) if body.model is not None else None
        base = fleet.pool(model)
        if not self._events.any_live(fleet.route_slots(model)):
            self._pool.fell_back(base, NO_FEED)
            return False
        if prompt.exact_tokens is None and base not in self._pool.models:
            self._pool.fell_back(base, NO_TOKENIZER)
            return False
        adapter = model if model is not None and model != base else ""
        return self._pool.fetch(path, document, base, adapter, done)
