"""Matched tokens from the engines' own events, for replicas whose feed is live; the rest is the byte map's.

One source per replica and request, from strong to weak:
- The feed is live and lacks nothing: what its map says counts, also that it has nothing.
- The feed is live and may lack something (it was joined late and the engine could not tell its past): the longer match.
- No feed, or the request has no tokens: the byte map, as without events.
"""

from collections.abc import Callable
from typing import Protocol

from gateway.prompt.body import RequestBody
from gateway.prompt.token_chain import TokenPrompt

Match = tuple[int, float, bool]
"""Slot, tokens the replica has cached, whether that is sure."""


class TokenMatch(Protocol):
    """Says what replicas have cached of a tokenised prompt."""

    def match(self, tokens: TokenPrompt) -> list[Match]:
        """Return a match for each replica with a live feed, one without a common token included."""


class TokenSource(Protocol):
    """Gets the tokens of prompts."""

    def fetch(self, path: str, body: RequestBody, done: Callable[[TokenPrompt | None], None]) -> bool:
        """Ask for the tokens of a request's prompt; takes its document.

        Args:
            path: path of the request, without query.
            body: the parsed body.
            done: told the tokens, or None if they cannot be had, once and within milliseconds.

        Returns:
            False if there is no use in waiting; `done` is not called then.
        """
