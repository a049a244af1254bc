"""The simulated host tier keeps its books, and is nothing where it is nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_policy.admission import AdmissionConfig
from radix_policy.runtime import Runtime
from radix_policy.simulator import Loop, Run, spans_of
from radix_policy.simulator.tiered_loop import Costs, TieredLoop
from radix_policy.simulator.tiers import TieredEngine, TieredTree
from radix_policy.working_set import ReuseCurve
from radix_policy.workloads import make


def check(engine: TieredEngine) -> None:
    """Sums are those of the nodes; both tiers are trees that begin at the root; the runtime knows what it should."""
    tree = engine.tree
    nodes = [node for node in tree.nodes.values() if node.parent is not None]
    device = [node for node in nodes if node.id not in tree.only]
    assert tree.used == sum(node.length for node in device)
    assert tree.protected == sum(node.length for node in device if node.locks)
    assert tree.host_used == sum(node.length for node in nodes if node.id in tree.copies) <= tree.host_capacity
    assert tree.only <= tree.copies <= {node.id for node in nodes}
    for node in nodes:
        assert node.parent is not None
        if node.parent is not tree.root:
            assert node.id in tree.only or node.parent.id not in tree.only, "a hole on the device"
            assert node.id not in tree.copies or node.parent.id in tree.copies, "a hole on the host"
    known = {node.id: node for node in engine.runtime.world.nodes if node.parent is not None}
    assert known.keys() == {node.id for node in (device if tree.forgets else nodes)}
    assert all(known[node.id].resident for node in device)
    leaves = {node.id for node in engine.runtime.world.nodes.leaves()}
    assert leaves == {node.id for node in device if tree._is_device_leaf(node)}
    assert not (set(tree.told) | set(tree._hits)) - {node.id for node in nodes}


CALLS = st.lists(
    st.tuples(
        st.lists(st.sampled_from("ab"), min_size=1, max_size=6),  # each letter: a run of tokens
        st.integers(1, 6),  # output tokens
        st.booleans(),  # an earlier request leaves first
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(
    CALLS,
    st.integers(60, 150),
    st.integers(0, 200),
    st.sampled_from([1, 4]),
    st.sampled_from(["rust", "python"]),
    st.sampled_from(["lru", "scout"]),
    st.sampled_from(["none", "fixed", "measured"]),
    st.integers(1, 2),
)
def test_the_books(
    calls: list[tuple[list[str], int, bool]],
    capacity: int,
    host: int,
    page: int,
    core: str,
    policy: str,
    mode: str,
    threshold: int,
) -> None:
    engine = TieredEngine(
        Runtime(policy, page_size=page),
        capacity,
        host,
        page,
        16,
        admission=AdmissionConfig(mode, admission_chunk=4, admission_kappa=1),
        threshold=threshold,
        forgets=core == "rust",
        ordered=core == "python",
        load_least=3,
    )
    running: list[Run] = []
    for number, (letters, output, leaves) in enumerate(calls):
        tokens: list[int] = []
        for letter in letters:
            tokens += range(len(tokens) * 10 + 1000 * (letter == "b"), len(tokens) * 10 + 1000 * (letter == "b") + 7)
        run = Run(f"r{number}", spans_of(tokens), ((10**6 + 100 * number, output),), len(tokens), output)
        if engine.fits(run):
            engine.arrive(run)
            while not engine.admit(run):
                check(engine)
                engine.finish(running.pop(0))
            running.append(run)
        check(engine)
        if leaves and running:
            engine.finish(running.pop(0))
            check(engine)
    for run in running:
        engine.finish(run)
    check(engine)
    assert engine.free == engine.capacity - engine.tree.used
    assert not engine.declined


@pytest.mark.parametrize("policy", ["lru", "cachescout", "scout"])
def test_a_host_tier_of_nothing_is_none(policy: str) -> None:
    workload = make("selector", seed=3, sessions=10)
    capacity = 3 * workload.largest
    one = Loop(workload, policy, capacity=capacity, concurrency=4, service="serial").run()
    two = TieredLoop(workload, policy, capacity=capacity, host_capacity=0, concurrency=4).run()
    assert one.cached == two.cached and one.ttft == two.ttft


def test_an_endless_host_tier_finds_all_that_can_be_found() -> None:
    workload = make("selector", seed=3, sessions=10)
    loop = TieredLoop(workload, "lru", capacity=2 * workload.largest, host_capacity=10**9, concurrency=4)
    loop.engine.tree.load_least = 1
    outcome = loop.run()
    curve = ReuseCurve()
    calls = [call for session in workload.sessions for call in session.calls]
    for number in outcome.calls:
        call = calls[number]
        curve.call(call.prompt, call.prompt_tokens, call.output, call.output_tokens)
    # a call that begins before an earlier one ends does not find that one's output
    assert 0.99 * curve.reachable <= outcome.cached_tokens <= curve.reachable
    assert loop.engine.tree.restored > 0 and loop.engine.tree.host_evicted == 0


class Slow(Costs):
    """Each restored token takes its time."""

    def __init__(self, restore: float) -> None:
        self.restore = restore

    def restore_s(self, tokens: int) -> float:
        return self.restore * tokens


def test_what_is_restored_takes_its_time() -> None:
    workload = make("swe", seed=3, sessions=4)
    spans = []
    for restore in (0.0, 1e-5, 1e-3):
        loop = TieredLoop(
            workload,
            "lru",
            capacity=int(1.2 * workload.largest),
            host_capacity=10**9,
            concurrency=4,
            costs=Slow(restore),
        )
        spans.append(loop.run().seconds)
        assert loop.engine.tree.restored > 0
    assert spans == sorted(spans) and spans[0] < spans[2]


def test_a_tree_that_forgets_cannot_be_ordered() -> None:
    with pytest.raises(ValueError, match="ordered"):
        TieredEngine(Runtime("scout"), 100, 100, forgets=True, ordered=True)


def test_victims_are_leaves_of_the_device() -> None:
    tree = TieredTree(Runtime("lru"), host_capacity=100)
    tree.insert(spans_of(range(10)), 10)
    (leaf,) = [node for node in tree.nodes if node != tree.root.id]
    assert tree.evict(leaf) == 10 and tree.only == {leaf}
    for call in (lambda: tree.evict(leaf), lambda: tree.trim(leaf, 5)):
        with pytest.raises(ValueError, match="no unlocked leaf"):
            call()
