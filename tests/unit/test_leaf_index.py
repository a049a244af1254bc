"""The leaf index hands out the same victims as scoring every leaf and sorting."""

from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.leaf_index import LeafIndex, naive_order
from radix_policy.nodes import Node, NodeTable


class Scored:
    """A table whose nodes have a class and a score per class; class None stands alone and is scored by its id."""

    def __init__(self) -> None:
        self.classes: dict[int, int | None] = {}
        self.scores: dict[int | None, float] = {}
        self.calls = 0
        self.index = LeafIndex(self.class_of, self.score)
        self.table = NodeTable(self.index.file)
        self.table.reset(0)
        self.stamp = 0.0

    def class_of(self, node: Node) -> int | None:
        return self.classes[node.id]

    def score(self, node: Node) -> float:
        self.calls += 1
        kind = self.classes[node.id]
        return self.scores.setdefault(kind, 0.0) if kind is not None else float(node.id % 3)

    def add(self, node: int, parent: int, kind: int | None) -> None:
        self.classes[node] = kind
        self.stamp += 1
        self.table.add(node, parent, 1, 0, self.stamp, 0)

    def touch(self, node: int) -> None:
        self.stamp += 1
        self.table.stamp(self.table[node], self.stamp)


moves = st.lists(
    st.tuples(st.sampled_from(("add", "touch", "lock", "unlock", "rescore", "remove", "reclass")), st.integers(0, 30)),
    max_size=60,
)
kinds = st.lists(st.sampled_from((None, None, 0, 1, 2)), min_size=61, max_size=61)


@settings(max_examples=150, deadline=None)
@given(moves, kinds, st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_same_victims_as_the_naive_order(
    steps: list[tuple[str, int]], classes: list[int | None], scores: list[int]
) -> None:
    world = Scored()
    table, locked, next_id = world.table, [], 1
    world.scores = dict(enumerate(map(float, scores)))
    for move, pick in steps:
        ids = sorted(n.id for n in table if n.parent is not None)
        some = ids[pick % len(ids)] if ids else None
        if move == "add":
            world.add(next_id, some if some is not None and pick % 2 else 0, classes[next_id % len(classes)])
            next_id += 1
        elif some is None:
            continue
        elif move == "touch":
            world.touch(some)
        elif move == "lock":
            table.lock(some)
            locked.append(some)
        elif move == "unlock" and locked:
            table.unlock(locked.pop())
        elif move == "rescore":
            world.scores[pick % 3] = float(pick % 5)
        elif move == "remove" and table.is_leaf(table[some]):
            table.remove(some)
        elif move == "reclass":
            world.classes[some] = classes[pick]
            if some in world.index:
                world.index.file(table[some])
        expected = naive_order(table, world.score)
        assert len(world.index) == len(expected)
        assert {n.id for n in expected} == {n.id for n in table if n.id in world.index}
        oldest = min(expected, key=lambda n: (n.stamp, n.id), default=None)
        assert world.index.oldest() is oldest
        drain = world.index.drain()
        assert drain.next() is (expected[0] if expected else None)
        drain.end()
    for held in locked:
        table.unlock(held)
    # drain everything: a parent becomes a leaf on the way, and takes its place in the order
    drain = world.index.drain()
    while (node := drain.next()) is not None:
        assert node is naive_order(table, world.score)[0]
        table.remove(node.id)
    assert len(table) == 1


def test_a_call_scores_classes_not_leaves() -> None:
    world = Scored()
    for node in range(1, 1001):
        world.add(node, 0, node % 4)
    world.calls = 0
    drain = world.index.drain()
    for _ in range(100):
        node = drain.next()
        assert node is not None
        world.table.remove(node.id)
    drain.end()
    assert world.calls == 4
    assert world.index.classes == 4


def test_touching_forever_keeps_the_index_small() -> None:
    world = Scored()
    for node in range(1, 4):
        world.add(node, 0, 0)
    for _ in range(10_000):
        world.touch(1)
    heap = world.index._classes[0].heap
    assert len(heap) < 200


def test_scores_are_fixed_while_draining() -> None:
    world = Scored()
    world.scores = {0: 1.0, 1: 2.0}
    for node, kind in ((1, 0), (2, 0), (3, 1)):
        world.add(node, 0, kind)
    drain = world.index.drain()
    first = drain.next()
    assert first is not None
    world.table.remove(first.id)
    world.scores[0] = 5.0
    second = drain.next()
    assert second is not None
    assert (first.id, second.id) == (1, 2)
