"""The device and a host tier behind it, as SGLang's HiCache runs them under write-through.

Semantics of `UnifiedRadixCache` with HiCache (sglang 0.5.23, FULL component), copies done at once:

    write       an insert counts every node it passes; one counted `threshold` times and without a copy is written to
                the host together with its ancestors that have none, the root's side first. Where the host cannot make
                room the chain ends there, and so it does where the request may not write (`admission`)
    host room   is made by dropping leaves of the tree that are on the host only, whole, LRU first or by the policy
    device room a victim with a copy stays in the tree as a host-only node; one without is gone
    load-back   a prompt's host-only part comes back as a whole when it is admitted, if it has LOAD_LEAST tokens and the
                device can make room; else it is computed again, and the insert puts it where it was

So a node on the device or the host has all its ancestors there: what is on the device, and what has a copy, are two
trees that begin at the root. `forgets` is what the plug-in's mirror of the Rust core does: it never hears of a
host-only node, and one that is loaded back is new to it, and the loading request's.
"""

import heapq
from collections.abc import Callable
from typing import Any

from radix_policy.admission import Admission, AdmissionConfig, Tier
from radix_policy.events import PrefixMatched
from radix_policy.runtime import Runtime
from radix_policy.simulator.engine import CHUNK, Engine, Run
from radix_policy.simulator.tree import Cursor, SimNode, SimTree, advance, path_ids
from radix_policy.tree_view import NodeId, TreeListener

LOAD_LEAST = 10  # tokens; SGLang's load_back_threshold
HOST_QUANTUM = 256  # tokens; what the plug-in cuts off at least from a leaf that lives on in the host tier

Order = Callable[[NodeId], float]


