"""How likely a call of the right agent in the right session really takes up a node again.

A call (s, a) runs over the nodes that (s, a) left, or passes them by: the branch is dead when the client rewrote the
tail of its prompt. q is learned for a node of agent a by kind:

    q[a][output?][hits 0 / 1 / 2+][bypass 0..3+] = (hits + 2 * q_pooled) / (trials + 2)

bypass counts the calls of (s, a) since the node was last run over. A node that is hit after b passes counts one trial
for 0..b and a hit at b; one that is evicted after b passes counts trials for 0..b-1. q_pooled is the same ratio over
all agents, with a prior of one hit, so that an unknown kind is taken to be reused. Counts of an agent are halved at
4,096 trials.
"""

from array import array

_BYPASS = 4
_KINDS = 2 * 3 * _BYPASS
_HALVE_AT = 4096.0


def kind_of(output: bool, hits: int) -> int:
    """The kind of a node: 0..5."""
    return 3 * output + min(hits, 2)


class _Counts:
    __slots__ = ("hits", "total", "trials")

    def __init__(self) -> None:
        self.trials = [0.0] * _KINDS
        self.hits = [0.0] * _KINDS
        self.total = 0.0

    def add(self, kind: int, bypass: int, hit: bool) -> None:
        """Trials at 0..bypass, the last one a hit or not."""
        base = kind * _BYPASS
        for b in range(min(bypass + 1, _BYPASS - 1)):
            self.trials[base + b] += 1.0
        if bypass >= _BYPASS - 1:
            self.trials[base + _BYPASS - 1] += bypass - _BYPASS + 2.0
        if hit:
            self.hits[base + min(bypass, _BYPASS - 1)] += 1.0
        self.total += 1.0
        if self.total >= _HALVE_AT:
            self.total /= 2
            self.trials = [x / 2 for x in self.trials]
            self.hits = [x / 2 for x in self.hits]


class Rates:
    """q as it stood at one moment."""

    __slots__ = ("_own", "_pooled")

    def __init__(self, pooled: _Counts, agents: list[_Counts]) -> None:
        shared = [min((h + 1.0) / (t + 1.0), 1.0) for h, t in zip(pooled.hits, pooled.trials, strict=True)]
        self._pooled = array("f", shared)
        self._own = [
            array(
                "f",
                [min((h + 2.0 * q) / (t + 2.0), 1.0) for h, t, q in zip(row.hits, row.trials, shared, strict=True)],
            )
            for row in agents
        ]

    def q(self, agent: int, kind: int, bypass: int) -> float:
        """The chance that the next call of (s, a) runs over a node of that kind, passed by `bypass` times."""
        row = self._own[agent] if 0 <= agent < len(self._own) else self._pooled
        return row[kind * _BYPASS + (bypass if bypass < _BYPASS else _BYPASS - 1)]


class ReuseTable:
    """q by agent, and pooled over all."""

    def __init__(self) -> None:
        self._pooled = _Counts()
        self._agents: list[_Counts] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the counts."""
        return 16 * _KINDS * (1 + len(self._agents))

    def hit(self, agent: int, kind: int, bypass: int) -> None:
        """A call of the node's session and agent ran over it again, after `bypass` that did not."""
        self._pooled.add(kind, bypass, True)
        self._row(agent).add(kind, bypass, True)

    def lost(self, agent: int, kind: int, bypass: int) -> None:
        """The node was evicted after `bypass` calls that did not run over it."""
        if bypass > 0:
            self._pooled.add(kind, bypass - 1, False)
            self._row(agent).add(kind, bypass - 1, False)

    def rates(self) -> Rates:
        """Every q as it stands."""
        return Rates(self._pooled, self._agents)

    def _row(self, agent: int) -> _Counts:
        while len(self._agents) <= agent:
            self._agents.append(_Counts())
        return self._agents[agent]
