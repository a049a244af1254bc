"""New sessions: with which agent they open, and how often they come."""

_KEEP = 0.98  # what is left of a count after the next start
_FIRST = 1.0 / 20  # rate of the interval's EWMA once there are 20 starts


class Starts:
    """Decayed counts of first agents, and the rate of new sessions."""

    def __init__(self) -> None:
        self.counts: dict[int, float] = {}
        self.seen = 0
        self._interval = 0.0
        self._last = 0.0

    def add(self, agent: int, seconds: float) -> None:
        """A session opened with that agent."""
        for known in self.counts:
            self.counts[known] *= _KEEP
        self.counts[agent] = self.counts.get(agent, 0.0) + 1.0
        if self.seen > 0:
            gap = max(seconds - self._last, 0.0)
            self._interval += max(_FIRST, 1.0 / self.seen) * (gap - self._interval)
        self.seen += 1
        self._last = max(seconds, self._last)

    def rate(self, seconds: float) -> float:
        """New sessions per second; a drought longer than the usual interval lowers it."""
        interval = max(self._interval, (seconds - self._last) if self.seen > 1 else 0.0)
        return 1.0 / interval if interval > 0 else 0.0
