"""What a replica's `/v1/models` says: models, adapters, context lengths. Pure.

vLLM lists each LoRA adapter as a model of its own whose `parent` is the base model's name
(vllm/entrypoints/openai/models); base models have `parent` null.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_MODELS = 1000
"""Names read from one replica. More would be a fault, and every name costs a pool and metric labels."""
MAX_NAME_LENGTH = 256

_MADE_UP_AT_EVERY_CALL = ("created", "permission")

ModelObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Listing:
    """The models one replica serves."""

    objects: Mapping[str, ModelObject] = field(default_factory=dict)
    """Model objects as the replica gave them, by id."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Adapter name -> base model."""
    max_model_lens: Mapping[str, int] = field(default_factory=dict)
    """Context length in tokens (prompt and answer) by model, where the replica tells it."""
    ignored: int = 0
    """Entries that were malformed or past `MAX_MODELS`."""

    @property
    def served(self) -> frozenset[str]:
        """Base models and adapters."""
        return frozenset(self.objects)

    def same_models(self, other: "Listing") -> bool:
        """Whether both say the same, but for the fields vLLM makes up anew at every call."""
        return self.objects.keys() == other.objects.keys() and all(
            _lasting(item) == _lasting(other.objects[name]) for name, item in self.objects.items()
        )


def read_listing(entries: Iterable[Any], configured: Sequence[str] = ()) -> Listing:
    """Read the `data` array of a `/v1/models` answer.

    Args:
        entries: the array's entries, not trusted to be well formed.
        configured: names the operator gave. When there are any, they are served whether listed or not, and of
            the listed ones only their adapters are added.
    """
    objects: dict[str, ModelObject] = {name: _bare_object(name) for name in configured}
    adapters: dict[str, str] = {}
    max_model_lens: dict[str, int] = {}
    ignored = 0
    for entry in entries:
        name = entry.get("id") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
            ignored += 1
            continue
        parent = entry.get("parent")
        if configured and name not in configured and parent not in configured:
            continue
        if len(objects) >= MAX_MODELS and name not in objects:
            ignored += 1
            continue
        objects[name] = entry
        if isinstance(parent, str) and parent and parent != name:
            adapters[name] = parent
        length = entry.get("max_model_len")
        if isinstance(length, int) and not isinstance(length, bool) and length > 0:
            max_model_lens[name] = length
    # An adapter has the context of its base model; vLLM leaves the field null on adapters.
    for name, parent in adapters.items():
        if name not in max_model_lens and parent in max_model_lens:
            max_model_lens[name] = max_model_lens[parent]
    return Listing(objects, adapters, max_model_lens, ignored)


def _lasting(item: ModelObject) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in _MADE_UP_AT_EVERY_CALL}


def _bare_object(name: str) -> ModelObject:
    return {"id": name, "object": "model", "created": 0, "owned_by": "vllm", "root": name, "parent": None}
