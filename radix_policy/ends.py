"""When a session is over: the END hazard, learned under censoring.

    e_i      = (N[i][END] + K * s_i) / (N[i] + K)                            after an agent: the chain's counts fade
    s_i      = (ends_i + kappa * pooled) / (trials_i + kappa)                over all time
    e_ty(n)  = (ends + kappa' * prior) / (trials + kappa')                   by entry agent ty and turn bucket b(n)
               prior = half the type's mean, half the bucket's mean over all types
    ebar_ty  = the type's mean
    odds(e)  = odds(e_i) * odds(e_ty(n)) / odds(ebar_ty) * (what the output's length says, lengths.py)

An agent that never closes a session stays near e = 0, whatever the turn. Of later turns only the ratio of the odds of
going on is used (`odds_of`), for the mean agent.

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

import numpy as np
from numpy.typing import NDArray

from radix_policy.lengths import KINDS, UNKNOWN_LENGTH, LengthEvidence
from radix_policy.transitions import TransitionCounts

_SINGLE = 7  # turns 1..7 have a bucket each
_WIDTH = 4  # later ones share one by fours
BUCKETS = 40
_NEVER = 0.999  # no rate is above
_LONG = 300.0  # K: the faded counts are some 50 calls, too few for a rate of a tenth
_RARELY = 1e-4  # and none of a turn's below, so that ratios of odds stay finite


def bucket(turns: int) -> int:
    """b(n) for a session that made n >= 1 calls."""
    return turns - 1 if turns <= _SINGLE else min(_SINGLE + (turns - _SINGLE - 1) // _WIDTH, BUCKETS - 1)


_BUCKET_OF = (0, *(bucket(n) for n in range(1, _SINGLE + _WIDTH * BUCKETS)))  # b(n), n at most its length
_BY_TURN = np.array(_BUCKET_OF)
_LAST = len(_BUCKET_OF) - 1


class EndMark(NamedTuple):
    """What one END was counted under."""

    agent: int
    entry: int
    bucket: int
    kind: int
    row_mark: int


class Share(NamedTuple):
    """A share of an END of a session that waits."""

    agent: int
    entry: int
    turns: int
    weight: float
    kind: int = UNKNOWN_LENGTH


class EndModel:
    """END counts by agent (in the chain's rows), by entry agent and turn, and by length; shares of the undecided."""

    def __init__(self, transitions: TransitionCounts) -> None:
        self.transitions = transitions
        self.lengths = LengthEvidence()
        self._agents = 0
        self._ends = array("f")  # [entry * BUCKETS + bucket]; whole numbers, exact up to 2^24
        self._trials = array("f")
        self._odds = np.ones((0, BUCKETS), dtype=np.float32)
        self._factors = np.ones((0, BUCKETS), dtype=np.float32)  # odds(e_ty(n)) / odds(ebar_ty)
        self._agent_rates: list[float] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the counts and rates."""
        tables = self._odds.nbytes + self._factors.nbytes
        return 8 * len(self._ends) + tables + 8 * len(self._agent_rates) + self.lengths.nbytes

    def ensure(self, agents: int) -> None:
        """Make room for agent ids below `agents`."""
        more = agents - self._agents
        if more > 0:
            self.transitions.ensure(agents)
            self._agents = agents
            self._ends.extend([0.0] * (more * BUCKETS))
            self._trials.extend([0.0] * (more * BUCKETS))
            self.lengths.ensure(agents)

    def called_again(self, agent: int, entry: int, turns: int, kind: int = UNKNOWN_LENGTH) -> None:
        """A session that had made `turns` calls, the latest of `agent` with an output of that length, made one more."""
        if entry >= self._agents or agent >= self._agents:
            self.ensure(max(agent, entry) + 1)
        self.lengths.called_again(agent, kind)
        self._trials[entry * BUCKETS + _BUCKET_OF[turns if turns < _LAST else _LAST]] += 1.0

    def end(self, agent: int, entry: int, turns: int, kind: int = UNKNOWN_LENGTH) -> EndMark:
        """The session ended after that call; keep the mark to undo it."""
        self.ensure(max(agent, entry) + 1)
        self.lengths.end(agent, kind)
        b = bucket(turns)
        self._ends[entry * BUCKETS + b] += 1.0
        self._trials[entry * BUCKETS + b] += 1.0
        return EndMark(agent, entry, b, kind, self.transitions.add_end(agent))

    def undo(self, mark: EndMark) -> None:
        """It had not ended after all: as if `end` had never been called."""
        at = mark.entry * BUCKETS + mark.bucket
        if self._ends[at] > 0:  # else it was forgotten
            self._ends[at] -= 1.0
            self._trials[at] -= 1.0
        self.lengths.undo(mark.agent, mark.kind)
        self.transitions.undo_end(mark.agent, mark.row_mark)

    def forget(self, agent: int) -> None:
        """The id goes to another agent. The chain's counts fade by themselves."""
        if agent < self._agents:
            self.lengths.forget(agent)
            for counts in (self._ends, self._trials):
                counts[agent * BUCKETS : (agent + 1) * BUCKETS] = array("f", bytes(4 * BUCKETS))

    def counts(self, entry: int, turns: int) -> tuple[float, float]:
        """(ends, trials) counted for that type and turn, shares left out."""
        if not 0 <= entry < self._agents:
            return 0.0, 0.0
        at = entry * BUCKETS + bucket(turns)
        return self._ends[at], self._trials[at]

    # ---- rates ----

    def refresh(self, waiting: Iterable[Share] = (), agent_prior: float = 2.0, turn_prior: float = 3.0) -> None:
        """Rebuild all rates from the counts and the shares of the sessions that wait."""
        chain = self.transitions
        # 0 would leave a rate without any evidence undefined
        agent_prior, turn_prior = max(agent_prior, 1e-9), max(turn_prior, 1e-9)
        agents = len(chain)
        self.ensure(agents)
        soft = [0.0] * agents
        by_length: dict[int, float] = {}
        ends, trials = _matrix(self._ends), _matrix(self._trials)
        for share in waiting:
            soft[share.agent] += share.weight
            at = share.agent * KINDS + share.kind
            by_length[at] = by_length.get(at, 0.0) + share.weight
            b = bucket(share.turns)
            ends[share.entry, b] += share.weight
            trials[share.entry, b] += share.weight
        row_ends = [chain.ends(i) + soft[i] for i in range(agents)]
        row_all = [chain.total(i) + row_ends[i] for i in range(agents)]
        pooled = sum(row_ends) / max(sum(row_all), 1.0)
        self._agent_rates = []
        for agent in range(agents):
            over, calls = self.lengths.sums(agent)
            long = (over + soft[agent] + agent_prior * pooled) / (calls + soft[agent] + agent_prior)
            recent = (row_ends[agent] + _LONG * long) / (row_all[agent] + _LONG)
            self._agent_rates.append(min(recent, _NEVER))
        self.lengths.refresh(by_length)
        # columns first, then what is left: sums in index order, whatever the machine's vectors are
        all_ends, all_trials = np.add.reduce(ends, axis=0), np.add.reduce(trials, axis=0)
        overall = sum(all_ends.tolist()) / max(sum(all_trials.tolist()), 1.0)
        by_bucket = (all_ends + turn_prior * overall) / (all_trials + turn_prior)
        own_ends, own_trials = np.add.reduce(ends.T, axis=0), np.add.reduce(trials.T, axis=0)
        means = (own_ends + turn_prior * overall) / (own_trials + turn_prior)
        prior = (means[:, None] + by_bucket[None, :]) / 2
        rates = np.minimum((ends + turn_prior * prior) / (trials + turn_prior), _NEVER)
        means = np.minimum(means, _NEVER)[:, None]
        self._odds = ((1.0 - rates) / (1.0 - means)).astype(np.float32)
        rates, means = np.maximum(rates, _RARELY), np.maximum(means, _RARELY)
        self._factors = (rates / (1.0 - rates) * (1.0 - means) / means).astype(np.float32)

    def agent_rate(self, agent: int) -> float:
        """e_i of the last refresh."""
        return self._agent_rates[agent] if 0 <= agent < len(self._agent_rates) else 0.0

    def odds_of(self, entry: int, turns: int, steps: int) -> NDArray[np.float64]:
        """The odds after turns `turns`, `turns` + 1, ... (`steps` of them)."""
        if not 0 <= entry < len(self._odds):
            return np.ones(steps)
        at = np.minimum(np.arange(turns, turns + steps), len(_BY_TURN) - 1)
        return self._odds[entry][_BY_TURN[at]].astype(np.float64)

    def rate(self, agent: int, entry: int, turns: int, kind: int = UNKNOWN_LENGTH) -> float:
        """e: the chance that a session ends after this call; `entry` -1: whatever its type and turn."""
        rate = self.agent_rate(agent)
        factor = self.lengths.factor(agent, kind)
        if 0 <= entry < len(self._factors):
            factor *= float(self._factors[entry, bucket(turns)])
        odds = rate / (1.0 - rate) * factor
        return min(odds / (1.0 + odds), _NEVER)


def _matrix(counts: "array[float]") -> NDArray[np.float64]:
    """A copy, [entry][bucket]."""
    return np.array(counts, dtype=np.float64).reshape(-1, BUCKETS)
