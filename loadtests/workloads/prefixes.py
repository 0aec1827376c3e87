"""Open-loop traffic whose prompts share beginnings to various degrees."""

from dataclasses import dataclass
from random import Random

from loadtests.workloads.draws import Contents, Popularity, poisson_arrivals_s, tokens
from loadtests.workloads.prompt import Part, Prompt
from loadtests.workloads.types import Load, Session, Stage, Turn


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Applications that each put their own long prompt before a short question, some far more popular than others.

    With the defaults all prefixes together fill half of eight 80 GB cards' KV memory for an 8B model, and four times
    that of one: a fleet that spreads every prefix everywhere holds none.

    Args:
        requests: how many.
        rate_per_s: Poisson arrivals per second.
        groups: distinct prefixes.
        zipf: exponent of their popularity; 0 for equal.
        prefix_tokens: length of a prefix.
        question_tokens: mean length of a question.
        output_tokens: mean length of an answer.
        variation: standard deviation over mean of questions and answers.
    """

    requests: int = 6000
    rate_per_s: float = 60.0
    groups: int = 400
    zipf: float = 0.8
    prefix_tokens: int = 4000
    question_tokens: int = 400
    output_tokens: int = 250
    variation: float = 0.6

    def load(self, seed: int) -> Load:
        """Draw the load."""
        rng = Random(seed)
        contents = Contents(seed)
        popularity = Popularity(self.groups, self.zipf)
        prefixes = [Prompt([Part(contents.new(), self.prefix_tokens, "system")]) for _ in range(self.groups)]
        sessions = []
        for arrival_s in poisson_arrivals_s(rng, self.rate_per_s, self.requests):
            question = Part(contents.new(), tokens(rng, self.question_tokens, self.variation))
            turn = Turn(
                prefixes[popularity.draw(rng)].extended(question),
                tokens(rng, self.output_tokens, self.variation),
                contents.new(),
            )
            sessions.append(Session(arrival_s, (turn,)))
        return Load("shared-prefixes", (Stage("all", sessions),))


@dataclass(frozen=True, slots=True)
class NoReuse:
    """Prompts that share nothing: whatever a policy does for caches is wasted, and only balance counts.

    Args:
        requests: how many.
        rate_per_s: Poisson arrivals per second.
        prompt_tokens: mean length of a prompt.
        output_tokens: mean length of an answer.
        variation: standard deviation over mean of both.
        most_prompt_tokens: no prompt is longer.
    """

    requests: int = 5000
    rate_per_s: float = 40.0
    prompt_tokens: int = 3000
    output_tokens: int = 300
    variation: float = 1.0
    most_prompt_tokens: int = 32_000

    def load(self, seed: int) -> Load:
        """Draw the load."""
        rng = Random(seed)
        contents = Contents(seed)
        sessions = []
        for arrival_s in poisson_arrivals_s(rng, self.rate_per_s, self.requests):
            length = tokens(rng, self.prompt_tokens, self.variation, self.most_prompt_tokens)
            prompt = Prompt([Part(contents.new(), length)])
            turn = Turn(prompt, tokens(rng, self.output_tokens, self.variation), contents.new())
            sessions.append(Session(arrival_s, (turn,)))
        return Load("no-reuse", (Stage("all", sessions),))


@dataclass(frozen=True, slots=True)
class ViralPrefix:
    """One prefix in nearly all requests: a policy that follows the prefix alone sends everything to one replica.

    Args:
        requests: how many.
        rate_per_s: Poisson arrivals per second.
        viral_share: requests that begin with the one prefix.
        prefix_tokens: its length; the other requests begin with a prefix of that length of their own.
        question_tokens: mean length of a question.
        output_tokens: mean length of an answer.
        variation: standard deviation over mean of questions and answers.
    """

    requests: int = 5000
    rate_per_s: float = 50.0
    viral_share: float = 0.95
    prefix_tokens: int = 8000
    question_tokens: int = 300
    output_tokens: int = 250
    variation: float = 0.6

    def load(self, seed: int) -> Load:
        """Draw the load."""
        rng = Random(seed)
        contents = Contents(seed)
        viral = Prompt([Part(contents.new(), self.prefix_tokens, "system")])
        sessions = []
        for arrival_s in poisson_arrivals_s(rng, self.rate_per_s, self.requests):
            prefix, request_class = viral, "viral"
            if rng.random() >= self.viral_share:
                prefix, request_class = Prompt([Part(contents.new(), self.prefix_tokens, "system")]), "other"
            question = Part(contents.new(), tokens(rng, self.question_tokens, self.variation))
            turn = Turn(
                prefix.extended(question),
                tokens(rng, self.output_tokens, self.variation),
                contents.new(),
                request_class=request_class,
            )
            sessions.append(Session(arrival_s, (turn,)))
        return Load("viral-prefix", (Stage("all", sessions),))


@dataclass(frozen=True, slots=True)
class Bursts:
    """Quiet traffic, and every few seconds many requests at once: scheduled jobs, retries after an outage.

    All of a burst must be placed before the first answer: what a policy knows then is what it has counted itself.

    Args:
        requests: how many.
        quiet_rate_per_s: Poisson arrivals per second between bursts.
        every_s: seconds from burst to burst.
        burst_requests: requests of a burst.
        burst_s: seconds over which they arrive.
        groups: distinct prefixes; each burst is of few of them.
        groups_per_burst: how many.
        prefix_tokens: length of a prefix.
        question_tokens: mean length of a question.
        output_tokens: mean length of an answer.
        variation: standard deviation over mean of questions and answers.
    """

    requests: int = 6000
    quiet_rate_per_s: float = 20.0
    every_s: float = 10.0
    burst_requests: int = 250
    burst_s: float = 0.5
    groups: int = 200
    groups_per_burst: int = 5
    prefix_tokens: int = 2000
    question_tokens: int = 800
    output_tokens: int = 200
    variation: float = 0.6

    def load(self, seed: int) -> Load:
        """Draw the load."""
        rng = Random(seed)
        contents = Contents(seed)
        prefixes = [Prompt([Part(contents.new(), self.prefix_tokens, "system")]) for _ in range(self.groups)]
        arrivals: list[tuple[float, int, str]] = []
        start_s = 0.0
        while len(arrivals) < self.requests:
            quiet_s = poisson_arrivals_s(rng, self.quiet_rate_per_s, round(2 * self.quiet_rate_per_s * self.every_s))
            arrivals += [
                (start_s + at_s, rng.randrange(self.groups), "quiet") for at_s in quiet_s if at_s < self.every_s
            ]
            start_s += self.every_s
            hot = rng.sample(range(self.groups), self.groups_per_burst)
            arrivals += [
                (start_s + rng.random() * self.burst_s, rng.choice(hot), "burst") for _ in range(self.burst_requests)
            ]
        arrivals.sort()
        sessions = []
        for arrival_s, group, request_class in arrivals[: self.requests]:
            question = Part(contents.new(), tokens(rng, self.question_tokens, self.variation))
            turn = Turn(
                prefixes[group].extended(question),
                tokens(rng, self.output_tokens, self.variation),
                contents.new(),
                request_class=request_class,
            )
            sessions.append(Session(arrival_s, (turn,)))
        return Load("bursts", (Stage("all", sessions),))


@dataclass(frozen=True, slots=True)
class MixedLengths:
    """Short chat requests, and now and then a prompt of 100,000 tokens that keeps a replica busy for seconds.

    Requests in flight say nothing about the work ahead here: the ninth short request is better placed behind eight
    others than behind one long one.

    Args:
        requests: how many.
        rate_per_s: Poisson arrivals per second.
        long_share: requests with a long prompt.
        long_tokens: its length.
        system_tokens: what all prompts begin with; 0 for nothing.
        prompt_tokens: mean length of the other prompts.
        output_tokens: mean length of an answer.
        variation: standard deviation over mean of short prompts and answers.
    """

    requests: int = 6000
    rate_per_s: float = 40.0
    long_share: float = 0.01
    long_tokens: int = 100_000
    system_tokens: int = 400
    prompt_tokens: int = 1200
    output_tokens: int = 250
    variation: float = 0.8

    def load(self, seed: int) -> Load:
        """Draw the load."""
        rng = Random(seed)
        contents = Contents(seed)
        system = Prompt([Part(contents.new(), self.system_tokens, "system")] if self.system_tokens else [])
        sessions = []
        for arrival_s in poisson_arrivals_s(rng, self.rate_per_s, self.requests):
            if rng.random() < self.long_share:
                length, request_class = self.long_tokens, "long"
            else:
                length, request_class = tokens(rng, self.prompt_tokens, self.variation, self.long_tokens), "chat"
            turn = Turn(
                system.extended(Part(contents.new(), length)),
                tokens(rng, self.output_tokens, self.variation),
                contents.new(),
                request_class=request_class,
            )
            sessions.append(Session(arrival_s, (turn,)))
        return Load("mixed-lengths", (Stage("all", sessions),))
