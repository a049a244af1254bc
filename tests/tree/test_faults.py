"""A fault in our code must not hurt the engine: it is counted, logged once, and what remains is LRU."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from radix_policy.events import RequestArrived, RequestFinished, Tick
from radix_policy.prompts import TokenPrompt
from sglang_scout import scheduler
from sglang_scout.bridge import Bridge
from tests.tree.conformance import arrive, blocks
from tests.tree.trees import SglangTree, assert_mirror

pytest.importorskip("sglang")


class Injected(RuntimeError):
    """The fault."""


WHOLE = {"trim": False}  # then the victims are stock LRU's, leaf by leaf


def broken(*args: Any, **kwargs: Any) -> Any:
    raise Injected("injected")


def exercise(tree: SglangTree) -> list[int]:
    """Everything that tells: requests, inserts, matches, splits, locks, evictions, host tier, clock; the victims."""
    bridge = tree.bridge
    assert bridge is not None
    victims = []
    for number in range(8):
        rid = f"r{number}"
        bridge.arrived(RequestArrived(rid, TokenPrompt(blocks(number, 50))))
        bridge.tick(number, float(number))
        tree.match(blocks(number, 50), rid)
        tree.insert(blocks(number, 50), rid)
        tree.unlock(tree.lock(blocks(number, 50)))
        bridge.finished(rid, 1, False, True)
    tree.match(blocks(1, 60))
    tree.match(blocks(0))
    for _ in range(4):
        victims += [v.sequence[0] for v in tree.evict(16)]
    tree.load_back(blocks(2, 50))
    if tree.host:
        tree.cache.evict_host(64)
    tree.cache.sanity_check()
    return victims


def begin_anew(tree: SglangTree) -> None:
    """Empty the tree and fill it a little."""
    tree.reset()
    tree.insert(blocks(3))
    tree.match(blocks(3, 4))
    tree.evict(4)
    tree.cache.sanity_check()


@pytest.fixture
def for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirror is not made anew."""
    monkeypatch.setattr("sglang_scout.tree.MENDS", 0)


def stock_victims() -> list[int]:
    """What stock LRU evicts on the same operations."""
    tree = SglangTree(policy="lru", core="python", host_tokens=512)
    tree.bridge = Bridge(SglangTree().runtime)  # hears nothing from this tree
    return exercise(tree)


TREE_ENTRIES = ["added", "split", "touched", "counted", "locked", "unlocked", "demoted", "restored", "removed"]
REQUEST_ENTRIES = ["on_request", "on_match", "on_insert", "on_split", "on_evict", "on_finish"]