class TieredTree(SimTree):
    """`SimTree` with copies of nodes on a host of `host_capacity` tokens. `used` and `protected` count the device."""

    def __init__(
        self,
        listener: TreeListener,
        page_size: int = 1,
        host_capacity: int = 0,
        threshold: int = 1,
        forgets: bool = False,
        load_least: int = LOAD_LEAST,
    ) -> None:
        self.host_capacity = host_capacity - host_capacity % page_size
        self.threshold = threshold
        self.forgets = forgets
        self.load_least = load_least
        self.order: Callable[[], Order] | None = None  # begins an eviction, says what a leaf is worth; None: LRU
        self.writes = True  # whether what is inserted now may be written
        self.written = self.restored = self.host_evicted = self.refused = 0  # tokens
        self.out = listener
        self._rid: str | None = None
        self.quiet: float | None = None  # stamp of the leaf that is being trimmed
        self.told: dict[NodeId, float] = {}  # stamps that the listener knows, of nodes that have another since
        super().__init__(_Ear(self), page_size)

    def reset(self) -> None:
        """Drop everything on both tiers."""
        self.copies: set[NodeId] = set()
        self.only: set[NodeId] = set()  # those of them that are not on the device
        self.host_used = 0
        self._hits: dict[NodeId, int] = {}
        self._counted: list[NodeId] = []
        self._leaves: list[tuple[float, NodeId]] = []  # host-only leaves, oldest first; stamps may have moved on
        super().reset()

    def insert(
        self,
        spans: Any,
        end: int,
        start: Cursor | None = None,
        counted_from: int = 0,
        rid: str | None = None,
        again: bool = False,
    ) -> Cursor:
        """See SimTree; then what has been counted often enough is written to the host."""
        self._counted.clear()
        self._rid = rid
        at = super().insert(spans, end, start, counted_from, rid, again)
        for node in self._counted:
            self._hits[node] = hits = self._hits.get(node, 0) + 1
            if hits >= self.threshold and node not in self.copies:
                self._write(self.nodes[node])
        return at

    def on_device(self, at: Cursor, spans: Any) -> Cursor:
        """The part of a match that is on the device."""
        node = at.node
        while node.id in self.only:
            node = node.parent  # type: ignore[assignment]
        if node is at.node:
            return at
        return Cursor(node, node.end, *advance(spans, 0, 0, node.end))

    def known_path(self, node: SimNode) -> list[NodeId]:
        """Ids from below the root to the node, as far as the listener knows them."""
        path = path_ids(node)
        return [known for known in path if known not in self.only] if self.forgets else path

    def host_prefix(self, node: SimNode) -> int:
        """Tokens of the node's path that have a copy: h of the admission rule."""
        while node.parent is not None and node.id not in self.copies:
            node = node.parent
        return node.end

    def load(self, node: SimNode, rid: str | None) -> int:
        """Bring the node and what is above it to the device; returns the tokens copied."""
        path = [self.nodes[n] for n in path_ids(node) if n in self.only]
        self._rid = rid
        for step in path:
            self.bring(step)
        tokens = sum(step.length for step in path)
        self.restored += tokens
        return tokens

    def bring(self, node: SimNode) -> None:
        """The host-only node has KV on the device again."""
        self.only.discard(node.id)
        self.used += node.length
        self.protected += node.length if node.locks else 0
        if self.forgets:
            assert node.parent is not None
            self.out.added(node.id, node.parent.id, node.length, node.end - node.length, node.stamp, self._rid)
        else:
            self.out.restored(node.id)

    def evict(self, node: NodeId) -> int:
        """See TreeControl: a node with a copy lives on in the host tier."""
        gone = self.nodes.get(node)
        if gone is None or not self._is_device_leaf(gone):
            raise ValueError(f"node {node} is no unlocked leaf of the device")
        if node not in self.copies:
            self._hits.pop(node, None)
            self.told.pop(node, None)
            return super().evict(node)
        self.only.add(node)
        self.used -= gone.length
        if self.forgets:
            self.out.removed(node)
        else:
            self.out.demoted(node)
        self._offer(gone)
        return gone.length

    def trim(self, node: NodeId, keep: int) -> int:
        """See TreeControl. What is cut off may have children on the host."""
        leaf = self.nodes.get(node)
        if leaf is None or not self._is_device_leaf(leaf):
            raise ValueError(f"node {node} is no unlocked leaf of the device")
        if not 0 < keep < leaf.length or keep % self.page_size:
            raise ValueError(f"cannot keep {keep} of {leaf.length} tokens with page size {self.page_size}")
        clock, stamp = self._clock, leaf.stamp
        if self.forgets:
            self._split_by_match(leaf, keep)
        else:
            self._split(leaf, keep, stamp)
            self._clock = clock
        return self.evict(node)

    def evict_host(self, tokens: int) -> int:
        """Drop host-only leaves until so many tokens are free there; returns those that became free."""
        freed = 0
        if self.order is not None:  # SGLang's own walk: score every leaf once, then one after the other
            by_score = self.order()
            leaves = [(by_score(n), self.nodes[n].stamp, n) for n in self.only if not self.nodes[n].children]
            heapq.heapify(leaves)
            while freed < tokens and leaves:
                node = self.nodes[heapq.heappop(leaves)[2]]
                freed += self._drop(node)
                above = node.parent
                if above is not None and self._is_host_leaf(above):
                    heapq.heappush(leaves, (by_score(above.id), above.stamp, above.id))
            return freed
        while freed < tokens and self._leaves:
            stamp, key = heapq.heappop(self._leaves)
            leaf = self.nodes.get(key)
            if leaf is None or not self._is_host_leaf(leaf):
                continue
            if leaf.stamp != stamp:
                heapq.heappush(self._leaves, (leaf.stamp, key))
                continue
            freed += self._drop(leaf)
        return freed

    # ---- inside ----

    def _split_by_match(self, leaf: SimNode, keep: int) -> None:
        """The Rust core is split by a lookup, which it takes for an access: its own LRU, which is the host tier's,
        sees the whole path and what is cut off used just now. The listener is told of no access."""
        told = self.told
        self.quiet = told.get(leaf.id, leaf.stamp)
        walk: SimNode | None = self._split(leaf, keep)
        told[walk.id] = told[leaf.id] = self.quiet  # type: ignore[union-attr]
        self.quiet = None
        stamp = self._clock
        self._clock += 1.0
        while walk is not None and walk.parent is not None:
            told.setdefault(walk.id, walk.stamp)
            walk.stamp = stamp
            stamp -= 0.00001
            walk = walk.parent

    def inherit(self, prefix: NodeId, suffix: NodeId) -> None:
        """A node was split: its upper part is where the lower one is."""
        if suffix in self.copies:
            self.copies.add(prefix)
        if suffix in self.only:
            self.only.add(prefix)
        if suffix in self._hits:
            self._hits[prefix] = self._hits[suffix]

    def counted(self, node: NodeId) -> None:
        """An insert passed the node."""
        if node in self.only:
            self.bring(self.nodes[node])
        self._counted.append(node)

    def _write(self, node: SimNode) -> None:
        """Copy the node to the host, and first those above it that have no copy."""
        chain = []
        walk: SimNode | None = node
        while walk is not None and walk.parent is not None and walk.id not in self.copies:
            chain.append(walk)
            walk = walk.parent
        if not self.writes:
            self.refused += node.length
            return
        for step in reversed(chain):
            short = step.length - (self.host_capacity - self.host_used)
            if short > 0 and self.evict_host(short) < short:
                return
            self.copies.add(step.id)
            self.host_used += step.length
            self.written += step.length

    def _drop(self, leaf: SimNode) -> int:
        """A host-only leaf leaves the tree."""
        assert leaf.parent is not None
        del self.nodes[leaf.id], leaf.parent.children[leaf.key]
        self.told.pop(leaf.id, None)
        self.only.discard(leaf.id)
        self.copies.discard(leaf.id)
        self._hits.pop(leaf.id, None)
        self.host_used -= leaf.length
        self.host_evicted += leaf.length
        if not self.forgets:
            self.out.removed(leaf.id)
        self._offer(leaf.parent)
        return leaf.length

    def _offer(self, node: SimNode) -> None:
        if self.order is None and self._is_host_leaf(node):
            heapq.heappush(self._leaves, (node.stamp, node.id))

    def _is_host_leaf(self, node: SimNode) -> bool:
        return node.id in self.only and not node.children

    def _is_device_leaf(self, node: SimNode) -> bool:
        if node.parent is None or node.locks or node.id in self.only:
            return False
        return all(child.id in self.only for child in node.children.values())


