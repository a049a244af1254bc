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


def first_passage(p: NDArray[np.float64], steps: int, agent_of: Sequence[int] | None = None) -> NDArray[np.float32]:
    """H[k-1, s, j] = P(the walk that stands at s is at agent j for the first time after exactly k steps), k = 1..steps.

    H_1(s, j) = P(s, states of j), H_k(s, j) = sum over the states l that are not j's of P(s, l) H_{k-1}(l, j). Rows of
    `p` may sum to less than 1 (END absorbs). `agent_of`: each state's agent, all of 0 to the largest; by default every
    state is an agent of its own. By numpy's own loops (einsum), not by BLAS and its threads, so that every rank gets
    the same bits.
    """
    states = len(p)
    owner = np.arange(states) if agent_of is None else np.asarray(agent_of)
    agents = int(owner.max()) + 1 if states else 0
    own = np.zeros((states, agents))
    own[np.arange(states), owner] = 1.0
    h = np.empty((steps, states, agents), dtype=np.float32)
    current = p if agent_of is None else np.einsum("sl,lj->sj", p, own)
    h[0] = current
    others = 1.0 - own
    for k in range(1, steps):
        current = np.einsum("sl,lj->sj", p, current * others)
        h[k] = current
    return h
