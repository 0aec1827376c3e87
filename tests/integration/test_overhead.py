"""The overhead benchmark against its stub upstream: what is counted is what happened, and CPU time is somebody's."""

import asyncio
import json
import shutil
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import aiohttp
import orjson
import pytest
from click.testing import CliRunner

from gateway.bench_command import bench
from loadtests.overhead.generator import drive
from loadtests.overhead.job import Job, Outcome
from loadtests.overhead.loads import ClosedLoop, Load, OpenLoop
from loadtests.overhead.process_tree import ProcessGoneError, ProcessTree
from loadtests.overhead.prompts import Requests
from loadtests.overhead.stub import Answers, Stub
from loadtests.overhead.wrk import closed_loop
from loadtests.stack.ports import free_ports

CHAT = "/v1/chat/completions"


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    upstream = Stub(Answers("bench", 1_000_000), free_ports(2), interval_s=0.005)
    await upstream.start()
    yield upstream
    upstream.close()


async def until(condition: Callable[[], bool]) -> None:
    """Poll: the loads tell nobody what they count."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def chats(stub: Stub) -> int:
    return sum(port.calls[CHAT.encode()] for port in stub.ports)


async def test_a_closed_loop_counts_every_answer(stub: Stub) -> None:
    load = ClosedLoop(stub.ports[0].number, Requests(1024, "stub"), connections=4)
    await load.start()
    await until(lambda: load.completed >= 200)
    await load.finish(5.0)
    assert load.total == load.completed == chats(stub)
    assert len(load.latencies_s) == load.completed
    assert load.errors == {}


async def test_long_prompts_arrive_whole(stub: Stub) -> None:
    load = ClosedLoop(stub.ports[0].number, Requests(512 * 1024, "stub"), connections=2)
    await load.start()
    await until(lambda: load.completed >= 10)
    await load.finish(5.0)
    assert (load.errors, load.total) == ({}, chats(stub))


async def test_an_open_loop_sends_what_is_due(stub: Stub) -> None:
    load = OpenLoop(stub.ports[0].number, Requests(1024, "stub"), rate_per_s=500.0, connections=1)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await load.start()
    await until(lambda: load.completed >= 50)
    elapsed_s = loop.time() - started_s
    await load.finish(5.0)
    assert load.completed <= 500.0 * elapsed_s
    assert load.total == load.completed == chats(stub)
    assert load.errors == {}


async def test_streams_are_counted_to_the_last_event(stub: Stub) -> None:
    outcome = await drive(
        Job("streams", stub.ports[1].number, 1024, 0.1, 0.05, connections=20, stub_port=stub.ports[0].number)
    )
    assert outcome.errors == {}  # the stub has sent exactly as many events as came
    assert outcome.total == chats(stub) == 20
    assert 0 < outcome.reads <= outcome.completed


async def test_streams_end_on_their_own_after_the_events_asked_for() -> None:
    upstream = Stub(Answers("bench", 3), free_ports(1), interval_s=0.001)
    await upstream.start()
    body = {"model": "bench", "stream": True}
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{upstream.ports[0].number}"
        async with session.post(url + CHAT, json=body) as response:
            # aiohttp writes a space after the colon, which the stub does not look for.
            assert (await response.json())["object"] == "chat.completion"
        async with session.post(url + CHAT, data=orjson.dumps(body)) as response:
            events = (await response.text()).split("\n\n")[:-1]
        assert len(events) == 1 + 3 + 3
        assert events[-1] == "data: [DONE]"
        assert [json.loads(event[6:])["object"] for event in events[:-1]] == ["chat.completion.chunk"] * 6
        async with session.get(url + "/stub/calls") as response:
            assert (await response.json())[str(upstream.ports[0].number)] == {CHAT: 2}
        async with session.get(url + "/stub/finish") as response:
            assert await response.json() == {"streams": 0, "events": 7}
    upstream.close()


Reply = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(reply: Reply) -> AsyncIterator[int]:
    """A server that reads one head after the other and lets `reply` do what it likes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                await reply(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield int(listener.sockets[0].getsockname()[1])


async def failures(port: int, count: int = 3) -> Counter[str]:
    """What a closed loop makes of a server."""
    load: Load = ClosedLoop(port, Requests(1024, "server"), connections=2)
    await load.start()
    await until(lambda: sum(load.errors.values()) >= count)
    await load.finish(5.0)
    return load.errors


async def test_answers_that_are_no_answers_are_told_apart() -> None:
    async def unavailable(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        await writer.drain()
        writer.transport.abort()

    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"good morning\r\n\r\n")

    for reply, kind in ((unavailable, "http_503"), (cut, "reset"), (nonsense, "malformed")):
        async with server(reply) as port:
            errors = await failures(port)
        assert set(errors) == {kind}
    assert set(await failures(free_ports(1)[0])) == {"connect"}


async def test_a_server_that_closes_after_each_answer_is_no_error() -> None:
    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        raise ConnectionError

    async with server(closing) as port:
        load = ClosedLoop(port, Requests(1024, "server"), connections=2)
        await load.start()
        await until(lambda: load.completed >= 10)
        await load.finish(5.0)
    assert load.errors == {}


async def test_answers_that_never_come_are_counted_at_the_end() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with server(silent) as port:
        load = ClosedLoop(port, Requests(1024, "server"), connections=3)
        await load.start()
        await until(lambda: load.total == 3)
        await load.finish(0.01)
    assert load.errors == {"timeout": 3}


BUSY = """
import subprocess, sys, threading, time
work = "import time\\nwhile time.process_time() < 0.15: pass\\ninput()"
child = subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE)
print("started", flush=True)
input()
begun = time.process_time()
ballast = bytearray(b"x") * 60_000_000
def burn():
    while time.process_time() - begun < 0.2: pass
threads = [threading.Thread(target=burn) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(time.process_time() - begun, flush=True)
input()
"""


async def test_cpu_time_and_memory_are_those_of_the_process_its_threads_and_its_children() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BUSY, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"started\n"
        tree, alone = ProcessTree(process.pid), ProcessTree(process.pid)
        alone._processes = alone._processes[:1]
        before_s, rss = alone.cpu_s(), alone.rss_bytes()
        process.stdin.write(b"\n")
        used_s = float(await process.stdout.readline())  # by its own account, threads that have ended included
        assert used_s >= 0.2
        assert alone.cpu_s() - before_s == pytest.approx(used_s, abs=0.03)
        assert alone.rss_bytes() - rss > 50_000_000
        await until(lambda: tree.cpu_s() - alone.cpu_s() >= 0.15)  # what the child burns
    finally:
        process.kill()
        await process.wait()
    with pytest.raises(ProcessGoneError):
        tree.cpu_s()
    with pytest.raises(ProcessGoneError):
        ProcessTree(process.pid)


async def test_the_generator_is_a_process_that_reports_costs() -> None:
    ports = free_ports(2)
    upstream = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtests.overhead.stub", "--port", str(ports[0]), "--port", str(ports[1])),
        stdout=asyncio.subprocess.PIPE,
    )
    assert upstream.stdout is not None
    try:
        assert await upstream.stdout.readline() == b"ready\n"
        job = Job("closed", ports[0], 1024, 0.3, 0.05, connections=4, watched={"gateway": upstream.pid})
        generator = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loadtests.overhead.generator"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await generator.communicate(orjson.dumps(asdict(job)))
        assert generator.returncode == 0
        outcome = Outcome(**orjson.loads(output))
        assert outcome.errors == {}
        assert 0 < outcome.completed < outcome.total
        assert 0 < outcome.p50_ms <= outcome.p99_ms
        assert set(outcome.cpu_s) == {"gateway", "generator"}
        assert min(outcome.cpu_s.values()) > 0
        assert outcome.peak_rss_bytes > 5_000_000
        upstream.send_signal(signal.SIGTERM)
        assert await upstream.wait() == 0
    finally:
        if upstream.returncode is None:
            upstream.kill()
            await upstream.wait()


