"""Traces and Locust users over real sockets: what they send, when, and what they make of the answers."""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner

from gateway.bench_command import bench
from loadtests.bench_compare import bench_running
from loadtests.bench_summary import summarise
from loadtests.bench_trace import Progress, TraceLoad, drive
from loadtests.sse_client import ChatClient
from loadtests.trace import TraceRequest

LOCUSTFILE = Path(__file__).parents[2] / "loadtests" / "locustfile.py"
LOAD = TraceLoad(model="m", speed=1000.0, max_output_tokens=3)


def request(timestamp: float, input_length: int, output_length: int, *hash_ids: int) -> TraceRequest:
    return TraceRequest(
        timestamp=timestamp,
        input_length=input_length,
        output_length=output_length,
        hash_ids=list(hash_ids),
    )


TRACE = [
    request(0, 600, 2, 0, 1),
    request(0, 600, 9, 0, 1),
    request(40, 100, 0, 2),
    request(50, 1024, 3, 0, 3),
]


class StubGateway:
    """Answers chats as a gateway with one replica and an infinite cache of whole prompts would."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.seen: set[str] = set()
        self.fail: dict[int, str] = {}
        """What to do wrong at the n-th chat."""
        self.open = 0
        self.most_open = 0
        self.peers: set[Any] = set()

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/v1/models", self.models)
        application.router.add_get("/ready", self.ready)
        application.router.add_post("/v1/chat/completions", self.chat)
        return application

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "served"}]})

    async def ready(self, _: web.Request) -> web.Response:
        return web.Response(status=503)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        failure = self.fail.get(len(self.bodies))
        self.bodies.append(body)
        if failure == "status":
            return web.json_response({"error": {"message": "no replica"}}, status=503)
        headers = {
            "content-type": "text/event-stream",
            "x-warmgate-replica": "r0",
            "x-warmgate-policy": "round_robin",
            "x-warmgate-predicted-ttft-ms": "10.5",
            "x-warmgate-expected-cached-tokens": "0",
        }
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await self._event(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for _ in range(body["max_tokens"]):
            await self._event(response, {"choices": [{"delta": {"content": "word "}}]})
        self.open -= 1
        if failure == "cut":
            assert request.transport is not None
            await self._event(response, {"error": {"message": "replica left"}})
            request.transport.close()
            return response
        prompt = body["messages"][0]["content"]
        cached = len(prompt) // 4 - 1 if prompt in self.seen else 0
        self.seen.add(prompt)
        usage = {
            "prompt_tokens": len(prompt) // 4,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    async def _event(response: web.StreamResponse, event: object) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@pytest.fixture
async def stub() -> AsyncIterator[StubGateway]:
    stub = StubGateway()
    server = TestServer(stub.application())
    await server.start_server()
    stub.url = str(server.make_url("")).rstrip("/")
    yield stub
    await server.close()


@pytest.fixture
async def client(stub: StubGateway) -> AsyncIterator[ChatClient]:
    async with ChatClient(stub.url) as client:
        yield client


async def test_a_trace_is_sent_as_it_says(stub: StubGateway, client: ChatClient) -> None:
    run = await drive(client, TRACE, LOAD)
    bodies = stub.bodies
    prompts = [body["messages"][0]["content"] for body in bodies]
    assert sorted(len(prompt) for prompt in prompts) == [400, 2400, 2400, 4096]
    assert len(set(prompts)) == 3
    assert sorted(body["max_tokens"] for body in bodies) == [1, 2, 3, 3]
    assert {body["model"] for body in bodies} == {"m"}
    assert [result.error for result in run.results] == [None] * 4
    assert len(run.dispatch_lags_s) == 4
    assert run.wall_s >= 0.050 / 1000


async def test_answers_become_figures(stub: StubGateway, client: ChatClient) -> None:
    # Far apart in time, so that the second prompt finds the first.
    summary = summarise(await drive(client, TRACE, TraceLoad(model="m", speed=1.0)), "round_robin")
    assert (summary.requests, summary.errors) == (4, 0)
    assert summary.prompt_tokens == 600 + 600 + 100 + 1024
    assert summary.completion_tokens == 2 + 9 + 1 + 3
    assert summary.cached_tokens in (0, 599)  # the first two are sent together
    assert summary.requests_per_replica == {"r0": 4}
    assert summary.ttft_prediction is not None
    assert summary.ttft_prediction.mean_predicted_ms == 10.5
    assert 0 < summary.wall.ttft_ms.mean <= summary.wall.e2e_ms.mean


async def test_failures_are_counted_by_kind(stub: StubGateway, client: ChatClient) -> None:
    stub.fail = {0: "status", 2: "cut"}
    changes: list[tuple[int, int, int]] = []

    def note(progress: Progress) -> None:
        changes.append((progress.done, progress.in_flight, progress.errors))

    run = await drive(client, TRACE, LOAD, note)
    assert summarise(run, "p").errors_by_kind == {"error_event": 1, "http_503": 1}
    assert changes[-1] == (4, 0, 2)
    assert {result.detail for result in run.results if result.error == "error_event"} == {"replica left"}


async def test_a_server_that_is_not_there() -> None:
    async with ChatClient("http://127.0.0.1:9") as client:
        run = await drive(client, TRACE[:1], LOAD)
        assert [result.error for result in run.results] == ["connect"]
        with pytest.raises(RuntimeError, match="v1/models"):
            await client.first_model()


async def test_arrivals_do_not_wait_for_answers(stub: StubGateway, client: ChatClient) -> None:
    together = asyncio.Event()
    answer = stub._event

    async def hold(response: web.StreamResponse, event: object) -> None:
        if stub.open == len(TRACE):
            together.set()
        await together.wait()
        await answer(response, event)

    stub._event = hold  # type: ignore[method-assign]
    await drive(client, TRACE, LOAD)
    assert stub.most_open == len(TRACE)


async def test_one_after_the_other_each_on_a_connection_of_its_own(stub: StubGateway) -> None:
    async with ChatClient(stub.url, keeps_alive=False) as client:
        run = await drive(client, TRACE, replace(LOAD, speed=0.001, serial=True, pause_s=0.05))
    assert [result.error for result in run.results] == [None] * 4
    sent = sorted(run.results, key=lambda result: result.sent_s)
    assert all(later.sent_s >= before.ended_s + 0.045 for before, later in itertools.pairwise(sent))
    # In the order of the trace, and not at its times: those would be 50 s apart.
    assert [body["max_tokens"] for body in stub.bodies] == [2, 3, 1, 3]
    assert run.wall_s < 25
    assert (stub.most_open, len(stub.peers)) == (1, 4)


async def test_a_running_gateway_names_its_policy_and_model(stub: StubGateway) -> None:
    url = stub.url
    summary = await bench_running(TRACE, TraceLoad(model="", speed=1000.0), url, lambda name, total: lambda p: None)
    assert summary.policy == "round_robin"
    assert {body["model"] for body in stub.bodies} == {"served"}
    with pytest.raises(RuntimeError, match="not ready: its admin side answers 503"):
        await bench_running(TRACE, LOAD, url, lambda name, total: lambda p: None, admin_url=url)


async def test_the_command_writes_its_reports(stub: StubGateway, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(row.model_dump_json() for row in TRACE))
    arguments = ["trace", str(trace), "--url", stub.url, "--speed", "1000"]
    arguments += ["--output", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")]
    result = await asyncio.to_thread(CliRunner().invoke, bench, arguments)
    assert result.exit_code == 0, result.output
    assert "round_robin" in result.output
    figures = json.loads((tmp_path / "out.json").read_text())
    assert [(run["policy"], run["requests"], run["errors"]) for run in figures] == [("round_robin", 4, 0)]
    table = (tmp_path / "out.md").read_text()
    assert table.startswith("| policy | requests |")
    assert "One infinite cache would serve 0.478" in table


async def locust(url: str, report: Path) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """Run users for two conversations; returns the exit status and the statistics by type and name."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "locust", "--locustfile", str(LOCUSTFILE), "--headless", "--host", url),
        *("--users", "2", "--spawn-rate", "2", "--conversations", "2", "--think-time", "0", "--turns", "3"),
        *("--prompt-groups", "1", "--max-tokens", "4", "--run-time", "60s", "--json-file", str(report.with_suffix(""))),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    entries = json.loads(await asyncio.to_thread(report.read_text))
    return status, {(entry["method"], entry["name"]): entry for entry in entries}


