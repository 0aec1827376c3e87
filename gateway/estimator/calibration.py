"""Online correction of predicted times: observed TTFT = constant + compute factor x compute + memory factor x memory.

- compute: prefill, of this prompt and of those before it. Its factor and the constant (network, tokenising,
  scheduling) are fitted to TTFTs by recursive least squares with forgetting, weighted so that relative errors count
  alike for short and long prompts, and with outliers clipped (P. Huber, "Robust estimation of a location parameter",
  1964; L. Ljung, "System Identification", 2nd ed., section 11.2). A prompt that is cached says nothing of compute, and
  moves nothing but the constant.
- memory: reads of weights and KV, that is, decode steps. Its factor follows from answers: how long they took per
  token, prefills of others taken off. TTFTs of short prompts show one or two steps; answers show hundreds.

Each hardware class has one `Calibration`; each replica has a `Deviation` from its class, shrunk towards it, so that a
new replica starts with what is known of its kind and one slow card is found out.

With hardware known the factors start at 1 and move slowly; without, they start from neutral constants and move fast.
Until the first answer has ended, the memory factor of unknown hardware is the compute factor.
"""

from collections import deque
from math import exp, log, sqrt

_CONSTANT_DRIFT_S = 0.0001
_FACTOR_DRIFT = 0.002
"""How far constant and factor may move from one request to the next: standard deviations of random walks."""
_MIN_TTFT_S = 1e-4
_MAX_FACTOR = 1e3
_MIN_FACTOR = 1e-3
_MAX_CONSTANT_S = 5.0
_ERROR_WINDOW = 256

_UNEXPLAINED = 0.0025
"""Variance of a relative residual that the model cannot explain: about 5 % squared."""

_EARLY_CLIP = 8.0
"""Of unknown hardware residuals are clipped at this times their usual size over the square root of the samples, while
that is more than later: or what the first, unclipped samples were wrong by would be left for hundreds of requests. On
the logs of 22 runs on real vLLM on a CPU the median error after 100 requests falls from 13.6 to 12.7 %. With known
hardware there is little to make up for, and queues of an early burst would count (Qwen3-32B at twice the trace's rate:
8.6 -> 12.5 %)."""

_STEP_GAIN = 0.05
_MOST_STEP = 0.7
"""Largest change of a memory factor by one answer, as a logarithm: half to double."""

_DEVIATION_GAIN = 0.02
_SHRINKING = 0.995
_MOST_DEVIATION = 0.7
_CLIP = 0.03


class PredictionErrors:
    """The last prediction errors, and what they amount to. Signed relative errors: (predicted - observed)/observed."""

    __slots__ = ("_errors", "count")

    def __init__(self, window: int = _ERROR_WINDOW) -> None:
        self._errors: deque[float] = deque(maxlen=window)
        self.count = 0

    def add(self, predicted_s: float, observed_s: float) -> None:
        """Record one pair of seconds."""
        self.count += 1
        self._errors.append((predicted_s - observed_s) / max(observed_s, _MIN_TTFT_S))

    def absolute_quantile(self, q: float) -> float | None:
        """Return a quantile of the absolute relative error, q in [0, 1]; None before there is data."""
        if not self._errors:
            return None
        ordered = sorted(abs(e) for e in self._errors)
        return ordered[min(int(q * len(ordered)), len(ordered) - 1)]

    def bias(self) -> float | None:
        """Return the mean signed relative error; None before there is data."""
        return sum(self._errors) / len(self._errors) if self._errors else None


