"""Predicted time to first token on each replica, in columns by replica slot.

The engine serves prompts first come, first served in steps of a token budget (chunked prefill). What stands between a
new request and its first token is therefore:

    compute = ahead + own
    memory = steps x (KV reads of the running decodes + overhead) + rest of the step in progress
    TTFT = constant + compute factor x compute + memory factor x memory

ahead: prefill seconds of the requests before it, less the progress made (the load ledger knows).
own: compute of the uncached part of the prompt, attention to the cached part included.
steps: (tokens ahead + own tokens) / token budget, rounded up: each also decodes one token of every running stream.
rest: without prefill ahead the request arrives in the middle of a decode step. Tokens of running answers show when
steps end, so the rest is what is left of the step since the last of them; half a step when none came lately.

Factors and constant are learned per hardware class and replica (`calibration.py`). Replicas whose hardware or model is
not given share neutral constants, an 8B model on a large card, and factors that move fast. The hot loop reads constants
that are corrected already.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

from mypy_extensions import mypyc_attr

from gateway.estimator.calibration import Calibration, Deviation, PredictionErrors
from gateway.estimator.hardware import HARDWARE, hardware
from gateway.estimator.model import MODELS, model
from gateway.estimator.roofline import StepCost, kv_capacity_tokens, step_cost

DEFAULT_TOKEN_BUDGET = 8192
"""vLLM's max_num_batched_tokens for online serving on large cards."""

_STEPS_REMEMBERED = 3.0
"""Steps after a token was last seen until which its time still tells where the engine is."""

_DOUBT = 0.03
"""Deviations from the class, as logarithms, that are taken for chance."""

_ALL_AT_ONCE, _ALL_EVERY = 64, 16
"""Observations of a class from which on its other replicas are corrected only every so often."""

_ALL_EVERY_SHARE = 0.25
"""The same per replica, in large fleets: correcting all takes as long as there are many."""

_MOVED, _MOVED_S = 0.01, 0.0005
"""Changes of a factor, as a share, and of a constant that all of a large class follow."""

_JOINED_SHARE = 0.05
"""Of a time to the first token: if others may have prolonged it by more, it says nothing of the hardware."""

_ALIKE = 0.05
"""Difference of factors, as logarithms, up to which replicas are of a kind."""

NEUTRAL_COST = step_cost(HARDWARE["h100-sxm"], MODELS["llama-3.1-8b"])


@dataclass(frozen=True, slots=True)
class ReplicaClass:
    """Replicas that share constants: same hardware, model and tensor parallelism, or nothing known.

    Args:
        hardware: preset name, None if not given.
        model: model shape name, None if not given.
        tensor_parallel: degree.
        served: what tells classes of unknown hardware apart: the served model.
    """

    hardware: str | None
    model: str | None
    tensor_parallel: int = 1
    served: str = ""

    @property
    def known(self) -> bool:
        """Hardware and model are given."""
        return self.hardware is not None and self.model is not None

    def label(self) -> str:
        """Return a short name for metrics and reports."""
        if self.known:
            return f"{self.hardware}/{self.model}/tp{self.tensor_parallel}"
        return f"unknown/{self.served or 'any'}"

    def cost(self) -> StepCost:
        """Return the uncorrected step cost."""
        if self.hardware is None or self.model is None:
            return NEUTRAL_COST
        return step_cost(hardware(self.hardware), model(self.model), self.tensor_parallel)

    def kv_capacity_tokens(self) -> int | None:
        """Return the KV capacity that the memory would allow; None when unknown."""
        if self.hardware is None or self.model is None:
            return None
        return kv_capacity_tokens(hardware(self.hardware), model(self.model), self.tensor_parallel)


def _beyond_doubt(deviation: float) -> float:
    """What is left of a deviation less what chance alone would bring about: equal replicas must stay equal."""
    return max(deviation - _DOUBT, 0.0) if deviation > 0.0 else min(deviation + _DOUBT, 0.0)


