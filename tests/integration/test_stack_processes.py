"""Child processes of a stack: their readiness, their failures, and that none is ever left.

A child shows that it lives by a connection to the test's own listener, which the kernel closes when it dies.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from loadtests.stack import child
from loadtests.stack.ports import PortTakenError, check_free, free_ports
from loadtests.stack.processes import ChildFailedError, ChildGroup

WATCHED = """
import socket, sys, signal
if "deaf" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
line.recv(1)
"""


class Watch:
    """A listener that tells when programs have come and gone."""

    def __init__(self) -> None:
        self.port = 0
        self.came: asyncio.Queue[int] = asyncio.Queue()
        self.gone: asyncio.Queue[int] = asyncio.Queue()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")[1]
        self.came.put_nowait(peer)
        with suppress(ConnectionError):
            await reader.read()
        self.gone.put_nowait(peer)
        writer.close()


@pytest.fixture
async def watch() -> AsyncIterator[Watch]:
    watch = Watch()
    server = await asyncio.start_server(watch.accept, "127.0.0.1", 0)
    watch.port = server.sockets[0].getsockname()[1]
    async with server:
        yield watch


def python(program: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", program, *map(str, arguments)]


async def test_ready_echo_and_end(watch: Watch) -> None:
    lines: list[tuple[str, str]] = []
    async with ChildGroup(echo=lambda name, line: lines.append((name, line))) as children:
        program = "print('hello', flush=True)\n" + WATCHED
        child = await children.start("engine", python(program, watch.port), ready_line="ready")
        await children.until("the start", child.ready(), timeout_s=60)
        await watch.came.get()
    await watch.gone.get()
    assert lines == [("engine", "hello")]


async def test_a_child_that_ends_is_named_with_its_last_words(watch: Watch) -> None:
    async with ChildGroup() as children:
        await children.start("healthy", python(WATCHED, watch.port))
        await children.start("broken", python("import sys; print('out'); sys.exit('no weights')"))
        message = str(await children.first_failure())
    assert message.startswith("broken exited with status 1.")
    assert "out" in message
    assert "no weights" in message


async def test_a_child_that_is_killed_is_named_with_the_signal(watch: Watch) -> None:
    async with ChildGroup() as children:
        child = await children.start("engine", python(WATCHED, watch.port))
        await watch.came.get()
        child.send(signal.SIGKILL)
        assert "engine was killed by SIGKILL" in str(await children.first_failure())


async def test_waiting_ends_when_a_child_does() -> None:
    async with ChildGroup() as children:
        child = await children.start("broken", python("print('sorry')"), ready_line="ready")
        with pytest.raises(ChildFailedError, match=r"broken exited with status 0.*\n.*sorry"):
            await children.until("the start", child.ready(), timeout_s=60)


async def test_waiting_is_bounded(watch: Watch) -> None:
    async with ChildGroup() as children:
        await children.start("engine", python("print('loading', flush=True)\n" + WATCHED, watch.port))
        await watch.came.get()
        with pytest.raises(ChildFailedError, match=r"the start took longer than 0\.01 s"):
            await children.until("the start", asyncio.Event().wait(), timeout_s=0.01)


async def test_a_program_that_does_not_exist() -> None:
    async with ChildGroup() as children:
        await children.start("engine", ["/does/not/exist"])
        assert "No such file" in str(await children.first_failure())


async def test_children_end_when_the_context_fails(watch: Watch) -> None:
    async def fail() -> None:
        async with ChildGroup() as children:
            for name in ("one", "two"):
                await children.start(name, python(WATCHED, watch.port))
                await watch.came.get()
            raise RuntimeError("unrelated")

    with pytest.raises(RuntimeError, match="unrelated"):
        await fail()
    await watch.gone.get()
    await watch.gone.get()


async def test_a_deaf_child_is_killed(watch: Watch) -> None:
    async with ChildGroup(grace_s=0.01) as children:
        child = await children.start("engine", python(WATCHED, watch.port, "deaf"))
        await watch.came.get()
    await watch.gone.get()
    assert child.process.returncode == -signal.SIGKILL


async def test_what_a_child_has_started_ends_with_it(watch: Watch) -> None:
    program = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    async with ChildGroup() as children:
        await children.start("engine", python(program, WATCHED, watch.port, "deaf"))
        await watch.came.get()
    await watch.gone.get()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
async def test_children_of_a_killed_parent_end(watch: Watch) -> None:
    program = """
import asyncio, sys
from loadtests.stack.processes import ChildGroup
async def main():
    async with ChildGroup() as children:
        await children.start("engine", sys.argv[1:])
        await asyncio.Event().wait()
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(*python(program, *python(WATCHED, watch.port)))
    await watch.came.get()
    parent.kill()
    await parent.wait()
    await watch.gone.get()


async def test_a_very_long_line_does_not_stop_the_reading(watch: Watch) -> None:
    program = "print('x' * (3 << 20), flush=True)\n" + WATCHED
    async with ChildGroup() as children:
        child = await children.start("engine", python(program, watch.port), ready_line="ready")
        await children.until("the start", child.ready(), timeout_s=60)


def test_free_ports_are_free_and_different() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        check_free(port, "a test", "--port")


def test_a_taken_port_names_the_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"port {port} for the gateway .*--port"):
            check_free(port, "the gateway", "--port")


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_launcher_gives_up_without_its_parent() -> None:
    # Any process id but the caller's will do for a parent that has died before the wish was registered.
    done = subprocess.run(
        [sys.executable, child.__file__, str(os.getpid() + 1), "echo", "started"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "the parent is gone" in done.stderr
