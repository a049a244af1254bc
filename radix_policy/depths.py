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
