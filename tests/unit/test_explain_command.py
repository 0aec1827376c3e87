"""`warmgate explain` without a gateway: its log, its tables, and what it says when something is wrong."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from gateway.cli import main
from gateway.explain_tables import plain, tables
from gateway.proxy.recent import Recent
from gateway.routing.assignment import Assignment

RECORD: dict[str, Any] = {
    "event": "request",
    "id": "wg-1",
    "client": "192.0.2.1",
    "method": "POST",
    "path": "/v1/chat/completions",
    "status": 200,
    "outcome": "ok",
    "duration_ms": 900.0,
    "attempts": 1,
    "model": "m",
    "stream": True,
    "prompt_tokens": 6000,
    "replica": "b",
    "policy": "predicted_ttft",
    "reason": "least predicted cost",
    "terms": {"cost_s": 0.25, "ttft_s": 0.2},
    "expected_cached_tokens": 5120,
    "predicted_ttft_ms": 200.0,
    "ttft_ms": 160.0,
    "cached_tokens": 5104,
    "completion_tokens": 30,
}


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments], input=stdin)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "requests.log"
    lines = [
        json.dumps({**RECORD, "status": 500}),
        "2026-11-30 00:00:00 INFO something about wg-1",
        json.dumps({**RECORD, "id": "wg-11"}),
        json.dumps(RECORD),
        json.dumps({"event": "request", "id": "wg-2", "method": "POST", "path": "/v1/x", "status": 503}),
        '{"id": "wg-1", cut off',
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_request_from_the_log(log: Path) -> None:
    result = run("wg-1", "--log", str(log))
    assert result.exit_code == 0
    assert "To: b" in result.output
    assert "Reason: least predicted cost (predicted_ttft)" in result.output
    assert "predicted 200.0 ms, observed 160.0 ms (+25 %)" in result.output
    assert "expected 5,120, reported 5,104" in result.output
    assert "500" not in result.output


def test_the_log_as_json_and_from_stdin(log: Path) -> None:
    result = run("wg-1", "--log", "-", "--json", stdin=log.read_text(encoding="utf-8"))
    assert result.exit_code == 0
    assert json.loads(result.output)["record"] == RECORD


def test_a_request_that_went_nowhere(log: Path) -> None:
    result = run("wg-2", "--log", str(log))
    assert result.exit_code == 0
    assert "it went to no replica" in result.output


def test_a_request_that_is_not_in_the_log(log: Path) -> None:
    result = run("wg-3", "--log", str(log))
    assert result.exit_code == 1
    assert result.output == "Error: there is no request wg-3 in this log\n"


@pytest.mark.parametrize(
    "arguments",
    [(), ("wg-1", "--body", "-"), ("--log", "-"), ("--body", "-", "--log", "-"), ("--body", "missing.json")],
)
def test_arguments_that_do_not_go_together(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_an_admin_port_that_is_not_there() -> None:
    result = run("wg-1", "--admin", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert result.output.startswith("Error: the admin port http://127.0.0.1:9 cannot be reached: ")


@pytest.mark.parametrize("url", ["127.0.0.1:9", "nonsense", "ftp://x"])
def test_a_url_that_is_none(url: str) -> None:
    result = run("wg-1", "--admin", url)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: the admin port {url} cannot be reached: ")


def test_a_header_that_is_none() -> None:
    assert "is not NAME:VALUE" in run("--body", "-", "-H", "nonsense", stdin="{}").output


def test_what_comes_from_outside_cannot_command_the_terminal() -> None:
    assert plain("a\x1b[2Jb\r\n\x07c") == "a\ufffd[2Jb\ufffd\ufffd\ufffdc"
    console = Console(width=100, record=True)
    record = {**RECORD, "path": "/v1/\x1b[31m", "id": "[bold]x\x1b", "reason": "\x9b31m", "replica": "\x1b"}
    for part in tables({"id": record["id"], "attempts": [], "record": record}):
        console.print(part)
    assert not {"\x1b", "\x9b"} & set(console.export_text(styles=False))
    assert "[bold]x" in "".join(str(part) for part in tables({"id": record["id"], "attempts": [], "record": record}))


def attempt(predicted_ttft_s: float, observed_ttft_s: float | None) -> Assignment:
    made = SimpleNamespace(predicted_ttft_s=predicted_ttft_s, observed_ttft_s=observed_ttft_s)
    return cast(Assignment, made)


def test_of_requests_that_went_well_so_many_a_second_are_kept_and_all_others() -> None:
    recent = Recent(1000, 5.0)
    good = attempt(0.1, 0.1)
    # Two seconds' worth are saved up.
    assert [recent.wants(good, True, 0.0) for _ in range(12)] == [True] * 10 + [False] * 2
    assert not recent.wants(good, True, 0.1)
    assert recent.wants(good, True, 0.2)
    assert not recent.wants(good, True, 0.3)
    assert sum(recent.wants(good, True, 0.3 + number / 100) for number in range(1000)) == pytest.approx(50, abs=1)
    # Failed, tried again, never sent, late.
    assert all(recent.wants(good, False, 10.3) for _ in range(100))
    assert recent.wants(None, True, 10.3)
    assert recent.wants(attempt(0.1, 0.31), True, 10.3)
    assert not recent.wants(attempt(0.1, 0.29), True, 10.3)
    assert not recent.wants(attempt(0.1, None), True, 10.3)


def test_the_oldest_go_first_and_the_last_of_an_id_is_found() -> None:
    recent = Recent(2, 50.0)
    assert recent.oldest_s is None
    for number in range(3):
        recent.add({"id": f"id-{number}"}, None, 10.0 + number)
    assert (len(recent), recent.oldest_s) == (2, 11.0)
    assert recent.find("id-0") is None
    recent.add({"id": "id-2", "again": True}, None, 13.0)
    assert recent.find("id-2") == ({"id": "id-2", "again": True}, None, 13.0)
