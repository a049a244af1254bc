"""Who is called after whom: an online first-order Markov chain (CacheScout section 3.2).

One chain may be fed by many sessions, each walking it on its own, or by one global walker (as published). Counts are
doubles that may decay; agents are small ints and rows grow as agents appear, so state is O(agents^2).
"""

import math
from array import array


class TransitionCounts:
    """Counts n(i, j) and the probabilities and the predictability that follow from them."""

    def __init__(self, epsilon: float = 0.0, decay: float = 1.0) -> None:
        self.epsilon = epsilon  # eq. 3's smoothing constant
        self.decay = decay  # factor on row i before each of its updates; 1 keeps everything
        self._rows: list[array[float]] = []

    def __len__(self) -> int:
        """Number of agents with a row."""
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the counts."""
        return sum(row.itemsize * len(row) for row in self._rows)

    def ensure(self, agents: int) -> None:
        """Make rows and columns for agent ids below `agents`."""
        have = len(self._rows)
        if agents <= have:
            return
        for row in self._rows:
            row.extend([0.0] * (agents - have))
        self._rows.extend(array("d", bytes(8 * agents)) for _ in range(agents - have))

    def add(self, source: int, target: int, weight: float = 1.0) -> None:
        """Count one transition; a negative weight takes one back (never below zero)."""
        self.ensure(max(source, target) + 1)
        row = self._rows[source]
        if self.decay != 1.0 and weight > 0:
            for j in range(len(row)):
                row[j] *= self.decay
        row[target] = max(0.0, row[target] + weight)

    def count(self, source: int, target: int) -> float:
        """n(source, target), 0 for agents never seen."""
        if 0 <= source < len(self._rows) and 0 <= target < len(self._rows):
            return self._rows[source][target]
        return 0.0

    def row(self, source: int) -> list[float]:
        """Eq. 3 and 4: P(next = j | source) for every agent j; uniform when nothing was seen and epsilon > 0."""
        if not 0 <= source < len(self._rows):
            return [0.0] * len(self._rows)
        row = self._rows[source]
        total = sum(row) + self.epsilon * len(row)
        if total <= 0:
            return [0.0] * len(row)
        return [(n + self.epsilon) / total for n in row]

    def likeliest(self, source: int) -> tuple[int, float]:
        """Eq. 5: the most likely next agent (the lowest id among equals) and its probability; (-1, 0) when unseen."""
        best, p_best = -1, 0.0
        for j, p in enumerate(self.row(source)):
            if p > p_best:
                best, p_best = j, p
        return best, p_best

    def predictability(self) -> float:
        """Eq. 2: R = 1 - H(next | current) / H(next) over the raw counts; 0 when nothing is uncertain or seen."""
        total = sum(map(sum, self._rows))
        if total <= 0:
            return 0.0
        columns = [sum(row[j] for row in self._rows) for j in range(len(self._rows))]
        h_next = _entropy(columns, total)
        if h_next <= 0:
            return 0.0
        h_cond = sum(s / total * _entropy(row, s) for row in self._rows if (s := sum(row)) > 0)
        return 1.0 - h_cond / h_next


def _entropy(counts: "list[float] | array[float]", total: float) -> float:
    return -sum(n / total * math.log2(n / total) for n in counts if n > 0)
