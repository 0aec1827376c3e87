"""The matrix of failures and retries: how often each replica is asked, and what the client gets in the end."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.gateways import CHAT, RunningGateway, running_gateway, session
from support.raw_client import Response, post, raw_client
from support.stub_replica import Call, StubReplica, answer, role_event, token_event

CHAT_PATH = "/v1/chat/completions"
FAST = {"first_byte_s": 0.25}


async def reset_before_headers(call: Call) -> None:
    call.reset()


async def close_before_headers(call: Call) -> None:
    call.close()


async def half_a_head(call: Call) -> None:
    call.send(b"HTTP/1.1 200 OK\r\ncontent-ty")
    await call.drained()
    call.close()


async def garbage(call: Call) -> None:
    call.send(b"SSH-2.0-OpenSSH_9.6\r\n")
    await call.gone.wait()


def status(code: int, headers: str = "") -> Callable[[Call], Awaitable[None]]:
    async def script(call: Call) -> None:
        call.json({"error": {"message": "no", "code": code}}, code, headers)

    return script


async def never_answers(call: Call) -> None:
    await call.gone.wait()


async def dies_after_headers(call: Call) -> None:
    if call.seen.json["stream"]:
        call.stream_head()
    else:
        call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n")
    await call.drained()
    call.reset()


async def dies_after_one_chunk(call: Call) -> None:
    if call.seen.json["stream"]:
        call.stream_head()
        call.chunk(role_event())
        call.chunk(token_event("a"))
    else:
        call.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"a"')
    await call.drained()
    # What has been sent must be read before the connection is gone.
    await asyncio.sleep(0.05)
    call.reset()


# name: script, status if no other replica can serve, its code (None: the replica's own answer is passed through)
FAULTS: dict[str, tuple[Callable[[Call], Awaitable[None]], int, str | None]] = {
    "reset before headers": (reset_before_headers, 502, "replica_connection_lost"),
    "close before headers": (close_before_headers, 502, "replica_connection_lost"),
    "half a head": (half_a_head, 502, "replica_connection_lost"),
    "no HTTP": (garbage, 502, "replica_bad_response"),
    "500": (status(500), 500, None),
    "502": (status(502), 502, None),
    "503": (status(503), 503, None),
    "503 with Retry-After": (status(503, "retry-after: 7\r\n"), 503, None),
    "504": (status(504), 504, None),
    "429": (status(429), 429, None),
    "429 with Retry-After": (status(429, "retry-after: 7\r\n"), 429, None),
    "first-byte timeout": (never_answers, 504, "replica_timeout"),
}
BREAKING: dict[str, Callable[[Call], Awaitable[None]]] = {
    "dies after headers": dies_after_headers,
    "dies after one chunk": dies_after_one_chunk,
}


class Fleet:
    """Stub replicas of which the first so many requests, wherever they go, meet a fault."""

    def __init__(self, size: int, fault: Callable[[Call], Awaitable[None]], faults: int) -> None:
        self.size = size
        self.fault = fault
        self.faults = faults
        self.replicas: list[StubReplica] = []

    async def __aenter__(self) -> "Fleet":
        self.replicas = [await StubReplica(script=self._script).start() for _ in range(self.size)]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for replica in self.replicas:
            await replica.stop()

    async def _script(self, call: Call) -> None:
        if sum(replica.requests_seen for replica in self.replicas) <= self.faults:
            await self.fault(call)
        else:
            await answer(call)

    @property
    def attempts(self) -> list[int]:
        """Requests seen by each replica, most first."""
        return sorted((replica.requests_seen for replica in self.replicas), reverse=True)


async def ask(gateway: RunningGateway, stream: bool) -> Response:
    async with raw_client(gateway.port) as client:
        return await client.ask(post(CHAT_PATH, json.dumps({**CHAT, "stream": stream}).encode()))


def check(response: Response, expected: int, code: str | None) -> None:
    assert response.status == expected
    assert response.complete
    error = response.json["error"]
    assert error["code"] == (expected if code is None else code)
    assert "127.0.0.1" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_one_replica_is_asked_once(fault: str, stream: bool) -> None:
    script, expected, code = FAULTS[fault]
    async with Fleet(1, script, 99) as fleet, running_gateway(fleet.replicas, {"timeouts": FAST}) as gateway:
        response = await ask(gateway, stream)
        check(response, expected, code)
        if "Retry-After" in fault:
            assert response.header("retry-after") == "7"
        assert fleet.attempts == [1]
        gateway.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_second_replica_serves(fault: str, stream: bool) -> None:
    script, _, _ = FAULTS[fault]
    async with Fleet(2, script, 1) as fleet, running_gateway(fleet.replicas, {"timeouts": FAST}) as gateway:
        response = await ask(gateway, stream)
        assert response.status == 200
        assert response.complete
        assert fleet.attempts == [1, 1]
        gateway.assert_idle()
        assert sum(gateway.gateway.tally.retries.values()) == 1


@pytest.mark.parametrize("fault", FAULTS)
async def test_each_replica_is_asked_once_and_no_more_than_three(fault: str) -> None:
    script, expected, code = FAULTS[fault]
    async with Fleet(4, script, 99) as fleet, running_gateway(fleet.replicas, {"timeouts": FAST}) as gateway:
        check(await ask(gateway, False), expected, code)
        assert fleet.attempts == [1, 1, 1, 0]
        gateway.assert_idle()


NO_SECOND = {
    "budget": {"retries": {"budget_share": 0, "budget_min_per_s": 0}},
    "attempts": {"retries": {"max_attempts": 1}},
}


@pytest.mark.parametrize("why", NO_SECOND)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_second_replica_is_left_alone_when_no_retry_is_allowed(fault: str, why: str) -> None:
    script, expected, code = FAULTS[fault]
    options: dict[str, Any] = {"timeouts": FAST, **NO_SECOND[why]}
    async with Fleet(2, script, 1) as fleet, running_gateway(fleet.replicas, options) as gateway:
        check(await ask(gateway, False), expected, code)
        assert fleet.attempts == [1, 0]
        gateway.assert_idle()
        assert gateway.gateway.tally.retries_denied == (1 if why == "budget" else 0)


@pytest.mark.parametrize("fault", BREAKING)
async def test_a_stream_that_has_begun_runs_nowhere_else(fault: str) -> None:
    async with Fleet(2, BREAKING[fault], 1) as fleet, running_gateway(fleet.replicas) as gateway:
        response = await ask(gateway, True)
        assert response.status == 200
        assert not response.complete
        assert response.body.endswith(b"}}\n\n")
        assert b'"code":"replica_connection_lost"' in response.body
        await gateway.until_idle()
        assert fleet.attempts == [1, 0]
        gateway.assert_idle()


@pytest.mark.parametrize("fault", BREAKING)
async def test_an_answer_that_has_begun_but_was_not_passed_on_is_replaced(fault: str) -> None:
    async with Fleet(2, BREAKING[fault], 1) as fleet, running_gateway(fleet.replicas) as gateway:
        response = await ask(gateway, False)
        assert response.status == 200
        assert response.complete
        assert fleet.attempts == [1, 1]
        gateway.assert_idle()


async def test_a_port_where_nobody_listens_any_more() -> None:
    async with Fleet(2, answer, 0) as fleet:
        options = {"health": {"interval_s": 60}}
        async with running_gateway(fleet.replicas, options) as gateway:
            await fleet.replicas[0].stop()
            for _ in range(4):
                assert (await ask(gateway, False)).status == 200
            assert fleet.replicas[0].requests_seen == 0
            assert fleet.replicas[1].requests_seen == 4
            await fleet.replicas[1].stop()
            check(await ask(gateway, False), 502, "replica_unreachable")
            gateway.assert_idle()


async def test_the_deadline_holds_over_all_attempts() -> None:
    options = {"timeouts": {"first_byte_s": 0.3, "deadline_s": 0.5}}
    async with Fleet(3, never_answers, 99) as fleet, running_gateway(fleet.replicas, options) as gateway:
        check(await ask(gateway, False), 504, "deadline_exceeded")
        assert fleet.attempts == [1, 1, 0]
        gateway.assert_idle()
        # A deadline is the client's affair and nobody's fault; the timeout before it was one.
        failures = [breaker.failures for breaker in gateway.gateway._ejector._breakers.values()]
        assert sorted(failures) == [0, 0, 1]


@pytest.mark.parametrize("code", [400, 401, 403, 404, 413, 422, 499])
async def test_a_4xx_is_an_answer(code: int) -> None:
    async with Fleet(2, status(code), 99) as fleet, running_gateway(fleet.replicas) as gateway:
        check(await ask(gateway, False), code, None)
        assert fleet.attempts == [1, 0]


async def test_the_owner_of_a_prefix_answers_503_and_not_one_request_fails() -> None:
    document = "A long document. " * 3000
    body = {"model": "m", "messages": [{"role": "user", "content": document}]}
    async with Fleet(2, answer, 0) as fleet, running_gateway(fleet.replicas) as gateway, session() as client:

        async def turn(number: int) -> tuple[int, str]:
            messages = [*body["messages"], {"role": "user", "content": str(number)}]  # type: ignore[misc]
            request = {**body, "messages": messages}
            async with client.post(f"{gateway.url}{CHAT_PATH}", json=request) as response:
                await response.read()
                return response.status, response.headers["x-warmgate-replica"]

        _, owner_name = await turn(0)
        assert (await turn(1)) == (200, owner_name)
        owner = fleet.replicas[int(owner_name[-1]) - 1]
        owner.script = status(503)
        seen = owner.requests_seen
        for start in range(0, 300, 20):
            outcomes = await asyncio.gather(*(turn(n) for n in range(start, start + 20)))
            assert {code for code, _ in outcomes} == {200}
            assert {name for _, name in outcomes} != {owner_name}
        # The first wave finds out; then the owner is spared, and asked again about once a second.
        assert owner.requests_seen - seen <= 60
        gateway.assert_idle()
