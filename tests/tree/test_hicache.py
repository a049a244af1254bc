"""Admission at SGLang's refusal path: what is refused, what is never refused, and what goes wrong around it."""

import random
from typing import Any

import pytest

from launch.command import HOST_TIER_MIN_FREE_GIB, available_memory_gib
from radix_policy.admission import Admission
from radix_policy.events import RequestArrived, Tag
from radix_policy.prompts import TokenPrompt
from tests.tree.conformance import BLOCK, arrive, blocks
from tests.tree.trees import SglangTree, Tokens

pytest.importorskip("sglang")
pytestmark = pytest.mark.skipif(
    available_memory_gib() < HOST_TIER_MIN_FREE_GIB, reason="SGLang's host tier wants 10 GiB of free memory"
)
CORES = pytest.mark.parametrize("core", ["python", "twin", "rust"])
FIXED = {"admission": "fixed", "admission_chunk": BLOCK, "admission_kappa": 1}


def make(core: str, host_tokens: int = 512, **more: Any) -> SglangTree:
    more.setdefault("config", FIXED)
    return SglangTree(1, 256, core=core, host_tokens=host_tokens, **more)


def call(tree: SglangTree, rid: str, tokens: Tokens, session: str = "s") -> None:
    """A request from its arrival to its end."""
    arrive(tree, rid, tokens, "agent", session)
    tree.match(tokens, rid)
    tree.insert(tokens, rid)
    assert tree.bridge is not None
    tree.bridge.finished(rid, 1, False, False)


def used(tree: SglangTree) -> int:
    pool = tree.cache.cache_controller.mem_pool_host
    return pool.size - pool.available_size()


def host(tree: SglangTree) -> dict[str, Any]:
    assert tree.bridge is not None
    snapshot: dict[str, Any] = tree.bridge.snapshot()
    assert not snapshot["faults"] and snapshot["live"]
    tree.check()
    return snapshot["host"]


@CORES
def test_a_declined_request_writes_nothing_and_is_asked_again(core: str) -> None:
    tree = make(core)
    call(tree, "r1", blocks(1, 2))  # two new chunks
    assert used(tree) == 0 and host(tree)["declined"] == 1 and host(tree)["refused_tokens"] == 2 * BLOCK
    call(tree, "r2", blocks(1))  # one: and it inserts over the same nodes
    assert used(tree) == BLOCK and host(tree)["declined"] == 1
    call(tree, "r3", blocks(1, 2))  # one is left of the prompt
    assert used(tree) == 2 * BLOCK and host(tree)["declined"] == 1


@CORES
def test_what_has_a_copy_has_it_from_the_root_on(core: str) -> None:
    rng, tree = random.Random(5), make(core, 300)
    for number in range(120):
        call(tree, f"r{number}", blocks(*(rng.randrange(3) for _ in range(rng.randint(1, 4)))), f"s{number % 5}")
        found = tree.lookup(blocks(*(rng.randrange(3) for _ in range(3))))
        assert found.device_prefix_len + found.host_hit_length == found.full_kv_hit_length
        if core == "python":
            for node in tree.nodes():
                assert not node.backuped or node.parent is tree.core.root_node or node.parent.backuped
    state = host(tree)
    assert 0 < state["declined"] < state["asked"] == 120 and state["refused_tokens"] > 0
    assert state["used_tokens"] == used(tree)
    assert tree.bridge is not None and not tree.bridge.host.declined  # type: ignore[union-attr]


@CORES
def test_nothing_is_declined_under_write_back(core: str) -> None:
    tree = make(core, write_policy="write_back")
    call(tree, "r1", blocks(1, 2, 3))
    tree.evict(3 * BLOCK)
    tree.settle()
    assert used(tree) == 3 * BLOCK and not host(tree)["active"] and host(tree)["refused_tokens"] == 0


@CORES
def test_nobody_counts_as_declined_who_was_not(core: str) -> None:
    tree = make(core, write_policy="write_back")
    call(tree, "r1", blocks(1, 2, 3))
    assert host(tree)["declined"] == 0 and host(tree)["asked"] == 1


