"""Whether memory grows: a line through what was sampled, and quantiles of latencies. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory at one moment.

    Attributes:
        requests: finished so far.
        rss_bytes: resident memory of the gateway.
    """

    requests: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Trend:
    """The second half of a soak.

    Attributes:
        rss_bytes: mean resident memory.
        growth_bytes: what the fitted line gains over the half.
        slope_bytes_per_request: its slope.
    """

    rss_bytes: float
    growth_bytes: float
    slope_bytes_per_request: float

    def steady(self, share: float = 0.02, least_bytes: float = 2 << 20) -> bool:
        """Say whether the growth is within what the allocator's noise explains.

        Args:
            share: of the resident memory.
            least_bytes: allowed in any case.
        """
        return self.growth_bytes <= max(share * self.rss_bytes, least_bytes)


def second_half(samples: Sequence[Sample]) -> Trend:
    """Fit a line through the samples of the second half of the requests.

    Raises:
        ValueError: fewer than two samples, or no requests, lie in it.
    """
    if not samples:
        raise ValueError("no samples")
    middle = samples[-1].requests / 2
    half = [sample for sample in samples if sample.requests >= middle]
    mean_x = sum(sample.requests for sample in half) / len(half)
    mean_y = sum(sample.rss_bytes for sample in half) / len(half)
    spread = sum((sample.requests - mean_x) ** 2 for sample in half)
    if len(half) < 2 or spread == 0:
        raise ValueError("too few samples in the second half")
    slope = sum((sample.requests - mean_x) * (sample.rss_bytes - mean_y) for sample in half) / spread
    return Trend(mean_y, slope * (half[-1].requests - half[0].requests), slope)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least a share of all do not exceed; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
