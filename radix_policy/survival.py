"""From transition probabilities to the survival of an agent's anchor: by hops as published (CacheScout section 3.3,
eq. 7 and 8), and the exact first-passage law that eq. 6 asks for."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


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


def first_passage(p: NDArray[np.float64], steps: int) -> NDArray[np.float32]:
    """H[k-1, i, j] = P(the walk that stands at i is at j for the first time after exactly k steps), k = 1..steps.

    H_1 = P, H_k(i, j) = sum over l != j of P(i, l) H_{k-1}(l, j). Rows of `p` may sum to less than 1 (END absorbs).
    By numpy's own loops (einsum), not by BLAS and its threads, so that every rank gets the same bits.
    """
    agents = len(p)
    h = np.empty((steps, agents, agents), dtype=np.float32)
    current = p
    h[0] = p
    diagonal = np.arange(agents)
    for k in range(1, steps):
        onward = current.copy()
        onward[diagonal, diagonal] = 0.0
        current = np.einsum("il,lj->ij", p, onward)
        h[k] = current
    return h