class Calibration:
    """The corrections of one hardware class.

    Attributes:
        constant_s: seconds that every request takes whatever its prompt.
        factor: observed seconds per predicted second of compute.
        memory_factor: observed seconds per predicted second of a decode step.
        errors: what the predictions made with these were worth.
        samples, answers: TTFTs and answers learned from.
    """

    __slots__ = (
        "_early_clip",
        "_known",
        "_most_p00",
        "_most_p11",
        "_p00",
        "_p01",
        "_p11",
        "_scale",
        "answers",
        "constant_s",
        "errors",
        "factor",
        "memory_factor",
        "samples",
    )

    def __init__(self, *, known_hardware: bool, constant_s: float = 0.002) -> None:
        """Start from a prior.

        Args:
            known_hardware: hardware and model were given, so the factors are near 1; otherwise they are anybody's
                guess.
            constant_s: prior of the constant.
        """
        self.constant_s = constant_s
        self.factor = 1.0
        self.memory_factor = 1.0
        self.samples = 0
        self.answers = 0
        self.errors = PredictionErrors()
        self._known = known_hardware
        self._early_clip = 0.0 if known_hardware else _EARLY_CLIP
        # Variances of the prior: of the constant in seconds squared, and of the factor.
        self._p00 = 0.01**2 if known_hardware else 0.02**2
        self._p01 = 0.0
        self._p11 = 0.25**2 if known_hardware else 3.0**2
        self._most_p00, self._most_p11 = self._p00, self._p11
        # Running scale of the relative residual, for the clipping of outliers.
        self._scale = 0.5

    def predict(self, compute_s: float, memory_s: float = 0.0) -> float:
        """Return predicted seconds for so many uncorrected seconds."""
        return self.constant_s + self.factor * compute_s + self.memory_factor * memory_s

    def observe(self, compute_s: float, observed_s: float, memory_s: float = 0.0) -> None:
        """Learn from one first token.

        Args:
            compute_s: uncorrected seconds of prefill that were predicted: of the queue and its own.
            observed_s: seconds from selection to the first token.
            memory_s: uncorrected seconds of memory reads that were predicted.
        """
        observed_s = max(observed_s, _MIN_TTFT_S)
        predicted_s = self.predict(compute_s, memory_s)
        self.samples += 1
        residual_s = observed_s - predicted_s
        # Relative residuals: one long prompt must not outweigh a hundred short ones.
        weight = 1.0 / max(observed_s, predicted_s, 0.005)
        relative = residual_s * weight
        # The factor of unknown hardware may be off by 10x at first, so nothing is clipped before a few samples. Then
        # residuals count by their sign more than by their size: what delays a request beyond the model (others that
        # arrive later and share its step) has a long tail on one side, and must not be taken for slow hardware.
        early = 0.3 if self._known else 1e9
        limit = max(0.25, self._early_clip / sqrt(self.samples)) * self._scale if self.samples > 16 else early
        if relative > limit:
            residual_s *= limit / relative
        elif relative < -limit:
            residual_s *= limit / -relative
        self._scale += 0.05 * (min(abs(relative), 4.0 * self._scale + 0.01) - self._scale)
        self._scale = max(self._scale, 0.02)
        # Of unknown hardware all the work is scaled by one factor until answers tell the two apart.
        together = not self._known and not self.answers
        x0, x1 = weight, (compute_s + memory_s if together else compute_s) * weight
        p00, p01, p11 = self._p00, self._p01, self._p11
        g0, g1 = p00 * x0 + p01 * x1, p01 * x0 + p11 * x1
        denominator = _UNEXPLAINED + x0 * g0 + x1 * g1
        k0, k1 = g0 / denominator, g1 / denominator
        constant_s = self.constant_s + k0 * residual_s * weight
        if constant_s < 0.0:
            # At its bound it is known: what is left concerns the factor alone.
            k1 = p11 * x1 / (_UNEXPLAINED + x1 * x1 * p11)
            constant_s = 0.0
        self.constant_s = min(constant_s, _MAX_CONSTANT_S)
        self.factor = min(max(self.factor + k1 * residual_s * weight, _MIN_FACTOR), _MAX_FACTOR)
        if together:
            self.memory_factor = self.factor
        # Both drift, but the factor only as far as the request says anything of it: while all prompts are cached,
        # nothing of it is heard, and nothing of it is forgotten.
        share = min(self.factor * x1, 1.0)
        p00 += _CONSTANT_DRIFT_S**2 - k0 * g0
        p11 += (_FACTOR_DRIFT * self.factor * share) ** 2 - k1 * g1
        self._p00, self._p11 = min(max(p00, 1e-12), self._most_p00), min(max(p11, 1e-12), self._most_p11)
        bound = (self._p00 * self._p11) ** 0.5 * 0.99
        self._p01 = min(max(p01 - k0 * g1, -bound), bound)

    def observe_steps(self, factor: float) -> None:
        """Learn from one answer.

        Args:
            factor: observed over predicted seconds of its decode steps, before correction.
        """
        self.answers += 1
        change = min(max(log(factor / self.memory_factor), -_MOST_STEP), _MOST_STEP)
        gain = max(_STEP_GAIN, 1.0 / (self.answers + (4.0 if self._known else 0.0)))
        self.memory_factor = min(max(self.memory_factor * exp(gain * change), _MIN_FACTOR), _MAX_FACTOR)


class Deviation:
    """How one replica differs from its class.

    Attributes:
        compute: logarithm of its compute factor over the class's.
        memory: the same of the memory factor.
    """

    __slots__ = ("compute", "memory")

    def __init__(self) -> None:
        self.compute = 0.0
        self.memory = 0.0

    def observe(self, predicted_s: float, observed_s: float, compute_share: float) -> None:
        """Learn from one first token.

        Args:
            predicted_s: seconds predicted for it.
            observed_s: seconds it took.
            compute_share: share of the prediction that is compute, 0 to 1.
        """
        # By the sign more than by the size, as for the class.
        error = min(max(log(max(observed_s, _MIN_TTFT_S) / max(predicted_s, _MIN_TTFT_S)), -_CLIP), _CLIP)
        moved = _SHRINKING * self.compute + _DEVIATION_GAIN * compute_share * error
        self.compute = min(max(moved, -_MOST_DEVIATION), _MOST_DEVIATION)

    def observe_steps(self, ratio: float) -> None:
        """Learn from one answer: observed over predicted seconds of its decode steps, as corrected."""
        error = min(max(log(ratio), -_CLIP), _CLIP)
        moved = _SHRINKING * self.memory + _DEVIATION_GAIN * error
        self.memory = min(max(moved, -_MOST_DEVIATION), _MOST_DEVIATION)
