"""GreedyDual-Size-Frequency (Cherkasova 1998), per token.

    H(node) = L + frequency * cost / size,   L = H of the last victim

Recomputing a token costs the same wherever it stands, so cost / size is 1 and H = L + accesses; unit: accesses.
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from radix_policy.eviction.base import EvictionPolicy
from radix_policy.nodes import Node

if TYPE_CHECKING:
    from radix_policy.runtime import Request, World


class GdsfPolicy(EvictionPolicy):
    """Lowest H first. `node.state`: (accesses, H)."""

    name = "gdsf"

    def __init__(self, world: "World", config: Any = None) -> None:
        super().__init__(world, config)
        self._inflation = 0.0

    def on_match(self, request: "Request", path: Sequence[Node]) -> None:
        for node in path:
            count = node.state[0] + 1
            node.state = (count, self._inflation + count)

    def on_insert(self, node: Node, request: "Request | None") -> None:
        node.state = (1, self._inflation + 1.0)

    def on_evict(self, node: Node) -> None:
        self._inflation = max(self._inflation, node.state[1])

    def score(self, node: Node) -> float:
        return float(node.state[1])

    def class_of(self, node: Node) -> Hashable | None:
        return node.state[1] if node.state is not None else None
