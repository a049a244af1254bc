"""S3-FIFO (Yang et al., SOSP 2023) on leaves.

New nodes enter a small queue that should hold `small` of the cached tokens. While it holds more, its oldest leaf goes
next, unless it was used at least twice: then it moves to the main queue. Otherwise the oldest leaf of the main queue
goes, where a used one gets another round, with one use less. Nodes evicted from the small queue are remembered, and
enter the main queue if they come back; what comes back is told by session, agent and position, since a policy sees no
tokens. A node that is no leaf just now goes to its queue's end when its turn comes.

Score: place in the queue; used leaves behind unused ones, the queue whose turn it is not behind both.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radix_policy.config import key
from radix_policy.eviction.base import EvictionPolicy
from radix_policy.nodes import Node

if TYPE_CHECKING:
    from radix_policy.runtime import Request, World

_LATER = 1e12
_USES = 3  # uses that are counted at most


@dataclass(frozen=True)
class S3FifoConfig:
    """Keys of s3fifo."""

    small: float = key(0.1, "share of the cached tokens in the small queue", low=0, high=1)
    ghosts: int = key(4096, "evicted nodes remembered", low=0, high=1000000, unit="nodes")


class _State:
    __slots__ = ("main", "place", "uses")

    def __init__(self, main: bool, uses: int = 0) -> None:
        self.main = main
        self.uses = uses
        self.place = 0


class S3FifoPolicy(EvictionPolicy):
    """Small queue, main queue, ghosts."""

    name = "s3fifo"
    Config = S3FifoConfig

    def __init__(self, world: "World", config: Any = None) -> None:
        super().__init__(world, config)
        self._places = 0
        self._tokens = [0, 0]  # in the small and in the main queue
        self._queues: tuple[OrderedDict[int, Node], ...] = (OrderedDict(), OrderedDict())
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._turn = False  # whether the main queue gives the next victim

    def on_match(self, request: "Request", path: Sequence[Node]) -> None:
        for node in path:
            node.state.uses = min(_USES, node.state.uses + 1)

    def on_insert(self, node: Node, request: "Request | None") -> None:
        back = _name(node) in self._ghosts
        if back:
            del self._ghosts[_name(node)]
        node.state = _State(back)
        self._tokens[back] += node.length
        self._enqueue(node)

    def on_split(self, prefix: Node, suffix: Node) -> None:
        prefix.state = _State(suffix.state.main, suffix.state.uses)
        self._enqueue(prefix)

    def on_evict(self, node: Node) -> None:
        main = node.state.main
        del self._queues[main][node.id]
        self._tokens[main] -= node.length
        if not main and self.config.ghosts:
            if len(self._ghosts) >= self.config.ghosts:
                self._ghosts.popitem(last=False)
            self._ghosts[_name(node)] = None

    def refresh(self) -> None:
        small, main = self._tokens
        self._turn = small <= self.config.small * (small + main)
        queue, is_leaf = self._queues[self._turn], self.world.nodes.is_leaf
        for _ in range(len(queue)):
            node = next(iter(queue.values()))
            state = node.state
            if not self._turn and state.uses > 1:
                del queue[node.id]
                self._tokens[0] -= node.length
                self._tokens[1] += node.length
                state.main, state.uses = True, 0
            elif is_leaf(node) and not (self._turn and state.uses):
                break
            elif self._turn and state.uses:
                state.uses -= 1
            self._enqueue(node)

    def score(self, node: Node) -> float:
        state = node.state
        used = state.uses > (0 if state.main else 1)
        return state.place + (_LATER if used else 0.0) + (2 * _LATER if state.main != self._turn else 0.0)

    def snapshot(self) -> dict[str, Any]:
        return {"small_tokens": self._tokens[0], "main_tokens": self._tokens[1]}

    def _enqueue(self, node: Node) -> None:
        queue = self._queues[node.state.main]
        queue[node.id] = node
        queue.move_to_end(node.id)
        self._places += 1
        node.state.place = self._places


def _name(node: Node) -> Hashable:
    return (node.session, node.agent, node.start)
