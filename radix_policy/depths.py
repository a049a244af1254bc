"""Where an agent's anchor ends: the depth at which its sessions part.

A prompt that was recomputed as a whole is one node of the tree: anchor and conversation together, run over by one
session only. Its tail dies with the session, its head serves every other one. The boundary is learned per agent from
first visits: a session that calls the agent for the first time shares with others exactly the anchor, and where its
match ends at a branch of the tree (not where something was evicted), that is the depth of one branch.

The depth of an agent is the one seen most often of the last ones (counts fade by 10 % each; the deeper one wins
a tie); at most 8 depths are told apart.
"""

_FADE = 0.9
_MOST = 8
_ENOUGH = 1.5  # faded counts before a depth is believed: two sightings


class AnchorDepths:
    """The learned depth of each agent's anchor, in tokens."""

    def __init__(self) -> None:
        self._seen: list[dict[int, float]] = []
        self._depth: list[int] = []

    def parted(self, agent: int, depth: int) -> None:
        """A new session of the agent left the common path at this depth."""
        while len(self._seen) <= agent:
            self._seen.append({})
            self._depth.append(0)
        seen = self._seen[agent]
        for known in seen:
            seen[known] *= _FADE
        seen[depth] = seen.get(depth, 0.0) + 1.0
        if len(seen) > _MOST:
            del seen[min(seen, key=lambda d: (seen[d], d))]
        best = max(seen, key=lambda d: (seen[d], d))
        self._depth[agent] = best if seen[best] >= _ENOUGH else 0

    def of(self, agent: int) -> int:
        """Tokens of the agent's anchor; 0 while unknown."""
        return self._depth[agent] if 0 <= agent < len(self._depth) else 0


class DeadTails:
    """How many tokens at the end of an agent's prompts the session's next call of it does not take up.

    A closing instruction ("now choose the next speaker") moves on with every call. Learned per agent from calls that
    parted from the prompt before inside it; of the last 16 the lower fifth counts, so that a rare rewrite of the whole
    tail says nothing. Fewer than `least` tokens count as none.
    """

    def __init__(self, least: int = 16) -> None:
        self.least = least
        self._seen: list[list[int]] = []
        self._tail: list[int] = []

    def saw(self, agent: int, tokens: int) -> None:
        """A call parted that many tokens before the end of the prompt before; 0 when it took up all of it."""
        while len(self._seen) <= agent:
            self._seen.append([])
            self._tail.append(0)
        seen = self._seen[agent]
        seen.append(max(tokens, 0))
        if len(seen) > 16:
            del seen[0]
        if len(seen) >= 4:
            low = sorted(seen)[len(seen) // 5]
            self._tail[agent] = low if low >= self.least else 0

    def of(self, agent: int) -> int:
        """Dead tokens at the end of the agent's prompts."""
        return self._tail[agent] if 0 <= agent < len(self._tail) else 0