class _Ear:
    """What the tree tells goes through here: to the tiers, and to the listener if it knows the node."""

    def __init__(self, tree: TieredTree) -> None:
        self.tree = tree

    def _hidden(self, node: NodeId) -> bool:
        return self.tree.forgets and node in self.tree.only

    def reset(self, root: NodeId) -> None:
        self.tree.out.reset(root)

    def added(self, node: NodeId, parent: NodeId, length: int, start: int, stamp: float, rid: str | None) -> None:
        self.tree.out.added(node, parent, length, start, stamp, rid)

    def split(self, prefix: NodeId, suffix: NodeId, at: int, prefix_stamp: float, suffix_stamp: float) -> None:
        self.tree.inherit(prefix, suffix)
        if self.tree.quiet is not None:
            prefix_stamp = suffix_stamp = self.tree.quiet
        else:
            self.tree.told.pop(suffix, None)
        if not self._hidden(suffix):
            self.tree.out.split(prefix, suffix, at, prefix_stamp, suffix_stamp)

    def touched(self, node: NodeId, stamp: float) -> None:
        self.tree.told.pop(node, None)
        if not self._hidden(node):
            self.tree.out.touched(node, stamp)

    def reached(self, node: NodeId, stamp: float) -> None:
        raise NotImplementedError("SimTree tells each node")

    def counted(self, node: NodeId) -> None:
        self.tree.counted(node)
        self.tree.out.counted(node)

    def locked(self, node: NodeId) -> None:
        self.tree.out.locked(node)

    def unlocked(self, node: NodeId) -> None:
        self.tree.out.unlocked(node)

    def demoted(self, node: NodeId) -> None:
        raise NotImplementedError("SimTree has one tier")

    def restored(self, node: NodeId) -> None:
        raise NotImplementedError("SimTree has one tier")

    def removed(self, node: NodeId) -> None:
        self.tree.out.removed(node)


