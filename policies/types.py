"""The contract between the gateway and a routing policy.

A policy is pure: it reads columns, draws from its own seeded random numbers, keeps what it remembers in itself,
and returns one choice with its reasons. It does no I/O and never looks at a clock. The same policy object therefore
serves live traffic, shadow scoring and replay in virtual time.

Columns are plain sequences indexed by *replica slot*, a small integer the registry gives to each replica.
`Candidates.slots` says which slots may be chosen for this request; the other entries of a column mean nothing.

Three kinds of columns:
- State, kept current by events and shared by all requests: `in_flight`, `prefill_tokens`, `decodes`, ...
- Per request, computed only when the policy in force declares that it reads them: `matched_tokens`,
  `own_prefill_s`, `predicted_ttft_s`, `decode_delay_s`.
- Scraped, as old as the engine's last metrics page, copied only when the policy in force declares that it reads
  them: `engine_waiting`, `engine_running`, `engine_kv_usage`.

A policy that remembers something per slot must also have `forget`: slots are given to other replicas. One that keeps
anything but numbers and random numbers must be known to `policies.understudy`, or it cannot be rehearsed.

In a large fleet, a policy that can say what its costs are made of (`BoundedBelow`) is not shown all candidates at once:
first those that hold most of the prompt and those with the least load, and more of them when it asks. It asks with the
cost below which one would change its mind, and is given those that may, up to a limit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable


class Column(StrEnum):
    """The candidate features a policy may read. Units are in the names."""

    IN_FLIGHT = "in_flight"
    """Requests sent and not ended, counted at selection."""
    PREFILL_TOKENS = "prefill_tokens"
    """Uncached prompt tokens of requests whose first token has not been seen."""
    PREFILL_S = "prefill_s"
    """Predicted seconds of prefill work still ahead of a new request."""
    DECODES = "decodes"
    """Requests whose first token has been seen and which have not ended."""
    KV_TOKENS = "kv_tokens"
    """Tokens of KV memory held by requests in flight (prompt and expected output)."""
    KV_OWN_TOKENS = "kv_own_tokens"
    """Of those, what no other request shares: uncached prompt and expected output."""
    KV_CAPACITY_TOKENS = "kv_capacity_tokens"
    """Tokens of KV memory the engine has."""
    KV_ROOM_TOKENS = "kv_room_tokens"
    """Tokens of KV memory left if all answers in flight were at their full length; negative when they will not fit."""
    CACHE_FULL = "cache_full"
    """The prefix map believes that the replica's KV memory is full of cached prompts: what comes drives something out.
    As old as scraped columns."""
    CACHE_OLDEST_USE = "cache_oldest_use"
    """When what the replica would drive out next was last used, in prompts entered into the prefix map; below 0 while
    there is room, the more the emptier the cache is."""
    MATCHED_TOKENS = "matched_tokens"
    """Prompt tokens the prefix map says the replica holds. Per request."""
    OWN_PREFILL_S = "own_prefill_s"
    """Predicted seconds of prefill for the uncached part of this prompt. Per request."""
    PREDICTED_TTFT_S = "predicted_ttft_s"
    """Predicted seconds from now to the first token. Per request."""
    TIED_PER_S = "tied_per_s"
    """Requests a second of late that found their prompts cached there, each as the share of it."""
    TIED_SAVED = "tied_saved"
    """Seconds of prefill a second that this saved them."""
    BATCH_COST_S = "batch_cost_s"
    """Predicted decode step with all in flight and this request, times its ratio to an idle step. Per request."""
    MEMORY_WAIT_S = "memory_wait_s"
    """Of the predicted TTFT, seconds of waiting for KV memory. Per request, like the other predictions."""
    DECODE_STEP_S = "decode_step_s"
    """Predicted seconds of one decode step with the decodes that run now. Per request, like the other predictions."""
    DECODE_DELAY_S = "decode_delay_s"
    """Predicted seconds of delay this prefill adds, summed over the replica's running decodes. Per request."""
    ENGINE_WAITING = "engine_waiting"
    """Requests in the engine's queue. Scraped; 0 when the engine has not said."""
    ENGINE_RUNNING = "engine_running"
    """Requests in the engine's batch. Scraped; 0 when the engine has not said."""
    ENGINE_KV_USAGE = "engine_kv_usage"
    """Share of the engine's KV memory in use, 0 to 1. Scraped; 0 when the engine has not said."""


