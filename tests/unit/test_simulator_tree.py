"""The simulated tree against a set of token sequences, and its memory against what it must never do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.prompts import expand
from radix_policy.runtime import Runtime
from radix_policy.simulator import Engine, Run, SimTree, spans_of
from radix_policy.simulator.tree import advance, common, slice_spans
from tests.unit.small_workloads import MESSAGES

sequences = st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=6).map(tuple)
operations = st.lists(
    st.tuples(
        st.sampled_from(("insert", "insert", "match", "lock", "unlock", "evict", "trim")), sequences, st.integers(0, 40)
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(operations, st.sampled_from((1, 4)))
def test_against_a_set_of_prefixes(steps: list[tuple[str, tuple[tuple[int, int], ...], int]], page: int) -> None:
    tree = SimTree(Runtime("lru", page_size=page), page)
    runtime: Runtime = tree.listener  # type: ignore[assignment]
    cached: set[tuple[int, ...]] = {()}  # every prefix that is in the tree, in whole pages
    held = []
    for kind, spans, number in steps:
        tokens = tuple(expand(spans))
        limit = min(number, len(tokens)) if number % 3 else len(tokens)
        whole = limit - limit % page
        if kind == "insert":
            tree.insert(spans, limit)
            cached |= {tokens[:end] for end in range(0, whole + 1, page)}
        elif kind in ("match", "lock"):
            found = tree.match(spans, limit)
            assert found.tokens == max(e for e in range(0, whole + 1, page) if tokens[:e] in cached)
            assert found.node.end == found.tokens
            if kind == "lock":
                tree.lock(found.node)
                held.append(found.node)
        elif kind == "unlock" and held:
            tree.unlock(held.pop())
        else:
            with runtime.evicting() as drain:
                node = drain.next()
                if node is None:
                    continue
                assert not (node.locks or node.children)
                leaf = tree.nodes[node.id]
                path = _tokens(tree, node.id)
                keep = number % leaf.length // page * page
                gone = tree.trim(node.id, keep) if kind == "trim" and keep else tree.evict(node.id)
                cached -= {path[:end] for end in range(len(path) - gone + page, len(path) + 1, page)}
        _check(tree, runtime, cached, page)


def _tokens(tree: SimTree, node_id: int) -> tuple[int, ...]:
    node, parts = tree.nodes[node_id], []
    while node.parent is not None:
        parts.append(tuple(expand(node.spans)))
        node = node.parent
    return tuple(t for part in reversed(parts) for t in part)


def _check(tree: SimTree, runtime: Runtime, cached: set[tuple[int, ...]], page: int) -> None:
    nodes = [n for n in tree.nodes.values() if n.parent is not None]
    assert tree.used == sum(n.length for n in nodes) == page * (len(cached) - 1)
    assert tree.protected == sum(n.length for n in nodes if n.locks)
    assert all(n.length % page == 0 and n.length == sum(c for _, c in n.spans) for n in nodes)
    assert all(n.parent is not None and n.parent.children[n.key] is n for n in nodes)
    table = runtime.world.nodes
    for node in nodes:
        mirror = table[node.id]
        assert (mirror.length, mirror.start, mirror.locks, mirror.stamp) == (
            node.length,
            node.end - node.length,
            node.locks,
            node.stamp,
        )


def test_a_trim_keeps_the_head_and_its_recency() -> None:
    runtime = Runtime("lru")
    tree = SimTree(runtime)
    leaf = tree.insert(((5, 10),), 10).node
    stamp = leaf.stamp
    assert tree.trim(leaf.id, 7) == 3
    found = tree.nodes[next(i for i in tree.nodes if tree.nodes[i].parent is not None)]
    assert (found.spans, found.stamp, found.end) == (((5, 7),), stamp, 7)
    assert tree.match(((5, 10),), 10).tokens == 7


@pytest.mark.parametrize("keep", [0, 10, 11, 3])
def test_a_trim_must_leave_and_take_whole_pages(keep: int) -> None:
    tree = SimTree(page_size=2)
    leaf = tree.insert(((5, 10),), 10).node
    with pytest.raises(ValueError, match="cannot keep"):
        tree.trim(leaf.id, keep)


def test_what_is_no_unlocked_leaf_cannot_go() -> None:
    tree = SimTree()
    tree.insert(((5, 10),), 10)
    outer = tree.match(((5, 4),), 4).node
    leaf = tree.match(((5, 10),), 10).node
    tree.lock(leaf)
    for node in (outer.id, leaf.id, tree.root.id, 999):
        with pytest.raises(ValueError, match="no unlocked leaf"):
            tree.evict(node)
        with pytest.raises(ValueError, match="no unlocked leaf"):
            tree.trim(node, 1)
    tree.unlock(leaf)
    assert tree.evict(leaf.id) == 6
    assert tree.evict(outer.id) == 4


def test_equal_tokens_are_equal_however_they_are_cut() -> None:
    for page in (1, 4):
        tree = SimTree(page_size=page)
        tree.insert(((5, 3), (8, 5), (13, 4)), 12)
        assert tree.match(((5, 12),), 12).tokens == 12
        assert tree.match(((5, 1), (6, 11)), 12).tokens == 12


def test_pages_that_begin_alike_are_different_children() -> None:
    tree = SimTree(page_size=4)
    tree.insert(((5, 4),), 4)
    tree.insert(((5, 3), (100, 1)), 4)
    assert len(tree.root.children) == 2
    assert tree.match(((5, 3), (200, 1)), 4).tokens == 0


def test_real_token_ids() -> None:
    tokens = [7, 8, 9, 3, 3, 4, 100]
    assert spans_of(tokens) == ((7, 3), (3, 1), (3, 2), (100, 1))
    assert list(expand(spans_of(tokens))) == tokens
    assert spans_of([]) == ()
    tree = SimTree()
    tree.insert(spans_of(tokens), len(tokens))
    assert tree.match(spans_of([*tokens[:5], 6]), 6).tokens == 5


@given(sequences, st.integers(0, 30), st.integers(1, 30))
def test_places_and_slices(spans: tuple[tuple[int, int], ...], skip: int, take: int) -> None:
    tokens = list(expand(spans))
    skip = min(skip, len(tokens) - 1)
    take = min(take, len(tokens) - skip)
    place = advance(spans, 0, 0, skip)
    assert list(expand(slice_spans(spans, *place, take))) == tokens[skip : skip + take]


@given(sequences, sequences, st.integers(1, 30))
def test_common_tokens(left: tuple[tuple[int, int], ...], right: tuple[tuple[int, int], ...], room: int) -> None:
    a, b = list(expand(left)), list(expand(right))
    room = min(room, len(a), len(b))
    expected = next((i for i in range(room) if a[i] != b[i]), room)
    n, *place = common(left, right, 0, 0, room)
    assert n == expected
    assert tuple(place) == advance(right, 0, 0, n)


# ---- the engine's memory ----


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(sequences, st.sampled_from(MESSAGES), st.integers(0, 3)), min_size=1, max_size=12),
    st.sampled_from((1, 4)),
    st.sampled_from((0, 8)),
    st.booleans(),
    st.integers(40, 90),
)
def test_tokens_are_accounted_for(
    requests: list[tuple[tuple[tuple[int, int], ...], tuple[int, int], int]],
    page: int,
    chunk: int,
    trims: bool,
    capacity: int,
) -> None:
    engine = Engine(Runtime("lru", page_size=page), capacity, page, chunk, trims)
    running: list[Run] = []
    for number, (prompt, output, steps) in enumerate(requests):
        run = Run(f"r{number}", prompt, (output,), sum(n for _, n in prompt), output[1])
        if not engine.fits(run):
            continue
        engine.arrive(run)
        while not engine.admit(run):
            assert running, "an empty engine must admit what fits"
            engine.finish(running.pop(0))
        running.append(run)
        assert 0 <= run.cached < run.prompt
        engine.grow([(r, min(steps, r.kv - r.allocated)) for r in running])
        _account(engine, running)
    while running:
        engine.finish(running.pop())
        _account(engine, running)
    assert engine.private == engine.promised == engine.tree.protected == 0
    assert not engine.runtime.requests


def _account(engine: Engine, running: list[Run]) -> None:
    page = engine.page
    assert engine.free == engine.capacity - engine.tree.used - engine.private >= 0
    assert engine.private == sum(r.private for r in running)
    assert engine.promised == sum(r.kv - r.allocated for r in running)
    for run in running:
        inserted = run.prompt - run.prompt % page
        assert run.private == -(-run.allocated // page) * page - inserted
        assert run.at.tokens == inserted


def test_many_decode_steps_at_once_are_single_steps() -> None:
    for trims in (False, True):
        trees = []
        for stride in (1, 7, 1000):
            engine = Engine(Runtime("lru"), 100, trims=trims)
            for number in range(6):
                run = Run(f"r{number}", ((1000 * number, 30),), ((1000 * number + 30, 25),), 30, 25)
                engine.arrive(run)
                assert engine.admit(run)
                while run.allocated < run.kv:
                    engine.grow([(run, min(stride, run.kv - run.allocated))])
                engine.finish(run)
            trees.append({_tokens(engine.tree, i) for i in engine.tree.nodes})
        assert trees[0] == trees[1] == trees[2]


def test_a_trim_takes_no_more_than_is_needed() -> None:
    engine = Engine(Runtime("lru"), 100, trims=True)
    for number, length in enumerate((60, 50)):
        run = Run(f"r{number}", ((1000 * number, length),), ((1000 * number + length, 1),), length, 1)
        engine.arrive(run)
        assert engine.admit(run)
        engine.finish(run)
    assert engine.free == 0
    assert engine.tree.match(((0, 60),), 60).tokens == 50
