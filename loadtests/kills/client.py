"""The load: requests at fixed moments, whatever became of those before, on keep-alive connections."""

import asyncio
import random
from collections import deque
from dataclasses import dataclass

from loadtests.soak.clients import Connection, json_post
from loadtests.stack.ports import LOOPBACK

_GROUPS = 20
_SYSTEM_WORDS = 300
_STREAMED = 0.5
_CLOSED = 0.1
"""Share of connections that are closed after an answer, so that new ones come all the time."""
_END_WITHIN_S = 30.0


@dataclass(slots=True)
class Sent:
    """One request.

    Attributes:
        sent_s: monotonic seconds.
        streamed: whether it asked for a stream.
        client_port: its connection's on our side; 0 if there was none.
        replica: who answers, as the gateway says; None as long as it does not.
        outcome: the status of the complete answer, `broken`, `refused`, or `no end`.
        seconds: until then.
    """

    sent_s: float
    streamed: bool
    client_port: int = 0
    replica: str | None = None
    outcome: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether there is no complete answer."""
        return self.outcome != "200"


class _Connection(Connection):
    """One that keeps which replica answers."""

    def __init__(self) -> None:
        super().__init__()
        self.request: Sent | None = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep the replica."""
        if self.request is not None and name.lower() == b"x-warmgate-replica":
            self.request.replica = value.decode()

    @property
    def client_port(self) -> int:
        """Our side's port."""
        name = self._transport.get_extra_info("sockname")
        return int(name[1]) if name else 0


class OpenLoop:
    """Sends at a rate until told to stop.

    Attributes:
        requests: all that were sent, in order.
        late_s: by how much the latest one was sent too late.
    """

    def __init__(self, port: int, model: str, rate_per_s: float, seed: int) -> None:
        """Prepare.

        Args:
            port: the gateway's.
            model: what to ask for.
            rate_per_s: requests per second, evenly.
            seed: of prompts and connections.
        """
        self.requests: list[Sent] = []
        self.late_s = 0.0
        self._port = port
        self._model = model
        self._interval_s = 1.0 / rate_per_s
        self._rng = random.Random(seed)
        self._idle: deque[_Connection] = deque()
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, duration_s: float) -> None:
        """Send for so long, and wait until all have ended."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        # Counted: sums of intervals depend, in their last bits, on how long the machine has been up.
        for number in range(round(duration_s / self._interval_s)):
            due_s = begun_s + number * self._interval_s
            await asyncio.sleep(due_s - loop.time())
            self.late_s = max(self.late_s, loop.time() - due_s)
            task = loop.create_task(self._send())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        if self._running:
            await asyncio.wait(self._running, timeout=_END_WITHIN_S)
        for connection in self._idle:
            connection.close()

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        request = Sent(loop.time(), self._rng.random() < _STREAMED, outcome="no end")
        self.requests.append(request)
        try:
            connection = await self._connection()
            request.client_port = connection.client_port
            connection.request = request
            request.outcome = await connection.ask(self._body(request.streamed))
        except OSError:
            request.outcome = "refused"
        else:
            if connection.open and self._rng.random() >= _CLOSED:
                self._idle.append(connection)
            else:
                connection.close()
        finally:
            request.seconds = loop.time() - request.sent_s

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, LOOPBACK, self._port)
        return connection

    def _body(self, streamed: bool) -> bytes:
        group, question = self._rng.randrange(_GROUPS), self._rng.random()
        messages = [
            {"role": "system", "content": f"group {group} " * _SYSTEM_WORDS},
            {"role": "user", "content": f"question {question}"},
        ]
        body = {"model": self._model, "messages": messages}
        return json_post("/v1/chat/completions", {**body, "stream": True} if streamed else body)