@dataclass(slots=True)
class Request:
    """What a policy may know of a request."""

    prompt_tokens: float
    """Estimated tokens of the prompt; exact for token-id prompts."""
    expected_output_tokens: float
    """Expected tokens of the answer: the pool's running mean, bounded by the request's own limit."""
    prefix_hash: int = 0
    """Hash of the head of the prompt (its first block), 0 when the body has no canonical prompt."""
    session: str | None = None
    """Session key from the configured header or the body's `user`, when there is one."""
    block_hashes: Sequence[int] = ()
    """Chained hashes of the prompt's full blocks; each names the whole prefix up to its end. Not to be changed."""
    block_offsets: Sequence[int] = ()
    """`block_offsets[k]`: bytes of canonical prompt covered by the first `k` blocks; reaches at least as far as
    `block_hashes`, and is the same for all prompts. Not to be changed."""
    canonical_bytes: int = 0
    """Length of the canonical prompt, the unfinished last block included; 0 when there is none."""
    now_s: float = 0.0
    """When the decision is made, in seconds from any fixed moment: data like the rest, of real or simulated time."""


@dataclass(slots=True)
class Candidates:
    """The replicas that may serve a request, as columns indexed by replica slot."""

    slots: Sequence[int]
    """Slots that may be chosen, never empty, in ascending order. Another selection is another object."""
    names: Sequence[str] = ()
    """Names of the replicas by slot, as configured. Unlike slots they are the same on every gateway that is configured
    alike. Empty where there is only one numbering."""
    in_flight: Sequence[int] = ()
    prefill_tokens: Sequence[float] = ()
    prefill_s: Sequence[float] = ()
    decodes: Sequence[int] = ()
    kv_tokens: Sequence[float] = ()
    kv_own_tokens: Sequence[float] = ()
    kv_capacity_tokens: Sequence[float] = ()
    kv_room_tokens: Sequence[float] = ()
    cache_full: Sequence[bool] = ()
    cache_oldest_use: Sequence[float] = ()
    matched_tokens: Sequence[float] = ()
    own_prefill_s: Sequence[float] = ()
    predicted_ttft_s: Sequence[float] = ()
    decode_delay_s: Sequence[float] = ()
    batch_cost_s: Sequence[float] = ()
    tied_per_s: Sequence[float] = ()
    tied_saved: Sequence[float] = ()
    memory_wait_s: Sequence[float] = ()
    decode_step_s: Sequence[float] = ()
    engine_waiting: Sequence[int] = ()
    engine_running: Sequence[int] = ()
    engine_kv_usage: Sequence[float] = ()
    preferred: Sequence[bool] = ()
    """By slot: of several workers with the same view, this one takes these first where candidates are alike; each of
    the others has its own. All False, or empty, where there is only one."""
    least_own_prefill_s: float | None = None
    """The least own prefill of all, where these are not all that there were; else None."""
    more: Callable[[float], Sequence[int]] | None = None
    """Where `slots` are not all there are: call it with a cost, again and again, for further slots. It returns the next
    few, their columns filled, and nothing when no candidate is left whose cost could be below,
    or enough have been looked at."""
    total: int = 0
    """How many candidates there are where `slots` are not all; else 0."""


@dataclass(frozen=True, slots=True)
class FloorPrices:
    """What a policy's cost is at least, in seconds: a sum of columns times prices.

    Predicted TTFT, without the wait for KV memory, counts once.

    Attributes:
        own_prefill: price of own prefill seconds.
        own_prefill_where_full: price of the same in addition, where the cache is full.
        own_prefill_per_waiting: price of the same and of each request before its first token.
        batch: price of the batch cost.
        decode: price of the delay of decodes.
    """

    own_prefill: float = 0.0
    own_prefill_where_full: float = 0.0
    own_prefill_per_waiting: float = 0.0
    batch: float = 0.0
    decode: float = 0.0


@dataclass(slots=True)
class Choice:
    """One decision: the slot, and why in words and numbers that an operator can read."""

    slot: int
    reason: str
    terms: Mapping[str, float] = field(default_factory=dict)


class Policy(Protocol):
    """What the router asks of a policy."""

    name: str
    reads: frozenset[Column]

    def choose(self, request: Request, candidates: Candidates) -> Choice:
        """Pick one of `candidates.slots`.

        Args:
            request: what is known of the request.
            candidates: the columns declared in `reads`; others may be empty.
        """
        ...


@runtime_checkable
class RemembersReplicas(Protocol):
    """What a policy with state of its own per replica slot offers beside `Policy`."""

    def forget(self, slot: int) -> None:
        """The slot's replica has left or restarted: nothing known of it holds any more.

        The next replica with this slot may be another one. Slots never seen are to be ignored.
        """
        ...


@runtime_checkable
class BoundedBelow(Protocol):
    """What a policy offers that minimises a cost, and need not look at all candidates of a large fleet."""

    def floor_prices(self) -> FloorPrices:
        """Return what its costs are at least, as of now. It must then heed `Candidates.more`."""
        ...
