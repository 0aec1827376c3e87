"""Puts the exact prefix map together: feeds of KV events, tokenizers, and their places in router and data plane.

Apart from `gateway.app` because what it needs (pyzmq, msgspec, tokenizers, jinja2) is installed only where it is used.
"""

import asyncio
import importlib.util
import logging
import os
import sys
from typing import TYPE_CHECKING

from gateway.config import Config, KvEventsOfReplica
from gateway.proxy.plane import DataPlane
from gateway.replicas.probe import ProbeClient
from gateway.replicas.registry import Fleet

if TYPE_CHECKING:
    from gateway.prompt.tokenise.model_files import ModelTokens
    from gateway.routing.kv_events import SourceSettings

logger = logging.getLogger(__name__)

_SWITCH_S = 0.001
_PACKAGES = ("zmq", "msgspec", "tokenizers", "jinja2")


def check(config: Config) -> None:
    """Check what the exact map needs.

    Raises:
        ValueError: a package is missing, or options contradict each other.
        OSError: a tokenizer file is not there.
    """
    if not config.kv_events.enabled:
        return
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"kv_events: {', '.join(missing)} not installed; install warmgate[kv-events] or switch kv_events off"
        )
    if config.kv_events.bind is not None and config.listen.workers > 1:
        raise ValueError("kv_events.bind: only one process can be connected to; use one worker, or let vLLM bind")
    for name, files in config.tokenizer.models.items():
        for path in (files.path, files.chat_template):
            if path is not None and not path.exists():
                raise FileNotFoundError(f"tokenizer.models.{name}: there is no {path}")


class ExactMap:
    """The exact map of one worker.

    Attributes:
        events: the feeds.
        pool: the tokenisers.
    """

    def __init__(self, config: Config, fleet: Fleet, probes: ProbeClient, plane: DataPlane) -> None:
        """Put it together; must be called with a running event loop.

        Args:
            config: a configuration that `check` accepts.
            fleet: the replicas.
            probes: asks them where they publish.
            plane: where requests get their tokens.

        Raises:
            OSError: the endpoint for engines that connect themselves cannot be bound.
        """
        from gateway.prefixes.events.subscriber import Subscriber
        from gateway.prompt.token_chain import TokenChain
        from gateway.prompt.tokenise.pool import TokenPool
        from gateway.routing.kv_events import KvEvents
        from gateway.routing.token_source import FeedTokens

        options, tokenizer = config.kv_events, config.tokenizer
        # A thread that tokenises needs the interpreter for a moment now and then. While the event loop is busy it is
        # given it after 5 ms only, the time a request waits for its tokens at all.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        # The library's own threads, for pieces of long prompts; read when it first uses them.
        os.environ.setdefault("RAYON_NUM_THREADS", str(tokenizer.threads))
        subscriber = Subscriber(TokenChain(), options.bind, options.max_blocks, options.replay_timeout_s)
        self.events: KvEvents = KvEvents(
            fleet,
            probes,
            subscriber,
            _settings(options),
            {name: _settings(own) for name, own in options.replicas.items()},
        )
        self._models: dict[str, ModelTokens] = {}
        self.pool: TokenPool = TokenPool(
            self._models,
            tokenizer.threads,
            tokenizer.wait_ms / 1000.0,
            tokenizer.max_waiting,
            lambda: self.events.block_tokens,
        )
        self._config = config
        self._loading: asyncio.Task[None] | None = None
        plane.router.use_token_match(self.events, self.pool.learn)
        plane.token_source = FeedTokens(fleet, self.events, self.pool)

    def start(self) -> None:
        """Follow the replicas, and read the tokenizers meanwhile."""
        self.events.start()
        self._loading = asyncio.get_running_loop().create_task(self._load())

    async def loaded(self) -> None:
        """Wait until the tokenizers have been read."""
        if self._loading is not None:
            await self._loading

    async def stop(self) -> None:
        """Close everything."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await self.events.stop()
        self.pool.close()

    async def _load(self) -> None:
        from gateway.prompt.tokenise.model_files import load_model

        tokenizer = self._config.tokenizer
        for name, files in tokenizer.models.items():
            try:
                model = await asyncio.to_thread(load_model, files.path, files.chat_template, tokenizer.cache_bytes)
            except (OSError, ValueError) as error:
                logger.error("%s: no tokenizer, so its prompts are matched by byte blocks: %s", name, error)
                continue
            self._models[name] = model
            logger.info(
                "%s: tokenizer read from %s%s%s",
                name,
                files.path,
                "" if model.template is not None else ", no chat template",
                "" if model.text.cuts else ", whole texts are tokenised anew (no stable cuts)",
            )


def _settings(options: KvEventsOfReplica) -> "SourceSettings":
    from gateway.routing.kv_events import SourceSettings

    return SourceSettings(options.endpoint, options.replay_endpoint, options.topic, options.ranks)
