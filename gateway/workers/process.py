"""The supervisor's handle on one worker process."""

import asyncio
import itertools
import logging
import socket
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from gateway.admin.merge import Page
from gateway.workers.channel import Channel
from gateway.workers.facts import Fact
from gateway.workers.handover import Handover, Lane

logger = logging.getLogger(__name__)


class State(StrEnum):
    """What a worker is doing."""

    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"
    """It ends what runs, and gets nothing new."""
    GONE = "gone"


class NoAnswer(Exception):
    """A worker has not answered in time, or has refused; the message says which."""


class WorkerProcess:
    """A worker that has been started.

    Attributes:
        number: from 1; a worker that replaces another has its number.
        place: its row on the board, which no other worker that is alive has; -1 if it has none.
        pid: process id.
        state: see `State`.
        page: the last metrics page it sent.
        lane: the way of connections to it, while it serves.
    """

    def __init__(
        self,
        number: int,
        place: int,
        process: asyncio.subprocess.Process,
        channel: Channel,
        connections: socket.socket,
        on_state: Callable[["WorkerProcess"], None],
    ) -> None:
        """Use `start`."""
        self.number = number
        self.place = place
        self.pid = process.pid
        self.state = State.STARTING
        self.page: Page = []
        self._parts: Page = []
        self.lane: Lane | None = None
        self.connections = connections
        self._process = process
        self._channel = channel
        self._on_state = on_state
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def start(
        cls, number: int, board: int, place: int, on_state: Callable[["WorkerProcess"], None]
    ) -> "WorkerProcess":
        """Start a process; it waits for the order to begin.

        Args:
            number: its number.
            board: descriptor of the memory that workers share.
            place: its row there, -1 for none.
            on_state: called whenever its state has changed.

        Raises:
            OSError: the system has no room for one.
        """
        ours, theirs = socket.socketpair()
        our_connections, their_connections = socket.socketpair()
        with theirs, their_connections:
            try:
                # No fork of this process goes on running Python: loops and threads do not survive it.
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "gateway.workers.worker",
                    str(number),
                    str(theirs.fileno()),
                    str(their_connections.fileno()),
                    str(board),
                    str(place),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), their_connections.fileno(), board),
                )
            except OSError:
                ours.close()
                our_connections.close()
                raise
        return cls(number, place, process, await Channel.over(ours), our_connections, on_state)

    @property
    def serving(self) -> bool:
        """Whether it gets connections."""
        return self.state is State.SERVING

    def begin(self, config: dict[str, Any], facts: list[Fact]) -> None:
        """Tell it what to do.

        Args:
            config: of `settings.document`.
            facts: all that is known of the replicas.
        """
        self._channel.send({"do": "start", "config": config, "facts": facts})

    def send(self, order: str) -> None:
        """Give an order that needs no answer."""
        self._channel.send({"do": order})

    def send_frame(self, data: bytes) -> None:
        """Send a message made with `channel.frame`."""
        self._channel.send_frame(data)

    async def ask(self, what: str, within_s: float, **details: Any) -> Any:
        """Ask for something, and wait for the answer.

        Args:
            what: see `gateway.workers.worker`.
            within_s: how long to wait.
            details: go with the question.

        Raises:
            NoAnswer: none in time, or the worker has refused or gone.
        """
        number = next(self._ids)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._channel.send({"do": what, "id": number, **details})
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except TimeoutError:
            raise NoAnswer(f"worker {self.number} has not answered in {within_s:g} s") from None
        finally:
            del self._asked[number]

    async def until_gone(self) -> int:
        """Wait for the end of the process; return its exit code, negative for a signal."""
        code = await self._process.wait()
        # What it said last may still be on its way.
        await self._reader
        self._channel.close()
        self._became(State.GONE)
        return code

    def kill(self) -> None:
        """End it at once."""
        if self._process.returncode is None:
            self._process.kill()

    def open_lane(self, handover: Handover) -> None:
        """Let connections come."""
        if self.serving and self.lane is None:
            self.lane = handover.add(self.connections)

    def close_lane(self, handover: Handover) -> None:
        """Give the connections it has not taken to others; for a process that has gone."""
        if self.lane is not None:
            handover.remove(self.lane)
            self.lane = None
        else:
            self.connections.close()

    async def _read(self) -> None:
        while (message := await self._channel.receive()) is not None:
            said = message.get("is")
            if said == "serving":
                self._became(State.SERVING)
            elif said == "leaving":
                self._became(State.LEAVING)
            elif said == "page":
                if message["part"] == 0:
                    self._parts = []
                self._parts += message["page"]
                if message["ends"]:
                    self.page, self._parts = self._parts, []
            else:
                self._answered(message)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(NoAnswer(f"worker {self.number} has gone"))

    def _answered(self, message: dict[str, Any]) -> None:
        answer = self._asked.get(message["id"])
        if answer is None or answer.done():
            return
        if "refused" in message:
            answer.set_exception(NoAnswer(f"worker {self.number}: {message['refused']}"))
        else:
            answer.set_result(message["answer"])

    def _became(self, state: State) -> None:
        if state is not self.state and self.state is not State.GONE:
            self.state = state
            self._on_state(self)
