"""Predicted time to first token on each replica, in columns by replica slot.

The engine serves prompts first come, first served in steps of a token budget (chunked prefill). What stands between a
new request and its first token is therefore:

    work = ahead + own + steps x (KV reads of the running decodes + overhead) + rest of the step in progress
    TTFT = constant + factor x work

ahead: prefill seconds of the requests before it, less the progress made (the load ledger knows).
own: compute of the uncached part of the prompt, attention to the cached part included.
steps: (tokens ahead + own tokens) / token budget, rounded up: each also decodes one token of every running stream.
rest: without prefill ahead the request arrives in the middle of a decode step. Tokens of running answers show when
steps end, so the rest is what is left of the step since the last of them; half a step when none came lately.

Factor and constant are learned per hardware class (`calibration.py`). Replicas whose hardware or model is not given
share neutral constants, an 8B model on a large card, and a factor that moves fast.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.estimator.calibration import Calibration, PredictionErrors
from gateway.estimator.hardware import HARDWARE, hardware
from gateway.estimator.model import MODELS, model
from gateway.estimator.roofline import StepCost, kv_capacity_tokens, step_cost

DEFAULT_TOKEN_BUDGET = 8192
"""vLLM's max_num_batched_tokens for online serving on large cards."""

_STEPS_REMEMBERED = 3.0
"""Steps after a token was last seen until which its time still tells where the engine is."""

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


class Predictor:
    """Per-slot constants and the predictions made from them."""

    def __init__(self, token_budget: int = DEFAULT_TOKEN_BUDGET) -> None:
        """Start without replicas.

        Args:
            token_budget: tokens of one engine step.
        """
        self.token_budget = token_budget
        self.classes: dict[ReplicaClass, Calibration] = {}
        self.errors: list[PredictionErrors] = []
        """Prediction errors by slot."""
        self._calibrations: list[Calibration] = []
        self._costs: list[StepCost] = []
        # The costs and calibrations again, as tuples that the hot loop unpacks at once.
        self._constants: list[tuple[float, float, float, float, float, Calibration]] = []

    def configure(self, slot: int, replica_class: ReplicaClass, cost: StepCost | None = None) -> None:
        """Set the class of the replica in a slot; forget what the slot's earlier replica did.

        Args:
            slot: the replica's slot.
            replica_class: what it is calibrated with.
            cost: measured constants to start from instead of those that the class implies.
        """
        calibration = self.classes.get(replica_class)
        if calibration is None:
            calibration = self.classes[replica_class] = Calibration(known_hardware=replica_class.known)
        while len(self._costs) <= slot:
            self._costs.append(NEUTRAL_COST)
            self._constants.append((0.0, 0.0, 0.0, 0.0, 0.0, calibration))
            self._calibrations.append(calibration)
            self.errors.append(PredictionErrors())
        if cost is None:
            cost = replica_class.cost()
        self._costs[slot] = cost
        self._constants[slot] = (
            cost.prefill_s_per_token,
            cost.attention_s_per_pair,
            cost.weights_s,
            cost.kv_s_per_token,
            cost.overhead_s,
            calibration,
        )
        self._calibrations[slot] = calibration
        self.errors[slot] = PredictionErrors()

    def own_prefill_s(self, slot: int, prompt_tokens: float, cached_tokens: float) -> float:
        """Return corrected seconds of prefill for the uncached part of a prompt."""
        uncached = prompt_tokens - cached_tokens
        return self._calibrations[slot].factor * self._costs[slot].prefill_compute_s(uncached, cached_tokens)

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
        calibration, cost = self._calibrations[slot], self._costs[slot]
        factor, new = calibration.factor, prompt_tokens - cached_tokens
        own_s = factor * cost.prefill_compute_s(new, cached_tokens)
        steps = int((ahead_tokens + new) / self.token_budget) + 1
        # As in `fill`, without running decodes.
        compute_s = max(own_s + ahead_s, factor * steps * cost.weights_s)
        return calibration.constant_s + compute_s + factor * steps * cost.overhead_s

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
        step_seen_s: Sequence[float],
        own_prefill_s: list[float],
        predicted_ttft_s: list[float],
        decode_delay_s: list[float],
        decode_step_s: list[float],
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
            step_seen_s: by slot, when a step was last seen to end.
            own_prefill_s: by slot, written: corrected seconds of own prefill.
            predicted_ttft_s: by slot, written: predicted seconds to the first token.
            decode_delay_s: by slot, written: seconds of delay put on running decodes, summed over them.
            decode_step_s: by slot, written: seconds of one decode step with the decodes that run now.
        """
        constants, budget = self._constants, self.token_budget
        for slot in slots:
            per_token, per_pair, weights, per_kv, overhead, calibration = constants[slot]
            factor = calibration.factor
            cached = matched_tokens[slot]
            new = prompt_tokens - cached
            own = new * (per_token + (cached + new * 0.5) * per_pair)
            ahead = ahead_s[slot]
            running = decodes[slot]
            steps = int((ahead_tokens[slot] + new) / budget) + 1
            floor = steps * weights
            if running:
                compute = running * per_token
                shared = overhead + context_tokens[slot] * per_kv
                step = shared + (weights if weights > compute else compute)
                work = own + steps * (shared + compute)
                if ahead == 0.0:
                    # In which part of a step the request arrives shows in when the last token came.
                    passed = (now_s - step_seen_s[slot]) / (factor * step)
                    work += step * (1.0 - passed % 1.0 if passed < _STEPS_REMEMBERED else 0.5)
                decode_delay_s[slot] = running * factor * own
            else:
                step = weights + overhead
                work = own + steps * overhead
                decode_delay_s[slot] = 0.0
            decode_step_s[slot] = factor * step
            total = factor * work + ahead
            if ahead + factor * own < factor * floor:
                # So little to compute that reading the weights takes longer.
                total = factor * (work + floor - own)
            own_prefill_s[slot] = factor * own
            predicted_ttft_s[slot] = calibration.constant_s + total

    def work_s(self, slot: int, ttft_s: float) -> float:
        """Return the uncorrected work behind a prediction, to be given back to `observe`."""
        calibration = self._calibrations[slot]
        return max(ttft_s - calibration.constant_s, 0.0) / calibration.factor

    def observe(self, slot: int, work_s: float, predicted_s: float, observed_s: float) -> None:
        """Learn from the first token of a request that was neither retried nor aborted.

        Args:
            slot: the replica.
            work_s: uncorrected work of the prediction (`work_s`).
            predicted_s: the prediction itself.
            observed_s: seconds from selection to the first token.
        """
        calibration = self._calibrations[slot]
        self.errors[slot].add(predicted_s, observed_s)
        calibration.errors.add(predicted_s, observed_s)
        calibration.observe(work_s, observed_s)
