"""SGLang's real `UnifiedRadixCache` on our tree core: the conformance suite, and LRU's own choices side by side."""

import random

import pytest

from radix_policy.events import RequestFinished, SessionClosed, Tick
from radix_policy.leaf_index import naive_order
from tests.tree.conformance import Conformance, arrive, blocks, machine
from tests.tree.trees import SglangTree, Tokens, Victim, assert_mirror

pytest.importorskip("sglang")


class TestSglangTree(Conformance):
    def make(self, page_size: int, capacity: int = 256, policy: str = "scout") -> SglangTree:
        return SglangTree(page_size, capacity, policy)


TestSglangMachine = machine(SglangTree).TestCase
TestSglangMachineCacheScout = machine(lambda **kw: SglangTree(policy="cachescout", **kw), examples=8).TestCase


def test_our_core_and_strategy_are_in_place() -> None:
    tree = SglangTree()
    assert type(tree.core).__name__ == "ScoutTreeCore"
    assert type(tree.core.eviction_strategy).__name__ == "ScoutStrategy"
    cached = SglangTree(policy="cachescout")
    assert type(cached.core.eviction_strategy).__name__ == "CacheScoutStrategy"


def test_priority_is_score_then_stamp_then_id() -> None:
    tree = SglangTree()
    tree.insert(blocks(0))
    (node,) = tree.nodes()
    assert tree.core.eviction_strategy.get_priority(node) == (0.0, node.last_access_time, node.id)


def random_sequence(rng: random.Random) -> Tokens:
    tokens = blocks(*(rng.randint(0, 2) for _ in range(rng.randint(1, 5))))
    return tokens[: rng.randint(1, len(tokens))]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("stock", ["python", "rust"])
@pytest.mark.parametrize("observed", [True, False])
def test_with_one_agent_and_no_evidence_victims_are_lrus(page_size: int, stock: str, observed: bool) -> None:
    # sessions, which identity from tokens would find here, are evidence; so is what became of other nodes of a kind
    ours = SglangTree(page_size, 512, config={"identity": "window", "ages": False, "trim": False})
    lru = SglangTree(page_size, 512, policy="lru", core=stock)
    rng, evicted = random.Random(7 + page_size), 0

    def agree(mine: list[Victim], theirs: list[Victim]) -> int:
        assert stock == "rust" or mine == theirs  # the Rust core's victims show only in what is left
        assert ours.pool.available_size() == lru.pool.available_size()
        return len(mine)

    for number in range(400):
        tokens = random_sequence(rng)
        what = rng.random()
        ours.runtime.observe(Tick(number, number / 10))
        if what < 0.5:
            rid = f"r{number}"
            if observed:
                arrive(ours, rid, tokens, "only")
            assert ours.match(tokens, rid) == lru.match(tokens)
            mine, theirs = ours.insert(tokens, rid), lru.insert(tokens)
            assert mine.done == theirs.done
            evicted += agree(mine.victims, theirs.victims)
            ours.runtime.observe(RequestFinished(rid))
        elif what < 0.8:
            assert ours.match(tokens) == lru.match(tokens)
        else:
            need = rng.randint(1, 100)
            evicted += agree(ours.evict(need), lru.evict(need))
    assert evicted > 50
    assert_mirror(ours)


@pytest.mark.parametrize("policy", ["scout", "cachescout"])
def test_locked_requests_are_never_victims(policy: str) -> None:
    tree = SglangTree(policy=policy)
    for number in range(8):
        tree.insert(blocks(number))
    held = [tree.lock(blocks(n)) for n in (1, 4)]
    gone = {v.sequence for v in tree.evict(10_000)}
    assert gone == {blocks(n) for n in range(8) if n not in (1, 4)}
    for lock in held:
        tree.unlock(lock)
    assert_mirror(tree)


def one_session_over(tree: SglangTree) -> None:
    """Three calls each of two sessions, the later one closed."""
    for number, session in enumerate(["alive", "over"]):
        for turn in range(3):
            rid = f"{session}{turn}"
            prompt = blocks(10 * number, *range(10 * number + 1, 10 * number + 2 + turn))
            arrive(tree, rid, prompt, "planner", session)
            tree.match(prompt, rid)
            tree.insert(prompt, rid)
            tree.runtime.observe(Tick(number * 10 + turn, float(number * 10 + turn)))
            tree.runtime.observe(RequestFinished(rid))
    tree.runtime.observe(SessionClosed("over"))


def test_a_finished_session_goes_before_older_live_ones() -> None:
    tree = SglangTree()
    one_session_over(tree)
    first = tree.evict(1)
    assert first[0].sequence[:16] == blocks(10), "LRU would take the older session's leaf"
    assert_mirror(tree)


def test_the_index_names_what_scoring_every_leaf_would() -> None:
    tree = SglangTree()
    one_session_over(tree)
    while tree.core.evictable_device_leaves:
        tree.runtime.begin_eviction()
        expected = naive_order(tree.runtime.world.nodes, tree.runtime.policy.score)[0]
        depth = expected.start + expected.length
        victims = tree.evict(1)
        assert [len(v.sequence) for v in victims] == [depth], expected
        assert_mirror(tree)


def test_while_the_guard_prefers_lru_victims_are_lrus_and_calls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = SglangTree()
    monkeypatch.setattr(tree.runtime.policy, "holds", lambda: False)
    one_session_over(tree)
    first = tree.evict(1)
    assert first[0].sequence[:16] == blocks(0), "scout would take the ended session's leaf"
    assert tree.bridge.counters["lru_calls"] == 1
    assert_mirror(tree)


def test_a_flush_is_told_to_the_policy() -> None:
    tree = SglangTree()
    calls: list[int] = []
    tree.runtime.policy.on_reset = lambda: calls.append(1)  # type: ignore[method-assign]
    tree.insert(blocks(0))
    tree.cache.reset()
    assert calls == [1] and not list(tree.nodes())


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"components": ("FULL", "SWA")}, "SWA: sliding window"),
        ({"components": ("FULL", "MAMBA")}, "MAMBA: sliding window or Mamba state"),
        ({"is_eagle": True}, "EAGLE"),
        ({"component_registry_override": {"x": object}}, "custom tree components"),
        ({"enable_session_radix_cache": True}, "--enable-session-radix-cache"),
        ({"pp_size": 2}, "--pp-size > 1"),
        ({}, None),
    ],
)
def test_what_the_mirror_does_not_understand_is_refused_at_start(what: dict[str, object], said: str | None) -> None:
    from types import SimpleNamespace

    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    from sglang_scout.tree import unsupported

    plain = {"is_eagle": False, "component_registry_override": None, "enable_session_radix_cache": False, "pp_size": 1}
    components = [ComponentType[name] for name in what.get("components", ("FULL",))]  # type: ignore[attr-defined]
    odd = unsupported(SimpleNamespace(**{**plain, **what}), components)
    assert odd is None if said is None else odd is not None and said in odd
