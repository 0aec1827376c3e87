"""`python -m loadtests.real --venv VENV --model MODEL`: policies against each other on real vLLM replicas.

Starts replicas once, and a new gateway for each run. Runs of the policies alternate, so that a machine that becomes
slower or faster meanwhile does so for all of them.
"""

import asyncio
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click

from loadtests.real.conversations import ConversationLoad, Turn, converse
from loadtests.real.replica import ReplicaOptions, VllmReplica
from loadtests.stack.launch import GatewayOptions, Stack


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the workload through one gateway."""

    policy: str
    requests: int
    cached_share: float
    """Prompt tokens the engines found cached, of all."""
    promised_share: float
    """Prompt tokens the gateway expected to be cached, of all."""
    first_ttft_ms: float
    """Mean over first turns, as the client saw it."""
    later_ttft_ms: float
    """Mean over the other turns."""
    duration_s: float
    prediction_errors: tuple[float, ...]
    """Relative errors of the predicted TTFT, in order of the requests' ends."""


@dataclass(frozen=True, slots=True)
class Figures:
    """All runs of one policy."""

    policy: str
    runs: int
    requests: int
    prompt_tokens_cached_share: float
    first_turns_ttft_mean_ms: float
    later_turns_ttft_mean_ms: float
    later_turns_ttft_mean_ms_by_run: tuple[float, ...]
    prediction_median_ape: float | None
    """Median absolute relative error of predicted TTFTs, after the first `warm_up` requests of each gateway."""


def run_of(policy: str, turns: Sequence[Turn], log: Sequence[dict[str, Any]]) -> Run:
    """Sum up one run.

    Args:
        policy: the gateway's.
        turns: its requests.
        log: lines of the gateway's request log.
    """
    results = [turn.result for turn in turns]
    first = [1000.0 * (turn.result.ttft_s or 0.0) for turn in turns if turn.number == 0]
    later = [1000.0 * (turn.result.ttft_s or 0.0) for turn in turns if turn.number > 0]
    return Run(
        policy=policy,
        requests=len(turns),
        cached_share=sum(r.cached_tokens for r in results) / sum(r.prompt_tokens for r in results),
        promised_share=sum(line["expected_cached_tokens"] for line in log) / sum(r.prompt_tokens for r in results),
        first_ttft_ms=statistics.fmean(first),
        later_ttft_ms=statistics.fmean(later),
        duration_s=max(r.ended_s for r in results) - min(r.sent_s for r in results),
        prediction_errors=tuple(
            line["predicted_ttft_ms"] / line["ttft_ms"] - 1.0 for line in log if line.get("ttft_ms")
        ),
    )


def figures(policy: str, runs: Sequence[Run], warm_up: int) -> Figures:
    """Sum up the runs of a policy."""
    errors = [abs(error) for run in runs for error in run.prediction_errors[warm_up:]]
    return Figures(
        policy=policy,
        runs=len(runs),
        requests=sum(run.requests for run in runs),
        prompt_tokens_cached_share=statistics.fmean(run.cached_share for run in runs),
        first_turns_ttft_mean_ms=statistics.fmean(run.first_ttft_ms for run in runs),
        later_turns_ttft_mean_ms=statistics.fmean(run.later_ttft_ms for run in runs),
        later_turns_ttft_mean_ms_by_run=tuple(round(run.later_ttft_ms, 1) for run in runs),
        prediction_median_ape=statistics.median(errors) if errors else None,
    )


async def measure(
    urls: Sequence[str], model: str, policy: str, load: ConversationLoad, passes: int, seed: int, extra: Sequence[str]
) -> Run:
    """Run the workload some times through one new gateway; see `run_of`."""
    log: list[dict[str, Any]] = []
    requests = load.sessions * load.turns * passes
    logged = asyncio.Event()

    def line(name: str, text: str) -> None:
        if text.startswith('{"event":"request"'):
            log.append(json.loads(text))
            if len(log) == requests:
                logged.set()

    turns: list[Turn] = []
    options = GatewayOptions(policy=policy, extra=tuple(extra))
    async with Stack(tuple(urls), options, echo=line) as stack, aiohttp.ClientSession() as http:
        for number in range(passes):
            turns += await converse(http, stack.url, model, load, seed + number)
        await logged.wait()
    return run_of(policy, turns, log)


