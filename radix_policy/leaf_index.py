"""Which leaf goes next, without looking at every leaf.

Leaves whose score is the same at all times form a class (`EvictionPolicy.class_of`); inside a class the order is LRU,
so only the oldest leaf of each class can be the next victim:

    victim = argmin over classes of (score(head), head.stamp, head.id)

Each class is a heap of (stamp, id) with lazy deletion. An eviction call costs O(classes + victims x log), not
O(leaves): a `Drain` scores every class once and then works on a heap of heads. A leaf without a class stands alone and
is scored at every call; it costs one dictionary entry to file. The reference twin in the tests scores every leaf and
sorts.
"""

import heapq
from collections.abc import Callable, Hashable

from radix_policy.nodes import Node, NodeTable
from radix_policy.tree_view import NodeId

_SLACK = 64  # stale entries that a class may hold beyond its live ones before it is rebuilt


class _LeafClass:
    __slots__ = ("heap", "live")

    def __init__(self) -> None:
        self.heap: list[tuple[float, NodeId]] = []
        self.live = 0


class LeafIndex:
    """Evictable leaves by class. Fed by NodeTable's `on_leaf`; read through `drain`."""

    def __init__(self, class_of: Callable[[Node], Hashable | None], score: Callable[[Node], float]) -> None:
        self._class_of = class_of
        self._score = score
        self._classes: dict[Hashable, _LeafClass] = {}
        self._alone: dict[NodeId, Node] = {}
        self._filed: dict[NodeId, tuple[Hashable | None, float, Node]] = {}
        self._drain: Drain | None = None

    def __len__(self) -> int:
        return len(self._filed)

    def __contains__(self, node: NodeId) -> bool:
        return node in self._filed

    @property
    def classes(self) -> int:
        """Classes that hold a leaf."""
        return len(self._classes) + len(self._alone)

    def clear(self) -> None:
        """Forget every leaf."""
        self._classes.clear()
        self._alone.clear()
        self._filed.clear()
        self._drain = None

    def file(self, node: Node, is_leaf: bool = True) -> None:
        """The node is a leaf now (its class and stamp may have changed), or it is none any more."""
        node_id = node.id
        old = self._filed.get(node_id)
        if not is_leaf:
            if old is not None:
                self._unfile(node_id, old[0])
            return
        key = self._class_of(node)
        stamp = node.stamp
        if old is not None:
            if old[0] == key and old[1] == stamp:
                return
            self._unfile(node_id, old[0])
        if key is None:
            self._alone[node_id] = node
        else:
            leaves = self._classes.get(key)
            if leaves is None:
                leaves = self._classes[key] = _LeafClass()
            elif len(leaves.heap) > 2 * leaves.live + _SLACK:
                leaves.heap = [e for e in leaves.heap if self._is_live(key, e)]
                heapq.heapify(leaves.heap)
            heapq.heappush(leaves.heap, (stamp, node_id))
            leaves.live += 1
        self._filed[node_id] = (key, stamp, node)
        if self._drain is not None:
            self._drain.push(key, node)

    def head(self, key: Hashable) -> Node | None:
        """The oldest leaf of a class."""
        leaves = self._classes.get(key)
        if leaves is None:
            return None
        heap = leaves.heap
        while heap:
            if self._is_live(key, heap[0]):
                return self._filed[heap[0][1]][2]
            heapq.heappop(heap)
        return None

    def oldest(self) -> Node | None:
        """LRU's victim: the leaf with the lowest (stamp, id) of all."""
        heads = [h for key in self._classes if (h := self.head(key)) is not None]
        return min([*heads, *self._alone.values()], key=lambda n: (n.stamp, n.id), default=None)

    def drain(self) -> "Drain":
        """Begin an eviction call; scores are fixed until the next drain begins."""
        self._drain = Drain(self, list(self._classes), list(self._alone.values()), self._score)
        return self._drain

    def _is_live(self, key: Hashable | None, entry: tuple[float, NodeId]) -> bool:
        filed = self._filed.get(entry[1])
        return filed is not None and filed[1] == entry[0] and filed[0] == key

    def _unfile(self, node: NodeId, key: Hashable | None) -> None:
        del self._filed[node]
        if key is None:
            del self._alone[node]
            return
        leaves = self._classes[key]
        leaves.live -= 1
        if leaves.live == 0:
            del self._classes[key]


class Drain:
    """One eviction call: hands out victims, best first, and takes in leaves that appear on the way."""

    def __init__(
        self, index: LeafIndex, keys: list[Hashable], alone: list[Node], score: Callable[[Node], float]
    ) -> None:
        self._index = index
        self._score = score
        self._scores: dict[Hashable, float] = {}
        self._heap: list[tuple[float, float, NodeId, Hashable | None]] = [
            (score(node), node.stamp, node.id, None) for node in alone
        ]
        for key in keys:
            head = index.head(key)
            if head is not None:
                self._heap.append(self._entry(key, head))
        heapq.heapify(self._heap)

    def push(self, key: Hashable | None, node: Node) -> None:
        """A leaf was filed while draining."""
        heapq.heappush(self._heap, self._entry(key, node))

    def next(self) -> Node | None:
        """The leaf to lose next, or None when no leaf is left. The caller evicts it before asking again."""
        heap, index = self._heap, self._index
        while heap:
            _, stamp, node_id, key = heap[0]
            if index._is_live(key, (stamp, node_id)):
                return index._filed[node_id][2]
            heapq.heappop(heap)
            head = index.head(key) if key is not None else None
            if head is not None:
                heapq.heappush(heap, self._entry(key, head))
        return None

    def end(self) -> None:
        """The eviction call is over."""
        if self._index._drain is self:
            self._index._drain = None

    def _entry(self, key: Hashable | None, node: Node) -> tuple[float, float, NodeId, Hashable | None]:
        if key is None:
            return (self._score(node), node.stamp, node.id, None)
        score = self._scores.get(key)
        if score is None:
            score = self._scores[key] = self._score(node)
        return (score, node.stamp, node.id, key)


def naive_order(nodes: NodeTable, score: Callable[[Node], float]) -> list[Node]:
    """The reference twin: every leaf scored and sorted."""
    return sorted(nodes.leaves(), key=lambda n: (score(n), n.stamp, n.id))
