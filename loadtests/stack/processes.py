"""Child processes that are watched while they run and gone when the context ends."""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

_LAUNCHER = Path(__file__).with_name("child.py")
_TAIL_LINES = 40
_LINE_LIMIT_BYTES = 1 << 20
_DRAIN_S = 2.0


def bound_to_this_process(program: Sequence[str]) -> list[str]:
    """Command line of a program that ends when this process does; see `child.py`."""
    return [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), *program]


class ChildFailedError(RuntimeError):
    """A child did not start or ended on its own; the message has its last output."""


class Child:
    """One running program, its output read as it comes."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        pipe: asyncio.ReadTransport,
        output: asyncio.Task[None],
    ) -> None:
        self.name = name
        self.process = process
        self._pipe = pipe
        self._output = output
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._line_seen = asyncio.Event()

    @classmethod
    async def start(
        cls, name: str, program: Sequence[str], echo: Callable[[str], None] | None, ready_line: str | None
    ) -> Self:
        """Start a program in a session of its own, so that a terminal's Ctrl-C reaches only the parent."""
        # A pipe of our own: asyncio's waits for a process until all that inherited its pipes has ended.
        read_end, write_end = os.pipe()
        lines = asyncio.StreamReader(limit=_LINE_LIMIT_BYTES)
        try:
            pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(read_end, "rb", buffering=0)
            )
            process = await asyncio.create_subprocess_exec(
                *bound_to_this_process(program),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
            )
        finally:
            os.close(write_end)

        async def read() -> None:
            async for text in _lines(lines):
                child._tail.append(text)
                if text == ready_line:
                    child._line_seen.set()
                elif echo is not None:
                    echo(text)

        child = cls(name, process, pipe, asyncio.create_task(read(), name=f"output of {name}"))
        return child

    async def ready(self) -> None:
        """Wait for the line that the program prints when it is ready."""
        await self._line_seen.wait()

    async def ended(self) -> int:
        """Wait for the end of the program and of its output; returns the exit code, negative for a signal."""
        code = await self.process.wait()
        # What the program has left running may hold its output open, and a cancelled wait must not end the
        # reading.
        await asyncio.wait({self._output}, timeout=_DRAIN_S)
        return code

    def failure(self) -> ChildFailedError:
        """The error for a child that ended on its own."""
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with status {code}"
        return ChildFailedError(f"{self.name} {how}. {self.last_output()}")

    def last_output(self) -> str:
        """The tail of what the program wrote."""
        if not self._tail:
            return "It wrote nothing."
        return "Its last output:\n" + "\n".join(f"    {line}" for line in self._tail)

    def send(self, number: signal.Signals) -> None:
        """Signal the program, and for SIGKILL all it started; nothing happens when it has ended."""
        with suppress(ProcessLookupError, PermissionError):  # macOS: no permission on a group of zombies
            if number is signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)

    async def stop(self, grace_s: float) -> None:
        """Ask the program to end, and kill what is left of it after `grace_s`."""
        self.send(signal.SIGTERM)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), grace_s)
            self.send(signal.SIGKILL)  # also what a program that ended well has left behind
            await self.ended()
        finally:
            self.send(signal.SIGKILL)
            self._output.cancel()
            self._pipe.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of a program's output; one that is longer than the limit is dropped."""
    while True:
        try:
            line = await reader.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip()


class ChildGroup:
    """Children that live as long as the context: however it ends, none is left."""

    def __init__(self, echo: Callable[[str, str], None] | None = None, grace_s: float = 10.0) -> None:
        """Prepare an empty group.

        Args:
            echo: called with a child's name and each line it writes.
            grace_s: time a child has to end when asked to, before it is killed.
        """
        self._echo = echo
        self._grace_s = grace_s
        self._children: list[Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Last started, first stopped: a gateway goes before its replicas and sees no failures.
        try:
            while self._children:
                await self._children[-1].stop(self._grace_s)
                self._children.pop()
        finally:
            self.kill()

    async def start(self, name: str, program: Sequence[str], ready_line: str | None = None) -> Child:
        """Start a program.

        Args:
            name: how to call it in messages.
            program: path and arguments.
            ready_line: a line of its output that means it is ready; it is not echoed.
        """
        echo = self._echo
        child = await Child.start(name, program, None if echo is None else lambda line: echo(name, line), ready_line)
        self._children.append(child)
        return child

    def kill(self) -> None:
        """Kill all children now."""
        for child in self._children:
            child.send(signal.SIGKILL)

    async def first_failure(self) -> ChildFailedError:
        """Wait until a child ends on its own; returns the error that says which and why."""
        ends = {asyncio.create_task(child.ended()): child for child in self._children}
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
        return ends[done.pop()].failure()

    async def until(self, what: str, condition: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Wait for a condition while all children live.

        Args:
            what: names the condition in the message.
            condition: what to wait for.
            timeout_s: how long.

        Raises:
            ChildFailedError: a child ended first, or the time is over.
        """
        wanted = asyncio.create_task(condition)
        failure = asyncio.create_task(self.first_failure())
        try:
            done, _ = await asyncio.wait({wanted, failure}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if wanted in done:
                return wanted.result()
            if failure in done:
                raise failure.result()
            tails = "\n".join(f"{child.name}: {child.last_output()}" for child in self._children)
            raise ChildFailedError(f"{what} took longer than {timeout_s:g} s.\n{tails}")
        finally:
            wanted.cancel()
            failure.cancel()
            await asyncio.wait({wanted, failure})
