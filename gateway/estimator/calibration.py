"""Online correction of predicted times: observed = constant + factor x predicted work.

Two numbers per hardware class, fitted by recursive least squares with forgetting, weighted so that relative errors
count alike for short and long prompts, and with outliers clipped (P. Huber, "Robust estimation of a location
parameter", 1964; L. Ljung, "System Identification", 2nd ed., section 11.2). The constant is what does not depend on
the prompt (network, tokenising, scheduling); the factor is how far the hardware figures are off.

With hardware known the factor starts at 1 and moves slowly; without, it starts from neutral constants and moves fast.
"""

from collections import deque

_FORGETTING = 0.995
_MIN_TTFT_S = 1e-4
_MAX_FACTOR = 1e3
_MIN_FACTOR = 1e-3
_ERROR_WINDOW = 256


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
    """The two corrections of one hardware class.

    Attributes:
        constant_s: seconds that every request takes whatever its prompt.
        factor: observed seconds per predicted second of work.
        errors: what the predictions made with these were worth.
    """

    __slots__ = ("_p00", "_p01", "_p11", "_scale", "constant_s", "errors", "factor", "samples")

    def __init__(self, *, known_hardware: bool, constant_s: float = 0.002) -> None:
        """Start from a prior.

        Args:
            known_hardware: hardware and model were given, so the factor is near 1; otherwise it is anybody's guess.
            constant_s: prior of the constant.
        """
        self.constant_s = constant_s
        self.factor = 1.0
        self.samples = 0
        self.errors = PredictionErrors()
        # Covariance of the prior in units of the relative residual's variance: the standard deviation of the constant
        # in seconds, and of the factor.
        self._p00 = 0.02**2
        self._p01 = 0.0
        self._p11 = 0.25**2 if known_hardware else 3.0**2
        # Running scale of the relative residual, for the clipping of outliers.
        self._scale = 0.5

    def predict(self, work_s: float) -> float:
        """Return predicted seconds for `work_s` seconds of uncorrected work."""
        return self.constant_s + self.factor * work_s

    def observe(self, work_s: float, observed_s: float) -> None:
        """Learn from one first token.

        Args:
            work_s: the uncorrected work that was predicted: queue, own prefill and interference.
            observed_s: seconds from selection to the first token.
        """
        observed_s = max(observed_s, _MIN_TTFT_S)
        predicted_s = self.predict(work_s)
        self.samples += 1
        residual_s = observed_s - predicted_s
        # Relative residuals: one long prompt must not outweigh a hundred short ones.
        weight = 1.0 / max(observed_s, predicted_s, 0.005)
        relative = residual_s * weight
        # The factor of unknown hardware may be off by 10x at first, so nothing is clipped before a few samples. Then
        # residuals count by their sign more than by their size: what delays a request beyond the model (others that
        # arrive later and share its step, waits for memory) has a long tail on one side, and must not be taken for
        # slow hardware.
        limit = 0.5 * self._scale if self.samples > 16 else 1e9
        if relative > limit:
            residual_s *= limit / relative
        elif relative < -limit:
            residual_s *= limit / -relative
        self._scale += 0.05 * (min(abs(relative), 4.0 * self._scale + 0.01) - self._scale)
        self._scale = max(self._scale, 0.02)
        x0, x1 = weight, work_s * weight
        p00, p01, p11 = self._p00, self._p01, self._p11
        g0, g1 = p00 * x0 + p01 * x1, p01 * x0 + p11 * x1
        # Variance of a relative residual that the model cannot explain: about 5 % squared.
        denominator = 0.0025 + x0 * g0 + x1 * g1
        k0, k1 = g0 / denominator, g1 / denominator
        self.constant_s = min(max(self.constant_s + k0 * residual_s * weight, 0.0), 5.0)
        self.factor = min(max(self.factor + k1 * residual_s * weight, _MIN_FACTOR), _MAX_FACTOR)
        p00, p01, p11 = p00 - k0 * g0, p01 - k0 * g1, p11 - k1 * g1
        # Forgetting, with a ceiling so that a quiet direction does not wind up.
        self._p00 = min(max(p00 / _FORGETTING, 1e-12), 0.02**2)
        self._p11 = min(max(p11 / _FORGETTING, 1e-9), 9.0)
        self._p01 = p01 / _FORGETTING
        bound = (self._p00 * self._p11) ** 0.5 * 0.999
        self._p01 = min(max(self._p01, -bound), bound)
