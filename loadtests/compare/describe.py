"""A scenario in words."""

from dataclasses import fields

from loadtests.compare.scenario import TRACE, Scenario
from loadtests.replay.options import FleetOptions


def describe(scenario: Scenario) -> str:
    """One line: workload, rate, fleet, and what goes wrong; enough to write the command of a replay."""
    what = "The conversation trace" if scenario.workload == TRACE else f"Workload {scenario.workload}"
    if scenario.params:
        what += f" ({', '.join(scenario.params)})"
    sentences = [f"{what} at {scenario.speed:g} x its rate on {_fleet(scenario.fleet)}."]
    if scenario.peers_assume is not None:
        sentences.append(f"Peers have the constants of {scenario.peers_assume} for all replicas.")
    if scenario.scrape_interval_s != 1.0:
        sentences.append(f"Metrics are read every {scenario.scrape_interval_s:g} s.")
    if scenario.kv_events:
        sentences.append(f"KV events, of which {100.0 * scenario.kv_events_lost:g} % are lost.")
    for word in scenario.restarts:
        slot, _, at_s = word.partition("@")
        sentences.append(f"Replica {slot} is restarted at {at_s} s.")
    if scenario.infinite_cache:
        sentences.append("Caches never evict, blocks of 512 tokens, requests one after the other.")
    return " ".join(sentences)


def _fleet(options: FleetOptions) -> str:
    default = FleetOptions()
    said = [
        f"{field.name.replace('_', ' ')} {value}"
        for field in fields(options)
        if (value := getattr(options, field.name)) != getattr(default, field.name)
    ]
    return ", ".join(said) if said else "eight H100 with Llama-3.1-8B"
