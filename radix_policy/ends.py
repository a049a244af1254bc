"""When a session is over: the END hazard, learned under censoring.

    e_i      = (N[i][END] + kappa * pooled) / (N[i] + kappa)                 after an agent
    e_ty(n)  = (ends + kappa' * prior) / (trials + kappa')                   by entry agent ty and turn bucket b(n)
               prior = half the type's mean, half the bucket's mean over all types
    ebar_ty  = the type's mean
    e        = 1 - (1 - e_i) * (1 - e_ty(n)) / (1 - ebar_ty)

A trial is a call after which it was seen what the session did: call again, or end (closed, or silent for longer than
`tend` times the 95 % quantile of the gaps). Those still waiting are censored, and the longer gaps of the ended ones
would bias every rate down. So each waiting session adds a share of an END (`soften`):

    weight (1 - alive) * (1 - S(t)) of an END, alive = (1 - e) S(t) / ((1 - e) S(t) + e)

In a cohort of age t the survivors already seen to call are (1 - e)(1 - S), and these shares add up to e (1 - S): the
ratio is e whatever t is. The shares are rebuilt at every refresh and vanish when all sessions are resolved.
"""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from radix_policy.transitions import TransitionCounts

_SINGLE = 7  # turns 1..7 have a bucket each
_WIDTH = 4  # later ones share one by fours
BUCKETS = 40
_NEVER = 0.999  # no rate is above


def bucket(turns: int) -> int:
    """b(n) for a session that made n >= 1 calls."""
    return turns - 1 if turns <= _SINGLE else min(_SINGLE + (turns - _SINGLE - 1) // _WIDTH, BUCKETS - 1)


class EndMark(NamedTuple):
    """What one END was counted under."""

    agent: int
    entry: int
    bucket: int
    row_mark: int


class Share(NamedTuple):
    """A share of an END of a session that waits."""

    agent: int
    entry: int
    turns: int
    weight: float


class EndModel:
    """END counts by agent (in the chain's rows) and by entry agent and turn, with the shares of the undecided."""

    def __init__(self, transitions: TransitionCounts, *, by_turn: bool = True) -> None:
        self.transitions = transitions
        self.by_turn = by_turn  # False: by agent only
        self._ends: list[array[float]] = []  # [entry][bucket]
        self._trials: list[array[float]] = []
        self._rates: list[array[float]] = []
        self._means: list[float] = []
        self._agent_rates: list[float] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the counts and rates."""
        return 8 * 3 * BUCKETS * len(self._ends) + 8 * 3 * len(self._agent_rates)

    def ensure(self, agents: int) -> None:
        """Make room for agent ids below `agents`."""
        self.transitions.ensure(agents)
        for table in (self._ends, self._trials):
            while len(table) < agents:
                table.append(array("d", bytes(8 * BUCKETS)))

    def called_again(self, entry: int, turns: int) -> None:
        """A session of that type that had made `turns` calls made one more."""
        self.ensure(entry + 1)
        self._trials[entry][bucket(turns)] += 1.0

    def end(self, agent: int, entry: int, turns: int) -> EndMark:
        """The session ended after that call; keep the mark to undo it."""
        self.ensure(max(agent, entry) + 1)
        b = bucket(turns)
        self._ends[entry][b] += 1.0
        self._trials[entry][b] += 1.0
        return EndMark(agent, entry, b, self.transitions.add_end(agent))

    def undo(self, mark: EndMark) -> None:
        """It had not ended after all: as if `end` had never been called."""
        self._ends[mark.entry][mark.bucket] -= 1.0
        self._trials[mark.entry][mark.bucket] -= 1.0
        self.transitions.undo_end(mark.agent, mark.row_mark)

    def counts(self, entry: int, turns: int) -> tuple[float, float]:
        """(ends, trials) counted for that type and turn, shares left out."""
        if not 0 <= entry < len(self._ends):
            return 0.0, 0.0
        return self._ends[entry][bucket(turns)], self._trials[entry][bucket(turns)]

    # ---- rates ----

    def refresh(self, waiting: Iterable[Share] = (), agent_prior: float = 2.0, turn_prior: float = 3.0) -> None:
        """Rebuild all rates from the counts and the shares of the sessions that wait."""
        chain = self.transitions
        agents = len(chain)
        self.ensure(agents)
        soft = [0.0] * agents
        ends, trials = [row[:] for row in self._ends], [row[:] for row in self._trials]
        for share in waiting:
            soft[share.agent] += share.weight
            b = bucket(share.turns)
            ends[share.entry][b] += share.weight
            trials[share.entry][b] += share.weight
        row_ends = [chain.ends(i) + soft[i] for i in range(agents)]
        row_all = [sum(chain.counts(i)) + row_ends[i] for i in range(agents)]
        pooled = sum(row_ends) / max(sum(row_all), 1.0)
        self._agent_rates = [
            min((e + agent_prior * pooled) / (n + agent_prior), _NEVER) for e, n in zip(row_ends, row_all, strict=True)
        ]
        all_ends, all_trials = sum(map(sum, ends)), sum(map(sum, trials))
        overall = all_ends / max(all_trials, 1.0)
        by_bucket = []
        for b in range(BUCKETS):
            e, n = sum(row[b] for row in ends), sum(row[b] for row in trials)
            by_bucket.append((e + turn_prior * overall) / (n + turn_prior))
        self._means, self._rates = [], []
        for e_row, n_row in zip(ends, trials, strict=True):
            mean = (sum(e_row) + turn_prior * overall) / (sum(n_row) + turn_prior)
            self._means.append(min(mean, _NEVER))
            rates = (
                min((e + turn_prior * (mean + by_bucket[b]) / 2) / (n + turn_prior), _NEVER)
                for b, (e, n) in enumerate(zip(e_row, n_row, strict=True))
            )
            self._rates.append(array("d", rates))

    def agent_rate(self, agent: int) -> float:
        """e_i of the last refresh."""
        return self._agent_rates[agent] if 0 <= agent < len(self._agent_rates) else 0.0

    def odds(self, entry: int, turns: int) -> float:
        """(1 - e_ty(n)) / (1 - ebar_ty): how much likelier than on average a session goes on after this turn."""
        if not self.by_turn or not 0 <= entry < len(self._rates):
            return 1.0
        return (1.0 - self._rates[entry][bucket(turns)]) / (1.0 - self._means[entry])

    def rate(self, agent: int, entry: int, turns: int) -> float:
        """e: the chance that a session ends after this call."""
        return min(max(1.0 - (1.0 - self.agent_rate(agent)) * self.odds(entry, turns), 0.0), _NEVER)