async def compare(
    options: ReplicaOptions,
    replicas: int,
    policies: Sequence[str],
    load: ConversationLoad,
    rounds: int,
    passes: int,
    extra: Sequence[str] = (),
) -> dict[str, list[Run]]:
    """Start replicas and run all policies on them, `rounds` times each.

    Args:
        options: of the replicas.
        replicas: how many.
        policies: names of policies.
        load: the workload.
        rounds: runs of each policy, every one with a new gateway.
        passes: times the workload is sent in a run.
        extra: further options of `warmgate serve`.
    """
    runs: dict[str, list[Run]] = defaultdict(list)
    async with AsyncExitStack() as started:
        fleet = [VllmReplica(options) for _ in range(replicas)]
        await asyncio.gather(*(started.enter_async_context(replica) for replica in fleet))
        urls = [replica.url for replica in fleet]
        async with aiohttp.ClientSession() as http:
            # The first requests of a process are slow.
            for number, url in enumerate(urls):
                await converse(http, url, options.name, ConversationLoad(sessions=2, turns=2), 900 + number)
        for number in range(rounds):
            # There and back again: who goes first changes from round to round.
            for policy in policies if number % 2 == 0 else reversed(policies):
                seed = 1000 * (1 + len(runs[policy])) + 100_000 * list(policies).index(policy)
                run = await measure(urls, options.name, policy, load, passes, seed, extra)
                runs[policy].append(run)
                click.echo(
                    f"{policy}: cached {run.cached_share:.3f} (promised {run.promised_share:.3f}), "
                    f"TTFT first {run.first_ttft_ms:.0f} ms, later {run.later_ttft_ms:.0f} ms, {run.duration_s:.0f} s",
                    err=True,
                )
    return runs


@click.command()
@click.option("--venv", type=click.Path(exists=True, path_type=Path), required=True, help="Has vLLM; see setup.sh.")
@click.option("--model", type=click.Path(exists=True, path_type=Path), required=True, help="Model directory.")
@click.option("--policy", "policies", default="round_robin,predicted_ttft", show_default=True)
@click.option("--replicas", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each policy.")
@click.option("--passes", type=click.IntRange(min=1), default=1, show_default=True, help="Workloads in a run.")
@click.option("--sessions", type=click.IntRange(min=1), default=12, show_default=True)
@click.option("--turns", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--at-once", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--warm-up", type=click.IntRange(min=0), default=100, show_default=True, help="Unjudged predictions.")
@click.option("--config", type=click.Path(exists=True), help="gateway.yaml of the gateways.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures and runs here.")
def main(
    venv: Path,
    model: Path,
    policies: str,
    replicas: int,
    rounds: int,
    passes: int,
    sessions: int,
    turns: int,
    at_once: int,
    warm_up: int,
    config: str | None,
    json_path: Path | None,
) -> None:
    """Compare policies on conversations with system prompts of about 1,000 tokens."""
    names = [name.strip() for name in policies.split(",")]
    load = ConversationLoad(sessions=sessions, turns=turns, at_once=at_once)
    extra = ("--config", config) if config else ()
    runs = asyncio.run(compare(ReplicaOptions(venv, model), replicas, names, load, rounds, passes, extra))
    table = [figures(name, runs[name], warm_up) for name in names]
    base = table[0].later_turns_ttft_mean_ms
    for row in table:
        error = "-" if row.prediction_median_ape is None else f"{row.prediction_median_ape:.1%}"
        click.echo(
            f"{row.policy:20} cached {row.prompt_tokens_cached_share:.3f}"
            f"  TTFT first {row.first_turns_ttft_mean_ms:.0f} ms  later {row.later_turns_ttft_mean_ms:.1f} ms"
            f" ({row.later_turns_ttft_mean_ms / base:.2f} of {table[0].policy})  prediction error {error}"
        )
    if json_path is not None:
        content = {
            "figures": [asdict(row) for row in table],
            "runs": [asdict(run) for name in names for run in runs[name]],
        }
        json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
