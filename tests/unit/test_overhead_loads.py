"""How the load generator counts streamed events, byte by byte, and how gateways and peers are started."""

import asyncio
import stat
from pathlib import Path
from typing import cast

import pytest

from loadtests.overhead import peers
from loadtests.overhead.gateways import NAMES, Place, program
from loadtests.overhead.prompts import Requests
from loadtests.overhead.streams import Stream, Streams
from loadtests.overhead.stub import Answers

# What stands last in the head is what a hurried reader takes for the end of a chunked body.
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx-predicted-ttft-ms: 8.0\r\n\r\n"


class FakeTransport:
    def __init__(self) -> None:
        self.closed = False
        self.sent = b""

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.sent += b"".join(parts)

    def close(self) -> None:
        self.closed = True

    abort = close


def stream() -> tuple[Streams, Stream, FakeTransport]:
    load = Streams(1, Requests(1024, "gateway", stream=True), 1)
    transport = FakeTransport()
    connection = Stream(load)
    connection.connection_made(cast(asyncio.BaseTransport, transport))
    return load, connection, transport


async def test_events_are_counted_wherever_reads_are_cut() -> None:
    answers = Answers("bench", 2)
    whole = HEAD + answers.role + answers.token * 2 + answers.end
    for cut in range(len(b"HTTP/1.1 200"), len(whole)):
        load, connection, transport = stream()
        connection.data_received(whole[:cut])
        assert not transport.closed
        connection.data_received(whole[cut:])
        connection.connection_lost(None)
        assert (load.completed, load.errors, transport.closed) == (6, {}, True), cut


async def test_events_are_counted_when_bytes_come_one_by_one() -> None:
    answers = Answers("bench", 2)
    load, connection, transport = stream()
    connection.data_received(HEAD)
    for byte in answers.role + answers.token + answers.end:
        assert not transport.closed
        connection.data_received(bytes([byte]))
    assert (load.completed, transport.closed) == (5, True)


async def test_a_last_chunk_of_its_own_ends_a_stream() -> None:
    load, connection, transport = stream()
    answers = Answers("bench", 1)
    for part in (HEAD, answers.token, answers.end[: -len(b"0\r\n\r\n")], b"0\r\n\r\n"):
        assert not transport.closed
        connection.data_received(part)
    assert transport.closed
    assert load.completed == 4


async def test_a_stream_that_breaks_off_or_is_refused_is_an_error() -> None:
    load, connection, _ = stream()
    connection.data_received(HEAD + Answers("bench", 1).token)
    connection.connection_lost(None)
    assert load.errors == {"stream_cut": 1}
    load, connection, transport = stream()
    connection.data_received(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
    connection.connection_lost(None)
    assert load.errors == {"http_503": 1}
    assert transport.closed


@pytest.mark.parametrize("name", NAMES)
def test_programs_know_their_replicas_and_ports(name: str, tmp_path: Path) -> None:
    replicas = tuple(f"http://127.0.0.1:{port}" for port in range(9001, 9009))
    place = Place(replicas, 9100, 9101, tmp_path, tmp_path / "venv")
    command = program(name, place, tmp_path / "gateway.log")
    text = " ".join(command) + "".join(path.read_text() for path in tmp_path.glob("*.conf"))
    assert str(tmp_path / "gateway.log") in command
    assert "9100" in text
    assert all(url.removeprefix("http://") in text for url in replicas)
    if name in peers.PACKAGES:
        assert "--policy cache_aware" in text
        assert str(tmp_path / "venv" / "bin" / peers.PACKAGES[name]) in command


async def test_the_shell_becomes_the_gateway_and_its_output_goes_to_the_log(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    router = venv / "bin" / "vllm-router"
    router.write_text('#!/bin/sh\necho "$$ $1 $2"; echo problem >&2\n')
    router.chmod(router.stat().st_mode | stat.S_IXUSR)
    log = tmp_path / "log"
    command = program("vllm", Place(("http://127.0.0.1:1",), 2, 3, tmp_path, venv), log)
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == 0
    assert log.read_text() == f"{process.pid} --policy cache_aware\nproblem\n"


async def test_installed_peers_are_used_as_they_are(tmp_path: Path) -> None:
    for name, text in (("sglang-router", ""), ("python", "#!/bin/sh\necho 1.2.3\n")):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    told: list[str] = []
    assert await peers.ensure(tmp_path, ["sglang"], told.append) == {"sglang": "1.2.3"}
    assert told == []


async def test_a_peer_that_cannot_be_installed_says_why(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "no such package: $6"; exit 1\n')
    python.chmod(0o755)
    told: list[str] = []
    with pytest.raises(peers.PeersError, match="no such package: vllm-router"):
        await peers.ensure(tmp_path, ["vllm"], told.append)
    assert "vllm-router" in told[0]
