"""The side table: what the policies know about each tree node, by node id.

The tree stays the engine's. This table mirrors only what a choice needs (parent, length, locks, residence, recency)
and adds what the engine does not know (agent, session, kind, proven reuse). It is exact: a test compares its leaves
with the engine's own set after every operation.
"""

from collections.abc import Callable, Iterator
from typing import Any

from radix_policy.tree_view import NodeId

UNKNOWN = -1  # an agent or a session that nobody named and no evidence gave


class Node:
    """One tree node. `state` is for the eviction policy alone (copied on a split by its `on_split`)."""

    __slots__ = (
        "agent",
        "children",
        "counts",
        "hits",
        "id",
        "length",
        "locks",
        "output",
        "parent",
        "priority",
        "resident",
        "session",
        "shared",
        "stamp",
        "start",
        "state",
        "step",
    )

    def __init__(self, node_id: NodeId, parent: "Node | None", length: int, start: int, stamp: float, step: int):
        self.id = node_id
        self.parent = parent
        self.length = length  # tokens
        self.start = start  # tokens between the root and the node's first token
        self.stamp = stamp  # the tree's access clock at the last access
        self.step = step  # scheduler step at the last access
        self.children = 0  # resident children
        self.locks = 0
        self.resident = True
        self.agent = UNKNOWN  # interned agent of the last request that ran over it
        self.session = UNKNOWN  # interned session of that request
        self.output = False  # tokens that a model wrote, not a prompt
        self.shared = False  # at least two sessions ran over it
        self.hits = 0  # requests that matched it after it was made
        self.counts = 0  # SGLang's hit_count
        self.priority = 0  # highest request priority that inserted over it
        self.state: Any = None

    def __repr__(self) -> str:
        return f"Node({self.id}, {self.start}+{self.length}, agent={self.agent}, session={self.session})"


