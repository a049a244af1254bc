"""Agents from tokens: an agent's anchor is the prefix up to the branch point where its sessions diverge.

In the forest of recent prompts (radix_policy.prefix_tree), a branch point with `forks` distinct continuations is an
anchor, and a prompt belongs to the deepest anchor on its path. What keeps other branch points out:

* continuations are counted where they part within NEAR tokens: tasks that begin with the same few words are different
  tasks, not an agent with a longer anchor;
* a continuation that holds an anchor itself is an agent, not a session, and does not count. So the chat template that
  several agents share stops being an anchor once theirs are known;
* words that follow several agents' anchors are the beginning of a task;
* below another branch point, an anchor needs half as many continuations as that one has (STRONG are always enough). So
  the few branches that one session makes by rewriting the end of its prompt are no agents.

Below a CERTAIN anchor only `tail` tokens of each continuation are kept, enough to tell sessions apart; where two
sessions agree in all of them, `deepen` keeps more. An anchor's id stays when its edge is split, when the branch point
is found to lie elsewhere, and when it is forgotten and learned again (while nobody else needed the id). Everything is
deterministic: dicts in insertion order, recency by use.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from radix_policy.events import Prompt
from radix_policy.prefix_tree import NEAR, Node, PrefixForest

LEARNED = "anchor:"  # how the names of learned agents begin
STRONG = 8  # continuations that make an anchor below another branch point, whatever that one has
CERTAIN = 32  # continuations that make an anchor certain enough to forget most of what stands behind it
_DEEPEN = 4  # factor on the tokens kept when sessions cannot be told apart
_MERGES = 1024  # merges remembered


class Names(Protocol):
    """Who gives agents their ids: radix_policy.identity.AgentTable."""

    def intern(self, namespace: str, name: str) -> int:
        """An id for a name; 0 when there is none left."""
        ...

    def release(self, agent: int) -> None:
        """The agent is forgotten."""
        ...

    @property
    def vacant(self) -> bool:
        """Whether a new name would get an id of its own."""
        ...


class Landing(NamedTuple):
    """Where a prompt ended up."""

    anchor: Node | None
    leaf: Node  # holds the prompt's continuation
    shared: int  # tokens of the prompt that were known before this call
    sibling: Node | None  # the prompt left the known tree: the leaf used last among those that agree furthest
    forked: bool


class AnchorForest(PrefixForest):
    """Finds anchors."""

    def __init__(
        self,
        names: Names,
        *,
        window: int,
        forks: int,
        tail: int,
        leaves: int,
        budget: int,
    ) -> None:
        """`forks`: continuations that make an anchor; `tail`: tokens kept behind one; the rest: PrefixForest."""
        super().__init__(window, leaves, budget)
        self.forks, self.tail = forks, tail
        self.merged: dict[int, int] = {}  # agent id -> the id that it turned out to be; the latest ones
        self._names = names
        self._holders: dict[int, list[Node]] = {}  # agent id -> its anchors

    def anchor(self, agent: int) -> Node | None:
        """The agent's anchor (the latest when it has several), or None."""
        holders = self._holders.get(agent)
        return holders[-1] if holders else None

    def anchors(self) -> Iterator[Node]:
        """Every anchor."""
        return (node for holders in self._holders.values() for node in holders)

    def walk(self, prompt: Prompt, namespace: str, agent: int | None = None) -> Landing:
        """Find the prompt's place and learn from it. The prompt holds at least one token.

        `agent`: an id that the client's own name for the agent has; an anchor found by this prompt takes it.
        """
        limit = min(len(prompt), self.window)
        root, path, node, depth, forked, sibling = self._descend(prompt, namespace, limit)
        if forked:
            for above in (root, *path):
                if depth - above.end < NEAR:
                    above.forks += 1
        anchor = self._decide(path, root.forks - root.nested, namespace, agent)
        if forked:
            keep = self._keep(anchor, node)
            leaf = self._sprout(node, prompt, depth, min(limit, keep if keep > depth else depth + self.tail))
        else:
            leaf = self._latest(node)
            if leaf is node and depth == node.end < limit:
                self._extend(node, prompt, min(limit, self._keep(anchor, node)))
        self._use(leaf)
        return Landing(anchor, leaf, depth, sibling, forked)

    def deepen(self, leaf: Node, prompt: Prompt, anchor: Node) -> None:
        """Prompts that are not one session's agree in all that `leaf` keeps: keep more, from this prompt."""
        edge = leaf.edge
        leaf.limit = max(leaf.limit, anchor.end + _DEEPEN * max(self.tail, leaf.end - anchor.end))
        if not leaf.kids and edge is not None and prompt.agree(edge, leaf.end - len(edge)) == len(edge):
            self._extend(leaf, prompt, min(len(prompt), self.window, leaf.limit))
            self._use(leaf)

    def forgotten(self, leaf: Node) -> None:
        """An anchor that goes frees its agent's id."""
        agent = leaf.agent
        if agent is not None:
            self._dismiss(leaf)
            if agent not in self._holders:
                self._names.release(agent)

    def _keep(self, anchor: Node | None, node: Node) -> int:
        """Tokens from the root that a leaf at `node` may keep."""
        if anchor is None or not anchor.certain:
            return self.window
        return max(anchor.end + self.tail, node.limit)

    def _decide(self, path: list[Node], top: int, namespace: str, named: int | None) -> Node | None:
        """The deepest anchor on the path. `top`: continuations at the root, which is nobody's anchor."""
        best: Node | None = None
        fallen: list[Node] = []
        for node in path:
            own = node.forks - node.nested
            apart = best is None or node.end - best.end >= NEAR
            good = own >= self.forks and own >= min(STRONG, top / 2) and apart and not node.echo
            if good and best is not None and node.agent is None and self._echoes(node, best):
                good = False
            if good:
                if best is not None and best.agent == node.agent is not None and own >= STRONG:
                    self._dismiss(best)  # the two are agents in their own right: the deeper one keeps the id
                    self._promote(best, self._names.intern(namespace, self._name(best)))
                best, top = node, max(top, own)
            elif node.agent is not None:
                fallen.append(node)
        if best is not None and best.agent == 0 and self._names.vacant:
            self._dismiss(best)
        if best is not None and best.agent is None:
            # where a known agent's branch point turns out to lie higher up, the agent keeps its id
            weak = [n for n in fallen if n.end > best.end] or [n for n in self._below(best) if n.own < STRONG]
            known = {n.agent: None for n in weak}
            agent = next(iter(known)) if len(known) == 1 else named
            self._promote(best, self._names.intern(namespace, self._name(best)) if agent is None else agent)
        for node in fallen:
            old = node.agent
            assert old is not None
            self._dismiss(node)
            if best is not None and best.agent is not None and best.end < node.end and best.agent != old:
                self._merge(old, best.agent)
            if old not in self._holders:
                self._names.release(old)
        if best is not None and not best.certain and best.own >= CERTAIN:
            best.certain = True
            self._trim(best, best.end + self.tail, path)
        return best

    def _echoes(self, node: Node, above: Node) -> bool:
        """Whether the words between the two nodes stand behind another agent's anchor too; then they are no agent's."""
        words = self.prefix(node).slice(above.end, above.end + NEAR)
        found = False
        for anchor in self.anchors():
            if anchor is not above and anchor.kids:
                at, known = anchor, 0
                while known < len(words):
                    kid = at.kids.get(words.token(known))
                    if kid is None or kid.edge is None:
                        break
                    n = words.agree(kid.edge, known)
                    known += n
                    if n < len(kid.edge):
                        break
                    at = kid
                if known == len(words):
                    found = True
                    for other in [at, *self._below(at)]:
                        if other.end - anchor.end >= NEAR:
                            other.echo = True
        node.echo = found
        return found

    def _promote(self, node: Node, agent: int) -> None:
        node.agent = agent
        self._holders.setdefault(agent, []).append(node)
        self._count(node, 1)

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
        while len(self.merged) > _MERGES:
            del self.merged[next(iter(self.merged))]

    def _name(self, node: Node) -> str:
        return f"{LEARNED}{self.prefix(node).fingerprint(0, node.end):016x}"

    @staticmethod
    def _below(node: Node) -> Iterator[Node]:
        """Anchors below the node."""
        todo = [node]
        while todo:
            for kid in todo.pop().kids.values():
                if kid.inside:
                    todo.append(kid)
                    if kid.agent is not None:
                        yield kid
