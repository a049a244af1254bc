"""Seeded draws that are the same in every process and on every machine.

Each stream has a text key of its own, so that a variant of a workload (longer messages, private threads) keeps the
routing of the plain one. `random.Random` seeds from text by SHA-512 and never by `hash()`; one uniform is used per
value, so that streams stay aligned.
"""

import math
from random import Random
from statistics import NormalDist

_NORMAL = NormalDist()


def stream(*key: object) -> Random:
    """The stream of this key, e.g. stream(seed, "selector", 3, "lengths")."""
    return Random("/".join(map(str, key)))


def normal(rng: Random) -> float:
    """One standard normal value from one uniform."""
    return _NORMAL.inv_cdf(min(max(rng.random(), 1e-12), 1 - 1e-12))


def lognormal(rng: Random, sigma: float, *, mean: float | None = None, median: float | None = None) -> float:
    """A lognormal value with log-standard-deviation `sigma`, given its mean or its median."""
    if median is None:
        assert mean is not None
        median = mean * math.exp(-sigma * sigma / 2)
    return median * math.exp(sigma * normal(rng))


def tokens(rng: Random, mean: float, sigma: float = 0.6, least: int = 4) -> int:
    """A message length in tokens: lognormal, at least `least`."""
    return max(least, round(lognormal(rng, sigma, mean=mean)))


def between(rng: Random, low: int, high: int) -> int:
    """A whole number, uniform in [low, high]."""
    return min(high, low + int(rng.random() * (high - low + 1)))


def pick(rng: Random, weights: "list[float] | tuple[float, ...]") -> int:
    """An index drawn with these probabilities (they sum to 1)."""
    u, last = rng.random(), 0
    for i, weight in enumerate(weights):
        if weight > 0:
            last = i
            if u < weight:
                return i
        u -= weight
    return last


def think_gap(rng: Random, tool_probability: float = 0.3, tool_mean: float = 2.0) -> tuple[float, bool]:
    """(seconds before a call, whether a tool ran): thinking has median 0.2 s and sigma 0.5, a tool sigma 1."""
    gap = lognormal(rng, 0.5, median=0.2)
    ran, tool = rng.random() < tool_probability, lognormal(rng, 1.0, mean=tool_mean)
    return (gap + tool if ran else gap), ran
