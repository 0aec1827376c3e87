"""What the generators promise: exact numbers of the published benchmarks, growth, shares, equal seeds."""

import dataclasses
from collections import Counter

import pytest

from loadtests.workloads.catalog import WORKLOADS, load_named, with_params
from loadtests.workloads.conversations import AgentLoops
from loadtests.workloads.ladder import Ladder
from loadtests.workloads.prefixes import Bursts, MixedLengths, NoReuse, ViralPrefix
from loadtests.workloads.types import Load, Session, Turn

SMALL = {
    "b2b-saas": ["steps=15x5 3x5", "groups=4"],
    "b2b-saas-37": ["steps=10x5 3x5"],
    "shared-prefixes": ["requests=60"],
    "chat": ["sessions=20"],
    "agent-loops": ["sessions=10"],
    "document-questions": ["sessions=10"],
    "no-reuse": ["requests=60"],
    "viral-prefix": ["requests=60"],
    "mixed-lengths": ["requests=60"],
    "bursts": ["requests=600"],
}


def sessions(load: Load) -> list[Session]:
    return [session for stage in load.stages for session in stage.sessions]


def turns(load: Load) -> list[Turn]:
    return [turn for session in sessions(load) for turn in session.turns]


def drawn(load: Load) -> list[object]:
    """All numbers of a load, in a form that compares."""
    return [
        (stage.name, session.arrival_s, session.key, turn.prompt.parts, turn.output_tokens, turn.answer, turn.think_s)
        for stage in load.stages
        for session in stage.sessions
        for turn in session.turns
    ]


def test_every_workload_is_tried_here() -> None:
    assert SMALL.keys() == WORKLOADS.keys()


@pytest.mark.parametrize("name", SMALL)
def test_a_load_is_well_formed_and_depends_on_nothing_but_its_seed(name: str) -> None:
    load = load_named(name, SMALL[name], 3)
    assert load.name == name
    assert drawn(load) == drawn(load_named(name, SMALL[name], 3))
    assert drawn(load) != drawn(load_named(name, SMALL[name], 4))
    for stage in load.stages:
        arrivals = [session.arrival_s for session in stage.sessions]
        assert arrivals == sorted(arrivals)
        assert arrivals[0] >= 0
    assert all(session.turns for session in sessions(load))
    assert all(turn.output_tokens >= 1 for turn in turns(load))
    answers = [turn.answer for turn in turns(load)]
    assert len(set(answers)) == len(answers)


@pytest.mark.parametrize("name", ["chat", "agent-loops", "document-questions"])
def test_conversations_grow_by_answer_and_message(name: str) -> None:
    load = load_named(name, SMALL[name], 1)
    assert any(len(session.turns) > 1 for session in sessions(load))
    for session in sessions(load):
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            kept = len(before.prompt.parts)
            assert after.prompt.parts[:kept] == before.prompt.parts
            answer, message = after.prompt.parts[kept:]
            assert (answer.content, answer.tokens, answer.role) == (before.answer, before.output_tokens, "assistant")
            assert message.role in ("user", "tool")
            assert after.think_s > 0


def test_the_ladder_at_73_percent() -> None:
    load = load_named("b2b-saas", (), 0)
    assert load.requests == 17_084
    assert len(load.stages) == 17
    assert [stage.warm_up for stage in load.stages] == [True] + [False] * 16
    assert load.stages[0].duration_s == 50
    assert [stage.rate_per_s for stage in load.stages][-3:] == [55, 57, 60]
    prompts = {turn.prompt.name: turn.prompt for turn in turns(load)}
    assert len(prompts) == 750
    assert all(prompt.tokens == 7200 for prompt in prompts.values())
    assert {turn.output_tokens for turn in turns(load)} == {1000}
    systems = {prompt.parts[0].content for prompt in prompts.values()}
    assert len(systems) == 150
    # What gave the setting its name: distinct tokens over the KV memory of eight pods.
    distinct_tokens = sum(prompt.tokens for prompt in prompts.values()) - 6000 * (750 - 150)
    assert distinct_tokens / (8 * 307_328) == pytest.approx(0.73, abs=0.005)
    # The warm-up asks every prompt once.
    assert Counter(session.turns[0].prompt.name for session in load.stages[0].sessions) == Counter(prompts.keys())


def test_the_ladder_at_37_percent() -> None:
    load = load_named("b2b-saas-37", (), 0)
    assert load.requests == 250 + 630 + 720 + 600 + 720 + 720 + 700 + 720 + 750 + 1000
    prompts = {turn.prompt.name: turn.prompt.tokens for turn in turns(load)}
    assert len(prompts) == 249
    assert set(prompts.values()) == {9000}


def test_the_ladders_rates_are_those_asked_for() -> None:
    stage = load_named("b2b-saas", (), 0).stages[-1]
    assert len(stage.sessions) == 1500
    # 1,500 exponential gaps: the sum is within 10 % with a probability of 0.9999.
    assert stage.sessions[-1].arrival_s == pytest.approx(25, rel=0.1)


def test_no_reuse_shares_nothing() -> None:
    load = NoReuse(requests=200).load(0)
    assert len({turn.prompt.parts[0].content for turn in turns(load)}) == 200


def test_one_prefix_goes_viral() -> None:
    load = ViralPrefix(requests=2000).load(0)
    counts = Counter(turn.prompt.parts[0].content for turn in turns(load))
    (_, most), (_, second) = counts.most_common(2)
    assert most / 2000 == pytest.approx(0.95, abs=0.02)
    assert second == 1


def test_long_prompts_among_short_ones() -> None:
    load = MixedLengths(requests=3000, long_share=0.02).load(0)
    long = [turn for turn in turns(load) if turn.prompt.tokens > 100_000]
    assert len(long) / 3000 == pytest.approx(0.02, abs=0.01)


def test_bursts_come_at_once() -> None:
    load = Bursts(requests=1000, quiet_rate_per_s=2.0, every_s=10.0, burst_requests=100, burst_s=0.5).load(0)
    in_bursts = sum(session.arrival_s >= 10 and session.arrival_s % 10 <= 0.5 for session in sessions(load))
    assert 0.8 < in_bursts / 1000 < 0.9


def test_agents_end_before_their_context_does() -> None:
    load = AgentLoops(sessions=30, most_context_tokens=20_000, calls=60.0).load(0)
    assert max(turn.prompt.tokens + turn.output_tokens for turn in turns(load)) <= 20_000


def test_parameters_by_name() -> None:
    changed = with_params(Ladder(), ["groups=7", "steps=1x2 3x4"])
    assert changed == dataclasses.replace(Ladder(), groups=7, steps="1x2 3x4")
    with pytest.raises(ValueError, match="groups must be of type int"):
        with_params(Ladder(), ["groups=many"])
    with pytest.raises(ValueError, match="prompts_per_group"):
        with_params(Ladder(), ["colour=red"])
    with pytest.raises(ValueError, match="15x50"):
        with_params(Ladder(), ["steps=fast"]).load(0)


def test_neither_file_nor_workload() -> None:
    with pytest.raises(ValueError, match="document-questions"):
        load_named("no-such-thing", (), 0)


def test_the_first_requests_of_a_load() -> None:
    load = load_named("b2b-saas", (), 0).first(800)
    assert [len(stage.sessions) for stage in load.stages] == [750, 50]
    chat = load_named("chat", ["sessions=50"], 0).first(10)
    assert 10 <= chat.requests < 10 + 40
    assert sessions(chat)[0].arrival_s > 0
