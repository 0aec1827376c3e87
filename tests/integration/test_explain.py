"""`warmgate explain` against gateways that run: what it finds, and that asking leaves no trace."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.gateways import RunningGateway, running_gateway, session
from support.serving import serving
from support.stub_replica import DONE, Call, StubReplica, answer, role_event, token_event, usage_event
from support.waiting import eventually

from gateway.cli import main
from loadtests.replica import ReplicaConfig, start_replica
from policies.predicted_ttft import PredictedTTFT

SECRET = "the launch code is 0451"
PROMPT = f"{SECRET}. " + "The quick brown fox jumps over the lazy dog. " * 100
BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": PROMPT}]}
KEY = "sesame-open"


async def explain(admin_url: str, *arguments: str, stdin: str | None = None, key: str | None = KEY) -> Result:
    """The command, as an operator runs it."""
    environment = {"WARMGATE_ADMIN_KEY": key}
    command = ["explain", "--admin", admin_url, *arguments]
    return await asyncio.to_thread(lambda: CliRunner().invoke(main, command, input=stdin, env=environment))


async def explained(admin_url: str, *arguments: str, stdin: str | None = None) -> dict[str, Any]:
    result = await explain(admin_url, *arguments, "--json", stdin=stdin)
    assert result.exit_code in (0, 1), result.output
    assert SECRET not in result.output
    assert KEY not in result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


async def ask(url: str, body: dict[str, Any] = BODY, headers: dict[str, str] | None = None) -> tuple[int, str, str]:
    """One request; its status, its id and its replica."""
    async with session() as client, client.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        await response.read()
        return response.status, response.headers["x-request-id"], response.headers.get("x-warmgate-replica", "")


async def stream(call: Call) -> None:
    call.stream_head()
    for part in (role_event(), token_event("a"), usage_event(1000, 2, 960), DONE):
        call.chunk(part)
    call.end_chunks()


async def fail(call: Call) -> None:
    call.json({"error": {"message": "no"}}, status=500)


@pytest.fixture
async def stubs() -> AsyncIterator[list[StubReplica]]:
    started = [await StubReplica(script=stream).start() for _ in range(2)]
    yield started
    for stub in started:
        await stub.stop()


def options(**sections: Any) -> dict[str, Any]:
    return {"admin": {"port": 0, "key": KEY}, "hardware": "h100-sxm", "model": "llama-3.1-8b", **sections}


async def test_a_request_is_found_and_explained(stubs: list[StubReplica]) -> None:
    async with running_gateway(stubs, options()) as gateway:
        _, _, first = await ask(gateway.url)
        _, request_id, replica = await ask(gateway.url)
        await gateway.until_idle()
        found = await explained(gateway.admin_url, request_id)
        assert (found["id"], found["state"], found["worker"]) == (request_id, "ended", 1)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", found["received_at"])
        (attempt,) = found["attempts"]
        assert attempt["replica"] == replica == first
        assert attempt["url"] in {stub.url for stub in stubs}
        chosen, other = attempt["candidates"]
        assert chosen["chosen"]
        assert chosen["matched_tokens"] > other["matched_tokens"] == 0
        assert sum(chosen["cost"]["terms"].values()) == pytest.approx(chosen["cost"]["total"])
        assert chosen["cost"]["total"] == pytest.approx(attempt["terms"]["cost_s"])
        (line,) = [line for line in gateway.log_lines() if line["id"] == request_id]
        assert found["record"] == line
        assert found["record"]["cached_tokens"] == 960

        shown = await explain(gateway.admin_url, request_id)
        assert shown.exit_code == 0
        assert f"Why: {attempt['why'][:40]}" in shown.output
        for words in ("Candidates at that moment", "Cost, seconds", "reported 960", "predicted ", "observed "):
            assert words in shown.output
        assert SECRET not in shown.output


async def test_an_id_that_nobody_knows(stubs: list[StubReplica]) -> None:
    async with running_gateway(stubs, options(logging={"decisions": 2})) as gateway:
        ids = [(await ask(gateway.url))[1] for _ in range(3)]
        await gateway.until_idle()
        result = await explain(gateway.admin_url, ids[0])
        assert result.exit_code == 1
        assert f"request {ids[0]} is not known: the last 2 requests are kept" in result.output
        assert "Traceback" not in result.output
        assert (await explain(gateway.admin_url, ids[1])).exit_code == 0
        assert (await explain(gateway.admin_url, "../config")).exit_code == 1
    async with running_gateway(stubs, options(logging={"decisions": 0})) as gateway:
        _, request_id, _ = await ask(gateway.url)
        result = await explain(gateway.admin_url, request_id)
        assert result.exit_code == 1
        assert "this gateway keeps no decisions" in result.output


async def test_keys(stubs: list[StubReplica]) -> None:
    async with running_gateway(stubs, options()) as gateway:
        _, request_id, _ = await ask(gateway.url)
        await gateway.until_idle()
        for key, words in ((None, "it wants a key"), ("wrong", "the key is not right")):
            for arguments in ((request_id,), ("--body", "-")):
                result = await explain(gateway.admin_url, *arguments, stdin="{}", key=key)
                assert result.exit_code == 1
                assert words in result.output
        assert (await explain(gateway.admin_url, request_id, "--key", KEY, key=None)).exit_code == 0


async def test_another_server_is_told_from_a_gateway(stubs: list[StubReplica]) -> None:
    result = await explain(stubs[0].url, "x")
    assert result.exit_code == 1
    assert "no explanation: is it the admin port" in result.output


async def test_a_retry_shows_both_attempts(stubs: list[StubReplica]) -> None:
    async with running_gateway(stubs, options()) as gateway:
        stubs[0].script = fail
        ids = []
        while not stubs[0].requests:
            status, request_id, replica = await ask(gateway.url, {**BODY, "user": str(len(ids))})
            assert (status, replica) == (200, "replica-2")
            ids.append(request_id)
            assert len(ids) < 100
        await gateway.until_idle()
        found = await explained(gateway.admin_url, ids[-1])
        first, second = found["attempts"]
        assert (first["replica"], first["failure"]) == ("replica-1", "server_error")
        assert (second["replica"], second["failure"]) == ("replica-2", None)
        assert {"replica": "replica-1", "url": stubs[0].url, "why": "already tried for this request"} in second[
            "left_out"
        ]
        shown = await explain(gateway.admin_url, ids[-1])
        assert "Attempt 1 of 2: to replica-1" in shown.output
        assert "it failed there (server_error), and another attempt was made" in shown.output


async def test_a_request_that_still_runs(stubs: list[StubReplica]) -> None:
    end = asyncio.Event()

    async def held(call: Call) -> None:
        call.stream_head()
        call.chunk(role_event())
        call.chunk(token_event("a"))
        await end.wait()
        call.chunk(DONE)
        call.end_chunks()

    for stub in stubs:
        stub.script = held
    async with running_gateway(stubs, options()) as gateway:
        running = asyncio.create_task(ask(gateway.url, headers={"x-request-id": "../mine/1+1=2:@."}))
        await eventually(lambda: any(stub.requests for stub in stubs))
        found = await explained(gateway.admin_url, "../mine/1+1=2:@.")
        assert found["state"] in ("waiting", "streaming")
        assert len(found["attempts"]) == 1
        end.set()
        assert (await running)[0] == 200
        await gateway.until_idle()
        assert (await explained(gateway.admin_url, "../mine/1+1=2:@."))["state"] == "ended"


async def test_a_request_that_went_nowhere(stubs: list[StubReplica]) -> None:
    replicas = [{"url": stub.url, "max_in_flight": 1} for stub in stubs]
    end = asyncio.Event()

    async def held(call: Call) -> None:
        await end.wait()
        await answer(call)

    for stub in stubs:
        stub.script = held
    async with running_gateway([], options(replicas=replicas)) as gateway:
        running = [asyncio.create_task(ask(gateway.url)) for _ in stubs]
        for stub in stubs:
            await stub.until(lambda stub=stub: len(stub.requests) == 1)
        status, request_id, _ = await ask(gateway.url)
        assert status == 429
        found = await explained(gateway.admin_url, request_id)
        assert found["attempts"] == []
        assert found["record"]["status"] == 429
        assert {one["why"] for one in found["replicas_now"]} == {"saturated: at its limit of 1 requests"}
        rehearsal = await explain(gateway.admin_url, "--body", "-", stdin=json.dumps(BODY))
        assert rehearsal.exit_code == 1
        assert "Refused: 429 All replicas that could serve it are at their limit." in rehearsal.output
        end.set()
        await asyncio.gather(*running)


async def trace(gateway: RunningGateway) -> dict[str, Any]:
    """All that could show that a request has been here."""
    async with session() as client, client.get(f"{gateway.admin_url}/metrics") as response:
        page = await response.text()
    # What a process does in time, requests or none.
    own = re.compile(r"process_|python_gc_|warmgate_(worker|replica_scrape|probe|health)|.*_created")
    router = gateway.gateway.router
    policy = router.policy
    assert isinstance(policy, PredictedTTFT)
    return {
        "metrics": [line for line in page.splitlines() if not line.startswith("#") and not own.match(line)],
        "map": [(router.index.blocks(slot), router.index.held_bytes(slot)) for slot in range(2)],
        "clock": router.index._clock,
        "random": policy._random.getstate(),
        "reuse": policy._reuse,
        "kept": len(gateway.gateway.plane.recent or ()),
        "log": len(gateway.log_lines()),
        "ratio": router.tokens.ratio("m"),
    }


async def test_a_rehearsal_sends_nothing_and_leaves_no_trace(stubs: list[StubReplica], tmp_path: Path) -> None:
    settings = options(auth={"client_keys": ["client-key"]}, routing={"session_header": "x-session"})
    async with running_gateway(stubs, settings) as gateway:
        gateway_url, admin_url = gateway.url, gateway.admin_url
        _, _, replica = await ask(gateway_url, headers={"authorization": "Bearer client-key"})
        await gateway.until_idle()
        seen = [len(stub.requests) for stub in stubs]
        path = tmp_path / "request.json"
        path.write_text(json.dumps({**BODY, "messages": [*BODY["messages"], {"role": "user", "content": "More."}]}))  # type: ignore[misc]
        before = await trace(gateway)
        for _ in range(3):
            found = await explained(admin_url, "--body", str(path), "-H", "x-slo-ttft-ms: 2000")
            (attempt,) = found["attempts"]
            assert attempt["replica"] == replica
            assert attempt["expected_cached_tokens"] > 0
            assert attempt["latency_targets"] is not None
        for body, path_asked, status in (
            ({"model": "nobody", "messages": []}, "/v1/chat/completions", 404),
            ({"messages": []}, "/v1/chat/completions", 400),
            ([], "/v1/chat/completions", 400),
            (BODY, "/metrics", 404),
        ):
            refused = await explained(admin_url, "--body", "-", "--path", path_asked, stdin=json.dumps(body))
            assert refused["refused"]["status"] == status
        refused = await explained(admin_url, "--body", str(path), "-H", "x-slo-ttft-ms: soon")
        assert refused["refused"]["status"] == 400
        assert await trace(gateway) == before
        assert [len(stub.requests) for stub in stubs] == seen
        gateway.assert_idle()


async def test_a_rehearsal_says_where_the_request_then_goes(stubs: list[StubReplica]) -> None:
    async with running_gateway(stubs, options()) as gateway:
        for number in range(6):
            body = {**BODY, "messages": [{"role": "user", "content": f"{number % 3} {PROMPT}"}]}
            found = await explained(gateway.admin_url, "--body", "-", stdin=json.dumps(body))
            _, _, replica = await ask(gateway.url, body)
            assert found["attempts"][0]["replica"] == replica
            await gateway.until_idle()


async def test_a_hand_off_is_explained() -> None:
    config = ReplicaConfig(served_model_names=("m",), speedup=20.0, kv_connector="nixl")
    replicas = [await start_replica(config) for _ in range(2)]
    try:
        listed = [
            {"url": replica.url, "role": role} for replica, role in zip(replicas, ("prefill", "decode"), strict=True)
        ]
        settings = options(replicas=listed, disaggregation={"policy": "always"}, scrape={"interval_s": 1})
        async with running_gateway([], settings) as gateway:
            status, request_id, replica = await ask(gateway.url, {**BODY, "max_tokens": 4})
            assert (status, replica) == (200, "replica-2")
            await gateway.until_idle()
            found = await explained(gateway.admin_url, request_id)
            hand_off = found["attempts"][-1]["hand_off"]
            assert (hand_off["prefill_replica"], hand_off["decode_replica"]) == ("replica-1", "replica-2")
            shown = await explain(gateway.admin_url, request_id)
            assert "Hand-off: prompt on replica-1" in shown.output
            assert "prompt computed on" in shown.output
    finally:
        for each in replicas:
            await each.close()


async def test_whichever_worker_has_it(stubs: list[StubReplica], tmp_path: Path) -> None:
    document = {
        "listen": {"host": "127.0.0.1", "port": 0, "workers": 2},
        "replicas": [{"url": stub.url} for stub in stubs],
        "redis": "redis://127.0.0.1:9",
        **options(),
    }
    async with serving(document, tmp_path, 60.0) as served:
        workers = set()
        asked = [await ask(served.url) for _ in range(8)]
        for _, request_id, replica in asked:
            found = await explained(served.admin_url, request_id)
            assert found["attempts"][-1]["replica"] == replica
            workers.add(found["worker"])
        assert workers == {1, 2}
        unknown = await explain(served.admin_url, "nobody")
        assert unknown.exit_code == 1
        assert "the last 2,048 requests are kept" in unknown.output
        assert "now 8," in unknown.output
        rehearsed = await explained(served.admin_url, "--body", "-", stdin=json.dumps(BODY))
        assert rehearsed["worker"] == 1
        # Where its prompt is, the worker knows from the requests it has had.
        assert any(one["matched_tokens"] > 0 for one in rehearsed["attempts"][0]["candidates"])
        served.signal()
        assert await served.exit_code() == 0
