"""Agents from tokens: an agent's anchor is the prefix up to the branch point where its sessions diverge.

A bounded radix forest over recent prompts, one tree per namespace. A branch point with `forks` distinct continuations
is an anchor, and a prompt belongs to the deepest anchor on its path. What keeps other branch points out:

* continuations are counted where they part within NEAR tokens: tasks that begin with the same few words are different
  tasks, not an agent with a longer anchor;
* a continuation that holds an anchor itself is an agent, not a session, and does not count. So the chat template that
  several agents share stops being an anchor once theirs are known;
* below an anchor, a further one needs as many continuations as half of the first one's (8 are always enough). So the
  few branches that one session makes by rewriting the end of its prompt are no agents.

Below an anchor only `tail` tokens of each continuation are kept, enough to tell sessions apart; where two sessions
agree in all of them, `deepen` keeps more. An anchor's id stays when its edge is split, when the branch point is found
to lie elsewhere, and when it is forgotten and learned again. Everything is deterministic: dicts in insertion order,
recency by use.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from radix_policy.events import Prompt

LEARNED = "anchor:"  # how the names of learned agents begin
NEAR = 8  # tokens by which anchors one below the other must differ at least
STRONG = 8  # continuations that make an anchor below another anchor, whatever the other one has
_DEEPEN = 4  # factor on the tokens kept when sessions cannot be told apart


class Node:
    """A run of tokens that some prompts share, up to `end`; below it they differ, or nothing is known."""

    __slots__ = (
        "agent",
        "breaks",
        "edge",
        "end",
        "follows",
        "forks",
        "inside",
        "kids",
        "limit",
        "nested",
        "parent",
        "recent",
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
        self.agent: int | None = None  # set while the node is an anchor
        self.limit = 0  # tokens from the root that a leaf may keep although an anchor above would allow fewer
        self.threads: list[Any] = []  # of a leaf: radix_policy.lineage.Thread, latest last
        self.follows = 0  # of an anchor: calls that continued their session's last prompt
        self.breaks = 0  # of an anchor: calls that began like a known prompt and did not continue it

    @property
    def own(self) -> int:
        """Continuations that are sessions as far as one knows."""
        return self.forks - self.nested

    def __repr__(self) -> str:
        return f"Node(end={self.end}, forks={self.forks}, nested={self.nested}, agent={self.agent})"


class Landing(NamedTuple):
    """Where a prompt ended up."""

    anchor: Node | None
    leaf: Node  # holds the prompt's continuation
    shared: int  # tokens of the prompt that were known before this call
    sibling: Node | None  # the prompt left the known tree: the leaf used last among those that agree furthest
    forked: bool


class AnchorForest:
    """The trees of all namespaces. `intern(namespace, name) -> id` names agents, `release(id)` frees an id."""

    def __init__(
        self,
        intern: Callable[[str, str], int],
        release: Callable[[int], None],
        *,
        window: int,
        forks: int,
        tail: int,
        leaves: int,
        budget: int,
    ) -> None:
        """`window`: tokens of a prompt looked at; `leaves` and `budget` (tokens) bound what is kept."""
        self.window, self.forks, self.tail = window, forks, tail
        self.max_leaves, self.budget = leaves, budget
        self.tokens = 0
        self.merged: dict[int, int] = {}  # agent id -> the id that it turned out to be, the latest first-hand ones
        self._intern, self._release = intern, release
        self._seq = 0
        self._roots: dict[str, Node] = {}
        self._spaces: dict[int, str] = {}  # namespace of each root
        self._leaves: OrderedDict[int, Node] = OrderedDict()  # from the one used longest ago
        self._holders: dict[int, list[Node]] = {}  # agent id -> its anchors

    def __len__(self) -> int:
        """Leaves."""
        return len(self._leaves)

    def anchor(self, agent: int) -> Node | None:
        """The agent's anchor (the latest when it has several), or None."""
        holders = self._holders.get(agent)
        return holders[-1] if holders else None

    def anchors(self) -> Iterator[Node]:
        """Every anchor."""
        return (node for holders in self._holders.values() for node in holders)

    def prefix(self, node: Node) -> Prompt:
        """All tokens from the root to the end of the node's edge."""
        edges: list[Prompt] = []
        at: Node | None = node
        while at is not None and at.edge is not None:
            edges.append(at.edge)
            at = at.parent
        whole = edges.pop()
        while edges:
            whole = whole.join(edges.pop())
        return whole

    def walk(self, prompt: Prompt, namespace: str, agent: int | None = None) -> Landing:
        """Find the prompt's place and learn from it. The prompt holds at least one token.

        `agent`: an id that the client's own name for the agent has; an anchor found by this prompt takes it.
        """
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = self._node(None, None, 0)
            self._spaces[root.seq] = namespace
        node = root
        limit = min(len(prompt), self.window)
        path: list[Node] = []
        depth = 0
        forked = False
        sibling = None
        while depth < limit:
            kid = node.kids.get(prompt.token(depth))
            if kid is None:
                forked = node.edge is None or bool(node.kids) or node.agent is not None
                sibling = self._latest(node) if node.kids else None
                break
            start = depth
            depth += prompt.agree(kid.edge, depth)
            if depth < kid.end:
                if depth < limit:
                    forked, sibling = True, self._latest(kid)
                    node = self._split(kid, depth - start)
                    path.append(node)
                else:
                    node = kid  # the prompt ends inside this edge
                break
            node.recent = node = kid
            path.append(node)
        if forked:
            for above in (root, *path):
                if depth - above.end < NEAR:
                    above.forks += 1
        anchor = self._decide(path, root.forks - root.nested, namespace, agent)
        if forked:
            leaf = self._sprout(node, prompt, depth, limit, anchor)
        else:
            leaf = self._latest(node)
            if leaf is node and depth == node.end < limit:
                self._extend(node, prompt, min(limit, self._keep(anchor, node)))
        self._leaves[leaf.seq] = leaf
        self._leaves.move_to_end(leaf.seq)
        self._shrink(leaf)
        return Landing(anchor, leaf, depth, sibling, forked)

    def deepen(self, leaf: Node, prompt: Prompt, anchor: Node) -> None:
        """Prompts that are not one session's agree in all that `leaf` keeps: keep more, from this prompt."""
        leaf.limit = max(leaf.limit, anchor.end + _DEEPEN * max(self.tail, leaf.end - anchor.end))
        if (
            not leaf.kids
            and leaf.edge is not None
            and prompt.agree(leaf.edge, leaf.end - len(leaf.edge)) == len(leaf.edge)
        ):
            self._extend(leaf, prompt, min(len(prompt), self.window, leaf.limit))
            self._shrink(leaf)

    # ---- anchors ----

    def _decide(self, path: list[Node], top: int, namespace: str, named: int | None) -> Node | None:
        """The deepest anchor on the path. `top`: continuations at the root, which is nobody's anchor."""
        best: Node | None = None
        fallen: list[Node] = []
        for node in path:
            own = node.forks - node.nested
            apart = best is None or node.end - best.end >= NEAR
            if own >= self.forks and own >= min(STRONG, top / 2) and apart:
                if best is not None and best.agent == node.agent is not None and own >= STRONG:
                    self._dismiss(best)  # the two are agents in their own right: the deeper one keeps the id
                    self._promote(best, self._intern(namespace, self._name(best)), path)
                best, top = node, max(top, own)
            elif node.agent is not None:
                fallen.append(node)
        if best is not None and best.agent is None:
            # where a known agent's branch point turns out to lie higher up, the agent keeps its id
            weak = [n for n in fallen if n.end > best.end] or [n for n in self._below(best) if n.own < STRONG]
            known = {n.agent: None for n in weak}
            agent = next(iter(known)) if len(known) == 1 else named
            self._promote(best, self._intern(namespace, self._name(best)) if agent is None else agent, path)
        for node in fallen:
            old = node.agent
            assert old is not None
            self._dismiss(node)
            if best is not None and best.agent is not None and best.end < node.end and best.agent != old:
                self._merge(old, best.agent)
            if old not in self._holders:
                self._release(old)
        return best

    def _promote(self, node: Node, agent: int, path: list[Node]) -> None:
        node.agent = agent
        self._holders.setdefault(agent, []).append(node)
        self._count(node, 1)
        self._trim(node, node.end + self.tail, path)

    def _dismiss(self, node: Node) -> None:
        assert node.agent is not None
        holders = self._holders[node.agent]
        holders.remove(node)
        if not holders:
            del self._holders[node.agent]
        node.agent = None
        self._count(node, -1)

    @staticmethod
    def _count(node: Node, by: int) -> None:
        """The node became an anchor (1) or ceased to be one (-1): the counts above it."""
        below: list[
            tuple[Node, bool]
        ] = []  # from the node up: each with whether it now holds its first or lost its last
        at: Node | None = node
        while at is not None:
            far = next((flip for n, flip in reversed(below) if n.end - at.end >= NEAR), False)
            if far:
                at.nested = max(0, at.nested + by)
            at.inside += by
            below.append((at, at.inside == (1 if by > 0 else 0)))
            at = at.parent

    def _merge(self, old: int, new: int) -> None:
        self.merged.pop(old, None)
        self.merged.pop(new, None)  # it is in use again
        self.merged[old] = new
        while len(self.merged) > 1024:
            del self.merged[next(iter(self.merged))]

    def _name(self, node: Node) -> str:
        return f"{LEARNED}{self.prefix(node).fingerprint(0, node.end):016x}"

    def _below(self, node: Node) -> Iterator[Node]:
        for kid in node.kids.values():
            if kid.inside:
                if kid.agent is not None:
                    yield kid
                yield from self._below(kid)

    # ---- the tree ----

    def _node(self, parent: Node | None, edge: Prompt | None, end: int) -> Node:
        self._seq += 1
        return Node(self._seq, parent, edge, end)

    @staticmethod
    def _latest(node: Node) -> Node:
        while node.kids:
            node = node.recent if node.recent is not None else next(reversed(node.kids.values()))
        return node

    def _keep(self, anchor: Node | None, node: Node) -> int:
        """Tokens from the root that a leaf at `node` may keep."""
        return self.window if anchor is None else max(anchor.end + self.tail, node.limit)

    def _split(self, kid: Node, n: int) -> Node:
        """A new node for the first n tokens of the kid's edge."""
        parent, edge = kid.parent, kid.edge
        assert parent is not None and edge is not None
        head = self._node(parent, edge.slice(0, n), kid.end - len(edge) + n)
        kid.edge, kid.parent = edge.slice(n, len(edge)), head
        head.kids[_first(kid.edge)] = kid
        head.recent, head.inside = kid, kid.inside
        near = kid.end - head.end < NEAR
        head.forks = max(1, kid.forks) if near else 1
        head.nested = kid.nested if near else int(kid.inside > 0)
        parent.kids[_first(edge)] = parent.recent = head
        return head

    def _sprout(self, node: Node, prompt: Prompt, depth: int, limit: int, anchor: Node | None) -> Node:
        keep = self._keep(anchor, node)
        stop = min(limit, keep if keep > depth else depth + self.tail)
        leaf = self._node(node, prompt.slice(depth, stop), stop)
        node.kids[prompt.token(depth)] = node.recent = leaf
        self._leaves.pop(node.seq, None)
        self.tokens += stop - depth
        return leaf

    def _extend(self, leaf: Node, prompt: Prompt, stop: int) -> None:
        if stop > leaf.end:
            assert leaf.edge is not None
            leaf.edge = leaf.edge.join(prompt.slice(leaf.end, stop))
            self.tokens += stop - leaf.end
            leaf.end = stop
            leaf.forks = leaf.nested = 0

    def _trim(self, node: Node, stop: int, path: list[Node]) -> None:
        """Keep nothing below `node` past `stop`, except the ways to other anchors and the path of this walk."""
        for kid in list(node.kids.values()):
            if kid.inside or kid in path:
                continue
            if kid.end < stop and kid.kids:
                self._trim(kid, stop, path)
                continue
            kid.threads = self._drop_below(kid)[-4:]
            kid.forks = kid.nested = 0
            if kid.end > stop and kid.edge is not None:
                start = kid.end - len(kid.edge)
                keep = max(stop - start, 1)
                self.tokens -= len(kid.edge) - keep
                kid.edge, kid.end = kid.edge.slice(0, keep), start + keep
            self._leaves.setdefault(kid.seq, kid)

    def _drop_below(self, node: Node) -> list[Any]:
        threads = list(node.threads)
        for kid in node.kids.values():
            threads += [t for t in self._drop_below(kid) if t not in threads]
            assert kid.edge is not None
            self.tokens -= len(kid.edge)
            self._leaves.pop(kid.seq, None)
        node.kids, node.recent = {}, None
        return threads

    def _shrink(self, keep: Node) -> None:
        while len(self._leaves) > self.max_leaves or self.tokens > self.budget:
            leaf = next(iter(self._leaves.values()))
            if leaf is keep:
                if len(self._leaves) == 1:
                    return
                self._leaves.move_to_end(leaf.seq)
                continue
            self._remove(leaf)

    def _remove(self, leaf: Node) -> None:
        parent, edge = leaf.parent, leaf.edge
        assert parent is not None and edge is not None
        agent = leaf.agent
        if agent is not None:
            self._dismiss(leaf)
            if agent not in self._holders:
                self._release(agent)
        del self._leaves[leaf.seq]
        del parent.kids[_first(edge)]
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

    def _fold(self, node: Node) -> None:
        """Join a node that is no branch point any more with its only kid."""
        (kid,) = node.kids.values()
        parent, edge = node.parent, node.edge
        assert parent is not None and edge is not None and kid.edge is not None
        kid.edge, kid.parent = edge.join(kid.edge), parent
        parent.kids[_first(edge)] = kid
        if parent.recent is node:
            parent.recent = kid


def _first(edge: Prompt) -> int:
    return edge.token(0)
