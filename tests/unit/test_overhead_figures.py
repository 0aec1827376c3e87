"""Figures, verdicts and reports of the overhead benchmark, from runs written by hand."""

import orjson
import pytest
from rich.console import Console

from loadtests.overhead import figures, report
from loadtests.overhead.figures import Line
from loadtests.overhead.generator import percentiles_ms
from loadtests.overhead.job import Outcome
from loadtests.overhead.plan import Run, RunKind, Settings, order, run_count, steps

GATEWAYS = ("warmgate", "sglang", "vllm", "nginx")


def requests(round_: int, gateway: str, cpu_us: float, size: int = 1, errors: dict[str, int] | None = None) -> Run:
    outcome = Outcome(
        window_s=2.0, completed=1000, total=1200, cpu_s={"gateway": cpu_us / 1000}, errors=errors or {}, p50_ms=1
    )
    return Run(round_, gateway, "requests", size, outcome, {"/v1/chat/completions": 1200, "/health": 12})


def latency(round_: int, gateway: str, p99_ms: float, kind: RunKind = "latency") -> Run:
    return Run(round_, gateway, kind, 1, Outcome(window_s=1.0, completed=10, total=10, p50_ms=0.5, p99_ms=p99_ms))


def the_line(runs: list[Run], key: str) -> Line:
    return next(line for line in figures.lines(runs) if line.metric.key == key)


def test_cpu_per_request_worked() -> None:
    ours, sglang, vllm = (40.0, 30.0, 60.0), (50.0, 60.0, 100.0), (90.0, 95.0, 99.0)
    runs = [
        run
        for number in range(3)
        for run in (
            requests(number, "warmgate", ours[number]),
            requests(number, "sglang", sglang[number]),
            requests(number, "vllm", vllm[number]),
            requests(number, "nginx", 15.0),
        )
    ]
    line = the_line(runs, "cpu_us_per_request_1kb")
    assert line.cells["warmgate"] == figures.Spread(pytest.approx(40.0), pytest.approx(30.0), pytest.approx(60.0))
    assert line.best_peer == "sglang"  # the floor is no peer
    # Each round's ratio, not the ratio of the medians: 0.8, 0.5, 0.6.
    assert line.ratio == figures.Spread(pytest.approx(0.6), pytest.approx(0.5), pytest.approx(0.8))
    assert line.met is True
    saturation = the_line(runs, "requests_per_s")
    assert saturation.cells["warmgate"].median == 500.0
    assert saturation.met is None
    assert the_line(runs, "calls_per_request").cells["sglang"].median == pytest.approx(1.01)


@pytest.mark.parametrize(
    ("size", "ratio", "met"),
    [
        *((1, 1.0, True), (1, 1.01, False), (8, 5.0, None), (32, 0.7, True), (32, 0.71, False)),
        *((128, 0.6, True), (128, 0.61, False), (512, 0.6, True), (512, 0.61, False)),
    ],
)
def test_targets_of_request_cost(size: int, ratio: float, met: bool | None) -> None:
    runs = [requests(0, "warmgate", 1000 * ratio, size), requests(0, "vllm", 1000.0, size)]
    assert the_line(runs, f"cpu_us_per_request_{size}kb").met is met


def test_streams_worked() -> None:
    def run(gateway: str, cpu_s: float, rss_mb: float) -> Run:
        outcome = Outcome(1.0, 25_600, 512, {"gateway": cpu_s}, int(rss_mb * 1e6), reads=25_600)
        return Run(0, gateway, "streams", 512, outcome)

    runs = [run("warmgate", 0.256, 149.0), run("sglang", 0.512, 90.0)]
    chunk = the_line(runs, "cpu_us_per_chunk_512_streams")
    assert chunk.cells["warmgate"].median == pytest.approx(10.0)
    assert chunk.ratio == figures.Spread(0.5, 0.5, 0.5)
    assert chunk.met is True
    memory = the_line(runs, "peak_rss_mb_512_streams")
    assert memory.met is True  # a limit of its own, whatever the peers need
    assert the_line([run("warmgate", 0.256, 151.0)], "peak_rss_mb_512_streams").met is False


def test_added_latency_is_above_the_same_load_without_a_gateway() -> None:
    runs = [
        *(latency(0, "warmgate", 2.0), latency(0, "warmgate", 1.5, "direct")),
        *(latency(1, "warmgate", 4.0), latency(1, "warmgate", 3.0, "direct")),
        *(latency(0, "sglang", 3.0), latency(0, "sglang", 2.0, "direct")),
        latency(1, "sglang", 9.0),  # its direct run has failed
    ]
    line = the_line(runs, "added_p99_ms")
    assert line.cells["warmgate"].median == pytest.approx(0.75)
    assert line.cells["sglang"].median == pytest.approx(1.0)
    assert line.ratio == figures.Spread(pytest.approx(0.5), pytest.approx(0.5), pytest.approx(0.5))
    assert line.met is True
    below_zero = [*runs[:4], latency(0, "sglang", 1.0), latency(0, "sglang", 2.0, "direct")]
    line = the_line(below_zero, "added_p99_ms")
    assert (line.ratio, line.met) == (None, False)


