"""From transition probabilities to the survival of an agent's anchor (CacheScout section 3.3)."""

from collections import deque
from collections.abc import Callable, Sequence


def bfs_hops(row: Callable[[int], Sequence[float]], start: int, agents: int, tau: float, horizon: int) -> list[int]:
    """Eq. 7: hops from `start` over edges with P >= tau, per agent; `horizon` where farther or out of reach.

    `row(i)` gives P(. | i). The start itself is 0 hops away.
    """
    hops = [horizon] * agents
    if not 0 <= start < agents:
        return hops
    hops[start] = 0
    queue = deque([start])
    while queue:
        i = queue.popleft()
        if hops[i] + 1 >= horizon:
            continue
        for j, p in enumerate(row(i)):
            if p >= tau and hops[j] > hops[i] + 1:
                hops[j] = hops[i] + 1
                queue.append(j)
    return hops


def hop_survival(hops: int, horizon: int) -> float:
    """Eq. 8: 1 - min(E, E_max) / E_max, in [0, 1]."""
    return 1.0 - min(hops, horizon) / horizon
