"""KVFlow (NeurIPS 2025, arXiv:2507.07400): steps to execution on a declared agent graph.

A node that belongs to agent j of a session whose latest call was agent i runs again in d(i, j) steps, the fewest edges
of the declared graph from i to j (at least 1; for i itself the shortest way back). A node that several sessions use
takes the fewest steps over all live sessions. Score: 1 / (1 + steps); 0 where nothing is declared or out of reach.

KVFlow is told the graph and nothing else: it does not know that a session is over unless a client says so
(`kvflow+END` in the simulator is told with each session's last call).
"""

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radix_policy.config import ConfigError, key
from radix_policy.eviction.base import EvictionPolicy
from radix_policy.nodes import Node

if TYPE_CHECKING:
    from radix_policy.runtime import World

_FAR = float("inf")


@dataclass(frozen=True)
class KvflowConfig:
    """Keys of kvflow."""

    graph: dict = key({}, "agent name -> its successors (a list, or an object of name -> probability)")  # noqa: RUF009
    tau: float = key(0.05, "least probability that makes an edge, where probabilities are given", low=0, high=1)


class KvflowPolicy(EvictionPolicy):
    """Furthest from execution first."""

    name = "kvflow"
    Config = KvflowConfig

    def __init__(self, world: "World", config: Any = None) -> None:
        super().__init__(world, config)
        self._steps = {name: self._reach(name) for name in self._edges()}
        self._names: list[str] = []  # by agent id
        self._nearest: dict[int, float] = {}  # fewest steps over live sessions, by agent, for one eviction call

    def refresh(self) -> None:
        agents = self.world.identifier.agents
        for agent in range(len(self._names), len(agents)):
            self._names.append(agents.name(agent).removeprefix("tag:"))
        self._nearest = {}
        for current in {s.agent: None for s in self.world.sessions if not s.ended and s.agent >= 0}:
            for agent in range(1, len(self._names)):
                steps = self._between(current, agent)
                if steps < self._nearest.get(agent, _FAR):
                    self._nearest[agent] = steps

    def score(self, node: Node) -> float:
        if node.shared:
            return 1.0 / (1.0 + self._nearest.get(node.agent, _FAR))
        session = self.world.sessions.get(node.session)
        if session is None or session.ended or session.agent < 0 or node.agent < 0:
            return 0.0
        return 1.0 / (1.0 + self._between(session.agent, node.agent))

    def class_of(self, node: Node) -> Hashable | None:
        return ("shared", node.agent) if node.shared else (node.session, node.agent)

    def _between(self, current: int, agent: int) -> float:
        names = self._names
        if current >= len(names) or agent >= len(names):
            return _FAR
        return self._steps.get(names[current], {}).get(names[agent], _FAR)

    def _edges(self) -> dict[str, list[str]]:
        edges = {}
        for name, after in self.config.graph.items():
            if isinstance(after, Mapping):
                after = [other for other, p in after.items() if p >= self.config.tau]
            if not isinstance(after, list | tuple) or not all(isinstance(other, str) for other in after):
                raise ConfigError(
                    f"key 'graph': successors of {name!r} must be a list of agent names, or name -> number"
                )
            edges[name] = list(after)
        return edges

    def _reach(self, start: str) -> dict[str, float]:
        """Steps from an agent to every agent that it leads to; itself included only if there is a way back."""
        edges = self._edges()
        steps: dict[str, float] = {}
        queue = deque([(start, 0.0)])
        while queue:
            name, far = queue.popleft()
            for other in edges.get(name, ()):
                if other not in steps:
                    steps[other] = far + 1.0
                    queue.append((other, far + 1.0))
        return steps
