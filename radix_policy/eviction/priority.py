"""Priority: SGLang's `PriorityStrategy`. Score: the highest request priority that was inserted over the node.

SGLang inserts a finished request's prompt once more with its priority plus one, so that at equal priorities outputs go
before prompts. Equal scores in LRU order. Differs from SGLang in one corner: a finished request whose output was in the
tree already raises no prompt here, since no new node tells of it.
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from radix_policy.eviction.base import EvictionPolicy
from radix_policy.nodes import Node

if TYPE_CHECKING:
    from radix_policy.runtime import Request


class PriorityPolicy(EvictionPolicy):
    """Lowest priority first."""

    name = "priority"

    def on_match(self, request: "Request", path: Sequence[Node]) -> None:
        for node in path:
            node.state = max(node.state, request.priority)

    def on_insert(self, node: Node, request: "Request | None") -> None:
        priority = request.priority if request is not None else 0
        node.state = priority
        if request is None or not node.output:
            return
        page = self.world.page_size
        prompt = request.prompt_tokens - request.prompt_tokens % page
        above = node.parent
        while above is not None and above.parent is not None:
            above.state = max(above.state, priority + 1 if above.start < prompt else priority)
            above = above.parent

    def score(self, node: Node) -> float:
        return float(node.state)

    def class_of(self, node: Node) -> Hashable | None:
        return node.state  # None before `on_insert`
