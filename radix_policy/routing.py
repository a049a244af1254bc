"""Who is called next, from several predictors at once.

No single way of counting is right everywhere: a pipeline that changes wants short memory, random routing long memory
and heavy smoothing, a speaker selector is only predictable from the agents before it. So these are mixed:

    fast    (N_ij + b * pi_ij) / (N_i + b)             counts that fade by 2 % a step, b = 0.5
    slow    the same on counts that fade by 0.2 %
    flat    slow with b = 20: nearly pi
    pair    (N_hij + kappa * fast) / (N_hi + kappa)    h: the agent before i; kappa = 3
    triple  (N_ghij + kappa * pair) / (N_ghi + kappa)  g: the agent before h

pi_ij is the share of agent j among all transitions, given that an agent follows itself as often as agents do overall.
Each has the weight exp(sum of its log-probabilities of what really happened, fading by 1 % a step). The first three
make the rows of the agents. Where pair and triple are worth it, the contexts (h, i) and (g, h, i) seen most get rows,
and states of the chain, of their own (hazard.py), as many as make STATES states together with the agents: the cost of
first passage grows with their square. Contexts are counted only while there is room for any.
"""

from array import array
from collections import OrderedDict
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from radix_policy.transitions import TransitionCounts

Context = tuple[int, ...]  # the latest two or three agents, the present one last

STATES = 24
_FORGET = 0.99
_FLOOR = 1e-4
_LIGHT, _HEAVY, _KAPPA = 0.5, 20.0, 3.0
_PER_STATE = 6  # contexts counted at most, for each that may get a state; the one not seen for longest goes first
_FADE = 0.99  # of a context's counts
_FAINT = 0.15  # weight of a predictor that is not worth states
FAST, SLOW, FLAT, PAIR, TRIPLE = range(5)