async def test_locust_users_hold_conversations(stub: StubGateway, tmp_path: Path) -> None:
    status, statistics = await locust(stub.url, tmp_path / "report.json")
    assert status == 0
    chats = statistics["POST", "/v1/chat/completions"]["num_requests"]
    assert chats >= 6
    assert statistics["TTFT", "ms"]["num_requests"] == chats
    assert statistics["TPOT", "ms"]["num_requests"] == chats
    assert statistics["cached", "% of prompt tokens"]["max_response_time"] > 90
    conversations = [body["messages"] for body in stub.bodies]
    assert len({messages[0]["content"] for messages in conversations}) == 1  # the group's system prompt
    assert {len(messages) for messages in conversations} == {2, 4, 6}
    longest = next(messages for messages in conversations if len(messages) == 6)
    assert [message["role"] for message in longest] == ["system"] + ["user", "assistant"] * 2 + ["user"]
    assert longest[2]["content"] == "word " * 4
    assert longest[:-2] in conversations


async def test_locust_fails_when_requests_do(stub: StubGateway, tmp_path: Path) -> None:
    stub.fail = {1: "status", 2: "cut"}
    status, statistics = await locust(stub.url, tmp_path / "report.json")
    assert status == 1
    assert statistics["POST", "/v1/chat/completions"]["num_failures"] == 2


def test_the_command_refuses_a_policy_for_a_running_gateway(tmp_path: Path) -> None:
    arguments = ["trace", "x.jsonl", "--url", "http://127.0.0.1:9", "--policy", "random"]
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 2
    assert "--policy" in result.output


def test_the_command_knows_a_misspelt_policy_before_it_starts(tmp_path: Path) -> None:
    result = CliRunner().invoke(bench, ["trace", "x.jsonl", "--policy", "round_robin,predicted_tfft"])
    assert result.exit_code == 1
    assert "unknown policy 'predicted_tfft'" in result.output


def test_the_command_names_the_bad_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0}\n')
    result = CliRunner().invoke(bench, ["trace", str(trace), "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "trace.jsonl:1: input_length" in result.output
