"""Hundreds of requests with every outcome there is, drawn by a seed: no counter is ever negative, all end at zero."""

import asyncio
import json
import random
from collections import Counter

import pytest
from support.gateways import CHAT, running_gateway
from support.raw_client import post, request
from support.stub_replica import DONE, Call, MakeStub, answer, role_event, token_event, usage, usage_event

from gateway.replicas.load import LoadLedger, Ticket

REQUESTS = 400
CONCURRENCY = 40


class Outcomes:
    """Scripts, one of which each request meets."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    async def __call__(self, call: Call) -> None:
        if self.rng.random() < 0.3:
            await answer(call)
            return
        await getattr(self, self.rng.choice([name for name in dir(self) if name.startswith("does_")]))(call)

    async def does_answer_slowly(self, call: Call) -> None:
        await asyncio.sleep(self.rng.uniform(0, 0.05))
        await answer(call)

    async def does_answer_4xx(self, call: Call) -> None:
        call.json({"error": {"message": "no"}}, self.rng.choice([400, 401, 404, 422, 429]))

    async def does_answer_5xx(self, call: Call) -> None:
        call.json({"error": {"message": "no"}}, self.rng.choice([500, 501, 502, 503, 504]))

    async def does_ask_for_a_pause(self, call: Call) -> None:
        call.json({"error": {"message": "busy"}}, 503, "retry-after: 1\r\n")

    async def does_reset(self, call: Call) -> None:
        call.reset()

    async def does_close(self, call: Call) -> None:
        call.close()

    async def does_hang(self, call: Call) -> None:
        await call.gone.wait()

    async def does_hang_after_the_head(self, call: Call) -> None:
        call.stream_head()
        call.chunk(role_event())
        await call.gone.wait()

    async def does_die_after_the_head(self, call: Call) -> None:
        call.stream_head()
        await asyncio.sleep(0.002)
        call.reset()

    async def does_die_in_a_stream(self, call: Call) -> None:
        call.stream_head(self.rng.choice(["transfer-encoding: chunked\r\n", "connection: close\r\n"]))
        for _ in range(self.rng.randint(1, 5)):
            call.send(b"%x\r\n%b\r\n" % (len(token_event("a")), token_event("a")))
            await asyncio.sleep(0.001)
        call.close()

    async def does_die_in_json(self, call: Call) -> None:
        call.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n{"a"')
        await asyncio.sleep(0.001)
        call.close()

    async def does_stream_slowly(self, call: Call) -> None:
        call.stream_head()
        for _ in range(self.rng.randint(1, 20)):
            call.chunk(token_event("b"))
            await asyncio.sleep(0.002)
        for part in (usage_event(100, 20, 16), DONE):
            call.chunk(part)
        call.end_chunks()

    async def does_close_after_the_answer(self, call: Call) -> None:
        call.json({"usage": usage(9, 1, 0)}, headers="connection: close\r\n")
        call.close()

    async def does_send_garbage(self, call: Call) -> None:
        call.send(b"\x00\x01garbage\r\n\r\n")
        await call.gone.wait()


def watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at all columns after every change."""

    def watched(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def wrapper(self: LoadLedger | Ticket, *arguments: object, **named: object) -> object:
            result = original(self, *arguments, **named)
            ledger = self if isinstance(self, LoadLedger) else self._ledger
            for column in (
                ledger.in_flight,
                ledger.decodes,
                ledger.prefill_tokens,
                ledger.prefill_work_s,
                ledger.kv_tokens,
            ):
                assert min(column) >= 0
            for slot, in_flight in enumerate(ledger.in_flight):
                assert ledger.decodes[slot] <= in_flight
            return result

        monkeypatch.setattr(owner, name, wrapper)

    watched(LoadLedger, "start")
    watched(Ticket, "first_token")
    watched(Ticket, "finish")


async def one(port: int, rng: random.Random, number: int) -> None:
    """One client: asks, and leaves whenever it likes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        stream = rng.random() < 0.6
        messages = [{"role": "user", "content": f"{number % 7} " * 200 + str(number)}]
        whole = post("/v1/chat/completions", json.dumps({**CHAT, "messages": messages, "stream": stream}).encode())
        if rng.random() < 0.1:
            kind = "Content-Type: multipart/form-data; boundary=x"
            whole = request("POST", "/v1/audio/transcriptions", kind, "Content-Length: 5000") + b"x" * 5000
        if rng.random() < 0.05:
            writer.write(whole[: rng.randrange(len(whole))])
        else:
            writer.write(whole)
        patience_s = rng.choice([0.0, 0.002, 0.01, 0.03, 0.5, 0.5, 5.0, 5.0, 5.0])
        async with asyncio.timeout(patience_s):
            await writer.drain()
            await reader.read(1 << 20)
            while not reader.at_eof() and patience_s < 5.0:
                await reader.read(1 << 20)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("queue", [0, 30])
async def test_every_counter_ends_at_exactly_zero(
    seed: int, queue: int, stub: MakeStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    watch(monkeypatch)
    replicas = [await stub(Outcomes(random.Random(seed + 10 * n))) for n in range(3)]
    options = {
        "timeouts": {"first_byte_s": 0.1, "silence_s": 0.1, "head_s": 0.3, "body_s": 0.1, "deadline_s": 0.4},
        "breaker": {"consecutive_failures": 4, "base_ejection_s": 0.1},
        "health": {"interval_s": 0.05},
        "queue": {"max_requests": queue, "max_wait_s": 0.1},
        "replicas": [{"url": replica.url, "max_in_flight": 12 if queue else None} for replica in replicas],
    }
    async with running_gateway(replicas, options) as gateway:
        slots = asyncio.Semaphore(CONCURRENCY)

        async def bounded(number: int) -> None:
            async with slots:
                if number == REQUESTS // 2:
                    # One of them is gone for a while, and connections to it are refused.
                    await replicas[0].stop()
                if number == REQUESTS * 2 // 3:
                    await replicas[0].start(replicas[0].port)
                await one(gateway.port, rng, number)

        await asyncio.gather(*(bounded(number) for number in range(REQUESTS)))
        await gateway.until_idle(10)
        gateway.assert_idle()
        outcomes = Counter(line["outcome"] for line in gateway.log_lines())
        tally = gateway.gateway.tally
        assert sum(tally.requests.values()) == sum(outcomes.values())
        # Which of them there are depends on how fast the machine is: on a slow one most clients have left before.
        assert outcomes["cancelled"]
        assert len(outcomes) >= 4
        assert gateway.gateway.plane.queue.waiting == 0
        for replica in replicas:
            await replica.until(lambda replica=replica: replica.in_flight == 0)  # type: ignore[misc]
