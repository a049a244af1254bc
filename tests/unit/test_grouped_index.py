"""The grouped index against scoring every leaf and sorting, under all that a policy may do; and what it keeps."""

import signal
from collections.abc import Hashable, Iterable, Iterator
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from radix_policy.grouped_index import Gauge, GroupedIndex
from radix_policy.nodes import Node, NodeTable
from tests.unit.test_bounds import deep_size

GROUPS = 5
KEYS = 4


class Fake:
    """A policy with all freedoms of the protocol.

    Groups 0, 2 and 4 bring a gauge, 1 and 3 are asked: there the weights of class 3 rise with the stamp, all others are
    equal inside the class. A class may turn into another when the group's version changes. No two groups have a class
    of the same name, unless `alike`.
    """

    def __init__(self, alike: bool = False) -> None:
        self.alike = alike
        self.places: dict[int, tuple[int, int]] = {}
        self.weights = [[float(k) for k in range(KEYS)] for _ in range(GROUPS)]
        self.alias = [[*range(KEYS)] for _ in range(GROUPS)]
        self.gauges = [Gauge() for _ in range(GROUPS)]
        for gauge in self.gauges:
            gauge.factor = 1.0
        self.dead: set[int] = set()
        self.sweeps = 0
        self.changed: dict[int, None] = {}
        self.weighed = 0
        self.valued = 0

    def place_of(self, node: Node) -> tuple[int, tuple[int, int]]:
        group, key = self.places[node.id]
        return group, (0 if self.alike else group, self.alias[group][key])

    def weigh(self, group: Hashable, key: Hashable, node: Node) -> float:
        assert isinstance(group, int) and isinstance(key, tuple) and (group, key) == self.place_of(node)
        self.weighed += 1
        return self.weight(group, key[1], node)

    def weight(self, group: int, key: int, node: Node) -> float:
        return self.weights[group][key] + (node.stamp / 64 if key == 3 and group % 2 else 0.0)

    def gauge(self, group: Hashable) -> Gauge | None:
        assert isinstance(group, int)
        return self.gauges[group] if group % 2 == 0 else None

    def value(self, group: Hashable, weight: float) -> float:
        assert isinstance(group, int)
        self.valued += 1
        return self.gauges[group].factor * weight

    def version(self, group: Hashable) -> int:
        assert isinstance(group, int)
        return self.gauges[group].version

    def is_dead(self, group: Hashable) -> bool:
        return group in self.dead

    def changes(self) -> tuple[int, Iterable[Hashable]]:
        found, self.changed = [*self.changed], {}
        return self.sweeps, found

    def score(self, node: Node) -> float:
        """By definition."""
        group, (_, key) = self.place_of(node)
        if group in self.dead:
            return 0.0
        return self.gauges[group].factor * self.weight(group, key, node)


class World:
    """A table of nodes that files its leaves, and every leaf scored and sorted beside it."""

    def __init__(self, alike: bool = False) -> None:
        self.policy = Fake(alike)
        self.index = GroupedIndex(self.policy)
        self.table = NodeTable(self.index.file)
        self.table.reset(0)
        self.stamp = 0.0
        self.ids = 0
        self.locked: list[int] = []

    def nodes(self) -> list[Node]:
        return [n for n in self.table if n.parent is not None]

    def order(self) -> list[Node]:
        return sorted(self.table.leaves(), key=lambda n: (self.policy.score(n), n.stamp, n.id))

    def add(self, parent: int, group: int, key: int) -> int:
        self.ids += 1
        self.stamp += 1.0
        self.policy.places[self.ids] = (group, key)
        self.table.add(self.ids, parent, 1, 0, self.stamp, 0)
        return self.ids

    def touch(self, node: int) -> None:
        self.stamp += 1.0
        self.table.stamp(self.table[node], self.stamp)


picks = st.integers(0, 1000)
groups = st.integers(0, GROUPS - 1)
keys = st.integers(0, KEYS - 1)


