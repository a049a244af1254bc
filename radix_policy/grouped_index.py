"""Which leaf goes next when scores change with time, without scoring every class.

A policy that can write its score as

    score(node) = value(group, weight(node)),   value never falling as the weight rises

needs only the lightest leaf of each group. For `scout` a group is a session: the session's own factor moves with every
moment of silence and scales all of its leaves alike, while their order among each other stays until its next call.

Inside a group, leaves of one class have equal weights at all times, so a class is a recency list and only its oldest
leaf counts. `version(group)` says when weights have to be read again; a class whose `class_of` has changed by then is
filed anew. A dead group (ended session) is worth nothing: its leaves share one recency list with all other dead ones.

    refresh of one group:  O(its classes), once per version;   eviction call: O(live groups + victims x log)

The interface is LeafIndex's. `oldest` is LRU's victim at O(log leaves).
"""

import heapq
from collections.abc import Hashable
from typing import Protocol

from radix_policy.nodes import Node
from radix_policy.tree_view import NodeId

_SLACK = 64  # stale heap entries tolerated beyond the live ones
_DEAD: Hashable = ("dead",)

Entry = tuple[float, NodeId]  # (stamp, id)


class GroupedPolicy(Protocol):
    """What the index asks of a policy."""

    def group_of(self, node: Node) -> Hashable:
        """The node's group; may change only when the node is touched, inserted, split or refiled."""
        ...

    def class_of(self, node: Node) -> Hashable:
        """The node's class inside its group."""
        ...

    def weight(self, node: Node) -> float:
        """Inside a group the lowest goes first; equal inside a class until the group's version changes."""
        ...

    def value(self, group: Hashable, weight: float) -> float:
        """The score of a node of that group and weight."""
        ...

    def version(self, group: Hashable) -> Hashable:
        """Changes whenever a weight in the group may have."""
        ...

    def is_dead(self, group: Hashable) -> bool:
        """Whether a group that appears just now is dead."""
        ...


class _Class:
    __slots__ = ("heap", "live")

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self.live = 0


class _Group:
    __slots__ = ("classes", "dead", "heads", "leaves", "version")

    def __init__(self, dead: bool) -> None:
        self.classes: dict[Hashable, _Class] = {}
        # (weight, stamp, id, class) of at least every class's oldest leaf, cleaned lazily, while `version` is current
        self.heads: list[tuple[float, float, NodeId, Hashable]] = []
        self.leaves: dict[NodeId, None] = {}
        self.version: Hashable = None
        self.dead = dead


class _Filed:
    __slots__ = ("group", "key", "node", "stamp")

    def __init__(self, group: Hashable, key: Hashable, stamp: float, node: Node) -> None:
        self.group = group
        self.key = key
        self.stamp = stamp
        self.node = node