class TieredEngine(Engine):
    """`Engine` with a host tier, and who may write to it."""

    tree: TieredTree

    def __init__(
        self,
        runtime: Runtime,
        capacity: int,
        host_capacity: int,
        page_size: int = 1,
        chunk: int = CHUNK,
        trims: bool | None = None,
        *,
        admission: AdmissionConfig | None = None,
        threshold: int = 1,
        forgets: bool = False,
        ordered: bool = False,
        load_least: int = LOAD_LEAST,
    ) -> None:
        """`ordered`: the policy orders the host tier, too, which needs a tree that forgets nothing (SGLang's Python
        core); else LRU does (its Rust core). `threshold`: 1 for write_through, 2 for write_through_selective."""
        super().__init__(runtime, capacity, page_size, chunk, trims)
        self.tree = TieredTree(runtime, page_size, host_capacity, threshold, forgets, load_least)
        if ordered:
            if forgets:
                raise ValueError("a host tier whose nodes are forgotten cannot be ordered by the policy")
            self.tree.order = self._order
        self.admission = Admission(runtime.world, admission or AdmissionConfig(admission="none"), page_size)
        self.declined: set[str] = set()  # rids of running requests that may not write
        self.declines: dict[str, int] = {}  # every request that was declined, and h, its tokens with a host copy

    @property
    def declined_requests(self) -> int:
        """Requests that were not allowed to write."""
        return len(self.declines)

    def _order(self) -> Order:
        nodes, policy = self.runtime.world.nodes, self.runtime.policy
        if not self.runtime.begin_eviction():
            return lambda node: 0.0
        return lambda node: policy.score(nodes[node])

    def tier(self) -> Tier:
        """The host tier as the admission rule sees it."""
        tree = self.tree
        return Tier(tree.host_capacity, tree.host_used, tree.host_evicted)

    def admit(self, run: Run) -> bool:
        """See Engine. The prompt's host-only part is loaded back, if it is worth it and there is room."""
        tree = self.tree
        best = tree.match(run.spans, run.prompt - 1)
        at = tree.on_device(best, run.spans)
        if not run.matched:
            run.matched = True
            self.runtime.observe(PrefixMatched(run.rid, tree.known_path(best.node), best.tokens))
            request = self.runtime.requests.get(run.rid)
            if not self.admission.admits(request, run.prompt, tree.host_prefix(best.node), self.tier()):
                self.declined.add(run.rid)
                self.declines[run.rid] = tree.host_prefix(best.node)
        tree.lock(at.node)
        room = self.capacity - tree.protected - self.private - self.promised
        if run.prompt - at.tokens + run.output + self.page >= room:
            tree.unlock(at.node)
            return False
        if best.tokens - at.tokens >= max(tree.load_least, 1):
            at = self._load_back(run, at, best)
        run.cached = run.allocated = at.tokens
        run.at = at
        self.running[run.rid] = run
        self.promised += run.output - 1
        inserted = 0
        while run.allocated < run.prompt:
            end = run.prompt
            if self.chunk and run.allocated + self.chunk < end:
                end = run.allocated + self.chunk
            self._extend(run, end)
            inserted = self._insert(run, end, inserted)
        return True

    def finish(self, run: Run) -> None:
        tree = self.tree
        tree.writes = run.rid not in self.declined
        super().finish(run)
        tree.writes = True
        self.declined.discard(run.rid)

    def _insert(self, run: Run, end: int, inserted: int) -> int:
        tree = self.tree
        tree.writes = run.rid not in self.declined
        at = super()._insert(run, end, inserted)
        tree.writes = True
        return at

    def _load_back(self, run: Run, device: Cursor, best: Cursor) -> Cursor:
        """Bring the prompt's host-only part back and lock it; returns where the request begins to compute."""
        tree, tokens = self.tree, best.tokens - device.tokens
        if tokens > self.free:
            self._make_room(tokens)
            if tokens > self.free:
                return device
        tree.load(best.node, run.rid)
        tree.lock(best.node)
        tree.unlock(device.node)
        return best

    def _make_room(self, need: int) -> None:
        tree, page, policy = self.tree, self.page, self.runtime.policy
        short = need - self.free
        if short <= 0:
            return
        self.evictions += 1
        before = tree.used
        with self.runtime.evicting() as drain:
            while short > 0:
                node = drain.next()
                if node is None:
                    break
                drop = policy.cut(node, max(short, HOST_QUANTUM) if node.id in tree.copies else short, page)
                short -= tree.trim(node.id, node.length - drop) if drop < node.length else tree.evict(node.id)
        self.evicted += before - tree.used
