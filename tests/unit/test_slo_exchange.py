"""Latency targets of one exchange: headers, queues, retries, and what is counted and logged in the end."""

import json
import math
from typing import Any

import pytest
from support.exchanges import DONE, OK_JSON, SSE_HEAD, TOKEN, Bench, FakeClient, Peer, chunk, status_json

from gateway.proxy.exchange import Exchange
from gateway.proxy.record import log_record
from gateway.replicas.registry import ReplicaSpec
from gateway.routing.slo import ModelTargets, SloRules

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":11}}\n\n'


def bench_of(replicas: int = 2, *, refuse: bool = False, limit: int | None = None, **options: Any) -> Bench:
    """Replicas of known hardware, so that predictions say something."""
    specs = [
        ReplicaSpec(
            f"http://replica-{number}.test:8000",
            models=("m",),
            hardware="h100-sxm",
            model_shape="llama-3.1-8b",
            max_in_flight=limit,
        )
        for number in range(1, replicas + 1)
    ]
    bench = Bench(specs=specs, **options)
    bench.router.slo.use(SloRules(ModelTargets(refuse=refuse)))
    return bench


def ask(bench: Bench, *headers: tuple[str, str], stream: bool = True, words: int = 100) -> tuple[Exchange, FakeClient]:
    content = {"model": "m", "messages": [{"role": "user", "content": "Hello " * words}], "stream": stream}
    body = json.dumps(content).encode()
    lines = (("content-type", "application/json"), ("content-length", str(len(body))), *headers)
    exchange, client = bench.start(lines)
    exchange.request_body(body)
    exchange.request_end()
    return exchange, client


def counts(bench: Bench) -> dict[tuple[str, str], int]:
    return {(target, result): number for (_, target, result), number in bench.tally.slo_results.items()}


def stream_of(bench: Bench, peer: Peer, first_s: float, per_token_s: float) -> None:
    """An answer of eleven tokens."""
    bench.clock += first_s
    peer.send(SSE_HEAD + chunk(TOKEN))
    for _ in range(10):
        bench.clock += per_token_s
        peer.send(chunk(TOKEN))
    peer.send(chunk(USAGE + DONE) + chunk(b""))


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "X-SLO-TPOT-ms"])
@pytest.mark.parametrize("value", ["soon", "-5", "0", "", "1e3"])
def test_a_header_that_is_no_target_is_refused_by_name(name: str, value: str) -> None:
    bench = bench_of()
    _, client = ask(bench, (name, value))
    answer = client.answer()
    assert answer.status == 400
    assert answer.error["param"] == name.lower()
    assert answer.error["type"] == "invalid_request_error"
    assert name.lower() in answer.error["message"]
    bench.assert_idle()
    assert not bench.attempts()


def test_two_headers_of_a_kind_are_no_target() -> None:
    bench = bench_of()
    _, client = ask(bench, ("x-slo-ttft-ms", "500"), ("X-Slo-Ttft-Ms", "500"))
    assert client.answer().status == 400


def test_targets_go_on_to_the_replica_as_they_came() -> None:
    bench = bench_of()
    ask(bench, ("X-SLO-ttft-ms", "5000"), ("x-slo-tpot-ms", " 80 "))
    received = bench.connect().received
    assert b"\r\nX-SLO-ttft-ms: 5000\r\n" in received
    assert b"\r\nx-slo-tpot-ms: " in received


def test_targets_that_were_met_and_missed_are_counted_and_logged() -> None:
    bench = bench_of()
    exchange, client = ask(bench, ("x-slo-ttft-ms", "500"), ("x-slo-tpot-ms", "30"))
    stream_of(bench, bench.connect(), 0.4, 0.04)
    assert client.answer().headers["x-warmgate-slo"] == "expected"
    assert counts(bench) == {("ttft", "met"): 1, ("tpot", "missed"): 1}
    slo = log_record(exchange, bench.clock.now_s)["slo"]
    assert slo == {"ttft_ms": 500, "tpot_ms": 30, "ttft_met": True, "tpot_met": False, "outlook": "expected"}
    assert "within the targets" in log_record(exchange, bench.clock.now_s)["reason"]
    exchange, _ = ask(bench, ("x-slo-ttft-ms", "500"))
    # The connection of before is used again.
    stream_of(bench, Peer(bench.pool().connections[0]), 0.6, 0.001)
    assert counts(bench)["ttft", "missed"] == 1
    assert bench.tally.slo_requests == {"m": 2}
    assert bench.tally.slo_refused == {}
    assert "tpot_ms" not in log_record(exchange, bench.clock.now_s)["slo"]


def test_requests_without_targets_are_not_counted_and_not_told() -> None:
    bench = bench_of()
    exchange, client = ask(bench)
    stream_of(bench, bench.connect(), 0.4, 0.04)
    assert not bench.tally.slo_requests
    assert "x-warmgate-slo" not in client.answer().headers
    assert "slo" not in log_record(exchange, bench.clock.now_s)


@pytest.mark.parametrize(("after_s", "result"), [(0.4, "met"), (0.6, "unknown")])
def test_a_whole_answer_shows_its_first_token_only_if_it_is_in_time_itself(after_s: float, result: str) -> None:
    bench = bench_of()
    ask(bench, ("x-slo-ttft-ms", "500"), ("x-slo-tpot-ms", "50"), stream=False)
    peer = bench.connect()
    bench.clock += after_s
    peer.send(OK_JSON)
    assert counts(bench) == {("ttft", result): 1, ("tpot", "unknown"): 1}


