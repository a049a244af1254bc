"""What a node is worth when nobody knows whose it is: by its age and what became of others like it.

For nodes run over by calls without a session, by kind (output or prompt; hits 0, 1, 2+) and age since the last touch
(the bins of gaps.py): hits and evictions at that age. An eviction censors, so the hazard of a hit is

    h_k = (hits_k + prior_k) / (hits and evictions at or beyond bin k, half of k's evictions + 1)
    V_k = h_k * exp(-theta * half a bin) + (1 - h_k) * exp(-theta * a bin) * V_(k+1)

on the same scale as every other score: the discounted chance of a hit. V is made non-increasing in age (the best that
is still to come), so that LRU order inside a kind is score order. Counts are halved at 4,096.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence

from radix_policy.gaps import EDGES, LEAST_CYCLE

_BINS = len(EDGES) - 1
_KINDS = 6
_MOMENTS = 512
_THIN = 1 / 12
_HALVE_AT = 4096.0


class AgeModel:
    """Hits and evictions of nodes without a session, and V."""

    def __init__(self) -> None:
        self.events = 0
        self._hits: list[array[float]] = []  # by kind; no tables where every call has a session
        self._lost: list[array[float]] = []
        self._total = [0.0] * _KINDS
        self._values: list[array[float]] = []

    def hit(self, kind: int, age: float) -> None:
        """A node of that kind was run over again."""
        self._add(True, kind, age)

    def lost(self, kind: int, age: float) -> None:
        """It was evicted."""
        self._add(False, kind, age)

    def refresh(self, gamma: float, cycle: float) -> None:
        """Rebuild V."""
        if not self.events:
            return
        theta = (1.0 - gamma) / cycle if cycle > LEAST_CYCLE else 0.0
        pooled_hits = [sum(self._hits[kind][k] for kind in range(_KINDS)) for k in range(_BINS)]
        pooled_lost = [sum(self._lost[kind][k] for kind in range(_KINDS)) for k in range(_BINS)]
        pooled = _hazards(pooled_hits, pooled_lost, None)
        steps = [math.exp(-theta * (EDGES[k + 1] - EDGES[k])) for k in range(_BINS)]
        for kind in range(_KINDS):
            hazards = _hazards(self._hits[kind], self._lost[kind], pooled)
            values = self._values[kind]
            value = best = 0.0
            for k in range(_BINS - 1, -1, -1):
                value = hazards[k] * math.sqrt(steps[k]) + (1.0 - hazards[k]) * steps[k] * value
                best = max(best, value)
                values[k] = best

    def value(self, kind: int, age: float) -> float:
        """V at that age, linear inside a bin."""
        k = min(max(bisect_right(EDGES, age) - 1, 0), _BINS - 1)
        low, high = EDGES[k], EDGES[k + 1]
        share = min(max((age - low) / (high - low), 0.0), 1.0)
        if not self._values:
            return 0.0
        values = self._values[kind]
        return values[k] + (values[k + 1] - values[k]) * share

    def _add(self, hit: bool, kind: int, age: float) -> None:
        if not self.events:
            self._hits = [array("f", bytes(4 * _BINS)) for _ in range(_KINDS)]
            self._lost = [array("f", bytes(4 * _BINS)) for _ in range(_KINDS)]
            self._values = [array("f", bytes(4 * (_BINS + 1))) for _ in range(_KINDS)]
        (self._hits if hit else self._lost)[kind][min(max(bisect_right(EDGES, age) - 1, 0), _BINS - 1)] += 1.0
        self.events += 1
        self._total[kind] += 1.0
        if self._total[kind] >= _HALVE_AT:
            self._total[kind] /= 2
            for row in (self._hits[kind], self._lost[kind]):
                for k in range(_BINS):
                    row[k] /= 2


def _hazards(hits: Sequence[float], lost: Sequence[float], pooled: list[float] | None) -> list[float]:
    hazards = [0.0] * _BINS
    beyond = 0.0
    for k in range(_BINS - 1, -1, -1):
        beyond += hits[k] + lost[k]
        risk = beyond - lost[k] / 2
        prior = pooled[k] if pooled is not None else 0.0
        weight = 4.0 if pooled is not None else 1.0
        hazards[k] = min((hits[k] + weight * prior) / (risk + weight), 1.0)
    return hazards


class StampClock:
    """When the tree's access clock (stamps) stood where: older moments ever more thinly, at a twelfth of their age."""

    def __init__(self) -> None:
        self._stamps = array("d")
        self._seconds = array("d")

    def note(self, stamp: float, seconds: float) -> None:
        """The access clock stands at `stamp` now."""
        if self._seconds and seconds <= self._seconds[-1]:
            return
        if self._stamps and stamp <= self._stamps[-1]:
            return
        self._stamps.append(stamp)
        self._seconds.append(seconds)
        if len(self._stamps) > _MOMENTS:
            self._thin()

    def _thin(self) -> None:
        """Keep the first and the last moment, and between them each without which the gap would be too wide."""
        share = _THIN
        while len(self._stamps) > _MOMENTS // 2:
            seconds, now = self._seconds, self._seconds[-1]
            kept, later = [len(seconds) - 1], now
            for k in range(len(seconds) - 2, 0, -1):
                if later - seconds[k - 1] > (now - seconds[k]) * share:
                    kept.append(k)
                    later = seconds[k]
            kept.append(0)
            kept.reverse()
            self._stamps = array("d", [self._stamps[k] for k in kept])
            self._seconds = array("d", [seconds[k] for k in kept])
            share *= 2

    def seconds(self, stamp: float) -> float:
        """The latest moment known at which the access clock had not passed `stamp`."""
        k = bisect_right(self._stamps, stamp)
        return self._seconds[k - 1] if k else (self._seconds[0] if self._seconds else 0.0)

    def clear(self) -> None:
        """A new tree: its stamps may start anew."""
        del self._stamps[:], self._seconds[:]
