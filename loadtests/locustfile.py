"""Locust users that hold conversations of several turns under shared system prompts.

    locust -f loadtests/locustfile.py --host http://127.0.0.1:8000

Each user belongs to a group whose members share a system prompt, and appends every answer to its
conversation, so a turn's prompt extends the one before. Besides the requests themselves the statistics
have three entries of their own: `TTFT` (ms), `TPOT` (ms) and `cached` (percent of the prompt's tokens
that came from the prefix cache).
"""

import random
import time
from itertools import count
from typing import Any

import gevent  # type: ignore[import-untyped]
import orjson
import requests
from locust import HttpUser, events, task

from loadtests.sse_stream import ChatResult, StreamObserver, answer_text
from loadtests.synthesis import PromptSynthesizer
from loadtests.trace import BLOCK_TOKENS

_PATH = "/v1/chat/completions"
_USER_MESSAGE_IDS = 1 << 32  # block ids of user messages start here, those of system prompts at 0
_SYSTEM_PROMPT_IDS = 1 << 16  # block ids kept for one group's system prompt

_hooks: Any = events  # Locust does not annotate its event hooks
_synthesizer = PromptSynthesizer()
_members = count()
_ended = count(1)


def _add_options(parser: Any) -> None:
    group = parser.add_argument_group("Conversations")
    group.add_argument("--model", default="", help="Model to ask for; the first that is listed by default.")
    group.add_argument("--prompt-groups", type=int, default=4, help="Different system prompts.")
    group.add_argument("--system-prompt-tokens", type=int, default=2000, help="Length of a system prompt.")
    group.add_argument("--question-tokens", type=int, default=100, help="Length of a user message.")
    group.add_argument("--max-tokens", type=int, default=64, help="Length of an answer.")
    group.add_argument("--turns", type=int, default=5, help="Turns of a conversation.")
    group.add_argument("--conversations", type=int, default=0, help="Stop after so many; 0: when time is up.")
    group.add_argument("--think-time", type=float, default=0.5, help="Mean seconds between turns.")


_hooks.init_command_line_parser.add_listener(_add_options)


def _text(first_id: int, tokens: int) -> str:
    """Text of about `tokens` tokens from blocks that count up from an id."""
    return _synthesizer.text(range(first_id, first_id + -(-tokens // BLOCK_TOKENS)), tokens)


def _read(response: requests.Response, result: ChatResult) -> bytes:
    """Read a stream as it comes, and return it whole."""
    observer = StreamObserver(result)
    received = bytearray()
    try:
        # Without a chunk size the chunks come as the server sends them, not when a buffer is full.
        for chunk in response.iter_content(chunk_size=None):
            observer.feed(chunk, time.perf_counter())
            received += chunk
    except requests.RequestException as error:
        result.error, result.detail = "disconnected", str(error)[:200]
    observer.finish()
    return bytes(received)


class Conversation(HttpUser):
    """One client in an endless series of conversations."""

    def wait_time(self) -> float:
        """Seconds to think, exponentially distributed."""
        mean_s = self.environment.parsed_options.think_time
        return random.expovariate(1 / mean_s) if mean_s > 0 else 0.0

    def on_start(self) -> None:
        """Join a group and begin."""
        options = self.environment.parsed_options
        self.model = options.model or self._first_model()
        group = next(_members) % max(1, options.prompt_groups)
        self.system_prompt = _text(group * _SYSTEM_PROMPT_IDS, options.system_prompt_tokens)
        self._begin()

    def _begin(self) -> None:
        self.turns = 0
        self.messages = [{"role": "system", "content": self.system_prompt}]

    def _first_model(self) -> str:
        return str(self.client.get("/v1/models").json()["data"][0]["id"])

    @task
    def turn(self) -> None:
        """Ask, read the answer as it streams, and remember it."""
        options = self.environment.parsed_options
        question = _text(_USER_MESSAGE_IDS + random.getrandbits(32), options.question_tokens)
        self.messages.append({"role": "user", "content": question})
        body = {
            "model": self.model,
            "messages": self.messages,
            "max_tokens": options.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = self._ask(orjson.dumps(body))
        if answer is None:
            self._begin()
            return
        self.messages.append({"role": "assistant", "content": answer})
        self.turns += 1
        if self.turns >= options.turns:
            self._end()

    def _end(self) -> None:
        """Begin anew, or end the run when it was the last conversation asked for."""
        self._begin()
        if next(_ended) == self.environment.parsed_options.conversations:
            gevent.spawn(self.environment.runner.quit)  # it ends the users, so none of them can run it

    def _ask(self, body: bytes) -> str | None:
        """Send a request and report it; returns the answer, None when it failed."""
        result = ChatResult(sent_s=time.perf_counter())
        with self.client.post(
            _PATH,
            data=body,
            headers={"content-type": "application/json", "accept-encoding": "identity"},
            stream=True,
            catch_response=True,
        ) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}: {(response.text or '')[:200]}")
                return None
            received = _read(response, result)
            # Locust has the time and length of the head only.
            response.request_meta["response_time"] = 1000 * (time.perf_counter() - result.sent_s)
            response.request_meta["response_length"] = len(received)
            if result.error is not None:
                response.failure(f"{result.error}: {result.detail}")
                return None
        self._report(result)
        return answer_text(received)

    def _report(self, result: ChatResult) -> None:
        if result.ttft_s is not None:
            self._fire("TTFT", "ms", 1000 * result.ttft_s)
        if result.tpot_s is not None:
            self._fire("TPOT", "ms", 1000 * result.tpot_s)
        if result.prompt_tokens:
            self._fire("cached", "% of prompt tokens", 100 * result.cached_tokens / result.prompt_tokens)

    def _fire(self, kind: str, name: str, value: float) -> None:
        _hooks.request.fire(
            request_type=kind, name=name, response_time=value, response_length=0, exception=None, context={}
        )
