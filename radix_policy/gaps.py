"""How long a session stays silent between two calls: the gap survival S, and what a wait is worth.

Gaps (end of a call to the start of the session's next one, seconds) fall into a histogram of four bins per octave.
With c_k gaps in bin k and N_k in bins >= k:

    S(t)    = P(gap > t)                          linear inside a bin; a tail of weight 1/2 beyond the data
    D(t)    = E[exp(-theta * (gap - t)) | gap > t]   what the time still to wait leaves of a hit's worth
    theta   = (1 - gamma) / m,  m = EWMA of the cycle time (start of a call to the start of the next)

so gamma is the discount of one whole cycle. Counts are halved at 4,096 gaps, so that the law may drift.
"""

import math
from array import array
from bisect import bisect_right
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_FIRST = 1e-3  # seconds: upper edge of bin 0
_BINS = 112  # up to about three days
_HALVE_AT = 4096.0
_EWMA = 0.02
_EVEN = 50  # cycles after which the average is the EWMA
LEAST_CYCLE = 1e-6  # seconds; a shorter one means that the clock stands still
_TAIL = 0.5  # gaps that were never seen to end

EDGES: tuple[float, ...] = (0.0, *(_FIRST * 2.0 ** (k / 4) for k in range(_BINS)))
_EDGES = np.array(EDGES)
_HALVES = tuple((high - low) / 2 for low, high in pairwise(EDGES))  # of the bins' widths


class GapHistogram:
    """The gaps of all sessions, and the tables that follow."""

    def __init__(self) -> None:
        self.counts = [0.0] * _BINS
        self.total = 0.0
        self.seen = 0  # gaps added so far, never halved
        self.cycle = 0.0  # m, seconds; 0 while unknown

    def add(self, gap: float) -> None:
        """One gap, in seconds; negative ones count as zero."""
        k = bisect_right(EDGES, gap) - 1
        self.counts[0 if k < 0 else k if k < _BINS else _BINS - 1] += 1.0
        self.total += 1.0
        self.seen += 1
        if self.total >= _HALVE_AT:
            self.counts = [c / 2 for c in self.counts]
            self.total /= 2

    def add_cycle(self, seconds: float) -> None:
        """One cycle time; the first ones are averaged evenly."""
        if seconds <= 0:
            return
        if self.cycle <= 0:
            self.cycle = seconds
            return
        rate = _EWMA if self.seen > _EVEN else max(_EWMA, 1.0 / (1 + self.seen))
        self.cycle += rate * (seconds - self.cycle)

    def quantile(self, p: float) -> float:
        """The upper edge of the bin in which the p-quantile lies; 0 without data."""
        need, have = p * self.total, 0.0
        for k, count in enumerate(self.counts):
            have += count
            if have >= need and count > 0:
                return EDGES[k + 1]
        return 0.0

    def tables(self, gamma: float, cycle: float | None = None) -> "GapTables":
        """S and D as they stand; `cycle` overrides m."""
        cycle = self.cycle if cycle is None else cycle
        total = self.total
        survival, discount = array("d", [1.0] * (_BINS + 1)), array("d", [1.0] * (_BINS + 1))
        if total <= 0:
            return GapTables(np.frombuffer(survival), np.frombuffer(discount), survival, discount)
        theta = (1.0 - gamma) / cycle if cycle > LEAST_CYCLE else 0.0
        halves = [math.exp(-theta * half) for half in _HALVES]
        ahead = [1.0]  # exp(-theta * edge)
        for half in halves:
            ahead.append(ahead[-1] * half * half)
        beyond = worth = 0.0
        scale = 1.0 / (total + _TAIL)
        tail_from, counts = self.quantile(0.95), self.counts
        for k in range(_BINS, -1, -1):
            if k < _BINS:
                half, count = halves[k], counts[k]
                worth = (worth * half + count) * half
                beyond += count
            edge = EDGES[k]
            tail = _TAIL if edge <= tail_from else _TAIL * tail_from / edge
            left = beyond + tail
            survival[k] = left * scale
            # a wait beyond every gap seen has no end in sight: as long again as it already is
            discount[k] = (worth + tail * ahead[k]) / left
        return GapTables(np.frombuffer(survival), np.frombuffer(discount), survival, discount)


class GapTables(NamedTuple):
    """S and D at every edge."""

    survival: NDArray[np.float64]
    discount: NDArray[np.float64]
    s: "array[float]"  # the same memory, for single numbers
    d: "array[float]"

    @property
    def first(self) -> float:
        """D(0)."""
        return self.d[0]

    def at(self, idle: float) -> tuple[float, float]:
        """(S, D) at one waiting time."""
        k = min(bisect_right(EDGES, idle), _BINS) - 1
        low = EDGES[k]
        share = min((idle - low) / (EDGES[k + 1] - low), 1.0)
        s, d = self.s[k], self.d[k]
        return s + (self.s[k + 1] - s) * share, d + (self.d[k + 1] - d) * share

    def lookup(self, idle: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(S, D) at each waiting time."""
        k = np.minimum(np.searchsorted(_EDGES, idle, side="right"), _BINS) - 1
        low = _EDGES[k]
        share = np.minimum((idle - low) / (_EDGES[k + 1] - low), 1.0)
        s, d = self.survival, self.discount
        return s[k] + (s[k + 1] - s[k]) * share, d[k] + (d[k + 1] - d[k]) * share
