"""A bounded radix forest over the beginnings of recent prompts, one tree per namespace.

It holds tokens, not KV: which prompts agree how far. Leaves are forgotten by recency of use. Only `AnchorForest`
decides which branch points mean something.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

from radix_policy.events import Prompt

NEAR = 8  # tokens within which branches count as one branch point
_DEEP = 64  # branch points on one path that are looked at; what lies below is taken as one
_THREADS = 4  # threads that a leaf takes over from leaves cut off below it


class Node:
    """A run of tokens that some prompts share, up to `end`; below it they differ, or nothing is known."""

    __slots__ = (
        "agent",
        "breaks",
        "certain",
        "echo",
        "edge",
        "end",
        "follows",
        "forks",
        "inside",
        "kids",
        "limit",
        "nested",
        "pace",
        "parent",
        "recent",
        "rewritten",
        "seq",
        "threads",
    )

    def __init__(self, seq: int, parent: "Node | None", edge: Prompt | None, end: int) -> None:
        self.seq = seq
        self.parent = parent
        self.edge = edge  # None for a root
        self.end = end  # tokens from the root to the end of the edge
        self.kids: dict[int, Node] = {}  # by first token
        self.recent: Node | None = None  # the kid visited last
        self.forks = 0  # continuations ever seen that part less than NEAR tokens below
        self.nested = 0  # those of them that hold an anchor
        self.inside = 0  # anchors in the subtree, this node included
        self.limit = 0  # of a leaf: tokens from the root that it may keep although an anchor above allows fewer
        self.threads: list[Any] = []  # of a leaf: radix_policy.lineage.Thread, latest last
        # of an anchor
        self.agent: int | None = None  # set while the node is one
        self.certain = False  # beyond doubt: little is kept of its continuations
        self.echo = False  # other agents' prompts go on in the same words: a task's beginning, no anchor
        self.follows = 0  # calls that continued their session's last prompt
        self.breaks = 0  # calls that began like a known prompt and did not continue it
        self.pace = 0.0  # mean number of calls (of anybody) between two calls of one of its threads
        self.rewritten = 0  # tokens at the end of its prompts that stand behind any new text

    @property
    def own(self) -> int:
        """Continuations that are sessions as far as one knows."""
        return self.forks - self.nested

    def __repr__(self) -> str:
        return f"Node(end={self.end}, forks={self.forks}, nested={self.nested}, agent={self.agent})"


class Place(NamedTuple):
    """Where the known tree ends for a prompt."""

    root: Node
    path: list[Node]  # nodes that the prompt contains whole, the root left out
    node: Node  # the last of them, or the node inside whose edge the prompt ends
    depth: int  # tokens of the prompt that are known
    forked: bool  # the prompt goes on otherwise than anything known
    sibling: Node | None  # then: the leaf used last among those that agree furthest


class PrefixForest:
    """The trees of all namespaces."""

    def __init__(self, window: int, leaves: int, budget: int) -> None:
        """`window`: tokens of a prompt looked at; at most `leaves` leaves and about `budget` tokens are kept."""
        self.window, self.max_leaves, self.budget = window, leaves, budget
        self.tokens = 0
        self._seq = 0
        self._roots: dict[str, Node] = {}
        self._spaces: dict[int, str] = {}  # namespace of each root
        self._leaves: OrderedDict[int, Node] = OrderedDict()  # from the one used longest ago

    def __len__(self) -> int:
        """Leaves."""
        return len(self._leaves)

    def prefix(self, node: Node) -> Prompt:
        """All tokens from the root to the end of the node's edge; the node is no root."""
        edges: list[Prompt] = []
        at: Node | None = node
        while at is not None and at.edge is not None:
            edges.append(at.edge)
            at = at.parent
        whole = edges.pop()
        while edges:
            whole = whole.join(edges.pop())
        return whole

    # ---- for AnchorForest ----

    def forgotten(self, leaf: Node) -> None:
        """Called before a leaf goes."""

    def _descend(self, prompt: Prompt, namespace: str, limit: int) -> Place:
        """Follow the prompt's first `limit` tokens, splitting the edge that it leaves in the middle."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = self._node(None, None, 0)
            self._spaces[root.seq] = namespace
        node, depth = root, 0
        path: list[Node] = []
        while depth < limit and len(path) < _DEEP:
            kid = node.kids.get(prompt.token(depth))
            if kid is None:
                branch = node.edge is None or bool(node.kids) or node.agent is not None
                return Place(root, path, node, depth, branch, self._latest(node) if node.kids else None)
            start = depth
            depth += prompt.agree(kid.edge, depth)
            if depth < kid.end:
                if depth == limit:
                    return Place(root, path, kid, depth, False, None)
                sibling = self._latest(kid)
                node = self._split(kid, depth - start)
                path.append(node)
                return Place(root, path, node, depth, True, sibling)
            node.recent = node = kid
            path.append(node)
        return Place(root, path, node, depth, False, None)

    def _node(self, parent: Node | None, edge: Prompt | None, end: int) -> Node:
        self._seq += 1
        return Node(self._seq, parent, edge, end)

    @staticmethod
    def _latest(node: Node) -> Node:
        """The leaf used last below the node (itself when it is one)."""
        while node.kids:
            node = node.recent if node.recent is not None else next(reversed(node.kids.values()))
        return node

    def _split(self, kid: Node, n: int) -> Node:
        """A new node for the first n tokens of the kid's edge."""
        parent, edge = kid.parent, kid.edge
        assert parent is not None and edge is not None
        head = self._node(parent, edge.slice(0, n), kid.end - len(edge) + n)
        kid.edge, kid.parent = edge.slice(n, len(edge)), head
        head.kids[kid.edge.token(0)] = head.recent = kid
        head.inside = kid.inside
        near = kid.end - head.end < NEAR
        head.forks = max(1, kid.forks) if near else 1
        head.nested = kid.nested if near else int(kid.inside > 0)
        parent.kids[edge.token(0)] = parent.recent = head
        return head

    def _sprout(self, node: Node, prompt: Prompt, start: int, stop: int) -> Node:
        """A new leaf for tokens [start, stop) of the prompt."""
        leaf = self._node(node, prompt.slice(start, stop), stop)
        node.kids[prompt.token(start)] = node.recent = leaf
        self._leaves.pop(node.seq, None)
        self.tokens += stop - start
        return leaf

    def _extend(self, leaf: Node, prompt: Prompt, stop: int) -> None:
        """The leaf's edge goes on as the prompt does, up to `stop`."""
        if stop > leaf.end:
            assert leaf.edge is not None
            leaf.edge = leaf.edge.join(prompt.slice(leaf.end, stop))
            self.tokens += stop - leaf.end
            leaf.end = stop
            leaf.forks = leaf.nested = 0

    def _use(self, leaf: Node) -> None:
        """The leaf was used: the others go first when there are too many."""
        self._leaves[leaf.seq] = leaf
        self._leaves.move_to_end(leaf.seq)
        while (len(self._leaves) > self.max_leaves or self.tokens > self.budget) and len(self._leaves) > 1:
            oldest = next(iter(self._leaves.values()))
            if oldest is leaf:  # a parent that became a leaf came in behind it
                self._leaves.move_to_end(leaf.seq)
            else:
                self._remove(oldest)

    def _trim(self, node: Node, stop: int, path: list[Node]) -> None:
        """Keep nothing below `node` past `stop`, except the ways to anchors and what is on `path`."""
        todo = list(node.kids.values())
        while todo:
            kid = todo.pop()
            if kid.inside or kid in path:
                continue
            if kid.end < stop and kid.kids:
                todo += kid.kids.values()
                continue
            self._drop_below(kid)
            assert kid.edge is not None
            if kid.end > stop:
                start = kid.end - len(kid.edge)
                keep = max(stop - start, 1)
                self.tokens -= len(kid.edge) - keep
                kid.edge, kid.end = kid.edge.slice(0, keep), start + keep
            self._leaves.setdefault(kid.seq, kid)

    def _drop_below(self, node: Node) -> None:
        """The node becomes a leaf and takes over the threads of those below it."""
        todo = list(node.kids.values())
        while todo:
            kid = todo.pop()
            todo += kid.kids.values()
            node.threads += [t for t in kid.threads if t not in node.threads]
            assert kid.edge is not None
            self.tokens -= len(kid.edge)
            self._leaves.pop(kid.seq, None)
        del node.threads[:-_THREADS]
        node.kids, node.recent = {}, None
        node.forks = node.nested = 0

    def _remove(self, leaf: Node) -> None:
        parent, edge = leaf.parent, leaf.edge
        assert parent is not None and edge is not None
        self.forgotten(leaf)
        del self._leaves[leaf.seq]
        del parent.kids[edge.token(0)]
        self.tokens -= len(edge)
        if parent.recent is leaf:
            parent.recent = None
        if parent.edge is None:
            if not parent.kids:
                del self._roots[self._spaces.pop(parent.seq)]
        elif not parent.kids:
            self._leaves[parent.seq] = parent
            if parent.agent is None:  # an anchor gets another round before it is forgotten
                self._leaves.move_to_end(parent.seq, last=False)
        elif len(parent.kids) == 1 and parent.agent is None:
            self._fold(parent)

    @staticmethod
    def _fold(node: Node) -> None:
        """Join a node that is no branch point any more with its only kid."""
        (kid,) = node.kids.values()
        parent, edge = node.parent, node.edge
        assert parent is not None and edge is not None and kid.edge is not None
        kid.edge, kid.parent = edge.join(kid.edge), parent
        parent.kids[edge.token(0)] = kid
        if parent.recent is node:
            parent.recent = kid
