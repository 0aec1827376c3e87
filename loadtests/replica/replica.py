"""One simulated replica: its parts, and what the HTTP endpoints ask of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash
from aiohttp import web

from loadtests.engine import Engine, EngineRequest
from loadtests.replica.config import ReplicaConfig
from loadtests.replica.driver import Driver, Generation
from loadtests.replica.errors import ApiError
from loadtests.replica.faults import Faults, FaultSwitch
from loadtests.replica.metrics import MetricsPage, ReplicaMetrics
from loadtests.replica.tokens import Tokenizer, Tokens

if TYPE_CHECKING:
    from loadtests.replica.kv_events import KvFeed
    from loadtests.replica.kv_transfer import KvTransfer


@dataclass(slots=True)
class Traffic:
    """HTTP requests to the API, as the replica saw them."""

    requests_seen: int = 0
    completed: int = 0
    """Answered, with whatever status."""
    aborted_seen: int = 0
    """Left by the client, or ended by a fault, before the answer was complete."""
    in_flight: int = 0
    in_flight_max: int = 0


class Replica:
    """The parts of one replica, on the running event loop.

    Args:
        config: what it is made of.

    Raises:
        ValueError: unknown hardware or model, or limits that make no sense.
    """

    def __init__(self, config: ReplicaConfig) -> None:
        self.config = config
        self.engine = Engine(config.step_cost(), config.engine_limits(), collect_events=config.kv_events)
        self.metrics = ReplicaMetrics()
        self.page = MetricsPage(config, self.engine, self.metrics)
        self.driver = Driver(self.engine, config.speedup, self.metrics)
        self.tokenizer = Tokenizer(config.bytes_per_token, config.block_size, config.seed)
        self.faults = FaultSwitch()
        self.traffic = Traffic()
        self.created = int(time.time())
        limits = self.engine.limits
        self.max_model_len = min(config.max_model_len, limits.total_blocks * limits.block_size_tokens)
        name = xxhash.xxh32_hexdigest(f"{config.model}/{config.hardware}")
        self.fingerprint = f"vllm-{config.engine_version or 'unknown'}-{name}"
        self._requests = 0
        self.kv_feed: KvFeed | None = None
        self.kv_transfer: KvTransfer | None = None
        self._roots: dict[int, tuple[str, str]] = {}
        """What the starts of hash chains stand for: adapter and salt."""

    def publish_kv_events(self, host: str, port: int) -> None:
        """Open the KV-event feed, if the replica has one.

        Args:
            host: address of the HTTP server; it and the port are in the topic.
            port: its port.

        Raises:
            OSError: an endpoint is taken.
        """
        config = self.config
        if not config.kv_events:
            return
        # pyzmq and msgspec are needed for this only.
        from loadtests.replica.kv_events import KvFeed, Publisher

        topic = f"kv@{host}:{port}@{config.model_names[0]}"
        publisher = Publisher(config.kv_events_endpoint, config.kv_events_replay_endpoint, topic)
        self.kv_feed = self.driver.feed = KvFeed(publisher, config.block_size)

    def reset_prefix_cache(self) -> None:
        """Forget the cached blocks that no request holds."""
        idle = not self.engine.running
        removed = self.engine.reset_prefix_cache()
        if self.kv_feed is not None:
            self.kv_feed.reset(removed, idle)

    def model(self, body: dict[str, Any]) -> tuple[str, str]:
        """The model a body asks for: the name answers give it, and the adapter or an empty string.

        Raises:
            ApiError: 404, it is not served here.
        """
        asked = body.get("model")
        names = self.config.model_names
        if asked is None or asked in names:
            return names[0], ""
        if asked in self.config.loras:
            return str(asked), str(asked)
        message = f"The model `{asked}` does not exist. Valid aliases: {', '.join(names)}."
        raise ApiError(404, message, "NotFoundError", "model")

    def root(self, body: dict[str, Any], lora: str) -> int:
        """Start of the hash chain of a body's prompts."""
        salt = str(body.get("cache_salt") or "")
        root = self.tokenizer.root(lora, salt)
        if self.kv_feed is not None:
            self._roots[root] = (lora, salt)
        return root

    def limit_tokens(self, prompt: Tokens, asked: int | None, default: int) -> int:
        """Tokens to generate after a prompt.

        Args:
            prompt: the prompt.
            asked: the client's limit.
            default: the limit without one.

        Raises:
            ApiError: 400, prompt and answer exceed the model's context.
        """
        room = self.max_model_len - prompt.count
        if room < 1:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt "
                f"contains {prompt.count} input tokens, which exceeds this limit even without any output "
                "tokens. Please reduce the length of the input prompt. "
                f"(parameter=input_tokens, value={prompt.count})",
                param="input_tokens",
            )
        if asked is None:
            return min(default, room)
        if asked > room:
            raise ApiError(
                400,
                f"'max_tokens' or 'max_completion_tokens' is too large: {asked}. This model's maximum "
                f"context length is {self.max_model_len} tokens and your request has {prompt.count} input "
                f"tokens ({asked} > {self.max_model_len} - {prompt.count}). "
                f"(parameter=max_tokens, value={asked})",
                param="max_tokens",
            )
        return asked

    def submit(
        self,
        prompt: Tokens,
        root: int,
        answer: bytes,
        max_tokens: int,
        *,
        natural_end: bool = False,
        on_progress: Callable[[int], None] | None = None,
        external_tokens: int = 0,
        hold: bool = False,
    ) -> Generation:
        """Start to compute a prompt and its answer.

        Args:
            prompt: the prompt.
            root: start of its hash chain.
            answer: the text of the answer, may be empty.
            max_tokens: length of the answer.
            natural_end: the answer ends by itself.
            on_progress: told of tokens as they are emitted.
            external_tokens: tokens of the prompt whose KV has come from elsewhere.
            hold: keep the blocks of the prompt when it is done.
        """
        self._requests += 1
        hashes = self.tokenizer.block_hashes(prompt, answer, root)
        request = EngineRequest(
            str(self._requests), prompt.count, max_tokens, hashes, external_tokens=external_tokens, hold=hold
        )
        if self.kv_feed is not None:
            lora, salt = self._roots[root]
            data = self.tokenizer.joined(prompt, answer)
            self.kv_feed.submitted(request, data, prompt.width, lora, salt)
        return self.driver.submit(request, natural_end=natural_end, on_progress=on_progress)

    def close(self) -> None:
        """Stop the engine."""
        self.driver.close()
        if self.kv_feed is not None:
            self.kv_feed.publisher.close()


REPLICA = web.AppKey("replica", Replica)
FAULTS = web.RequestKey("faults", Faults)
