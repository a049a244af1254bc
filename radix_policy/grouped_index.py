"""Which leaf goes next when scores change with time, without scoring every class.

A policy that can write its score as

    score(node) = value(group, weight(node)),   value never falling as the weight rises

needs only the lightest leaf of each group. For `scout` a group is a session: the session's own factor moves with every
moment of silence and scales all of its leaves alike, while their order among each other stays until its next call.

Inside a group, leaves of one class have equal weights, or weights that rise with the stamp: a class is a recency list
and only its oldest leaf counts. `version(group)` says when weights have to be read again; a class whose `class_of` has
changed by then is filed anew. A dead group (ended session) is worth nothing: its leaves share one recency list with all
other dead ones.

    one group:      O(its classes), once per version
    eviction call:  O(groups that changed + victims x log), and now and then O(live groups), when every value changed

The interface is LeafIndex's. `oldest` is LRU's victim at O(log leaves).
"""

import heapq
from collections.abc import Hashable, Iterable
from typing import NamedTuple, Protocol

from radix_policy.nodes import Node
from radix_policy.tree_view import NodeId

_SLACK = 64  # stale heap entries tolerated beyond the live ones

Entry = tuple[float, NodeId]  # (stamp, id)


class Gauge:
    """What a group may bring along: its value is factor * weight, all leaves of a class weigh the same, and weights are
    read again when `version` changes."""

    __slots__ = ("factor", "version")

    def __init__(self) -> None:
        self.factor = 0.0
        self.version = 0


class GroupedPolicy(Protocol):
    """What the index asks of a policy."""

    def place_of(self, node: Node) -> tuple[Hashable, Hashable]:
        """The node's group, and its class in there.

        They may change only when the node is touched, inserted, split or refiled; the class also when the group's
        version changes.
        """
        ...

    def weigh(self, group: Hashable, key: Hashable, node: Node) -> float:
        """The weight of the node, which is of that group and class.

        Inside a group the lowest goes first; until the group's version changes it is equal inside a class or, in a
        group without a gauge, rises with the stamp.
        """
        ...

    def gauge(self, group: Hashable) -> Gauge | None:
        """The group's gauge; None when `value` and `version` are to be asked."""
        ...

    def value(self, group: Hashable, weight: float) -> float:
        """The score of a node of that group and weight."""
        ...

    def version(self, group: Hashable) -> int:
        """Changes whenever a weight in the group may have."""
        ...

    def is_dead(self, group: Hashable) -> bool:
        """Whether a group that appears just now is dead."""
        ...

    def changes(self) -> tuple[int, Iterable[Hashable]]:
        """(a count that rises when any value may have changed, the groups whose values have since the last ask)."""
        ...


class _Class:
    __slots__ = ("heap", "live", "weight")

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self.live = 0
        self.weight: float | None = None  # of each leaf at the group's version, where the group has a gauge


class _Group:
    __slots__ = ("classes", "dead", "gauge", "heads", "leaves", "ticket", "version")

    def __init__(self, dead: bool, gauge: Gauge | None) -> None:
        self.classes: dict[Hashable, _Class] = {}
        # (weight, stamp, id, class) of at least every class's oldest leaf, cleaned lazily, while `version` is current
        self.heads: list[tuple[float, float, NodeId, Hashable]] = []
        self.leaves: dict[NodeId, None] = {}
        self.version = -1
        self.dead = dead
        self.gauge = gauge
        self.ticket = 0  # of the valid entry in the index's top heap; 0: none


class _Filed(NamedTuple):
    group: Hashable
    key: Hashable
    stamp: float
    node: Node


_filed = tuple.__new__  # _Filed(...) at a third of its cost