class Machine(RuleBasedStateMachine):
    """Any order of what a tree and a policy may do; the first victims are always those of the sorted list."""

    @initialize(leaves=st.lists(st.tuples(groups, keys), max_size=14), eager=st.booleans())
    def begin(self, leaves: list[tuple[int, int]], eager: bool) -> None:
        self.world = World()
        self.eager = eager  # ask for a victim after every step, or after some
        for group, key in leaves:
            self.world.add(0, group % 2 if eager else group, key)

    def some(self, pick: int) -> Node | None:
        nodes = self.world.nodes()
        return nodes[pick % len(nodes)] if nodes else None

    # ---- the tree ----

    @rule(pick=picks, group=groups, key=keys)
    def add(self, pick: int, group: int, key: int) -> None:
        above = self.some(pick)
        self.world.add(above.id if above is not None and pick % 3 == 0 else 0, group, key)

    @rule(pick=picks, group=groups, key=keys, moves=st.booleans())
    def touch(self, pick: int, group: int, key: int, moves: bool) -> None:
        node = self.some(pick)
        if node is not None:
            if moves:
                self.world.policy.places[node.id] = (group, key)
            self.world.touch(node.id)

    @rule(pick=picks, group=groups, key=keys)
    def refile(self, pick: int, group: int, key: int) -> None:
        node = self.some(pick)
        if node is not None and node.id in self.world.index:
            self.world.policy.places[node.id] = (group, key)
            self.world.index.file(node)

    @rule(pick=picks)
    def lock(self, pick: int) -> None:
        node = self.some(pick)
        if node is not None:
            self.world.table.lock(node.id)
            self.world.locked.append(node.id)

    @rule(pick=picks)
    def unlock(self, pick: int) -> None:
        if self.world.locked:
            self.world.table.unlock(self.world.locked.pop(pick % len(self.world.locked)))

    @rule(pick=picks)
    def remove(self, pick: int) -> None:
        node = self.some(pick)
        if node is not None and self.world.table.is_leaf(node):
            self.world.table.remove(node.id)

    @rule()
    def forget_all(self) -> None:
        if self.world.ids % 7 == 0:  # rarely
            self.world.index.clear()
            self.world.table.reset(0)
            self.world.locked.clear()

    # ---- the policy ----

    @rule(group=groups, factor=st.sampled_from((0.25, 0.5, 1.0, 2.0)))
    def value_moves(self, group: int, factor: float) -> None:
        policy = self.world.policy
        policy.gauges[group].factor = factor
        policy.changed[group] = None

    @rule(factors=st.lists(st.sampled_from((0.25, 0.5, 1.0, 2.0)), min_size=GROUPS, max_size=GROUPS))
    def all_values_move(self, factors: list[float]) -> None:
        for gauge, factor in zip(self.world.policy.gauges, factors):
            gauge.factor = factor
        self.world.policy.sweeps += 1

    @rule(group=groups, key=keys, weight=st.integers(0, 4), swept=st.booleans())
    def weights_move(self, group: int, key: int, weight: int, swept: bool) -> None:
        policy = self.world.policy
        policy.weights[group][key] = float(weight)
        self.new_version(group, swept)

    @rule(group=groups, source=st.integers(0, 2), into=keys, swept=st.booleans())
    def class_turns_into_another(self, group: int, source: int, into: int, swept: bool) -> None:
        alias = self.world.policy.alias[group]
        gone = alias[source]
        for key in range(KEYS):
            if alias[key] == gone and gone != 3:
                alias[key] = into
        self.new_version(group, swept)

    def new_version(self, group: int, swept: bool) -> None:
        policy = self.world.policy
        policy.gauges[group].version += 1
        if swept:
            policy.sweeps += 1
        else:
            policy.changed[group] = None

    @rule(group=groups)
    def bury(self, group: int) -> None:
        self.world.policy.dead.add(group)
        self.world.index.bury(group)

    @rule(group=groups)
    def exhume(self, group: int) -> None:
        self.world.policy.dead.discard(group)
        self.world.index.exhume(group)

    # ---- what is asked ----

    @invariant()
    def the_next_victim_is_the_first_by_score(self) -> None:
        if self.eager:
            self.evict(0)

    @rule(most=st.integers(0, 4))
    def evict(self, most: int) -> None:
        world = self.world
        drain = world.index.drain()
        assert drain.next() is next(iter(world.order()), None)
        for _ in range(most):
            expected, node = world.order(), drain.next()
            assert node is (expected[0] if expected else None)
            if node is None:
                break
            world.table.remove(node.id)
        drain.end()

    @rule()
    def evict_all_in_lru_order(self) -> None:
        world = self.world
        if world.ids % 5:  # rarely
            return
        drain = world.index.drain(lru=True)
        while True:
            expected = min(world.table.leaves(), key=lambda n: (n.stamp, n.id), default=None)
            assert drain.next() is expected
            if expected is None:
                break
            world.table.remove(expected.id)
        drain.end()

    @rule()
    def count(self) -> None:
        world = self.world
        leaves = [*world.table.leaves()]
        assert len(world.index) == len(leaves)
        assert {n.id for n in leaves} == {n.id for n in world.table if n.id in world.index}
        places = {world.policy.place_of(n) for n in leaves if world.policy.place_of(n)[0] not in world.policy.dead}
        assert world.index.groups == len({group for group, _ in places})
        assert world.index.oldest() is min(leaves, key=lambda n: (n.stamp, n.id), default=None)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            for node in self.world.locked:
                if node in self.world.table:
                    self.world.table.unlock(node)
            self.evict(10_000)
            assert not self.world.nodes() and len(self.world.index) == 0


