"""Whole stacks: simulated replicas and the real gateway as processes, as `make run` and the benchmark start them."""

import asyncio
import json
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.bench_command import bench
from loadtests.bench_compare import bench_policy
from loadtests.bench_trace import TraceLoad
from loadtests.stack import ChildFailedError, FleetOptions, GatewayOptions, Stack
from loadtests.stack.__main__ import main
from loadtests.stack.ports import check_free, free_ports
from loadtests.trace import TraceRequest

FLEET = FleetOptions(replicas=2, speedup=20.0, stream_interval=4)

# Four conversations of five turns, one turn a second: each turn repeats the last one's prompt and adds a block.
CONVERSATIONS = [
    TraceRequest(
        timestamp=1000.0 * turn + 100 * talk,
        input_length=512 * (turn + 1) - 12,
        output_length=8,
        hash_ids=[0, *range(100 * talk + 1, 100 * talk + 1 + turn)],
    )
    for turn in range(5)
    for talk in range(4)
]


async def test_the_benchmark_on_a_stack_of_its_own(tmp_path: Path) -> None:
    gateway = GatewayOptions(policy="predicted_ttft", hardware="h100-sxm", model="llama-3.1-8b", seed=1)
    load = TraceLoad(model="", speed=5.0)
    summary = await bench_policy(CONVERSATIONS, load, FLEET, gateway, lambda name, total: lambda progress: None)
    assert (summary.policy, summary.requests, summary.errors_by_kind) == ("predicted_ttft", 20, {})
    assert summary.completion_tokens == 20 * 8
    assert sum(request.input_length for request in CONVERSATIONS) <= summary.prompt_tokens
    assert 0.2 < summary.token_hit_rate < 0.9
    assert set(summary.requests_per_replica) <= {"replica-1", "replica-2"}
    assert summary.ttft_prediction is not None
    assert summary.ttft_prediction.requests == 20
    assert summary.engine is not None
    assert summary.engine.ttft_ms.mean == pytest.approx(20 * summary.wall.ttft_ms.mean)


async def test_the_command_compares_policies_and_keeps_what_it_has(tmp_path: Path) -> None:
    trace, output = tmp_path / "trace.jsonl", tmp_path / "out.json"
    trace.write_text("\n".join(request.model_dump_json() for request in CONVERSATIONS[:8]))
    arguments = ["trace", str(trace), "--replicas", "2", "--speedup", "50", "--speed", "20"]
    arguments += ["--policy", "round_robin,predicted_ttft", "--output", str(output)]
    result = await asyncio.to_thread(CliRunner().invoke, bench, arguments)
    assert result.exit_code == 0, result.output
    figures = json.loads(output.read_text())
    assert [(run["policy"], run["requests"], run["errors"]) for run in figures] == [
        ("round_robin", 8, 0),
        ("predicted_ttft", 8, 0),
    ]
    assert {run["speedup"] for run in figures} == {50.0}
    assert "engine time" in result.output


async def test_a_replica_process_that_dies_is_named() -> None:
    async with Stack(FLEET, GatewayOptions()) as stack:
        stack._children._children[0].send(signal.SIGKILL)
        assert "replicas was killed by SIGKILL" in str(await stack.first_failure())


async def test_a_fleet_that_cannot_start_says_why() -> None:
    with pytest.raises(ChildFailedError, match="replicas exited with status") as caught:
        await Stack(FleetOptions(replicas=1, hardware="abacus")).__aenter__()
    assert "h100-sxm" in str(caught.value)


async def test_a_taken_port_is_found_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"port {port} for the gateway's admin side"):
            await Stack(FLEET, GatewayOptions(admin_port=port)).__aenter__()


@asynccontextmanager
async def command(*arguments: object) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtests.stack", *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def pasted(command_line: str) -> str:
    """Output of a line as a shell runs it."""
    shell = await asyncio.create_subprocess_shell(command_line, stdout=asyncio.subprocess.PIPE)
    output, _ = await shell.communicate()
    return output.decode()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_banner_has_a_line_that_works_and_a_signal_ends_it(number: signal.Signals) -> None:
    ports = free_ports(4)
    arguments = ["--replicas", 2, "--first-replica-port", min(ports[:2]), "--speedup", 20]
    if abs(ports[0] - ports[1]) != 1:
        arguments[1] = 1
    async with command(*arguments, "--port", ports[2], "--admin-port", ports[3]) as process:
        assert process.stdout is not None
        banner = ""
        while "Ctrl-C" not in banner:
            line = await process.stdout.readline()
            assert line, banner
            banner += line.decode()
        curl = banner[banner.index("curl ") : banner.index("\n\nMetrics:")]
        answer = await pasted(curl)
        events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert sum(bool(json.loads(event)["choices"][0]["delta"].get("content")) for event in events[:-1]) > 1
        metrics = await pasted(f"curl -s http://127.0.0.1:{ports[3]}/metrics")
        assert "warmgate_" in metrics
        process.send_signal(number)
        await process.stdout.read()
        assert await process.wait() == 0
    for port in (ports[2], ports[3], min(ports[:2])):
        check_free(port, "a test", "--port")


async def test_the_load_test_runs_against_a_stack() -> None:
    arguments = ["--run-locust", "--replicas", 1, "--speedup", 50, "--users", 2, "--conversations", 2]
    async with command(*arguments, "--think-time", 0, "--max-tokens", 4, "--run-time", "60s") as process:
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert "TTFT" in output.decode()


async def test_the_command_fails_with_a_reason() -> None:
    async with command("--replicas", 1, "--run-locust", "--hardware", "abacus") as process:
        output, _ = await process.communicate()
    assert process.returncode == 1
    assert "error: replicas exited" in output.decode()


def test_arguments_for_locust_need_locust() -> None:
    result = CliRunner().invoke(main, ["--users", "3"])
    assert result.exit_code == 2
    assert "unknown arguments: --users 3" in result.output