class GroupedIndex:
    """Evictable leaves by group and class. Fed by NodeTable's `on_leaf`; read through `drain`.

    `alone`: no other index asks the policy for its changes; else every live group's value is read anew at each drain.
    """

    def __init__(self, policy: GroupedPolicy, alone: bool = True) -> None:
        self._policy = policy
        self._alone = alone
        self._groups: dict[Hashable, _Group] = {}
        self._live: dict[Hashable, _Group] = {}  # the groups that are not dead
        self._filed: dict[NodeId, _Filed] = {}
        # what was told since it was last looked at: a leaf, or None for one that is none any more. A request touches,
        # locks and unlocks its leaf many times between two evictions; only where that ends has to be filed
        self._told: dict[NodeId, Node | None] = {}
        self._dead: list[Entry] = []
        self._dead_count = 0
        self._lru: list[Entry] | None = None
        self._top: list[tuple[float, float, NodeId, int, Hashable]] = []  # (value, stamp, id, ticket, group)
        self._tickets = 0
        self._touched: dict[Hashable, None] = {}  # groups whose next leaf may have changed
        self._sweep = -1

    def __len__(self) -> int:
        self._file_told()
        return len(self._filed)

    def __contains__(self, node: NodeId) -> bool:
        self._file_told()
        return node in self._filed

    @property
    def classes(self) -> int:
        """Classes that hold a leaf; all dead ones count as one."""
        self._file_told()
        return sum(len(g.classes) for g in self._live.values()) + (self._dead_count > 0)

    @property
    def groups(self) -> int:
        """Live groups that hold a leaf."""
        self._file_told()
        return len(self._live)

    def clear(self) -> None:
        """Forget every leaf."""
        self._groups.clear()
        self._live.clear()
        self._filed.clear()
        self._told.clear()
        self._dead, self._dead_count, self._lru, self._top = [], 0, None, []
        self._touched.clear()

    def file(self, node: Node, is_leaf: bool = True) -> None:
        """The node is a leaf now (its class and stamp may have changed), or it is none any more."""
        self._told[node.id] = node if is_leaf else None

    def drop(self, node: NodeId) -> None:
        """The node is no leaf, or is gone altogether."""
        self._told[node] = None

    def bury(self, group: Hashable) -> None:
        """The group is worth nothing from now on."""
        home = self._groups.get(group)
        if home is None or home.dead:
            return
        home.dead, home.version, home.gauge, home.ticket = True, -1, None, 0
        del self._live[group]
        home.classes.clear()
        home.heads.clear()
        self._dead_count += len(home.leaves)
        if len(self._dead) + len(home.leaves) > 2 * self._dead_count + _SLACK:
            self._list_dead()
            return
        for node_id in home.leaves:
            heapq.heappush(self._dead, (self._filed[node_id].stamp, node_id))

    def exhume(self, group: Hashable) -> None:
        """The group is alive again."""
        home = self._groups.get(group)
        if home is None or not home.dead:
            return
        home.dead = False
        home.gauge = self._policy.gauge(group)
        self._live[group] = home
        self._dead_count -= len(home.leaves)
        for node_id in home.leaves:
            _, _, stamp, node = self._filed[node_id]
            key = self._policy.place_of(node)[1]
            self._filed[node_id] = _Filed(group, key, stamp, node)
            self._place(group, home, key, stamp, node)
        self._touched[group] = None

    def oldest(self) -> Node | None:
        """LRU's victim: the leaf with the lowest (stamp, id) of all."""
        self._file_told()
        filed = self._filed
        if self._lru is None or len(self._lru) > 2 * len(filed) + _SLACK:
            self._lru = [(f.stamp, i) for i, f in filed.items()]
            heapq.heapify(self._lru)
        heap = self._lru
        while heap:
            found = filed.get(heap[0][1])
            if found is not None and found.stamp == heap[0][0]:
                return found.node
            heapq.heappop(heap)
        return None

    def drain(self, lru: bool = False) -> "GroupedDrain":
        """Begin an eviction call: by score, or in plain LRU order."""
        self._file_told()
        if not lru:
            self._lru = None  # built again when it is needed
            sweep, groups = self._policy.changes() if self._alone else (-1, ())
            if not self._alone or sweep != self._sweep or len(self._top) > 4 * len(self._live) + _SLACK:
                self._sweep = sweep
                self._top = []
                self._touched.clear()
                for group, home in self._live.items():
                    self._offer(group, home)
            else:
                for group in groups:
                    self._touched[group] = None
        return GroupedDrain(self, lru)

    def best(self) -> Node | None:
        """The leaf with the lowest (score, stamp, id), scores as of the last `drain`."""
        if self._told:
            self._file_told()
        live = self._live
        if self._touched:
            for group in self._touched:
                home = live.get(group)
                if home is not None:
                    self._offer(group, home)
            self._touched.clear()
        top, filed = self._top, self._filed
        while top:
            value, stamp, node_id, ticket, group = top[0]
            home = live.get(group)
            if home is None or home.ticket != ticket:
                heapq.heappop(top)
                continue
            found = filed.get(node_id)
            if found is None or found.stamp != stamp or found.group != group:
                heapq.heappop(top)
                self._offer(group, home)
                continue
            dead = self.dead_head() if self._dead_count else None
            if dead is not None and (0.0, dead.stamp, dead.id) < (value, stamp, node_id):
                return dead
            return found.node
        return self.dead_head()

    def _offer(self, group: Hashable, home: _Group) -> None:
        """Put the group's next leaf up for choice, in place of what was there before."""
        gauge = home.gauge
        version = gauge.version if gauge is not None else self._policy.version(group)
        if home.version != version:
            self._reweigh(group, home, version)
        heads = home.heads
        while heads:
            weight, stamp, node_id, key = heads[0]
            if self._is_live(group, key, (stamp, node_id)):
                self._tickets = home.ticket = self._tickets + 1
                value = gauge.factor * weight if gauge is not None else self._policy.value(group, weight)
                heapq.heappush(self._top, (value, stamp, node_id, home.ticket, group))
                return
            heapq.heappop(heads)
            leaves = home.classes.get(key)
            head = self._head(group, key, leaves) if leaves is not None else None
            if head is not None:
                if gauge is None:
                    weight = self._policy.weigh(group, key, head)
                heapq.heappush(heads, (weight, head.stamp, head.id, key))
        home.ticket = 0

    # ---- what a drain reads ----

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

    def _file_told(self) -> None:
        if not self._told:
            return
        told, self._told = self._told, {}
        policy, all_filed = self._policy, self._filed
        for node_id, node in told.items():
            old = all_filed.get(node_id)
            if node is None:
                if old is not None:
                    self._unfile(node_id, old)
                continue
            group, key = policy.place_of(node)
            stamp = node.stamp
            if old is not None:
                if old.stamp == stamp and old.key == key and old.group == group:
                    continue
                self._unfile(node_id, old)
            home = self._groups.get(group)
            if home is None:
                dead = policy.is_dead(group)
                home = self._groups[group] = _Group(dead, None if dead else policy.gauge(group))
                if not dead:
                    self._live[group] = home
            home.leaves[node_id] = None
            all_filed[node_id] = _filed(_Filed, (group, key, stamp, node))
            if self._lru is not None:
                heapq.heappush(self._lru, (stamp, node_id))
            self._place(group, home, key, stamp, node)

    def _place(self, group: Hashable, home: _Group, key: Hashable, stamp: float, node: Node) -> None:
        if home.dead:
            self._dead_count += 1
            if len(self._dead) > 2 * self._dead_count + _SLACK:
                self._list_dead()
            else:
                heapq.heappush(self._dead, (stamp, node.id))
            return
        leaves = home.classes.get(key)
        if leaves is None:
            leaves = home.classes[key] = _Class()
        elif len(leaves.heap) > 2 * leaves.live + _SLACK:
            leaves.heap = [*{e for e in leaves.heap if self._is_live(group, key, e)}]
            heapq.heapify(leaves.heap)
        heapq.heappush(leaves.heap, (stamp, node.id))
        leaves.live += 1
        self._touched[group] = None
        # only a leaf that came to the front of its class can change who is next in the group
        gauge = home.gauge
        version = gauge.version if gauge is not None else self._policy.version(group)
        if len(home.heads) > 2 * len(home.leaves) + _SLACK:
            home.version = -1  # read again at the next offer, without the stale entries
        elif home.version == version and self._head(group, key, leaves) is node:
            weight = leaves.weight if gauge is not None else None
            if weight is None:
                weight = leaves.weight = self._policy.weigh(group, key, node)
            heapq.heappush(home.heads, (weight, stamp, node.id, key))

    def _list_dead(self) -> None:
        """The dead leaves anew, without the stale entries."""
        self._dead = [(self._filed[i].stamp, i) for g in self._groups.values() if g.dead for i in g.leaves]
        heapq.heapify(self._dead)

    def _is_live(self, group: Hashable, key: Hashable, entry: Entry) -> bool:
        filed = self._filed.get(entry[1])
        return filed is not None and filed.stamp == entry[0] and filed.key == key and filed.group == group

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
            self._touched[old.group] = None
        if not home.leaves:
            del self._groups[old.group]
            self._live.pop(old.group, None)

    def _head(self, group: Hashable, key: Hashable, leaves: _Class) -> Node | None:
        heap = leaves.heap
        while heap:
            if self._is_live(group, key, heap[0]):
                return self._filed[heap[0][1]].node
            heapq.heappop(heap)
        return None

    def _reweigh(self, group: Hashable, home: _Group, version: int) -> None:
        """Read every class's weight again; classes that are no longer called what they were are filed anew first."""
        policy = self._policy
        heads, moved = [], []
        for key, leaves in home.classes.items():
            head = self._head(group, key, leaves)
            if head is None:
                continue
            if policy.place_of(head)[1] != key:
                moved.append((key, leaves))
            else:
                leaves.weight = policy.weigh(group, key, head)
                heads.append((leaves.weight, head.stamp, head.id, key))
        if moved:
            home.version = -1  # `_place` leaves the heads alone meanwhile
            for key, leaves in moved:
                self._reclass(group, home, key, leaves)
            self._reweigh(group, home, version)
            return
        heapq.heapify(heads)
        home.heads = heads
        home.version = version

    def _reclass(self, group: Hashable, home: _Group, key: Hashable, leaves: _Class) -> None:
        del home.classes[key]
        for entry in leaves.heap:
            if self._is_live(group, key, entry):
                _, _, stamp, node = self._filed[entry[1]]
                new = self._policy.place_of(node)[1]
                self._filed[node.id] = _Filed(group, new, stamp, node)
                self._place(group, home, new, stamp, node)


class GroupedDrain:
    """One eviction call: hands out victims, best first, and takes in leaves that appear on the way."""

    def __init__(self, index: GroupedIndex, lru: bool) -> None:
        self._index = index
        self._lru = lru

    def next(self) -> Node | None:
        """The leaf to lose next, or None when no leaf is left. The caller evicts it before asking again."""
        return self._index.oldest() if self._lru else self._index.best()

    def end(self) -> None:
        """The eviction call is over."""
