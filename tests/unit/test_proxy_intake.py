"""What a request asks for: told to its owner exactly once, and nothing after the end."""

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from support.exchanges import Bench

from gateway.prompt.body import RequestBody
from gateway.prompt.token_chain import TokenPrompt
from gateway.proxy.errors import GatewayError
from gateway.proxy.heads import RequestHead
from gateway.proxy.intake import Intake
from gateway.routing.query import Query

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}).encode()
JSON = ("content-type", "application/json")
CHUNKED = ("transfer-encoding", "chunked")


class Owner:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.request_id = b"id"
        self.started_s = 1000.0
        self.told: list[str] = []
        self.error: GatewayError | None = None
        self.query: Query | None = None
        self.body = b""
        self.usage_added = False
        self.on_asked: Callable[[], None] = lambda: None

    def refused(self, error: GatewayError, query: Query | None = None) -> None:
        self.told.append("refused")
        self.error, self.query = error, query

    def answered(self, status: int, payload: bytes) -> None:
        self.told.append("answered")
        self.body = payload

    def send_continue(self) -> None:
        self.told.append("continue")

    def body_streams(self, pending: list[bytes]) -> None:
        self.told.append("streams")
        self.body = b"".join(pending)

    def asked(self, query: Query, body: bytes, usage_added: bool) -> None:
        self.told.append("asked")
        self.query, self.usage_added = query, usage_added
        self.body = self.body or body
        self.on_asked()

    def broken_inside(self) -> None:
        self.told.append("broken")


def intake_of(
    *headers: tuple[str, str], bench: Bench | None = None, method: str = "POST", target: str = "/v1/chat/completions"
) -> tuple[Intake, Owner]:
    lines = [(b"host", b"gateway"), *((name.encode(), value.encode()) for name, value in headers)]
    owner = Owner()
    head = RequestHead(method.encode(), target.encode(), lines, False, True)
    return Intake(owner, (bench or Bench()).plane, head), owner


def read(body: bytes, *headers: tuple[str, str], **options: Any) -> Owner:
    intake, owner = intake_of(JSON, CHUNKED, *headers, **options)
    intake.begin(False)
    intake.add(body[:7])
    intake.add(body[7:])
    assert owner.told == [], "half a body says nothing"
    intake.end()
    return owner


def test_a_json_body_is_read_as_a_whole_and_passed_on_byte_for_byte() -> None:
    owner = read(BODY)
    assert owner.told == ["asked"]
    assert owner.query is not None
    assert (owner.query.model, owner.query.stream) == ("m", True)
    assert owner.body == BODY
    assert not owner.usage_added


def test_a_body_that_came_before_its_turn_counts() -> None:
    intake, owner = intake_of(JSON, CHUNKED)
    intake.add(BODY)
    assert owner.told == []
    intake.begin(True)
    assert (owner.told, owner.body) == (["asked"], BODY)


@pytest.mark.parametrize("before_its_turn", [True, False])
def test_a_body_over_the_limit_is_refused_when_it_is_its_turn(before_its_turn: bool) -> None:
    bench = Bench(limits={"max_body_bytes": 10})
    intake, owner = intake_of(JSON, CHUNKED, bench=bench)
    if before_its_turn:
        intake.add(b"x" * 11)
        assert owner.told == []
        intake.begin(False)
    else:
        intake.begin(False)
        intake.add(b"x" * 10)
        assert owner.told == []
        intake.add(b"x")
    assert owner.told == ["refused"]
    assert owner.error is not None
    assert owner.error.status == 413


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b'{"messages":[]}', 400, "missing_required_parameter"),
        (BODY.replace(b'"m"', b'"other"'), 404, "model_not_found"),
    ],
)
def test_what_cannot_be_served_is_refused(body: bytes, status: int, code: str) -> None:
    bench = Bench()
    bench.fleet.set_served(bench.fleet.replicas["replica-1"], [{"id": "m", "object": "model"}])
    owner = read(body, bench=bench)
    assert owner.told == ["refused"]
    assert owner.error is not None
    assert (owner.error.status, owner.error.code) == (status, code)


def test_unknown_paths_are_refused_before_their_body() -> None:
    intake, owner = intake_of(JSON, CHUNKED, target="/nowhere")
    intake.begin(False)
    assert owner.told == ["refused"]


def test_models_are_answered_here() -> None:
    intake, owner = intake_of(method="GET", target="/v1/models")
    intake.begin(True)
    assert owner.told == ["answered"]
    assert json.loads(owner.body)["object"] == "list"


def test_the_client_is_told_to_go_on_only_if_it_waits() -> None:
    expecting = ("expect", "100-continue")
    intake, owner = intake_of(JSON, CHUNKED, expecting)
    intake.begin(False)
    assert owner.told == ["continue"]
    intake, owner = intake_of(JSON, CHUNKED, expecting)
    intake.add(BODY)
    intake.begin(True)
    assert owner.told == ["asked"]


def test_a_body_that_is_not_json_is_not_waited_for() -> None:
    intake, owner = intake_of(("content-type", "multipart/form-data; boundary=x"), CHUNKED, target="/v1/audio/x")
    intake.add(b"early")
    intake.begin(False)
    assert owner.told == ["streams", "asked"]
    assert owner.body == b"early"


def test_usage_is_asked_for_where_the_plane_says_so() -> None:
    bench = Bench()
    bench.plane.asks_usage = True
    owner = read(BODY, bench=bench)
    assert owner.usage_added
    assert json.loads(owner.body)["stream_options"] == {"include_usage": True}


def test_nothing_is_put_into_a_compressed_body() -> None:
    bench = Bench()
    bench.plane.asks_usage = True
    packed = gzip.compress(BODY)
    owner = read(packed, ("content-encoding", "gzip"), bench=bench)
    assert owner.query is not None
    assert not owner.query.divisible
    assert owner.body == packed


def test_a_fault_of_ours_is_told_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    intake, owner = intake_of(JSON, CHUNKED)

    def fail() -> None:
        raise ZeroDivisionError

    owner.on_asked = fail
    intake.begin(False)
    intake.add(BODY)
    intake.end()
    assert owner.told == ["asked", "broken"]
    assert "failed inside the gateway" in caplog.text


class Source:
    """Tokens that come when the test says so."""

    def __init__(self) -> None:
        self.have: Callable[[TokenPrompt | None], None] | None = None

    def fetch(self, path: str, body: RequestBody, have: Callable[[TokenPrompt | None], None]) -> bool:
        self.have = have
        return True


@pytest.mark.parametrize("ended", [True, False])
def test_tokens_that_come_after_the_end_are_nobodys(ended: bool) -> None:
    bench, source = Bench(), Source()
    bench.plane.token_source = source
    intake, owner = intake_of(JSON, CHUNKED, bench=bench)
    intake.begin(False)
    intake.add(BODY)
    intake.end()
    assert owner.told == []
    if ended:
        intake.abandon()
    assert source.have is not None
    source.have(None)
    assert owner.told == ([] if ended else ["asked"])