TestAgainstSorting = Machine.TestCase
TestAgainstSorting.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_leaf_that_is_filed_anew_leaves_a_group_that_has_a_class_of_the_same_name() -> None:
    world = World(alike=True)
    first, _ = world.add(0, 0, 1), world.add(0, 0, 1)
    assert len(world.index) == 2
    world.policy.places[first] = (1, 1)
    world.policy.weights[1][1] = 9.0
    world.index.file(world.table[first])

    def stop(*_: object) -> None:
        raise AssertionError("it looks for a victim forever")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        assert world.index.drain().next() is world.order()[0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- what a call costs ----


def test_a_call_looks_at_classes_once_per_version_and_then_at_what_changed() -> None:
    world = World()
    for n in range(1000):
        world.add(0, n % 5, n // 5 % 3)
    policy, index = world.policy, world.index
    for gauge in policy.gauges:
        gauge.factor = 1.0
    assert index.drain().next() is world.order()[0]
    policy.weighed = policy.valued = 0
    assert index.drain().next() is world.order()[0]
    assert (policy.weighed, policy.valued) == (0, 0), "nothing changed"
    policy.gauges[1].factor = 0.5
    policy.changed[1] = None
    assert index.drain().next() is world.order()[0]
    assert policy.weighed == 0 and policy.valued == 1, "one group is asked again"
    policy.gauges[1].version += 1
    policy.changed[1] = None
    assert index.drain().next() is world.order()[0]
    assert policy.weighed <= 3, "its classes, not its leaves"
    policy.weighed = policy.valued = 0
    policy.sweeps += 1
    assert index.drain().next() is world.order()[0]
    assert policy.weighed == 0 and policy.valued <= 2, "of the groups without a gauge"
    drain = index.drain()
    for _ in range(100):
        node = drain.next()
        assert node is not None
        world.table.remove(node.id)
    assert policy.weighed <= 2 * 100


def test_classes_and_groups_are_counted_and_all_dead_ones_are_one() -> None:
    world = World()
    for group in range(4):
        for key in range(3):
            world.add(0, group, key)
    assert (world.index.classes, world.index.groups, len(world.index)) == (12, 4, 12)
    world.index.drain()
    for group in (1, 2):
        world.policy.dead.add(group)
        world.index.bury(group)
    assert (world.index.classes, world.index.groups, len(world.index)) == (7, 2, 12)
    world.policy.dead.discard(1)
    world.index.exhume(1)
    assert (world.index.classes, world.index.groups, len(world.index)) == (10, 3, 12)


def test_the_dead_go_first_in_lru_order_but_behind_a_live_leaf_of_no_worth_that_is_older() -> None:
    world = World()
    older = world.add(0, 0, 0)  # weight 0
    dead = [world.add(0, 1, 2), world.add(0, 2, 1), world.add(0, 1, 1)]
    live = world.add(0, 0, 1)
    for group in (1, 2):
        world.policy.dead.add(group)
        world.index.bury(group)
    drain, found = world.index.drain(), []
    while (node := drain.next()) is not None:
        found.append(node.id)
        world.table.remove(node.id)
    assert found == [older, *dead, live]


def test_values_are_those_of_the_last_drain() -> None:
    world = World()
    first, second = world.add(0, 0, 1), world.add(0, 1, 2)
    drain = world.index.drain()
    found = drain.next()
    assert found is not None and found.id == first
    world.table.remove(first)
    world.policy.gauges[1].factor = 0.0
    world.add(0, 3, 1)
    found = drain.next()
    assert found is not None and found.id == world.ids, "what appears on the way takes its place"
    world.table.remove(world.ids)
    found = drain.next()
    assert found is not None and found.id == second


# ---- what is kept ----


def touched_forever(kind: str) -> Iterator[int]:
    """Bytes of the index after ever more touches of few leaves, with an eviction call after each."""
    world, random = World(), Random(1)
    light = world.add(0, 0, 0)
    some = [world.add(0, 0, key) for key in (1, 2, 2, 3)] + [world.add(0, 1, 1), world.add(0, 2, 2)]
    if kind == "dead":
        world.policy.dead.add(0)
        world.index.bury(0)
    for _ in range(4):
        for n in range(1500):
            node = random.choice(some)
            world.touch(node)
            if kind == "moving":
                world.policy.changed[n % 3] = None
            elif kind == "swept":
                world.policy.sweeps += 1
            elif kind == "refiled":
                world.policy.places[node] = (random.randrange(3), random.randrange(KEYS))
                world.index.file(world.table[node])
            elif kind == "versions":
                world.policy.gauges[n % 3].version += 1
                world.policy.changed[n % 3] = None
            elif kind == "buried":
                (world.policy.dead.add if n % 2 else world.policy.dead.discard)(1)
                (world.index.bury if n % 2 else world.index.exhume)(1)
            if kind != "still" and n % 50 == 0:
                for gauge in world.policy.gauges:  # as whenever the model is rebuilt
                    gauge.version += 1
                world.policy.sweeps += 1
            with_lru = kind == "lru" or (kind == "both" and n % 2 == 0)
            found = world.index.drain(lru=with_lru).next()
            assert found is not None and (found.id == light or kind in ("dead", "buried", "refiled"))
        yield deep_size(world.index)


@pytest.mark.parametrize("kind", ["still", "moving", "swept", "refiled", "versions", "dead", "buried", "lru", "both"])
def test_touching_forever_keeps_the_index_small(kind: str) -> None:
    sizes = [*touched_forever(kind)]
    assert sizes[-1] < 60_000 and sizes[-1] < sizes[0] + 15_000, sizes


def test_a_leaf_that_is_told_again_and_again_between_two_calls_costs_nothing_later() -> None:
    world = World()
    for _ in range(3):
        world.add(0, 0, 1)
    world.index.drain().next()
    before = deep_size(world.index)
    for _ in range(5000):
        world.touch(1)
        world.table.lock(2)
        world.table.unlock(2)
    assert deep_size(world.index) < before + 20_000
    found = world.index.drain().next()
    assert found is world.order()[0]


@pytest.mark.parametrize("dead", [False, True])
def test_a_leaf_that_is_locked_and_freed_forever_keeps_the_index_small(dead: bool) -> None:
    """Untouched, it is filed under the same stamp each time."""
    world, sizes = World(), []
    for _ in range(20):
        world.add(0, 0, 1)
    if dead:
        world.policy.dead.add(0)
        world.index.bury(0)
    for _ in range(3):
        for _ in range(1000):
            world.table.lock(5)
            world.index.drain().next()
            world.table.unlock(5)
            world.index.drain().next()
        sizes.append(deep_size(world.index))
    assert sizes[2] < sizes[0] + 15_000


def test_groups_that_come_and_go_leave_nothing_behind() -> None:
    world, sizes = World(), []
    for _ in range(3):
        for n in range(600):
            world.add(0, n % 4, n % KEYS)
            node = world.add(0, n % 4, 0)
            if n % 3 == 0:
                world.policy.dead.add(n % 4)
                world.index.bury(n % 4)
            drain = world.index.drain()
            while (victim := drain.next()) is not None:
                world.table.remove(victim.id)
            world.policy.dead.discard(n % 4)
            world.index.exhume(n % 4)
            assert node not in world.index
        world.policy.places.clear()
        sizes.append(deep_size(world.index))
        assert (len(world.index), world.index.groups, world.index.classes) == (0, 0, 0)
    assert sizes[2] < sizes[0] + 2_000


def test_a_group_that_dies_and_comes_back_forever_keeps_the_index_small() -> None:
    """A client that says after each of its calls that it was the last."""
    world, sizes = World(), []
    for _ in range(20):
        world.add(0, 0, 1)
    for _ in range(3):
        for _ in range(300):
            world.policy.dead.add(0)
            world.index.bury(0)
            world.policy.dead.discard(0)
            world.index.exhume(0)
            world.index.drain().next()
        sizes.append(deep_size(world.index))
    assert sizes[2] < sizes[0] + 15_000
