"""Which model names there are: those the replicas list, and the operator's aliases for them."""

from collections.abc import Iterable, Mapping

from gateway.replicas.listing import Listing, ModelObject

MAX_KNOWN_MODELS = 10_000
"""Model names remembered after no replica lists them any more; the oldest are forgotten first."""

UNKNOWN_POOL = "other"
"""The pool name of requests for models nobody knows, so that clients cannot invent metric labels."""


class Catalogue:
    """Names of models.

    A name stays known when its replicas leave or stop listing it: "not available now" and "no such model" are
    different answers. The memory is bounded.
    """

    def __init__(self, aliases: Mapping[str, str]) -> None:
        """Start with what the configuration names.

        Args:
            aliases: alias -> the name replicas list.
        """
        self.aliases: Mapping[str, str] = dict(aliases)
        # The most recently listed last.
        self._known: dict[str, None] = dict.fromkeys(self.aliases.values())
        self._bases: dict[str, str] = {}
        self._merged: list[ModelObject] = []

    def use_aliases(self, aliases: Mapping[str, str]) -> None:
        """Take other aliases; they are complete at the next `update`."""
        self.aliases = dict(aliases)
        for name in aliases.values():
            self._known.setdefault(name)

    def resolve(self, name: str) -> str:
        """The model behind an alias; any other name is returned as it is."""
        return self.aliases.get(name, name)

    def knows(self, name: str) -> bool:
        """Whether a model or alias has ever been listed or configured."""
        return self.resolve(name) in self._known

    def pool(self, name: str | None) -> str:
        """The base model behind a name; see `Fleet.pool`."""
        if name is None:
            bases = set(self._bases.values())
            return bases.pop() if len(bases) == 1 else UNKNOWN_POOL
        model = self.resolve(name)
        return self._bases.get(model) or (model if model in self._known else UNKNOWN_POOL)

    def merged(self) -> list[ModelObject]:
        """Every listed model once, then the aliases."""
        return self._merged

    def update(self, listings: Iterable[Listing]) -> None:
        """The replicas' listings have changed.

        Args:
            listings: of all replicas; where two describe the same model the first counts.
        """
        objects: dict[str, ModelObject] = {}
        bases: dict[str, str] = {}
        for listing in listings:
            for name, item in listing.objects.items():
                objects.setdefault(name, item)
                bases.setdefault(name, listing.adapters.get(name, name))
        self._bases = bases
        self._remember(objects)
        for alias, name in self.aliases.items():
            if name in objects:
                objects[alias] = {**objects[name], "id": alias}
        self._merged = list(objects.values())

    def _remember(self, listed: Mapping[str, ModelObject]) -> None:
        for name in listed:
            self._known.pop(name, None)
            self._known[name] = None
        excess = len(self._known) - MAX_KNOWN_MODELS
        if excess > 0:
            kept = listed.keys() | set(self.aliases.values())
            forgotten = [name for name in self._known if name not in kept][:excess]
            for name in forgotten:
                del self._known[name]