class Work(NamedTuple):
    """What a prediction consists of, before correction."""

    compute_s: float
    """Prefill, of the queue and its own."""
    memory_s: float
    """Reads of weights and KV."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Predictor:
    """Per-slot constants and the predictions made from them."""

    def __init__(self, token_budget: int = DEFAULT_TOKEN_BUDGET) -> None:
        """Start without replicas.

        Args:
            token_budget: tokens of one engine step, where nothing else is said of a replica.
        """
        self.token_budget = token_budget
        self.classes: dict[ReplicaClass, Calibration] = {}
        self.errors: list[PredictionErrors] = []
        """Prediction errors by slot."""
        self.deviations: list[Deviation] = []
        """By slot, from the class."""
        self._calibrations: list[Calibration] = []
        self._costs: list[StepCost] = []
        # Costs as corrected, as tuples that the hot loop unpacks at once.
        self._constants: list[tuple[float, float, float, float, float, float, float]] = []
        self._factors: list[tuple[float, float]] = []
        """By slot: factors of compute and memory, class and deviation together."""
        self._budgets: list[int] = []
        """By slot: tokens of one engine step."""
        self._numbers: list[int] = []
        """By slot: number of its class and uncorrected constants."""
        self._known_kinds: dict[tuple[ReplicaClass, StepCost], int] = {}
        self._kinds: list[tuple[int, int, int]] = []
        self._told: dict[Calibration, tuple[float, float, float]] = {}
        """By class: factors and constant when all its replicas followed it last."""
        self.touched: set[int] = set()
        """Slots whose constants have changed; whoever follows them empties it."""

    def configure(
        self, slot: int, replica_class: ReplicaClass, cost: StepCost | None = None, token_budget: int | None = None
    ) -> None:
        """Set the class of the replica in a slot; forget what the slot's earlier replica did.

        Args:
            slot: the replica's slot.
            replica_class: what it is calibrated with.
            cost: measured constants to start from instead of those that the class implies.
            token_budget: tokens of one engine step; None for the default.
        """
        calibration = self.classes.get(replica_class)
        if calibration is None:
            calibration = self.classes[replica_class] = Calibration(known_hardware=replica_class.known)
        while len(self._costs) <= slot:
            self._costs.append(NEUTRAL_COST)
            self._constants.append((0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
            self._factors.append((1.0, 1.0))
            self._budgets.append(self.token_budget)
            self._numbers.append(0)
            self._kinds.append((0, 0, 0))
            self._calibrations.append(calibration)
            self.deviations.append(Deviation())
            self.errors.append(PredictionErrors())
        if cost is None:
            cost = replica_class.cost()
        self._costs[slot] = cost
        self._budgets[slot] = self.token_budget if token_budget is None else token_budget
        self._calibrations[slot] = calibration
        self._numbers[slot] = self._known_kinds.setdefault((replica_class, cost), len(self._known_kinds))
        self.forget(slot)

    def forget(self, slot: int) -> None:
        """The slot's replica is another one, or a new process: what is known of its class is all that is known."""
        self.deviations[slot] = Deviation()
        self.errors[slot] = PredictionErrors()
        self._correct(slot)

    def _correct(self, slot: int) -> None:
        cost, calibration, deviation = self._costs[slot], self._calibrations[slot], self.deviations[slot]
        compute = calibration.factor * exp(_beyond_doubt(deviation.compute))
        memory = calibration.memory_factor * exp(_beyond_doubt(deviation.memory))
        self._factors[slot] = (compute, memory)
        self._kinds[slot] = (self._numbers[slot], int(log(compute) // _ALIKE), int(log(memory) // _ALIKE))
        self.touched.add(slot)
        self._constants[slot] = (
            compute * cost.prefill_s_per_token,
            compute * cost.attention_s_per_pair,
            memory * cost.weights_s,
            memory * cost.kv_s_per_token,
            memory * cost.overhead_s,
            calibration.constant_s,
            compute * cost.prefill_s_per_token,
        )

    def _correct_class(self, slot: int, samples: int) -> None:
        """After an observation at a slot; the others of its class follow at once at first, and now and then later."""
        calibration = self._calibrations[slot]
        every = max(_ALL_EVERY, int(_ALL_EVERY_SHARE * len(self._calibrations)))
        due = samples % every == 0 and (every == _ALL_EVERY or self._has_moved(calibration))
        if samples < _ALL_AT_ONCE or due:
            self._told[calibration] = (calibration.factor, calibration.memory_factor, calibration.constant_s)
            for other, its in enumerate(self._calibrations):
                if its is calibration:
                    self._correct(other)
        else:
            self._correct(slot)

    def _has_moved(self, calibration: Calibration) -> bool:
        """Say whether a class has learned something since the last time that all its replicas followed."""
        factor, memory_factor, constant_s = self._told.get(calibration, (0.0, 0.0, 0.0))
        return (
            abs(calibration.factor - factor) > _MOVED * factor
            or abs(calibration.memory_factor - memory_factor) > _MOVED * memory_factor
            or abs(calibration.constant_s - constant_s) > _MOVED_S
        )

    def cost(self, slot: int) -> StepCost:
        """Return a slot's uncorrected constants."""
        return self._costs[slot]

    def budget(self, slot: int) -> int:
        """Return the tokens of one step of a slot's engine."""
        return self._budgets[slot]

    def factors(self, slot: int) -> tuple[float, float]:
        """Return what a slot's seconds of compute and of memory reads are multiplied with."""
        return self._factors[slot]

    def kind(self, slot: int) -> tuple[int, int, int]:
        """Return what replicas have in common that share uncorrected constants, and about the same factors."""
        return self._kinds[slot]

    def constants(self, slot: int) -> tuple[float, float, float, float, float, float, float]:
        """Return a slot's corrected constants.

        Returns:
            Seconds per prompt token, per pair of tokens in attention, per read of the weights, per KV token read, per
            step, per request, and of compute per decoding answer and step.
        """
        return self._constants[slot]

    def prefill_only_s(
        self, slot: int, prompt_tokens: float, cached_tokens: float, ahead_s: float, ahead_tokens: float
    ) -> float:
        """Predict the seconds until a replica that does nothing but prefill has computed a prompt.

        Args:
            slot: the replica.
            prompt_tokens: tokens of the prompt.
            cached_tokens: those it holds.
            ahead_s: corrected seconds of prefill ahead.
            ahead_tokens: tokens of prefill ahead.
        """
        _, _, weights, _, overhead, constant, _ = self._constants[slot]
        new = prompt_tokens - cached_tokens
        own_s = self.own_prefill_s(slot, prompt_tokens, cached_tokens)
        steps = int((ahead_tokens + new) / self._budgets[slot]) + 1
        # As in `fill`, without running decodes.
        return constant + max(own_s + ahead_s, steps * weights) + steps * overhead

    def own_prefill_s(self, slot: int, prompt_tokens: float, cached_tokens: float) -> float:
        """Return corrected seconds of prefill for the uncached part of a prompt."""
        return self._factors[slot][0] * self._costs[slot].prefill_compute_s(
            prompt_tokens - cached_tokens, cached_tokens
        )

    def work_s(self, slot: int, prefill_s: float) -> Work:
        """Return what a prediction of `prefill_only_s` consists of, to be given back to `observe`."""
        return self.work(slot, max(prefill_s - self._constants[slot][5], 0.0), prefill_s)

    def fill(
        self,
        slots: Iterable[int],
        now_s: float,
        prompt_tokens: float,
        matched_tokens: Sequence[float],
        ahead_s: Sequence[float],
        ahead_tokens: Sequence[float],
        decodes: Sequence[int],
        context_tokens: Sequence[float],
        context_shift_tokens: Sequence[float],
        step_seen_s: Sequence[float],
        own_prefill_s: list[float],
        predicted_ttft_s: list[float],
        decode_delay_s: list[float],
        decode_step_s: list[float],
        batch_cost_s: list[float],
        kv_tokens: Sequence[float],
    ) -> None:
        """Fill the per-request columns for the candidate slots.

        Args:
            slots: candidates.
            now_s: monotonic seconds.
            prompt_tokens: tokens of the prompt.
            matched_tokens: by slot, prompt tokens the replica holds.
            ahead_s: by slot, corrected seconds of prefill ahead.
            ahead_tokens: by slot, tokens of prefill ahead.
            decodes: by slot, running decodes.
            context_tokens: by slot, tokens of history that a decode step reads.
            context_shift_tokens: by slot, to be added to these.
            step_seen_s: by slot, when a step was last seen to end.
            own_prefill_s: by slot, written: corrected seconds of own prefill.
            predicted_ttft_s: by slot, written: predicted seconds to the first token.
            decode_delay_s: by slot, written: seconds of delay put on running decodes, summed over them.
            decode_step_s: by slot, written: seconds of one decode step with the decodes that run now.
            batch_cost_s: by slot, written: the same once all that is in flight decodes, and this request with it, times
                its ratio to the step of an idle replica.
            kv_tokens: by slot, prompt and expected output tokens of all in flight.
        """
        constants, budgets = self._constants, self._budgets
        for slot in slots:
            per_token, per_pair, weights, per_kv, overhead, constant, decode = constants[slot]
            cached = matched_tokens[slot]
            new = prompt_tokens - cached
            own = new * (per_token + (cached + new * 0.5) * per_pair)
            compute = ahead_s[slot] + own
            running = decodes[slot]
            tokens, budget = ahead_tokens[slot] + new, budgets[slot]
            idle = weights + overhead
            if running:
                shared = overhead + (context_tokens[slot] + context_shift_tokens[slot]) * per_kv
                decoding = running * decode
                step = shared + (weights if weights > decoding else decoding)
                memory = shared
            else:
                step, memory, decoding = idle, overhead, 0.0
            floor = weights
            if tokens >= budget:
                steps = int(tokens / budget) + 1
                floor *= steps
                memory *= steps
                decoding *= steps
            if running:
                if compute == own:
                    # In which part of a step the request arrives shows in when the last token came.
                    passed = (now_s - step_seen_s[slot]) / step
                    memory += step * (1.0 - passed % 1.0 if passed < _STEPS_REMEMBERED else 0.5)
                compute += decoding
                decode_delay_s[slot] = running * own
            else:
                decode_delay_s[slot] = 0.0
            decode_step_s[slot] = step
            full = idle + (kv_tokens[slot] + prompt_tokens) * per_kv
            batch_cost_s[slot] = full * full / idle if idle else full
            # If there is so little to compute, reading the weights takes longer.
            predicted_ttft_s[slot] = constant + memory + (compute if compute > floor else floor)
            own_prefill_s[slot] = own

    def uncorrected_step_s(self, slot: int, decodes: int, context_tokens: float) -> float:
        """Return predicted seconds of one decode step of a slot, before the memory factor.

        Args:
            slot: the replica.
            decodes: answers that run.
            context_tokens: tokens of history that the step reads.
        """
        return self._costs[slot].decode_step_s(decodes, context_tokens)

    def memory_factor(self, slot: int) -> float:
        """Return observed seconds per predicted second of a decode step of a slot."""
        return self._factors[slot][1]

    def excess_s(self, slot: int, own_prefill_s: float) -> float:
        """Return by how many seconds a prompt's prefill prolongs the step that it shares with decodes."""
        return max(own_prefill_s - self._constants[slot][2], 0.0)

    def work(self, slot: int, compute_s: float, ttft_s: float) -> Work:
        """Return what a prediction consists of, to be given back to `observe`.

        Args:
            slot: the replica.
            compute_s: of the prediction, corrected prefill seconds: of the queue and its own.
            ttft_s: the prediction, without waiting for KV memory.
        """
        compute, memory = self._factors[slot]
        rest_s = ttft_s - self._constants[slot][5] - compute_s
        return Work(compute_s / compute, rest_s / memory if rest_s > 0.0 else 0.0)

    def observe(
        self, slot: int, work: Work | None, predicted_s: float, observed_s: float, joined_s: float = 0.0
    ) -> None:
        """Learn from the first token of a request that was neither retried nor aborted.

        Args:
            slot: the replica.
            work: of the prediction (`work`); None if it says nothing of the hardware.
            predicted_s: the prediction itself.
            observed_s: seconds from selection to the first token.
            joined_s: predicted prefill seconds of requests that were sent there after it and before its first token.
                A step takes tokens of several prompts, as many as its budget, and all its first tokens come when it
                ends; so up to a step of that may be in the time observed, and nobody could have known.
        """
        calibration = self._calibrations[slot]
        self.errors[slot].add(predicted_s, observed_s)
        calibration.errors.add(predicted_s, observed_s)
        if work is None:
            return
        if min(joined_s, self._budgets[slot] * self._constants[slot][0]) > _JOINED_SHARE * observed_s:
            return
        compute, _ = self._factors[slot]
        share = min(compute * work.compute_s / max(predicted_s, 1e-9), 1.0)
        self.deviations[slot].observe(predicted_s, observed_s, share)
        calibration.observe(work.compute_s, observed_s, work.memory_s)
        self._correct_class(slot, calibration.samples)

    def observe_steps(self, slot: int, factor: float) -> None:
        """Learn from an answer that has ended.

        Args:
            slot: the replica.
            factor: observed over predicted seconds of its decode steps, before the memory factor.
        """
        if not 1e-3 < factor < 1e3:
            return
        calibration = self._calibrations[slot]
        self.deviations[slot].observe_steps(factor / self._factors[slot][1])
        calibration.observe_steps(factor)
        self._correct_class(slot, calibration.answers)
