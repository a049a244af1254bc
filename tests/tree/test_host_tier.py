"""The mirror with HiCache's host tier: demotion, load-back, host eviction, prefetched nodes."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from launch.command import HOST_TIER_MIN_FREE_GIB, available_memory_gib
from radix_policy.events import SessionClosed
from tests.tree.conformance import BLOCK, arrive, blocks
from tests.tree.trees import SglangTree, Tokens, assert_mirror

pytest.importorskip("sglang")
pytestmark = pytest.mark.skipif(
    available_memory_gib() < HOST_TIER_MIN_FREE_GIB, reason="SGLang's host tier wants 10 GiB of free memory"
)

PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 16])


@PAGE_SIZES
def test_demoted_and_loaded_back(page_size: int) -> None:
    tree = SglangTree(page_size, 256, host_tokens=512)
    arrive(tree, "r1", blocks(0, 1), "planner", "s1")
    tree.match(blocks(0, 1), "r1")
    tree.insert(blocks(0, 1), "r1")
    assert_mirror(tree)
    tree.evict(2 * BLOCK)
    assert_mirror(tree)
    (node,) = (tree.runtime.world.nodes[i] for i in tree.truth())
    assert not node.resident and node.session >= 0
    assert tree.load_back(blocks(0, 1))
    assert_mirror(tree)
    assert node.resident and tree.match(blocks(0, 1)) == 2 * BLOCK


@PAGE_SIZES
def test_a_demoted_node_that_is_computed_again_is_restored(page_size: int) -> None:
    tree = SglangTree(page_size, 256, host_tokens=512)
    tree.insert(blocks(0, 1))
    tree.evict(2 * BLOCK)
    tree.insert(blocks(0, 1, 2))
    assert_mirror(tree)
    assert all(n.resident for n in tree.truth().values())


@PAGE_SIZES
def test_a_match_splits_a_demoted_node(page_size: int) -> None:
    tree = SglangTree(page_size, 256, host_tokens=512)
    tree.insert(blocks(0, 1))
    tree.evict(2 * BLOCK)
    tree.match(blocks(0, 7))
    assert_mirror(tree)
    assert len(tree.truth()) == 2 and not any(n.resident for n in tree.truth().values())


@PAGE_SIZES
def test_host_eviction_removes_by_score(page_size: int) -> None:
    tree = SglangTree(page_size, 256, host_tokens=512)
    for number in range(6):
        tree.insert(blocks(number))
    tree.evict(6 * BLOCK)
    assert len(tree.truth()) == 6
    assert tree.bridge is not None
    before = tree.bridge.counters["host_calls"]
    tree.cache.evict_host(2 * BLOCK)
    assert_mirror(tree)
    assert tree.bridge.counters["host_calls"] == before + 1
    assert {tree.sequence(i) for i in tree.truth()} == {blocks(n) for n in range(2, 6)}


@PAGE_SIZES
@pytest.mark.parametrize("core", ["python", "twin", "rust"])
def test_nodes_that_storage_prefetched(page_size: int, core: str) -> None:
    tree = SglangTree(page_size, 256, core=core, host_tokens=512)
    tree.insert(blocks(0))
    tree.settle()
    (parent,) = tree.truth()
    host = tree.cache.cache_controller.mem_pool_host.alloc(2 * BLOCK)
    tree.core.insert_host(parent, tree.key(blocks(1, 2)), host, ["h"] * (2 * BLOCK // page_size))
    assert_mirror(tree)
    assert sorted(n.resident for n in tree.truth().values()) == [False, True][core != "python" :]
    assert tree.runtime.world.nodes[parent].children == 0
    assert tree.load_back(blocks(0, 1, 2))
    assert_mirror(tree)


def assert_host_order(tree: SglangTree) -> None:
    """The index of the host tier names its leaves as scoring each of them would."""
    bridge, leaves = tree.bridge, tree.core.evictable_host_leaves
    assert bridge is not None
    named = bridge.host_victims(10**9)
    bridge.begin_call(leaves, "host_calls")
    naive = sorted(leaves, key=bridge.priority)
    bridge.end_call()
    assert named == [node.id for node in naive]


class HostMachine(RuleBasedStateMachine):
    """Random operations on a device tier of 256 and a host tier of 320 tokens; the mirror is exact after each."""

    core = "python"

    sequences = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(0, BLOCK - 1)).map(
        lambda drawn: blocks(*drawn[0])[: BLOCK * len(drawn[0]) - drawn[1]]
    )

    @initialize(page_size=st.sampled_from([1, 16]), write_policy=st.sampled_from(["write_through", "write_back"]))
    def build(self, page_size: int, write_policy: str) -> None:
        self.tree = SglangTree(page_size, 256, core=self.core, host_tokens=320, write_policy=write_policy)
        self.held: list[object] = []

    @rule(tokens=sequences)
    def insert(self, tokens: Tokens) -> None:
        self.tree.insert(tokens)
        assert_mirror(self.tree)

    @rule(caller=st.integers(0, 5))
    def end(self, caller: int) -> None:
        """The session is over, until it calls again."""
        self.tree.runtime.observe(SessionClosed("", f"tag:s{caller}"))
        self.order()

    @rule(tokens=sequences, caller=st.integers(0, 5), seconds=st.floats(0, 5))
    def call(self, tokens: Tokens, caller: int, seconds: float) -> None:
        bridge = self.tree.bridge
        assert bridge is not None
        bridge.tick(bridge.step + 1, bridge.seconds + seconds)
        rid = f"r{bridge.step}"
        arrive(self.tree, rid, tokens, f"a{caller % 2}", f"s{caller}")
        self.tree.match(tokens, rid)
        self.tree.insert(tokens, rid)
        bridge.finished(rid, 5, False, True)
        assert_mirror(self.tree)
        self.order()

    @rule(tokens=sequences)
    def match(self, tokens: Tokens) -> None:
        self.tree.match(tokens)
        assert_mirror(self.tree)

    @rule(tokens=st.integers(1, 160))
    def evict(self, tokens: int) -> None:
        self.tree.evict(tokens)
        assert_mirror(self.tree)

    @rule(tokens=sequences)
    def load_back(self, tokens: Tokens) -> None:
        self.tree.load_back(tokens)
        assert_mirror(self.tree)

    @rule(tokens=st.integers(1, 96))
    def evict_host(self, tokens: int) -> None:
        self.order()
        self.tree.cache.evict_host(tokens)
        assert_mirror(self.tree)
        self.order()

    def order(self) -> None:
        if self.core == "python":
            assert_host_order(self.tree)

    @rule(tokens=sequences)
    def lock(self, tokens: Tokens) -> None:
        self.held.append(self.tree.lock(tokens))
        assert_mirror(self.tree)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        self.tree.unlock(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))
        assert_mirror(self.tree)


class TwinMachine(HostMachine):
    core = "twin"


class RustMachine(HostMachine):
    core = "rust"


for made in (HostMachine, TwinMachine, RustMachine):
    made.TestCase.settings = settings(
        max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
TestHostMachine = HostMachine.TestCase
TestTwinMachine = TwinMachine.TestCase
TestRustMachine = RustMachine.TestCase


# ---- the mirror in front of a core ----

CORES = pytest.mark.parametrize("core", ["twin", "rust"])


@CORES
@PAGE_SIZES
def test_what_is_on_the_host_only_is_forgotten_and_belongs_to_who_loads_it_back(core: str, page_size: int) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

    tree = SglangTree(page_size, 256, core=core, host_tokens=512)
    tree.insert(blocks(0, 1))
    tree.settle()
    tree.evict(2 * BLOCK)
    assert len(tree.runtime.world.nodes) == 1
    arrive(tree, "r1", blocks(0, 1, 5), "planner", "s1")
    assert tree.match(blocks(0, 1, 5), "r1") == 0
    found = tree.lookup(blocks(0, 1, 5))
    assert found.host_hit_length == 2 * BLOCK
    kv = SimpleNamespace(mamba_pool_idx=None)
    req = SimpleNamespace(
        rid="r1", kv=kv, last_node=found.last_device_node, swa_host_hit_length=0, mamba_host_hit_length=0
    )
    loaded, _ = tree.cache.init_load_back(InitLoadBackParams(found.best_match_node, found.host_hit_length, req=req))
    assert loaded == 2 * BLOCK
    assert_mirror(tree)
    (node,) = (n for n in tree.runtime.world.nodes if n.parent is not None)
    assert node.session >= 0 and node.agent >= 0 and node.locks == 1, "locked until the copy is done"
    tree.cache.ready_to_load_host_cache()
    tree.cache.loading_check()
    assert node.locks == 0 and tree.evict(BLOCK)
    assert_mirror(tree)


@CORES
@PAGE_SIZES
def test_a_lock_on_a_node_of_the_host_tier_is_held_by_its_ancestor_until_it_is_back(core: str, page_size: int) -> None:
    tree = SglangTree(page_size, 256, core=core, host_tokens=512)
    tree.insert(blocks(0))
    tree.insert(blocks(0, 1))
    tree.insert(blocks(0, 1, 2))
    tree.settle()
    tree.evict(2 * BLOCK)
    found = tree.lookup(blocks(0, 1, 2))
    assert found.device_prefix_len == BLOCK and found.host_hit_length == 2 * BLOCK
    held = [tree.cache.lock(found.best_match_node), tree.cache.lock(found.best_match_node)]
    (above,) = (n for n in tree.runtime.world.nodes if n.parent is not None)
    assert above.locks == 2
    assert_mirror(tree)
    tree.lookup(blocks(0, 1, 7))  # splits what is locked
    assert tree.load_back(blocks(0, 1, 2))
    assert [n.locks for n in tree.runtime.world.nodes if n.parent is not None] == [2] * 3
    assert_mirror(tree)
    assert tree.evict(3 * BLOCK) == []
    for lock in held:
        tree.unlock(lock)
    assert_mirror(tree)
    assert len(tree.evict(3 * BLOCK)) >= 1 and tree.pool.available_size() == 256
    assert_mirror(tree)


@CORES
@PAGE_SIZES
def test_what_storage_prefetched_may_split_a_node_of_the_device(core: str, page_size: int) -> None:
    tree = SglangTree(page_size, 256, core=core, host_tokens=512)
    tree.insert(blocks(0))
    tree.insert(blocks(0, 1, 2))
    tree.settle()
    parent = tree.lookup(blocks(0)).best_match_node
    host = tree.cache.cache_controller.mem_pool_host.alloc(2 * BLOCK)
    tree.core.insert_host(parent, tree.key(blocks(1, 3)), host, ["h"] * (2 * BLOCK // page_size))
    assert_mirror(tree)
    assert tree.match(blocks(0, 1, 2)) == 3 * BLOCK
    assert_mirror(tree)
    assert tree.bridge is not None and not tree.bridge.faults


@CORES
@PAGE_SIZES
@pytest.mark.parametrize("below", [False, True])
def test_what_storage_prefetched_may_split_a_node_and_make_none(core: str, page_size: int, below: bool) -> None:
    tree = SglangTree(page_size, 256, core=core, host_tokens=512, write_policy="write_back")
    tree.insert(blocks(0))
    tree.insert(blocks(0, 1, 2))
    parent = tree.lookup(blocks(0)).best_match_node if below else tree.root()
    tokens = blocks(1) if below else blocks(0, 1)
    host = tree.cache.cache_controller.mem_pool_host.alloc(len(tokens))
    done = tree.core.insert_host(parent, tree.key(tokens), host, ["h"] * (len(tokens) // page_size))
    tree.cache._apply_cache_actions(done.cache_actions)
    assert done.inserted_host_node is None
    assert_mirror(tree)
    assert len(tree.truth()) == 3
    tree.evict(20)
    assert_mirror(tree)


@CORES
@pytest.mark.parametrize("write", ["write_through", "write_through_selective"])
def test_a_lock_on_a_node_that_an_insert_just_split_is_on_that_node(core: str, write: str) -> None:
    """The insert is suspended while the node's copy is begun, and nobody has heard of the node yet."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    tree = SglangTree(1, 256, core=core, host_tokens=512, write_policy=write)
    copy = tree.cache.cache_controller.write
    if write == "write_through":  # there the first copy of the node must have failed
        tree.cache.cache_controller.write = lambda *a, **k: None
    tree.lazy = True
    tree.insert(blocks(0, 1, 2))
    tree.insert(blocks(5))
    tree.cache.cache_controller.write = copy
    made = tree.cache.insert(InsertParams(key=tree.key(blocks(0, 1)), value=tree.pool.alloc(2 * BLOCK)))
    held = tree.cache.lock(made.last_device_node)
    assert_mirror(tree)
    tree.settle()
    assert_mirror(tree)
    assert tree.runtime.world.nodes[made.last_device_node].locks == 1
    tree.evict(10)
    assert_mirror(tree)
    tree.unlock(held)
    assert_mirror(tree)


