"""Random numbers of workloads: arrivals, lengths, popularity, contents."""

import math
from collections.abc import Sequence
from itertools import accumulate
from random import Random

from xxhash import xxh3_64_intdigest


class Contents:
    """Content ids that no other part of the workload has. Other seeds give other contents."""

    def __init__(self, seed: int) -> None:
        self._next = (xxh3_64_intdigest(str(seed)) & 0x7FFF_FFFF) << 32

    def new(self) -> int:
        """A content nobody has used."""
        self._next += 1
        return self._next


def poisson_arrivals_s(rng: Random, rate_per_s: float, count: int) -> list[float]:
    """Arrival times of a Poisson process, from its first arrival on.

    Raises:
        ValueError: the rate is not positive.
    """
    if not rate_per_s > 0:
        raise ValueError(f"the arrival rate must be positive, not {rate_per_s!r}")
    return list(accumulate(rng.expovariate(rate_per_s) for _ in range(count)))


def lognormal(rng: Random, mean: float, variation: float) -> float:
    """One draw of a lognormal distribution.

    Args:
        rng: random numbers.
        mean: of the distribution itself, not of its logarithm.
        variation: standard deviation over mean; 0 gives the mean.
    """
    if variation <= 0:
        return mean
    sigma_squared = math.log1p(variation * variation)
    return rng.lognormvariate(math.log(mean) - sigma_squared / 2, math.sqrt(sigma_squared))


def tokens(rng: Random, mean: float, variation: float, most: int = 1 << 30) -> int:
    """A lognormal number of tokens, from 1 to `most`."""
    return min(max(round(lognormal(rng, mean, variation)), 1), most)


def geometric(rng: Random, mean: float, most: int) -> int:
    """A geometric number from 1 to `most`, of the given mean before the bound."""
    if mean <= 1:
        return 1
    return min(1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / mean)), most)


class Popularity:
    """Draws one of `count` things; the n-th most popular comes with weight n^-exponent (Zipf)."""

    def __init__(self, count: int, exponent: float) -> None:
        self._population = range(count)
        self._weights: Sequence[float] = list(accumulate((n + 1) ** -exponent for n in range(count)))

    def draw(self, rng: Random) -> int:
        """A number from 0 to count - 1."""
        return rng.choices(self._population, cum_weights=self._weights)[0]