@pytest.mark.parametrize("entry", TREE_ENTRIES)
def test_a_fault_in_what_the_tree_tells(
    entry: str, for_good: None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from radix_policy.runtime import Runtime

    expected = stock_victims()
    original = getattr(Runtime, entry)
    passes = {"added": 3, "touched": 3}.get(entry, 0)
    calls = [0]

    def late(self: Runtime, *args: Any) -> Any:
        calls[0] += 1
        return broken() if calls[0] > passes else original(self, *args)

    monkeypatch.setattr(Runtime, entry, late)
    tree = SglangTree(host_tokens=512, config=WHOLE)
    with caplog.at_level(logging.ERROR):
        victims = exercise(tree)
    assert calls[0] == passes + 1, "after the fault nothing is told any more"
    assert tree.bridge is not None and not tree.bridge.live
    assert tree.bridge.faults == {entry: 1}
    assert sum("sglang-scout: fault" in r.message for r in caplog.records) == 1
    assert victims == expected
    assert tree.bridge.snapshot()["live"] is False
    monkeypatch.setattr(Runtime, entry, original)
    begin_anew(tree)
    assert tree.bridge.live and tree.bridge.faults == {entry: 1}
    assert_mirror(tree)


@pytest.mark.parametrize("entry", TREE_ENTRIES)
def test_after_a_fault_the_mirror_is_made_anew_from_the_tree(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from radix_policy.runtime import Runtime

    original, calls = getattr(Runtime, entry), [0]

    def once(self: Runtime, *args: Any) -> Any:
        calls[0] += 1
        return broken() if calls[0] == 4 else original(self, *args)

    monkeypatch.setattr(Runtime, entry, once)
    tree = SglangTree(host_tokens=512)
    exercise(tree)
    held = tree.lock(blocks(6, 50))
    tree.insert(blocks(0, 1, 2))
    tree.evict(4)
    assert tree.bridge is not None and tree.bridge.live and tree.bridge.faults.get(entry, 0) <= 1
    assert_mirror(tree)
    tree.unlock(held)
    tree.evict(100)
    assert_mirror(tree)


def test_a_mirror_that_breaks_again_and_again_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_scout.tree import MENDS

    tree = SglangTree()
    monkeypatch.setattr(tree.runtime.policy, "on_insert", broken)
    for number in range(2 * MENDS):
        tree.insert(blocks(number))
        tree.evict(1)
    assert tree.bridge is not None and not tree.bridge.live and tree.core._mended == MENDS
    monkeypatch.undo()
    tree.reset()
    tree.insert(blocks(1))
    assert tree.bridge.live
    assert_mirror(tree)


@pytest.mark.parametrize("core", ["python", "rust"])
def test_a_fault_in_a_reset_is_for_good(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = SglangTree(core=core)
    tree.insert(blocks(0, 1))
    monkeypatch.setattr(tree.runtime, "reset", broken)
    begin_anew(tree)
    monkeypatch.undo()
    begin_anew(tree)
    assert tree.bridge is not None and not tree.bridge.live and tree.bridge.faults == {"reset": 1}


@pytest.mark.parametrize("entry", REQUEST_ENTRIES)
def test_a_fault_in_what_the_policy_hears(entry: str, for_good: None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stock_victims()
    tree = SglangTree(host_tokens=512, config=WHOLE)
    healthy = getattr(tree.runtime.policy, entry)
    monkeypatch.setattr(tree.runtime.policy, entry, broken)
    assert exercise(tree) == expected
    assert tree.bridge is not None and not tree.bridge.live and sum(tree.bridge.faults.values()) == 1
    monkeypatch.setattr(tree.runtime.policy, entry, healthy)
    begin_anew(tree)
    assert tree.bridge.live == (entry in ("on_insert", "on_split", "on_evict")), "those of the tree are undone with it"


@pytest.mark.parametrize("entry", ["refresh", "holds", "weigh", "place_of", "changes", "is_dead"])
def test_a_fault_in_a_score_costs_that_call_only(entry: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    expected = stock_victims()
    tree = SglangTree(host_tokens=512, config=WHOLE)
    monkeypatch.setattr(tree.runtime.policy, entry, broken)
    with caplog.at_level(logging.ERROR):
        assert exercise(tree) == expected
    bridge = tree.bridge
    assert bridge is not None and bridge.live
    assert bridge.faults["score"] >= 4 and set(bridge.faults) <= {"score", "host_index"}
    said = sum("sglang-scout: fault" in r.message for r in caplog.records)
    assert said == len(bridge.faults), "each kind is logged once"
    monkeypatch.undo()
    assert_mirror(tree)


def test_a_fault_in_one_score_in_the_middle_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = SglangTree()
    tree.insert(blocks(0, 1))
    tree.insert(blocks(5))
    weigh = tree.runtime.policy.weigh
    asked: list[int] = []

    def later(group: Any, key: Any, node: Any) -> float:
        asked.append(node.id)
        if len(asked) > 2:
            raise Injected
        weight: float = weigh(group, key, node)
        return weight

    tree.match(blocks(0, 9))  # splits: the parent becomes a leaf during the call and is weighed then
    monkeypatch.setattr(tree.runtime.policy, "weigh", later)
    assert len(tree.evict(10_000)) == 3
    assert tree.bridge is not None and tree.bridge.faults == {"score": 1} and tree.bridge.live
    monkeypatch.undo()
    tree.insert(blocks(6))
    tree.insert(blocks(7))
    assert len(tree.evict(10_000)) == 2 and tree.bridge.faults == {"score": 1}, "the index is whole again"


def test_a_fault_in_a_host_score_costs_that_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stock_victims()
    tree = SglangTree(host_tokens=512, config=WHOLE)
    monkeypatch.setattr(tree.runtime.policy, "score", broken)
    assert exercise(tree) == expected
    assert tree.bridge is not None and tree.bridge.live and tree.bridge.faults == {"score": 1}


def test_an_index_that_lost_a_leaf_does_not_leave_the_engine_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for named in (None, 10_000):
        tree = SglangTree()
        for number in range(6):
            tree.insert(blocks(number))
        if named is None:
            tree.runtime.index.clear()
        else:
            monkeypatch.setattr(tree.bridge, "victim", lambda root=tree.core.root_node.id: root)
        assert len(tree.evict(10_000)) == 6
        assert tree.bridge is not None and tree.bridge.faults == {"victim": 1} and not tree.bridge.live
        tree.cache.sanity_check()


def test_a_victim_that_stays_is_not_named_for_ever() -> None:
    tree = SglangTree()
    for number in range(6):
        tree.insert(blocks(number))
    core, full = tree.core, next(c for c in tree.core.components_by_type if c.name == "FULL")
    core.evict_device_start(full, 10_000)
    offered = []
    while (step := core.evict_device_next_node(full, {full: 0})).node_id is not None:
        offered.append(step.node_id)  # and SGLang cannot lose any
    core.evict_device_end(full)
    assert len(set(offered)) == 6 and len(offered) == 7
    assert tree.bridge is not None and tree.bridge.counters["rescued_calls"] == 1 and not tree.bridge.faults
    tree.cache.sanity_check()
    assert len(tree.evict(10_000)) == 6


def test_a_snapshot_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = SglangTree()
    assert tree.bridge is not None
    monkeypatch.setattr(tree.runtime, "snapshot", broken)
    assert tree.bridge.snapshot()["faults"] == {"snapshot": 1}
    assert tree.bridge.live


# ---- hooks ----


def request(rid: str = "r1", **changes: Any) -> SimpleNamespace:
    """A request as far as the hooks read it."""
    sampling = SimpleNamespace(custom_params=changes.pop("custom_params", None), max_new_tokens=16)
    fields: dict[str, Any] = {
        "rid": rid,
        "origin_input_ids": list(range(200)),
        "output_ids": [1, 2, 3],
        "sampling_params": sampling,
        "session_id": None,
        "extra_key": None,
        "cache_salt": None,
        "lora_id": None,
        "priority": None,
        "is_retracted": False,
        "to_finish": None,
        "finished_reason": None,
        "finished_len": None,
        "tokenizer": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def finish(kind: str) -> SimpleNamespace:
    return SimpleNamespace(to_json=lambda: {"type": kind})


@pytest.fixture
def tree() -> SglangTree:
    return SglangTree()


@pytest.fixture
def engine(tree: SglangTree) -> SimpleNamespace:
    """A scheduler as far as the hooks read it."""
    return SimpleNamespace(tree_cache=tree.cache, forward_ct=7)


HOOK_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "on_queued": lambda engine, req: scheduler.on_queued(engine, req),
    "on_aborted": lambda engine, req: scheduler.on_aborted(None, engine, req),
    "on_abort_sent": lambda engine, req: scheduler.on_abort_sent(None, engine, None, req),
    "on_released": lambda engine, req: scheduler.on_released(None, engine.tree_cache, req, checkpointed=True),
    "on_claimed": lambda engine, req: scheduler.on_claimed(True, engine.tree_cache, req),
}


@pytest.mark.parametrize("name", HOOK_CALLS)
def test_a_hook_never_raises(name: str, engine: Any, tree: SglangTree) -> None:
    bridge = tree.bridge
    assert bridge is not None
    odd = request(finished_reason=SimpleNamespace(to_json=broken))
    if name == "on_queued":
        odd = request(sampling_params=None)
    else:
        scheduler.on_queued(engine, request())
        odd.output_ids = None
        if name in ("on_aborted", "on_abort_sent"):
            odd.finished_reason = None
    HOOK_CALLS[name](engine, odd)
    assert not bridge.live and sum(bridge.faults.values()) == 1
    HOOK_CALLS[name](engine, request("r2", finished_reason=finish("stop")))


def test_a_fault_in_the_clock_leaves_the_broadcast_whole(engine: Any, tree: SglangTree, monkeypatch: Any) -> None:
    scheduler.on_ingest(engine)
    monkeypatch.setattr(tree.runtime, "observe", broken)
    sent: list[Any] = []

    def broadcast(receiver: Any, reqs: Any, local: Any = None) -> list[Any]:
        sent.extend([*reqs, *(local or ())])
        return [*reqs, *(local or ())]

    assert scheduler.around_broadcast(broadcast, None, ["a"], ["b"]) == ["a", "b"]
    assert len(sent) == 3
    assert tree.bridge is not None and not tree.bridge.live
    sent.clear()
    assert scheduler.around_broadcast(broadcast, None, ["a"], ["b"]) == ["a", "b"]
    assert sent == ["a", "b"], "no tick is sent any more"


def test_what_sglangs_own_function_raises_passes_through(engine: Any, tree: SglangTree) -> None:
    with pytest.raises(Injected):
        scheduler.around_checkpoint(broken, tree.cache, request(), up_to=3)
    assert tree.bridge is not None and tree.bridge.inserting is None and tree.bridge.live
    scheduler.on_ingest(engine)
    with pytest.raises(Injected):
        scheduler.around_broadcast(broken, None, [])


def test_observation_after_a_fault_is_off_and_nothing_grows(tree: SglangTree, engine: Any, for_good: None) -> None:
    arrive(tree, "known", blocks(0), "planner", "s1")
    bridge = tree.bridge
    assert bridge is not None
    try:
        broken()
    except Injected:
        bridge.fail("test")
    nodes = len(tree.runtime.world.nodes)
    for number in range(20):
        scheduler.on_queued(engine, request(f"q{number}"))
        tree.insert(blocks(number))
    bridge.observe(RequestFinished("known"))
    bridge.observe(Tick(99, 99.0))
    assert len(tree.runtime.world.nodes) == nodes
    assert set(tree.runtime.requests) == {"known"}


def test_with_verify_2_a_mirror_that_differs_is_found_at_the_next_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SCOUT_VERIFY", "2")
    tree = SglangTree()
    for number in range(4):
        tree.insert(blocks(number))
    tree.evict(16)
    assert tree.bridge is not None and tree.bridge.live and tree.bridge.checks
    max(tree.runtime.world.nodes, key=lambda n: n.stamp).counts += 1
    assert len(tree.evict(16)) == 1
    assert not tree.bridge.live and tree.bridge.faults == {"mirror": 1}
    assert len(tree.evict(16)) == 1, "LRU goes on"


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("wrong", ["one too many", "one missing"])
def test_the_debug_switch_compares_the_index_with_the_leaves(
    core: str, wrong: str, for_good: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SCOUT_VERIFY", "2")
    tree = SglangTree(core=core)
    for number in range(4):
        tree.insert(blocks(number, 9))
    tree.evict(4)
    bridge = tree.bridge
    assert bridge is not None and bridge.live
    index, nodes = tree.runtime.index, tree.runtime.world.nodes
    leaf = next(nodes.leaves())
    index.file(leaf, False)
    if wrong == "one too many":
        index.file(leaf)
        root = nodes.root
        assert root is not None
        index.file(root)
    bridge.compare(tree.core.differences)
    assert not bridge.live and bridge.faults == {"mirror": 1}


def test_an_index_that_names_what_is_not_there_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = SglangTree(host_tokens=512)
    assert tree.bridge is not None
    for number in range(6):
        tree.insert(blocks(number))
    monkeypatch.setattr(tree.bridge, "victim", lambda: 10**6)
    assert len(tree.evict(40)) == 3 and tree.bridge.faults == {"victim": 1}
    monkeypatch.setattr(tree.bridge, "host_victims", lambda tokens: [10**6])
    tree.cache.evict_host(20)
    tree.cache.sanity_check()


def test_it_is_said_when_the_policy_stops_and_when_it_goes_on(caplog: Any) -> None:
    tree = SglangTree(core="rust")
    assert tree.bridge is not None
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            try:
                broken()
            except Injected:
                tree.bridge.fail("mirror")
                tree.bridge.fail("mirror")
            tree.reset()
    said = [r.message for r in caplog.records if "sglang-scout" in r.message]
    stop, again = (
        "sglang-scout: after a fault in mirror plain LRU decides until",
        "sglang-scout: the policy decides again",
    )
    assert [m.startswith(stop) for m in said] == [False, True, False, True, False]
    assert said[2] == said[4] == again
