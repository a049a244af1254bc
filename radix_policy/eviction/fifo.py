"""FIFO: SGLang's `FIFOStrategy`. Score: how many nodes were made before this one; both halves of a split keep it."""

from typing import TYPE_CHECKING, Any

from radix_policy.eviction.base import EvictionPolicy
from radix_policy.nodes import Node

if TYPE_CHECKING:
    from radix_policy.runtime import Request, World


class FifoPolicy(EvictionPolicy):
    """First made, first evicted."""

    name = "fifo"

    def __init__(self, world: "World", config: Any = None) -> None:
        super().__init__(world, config)
        self._made = 0

    def on_insert(self, node: Node, request: "Request | None") -> None:
        node.state = self._made
        self._made += 1

    def score(self, node: Node) -> float:
        return float(node.state)
