"""Each override of `ScoutTreeCore` is needed, and the suite's comparison notices when one is missing."""

from typing import Any

import pytest

from tests.tree.conformance import arrive, blocks
from tests.tree.trees import SglangTree, assert_mirror

pytest.importorskip("sglang")

OVERRIDES = [
    "reset",
    "_add_new_node",
    "insert_host",
    "_split_node",
    "_unregister_node",
    "_match_post_processor",
    "_touch_node",
    "_inc_hit_count_and_check",
    "_demote",
    "_unevict_node_on_insert",
    "commit_load_back",
    "inc_lock_ref",
    "dec_lock_ref",
    "inc_full_pin",
    "dec_full_pin",
]


def story(tree: SglangTree) -> None:
    """Passes every override once; the mirror is compared after each step."""
    arrive(tree, "r1", blocks(0, 1), "planner", "s1")
    for tokens in (blocks(0, 1), blocks(0, 1, 2), blocks(7)):
        tree.insert(tokens, "r1")
        assert_mirror(tree)
    for tokens in (blocks(0, 9), blocks(0, 1), blocks(7)):
        tree.match(tokens)
        assert_mirror(tree)
    held = tree.lock(blocks(0, 1))
    assert_mirror(tree)
    tree.unlock(held)
    assert_mirror(tree)
    pinned = tree.lookup(blocks(7)).last_device_node
    tree.core.inc_full_pin(pinned)
    assert_mirror(tree)
    tree.core.dec_full_pin(pinned)
    assert_mirror(tree)
    tree.evict(10_000)
    assert_mirror(tree)
    tree.load_back(blocks(0, 1, 2))
    assert_mirror(tree)
    tree.insert(blocks(7))
    assert_mirror(tree)
    host = tree.cache.cache_controller.mem_pool_host.alloc(16)
    tree.core.insert_host(tree.lookup(blocks(7)).best_match_node, tree.key(blocks(8)), host, ["h"] * 16)
    assert_mirror(tree)
    tree.evict(10_000)
    tree.cache.evict_host(10_000)
    assert_mirror(tree)
    tree.insert(blocks(3))
    tree.reset()
    assert_mirror(tree)


def test_the_story_holds() -> None:
    story(SglangTree(host_tokens=512))


@pytest.mark.parametrize("name", OVERRIDES)
def test_without_the_override_the_mirror_breaks(name: str, monkeypatch: Any) -> None:
    tree = SglangTree(host_tokens=512)
    stock = getattr(type(tree.core).__mro__[1], name)
    monkeypatch.setattr(type(tree.core), name, stock)
    with pytest.raises((AssertionError, KeyError)):
        story(tree)
    assert name in vars(type(tree.core))


def test_every_override_is_listed() -> None:
    tree = SglangTree()
    own = {n for n, v in vars(type(tree.core)).items() if callable(v) and not n.startswith("__")}
    choosing = {"match_prefix", "evict_device_start", "evict_device_end", "drive_host_eviction"}
    choosing |= {"evict_device_next_node", "_hand_over", "_trim", "differences", "_mend", "_known"}
    assert own == {*OVERRIDES, *choosing}


# ---- the mirror in front of a core: the same, where the truth can be read ----

IN_FRONT = [
    "reset",
    "match_prefix",
    "begin_insert",
    "inc_lock_ref",
    "dec_lock_ref",
    "inc_full_pin",
    "dec_full_pin",
    "commit_load_back",
    "evict_device_leaf",
]  # and insert_host: tests/tree/test_host_tier.py has what storage prefetched


def test_the_story_holds_in_front_of_a_core() -> None:
    story(SglangTree(core="twin", host_tokens=512))


@pytest.mark.parametrize("name", IN_FRONT)
def test_without_it_the_mirror_in_front_breaks(name: str, monkeypatch: Any) -> None:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

    from sglang_scout.mirrored import Mirrored

    monkeypatch.setattr(Mirrored, name, getattr(UnifiedTreeCore, name))
    tree = SglangTree(core="twin", host_tokens=512)
    with pytest.raises((AssertionError, KeyError)):
        story(tree)