class NodeTable:
    """All nodes of one tree. `on_leaf(node, is_leaf)` is called when a node enters or leaves the evictable leaves."""

    def __init__(self, on_leaf: Callable[[Node, bool], None] | None = None) -> None:
        self._nodes: dict[NodeId, Node] = {}
        self.on_leaf = on_leaf
        self.root: Node | None = None
        self.held = 0  # tokens on the device
        self.protected = 0  # of those, tokens under a lock

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __contains__(self, node: NodeId) -> bool:
        return node in self._nodes

    def __getitem__(self, node: NodeId) -> Node:
        return self._nodes[node]

    def get(self, node: NodeId) -> Node | None:
        """The node, or None when the tree does not hold it."""
        return self._nodes.get(node)

    @staticmethod
    def is_leaf(node: Node) -> bool:
        """Whether the engine may evict the node from the device now."""
        return not (node.children or node.locks) and node.resident and node.parent is not None

    def leaves(self) -> Iterator[Node]:
        """Every evictable device leaf, by scanning all nodes: for tests and for engines that keep their own set."""
        return (n for n in self._nodes.values() if self.is_leaf(n))

    def reset(self, root: NodeId) -> None:
        """Forget every node; the root is a node of no tokens that is never a leaf."""
        self._nodes.clear()
        self.held = self.protected = 0
        self.root = self._nodes[root] = Node(root, None, 0, 0, 0.0, 0)

    def add(self, node_id: NodeId, parent_id: NodeId, length: int, start: int, stamp: float, step: int) -> Node:
        """File a new resident leaf; KeyError when the parent is unknown."""
        parent = self._nodes[parent_id]
        node = self._nodes[node_id] = Node(node_id, parent, length, start, stamp, step)
        self.held += length
        self._gain_child(parent)
        if self.on_leaf is not None:
            self.on_leaf(node, True)
        return node

    def split(self, prefix_id: NodeId, suffix_id: NodeId, at: int, prefix_stamp: float, suffix_stamp: float) -> Node:
        """File the new prefix between `suffix` and its parent; returns the prefix with the suffix's identity."""
        suffix = self._nodes[suffix_id]
        prefix = Node(prefix_id, suffix.parent, at, suffix.start, prefix_stamp, suffix.step)
        for name in ("locks", "resident", "agent", "session", "output", "shared", "hits", "counts", "priority"):
            setattr(prefix, name, getattr(suffix, name))
        prefix.children = int(suffix.resident)
        self._nodes[prefix_id] = prefix
        suffix.parent = prefix
        suffix.start += at
        suffix.length -= at
        self.stamp(suffix, suffix_stamp)
        return prefix

    def stamp(self, node: Node, stamp: float) -> None:
        """Set the node's access stamp and refile it when it is a leaf."""
        node.stamp = stamp
        if self.on_leaf is not None and self.is_leaf(node):
            self.on_leaf(node, True)

    def touch(self, node_id: NodeId, stamp: float, step: int) -> None:
        """Set the node's access stamp and step: the most frequent event of all, so it is spelled out."""
        node = self._nodes[node_id]
        node.stamp = stamp
        node.step = step
        if not (node.children or node.locks) and node.resident and node.parent is not None and self.on_leaf:
            self.on_leaf(node, True)

    def touch_path(self, node_id: NodeId, stamp: float, step: int) -> None:
        """`touch` for the node and all its ancestors: a walk from the root ended here."""
        node = self._nodes[node_id]
        above: Node | None = node
        while above is not None:
            above.stamp = stamp
            above.step = step
            above = above.parent
        # of them all only the last can be a leaf
        if not (node.children or node.locks) and node.resident and node.parent is not None and self.on_leaf:
            self.on_leaf(node, True)

    def lock(self, node_id: NodeId) -> None:
        """One more lock on the node and all its ancestors (the root's own lock is not counted)."""
        node: Node | None = self._nodes[node_id]
        while node is not None and node.parent is not None:
            if node.locks == 0 and node.resident:
                self.protected += node.length
                if node.children == 0 and self.on_leaf is not None:
                    self.on_leaf(node, False)
            node.locks += 1
            node = node.parent

    def unlock(self, node_id: NodeId) -> None:
        """One lock less on the node and all its ancestors; AssertionError when a lock was never taken."""
        node: Node | None = self._nodes[node_id]
        while node is not None and node.parent is not None:
            assert node.locks > 0, f"unlock of node {node.id}, which holds no lock"
            node.locks -= 1
            if node.locks == 0 and node.resident:
                self.protected -= node.length
                if node.children == 0 and self.on_leaf is not None:
                    self.on_leaf(node, True)
            node = node.parent

    def demote(self, node_id: NodeId) -> Node:
        """The node's KV left the device, the node stays."""
        node = self._nodes[node_id]
        self._leave_device(node)
        return node

    def restore(self, node_id: NodeId) -> Node:
        """The node's KV is on the device again."""
        node = self._nodes[node_id]
        if not node.resident:
            node.resident = True
            self.held += node.length
            self.protected += node.length if node.locks else 0
            if node.parent is not None:
                self._gain_child(node.parent)
            if self.on_leaf is not None and self.is_leaf(node):
                self.on_leaf(node, True)
        return node

    def remove(self, node_id: NodeId) -> Node:
        """Forget the node; KeyError when it is unknown."""
        node = self._nodes[node_id]
        self._leave_device(node)
        del self._nodes[node_id]
        return node

    def _gain_child(self, parent: Node) -> None:
        if parent.children == 0 and self.on_leaf is not None and self.is_leaf(parent):
            self.on_leaf(parent, False)
        parent.children += 1

    def _leave_device(self, node: Node) -> None:
        if not node.resident:
            return
        if self.on_leaf is not None and self.is_leaf(node):
            self.on_leaf(node, False)
        node.resident = False
        self.held -= node.length
        self.protected -= node.length if node.locks else 0
        parent = node.parent
        if parent is not None:
            parent.children -= 1
            if self.on_leaf is not None and self.is_leaf(parent):
                self.on_leaf(parent, True)