@pytest.mark.parametrize(("after_s", "result"), [(0.4, "unknown"), (0.6, "missed")])
def test_a_client_that_leaves_has_missed_it_only_if_it_waited_so_long(after_s: float, result: str) -> None:
    bench = bench_of()
    exchange, _ = ask(bench, ("x-slo-ttft-ms", "500"))
    bench.connect()
    bench.clock += after_s
    exchange.client_gone()
    assert counts(bench) == {("ttft", result): 1}


def test_failures_are_misses() -> None:
    bench = bench_of(1)
    ask(bench, ("x-slo-ttft-ms", "500"))
    bench.connect().lose(ConnectionResetError())
    assert counts(bench) == {("ttft", "missed"): 1}


# -- refusals


def test_a_refusal_is_a_429_that_says_when_to_come_back() -> None:
    bench = bench_of(1, refuse=True)
    for _ in range(4):
        waiting, _ = ask(bench, words=60_000)
    assert waiting.assignment is not None
    in_flight = list(bench.ledger.in_flight)
    exchange, client = ask(bench, ("x-slo-ttft-ms", "1000"))
    answer = client.answer()
    assert answer.status == 429
    assert (answer.error["type"], answer.error["code"]) == ("rate_limit_error", "slo_out_of_reach")
    # When the last of those before it has its first token, less the second there is.
    after_s = int(answer.headers["retry-after"])
    assert 2 <= after_s <= 60
    assert after_s == math.ceil(waiting.assignment.predicted_ttft_s - 1.0 + 0.015)
    assert client.end == "kept"
    assert bench.ledger.in_flight == in_flight
    assert bench.tally.slo_refused == {"m": 1}
    assert counts(bench) == {}
    assert log_record(exchange, bench.clock.now_s)["slo"] == {"ttft_ms": 1000, "refused": True}


def test_by_default_it_is_served_all_the_same() -> None:
    bench = bench_of()
    _, client = ask(bench, ("x-slo-ttft-ms", "0.001"))
    stream_of(bench, bench.connect(), 0.4, 0.04)
    answer = client.answer()
    assert answer.status == 200
    assert answer.headers["x-warmgate-slo"] == "best-effort"


def test_who_comes_out_of_the_queue_is_judged_by_what_is_left() -> None:
    bench = bench_of(1, refuse=True, limit=1, queue=4)
    ask(bench)
    peer = bench.connect()
    _, early = ask(bench, ("x-slo-ttft-ms", "900"))
    _, late = ask(bench, ("x-slo-ttft-ms", "450"))
    assert bench.plane.queue.waiting == 2
    stream_of(bench, peer, 0.3, 0.014)
    bench.turn()
    # 440 ms have passed: enough is left of 900, and not of 450.
    assert not early.sent
    assert bench.ledger.in_flight == [1]
    stream_of(bench, peer, 0.001, 0.0005)
    bench.turn()
    assert early.answer().status == 200
    answer = late.answer()
    assert (answer.status, answer.error["code"]) == (429, "slo_out_of_reach")
    assert bench.plane.queue.waiting == 0
    bench.assert_idle()


def test_who_is_late_already_need_not_wait_for_room() -> None:
    bench = bench_of(1, refuse=True, limit=1, queue=4)
    ask(bench)
    bench.connect()
    _, refused = ask(bench, ("x-slo-ttft-ms", "400"))
    _, patient = ask(bench)
    bench.tick(0.3)
    assert not refused.sent
    bench.tick(0.3)
    assert refused.answer().status == 429
    assert refused.answer().headers["retry-after"] == "2"
    assert not patient.sent
    assert bench.plane.queue.waiting == 1


def test_who_is_late_is_served_where_nothing_is_refused() -> None:
    bench = bench_of(1, limit=1, queue=4)
    ask(bench)
    peer = bench.connect()
    _, client = ask(bench, ("x-slo-ttft-ms", "400"))
    bench.tick(1.0)
    assert not client.sent
    stream_of(bench, peer, 0.3, 0.01)
    bench.turn()
    stream_of(bench, peer, 0.3, 0.01)
    assert client.answer().headers["x-warmgate-slo"] == "best-effort"


def test_a_retry_that_would_be_late_is_not_made_where_late_is_refused() -> None:
    bench = bench_of(2, refuse=True)
    _, client = ask(bench, ("x-slo-ttft-ms", "400"))
    peer = bench.connect()
    bench.clock += 0.5
    peer.send(status_json(503))
    assert client.answer().status == 503
    assert bench.attempts() == {1: 1}
    assert counts(bench) == {("ttft", "missed"): 1}
    bench.assert_idle()


def test_a_retry_in_time_is_made() -> None:
    bench = bench_of(2, refuse=True)
    _, client = ask(bench, ("x-slo-ttft-ms", "400"))
    peer = bench.connect()
    bench.clock += 0.1
    peer.send(status_json(503))
    stream_of(bench, bench.connect(2), 0.1, 0.01)
    assert client.answer().status == 200
    assert counts(bench) == {("ttft", "met"): 1}