@pytest.mark.skipif(shutil.which("wrk") is None, reason="no wrk")
async def test_wrk_sends_the_same_requests_in_the_same_order(tmp_path: Path) -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                seen.append(head + await reader.readexactly(length))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        port = int(listener.sockets[0].getsockname()[1])
        outcome = await closed_loop(Job("closed", port, 1024, 1.0, 1.0, connections=1, first_request=1000), tmp_path)
    assert outcome.errors == {}
    assert 0 < outcome.completed < outcome.total <= len(seen)
    expected = Requests(1024, f"127.0.0.1:{port}")
    numbers = {b"".join(expected.request(number)): number for number in range(1000, 1000 + 2 * len(seen))}
    order = [numbers[request] for request in seen]
    assert order[0] in {1000, 1001}  # wrk asks the script for one request to look at before it starts
    steps = Counter(later - earlier for earlier, later in pairwise(order))
    jump = steps - Counter({1: len(seen)})
    assert sum(jump.values()) <= 1  # from the warm-up to what is measured
    assert all(step > 0 for step in jump)


async def test_the_whole_command(tmp_path: Path) -> None:
    output, markdown, logs = tmp_path / "out.json", tmp_path / "out.md", tmp_path / "logs"
    arguments = ["overhead", "--gateways", "warmgate", "--rounds", "1", "--seconds", "0.3", "--warmup", "0.1"]
    arguments += ["--sizes", "1,32", "--streams", "8", "--connections", "4", "--logs", str(logs)]
    arguments += ["--output", str(output), "--markdown", str(markdown)]
    result = await asyncio.to_thread(CliRunner().invoke, bench, arguments)
    assert result.exit_code == 0, result.output
    figures = json.loads(output.read_text())
    assert figures["warnings"] == [
        warning for warning in figures["warnings"] if " pace" in warning or "at a" in warning
    ]
    metrics = {metric["metric"]: metric for metric in figures["metrics"]}
    assert set(metrics) == {
        *("cpu_us_per_request_1kb", "cpu_us_per_request_32kb", "cpu_us_per_chunk_8_streams", "requests_per_s"),
        *("added_p50_ms", "added_p99_ms", "peak_rss_mb_8_streams", "idle_cpu_ms_per_s", "calls_per_request"),
    }
    for name, metric in metrics.items():
        assert metric["gateways"]["warmgate"]["errors"] == 0
        assert name.startswith("added") or metric["gateways"]["warmgate"]["median"] > 0
        assert metric["best_peer"] is None
    runs = {(run["kind"], run["size"]): run for run in figures["runs"]}
    streams = runs["streams", 8]
    assert streams["calls"][CHAT] == streams["outcome"]["total"] == 8
    requests = runs["requests", 1]
    assert requests["calls"][CHAT] == requests["outcome"]["total"]
    lines = (logs / "warmgate-1.log").read_text().splitlines()
    assert sum('"event":"request"' in line for line in lines) > requests["outcome"]["total"]
    assert markdown.read_text().startswith("|  | warmgate |")
    assert "CPU µs/request, 1 KB" in result.output


def test_arguments_are_checked_before_anything_starts() -> None:
    for arguments, message in (
        (["--sizes", "1,x"], "positive whole numbers"),
        (["--streams", "0"], "positive whole numbers"),
        (["--gateways", "warmgate,haproxy"], "haproxy: not one of warmgate, sglang, vllm, nginx"),
        (["--only", "sleep"], "sleep: not one of"),
    ):
        result = CliRunner().invoke(bench, ["overhead", *arguments])
        assert result.exit_code == 2
        assert message in result.output
