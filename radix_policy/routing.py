"""Who is called next, from several predictors at once.

No single way of counting is right everywhere: a pipeline that changes wants short memory, random routing long memory
and heavy smoothing, a speaker selector is only predictable from the agent before it. So these are mixed:

    fast    (N_ij + b * pi_ij) / (N_i + b)          counts that fade by 2 % a step, b = 0.5
    slow    the same on counts that fade by 0.2 %
    flat    slow with b = 20: nearly pi
    pair    (N_hij + kappa * fast) / (N_hi + kappa)  h: the agent before i; kappa = 3, at most 512 pairs

pi_ij is the share of agent j among all transitions, given that an agent follows itself as often as agents do overall.
Each has the weight exp(sum of its log-probabilities of what really happened, fading by 1 % a step). The first three
make the chain that first passage runs on; `pair` sharpens the first two steps (hazard.py).
"""

from array import array
from collections import OrderedDict
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from radix_policy.transitions import TransitionCounts

_FORGET = 0.99
_FLOOR = 1e-4
_LIGHT, _HEAVY, _KAPPA = 0.5, 20.0, 3.0
_PAIRS = 512
_PAIR_FADE = 0.98
FAST, SLOW, FLAT, PAIR = range(4)


class Router:
    """The mixture. `chain` are the world's own (fast) counts; the rest is kept here."""

    def __init__(self, chain: TransitionCounts, slow_decay: float = 0.998, light: float = _LIGHT) -> None:
        self.chain = chain
        self.slow = TransitionCounts(decay=slow_decay)
        self.light = max(light, 1e-9)  # 0 would leave an agent without evidence without a row
        self.scores = [0.0, 0.0, -1.0, -1.0]
        self._pairs: OrderedDict[tuple[int, int], array[float]] = OrderedDict()  # target, count, target, count, ...
        self._shares: list[array[float]] = []
        self.pair_weight = 0.0  # of `pair` in the mixture, as of the last `matrix`

    def weights(self, *, pairs: bool) -> list[float]:
        """Of fast, slow, flat and (0 unless `pairs`) pair."""
        top = max(self.scores)
        raw = [exp(s - top) for s in self.scores]
        if not pairs:
            raw[PAIR] = 0.0
        total = sum(raw)
        return [w / total for w in raw] if total > 0 else [1.0, 0.0, 0.0, 0.0]

    def observe(self, before: int, source: int, target: int) -> None:
        """`source` was followed by `target`; `before` came before source, -1 when nothing did.

        Call it before `chain` counts the transition.
        """
        row = self._pairs.get((before, source)) if before >= 0 else None
        shares = self._shares
        if source < len(shares) and target < len(shares):
            self._score(source, target, row)
        self.slow.add(source, target)
        if before < 0:
            return
        if row is None:
            if len(self._pairs) >= _PAIRS:
                self._pairs.popitem(last=False)
            row = self._pairs[before, source] = array("f")
        else:
            self._pairs.move_to_end((before, source))
        new = True
        for at in range(0, len(row), 2):
            row[at + 1] *= _PAIR_FADE
            if row[at] == target:
                row[at + 1] += 1.0
                new = False
        if new:
            row.extend((target, 1.0))

    def _score(self, source: int, target: int, row: "array[float] | None") -> None:
        """How well each predictor foresaw `target`; `row`: the pair's counts."""
        share, light = self._shares[source][target], self.light
        n, total = self.chain.count_of_total(source, target)
        fast = (n + light * share) / (total + light)
        n, total = self.slow.count_of_total(source, target)
        slow = (n + light * share) / (total + light)
        flat = (n + _HEAVY * share) / (total + _HEAVY)
        pair = fast
        if row:
            known = 0.0
            for at in range(0, len(row), 2):
                if row[at] == target:
                    known = row[at + 1]
                    break
            pair = (known + _KAPPA * fast) / (sum(row[1::2]) + _KAPPA)
        a, b, c, d = self.scores
        self.scores = [
            _FORGET * a + log(fast if fast > _FLOOR else _FLOOR),
            _FORGET * b + log(slow if slow > _FLOOR else _FLOOR),
            _FORGET * c + log(flat if flat > _FLOOR else _FLOOR),
            _FORGET * d + log(pair if pair > _FLOOR else _FLOOR),
        ]

    # ---- tables ----

    def matrix(self, agents: int) -> NDArray[np.float64]:
        """P(next | current, no END) by the first three predictors; a row without any evidence is zero."""
        self.chain.ensure(agents)
        self.slow.ensure(agents)
        fast = np.array([self.chain.counts(i) for i in range(agents)]).reshape(agents, agents)
        slow = np.array([self.slow.counts(i) for i in range(agents)]).reshape(agents, agents)
        share = _shares(slow)
        self._shares = [array("f", row) for row in share.tolist()]
        self.pair_weight = self.weights(pairs=True)[PAIR]
        w = self.weights(pairs=False)
        p = np.zeros((agents, agents))
        for weight, counts, b in ((w[FAST], fast, self.light), (w[SLOW], slow, self.light), (w[FLAT], slow, _HEAVY)):
            rows = np.add.reduce(counts.T, axis=0) + b
            p += weight * (counts + b * share) / rows[:, None]
        return p

    def pair_row(self, before: int, source: int, base: NDArray[np.float64]) -> NDArray[np.float64]:
        """P(next | before, source, no END), from `base`, the row of `matrix`."""
        row = self._pairs.get((before, source))
        if not row:
            return base
        scale = self.pair_weight / (sum(row[1::2]) + _KAPPA)
        mixed = base * (1.0 - self.pair_weight + scale * _KAPPA)
        for at in range(0, len(row), 2):
            target = int(row[at])
            if target < len(mixed):
                mixed[target] += scale * row[at + 1]
        return mixed

    @property
    def nbytes(self) -> int:
        """Bytes of the counts, about."""
        return self.slow.nbytes + sum(200 + 4 * len(row) for row in self._pairs.values())


def _shares(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """pi_ij."""
    agents = len(counts)
    column = np.add.reduce(counts, axis=0)
    total = sum(column.tolist())
    if total <= 0:
        return np.zeros((agents, agents))
    diagonal = np.arange(agents)
    own = (sum(counts[diagonal, diagonal].tolist()) + 1.0 / agents) / (total + 1.0)
    pi = np.repeat(column[None, :] / total, agents, axis=0)
    pi[diagonal, diagonal] = 0.0
    others = np.maximum(np.add.reduce(pi.T, axis=0), 1e-12)
    pi *= (1.0 - own) / others[:, None]
    pi[diagonal, diagonal] = np.where(np.add.reduce(pi.T, axis=0) > 0.0, own, 1.0)  # 1: no other was ever called
    return pi
