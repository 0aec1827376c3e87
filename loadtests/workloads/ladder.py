"""The b2b-saas ladder: customers with long system prompts of their own, at rates that rise step by step.

Both settings are those of llm-d's published benchmarks of precise prefix-cache aware routing, made with the
`shared_prefix` data and the Poisson load of inference-perf: llm-d/llm-d-kv-cache-manager, benchmarking/ (73 % and 37 %
of the cluster's KV memory), and the article "KV-Cache Wins You Can See". As in inference-perf, all prompts (a group's
system prompt and one of its questions) are made in advance and shuffled, and every stage goes through them in the same
order, from the first, again and again: after the warm-up, each prompt has been seen.
"""

from dataclasses import dataclass
from random import Random

from loadtests.workloads.draws import Contents, poisson_arrivals_s
from loadtests.workloads.prompt import Part, Prompt
from loadtests.workloads.types import Load, Session, Stage, Turn

STEPS_73 = "15x50 3x20 10x20 15x20 20x38 22x34 25x30 30x25 35x21 40x38 43x36 46x33 49x30 52x29 55x27 57x26 60x25"
STEPS_37 = "10x25 3x210 4x180 5x120 6x120 8x90 10x70 12x60 15x50 20x50"


@dataclass(frozen=True, slots=True)
class Ladder:
    """Groups of prompts with a common system prompt, at rising rates; the defaults are the 73 % setting.

    Args:
        groups: distinct system prompts.
        prompts_per_group: questions for each.
        system_tokens: length of a system prompt.
        question_tokens: length of a question.
        output_tokens: length of every answer.
        steps: `rate`x`seconds` of each stage.
        warm_up_steps: stages at the beginning that are not measured.
    """

    groups: int = 150
    prompts_per_group: int = 5
    system_tokens: int = 6000
    question_tokens: int = 1200
    output_tokens: int = 1000
    steps: str = STEPS_73
    warm_up_steps: int = 1

    def load(self, seed: int) -> Load:
        """Draw the load.

        Raises:
            ValueError: `steps` is malformed.
        """
        rng = Random(seed)
        contents = Contents(seed)
        prompts = []
        for _ in range(self.groups):
            system = Prompt([Part(contents.new(), self.system_tokens, "system")])
            for _ in range(self.prompts_per_group):
                prompts.append(system.extended(Part(contents.new(), self.question_tokens)))
        rng.shuffle(prompts)
        stages = []
        for number, (rate_per_s, duration_s) in enumerate(_read_steps(self.steps)):
            count = round(rate_per_s * duration_s)
            sessions = [
                Session(arrival_s, (Turn(prompts[index % len(prompts)], self.output_tokens, contents.new()),))
                for index, arrival_s in enumerate(poisson_arrivals_s(rng, rate_per_s, count))
            ]
            warm_up = number < self.warm_up_steps
            name = f"{rate_per_s:g}/s" + (" warm-up" if warm_up else "")
            stages.append(Stage(name, sessions, duration_s, warm_up, rate_per_s))
        return Load("ladder", stages)


def _read_steps(text: str) -> list[tuple[float, float]]:
    steps = []
    for word in text.split():
        rate, _, duration = word.partition("x")
        try:
            steps.append((float(rate), float(duration)))
        except ValueError:
            raise ValueError(f"steps are like 15x50 (rate, seconds), separated by spaces; got {word!r}") from None
    if not steps:
        raise ValueError("a ladder needs at least one step")
    return steps