class GroupedIndex:
    """Evictable leaves by group and class. Fed by NodeTable's `on_leaf`; read through `drain`."""

    def __init__(self, policy: GroupedPolicy) -> None:
        self._policy = policy
        self._groups: dict[Hashable, _Group] = {}
        self._live: dict[Hashable, _Group] = {}  # the groups that are not dead
        self._filed: dict[NodeId, _Filed] = {}
        self._dead: list[Entry] = []
        self._dead_count = 0
        self._lru: list[Entry] = []
        self._drain: GroupedDrain | None = None

    def __len__(self) -> int:
        return len(self._filed)

    def __contains__(self, node: NodeId) -> bool:
        return node in self._filed

    @property
    def classes(self) -> int:
        """Classes that hold a leaf; all dead ones count as one."""
        return sum(len(g.classes) for g in self._live.values()) + (self._dead_count > 0)

    @property
    def groups(self) -> int:
        """Live groups that hold a leaf."""
        return len(self._live)

    def clear(self) -> None:
        """Forget every leaf."""
        self._groups.clear()
        self._live.clear()
        self._filed.clear()
        self._dead, self._dead_count, self._lru = [], 0, []
        self._drain = None

    def file(self, node: Node, is_leaf: bool = True) -> None:
        """The node is a leaf now (its class and stamp may have changed), or it is none any more."""
        old = self._filed.get(node.id)
        if not is_leaf:
            if old is not None:
                self._unfile(node.id, old)
            return
        policy = self._policy
        group, key, stamp = policy.group_of(node), policy.class_of(node), node.stamp
        if old is not None:
            if old.key == key and old.group == group and old.stamp == stamp:
                return
            self._unfile(node.id, old)
        home = self._groups.get(group)
        if home is None:
            home = self._groups[group] = _Group(policy.is_dead(group))
            if not home.dead:
                self._live[group] = home
        home.leaves[node.id] = None
        self._filed[node.id] = _Filed(group, key, stamp, node)
        if len(self._lru) > 2 * len(self._filed) + _SLACK:
            self._lru = [(f.stamp, i) for i, f in self._filed.items()]
            heapq.heapify(self._lru)
        else:
            heapq.heappush(self._lru, (stamp, node.id))
        self._place(group, home, key, stamp, node)
        if self._drain is not None:
            self._drain.push(group, home, node)

    def bury(self, group: Hashable) -> None:
        """The group is worth nothing from now on."""
        home = self._groups.get(group)
        if home is None or home.dead:
            return
        home.dead, home.version = True, None
        del self._live[group]
        home.classes.clear()
        home.heads.clear()
        for node_id in home.leaves:
            heapq.heappush(self._dead, (self._filed[node_id].stamp, node_id))
        self._dead_count += len(home.leaves)
        if self._drain is not None:
            self._drain.refresh_dead()

    def exhume(self, group: Hashable) -> None:
        """The group is alive again."""
        home = self._groups.get(group)
        if home is None or not home.dead:
            return
        home.dead = False
        self._live[group] = home
        self._dead_count -= len(home.leaves)
        for node_id in home.leaves:
            filed = self._filed[node_id]
            filed.key = self._policy.class_of(filed.node)
            self._place(filed.group, home, filed.key, filed.stamp, filed.node)

    def oldest(self) -> Node | None:
        """LRU's victim: the leaf with the lowest (stamp, id) of all."""
        heap, filed = self._lru, self._filed
        while heap:
            found = filed.get(heap[0][1])
            if found is not None and found.stamp == heap[0][0]:
                return found.node
            heapq.heappop(heap)
        return None

    def drain(self, lru: bool = False) -> "GroupedDrain":
        """Begin an eviction call: by score, or in plain LRU order."""
        self._drain = GroupedDrain(self, lru)
        return self._drain

    # ---- what a drain reads ----

    def head_of(self, group: Hashable, home: _Group) -> tuple[float, Node] | None:
        """(weight, node) of the group's next leaf."""
        version = self._policy.version(group)
        if home.version != version:
            self._reweigh(home, version)
        heads = home.heads
        while heads:
            weight, stamp, node_id, key = heads[0]
            if self._is_live(key, (stamp, node_id)):
                return weight, self._filed[node_id].node
            heapq.heappop(heads)
            leaves = home.classes.get(key)
            head = self._head(key, leaves) if leaves is not None else None
            if head is not None:
                heapq.heappush(heads, (self._policy.weight(head), head.stamp, head.id, key))
        return None

    def dead_head(self) -> Node | None:
        """The dead leaf that goes next."""
        heap, filed = self._dead, self._filed
        while heap:
            found = filed.get(heap[0][1])
            if found is not None and found.stamp == heap[0][0] and self._groups[found.group].dead:
                return found.node
            heapq.heappop(heap)
        return None

    # ---- bookkeeping ----

    def _place(self, group: Hashable, home: _Group, key: Hashable, stamp: float, node: Node) -> None:
        if home.dead:
            self._dead_count += 1
            if len(self._dead) > 2 * self._dead_count + _SLACK:
                self._dead = [
                    (f.stamp, i) for g in self._groups.values() if g.dead for i in g.leaves for f in (self._filed[i],)
                ]
                heapq.heapify(self._dead)
            else:
                heapq.heappush(self._dead, (stamp, node.id))
            return
        leaves = home.classes.get(key)
        if leaves is None:
            leaves = home.classes[key] = _Class()
        elif len(leaves.heap) > 2 * leaves.live + _SLACK:
            leaves.heap = [e for e in leaves.heap if self._is_live(key, e)]
            heapq.heapify(leaves.heap)
        heapq.heappush(leaves.heap, (stamp, node.id))
        leaves.live += 1
        # only a leaf that came to the front of its class can change who is next in the group
        if home.version == self._policy.version(group) and self._head(key, leaves) is node:
            heapq.heappush(home.heads, (self._policy.weight(node), stamp, node.id, key))

    def _is_live(self, key: Hashable, entry: Entry) -> bool:
        filed = self._filed.get(entry[1])
        return filed is not None and filed.stamp == entry[0] and filed.key == key

    def _unfile(self, node: NodeId, old: _Filed) -> None:
        del self._filed[node]
        home = self._groups[old.group]
        del home.leaves[node]
        if home.dead:
            self._dead_count -= 1
        else:
            leaves = home.classes[old.key]
            leaves.live -= 1
            if leaves.live == 0:
                del home.classes[old.key]
        if not home.leaves:
            del self._groups[old.group]
            self._live.pop(old.group, None)

    def _head(self, key: Hashable, leaves: _Class) -> Node | None:
        heap = leaves.heap
        while heap:
            if self._is_live(key, heap[0]):
                return self._filed[heap[0][1]].node
            heapq.heappop(heap)
        return None

    def _reweigh(self, home: _Group, version: Hashable) -> None:
        policy = self._policy
        home.version = None  # `_place` leaves the heads alone meanwhile
        for key, leaves in list(home.classes.items()):
            head = self._head(key, leaves)
            if head is not None and policy.class_of(head) != key:
                self._reclass(home, key, leaves)
        home.heads = []
        for key, leaves in home.classes.items():
            head = self._head(key, leaves)
            if head is not None:
                home.heads.append((policy.weight(head), head.stamp, head.id, key))
        heapq.heapify(home.heads)
        home.version = version

    def _reclass(self, home: _Group, key: Hashable, leaves: _Class) -> None:
        del home.classes[key]
        for entry in leaves.heap:
            if self._is_live(key, entry):
                filed = self._filed[entry[1]]
                filed.key = self._policy.class_of(filed.node)
                self._place(filed.group, home, filed.key, filed.stamp, filed.node)


