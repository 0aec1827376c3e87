"""Tokenising off the event loop, with a bounded wait.

A request waits a few milliseconds for its tokens and not longer; then it is routed without them. The work goes on, so
that the next turn of the conversation finds it done. What has to be counted is counted on the event loop.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from gateway.prompt.token_chain import TokenPrompt
from gateway.prompt.tokenise.conversation import Document, NoTokensError
from gateway.prompt.tokenise.model_files import ModelTokens
from gateway.prompt.tokenise.prompt import prompt_tokens

logger = logging.getLogger(__name__)

Done = Callable[[TokenPrompt | None], None]
"""Called on the event loop, exactly once: with the tokens, or with None if they cannot be had in time."""

LATE = "late"
BUSY = "busy"
MISMATCH = "mismatch"
_MISMATCHES = 5
"""Counts in a row that differ from the engine's, after which a model's tokens are not trusted any more."""


class _Job:
    """One prompt on its way."""

    __slots__ = ("done", "pool", "started_s", "timer")

    def __init__(self, pool: str, done: Done, started_s: float) -> None:
        self.pool = pool
        self.done: Done | None = done
        self.started_s = started_s
        self.timer: asyncio.TimerHandle | None = None


class TokenPool:
    """Tokenises prompts in threads.

    Attributes:
        models: tokenizers by base model.
        tokenised: prompts with tokens in time, by base model.
        fallbacks: prompts without, by base model and reason.
        seconds: time from asking to having tokens, summed by base model, those too late included.
        late_done: prompts whose tokens came too late, by base model.
    """

    def __init__(
        self,
        models: Mapping[str, ModelTokens],
        threads: int = 2,
        wait_s: float = 0.005,
        max_waiting: int = 64,
        block_tokens: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        """Start without work; must be called with a running event loop.

        Args:
            models: tokenizers by base model.
            threads: threads to tokenise in.
            wait_s: how long a request waits for its tokens.
            max_waiting: prompts that may be under way at a time.
            block_tokens: block sizes for which hashes will be wanted; they are made in the thread too.
        """
        self.models = models
        self.tokenised: Counter[str] = Counter()
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.late_done: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._block_tokens = block_tokens
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenise")
        self._under_way = 0
        self._mismatches: Counter[str] = Counter()
        self._last_reasons: dict[str, str] = {}
        self._closed = False

    def fetch(self, path: str, document: Document, pool: str, adapter: str, done: Done) -> bool:
        """Ask for a prompt's tokens.

        Args:
            path: path of the request.
            document: its parsed body; must not change any more.
            pool: its base model.
            adapter: name of the adapter it is for; "" for the base model.
            done: told of the outcome, a moment later.

        Returns:
            False if there is no use in waiting; `done` is not called then.
        """
        if self._mismatches[pool] >= _MISMATCHES:
            self.fell_back(pool, MISMATCH)
            return False
        if self._under_way >= self._max_waiting:
            self.fell_back(pool, BUSY)
            return False
        self._under_way += 1
        job = _Job(pool, done, time.monotonic())
        work = self._executor.submit(_tokenise, path, document, self.models.get(pool), adapter, self._block_tokens())
        job.timer = self._loop.call_later(self._wait_s, self._late, job)
        work.add_done_callback(lambda future: self._finished(job, future))
        return True

    def learn(self, pool: str, tokens: TokenPrompt, prompt_tokens: int) -> None:
        """Compare with what the engine has counted.

        Args:
            pool: the base model.
            tokens: the prompt.
            prompt_tokens: `usage.prompt_tokens` of its answer.
        """
        if tokens.count == prompt_tokens:
            self._mismatches.pop(pool, None)
            return
        self._mismatches[pool] += 1
        if self._mismatches[pool] == _MISMATCHES:
            logger.warning(
                "%s: the engine counts other tokens than its tokenizer here (%d, not %d); byte blocks are used from "
                "now on. Is it the same tokenizer, chat template and version?",
                pool,
                prompt_tokens,
                tokens.count,
            )

    def distrusted(self, pool: str) -> bool:
        """Say whether a model's tokens have turned out wrong."""
        return self._mismatches[pool] >= _MISMATCHES

    def fell_back(self, pool: str, reason: str) -> None:
        """Count a prompt that is routed by byte blocks; the log says so when the reason is another than before."""
        self.fallbacks[pool, reason] += 1
        if self._last_reasons.get(pool) != reason and reason not in (LATE, BUSY):
            self._last_reasons[pool] = reason
            logger.warning("%s: prompts are matched by byte blocks, not by tokens: %s", pool, reason)

    def close(self) -> None:
        """Stop; requests that wait go on without tokens."""
        self._closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _finished(self, job: _Job, future: "Future[TokenPrompt]") -> None:
        """In the thread that did it, or in whichever cancelled it."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._deliver, job, future)

    def _deliver(self, job: _Job, future: "Future[TokenPrompt]") -> None:
        self._under_way -= 1
        pool = job.pool
        tokens: TokenPrompt | None = None
        reason: str | None = None
        if future.cancelled():
            reason = BUSY
        else:
            error = future.exception()
            if error is None:
                tokens = future.result()
                self.seconds[pool] += time.monotonic() - job.started_s
            elif isinstance(error, NoTokensError):
                reason = error.reason
                logger.debug("%s: no tokens: %s", pool, error)
            else:
                reason = "error"
                logger.error("%s: a prompt could not be tokenised", pool, exc_info=error)
        if job.done is None:
            self.late_done[pool] += tokens is not None
            return
        if tokens is not None:
            self.tokenised[pool] += 1
            self._last_reasons.pop(pool, None)
        elif reason is not None:
            self.fell_back(pool, reason)
        self._end(job, tokens)

    def _late(self, job: _Job) -> None:
        if job.done is not None:
            self.fell_back(job.pool, LATE)
            self._end(job, None)

    def _end(self, job: _Job, tokens: TokenPrompt | None) -> None:
        done, job.done = job.done, None
        if job.timer is not None:
            job.timer.cancel()
        assert done is not None, "a job ends once"
        done(tokens)


def _tokenise(
    path: str, document: Document, model: ModelTokens | None, adapter: str, block_tokens: tuple[int, ...]
) -> TokenPrompt:
    tokens = prompt_tokens(path, document, model, adapter)
    for size in block_tokens:
        tokens.hashes(size)
    if block_tokens:
        tokens.seal()
    return tokens