@CORES
def test_requests_that_overflow_are_forgotten(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_scout.bridge.MAX_REQUESTS", 4)
    tree = make(core)
    assert tree.bridge is not None
    for number in range(9):
        prompt = TokenPrompt(blocks(number % 3, 1, 2))
        tree.bridge.arrived(RequestArrived(f"r{number}", prompt, "", Tag("agent", "s")))
        tree.match(blocks(number % 3, 1, 2), f"r{number}")
    assert 0 < len(tree.bridge.host.declined) <= 4  # type: ignore[union-attr]


@CORES
def test_a_warmup_is_not_written(core: str) -> None:
    tree = make(core, config={"admission": "measured"})
    assert tree.bridge is not None
    tree.bridge.own = {"warm": 1}
    tree.insert(blocks(1, 2), "warm")
    assert used(tree) == 0
    call(tree, "r1", blocks(1, 2))
    assert used(tree) == 2 * BLOCK, "by the request that came for it"


@CORES
def test_selective_writes_are_asked_too(core: str) -> None:
    tree = make(core, write_policy="write_through_selective")
    for number in range(3):
        call(tree, f"r{number}", blocks(1, 2, 3))
    assert used(tree) == 0 and host(tree)["refused_tokens"] > 0
    call(tree, "r4", blocks(1))
    assert used(tree) == BLOCK


@CORES
def test_nothing_is_declined_while_storage_is_attached(core: str) -> None:
    tree = make(core)
    tree.cache.enable_storage = True
    tree.lazy = True  # there are no queues of a storage to look into
    call(tree, "r1", blocks(1, 2, 3))
    assert used(tree) == 3 * BLOCK and not host(tree)["active"]
    arrive(tree, "r2", blocks(4, 5, 6), "agent", "s")
    tree.match(blocks(4, 5, 6), "r2")
    tree.cache.enable_storage = False  # detached while the request runs: it was asked while nobody could be declined
    tree.lazy = False
    tree.insert(blocks(4, 5, 6), "r2")
    assert used(tree) == 6 * BLOCK
    call(tree, "r3", blocks(7, 5, 6))
    assert used(tree) == 6 * BLOCK, "the next one is declined again"


@CORES
def test_a_fault_of_ours_admits_everybody(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make(core)
    call(tree, "r1", blocks(1, 2))
    assert used(tree) == 0

    def breaks(*_: Any) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(Admission, "admits", breaks)
    call(tree, "r2", blocks(3, 4))
    call(tree, "r3", blocks(5, 6))
    monkeypatch.undo()
    call(tree, "r4", blocks(7, 8))
    assert used(tree) == 6 * BLOCK
    assert tree.bridge is not None and tree.bridge.faults == {"admission": 1} and tree.bridge.live


@CORES
def test_after_a_fault_in_what_is_observed_nobody_is_declined(core: str) -> None:
    tree = make(core)
    arrive(tree, "r1", blocks(1, 2, 3), "agent", "s")
    tree.match(blocks(1, 2, 3), "r1")
    assert tree.bridge is not None
    try:
        raise ValueError
    except ValueError:
        tree.bridge.fail("test")
    tree.insert(blocks(1, 2, 3), "r1")
    assert used(tree) == 3 * BLOCK
    tree.reset()
    assert tree.bridge.live
    call(tree, "r2", blocks(1, 2, 3))
    assert used(tree) == 0, "an empty tree is observed again"


@CORES
def test_a_controller_that_refuses_by_itself(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make(core)
    with monkeypatch.context() as patch:
        patch.setattr(tree.cache.cache_controller, "write", lambda *args, **kwargs: None)
        call(tree, "r1", blocks(1))
        assert used(tree) == 0 and host(tree)["refused_tokens"] == 0
    call(tree, "r2", blocks(1))
    assert used(tree) == BLOCK


@CORES
def test_a_tier_full_of_locked_nodes(core: str) -> None:
    tree = make(core, 3 * BLOCK - 1, config={"admission": "measured", "admission_chunk": BLOCK})
    call(tree, "r1", blocks(1, 2, 3))
    held = tree.lock(blocks(1, 2, 3))
    full = used(tree)
    for number in range(3):
        call(tree, f"x{number}", blocks(4 + number))
    assert full == 3 * BLOCK == used(tree) and host(tree)["evicted_tokens"] == 0
    tree.unlock(held)
    tree.evict(6 * BLOCK)
    call(tree, "y", blocks(9, 10))
    assert host(tree)["evicted_tokens"] == 3 * BLOCK and used(tree) == 2 * BLOCK


@CORES
def test_a_tier_smaller_than_one_request(core: str) -> None:
    tree = make(core, BLOCK, config={"admission": "measured", "admission_chunk": 1})
    for number in range(40):
        call(tree, f"r{number}", blocks(*(number % 7 + i for i in range(3))), f"s{number % 7}")
    assert used(tree) == 0, "no node fits"
    host(tree)


@CORES
def test_a_flush_begins_anew(core: str) -> None:
    tree = make(core)
    call(tree, "r1", blocks(1))
    tree.reset()
    assert used(tree) == 0
    call(tree, "r2", blocks(1))
    assert used(tree) == BLOCK and host(tree)["asked"] == 2