class Router:
    """The mixture. `chain` are the world's own (fast) counts; the rest is kept here."""

    def __init__(self, chain: TransitionCounts, slow_decay: float = 0.998, light: float = _LIGHT) -> None:
        self.chain = chain
        self.slow = TransitionCounts(decay=slow_decay)
        self.light = max(light, 1e-9)  # 0 would leave an agent without evidence without a row
        self.scores = [0.0, 0.0, -1.0, -1.0, -2.0]
        self.room = STATES  # contexts that may get a state, as of the last `matrix`
        self._counts: OrderedDict[Context, array[float]] = OrderedDict()  # target, count, target, count, ...
        self._shares: list[array[float]] = []
        self._weights = [1.0, 0.0, 0.0, 0.0, 0.0]  # of all five, as of the last `matrix`

    def weights(self, *, contexts: bool) -> list[float]:
        """Of fast, slow, flat and (0 unless `contexts`) pair and triple."""
        top = max(self.scores)
        raw = [exp(s - top) for s in self.scores]
        if not contexts:
            raw[PAIR] = raw[TRIPLE] = 0.0
        total = sum(raw)
        return [w / total for w in raw] if total > 0 else [1.0, 0.0, 0.0, 0.0, 0.0]

    def observe(self, trail: tuple[int, int], source: int, target: int) -> None:
        """`source` was followed by `target`; `trail`: the two agents before source, older first, -1 for none.

        Call it before `chain` counts the transition.
        """
        older, before = trail
        counts = self._counts
        pair = (before, source) if before >= 0 and self.room > 0 else None
        triple = (older, before, source) if older >= 0 and pair is not None else None
        row = counts.get(pair) if pair is not None else None
        longer = counts.get(triple) if triple is not None else None
        shares = self._shares
        if source < len(shares) and target < len(shares):
            self._score(source, target, row, longer)
        self.slow.add(source, target)
        if pair is not None:
            self._count(pair, target)
        if triple is not None:
            self._count(triple, target)

    def _count(self, context: Context, target: int) -> None:
        row = self._counts.get(context)
        if row is None:
            while len(self._counts) >= _PER_STATE * self.room:
                self._counts.popitem(last=False)
            row = self._counts[context] = array("f")
        else:
            self._counts.move_to_end(context)
        new = True
        for at in range(0, len(row), 2):
            row[at + 1] *= _FADE
            if row[at] == target:
                row[at + 1] += 1.0
                new = False
        if new:
            row.extend((target, 1.0))

    def _score(self, source: int, target: int, row: "array[float] | None", longer: "array[float] | None") -> None:
        """How well each predictor foresaw `target`; `row`, `longer`: the counts of the pair and of the triple."""
        share, light = self._shares[source][target], self.light
        n, total = self.chain.count_of_total(source, target)
        fast = (n + light * share) / (total + light)
        n, total = self.slow.count_of_total(source, target)
        slow = (n + light * share) / (total + light)
        flat = (n + _HEAVY * share) / (total + _HEAVY)
        pair = _foreseen(row, target, fast)
        triple = _foreseen(longer, target, pair)
        a, b, c, d, e = self.scores
        of_fast = log(fast if fast > _FLOOR else _FLOOR)
        of_pair = of_fast if pair == fast else log(pair if pair > _FLOOR else _FLOOR)
        self.scores = [
            _FORGET * a + of_fast,
            _FORGET * b + log(slow if slow > _FLOOR else _FLOOR),
            _FORGET * c + log(flat if flat > _FLOOR else _FLOOR),
            _FORGET * d + of_pair,
            _FORGET * e + (of_pair if triple == pair else log(triple if triple > _FLOOR else _FLOOR)),
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
        self._weights = self.weights(contexts=True)
        self.room = max(STATES - agents, 0)
        if self.room == 0:
            self._counts.clear()
        w = self.weights(contexts=False)
        p = np.zeros((agents, agents))
        for weight, counts, b in ((w[FAST], fast, self.light), (w[SLOW], slow, self.light), (w[FLAT], slow, _HEAVY)):
            rows = np.add.reduce(counts.T, axis=0) + b
            p += weight * (counts + b * share) / rows[:, None]
        return p

    def contexts(self, agents: int) -> list[Context]:
        """Those that get a state: the ones seen most, as far as there is room; of agents below `agents`."""
        pair, triple = self._weights[PAIR], self._weights[TRIPLE]
        if pair + triple <= _FAINT:
            return []
        longest = 3 if triple > _FAINT else 2
        found = [
            (sum(row[1::2]), context)
            for context, row in self._counts.items()
            if len(context) <= longest and max(context) < agents
        ]
        found.sort(reverse=True)
        return sorted(context for _, context in found[: self.room])

    def row_of(self, context: Context, base: NDArray[np.float64]) -> NDArray[np.float64]:
        """P(next | context, no END), from `base`, the row of `matrix` of the present agent."""
        pair = self._mixed(context[-2:], base)
        triple = self._mixed(context, pair) if len(context) > 2 else pair
        p, t = self._weights[PAIR], self._weights[TRIPLE]
        mixed: NDArray[np.float64] = (1.0 - p - t) * base + p * pair + t * triple
        return mixed

    def _mixed(self, context: Context, base: NDArray[np.float64]) -> NDArray[np.float64]:
        """The counts of a context, smoothed by `base`."""
        row = self._counts.get(context)
        if not row:
            return base
        mixed = _KAPPA * base
        for at in range(0, len(row), 2):
            target = int(row[at])
            if target < len(mixed):
                mixed[target] += row[at + 1]
        return mixed / (sum(row[1::2]) + _KAPPA)

    @property
    def nbytes(self) -> int:
        """Bytes of the counts, about."""
        return self.slow.nbytes + sum(200 + 4 * len(row) for row in self._counts.values())


def _foreseen(row: "array[float] | None", target: int, base: float) -> float:
    """The chance of `target` by the counts of a context, smoothed by `base`."""
    if not row:
        return base
    known = 0.0
    for at in range(0, len(row), 2):
        if row[at] == target:
            known = row[at + 1]
            break
    return (known + _KAPPA * base) / (sum(row[1::2]) + _KAPPA)


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
