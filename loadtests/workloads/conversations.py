"""Closed-loop traffic: people who chat, agents that call tools, readers with questions about a document."""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from loadtests.workloads.draws import Contents, Popularity, geometric, lognormal, poisson_arrivals_s, tokens
from loadtests.workloads.prompt import Part, Prompt
from loadtests.workloads.types import Load, Session, Stage, Turn


def growing_turns(opening: Prompt, steps: Iterable[tuple[Part, int, int, float]]) -> tuple[Turn, ...]:
    """Turns of one conversation: each prompt is the one before, its answer, and something new.

    Args:
        opening: what stands before the first turn's own part.
        steps: (new part, tokens of the answer, content of the answer, think seconds) of each turn.
    """
    turns = []
    context = opening
    for part, output_tokens, answer, think_s in steps:
        prompt = context.extended(part)
        turns.append(Turn(prompt, output_tokens, answer, think_s))
        context = prompt.extended(Part(answer, output_tokens, "assistant"))
    return tuple(turns)


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversations of people with a chat service: short messages, a history that grows, pauses to read and write.

    Args:
        sessions: conversations.
        rate_per_s: conversations that begin per second (Poisson).
        turns: mean number of turns (geometric).
        most_turns: no conversation is longer.
        system_prompts: distinct system prompts.
        system_tokens: length of each.
        message_tokens: mean length of a user's message.
        output_tokens: mean length of an answer.
        variation: standard deviation over mean of messages and answers.
        think_s: mean seconds from an answer's end to the next message.
        least_think_s: nobody is faster.
    """

    sessions: int = 1000
    rate_per_s: float = 12.0
    turns: float = 8.0
    most_turns: int = 40
    system_prompts: int = 12
    system_tokens: int = 1000
    message_tokens: int = 200
    output_tokens: int = 350
    variation: float = 0.8
    think_s: float = 10.0
    least_think_s: float = 1.0

    def load(self, seed: int) -> Load:
        """Draw the load."""
        rng = Random(seed)
        contents = Contents(seed)
        openings = [Prompt([Part(contents.new(), self.system_tokens, "system")]) for _ in range(self.system_prompts)]
        sessions = []
        for number, arrival_s in enumerate(poisson_arrivals_s(rng, self.rate_per_s, self.sessions)):
            opening = rng.choice(openings)
            steps = [
                (
                    Part(contents.new(), tokens(rng, self.message_tokens, self.variation)),
                    tokens(rng, self.output_tokens, self.variation),
                    contents.new(),
                    max(lognormal(rng, self.think_s, 1.0), self.least_think_s),
                )
                for _ in range(geometric(rng, self.turns, self.most_turns))
            ]
            sessions.append(Session(arrival_s, growing_turns(opening, steps), f"chat-{number}"))
        return Load("chat", (Stage("all", sessions),))


@dataclass(frozen=True, slots=True)
class AgentLoops:
    """Agents that work on tasks: a long prompt with tool definitions, then call after call, each result appended.

    Contexts grow to tens of thousands of tokens and come back within seconds: nearly all of every prompt is cached on
    the replica of the call before, and on no other.

    Args:
        sessions: tasks.
        rate_per_s: tasks that begin per second (Poisson).
        calls: mean number of calls to the model per task (geometric).
        most_calls: no task takes more.
        kinds: distinct agents, each with its own system prompt and tools.
        system_tokens: length of that.
        task_tokens: mean length of a task.
        result_tokens: mean length of a tool's result.
        result_variation: standard deviation over mean of it; a few results are very long.
        output_tokens: mean length of a call.
        tool_s: mean seconds a tool takes.
        least_tool_s: no tool is faster.
        most_context_tokens: a task ends before its context grows beyond.
    """

    sessions: int = 260
    rate_per_s: float = 0.6
    calls: float = 20.0
    most_calls: int = 80
    kinds: int = 4
    system_tokens: int = 6000
    task_tokens: int = 800
    result_tokens: int = 1200
    result_variation: float = 1.5
    output_tokens: int = 150
    tool_s: float = 2.0
    least_tool_s: float = 0.05
    most_context_tokens: int = 120_000

    def load(self, seed: int) -> Load:
        """Draw the load."""
        rng = Random(seed)
        contents = Contents(seed)
        openings = [Prompt([Part(contents.new(), self.system_tokens, "system")]) for _ in range(self.kinds)]
        sessions = []
        for number, arrival_s in enumerate(poisson_arrivals_s(rng, self.rate_per_s, self.sessions)):
            opening = rng.choice(openings)
            part = Part(contents.new(), tokens(rng, self.task_tokens, 0.8))
            steps: list[tuple[Part, int, int, float]] = []
            context = opening.tokens
            for _ in range(geometric(rng, self.calls, self.most_calls)):
                output_tokens = tokens(rng, self.output_tokens, 0.8)
                context += part.tokens + output_tokens
                if context > self.most_context_tokens:
                    break
                think_s = max(lognormal(rng, self.tool_s, 1.5), self.least_tool_s)
                steps.append((part, output_tokens, contents.new(), think_s))
                part = Part(contents.new(), tokens(rng, self.result_tokens, self.result_variation), "tool")
            sessions.append(Session(arrival_s, growing_turns(opening, steps), f"agent-{number}"))
        return Load("agent-loops", (Stage("all", sessions),))


@dataclass(frozen=True, slots=True)
class DocumentQuestions:
    """Readers who ask several questions about one long document; popular documents have several readers.

    Args:
        sessions: readers.
        rate_per_s: readers that begin per second (Poisson).
        documents: distinct documents.
        zipf: exponent of their popularity; 0 for equal.
        document_tokens: mean length of a document.
        variation: standard deviation over mean of it.
        most_document_tokens: no document is longer.
        questions: mean number of questions per reader (geometric).
        question_tokens: mean length of a question.
        output_tokens: mean length of an answer.
        think_s: mean seconds from an answer's end to the next question.
        least_think_s: nobody is faster.
    """

    sessions: int = 600
    rate_per_s: float = 2.0
    documents: int = 300
    zipf: float = 0.8
    document_tokens: int = 24_000
    variation: float = 0.6
    most_document_tokens: int = 120_000
    questions: float = 5.0
    question_tokens: int = 60
    output_tokens: int = 200
    think_s: float = 15.0
    least_think_s: float = 2.0

    def load(self, seed: int) -> Load:
        """Draw the load."""
        rng = Random(seed)
        contents = Contents(seed)
        popularity = Popularity(self.documents, self.zipf)
        documents = [
            Prompt(
                [
                    Part(
                        contents.new(),
                        tokens(rng, self.document_tokens, self.variation, self.most_document_tokens),
                        "system",
                    )
                ]
            )
            for _ in range(self.documents)
        ]
        sessions = []
        for number, arrival_s in enumerate(poisson_arrivals_s(rng, self.rate_per_s, self.sessions)):
            opening = documents[popularity.draw(rng)]
            steps = [
                (
                    Part(contents.new(), tokens(rng, self.question_tokens, 0.6)),
                    tokens(rng, self.output_tokens, 0.6),
                    contents.new(),
                    max(lognormal(rng, self.think_s, 1.0), self.least_think_s),
                )
                for _ in range(geometric(rng, self.questions, 20))
            ]
            sessions.append(Session(arrival_s, growing_turns(opening, steps), f"reader-{number}"))
        return Load("document-questions", (Stage("all", sessions),))
