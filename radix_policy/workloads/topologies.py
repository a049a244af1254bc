"""Who follows whom, and when sessions end: the true laws of the generated workloads."""

from collections.abc import Sequence
from dataclasses import dataclass

from radix_policy.workloads.draws import stream

Row = tuple[float, ...]
Rows = tuple[Row, ...]

SIX = ("planner", "researcher", "coder", "reviewer", "tester", "judge")
PREFERENCES = ((1, 2), (2, 0), (3, 4), (2, 5), (3, 2), (0, 1))  # first and second successor of each of the six


@dataclass(frozen=True)
class EndLaw:
    """P(the session ends right after its turn `turn`, which `agent` took | it got that far)."""

    by_turn: tuple[float, ...]  # entry n - 1 is for turn n; the last entry stands for all later turns
    agent: int = -1  # at this agent the session may end early,
    after: int = 0  # once it has had more turns than this,
    early: float = 0.0  # with this probability

    def __call__(self, turn: int, agent: int = -1) -> float:
        """The probability; turns count from 1."""
        end = self.by_turn[min(turn, len(self.by_turn)) - 1]
        if agent == self.agent and agent >= 0 and turn > self.after:
            end = 1 - (1 - end) * (1 - self.early)
        return end


def uniform_turns(low: int, high: int, agent: int = -1, after: int = 0, early: float = 0.0) -> EndLaw:
    """Session lengths uniform in [low, high] turns (before any early end)."""
    hazard = [0.0] * (low - 1) + [1 / (high + 1 - n) for n in range(low, high + 1)]
    return EndLaw(tuple(hazard), agent, after, early)


def geometric_turns(mean: float) -> EndLaw:
    """Session length 1 + G, G geometric on 0, 1, 2, ... with this mean."""
    return EndLaw((1 / (1 + mean),))


def cycle(agents: int, step: int = 1) -> Rows:
    """Agent i is always followed by i + step."""
    return tuple(tuple(float(j == (i + step) % agents) for j in range(agents)) for i in range(agents))


def chain(agents: int) -> Rows:
    """i to i + 1 (0.95) or i - 1 (0.05)."""
    return tuple(
        tuple(0.95 if j == (i + 1) % agents else 0.05 if j == (i - 1) % agents else 0.0 for j in range(agents))
        for i in range(agents)
    )


def debate() -> Rows:
    """Coder and reviewer in turn, now and then a judge."""
    to_coder, to_reviewer = (0.0, 0.0, 1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    reviewer, judge = (0.0, 0.0, 0.80, 0.0, 0.0, 0.20), (0.01, 0.02, 0.97, 0.0, 0.0, 0.0)
    return (to_coder, to_coder, to_reviewer, reviewer, to_coder, judge)


def preferring(first: Sequence[float], preferences: Sequence[tuple[int, int]] = PREFERENCES) -> Rows:
    """Row i: first[i] to its first preference, 0.93 less that to its second, 0.01 to itself, 0.02 to each other."""
    rows = []
    for i, (one, two) in enumerate(preferences):
        row = [0.01 if j == i else 0.02 for j in range(len(preferences))]
        row[one], row[two] = first[i], 0.93 - first[i]
        rows.append(_normalised(row))
    return tuple(rows)


def selector() -> Rows:
    """A selector with clear preferences: 0.80 and 0.13."""
    return preferring([0.80] * len(PREFERENCES))


def random_rows(agents: int = 6) -> Rows:
    """Uniform over the others times a fixed factor in 0.6-1.4."""
    rng = stream("random-rows", 1)
    return tuple(
        _normalised([0.0 if j == i else 0.6 + 0.8 * rng.random() for j in range(agents)]) for i in range(agents)
    )


def supervisor(weights: Sequence[float] = (0.36, 0.26, 0.18, 0.12, 0.08)) -> Rows:
    """Agent 0 alternates with one of the others, drawn with these weights."""
    back = (1.0,) + (0.0,) * len(weights)
    return ((0.0, *weights), *([back] * len(weights)))


def _normalised(row: Sequence[float]) -> Row:
    total = sum(row)
    return tuple(p / total for p in row)
