"""Trimming on SGLang's real tree: a victim loses what is needed from its end, and the rest stays as it was."""

import random
from typing import Any

import pytest

from radix_policy.events import RequestArrived
from radix_policy.prompts import TokenPrompt
from tests.tree.conformance import blocks
from tests.tree.trees import SglangTree, assert_mirror

pytest.importorskip("sglang")

LEAST = 16  # trim_least


CORES = pytest.mark.parametrize("core", ["python", "twin", "rust"])


def tree_with_two(page: int = 1, **more: Any) -> SglangTree:
    """Two leaves of 48 tokens, the one of 0s older."""
    tree = SglangTree(page, 256, **more)
    tree.insert(blocks(0, 1, 2))
    tree.insert(blocks(5, 6, 7))
    return tree


@CORES
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("need", [1, 15, 16, 17, 32, 47])
def test_no_more_goes_than_is_needed(page: int, need: int, core: str) -> None:
    tree = tree_with_two(page, core=core)
    free = tree.pool.available_size()
    (victim,) = tree.evict(need)
    gone = -(-max(need, LEAST) // page) * page
    assert tree.pool.available_size() - free == gone
    assert (victim.sequence, victim.start) == (blocks(0, 1, 2), 48 - gone if gone < 48 else 0)
    assert tree.match(blocks(0, 1, 2)) == 48 - gone
    assert tree.match(blocks(5, 6, 7)) == 48
    assert_mirror(tree)


@CORES
def test_a_trim_is_no_access(core: str) -> None:
    tree = tree_with_two(core=core)

    def stamps() -> list[float]:
        return sorted(tree.runtime.world.nodes[i].stamp for i in tree.truth())

    before = stamps()
    tree.evict(20)
    assert len(before) == 2 and stamps() == before
    assert [v.sequence[0] for v in tree.evict(20)] == [blocks(0)[0]], "what is left of it is still the oldest"
    assert_mirror(tree)


@CORES
def test_what_needs_more_than_a_leaf_takes_leaves_whole_and_cuts_the_last(core: str) -> None:
    tree = tree_with_two(core=core)
    first, second = tree.evict(60)
    assert (first.start, second.start) == (0, 48 - LEAST)
    assert tree.match(blocks(5, 6, 7)) == 32 and tree.match(blocks(0)) == 0
    assert_mirror(tree)


@CORES
def test_an_insert_that_lacks_room_trims_too(core: str) -> None:
    tree = SglangTree(capacity=128, core=core)
    tree.insert(blocks(0, 1, 2))
    tree.insert(blocks(4, 5, 6))
    done = tree.insert(blocks(7, 8, 9))
    assert done.done and [v.start for v in done.victims] == [32]
    assert [tree.match(blocks(*b)) for b in ((0, 1, 2), (4, 5, 6), (7, 8, 9))] == [32, 48, 48]
    assert_mirror(tree)


@CORES
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_with_the_host_tier_what_is_cut_off_can_be_read_back(write_policy: str, core: str) -> None:
    """At least HOST_QUANTUM tokens at a time: each is a node of its own there."""
    from sglang_scout.tree import HOST_QUANTUM

    long = blocks(*range(20))  # 320 tokens
    tree = SglangTree(capacity=512, host_tokens=1024, write_policy=write_policy, core=core)
    tree.insert(long)
    tree.insert(blocks(30, 31))
    for tokens in (long, blocks(30, 31)):
        tree.match(tokens)
    (victim,) = tree.evict(20)
    assert (victim.sequence, victim.start) == (long, 320 - HOST_QUANTUM)
    assert_mirror(tree)
    assert sum(n.length for n in tree.truth().values() if n.resident) == 352 - HOST_QUANTUM
    assert tree.lookup(long).host_hit_length == HOST_QUANTUM
    tree.load_back(long)
    assert tree.match(long) == 320
    assert_mirror(tree)


@CORES
def test_a_leaf_that_is_in_the_host_tier_and_short_goes_whole(core: str) -> None:
    tree = tree_with_two(host_tokens=512, core=core)
    assert [v.start for v in tree.evict(20)] == [0]
    assert tree.bridge is not None and tree.bridge.counters["trims"] == 0
    assert tree.lookup(blocks(0, 1, 2)).host_hit_length == 48


def test_a_leaf_on_its_way_to_or_from_the_host_stays_whole() -> None:
    for mark in ("write_through_pending_id", "load_back_pending_id"):
        tree = tree_with_two()
        leaf = min(tree.core.evictable_device_leaves, key=lambda n: n.last_access_time)
        setattr(leaf, mark, 7)
        tree.core._trim(leaf)
        assert len(leaf.key) == 48
        setattr(leaf, mark, None)


@CORES
def test_where_nobody_knows_the_shortfall_leaves_go_whole(core: str) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree = tree_with_two(core=core)
    calls = []

    def satisfied() -> bool:
        calls.append(1)
        return len(calls) > 1

    tree.cache.evict_for_alloc(EvictParams(num_tokens=10), allocation_reclaim_satisfied=satisfied)
    assert tree.match(blocks(0, 1, 2)) == 0 and tree.match(blocks(5, 6, 7)) == 48
    assert tree.bridge is not None and tree.bridge.shortfall is None and tree.bridge.counters["trims"] == 0
    assert_mirror(tree)


@CORES
@pytest.mark.parametrize("where", ["cut", "tail"])
def test_a_fault_while_cutting_costs_the_cut_only(where: str, monkeypatch: pytest.MonkeyPatch, core: str) -> None:
    tree = tree_with_two(core=core)

    def broken(*_: Any) -> int:
        raise RuntimeError("injected")

    monkeypatch.setattr(tree.runtime.policy, where, broken)
    (victim,) = tree.evict(20)
    assert victim.start == 0
    assert tree.bridge is not None and tree.bridge.live and tree.bridge.faults == {"cut": 1}
    assert_mirror(tree)


@CORES
@pytest.mark.parametrize("drop", [-5, 0, 48, 1000])
def test_a_cut_that_makes_no_sense_is_none(drop: int, monkeypatch: pytest.MonkeyPatch, core: str) -> None:
    tree = tree_with_two(core=core)
    monkeypatch.setattr(tree.runtime.policy, "cut", lambda *_: drop)
    assert [v.start for v in tree.evict(20)] == [0]
    assert_mirror(tree)


@CORES
def test_trim_off_and_policies_that_do_not_trim(core: str) -> None:
    for tree in (tree_with_two(config={"trim": False}, core=core), tree_with_two(policy="cachescout", core=core)):
        assert [v.start for v in tree.evict(20)] == [0]
        assert tree.bridge is not None and tree.bridge.counters["trims"] == 0


@CORES
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("host", [0, 512])
def test_random_traffic_keeps_the_mirror_exact(page: int, host: int, core: str) -> None:
    tree, rng = SglangTree(page, 256, host_tokens=host, config={"trim_least": 1}, core=core), random.Random(page)
    assert tree.bridge is not None
    for number in range(250):
        tokens = blocks(*(rng.randint(0, 3) for _ in range(rng.randint(1, 6))))[: rng.randint(1, 96)]
        rid, what = f"r{number}", rng.random()
        if what < 0.5:
            tree.bridge.arrived(RequestArrived(rid, TokenPrompt(tokens)))
            tree.match(tokens, rid)
            tree.insert(tokens, rid)
            tree.bridge.finished(rid, 1, False, True)
        elif what < 0.7:
            held = tree.lock(tokens)
            tree.evict(rng.randint(1, 80))
            tree.unlock(held)
        else:
            free = tree.pool.available_size()
            need = rng.randint(1, 60)
            if tree.evict(need):
                assert tree.pool.available_size() - free >= min(need, 1)
        assert_mirror(tree)
    assert not tree.bridge.faults
    assert host or tree.bridge.counters["trims"] > 10
