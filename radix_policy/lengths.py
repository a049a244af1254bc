"""What the length of an output says about END: the answer that closes a session often has a length of its own.

    r_i    = ends_i / trials_i                                        agent i, all lengths together
    r_ib   = (ends_ib + kappa * r_i) / (trials_ib + kappa)            output length in bucket b (powers of two)
    factor = 1 + w * (odds(r_ib) / odds(r_i) - 1)                     of the odds of END (ends.py)

with w = 1 / (1 + exp(1 - L)) the weight that lengths have earned, by the evidence for them

    L = sum over i, b of   ends * log(r'_ib / r_i) + (trials - ends) * log((1 - r''_ib) / (1 - r_i))

where r' and r'' leave out the call that they are the chance of, so that chance is no evidence. Only the counts of this
table are compared, which do not fade, so that the factor is about lengths alone. Where lengths say nothing, w is small.
All follows from the counts: an END that is taken back leaves no trace.
"""

from array import array
from collections.abc import Mapping
from math import exp, log

KINDS = 12  # buckets: 0 tokens (unknown, aborted), 1, 2..3, 4..7, ..., 1024 and more
UNKNOWN_LENGTH = 0
_KAPPA = 6.0
_START = -1.0  # L before anything was seen
_LEAST, _MOST = 0.001, 0.999  # no rate is outside


def length_kind(tokens: int) -> int:
    """b of an output of that many tokens."""
    return min(tokens.bit_length(), KINDS - 1) if tokens > 0 else UNKNOWN_LENGTH


class LengthEvidence:
    """Counts by agent and length, and what they are worth."""

    def __init__(self) -> None:
        self.weight = 0.0  # w, as of the last refresh
        self._ends = array("d")  # [agent * KINDS + kind]
        self._trials = array("d")
        self._ratios = array("f")  # odds(r_ib) / odds(r_i), as of the last refresh

    @property
    def nbytes(self) -> int:
        """Bytes of the counts and ratios."""
        return 8 * (len(self._ends) + len(self._trials)) + 4 * len(self._ratios)

    def ensure(self, agents: int) -> None:
        """Make room for agent ids below `agents`."""
        more = [0.0] * (agents * KINDS - len(self._ends))
        self._ends.extend(more)
        self._trials.extend(more)

    def called_again(self, agent: int, kind: int) -> None:
        """Such a call was followed by another one."""
        self._trials[agent * KINDS + kind] += 1.0

    def end(self, agent: int, kind: int) -> None:
        """Such a call was followed by END."""
        self._trials[agent * KINDS + kind] += 1.0
        self._ends[agent * KINDS + kind] += 1.0

    def undo(self, agent: int, kind: int) -> None:
        """It was not, after all: as if `end` had never been called."""
        at = agent * KINDS + kind
        if self._ends[at] > 0:  # else it was forgotten
            self._trials[at] -= 1.0
            self._ends[at] -= 1.0

    def forget(self, agent: int) -> None:
        """The id goes to another agent."""
        for counts in (self._ends, self._trials):
            counts[agent * KINDS : (agent + 1) * KINDS] = array("d", bytes(8 * KINDS))

    def sums(self, agent: int) -> tuple[float, float]:
        """(ends, trials) of an agent, all lengths together, since the start."""
        first, last = agent * KINDS, (agent + 1) * KINDS
        return sum(self._ends[first:last]), sum(self._trials[first:last])

    def refresh(self, shares: Mapping[int, float]) -> None:
        """Rebuild the ratios and w; `shares`: of undecided ENDs, by agent * KINDS + kind."""
        evidence, ratios = _START, array("f", [1.0]) * len(self._ends)
        for first in range(0, len(self._ends), KINDS):
            known = []  # (place, ends, trials) of the lengths that were seen
            for at in range(first + UNKNOWN_LENGTH + 1, first + KINDS):
                share = shares.get(at, 0.0)
                trials = self._trials[at] + share
                if trials > 0:
                    known.append((at, self._ends[at] + share, trials))
            if len(known) < 2:
                continue  # all of one length
            rate = _inside(sum(e for _, e, _ in known) / sum(n for _, _, n in known))
            odds = (1.0 - rate) / rate
            for at, ends, trials in known:
                own = _inside((ends + _KAPPA * rate) / (trials + _KAPPA))
                ratios[at] = own / (1.0 - own) * odds
                others = max(trials - 1.0, 0.0) + _KAPPA
                if ends > 0:
                    evidence += ends * log(_inside((max(ends - 1.0, 0.0) + _KAPPA * rate) / others) / rate)
                evidence += (trials - ends) * log((1.0 - _inside((ends + _KAPPA * rate) / others)) / (1.0 - rate))
        self._ratios = ratios
        self.weight = 1.0 / (1.0 + exp(min(-evidence, 50.0)))

    def factor(self, agent: int, kind: int) -> float:
        """Of the odds of END after a call of that agent and length; 1 where nothing is known."""
        at = agent * KINDS + kind
        if kind == UNKNOWN_LENGTH or not 0 <= at < len(self._ratios):
            return 1.0
        return 1.0 + self.weight * (self._ratios[at] - 1.0)


def _inside(rate: float) -> float:
    return _LEAST if rate < _LEAST else _MOST if rate > _MOST else rate
