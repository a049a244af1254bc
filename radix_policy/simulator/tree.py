"""SGLang's radix tree, on run-length keys: what one operation does to the tree, and what it tells.

Semantics of `UnifiedTreeCore` (sglang 0.5.23, Python core, FULL component, no host tier) without its tensors: a node's
key is a tuple of spans (`radix_policy.prompts`), so an operation costs O(spans on the path), not O(tokens). Real token
ids fit too: `spans_of` makes runs of them. Stamps follow SGLang's access counter, one float64 for all:

    match:   a split takes three ticks (prefix, its creation, suffix); then the whole path is stamped with one more,
             the deepest node first, 1e-5 less per level
    insert:  one tick for the root, one for each node walked over; a split on the way takes three; a new leaf two

Tokens, not pages, are counted everywhere; with a page size above 1 every count here is a multiple of it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from radix_policy.prompts import Span, Spans
from radix_policy.tree_view import NodeId, TreeListener


class Silent:
    """A listener that ignores everything."""

    def reset(self, root: NodeId) -> None: ...
    def added(self, node: NodeId, parent: NodeId, length: int, start: int, stamp: float, rid: str | None) -> None: ...
    def split(self, prefix: NodeId, suffix: NodeId, at: int, prefix_stamp: float, suffix_stamp: float) -> None: ...
    def touched(self, node: NodeId, stamp: float) -> None: ...
    def reached(self, node: NodeId, stamp: float) -> None: ...
    def counted(self, node: NodeId) -> None: ...
    def locked(self, node: NodeId) -> None: ...
    def unlocked(self, node: NodeId) -> None: ...
    def demoted(self, node: NodeId) -> None: ...
    def restored(self, node: NodeId) -> None: ...
    def removed(self, node: NodeId) -> None: ...


class SimNode:
    """One node: `spans` hold its `length` tokens, `end` tokens lie between the root and its last token."""

    __slots__ = ("children", "end", "id", "key", "length", "locks", "parent", "spans", "stamp")

    def __init__(self, node_id: NodeId, parent: "SimNode | None", key: object, spans: Spans, length: int, end: int):
        self.id = node_id
        self.parent = parent
        self.key = key  # under which the parent holds it: the first token, or the spans of the first page
        self.spans = spans
        self.length = length
        self.end = end
        self.locks = 0
        self.stamp = 0.0
        self.children: dict[object, SimNode] = {}


class Cursor(NamedTuple):
    """A place in a sequence and the deepest tree node that ends there."""

    node: SimNode
    tokens: int  # tokens before the place
    span: int  # which span holds the next token
    offset: int  # tokens of that span before the place


class SimTree:
    """The tree of one engine. Implements `tree_view.TreeControl`; tells `listener` what happens."""

    def __init__(self, listener: TreeListener | None = None, page_size: int = 1) -> None:
        self.page_size = page_size
        self.listener: TreeListener = listener if listener is not None else Silent()
        self._clock = 0.0
        self._next_id = 0
        self.reset()

    def reset(self) -> None:
        """Drop everything; ids and stamps go on."""
        self.root = SimNode(self._next_id, None, None, (), 0, 0)
        self._next_id += 1
        self._clock += 2.0
        self.nodes: dict[NodeId, SimNode] = {self.root.id: self.root}
        self.used = 0  # tokens in nodes
        self.protected = 0  # of these, in locked nodes
        self.listener.reset(self.root.id)

    @property
    def evictable(self) -> int:
        """Tokens in unlocked nodes: all of them can be had, since a locked node's ancestors are locked."""
        return self.used - self.protected

    def match(self, spans: Spans, limit: int) -> Cursor:
        """The longest cached prefix of the first `limit` tokens, in whole pages; stamps its path."""
        limit -= limit % self.page_size
        if limit <= 0:
            return Cursor(self.root, 0, 0, 0)
        node, pos, i, off = self.root, 0, 0, 0
        while pos < limit:
            child = node.children.get(self._key(spans, i, off))
            if child is None:
                break
            n, i2, off2 = self._overlap(child, spans, i, off, limit - pos)
            if n < child.length:
                node = self._split(child, n)
                pos, i, off = pos + n, i2, off2
                break
            node, pos, i, off = child, pos + n, i2, off2
        stamp = self._clock
        self._clock = stamp + 1.0
        touched = self.listener.touched
        walk, root = node, self.root
        while walk is not root:
            walk.stamp = stamp
            touched(walk.id, stamp)
            stamp -= 0.00001
            walk = walk.parent  # type: ignore[assignment]
        return Cursor(node, pos, i, off)

    def insert(
        self,
        spans: Spans,
        end: int,
        start: Cursor | None = None,
        counted_from: int = 0,
        rid: str | None = None,
        again: bool = False,
    ) -> Cursor:
        """Insert the first `end` tokens (cut down to whole pages). Returns where they end in the tree.

        `start` names a node on the path that the caller holds locked (it may have been split since). Nodes that end
        past `counted_from` count the insert (SGLang's `inserted_len`). `again`: another insert walks over the path to
        `start` next, so its stamps are told then.
        """
        end -= end % self.page_size
        clock = self._clock + 1.0  # the root's own stamp
        listener = self.listener
        touched, counted = listener.touched, listener.counted
        root = self.root
        node, pos, i, off = root, 0, 0, 0
        if start is not None and start.node is not root and end >= start.tokens:
            held, pos, i, off = start
            path = []
            walk = held
            while walk is not root:
                path.append(walk)
                walk = walk.parent  # type: ignore[assignment]
            if again:
                clock += len(path)
                path.clear()
            for walk in reversed(path):
                walk.stamp = clock
                touched(walk.id, clock)
                clock += 1.0
                if walk.end > counted_from:
                    counted(walk.id)
            node = held
        while pos < end:
            key = self._key(spans, i, off)
            child = node.children.get(key)
            if child is None:
                leaf_spans = slice_spans(spans, i, off, end - pos)
                leaf = SimNode(self._next_id, node, key, leaf_spans, end - pos, end)
                self._next_id += 1
                node.children[key] = self.nodes[leaf.id] = leaf
                leaf.stamp = clock
                self.used += leaf.length
                listener.added(leaf.id, node.id, leaf.length, pos, clock, rid)
                clock += 2.0
                if end > counted_from:
                    counted(leaf.id)
                i, off = advance(spans, i, off, end - pos)
                node, pos = leaf, end
                break
            child.stamp = clock
            touched(child.id, clock)
            clock += 1.0
            n, i, off = self._overlap(child, spans, i, off, end - pos)
            if n < child.length:
                self._clock = clock
                child = self._split(child, n)
                clock = self._clock
            pos += n
            node = child
            if pos > counted_from:
                counted(node.id)
        self._clock = clock
        return Cursor(node, pos, i, off)

    def lock(self, node: SimNode) -> None:
        """One more lock on the node and everything above it."""
        root, walk = self.root, node
        if walk is root:
            return
        while walk is not root:
            if walk.locks == 0:
                self.protected += walk.length
            walk.locks += 1
            walk = walk.parent  # type: ignore[assignment]
        self.listener.locked(node.id)

    def unlock(self, node: SimNode) -> None:
        """One lock less on the node and everything above it."""
        root, walk = self.root, node
        if walk is root:
            return
        while walk is not root:
            walk.locks -= 1
            if walk.locks == 0:
                self.protected -= walk.length
            walk = walk.parent  # type: ignore[assignment]
        self.listener.unlocked(node.id)

    # ---- tree_view.TreeControl ----

    def evict(self, node: NodeId) -> int:
        """See TreeControl. ValueError when the node is no unlocked leaf."""
        gone = self.nodes.get(node)
        if gone is None or gone.children or gone.locks or gone.parent is None:
            raise ValueError(f"node {node} is no unlocked leaf")
        del self.nodes[node]
        del gone.parent.children[gone.key]
        self.used -= gone.length
        self.listener.removed(node)
        return gone.length

    def trim(self, node: NodeId, keep: int) -> int:
        """See TreeControl. The kept head has a new id and the leaf's stamp. ValueError on a bad `keep`."""
        leaf = self.nodes.get(node)
        if leaf is None or leaf.children or leaf.locks or leaf.parent is None:
            raise ValueError(f"node {node} is no unlocked leaf")
        if not 0 < keep < leaf.length or keep % self.page_size:
            raise ValueError(f"cannot keep {keep} of {leaf.length} tokens with page size {self.page_size}")
        clock, stamp = self._clock, leaf.stamp
        self._split(leaf, keep, stamp)
        self._clock = clock  # a trim is no access
        return self.evict(node)

    # ---- inside ----

    def _key(self, spans: Spans, i: int, off: int) -> object:
        """What tells a child from its siblings: its first token, or the runs of its first page."""
        page = self.page_size
        if page == 1:
            return spans[i][0] + off
        key: list[int] = []  # first, count, first, count, ...
        after = -1
        while page:
            first, count = spans[i]
            first, count = first + off, min(count - off, page)
            if first == after:
                key[-1] += count
            else:
                key += (first, count)
            after = first + count
            page -= count
            i, off = i + 1, 0
        return tuple(key)

    def _overlap(self, child: SimNode, spans: Spans, i: int, off: int, room: int) -> tuple[int, int, int]:
        """Tokens (whole pages, at most `room`) that the child shares with the sequence, and the place after them."""
        n, i2, off2 = common(child.spans, spans, i, off, child.length if child.length < room else room)
        rest = n % self.page_size
        if rest:
            n -= rest
            i2, off2 = advance(spans, i, off, n)
        return n, i2, off2

    def _split(self, child: SimNode, at: int, stamp: float | None = None) -> SimNode:
        """Cut the first `at` tokens off into a new node above; `stamp` overrides both stamps."""
        prefix = SimNode(self._next_id, child.parent, child.key, slice_spans(child.spans, 0, 0, at), at, 0)
        self._next_id += 1
        prefix.end = child.end - child.length + at
        prefix.locks = child.locks
        clock = self._clock
        self._clock = clock + 3.0
        prefix.stamp = clock if stamp is None else stamp
        child.stamp = clock + 2.0 if stamp is None else stamp
        i, off = advance(child.spans, 0, 0, at)
        child.spans = slice_spans(child.spans, i, off, child.length - at)
        child.length -= at
        child.parent.children[child.key] = prefix  # type: ignore[union-attr]
        child.parent = prefix
        child.key = self._key(child.spans, 0, 0)
        prefix.children[child.key] = child
        self.nodes[prefix.id] = prefix
        self.listener.split(prefix.id, child.id, at, prefix.stamp, child.stamp)
        return prefix