def test_a_leaf_of_the_host_tier_that_was_used_unseen_costs_the_index_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was an endless loop once."""
    tree, rng = SglangTree(1, 256, host_tokens=512, config={"trim_least": 1}), random.Random(1)
    bridge = tree.bridge
    assert bridge is not None
    tell = bridge.host_leaf

    def deaf(node: int, is_leaf: bool = True) -> None:
        if not is_leaf or bridge._host is None or node not in bridge._host:
            tell(node, is_leaf)

    monkeypatch.setattr(bridge, "host_leaf", deaf)
    for number in range(250):
        tokens = blocks(*(rng.randint(0, 3) for _ in range(rng.randint(1, 6))))[: rng.randint(1, 96)]
        arrive(tree, f"r{number}", tokens)
        tree.match(tokens, f"r{number}")
        tree.insert(tokens, f"r{number}")
        bridge.finished(f"r{number}", 1, False, True)
        tree.evict(rng.randint(1, 60))
        assert_mirror(tree)
    assert bridge.live and bridge.faults == {"host_index": 1}
    assert bridge.host_victims(1) is None


@pytest.mark.parametrize("revived", [True, False])
def test_the_index_of_the_host_tier_knows_which_sessions_have_ended(revived: bool) -> None:
    tree = SglangTree(1, 256, host_tokens=512, config={"guard": False})
    bridge = tree.bridge
    assert bridge is not None

    def call(number: int, tokens: Tokens, session: str) -> None:
        bridge.tick(number, float(number))
        arrive(tree, f"r{number}", tokens, "a", session)
        tree.match(tokens, f"r{number}")
        tree.insert(tokens, f"r{number}")
        bridge.finished(f"r{number}", 5, False, True)

    for number in range(3):
        call(number, blocks(10 + number), f"w{number}")
    call(3, blocks(0), "s1")
    session = [*tree.runtime.world.sessions][-1]
    if revived:
        tree.runtime._end(session)
    tree.evict(4 * BLOCK)
    assert_host_order(tree)
    if revived:
        call(4, blocks(5), "s1")
    else:
        tree.runtime._end(session)
    assert_host_order(tree)


@pytest.mark.parametrize("what", ["match", "insert", "split"])
def test_the_index_of_the_host_tier_hears_of_every_use(what: str) -> None:
    tree = SglangTree(1, 256, host_tokens=512)
    for number in range(6):
        tree.insert(blocks(number, 8))
    tree.settle()
    tree.evict(12 * BLOCK)
    if what == "insert":
        tree.cache.cache_controller.write_policy = "write_through_selective"  # so that it stays where it is
    tokens = {"match": blocks(0, 8), "insert": blocks(0, 8), "split": blocks(0, 7)}[what]
    (tree.insert if what == "insert" else tree.match)(tokens)
    assert_host_order(tree)