def test_errors_mark_and_runs_without_figures_are_left_out() -> None:
    runs = [
        requests(0, "warmgate", 40.0, errors={"reset": 2, "http_503": 1}),
        requests(0, "sglang", 50.0),
        requests(1, "warmgate", 40.0),
        Run(1, "sglang", "requests", 1, Outcome(errors={"the gateway has ended": 1})),
    ]
    line = the_line(runs, "cpu_us_per_request_1kb")
    assert line.errors == {"warmgate": 3, "sglang": 1}
    assert line.ratio == figures.Spread(0.8, 0.8, 0.8)
    warnings = figures.warnings(runs, 20.0)
    assert "warmgate, requests 1, round 1: 2 x reset" in warnings
    assert "sglang, requests 1, round 2: 1 x the gateway has ended" in warnings
    text = report.markdown(result(runs))
    row = next(line for line in text.splitlines() if line.startswith("| CPU µs/request, 1 KB"))
    assert row.split("|")[2:4] == [" ! 40.0 ", " ! 50.0 "]


def test_streams_behind_the_pace_and_bunched_chunks_are_told() -> None:
    slow = Run(0, "vllm", "streams", 10, Outcome(1.0, 400, 10, {"gateway": 0.1}, reads=400))
    bunched = Run(0, "nginx", "streams", 10, Outcome(1.0, 500, 10, {"gateway": 0.1}, reads=250))
    good = Run(0, "sglang", "streams", 10, Outcome(1.0, 490, 10, {"gateway": 0.1}, reads=480))
    told = figures.warnings([slow, bunched, good], interval_ms=20.0)
    assert len(told) == 2
    assert "vllm" in told[0]
    assert "only 80% of the pace" in told[0]
    assert "nginx" in told[1]
    assert "2.0 at a time" in told[1]


def test_hidden_calls_are_told() -> None:
    calls = {"/v1/chat/completions": 1200, "/v1/chat/completions/render": 9600, "/health": 2}
    run = Run(0, "vllm", "requests", 1, Outcome(completed=1000, total=1200), calls)
    assert figures.hidden_calls([run]) == [
        "vllm called /v1/chat/completions/render of its replicas 8.00 times per request"
    ]


def result(runs: list[Run], **settings: int) -> report.Result:
    gateways = tuple(dict.fromkeys(run.gateway for run in runs))
    machine = {"processor": "Abacus", "cores": 2, "memory_gb": 8.0, "kernel": "Linux 6", "python": "3.12.1"}
    return report.Result(
        Settings(gateways, rounds=2, **settings), {"sglang": "1.2.3"}, machine, "warmgate bench", runs, [0.5, 0.7]
    )


def test_reports_have_the_same_figures() -> None:
    runs = [requests(number, gateway, 50.0 + number) for number in range(2) for gateway in GATEWAYS]
    text = report.markdown(result(runs))
    lines = text.splitlines()
    assert lines[0] == "|  | warmgate | sglang | vllm | nginx | ratio to best peer | target | met |"
    assert {line.count("|") for line in lines if line.startswith("|")} == {9}
    assert lines[2].startswith("| CPU µs/request, 1 KB | 50.5 (50.0 to 51.0) | 50.5")
    assert "| 1.00 sglang | <= 1 (goal 0.7) | yes |" in lines[2]
    assert "own generator" in text
    assert text.endswith("    warmgate bench\n")
    console = Console(width=200)
    with console.capture() as captured:
        console.print(report.terminal_table(result(runs)))
    assert "50.5" in captured.get()
    assert "(50.0 to 51.0)" in captured.get()
    loaded = orjson.loads(orjson.dumps(report.as_json(result(runs))))
    metric = loaded["metrics"][0]
    assert metric["metric"] == "cpu_us_per_request_1kb"
    assert metric["rounds"]["vllm"] == pytest.approx([50.0, 51.0])
    assert metric["best_peer"] == "sglang"
    assert len(loaded["runs"]) == len(runs)


def test_every_gateway_is_first_in_its_turn() -> None:
    firsts = [next(order(GATEWAYS, number)) for number in range(5)]
    assert firsts == [*GATEWAYS, "warmgate"]
    assert all(sorted(order(GATEWAYS, number)) == sorted(GATEWAYS) for number in range(5))


def test_the_loads_of_a_round() -> None:
    settings = Settings(("warmgate", "vllm"), rounds=3, sizes_kb=(32,), streams=(4, 8))
    plan = [(step.kind, step.size) for step in steps(settings)]
    # Latency needs the saturation at 1 KB, asked for or not; streams come before long prompts fill memories.
    assert plan == [("streams", 4), ("streams", 8), ("requests", 1), ("latency", 1), ("idle", 0), ("requests", 32)]
    starts = [step.first_request for step in steps(settings)]
    assert len(set(starts)) == len(starts)
    assert run_count(settings) == 3 * (2 * 5 + 1)
    only = Settings(("warmgate",), parts=("requests",), sizes_kb=(8,))
    assert [(step.kind, step.size) for step in steps(only)] == [("requests", 8)]


def test_percentiles() -> None:
    assert percentiles_ms([number / 1000 for number in range(1, 102)]) == pytest.approx((51.0, 100.0))
    assert percentiles_ms([]) == (0.0, 0.0)
    assert percentiles_ms([0.002]) == (2.0, 2.0)
