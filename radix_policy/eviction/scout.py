"""`scout`, first form: CacheScout's survival per session, without the size factor.

private node: (p(agent; its session's current agent) + delta) * (exp(-lambda * age) + delta), 0 once the session ended
shared node:  the same with the best p over live sessions
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radix_policy.config import key
from radix_policy.eviction.base import EvictionPolicy
from radix_policy.nodes import Node
from radix_policy.survival import bfs_hops, hop_survival

if TYPE_CHECKING:
    from radix_policy.runtime import Request, World


@dataclass(frozen=True)
class ScoutConfig:
    """Keys of scout."""

    tau: float = key(0.05, "least probability that makes an edge", low=0, high=1)
    horizon: int = key(8, "horizon of the hop distance", low=1, high=1024, unit="hops")
    decay: float = key(0.001, "recency decay", low=0, high=10, unit="1/step")
    delta: float = key(0.05, "floor of both factors", low=0, high=1)


class ScoutPolicy(EvictionPolicy):
    """Survival of the agent in its own session."""

    name = "scout"
    Config = ScoutConfig

    def __init__(self, world: "World", config: Any = None) -> None:
        super().__init__(world, config)
        self._survival: dict[int, list[float]] = {}
        self._best: list[float] = []

    def on_match(self, request: "Request", path: Sequence[Node]) -> None:
        self._survival.clear()

    def refresh(self) -> None:
        """Best survival of each agent over the sessions that are not over."""
        agents = len(self.world.identifier.agents)
        self._best = [0.0] * agents
        for current in {s.agent: None for s in self.world.sessions if not s.ended and s.agent >= 0}:
            for agent, p in enumerate(self._from(current)):
                self._best[agent] = max(self._best[agent], p)

    def score(self, node: Node) -> float:
        agent, session = node.agent, self.world.sessions.get(node.session)
        survival = 0.0
        if node.shared:
            survival = self._best[agent] if 0 <= agent < len(self._best) else 0.0
        elif session is not None:
            if session.ended:
                return 0.0
            if session.agent >= 0 and agent >= 0:
                survival = self._from(session.agent)[agent]
        config = self.config
        age = self.world.clock.step - node.step
        return (survival + config.delta) * (math.exp(-config.decay * age) + config.delta)

    def _from(self, current: int) -> list[float]:
        known = self._survival.get(current)
        if known is None:
            transitions, agents = self.world.transitions, len(self.world.identifier.agents)
            transitions.ensure(agents)
            hops = bfs_hops(transitions.row, current, agents, self.config.tau, self.config.horizon)
            known = self._survival[current] = [hop_survival(h, self.config.horizon) for h in hops]
        return known
