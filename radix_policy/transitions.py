"""Who is called after whom: an online first-order Markov chain (CacheScout section 3.2) with an END state.

One chain may be fed by many sessions, each walking it on its own, or by one global walker (as published). Counts are
doubles that may decay; agents are small ints and rows grow as agents appear, so state is O(agents^2).

A count fades by `decay` with every later transition of its row. It is stored undecayed: a new count adds `unit`, and
`unit` grows by 1 / decay, so that an update costs O(1) and an END can be taken back at what it is worth by then.
"""

import math
from array import array

_RESCALE = 1e120  # a row's unit may grow to this


class TransitionCounts:
    """Counts n(i, j) and the probabilities and the predictability that follow from them."""

    def __init__(self, epsilon: float = 0.0, decay: float = 1.0) -> None:
        self.epsilon = epsilon  # eq. 3's smoothing constant
        self.decay = decay  # factor on row i before each of its updates; 1 keeps everything
        self.version = 0  # transitions counted so far
        self._agents = 0
        self._width = 0  # of a row in `_cells`, at least the number of agents
        self._cells = array("d")
        self._totals = array("d")  # sum of each row
        self._ends = array("d")
        self._units = array("d")
        self._updates = array("q")

    def __len__(self) -> int:
        """Number of agents with a row."""
        return self._agents

    @property
    def nbytes(self) -> int:
        """Bytes of the counts."""
        return 8 * (len(self._cells) + 4 * self._agents)

    def ensure(self, agents: int) -> None:
        """Make rows and columns for agent ids below `agents`."""
        more = agents - self._agents
        if more <= 0:
            return
        if agents > self._width:
            width = agents + agents // 8
            cells = array("d", bytes(8 * width * width))
            for i in range(self._agents):
                cells[i * width : i * width + self._width] = self._cells[i * self._width : (i + 1) * self._width]
            self._cells, self._width = cells, width
        self._agents = agents
        self._totals.extend([0.0] * more)
        self._ends.extend([0.0] * more)
        self._units.extend([1.0] * more)
        self._updates.extend([0] * more)

    def add(self, source: int, target: int, weight: float = 1.0) -> None:
        """Count one transition; a negative weight takes one back (never below zero)."""
        units, cells = self._units, self._cells
        if source >= self._agents or target >= self._agents:
            self.ensure(max(source, target) + 1)
            cells = self._cells
        if weight > 0:
            self.version += 1
            if self.decay != 1.0:
                self._updates[source] += 1
                units[source] /= self.decay
                if units[source] > _RESCALE:
                    self._rescale(source)
        at, more = source * self._width + target, weight * units[source]
        if more < 0.0 and cells[at] + more < 0.0:
            more = -cells[at]
        cells[at] += more
        self._totals[source] += more

    def add_end(self, source: int) -> int:
        """Count one END after `source`; returns the mark that `undo_end` needs. An END decays nothing itself."""
        self.ensure(source + 1)
        self._ends[source] += self._units[source]
        return self._updates[source]

    def undo_end(self, source: int, mark: int) -> None:
        """Take an END back: as if it had never been counted."""
        worth = self._units[source] * self.decay ** (self._updates[source] - mark)
        left = self._ends[source] - worth
        self._ends[source] = left if left > 1e-9 * self._units[source] else 0.0

    def count(self, source: int, target: int) -> float:
        """n(source, target), 0 for agents never seen."""
        if 0 <= source < self._agents and 0 <= target < self._agents:
            return self._cells[source * self._width + target] / self._units[source]
        return 0.0

    def ends(self, source: int) -> float:
        """n(source, END), 0 for an agent never seen."""
        return self._ends[source] / self._units[source] if 0 <= source < self._agents else 0.0

    def total(self, source: int) -> float:
        """n(source), END left out."""
        return self._totals[source] / self._units[source] if 0 <= source < self._agents else 0.0

    def count_of_total(self, source: int, target: int) -> tuple[float, float]:
        """n(source, target) and n(source), END left out, of agents that have rows."""
        unit = self._units[source]
        return self._cells[source * self._width + target] / unit, self._totals[source] / unit

    def counts(self, source: int) -> list[float]:
        """Row `source` of n, END left out."""
        unit = self._units[source]
        return [n / unit for n in self._row(source)]

    def row(self, source: int) -> list[float]:
        """Eq. 3 and 4: P(next = j | source, no END); uniform when nothing was seen and epsilon > 0."""
        if not 0 <= source < self._agents:
            return [0.0] * self._agents
        row, unit = self._row(source), self._units[source]
        total = sum(row) / unit + self.epsilon * len(row)
        if total <= 0:
            return [0.0] * len(row)
        return [(n / unit + self.epsilon) / total for n in row]

    def likeliest(self, source: int) -> tuple[int, float]:
        """Eq. 5: the most likely next agent (the lowest id among equals) and its probability; (-1, 0) when unseen."""
        best, p_best = -1, 0.0
        for j, p in enumerate(self.row(source)):
            if p > p_best:
                best, p_best = j, p
        return best, p_best

    def predictability(self) -> float:
        """Eq. 2: R = 1 - H(next | current) / H(next) over the counts; 0 when nothing is uncertain or seen."""
        rows = [self.counts(i) for i in range(self._agents)]
        total = sum(map(sum, rows))
        if total <= 0:
            return 0.0
        columns = [sum(row[j] for row in rows) for j in range(len(rows))]
        h_next = _entropy(columns, total)
        if h_next <= 0:
            return 0.0
        h_cond = sum(s / total * _entropy(row, s) for row in rows if (s := sum(row)) > 0)
        return 1.0 - h_cond / h_next

    def _row(self, source: int) -> "array[float]":
        at = source * self._width
        return self._cells[at : at + self._agents]

    def _rescale(self, source: int) -> None:
        unit, at = self._units[source], source * self._width
        for j in range(at, at + self._agents):
            self._cells[j] /= unit
        self._ends[source] /= unit
        self._totals[source] = sum(self._row(source))
        self._units[source] = 1.0


def _entropy(counts: list[float], total: float) -> float:
    return -sum(n / total * math.log2(n / total) for n in counts if n > 0)
