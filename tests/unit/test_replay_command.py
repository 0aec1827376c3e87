"""The command line of the replay, and what it makes of its words."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.estimator.hardware import HARDWARE
from gateway.estimator.model import MODELS
from gateway.estimator.roofline import StepCost, kv_capacity_tokens, step_cost
from loadtests.replay.options import FleetOptions, card_names, costs, fleet, incidents, policy, slos
from loadtests.replay.presets import PRESETS, QWEN3_32B_ON_TWO_H100
from loadtests.replay.settings import Incident, Slo
from policies.predicted_ttft import PredictedTTFT

BASE = StepCost(1e-5, 1e-10, 0.01, 1e-8, 0.001, 0.0, 0.5)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


def test_default_fleet() -> None:
    replicas = fleet(FleetOptions())
    card, shape = HARDWARE["h100-sxm"], MODELS["llama-3.1-8b"]
    assert len(replicas) == 8
    assert replicas[0].cost == step_cost(card, shape)
    assert replicas[0].limits.kv_capacity_tokens == kv_capacity_tokens(card, shape)
    assert (replicas[0].hardware, replicas[0].model) == ("h100-sxm", "llama-3.1-8b")
    assert replicas[0].assumed_cost is None


def test_mixed_fleet() -> None:
    replicas = fleet(FleetOptions(replicas=4, hardware="h100-sxm,l40s"))
    assert [replica.hardware for replica in replicas] == ["h100-sxm", "l40s"] * 2
    assert replicas[0].cost != replicas[1].cost


def test_preset_and_what_overrides_it() -> None:
    replicas = fleet(FleetOptions(preset="b2b-saas"))
    assert len(replicas) == 8
    assert replicas[0].cost == replicas[0].assumed_cost == QWEN3_32B_ON_TWO_H100
    assert replicas[0].limits.kv_capacity_tokens == 307_328
    assert 8192 * replicas[0].cost.prefill_s_per_token == pytest.approx(0.40)
    smaller = fleet(FleetOptions(preset="b2b-saas", replicas=2, kv_tokens=1000))
    assert (len(smaller), smaller[0].limits.kv_capacity_tokens) == (2, 1000)
    # Another card's constants are its own, not the preset's.
    other = fleet(FleetOptions(preset="b2b-saas", hardware="b200"))
    assert other[0].cost == step_cost(HARDWARE["b200"], MODELS["qwen3-32b"], 2)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_a_fleet(name: str) -> None:
    assert fleet(FleetOptions(preset=name))


def test_the_37_percent_fleet_has_the_published_memory() -> None:
    (replica, *_) = fleet(FleetOptions(preset="b2b-saas-37"))
    computed = kv_capacity_tokens(HARDWARE["h100-sxm"], MODELS["llama-3.1-70b"], 4)
    assert replica.limits.kv_capacity_tokens == pytest.approx(computed, rel=0.05)


def test_what_the_gateway_assumes() -> None:
    (wrong,) = fleet(FleetOptions(replicas=1, predictor_cost="scale=1.3"))
    assert wrong.assumed_cost is not None
    assert wrong.assumed_cost.weights_s == pytest.approx(1.3 * wrong.cost.weights_s)
    (unknown,) = fleet(FleetOptions(replicas=1, predictor_unknown=True))
    assert (unknown.hardware, unknown.model, unknown.assumed_cost) == (None, None, None)
    # A constant per step is what a live gateway would not be told either.
    (overhead,) = fleet(FleetOptions(replicas=1, overhead_ms=2.0))
    assert overhead.cost.overhead_s == 0.002
    assert overhead.assumed_cost is None


def test_costs() -> None:
    changed = costs("prefill_s_per_token=2e-5, weights_s=*3", BASE)
    assert (changed.prefill_s_per_token, changed.weights_s) == (2e-5, pytest.approx(0.03))
    assert changed.kv_s_per_token == BASE.kv_s_per_token
    scaled = costs("scale=2", BASE)
    assert scaled.overhead_s == pytest.approx(0.002)
    assert scaled.idle_expert_share == 0.5, "a share is no time"


@pytest.mark.parametrize("text", ["speed=1", "weights_s", "weights_s=fast", "weights_s=-1", "scale=nan"])
def test_malformed_costs(text: str) -> None:
    with pytest.raises(ValueError, match="cost"):
        costs(text, BASE)


def test_cards_with_commas_of_their_own() -> None:
    own = "flops=1e15,bandwidth=3e12,memory=8e10"
    assert card_names(f"h100-sxm,{own},l4") == ["h100-sxm", own, "l4"]
    assert card_names(f"{own},{own}") == [own, own]


def test_incidents_in_order_of_time() -> None:
    assert incidents(["0@30", "1@5.5s"], ["0@60"], 2) == [
        Incident(1, 5.5, False),
        Incident(0, 30.0, False),
        Incident(0, 60.0, True),
    ]


def test_a_policy_with_options() -> None:
    chosen = policy("predicted_ttft:prefill_price=2.5", 0)
    assert isinstance(chosen, PredictedTTFT)
    assert chosen.prefill_price == 2.5
    with pytest.raises(ValueError, match="colour"):
        policy("predicted_ttft:colour=red", 0)
    with pytest.raises(ValueError, match="option=value"):
        policy("predicted_ttft:2.5", 0)


@pytest.mark.parametrize("word", ["0", "a@3", "0@soon", "2@3", "-1@3"])
def test_malformed_incidents(word: str) -> None:
    with pytest.raises(ValueError, match="slot"):
        incidents([word], [], 2)


def test_a_run_from_the_command_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * number, "input_length": 600, "output_length": 20, "hash_ids": [0, number % 3]}
        for number in range(30)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    words = [trace, "--policy", "random,predicted_ttft", "--replicas", 3, "--seed", 5, "--timing"]
    result = invoke(*words, "--json", first)
    assert result.exit_code == 0, result.output
    assert "predicted_ttft" in result.output
    assert "us per decision" in result.output
    assert invoke(*words, "--json", second).exit_code == 0
    assert first.read_bytes() == second.read_bytes()
    reports = json.loads(first.read_bytes())
    assert [report["policy"] for report in reports] == ["random", "predicted_ttft"]
    assert {"mean", "p50", "p90", "p95", "p99"} <= reports[0]["ttft_ms"].keys()
    assert {"bias", "median_ape", "p90_ape"} <= reports[0]["ttft_prediction"].keys()
    for name in ("requests", "errors", "token_hit_rate", "output_tokens_per_s", "load_skew", "preemptions", "goodput"):
        assert name in reports[0]
    assert reports[0]["requests"] == 30


def test_a_ladder_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = invoke(
        "b2b-saas", "--param", "steps=5x2 2x5 4x5", "--policy", "round_robin", "--preset", "b2b-saas", "--json", path
    )
    assert result.exit_code == 0, result.output
    (report,) = json.loads(path.read_bytes())
    assert [stage["name"] for stage in report["stages"]] == ["5/s warm-up", "2/s", "4/s"]
    assert report["requests"] == 30
    assert "4/s" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-trace.jsonl"], "neither a file nor a workload"),
        (["chat", "--policy", "none"], "unknown policy"),
        (["chat", "--param", "colour=red"], "sessions"),
        (["chat", "--preset", "none"], "unknown preset"),
        (["chat", "--hardware", "none"], "h100-sxm"),
        (["chat", "--fail", "9@1"], "no slot 9"),
        (["chat", "--cost", "none=1"], "unknown cost"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert message in result.output


def test_without_matplotlib_the_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke("chat", "--requests", 1, "--plot", tmp_path / "out.png")
    assert result.exit_code == 1
    assert "warmgate[plot]" in result.output


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    result = invoke("b2b-saas", "--param", "steps=5x2 2x5 4x5", "--policy", "round_robin,random", "--plot", path)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_sessions_ask_for_in_turn() -> None:
    assert slos("2000", "100") == [Slo(2000.0, 100.0)]
    assert slos("500,4000", "50") == [Slo(500.0, 50.0), Slo(4000.0, 50.0)]
    assert slos("500,4000", "50,200") == [Slo(500.0, 50.0), Slo(4000.0, 200.0)]


@pytest.mark.parametrize(("ttft_ms", "tpot_ms"), [("soon", "50"), ("500,", "50"), ("-1", "50"), ("1,2,3", "1,2")])
def test_what_sessions_cannot_ask_for(ttft_ms: str, tpot_ms: str) -> None:
    with pytest.raises(ValueError, match=r"milliseconds|go together"):
        slos(ttft_ms, tpot_ms)


@pytest.mark.parametrize("mode", ["off", "serve", "refuse"])
def test_targets_from_the_command_line(mode: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    # Prompts of 100,000 tokens take longer than 4 s even on an idle replica, and spoil the first token for others.
    arguments = ["mixed-lengths", "--requests", 400, "--replicas", 3, "--speed", 2, "--policy", "least_outstanding"]
    result = invoke(*arguments, "--slo", mode, "--slo-ttft-ms", "500,4000", "--param", "long_share=0.03", "--json", out)
    assert result.exit_code == 0, result.output
    (report,) = json.loads(out.read_text())
    tight, loose = report["goodput_by_slo"]
    assert (tight["slo_ttft_ms"], loose["slo_ttft_ms"]) == (500, 4000)
    assert (report["goodput"]["slo_ttft_ms"], report["goodput"]["slo_tpot_ms"]) == (None, 100)
    assert report["goodput"]["share"] == pytest.approx((tight["share"] + loose["share"]) / 2)
    assert (report["refused"] > 0) is (mode == "refuse")
    assert report["errors"] == report["refused"]
    # With targets in force most are kept; without, hardly any is.
    assert (report["goodput"]["share"] > 0.75) is (mode != "off")
