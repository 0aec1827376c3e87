"""What must be the same on two replicas, one of which is to compute prompts for the other.

The block size, the path of each model, and the version of the engine. vLLM's NIXL connector compares paths and versions
itself, in its handshake, and fails the request; of unequal block sizes it may not take notice, and answer with wrong
tokens. A rolling update makes fleets of two versions: until it is through, each half keeps to itself.
"""

from dataclasses import dataclass
from typing import Literal

from gateway.replicas.replica import Replica

Signature = tuple[int | None, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Why two replicas cannot be paired.

    Attributes:
        kind: block_size, models or version.
        text: what either has, in words.
    """

    kind: Literal["block_size", "models", "version"]
    text: str


def signature(replica: Replica) -> Signature:
    """Return the block size and the path of each model; versions are compared by `same_version`."""
    objects = replica.listing.objects
    roots = tuple(sorted((name, str(objects[name].get("root"))) for name in replica.base_models if name in objects))
    return replica.kv.block_size_tokens, roots


def same_version(one: str | None, other: str | None) -> bool:
    """Say whether two versions may be paired; one that is not known differs from nothing."""
    return one is None or other is None or one == other


def difference(prefill: Replica, decode: Replica) -> Difference | None:
    """Return why two replicas cannot be paired, None if they can."""
    (block, models), (other_block, other_models) = signature(prefill), signature(decode)
    if block != other_block:
        sizes = f"{block or 'not known yet'} for prefill, {other_block or 'not known yet'} for decode"
        return Difference("block_size", f"block sizes differ: {sizes}")
    if models != other_models:
        return Difference("models", f"models differ: {dict(models)} for prefill, {dict(other_models)} for decode")
    if not same_version(prefill.version, decode.version):
        return Difference("version", f"versions differ: {prefill.version} for prefill, {decode.version} for decode")
    return None
