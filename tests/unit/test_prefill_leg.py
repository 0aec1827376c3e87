"""Requests in two legs: bytes in, bytes out, for every way in which either of them can fail."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exchanges import OK_JSON, SSE_HEAD, TOKEN, Bench, FakeClient, Peer, chunk, status_json

from gateway.prompt.hand_off import read_prefilled, with_transfer_params
from gateway.proxy.exchange import Exchange, Outcome
from gateway.proxy.failures import TABLE, Action, Cause, Phase
from gateway.replicas.breaker import Outcome as Verdict
from gateway.replicas.spec import ReplicaSpec, Role
from gateway.routing.hand_off import HandOffRules, HandOffSettings

P, D, D2 = 1, 2, 3

PARAMS = (
    b'{"do_remote_prefill":true,  "do_remote_decode":false,"remote_block_ids":[[1,2,3]],"remote_engine_id":"e-1",'
    b'"remote_request_id":"chatcmpl-x-1","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1,"big":12345678901234567890123}'
)


def answered(params: bytes = PARAMS, extra: bytes = b"") -> bytes:
    """What a prefill replica answers."""
    body = (
        b'{"id":"x","choices":[],"usage":{"prompt_tokens":231,"prompt_tokens_details":{"cached_tokens":224}},'
        b'"kv_transfer_params":' + params + extra + b"}"
    )
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def bench_of(connector: str = "nixl", decodes: int = 2, policy: str = "always", **options: Any) -> Bench:
    roles = [Role.PREFILL] + [Role.DECODE] * decodes
    specs = [
        ReplicaSpec(f"http://replica-{n}.test:8000", models=("m",), role=role) for n, role in enumerate(roles, start=1)
    ]
    bench = Bench(specs=specs, **options)
    settings = HandOffSettings(connector=connector, policy=policy)  # type: ignore[arg-type]
    bench.router.hand_offs.use(HandOffRules(settings))
    return bench


def ask(bench: Bench, **fields: Any) -> tuple[Exchange, FakeClient, bytes]:
    content = {"model": "m", "messages": [{"role": "user", "content": "Hello " * 100}], **fields}
    body = json.dumps(content).encode()
    headers = (("content-type", "application/json"), ("content-length", str(len(body))), ("x-request-id", "id-1"))
    exchange, client = bench.start(headers)
    exchange.request_body(body)
    exchange.request_end()
    return exchange, client, body


def next_on(bench: Bench, number: int) -> Peer:
    """Where a replica gets its next request: on a new connection, or on the idle one that was taken."""
    pool = bench.pool(number)
    if pool.dialled:
        return pool.connect()
    return next(Peer(connection) for connection in pool.connections if connection.exchange is not None)


def body_of(peer: Peer) -> bytes:
    """The body of the last request a peer got."""
    head, _, body = peer.received[peer.received.rindex(b"POST ") :].partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert b"x-request-id: id-1" in head
    return body


def test_the_prompt_goes_to_prefill_and_the_request_with_what_it_returned_to_decode() -> None:
    bench = bench_of()
    exchange, client, body = ask(
        bench,
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=50,
        min_tokens=5,
        logprobs=True,
    )
    assert exchange.phase is Phase.PREFILL
    p = bench.connect(P)
    first = json.loads(body_of(p))
    assert first == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello " * 100}],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert bench.ledger.prefill_tokens[0] > 0
    assert bench.ledger.prefill_tokens[1] == 0
    assert bench.ledger.kv_own_tokens[1] > 100
    p.send(answered(PARAMS))
    assert bench.ledger.in_flight[:2] == [0, 1]
    d = bench.connect(D)
    assert body_of(d) == body[:-1] + b',"kv_transfer_params":' + PARAMS + b"}"
    d.send(SSE_HEAD + chunk(TOKEN) + chunk(b"data: [DONE]\n\n") + chunk(b""))
    answer = client.answer()
    assert (answer.status, answer.complete, client.end) == (200, True, "kept")
    assert answer.headers["x-warmgate-prefill-replica"] == "replica-1"
    assert bench.ejector.verdicts == [("replica-1", Verdict.OK), ("replica-2", Verdict.OK)]
    assert bench.tally.disaggregated == {"m": 1}
    assert bench.tally.hand_off_s.count == 1
    bench.assert_idle()


FIRST_LEG: dict[Cause, Any] = {
    Cause.REFUSED: lambda bench: bench.pool(P).fail(Cause.REFUSED),
    Cause.CONNECT_TIMEOUT: lambda bench: bench.pool(P).fail(Cause.CONNECT_TIMEOUT),
    Cause.NO_SOCKET: lambda bench: bench.pool(P).fail(Cause.NO_SOCKET),
    Cause.RESET: lambda bench: bench.connect(P).lose(ConnectionResetError()),
    Cause.FIRST_BYTE_TIMEOUT: lambda bench: (bench.connect(P), bench.tick(61)),
    Cause.SILENCE: lambda bench: (bench.connect(P).send(answered()[:90]), bench.tick(31)),
    Cause.BAD_RESPONSE: lambda bench: bench.connect(P).send(b"no status line\r\n\r\n"),
    Cause.SERVER_ERROR: lambda bench: bench.connect(P).send(status_json(500)),
    Cause.BUSY: lambda bench: bench.connect(P).send(status_json(429)),
    Cause.PREFILL_REFUSED: lambda bench: bench.connect(P).send(status_json(400)),
    Cause.PREFILL_USELESS: lambda bench: bench.connect(P).send(answered(b"null")),
}


def test_every_failure_of_the_first_leg_is_played() -> None:
    mine = {cause: rule for (phase, cause), rule in TABLE.items() if phase is Phase.PREFILL}
    rows = {cause for cause, rule in mine.items() if rule.action is Action.SERVE_WHOLE}
    assert rows == set(FIRST_LEG)


@pytest.mark.parametrize("cause", FIRST_LEG)
def test_a_failed_first_leg_is_served_whole(cause: Cause) -> None:
    bench = bench_of()
    exchange, client, body = ask(bench)
    FIRST_LEG[cause](bench)
    assert client.sent == b""
    assert exchange.attempts == 1
    d = bench.connect(D)
    assert body_of(d) == body
    d.send(OK_JSON)
    assert client.answer().status == 200
    verdicts = [verdict for verdict in bench.ejector.verdicts if verdict[0] == "replica-1"]
    assert verdicts == [("replica-1", TABLE[Phase.PREFILL, cause].verdict)]
    assert bench.tally.hand_off_fallbacks == {cause: 1}
    assert bench.tally.retries == {}
    assert bench.tally.disaggregated == {}
    assert all(connection.transport.is_closing() or connection.closed for connection in bench.pool(P).connections) or (
        cause is Cause.PREFILL_USELESS
    )
    bench.assert_idle()


@pytest.mark.parametrize(
    "params",
    [
        b"null",
        b"7",
        b"{}",
        PARAMS.replace(b'"remote_request_id":"chatcmpl-x-1",', b""),
        PARAMS.replace(b"chatcmpl-x-1", b""),
        PARAMS.replace(b'"do_remote_prefill":true', b'"do_remote_prefill":false'),
        PARAMS.replace(b"[[1,2,3]]", b"null"),
        b'"unfinished',
    ],
)
def test_parameters_that_would_harm_the_decode_engine_are_not_sent(params: bytes) -> None:
    bench = bench_of()
    _, client, body = ask(bench)
    bench.connect(P).send(answered(params))
    d = bench.connect(D)
    assert body_of(d) == body
    d.send(OK_JSON)
    assert client.answer().status == 200
    assert bench.tally.hand_off_fallbacks == {Cause.PREFILL_USELESS: 1}
    bench.assert_idle()


def test_a_stale_connection_of_the_first_leg_is_replaced_once() -> None:
    bench = bench_of()
    _, client, _ = ask(bench)
    p = bench.connect(P)
    p.send(answered(PARAMS))
    bench.connect(D).send(OK_JSON)
    assert client.end == "kept"
    ask(bench)
    p.lose()
    bench.connect(P).send(answered(PARAMS))
    assert b"kv_transfer_params" in body_of(bench.connect(D))
    assert bench.tally.hand_off_fallbacks == {}


@pytest.mark.parametrize("at", ["dialling", "prefilling", "between", "waiting", "streaming"])
def test_a_client_that_leaves_ends_both_legs(at: str) -> None:
    bench = bench_of()
    exchange, _, _ = ask(bench, stream=True)
    p = d = None
    if at != "dialling":
        p = bench.connect(P)
    if p is not None and at != "prefilling":
        p.send(answered(PARAMS))
        if at != "between":
            d = bench.connect(D)
            if at == "streaming":
                d.send(SSE_HEAD + chunk(TOKEN))
    exchange.client_gone()
    assert exchange.outcome is Outcome.CANCELLED
    if at == "prefilling":
        assert p is not None
        assert p.ended == "aborted"
    if d is not None:
        assert d.ended == "aborted"
    if at == "dialling":
        assert bench.pool(P).dialled[0].exchange is None
    bench.assert_idle()


@pytest.mark.parametrize("cause", [Cause.DEADLINE, Cause.DRAIN, Cause.CLIENT_STALLED])
def test_what_ends_a_request_ends_its_first_leg(cause: Cause) -> None:
    bench = bench_of(limits={"deadline_s": 4.0} if cause is Cause.DEADLINE else {})
    exchange, client, _ = ask(bench)
    p = bench.connect(P)
    if cause is Cause.DEADLINE:
        bench.tick(4.5)
    elif cause is Cause.DRAIN:
        exchange.cut()
    else:
        exchange.client_writable(False)
        bench.tick(21)
    rule = TABLE[Phase.PREFILL, cause]
    assert p.ended == "aborted"
    if rule.action is Action.ANSWER:
        assert client.answer().error["code"] == rule.code
    bench.assert_idle()


def test_a_second_leg_that_would_begin_after_the_lease_is_prefilled_again_and_then_served_whole() -> None:
    bench = bench_of()
    _, client, body = ask(bench)
    bench.connect(P).send(answered(PARAMS))
    bench.tick(29)
    late = bench.connect(D)
    assert late.received == b""
    next_on(bench, P).send(answered(PARAMS))
    bench.tick(29)
    d = bench.connect(D)
    assert body_of(d) == body
    d.send(OK_JSON)
    assert client.answer().status == 200
    assert bench.tally.hand_off_fallbacks == {Cause.PREFILL_EXPIRED: 2}
    bench.assert_idle()


def test_a_server_error_of_the_second_leg_is_computed_whole_and_not_held_against_anybody() -> None:
    bench = bench_of(decodes=1)
    _, client, body = ask(bench)
    bench.connect(P).send(answered(PARAMS))
    d = bench.connect(D)
    d.send(status_json(500))
    d2 = next_on(bench, D)
    assert body_of(d2) == body
    d2.send(OK_JSON)
    assert client.answer().status == 200
    assert bench.ejector.verdicts[1:] == [("replica-2", Verdict.CANCELLED), ("replica-2", Verdict.OK)]
    assert bench.tally.hand_off_fallbacks == {Cause.HAND_OFF_FAILED: 1}
    _, _, body = ask(bench)
    assert body_of(next_on(bench, D)) == body
    assert not bench.pool(P).dialled


def test_a_stream_whose_first_event_says_that_the_kv_is_lost_is_computed_whole() -> None:
    bench = bench_of(decodes=1)
    _, client, body = ask(bench, stream=True)
    bench.connect(P).send(answered(PARAMS))
    d = bench.connect(D)
    d.send(SSE_HEAD)
    error = b'data: {"error":{"message":"KV load failure","type":"InternalServerError","param":null,"code":500}}\n\n'
    d.send(chunk(error[:30]))
    assert client.sent == b""
    d.send(chunk(error[30:]))
    assert d.ended == "aborted"
    d = next_on(bench, D)
    assert body_of(d) == body
    d.send(SSE_HEAD + chunk(TOKEN) + chunk(b"data: [DONE]\n\n") + chunk(b""))
    answer = client.answer()
    assert answer.complete
    assert answer.body == TOKEN + b"data: [DONE]\n\n"
    assert bench.tally.hand_off_fallbacks == {Cause.HAND_OFF_FAILED: 1}
    bench.assert_idle()


def test_a_stream_of_a_second_leg_is_relayed_from_its_first_event_on() -> None:
    bench = bench_of()
    exchange, client, _ = ask(bench, stream=True)
    bench.connect(P).send(answered(PARAMS))
    d = bench.connect(D)
    d.send(SSE_HEAD + chunk(TOKEN[:10]))
    assert client.sent == b""
    d.send(chunk(TOKEN[10:]))
    assert client.answer().body == TOKEN
    assert exchange.first_token_s is not None
    d.send(chunk(b"data: [DONE]\n\n") + chunk(b""))
    assert client.answer().complete
    _, client, _ = ask(bench, stream=True)
    next_on(bench, P).send(answered(PARAMS))
    bench.connect(D).send(SSE_HEAD + chunk(b""))
    assert client.answer().status == 200
    bench.assert_idle()


def test_a_stream_lost_before_its_first_event_leaves_nothing_to_the_next_attempt() -> None:
    bench = bench_of()
    exchange, client, _ = ask(bench, stream=True)
    bench.connect(P).send(answered(PARAMS))
    d = bench.connect(D)
    d.send(SSE_HEAD + chunk(TOKEN[:10]))
    bench.router.hand_offs.use(HandOffRules(HandOffSettings(policy="never")))
    d.lose(ConnectionResetError())
    body = b'{"usage":{"prompt_tokens":3,"completion_tokens":2}}'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    bench.connect(D2).send(head + body)
    answer = client.answer()
    assert (answer.status, answer.body, answer.complete) == (200, body, True)
    assert exchange.usage is not None
    assert exchange.usage.prompt_tokens == 3
    bench.assert_idle()


@pytest.mark.parametrize("how", ["refused", "reset", "busy"])
def test_a_second_leg_that_fails_never_uses_the_same_parameters_again(how: str) -> None:
    bench = bench_of()
    _, client, _ = ask(bench)
    bench.connect(P).send(answered(PARAMS))
    if how == "refused":
        bench.pool(D).fail(Cause.REFUSED)
    else:
        d = bench.connect(D)
        assert PARAMS in body_of(d)
        if how == "reset":
            d.lose(ConnectionResetError())
        else:
            d.send(status_json(429))
    again = PARAMS.replace(b"chatcmpl-x-1", b"chatcmpl-x-2")
    next_on(bench, P).send(answered(again))
    d2 = bench.connect(D2)
    assert again in body_of(d2)
    d2.send(OK_JSON)
    assert client.answer().status == 200
    bench.assert_idle()


def test_a_second_leg_goes_out_on_a_connection_of_its_own() -> None:
    bench = bench_of(policy="never")
    ask(bench)
    d = bench.connect(D)
    d.send(OK_JSON)
    bench.router.hand_offs.use(HandOffRules(HandOffSettings(policy="always")))
    ask(bench)
    bench.connect(P).send(answered(PARAMS))
    assert bench.pool(D).dialled
    assert bench.connect(D).received


def test_parameters_of_a_client_are_refused_where_replicas_have_roles() -> None:
    bench = bench_of()
    _, client, _ = ask(bench, kv_transfer_params={"do_remote_prefill": True})
    assert client.answer().status == 400
    assert client.answer().error["param"] == "kv_transfer_params"
    mixed = Bench()
    _, _, body = ask(mixed, kv_transfer_params={"x": 1})
    assert body_of(mixed.connect(1)) == body


def test_parameters_that_are_null_give_way() -> None:
    bench = bench_of()
    _, _, body = ask(bench, kv_transfer_params=None, note={"kv_transfer_params": None})
    bench.connect(P).send(answered(PARAMS))
    sent = body_of(bench.connect(D))
    assert sent == body.replace(b'"kv_transfer_params": null', b'"kv_transfer_params": ' + PARAMS, 1)
    assert sent.endswith(b'"note": {"kv_transfer_params": null}}')


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"prompt_logprobs": 1},
        {"use_beam_search": True},
    ],
)
def test_requests_that_cannot_be_divided_are_served_whole(fields: dict[str, Any]) -> None:
    bench = bench_of()
    _, _, body = ask(bench, **fields)
    assert body_of(bench.connect(D)) == body


def test_a_push_sends_both_legs_at_once_when_it_knows_where_from() -> None:
    bench = bench_of("nixl_push")
    _, client, _ = ask(bench)
    p = bench.connect(P)
    assert not bench.pool(D).dialled
    p.send(answered(PARAMS))
    d = bench.connect(D)
    expected = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "e-1",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_request_id": "id-1",
    }
    assert json.loads(body_of(d))["kv_transfer_params"] == expected
    d.send(OK_JSON)
    assert client.end == "kept"
    _, client, _ = ask(bench)
    d = bench.connect(D)
    assert json.loads(body_of(d))["kv_transfer_params"] == expected
    p.send(answered(PARAMS))
    d.send(OK_JSON)
    assert client.answer().status == 200
    bench.assert_idle()


def test_a_push_whose_prefill_fails_is_taken_back_from_the_decode_replica() -> None:
    bench = bench_of("nixl_push")
    ask(bench)
    p = bench.connect(P)
    p.send(answered(PARAMS))
    bench.connect(D).send(OK_JSON)
    _, client, body = ask(bench)
    d = bench.connect(D)
    p.send(status_json(500))
    assert d.ended == "aborted"
    d = next_on(bench, D)
    assert body_of(d) == body
    d.send(OK_JSON)
    assert client.answer().status == 200
    bench.assert_idle()


def test_with_shared_storage_the_request_stays_as_it_is() -> None:
    bench = bench_of("shared_storage")
    _, client, body = ask(bench)
    p = bench.connect(P)
    assert "kv_transfer_params" not in json.loads(body_of(p))
    p.send(answered(b"null"))
    d = bench.connect(D)
    assert body_of(d) == body
    d.send(OK_JSON)
    assert client.answer().status == 200
    bench.assert_idle()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    fields=st.dictionaries(st.text(max_size=8).filter(lambda name: name != "kv_transfer_params"), JSON, min_size=1),
    before=st.sampled_from(["", " ", "\n"]),
    after=st.sampled_from(["", " ", "\n\n"]),
    indent=st.sampled_from([None, 2]),
)
def test_the_second_body_is_the_first_with_one_member_more(
    fields: dict[str, Any], before: str, after: str, indent: int | None
) -> None:
    body = (before + json.dumps(fields, indent=indent, ensure_ascii=False) + after).encode("utf-8", "surrogatepass")
    sent = with_transfer_params(body, PARAMS)
    member = b',"kv_transfer_params":' + PARAMS
    assert sent.count(member) == 1
    assert sent.replace(member, b"") == body
    assert json.loads(sent) == fields | {"kv_transfer_params": json.loads(PARAMS)}


@given(text=st.text(max_size=50), spaces=st.sampled_from(["", " ", "\n  "]))
def test_parameters_are_passed_on_as_they_were_written(text: str, spaces: str) -> None:
    decoy = json.dumps('"kv_transfer_params": {"a": 1}' + text).encode()
    body = b'{"text":%b,"kv_transfer_params":%b%b,"last":%b}' % (decoy, spaces.encode(), PARAMS, decoy)
    assert read_prefilled(body).params == PARAMS