class GroupedDrain:
    """One eviction call: hands out victims, best first, and takes in leaves that appear on the way."""

    def __init__(self, index: GroupedIndex, lru: bool) -> None:
        self._index = index
        self._lru = lru
        self._heap: list[tuple[float, float, NodeId, Hashable]] = []
        if lru:
            return
        value = index._policy.value
        for group, home in index._live.items():
            head = index.head_of(group, home)
            if head is not None:
                weight, node = head
                self._heap.append((value(group, weight), node.stamp, node.id, group))
        dead = index.dead_head()
        if dead is not None:
            self._heap.append((0.0, dead.stamp, dead.id, _DEAD))
        heapq.heapify(self._heap)

    def push(self, group: Hashable, home: _Group, node: Node) -> None:
        """A leaf was filed while draining."""
        if self._lru:
            return
        if home.dead:
            heapq.heappush(self._heap, (0.0, node.stamp, node.id, _DEAD))
        else:
            policy = self._index._policy
            value = policy.value(group, policy.weight(node))
            heapq.heappush(self._heap, (value, node.stamp, node.id, group))

    def refresh_dead(self) -> None:
        """A group died while draining."""
        dead = self._index.dead_head()
        if dead is not None and not self._lru:
            heapq.heappush(self._heap, (0.0, dead.stamp, dead.id, _DEAD))

    def next(self) -> Node | None:
        """The leaf to lose next, or None when no leaf is left. The caller evicts it before asking again."""
        index = self._index
        if self._lru:
            return index.oldest()
        heap = self._heap
        while heap:
            _, stamp, node_id, group = heap[0]
            found = index._filed.get(node_id)
            if found is not None and found.stamp == stamp:
                return found.node
            heapq.heappop(heap)
            if group is _DEAD:
                self.refresh_dead()
                continue
            home = index._live.get(group)
            head = index.head_of(group, home) if home is not None else None
            if head is not None:
                weight, node = head
                heapq.heappush(heap, (index._policy.value(group, weight), node.stamp, node.id, group))
        return None

    def end(self) -> None:
        """The eviction call is over."""
        if self._index._drain is self:
            self._index._drain = None