def path_ids(node: SimNode) -> list[NodeId]:
    """Ids from below the root down to the node."""
    ids = []
    walk: SimNode = node
    while walk.parent is not None:
        ids.append(walk.id)
        walk = walk.parent
    ids.reverse()
    return ids


def common(held: Spans, spans: Spans, i: int, off: int, room: int) -> tuple[int, int, int]:
    """Tokens that `held` shares with the sequence from (i, off) on, at most `room`, and the place after them."""
    n = 0
    for first, count in held:
        while count:
            other, have = spans[i]
            if other + off != first:
                return n, i, off
            step = have - off
            if count < step:
                step = count
            if step >= room - n:
                step = room - n
                n, off = room, off + step
                return (n, i + 1, 0) if off == have else (n, i, off)
            n += step
            off += step
            if off == have:
                i, off = i + 1, 0
            first += step
            count -= step
    return n, i, off


def advance(spans: Sequence[Span], i: int, off: int, n: int) -> tuple[int, int]:
    """The place `n` tokens after (i, off)."""
    while n:
        have = spans[i][1] - off
        if n < have:
            return i, off + n
        n -= have
        i, off = i + 1, 0
    return i, off


def slice_spans(spans: Spans, i: int, off: int, n: int) -> Spans:
    """The spans of `n` tokens from (i, off) on."""
    first, count = spans[i]
    count -= off
    if n <= count:
        return ((first + off, n),)
    out = [(first + off, count)]
    n -= count
    while n:
        i += 1
        span = spans[i]
        if span[1] > n:
            out.append((span[0], n))
            break
        out.append(span)
        n -= span[1]
    return tuple(out)


def spans_of(tokens: Sequence[int]) -> Spans:
    """Real token ids as spans: maximal runs of consecutive ids."""
    return tuple(_runs(tokens))


def _runs(tokens: Sequence[int]) -> Iterator[Span]:
    first = count = 0
    for token in tokens:
        if count and token == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = token, 1
    if count:
        yield first, count
