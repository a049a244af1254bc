"""The side table against a naive tree, over random operations."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radix_policy.leaf_index import naive_order
from radix_policy.nodes import Node
from radix_policy.runtime import Runtime


class Naive:
    """A tree of plain dicts: parent, length, locks held by anchor, residence."""

    def __init__(self) -> None:
        self.parent: dict[int, int | None] = {0: None}
        self.length = {0: 0}
        self.anchors: list[int] = []
        self.resident: dict[int, bool] = {0: True}

    def children(self, node: int) -> list[int]:
        return [n for n, p in self.parent.items() if p == node]

    def locks(self, node: int) -> int:
        count = 0
        for anchor in self.anchors:
            at: int | None = anchor
            while at is not None:
                count += at == node
                at = self.parent[at]
        return count

    def leaves(self) -> set[int]:
        return {
            n
            for n in self.parent
            if n and self.resident[n] and not self.locks(n) and not any(self.resident[c] for c in self.children(n))
        }


class SideTable(RuleBasedStateMachine):
    """Every listener call in random order; the mirror's leaves equal the naive tree's after each."""

    def __init__(self) -> None:
        super().__init__()
        self.runtime = Runtime("lru")
        self.runtime.reset(0)
        self.naive = Naive()
        self.next = 1
        self.clock = 0.0

    def tick(self) -> float:
        self.clock += 1
        return self.clock

    def pick(self, data: st.DataObject, nodes: list[int]) -> int:
        return data.draw(st.sampled_from(sorted(nodes)))

    @rule(data=st.data(), length=st.integers(1, 9))
    def add(self, data: st.DataObject, length: int) -> None:
        parent = self.pick(data, [n for n in self.naive.parent if self.naive.resident[n]])
        node, self.next = self.next, self.next + 1
        self.naive.parent[node], self.naive.length[node], self.naive.resident[node] = parent, length, True
        start, at = 0, parent
        while at:
            start += self.naive.length[at]
            at = self.naive.parent[at] or 0
        self.runtime.added(node, parent, length, start, self.tick(), None)

    @precondition(lambda self: any(n and length > 1 for n, length in self.naive.length.items()))
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        suffix = self.pick(data, [n for n, length in self.naive.length.items() if n and length > 1])
        at = data.draw(st.integers(1, self.naive.length[suffix] - 1))
        prefix, self.next = self.next, self.next + 1
        self.naive.parent[prefix] = self.naive.parent[suffix]
        self.naive.parent[suffix] = prefix
        self.naive.length[prefix], self.naive.length[suffix] = at, self.naive.length[suffix] - at
        self.naive.resident[prefix] = self.naive.resident[suffix]
        self.runtime.split(prefix, suffix, at, self.tick(), self.tick())

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        node = self.pick(data, list(self.naive.parent))
        self.runtime.touched(node, self.tick())

    @rule(data=st.data())
    def lock(self, data: st.DataObject) -> None:
        node = self.pick(data, list(self.naive.parent))
        self.naive.anchors.append(node)
        self.runtime.locked(node)

    @precondition(lambda self: self.naive.anchors)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node = self.pick(data, self.naive.anchors)
        self.naive.anchors.remove(node)
        self.runtime.unlocked(node)

    @precondition(lambda self: self.naive.leaves())
    @rule(data=st.data())
    def demote(self, data: st.DataObject) -> None:
        node = self.pick(data, list(self.naive.leaves()))
        self.naive.resident[node] = False
        self.runtime.demoted(node)

    @precondition(lambda self: not all(self.naive.resident.values()))
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        down = [n for n, r in self.naive.resident.items() if not r]
        node = self.pick(data, [n for n in down if self.naive.resident[self.naive.parent[n] or 0]])
        self.naive.resident[node] = True
        self.runtime.restored(node)

    @precondition(lambda self: self.removable())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        node = self.pick(data, self.removable())
        del self.naive.parent[node], self.naive.length[node], self.naive.resident[node]
        self.runtime.removed(node)

    def removable(self) -> list[int]:
        return [n for n in self.naive.parent if n and not self.naive.children(n) and not self.naive.locks(n)]

    @invariant()
    def mirror_is_exact(self) -> None:
        nodes, naive = self.runtime.world.nodes, self.naive
        assert {n.id for n in nodes.leaves()} == naive.leaves()
        assert {n for n in naive.parent if n in self.runtime.index} == naive.leaves()
        for node in nodes:
            assert node.length == naive.length[node.id]
            assert node.locks == (naive.locks(node.id) if node.id else 0)
            assert (node.parent.id if node.parent else None) == naive.parent[node.id]

    @invariant()
    def drain_equals_scoring_every_leaf(self) -> None:
        order = naive_order(self.runtime.world.nodes, self.runtime.policy.score)
        with self.runtime.evicting() as drain:
            first = drain.next()
        assert first is (order[0] if order else None)
        oldest = self.runtime.index.oldest()
        assert oldest is min(order, key=lambda n: (n.stamp, n.id), default=None)


SideTable.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSideTable = SideTable.TestCase


def test_identity_survives_a_split() -> None:
    runtime = Runtime("lru")
    runtime.reset(0)
    runtime.added(1, 0, 10, 0, 1.0, None)
    node: Node = runtime.world.nodes[1]
    node.agent, node.session, node.shared, node.hits = 3, 4, True, 5
    runtime.split(2, 1, 6, 2.0, 3.0)
    prefix = runtime.world.nodes[2]
    assert (prefix.agent, prefix.session, prefix.shared, prefix.hits) == (3, 4, True, 5)
    assert (prefix.start, prefix.length, node.start, node.length) == (0, 6, 6, 4)
    assert node.parent is prefix
