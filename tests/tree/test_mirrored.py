"""The mirror in front of a core that cannot be looked into: above SGLang's Python core, where it is compared with the
truth after every operation (`twin`), and above the Rust core that servers run."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from radix_policy.events import RequestFinished, Tick
from tests.tree.conformance import BLOCK, Conformance, arrive, blocks, machine
from tests.tree.trees import SglangTree, Tokens, assert_mirror

pytest.importorskip("sglang")

LONG = 1_020_000  # operations of a long life
CORES = pytest.mark.parametrize("core", ["twin", "rust"])
PAGES = pytest.mark.parametrize("page", [1, 16])


class TestTwin(Conformance):
    def make(self, page_size: int, capacity: int = 256, policy: str = "scout") -> SglangTree:
        return SglangTree(page_size, capacity, policy, core="twin")


class TestRust(Conformance):
    def make(self, page_size: int, capacity: int = 256, policy: str = "scout") -> SglangTree:
        return SglangTree(page_size, capacity, policy, core="rust")


TestTwinMachine = machine(lambda **kw: SglangTree(core="twin", **kw)).TestCase
TestRustMachine = machine(lambda **kw: SglangTree(core="rust", **kw)).TestCase
TestRustMachineCacheScout = machine(lambda **kw: SglangTree(policy="cachescout", core="rust", **kw), 8).TestCase


def test_the_rust_core_is_what_a_server_gets() -> None:
    tree = SglangTree(core="rust")
    assert type(tree.core).__name__ == "RustScoutCore"
    assert type(SglangTree(core="twin").core).__name__ == "Twin"


def sequence(rng: random.Random) -> Tokens:
    tokens = blocks(*(rng.randint(0, 3) for _ in range(rng.randint(1, 6))))
    return tokens[: rng.randint(1, len(tokens))]


def play(tree: SglangTree, seed: int, steps: int) -> Iterator[Any]:
    """Random operations; yields what each one did."""
    rng, held = random.Random(seed), []
    for number in range(steps):
        tokens, what = sequence(rng), rng.random()
        tree.bridge.tick(number, 0.1 * number)
        if what < 0.4:
            rid = f"r{number}"
            arrive(tree, rid, tokens, f"a{rng.randint(0, 2)}", f"s{rng.randint(0, 5)}")
            found = tree.match(tokens, rid)
            done = tree.insert(tokens, rid)
            tree.runtime.observe(RequestFinished(rid, len(tokens)))
            yield found, done
        elif what < 0.6:
            yield tree.match(tokens)
        elif what < 0.7 and len(held) < 3:
            held.append(tree.lock(tokens))
            yield "lock"
        elif what < 0.8 and held:
            tree.unlock(held.pop(rng.randrange(len(held))))
            yield "unlock"
        else:
            yield tree.evict(rng.randint(1, 64))
    for lock in held:
        tree.unlock(lock)


@CORES
@PAGES
@pytest.mark.parametrize("policy", ["scout", "cachescout"])
def test_the_same_victims_as_on_the_python_core(core: str, page: int, policy: str) -> None:
    trees = [SglangTree(page, 512, policy), SglangTree(page, 512, policy, core=core)]
    evicted = 0
    for ours, theirs in zip(*(play(tree, 5 + page, 1200) for tree in trees), strict=True):
        assert ours == theirs
        evicted += isinstance(ours, list) and len(ours)
    assert evicted > 100
    assert_mirror(trees[1])
    assert trees[1].bridge.live and not trees[1].bridge.faults
    counters = trees[1].bridge.counters
    assert counters["core_calls"] == counters["rescued_calls"] == 0 < counters["device_calls"]
    assert (counters["trims"] > 0) == (policy == "scout")


@PAGES
def test_the_mirror_after_each_of_many_operations(page: int) -> None:
    tree = SglangTree(page, 384, core="twin")
    for _ in play(tree, 9, 1500):
        assert_mirror(tree)


class Life:
    """Whatever a server does to its tree, at random: requests that run chunk by chunk and decode, retraction, aborts,
    locks, namespaces, both tiers, and now and then a reset."""

    SPACES = ((None, None), ("lora", None), (None, "salt"))

    def __init__(self, tree: SglangTree, seed: int) -> None:
        self.tree, self.random = tree, random.Random(seed)
        self.running: list[tuple[str, Tokens, int, Any, Any]] = []  # rid, tokens, computed, lock, namespace
        self.number = 0
        self.scale = max(1, tree.page_size // BLOCK)

    def sequence(self) -> Tokens:
        """A few pages long, whatever a page is."""
        return tuple(t for _ in range(self.scale) for t in sequence(self.random))

    def step(self) -> None:
        """One operation."""
        rng, tree = self.random, self.tree
        self.number += 1
        tree.space = rng.choice(self.SPACES)
        tree.bridge.tick(self.number, 0.05 * self.number)
        what = rng.random()
        if what < 0.2 and len(self.running) < 3:
            self.start()
        elif what < 0.55 and self.running:
            self.advance(rng.randrange(len(self.running)))
        elif what < 0.7:
            tree.match(self.sequence())
        elif what < 0.8:
            tree.insert(self.sequence())
        elif what < 0.92:
            tree.evict(rng.randint(1, 96 * self.scale))
        elif what < 0.95 and tree.host:
            tree.load_back(self.sequence())
        elif what < 0.97 and tree.host:
            tree.cache.evict_host(rng.randint(1, 96 * self.scale))
        elif what < 0.98 and tree.host:
            tree.prefetch(self.sequence())
        elif what < 0.99:
            tree.settle()
        elif what > 0.9995 and not self.running:
            tree.reset()

    def start(self) -> None:
        rng, rid = self.random, f"r{self.number}"
        tokens = self.sequence() + self.sequence()
        if rng.random() < 0.8:
            arrive(self.tree, rid, tokens, f"a{rng.randint(0, 2)}", f"s{rng.randint(0, 9)}")
        found = self.tree.lookup(tokens, rid)
        lock = self.tree.cache.lock(found.last_device_node)
        self.running.append((rid, tokens, found.device_prefix_len, lock, self.tree.space))

    def advance(self, at: int) -> None:
        """The next chunk or decode step, the end, an abort, or a retraction: what was computed stays, the lock goes."""
        rng, tree = self.random, self.tree
        rid, tokens, computed, lock, tree.space = self.running.pop(at)
        if rng.random() < 0.05 or computed >= len(tokens):
            tree.unlock(lock)
            tree.runtime.observe(RequestFinished(rid, 3, aborted=rng.random() < 0.3))
            return
        computed = min(len(tokens), computed + rng.choice((1, 16, 64 * self.scale)))
        done = tree.insert(tokens[:computed], rid).done
        if done and rng.random() < 0.9:
            held = tree.cache.lock(tree.lookup(tokens[:computed]).last_device_node)
            self.running.append((rid, tokens, computed, held, tree.space))
        tree.unlock(lock)


TIERS = pytest.mark.parametrize("write", [None, "write_through", "write_through_selective", "write_back"])


@PAGES
@TIERS
def test_a_short_life_of_the_mirror(page: int, write: str | None) -> None:
    host, how = (512, write) if write else (0, "write_through")
    tree = SglangTree(page, 512, core="twin", host_tokens=host, write_policy=how)
    tree.lazy = True  # copies stay on their way for a while
    life = Life(tree, page)
    for _ in range(1500):
        life.step()
        assert_mirror(life.tree)


@CORES
@pytest.mark.slow  # +5 min, all of them
@pytest.mark.parametrize("page", [1, 16, 64])
@TIERS
def test_a_long_life_of_the_mirror(core: str, page: int, write: str | None) -> None:
    """A million operations above the Python core, the evictable leaves compared after each; fewer above the Rust core,
    which is asked for its sums after each."""
    host, how = (5120, write) if write else (0, "write_through")
    tree = SglangTree(page, 16 * max(64, 4 * page), core=core, host_tokens=host, write_policy=how)
    tree.lazy = True
    life, table = Life(tree, 100 + page), tree.runtime.world.nodes
    steps = LONG // 12 if core == "twin" else LONG // 120
    for number in range(steps):
        life.step()
        if core == "twin":
            assert {n.id for n in table.leaves()} == tree.leaves()
        assert table.held - table.protected == tree.core.full_evictable_size()
        assert table.protected == tree.core.full_protected_size()
        if number % 1000 == 0:
            assert_mirror(tree)
    assert tree.bridge.live and not tree.bridge.faults
    assert tree.bridge.counters["trims"] > 50 or host
    assert tree.bridge.counters["core_calls"] == 0


@CORES
def test_namespaces_never_meet(core: str) -> None:
    from array import array

    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree = SglangTree(1, 512, core=core)
    spaces = [(None, None), ("x", None), (None, "x"), ("", None), ("x", "x")]
    tokens = blocks(0, 1, 2)

    def key(space: tuple[Any, Any]) -> Any:
        return RadixKey(array("q", tokens), extra_key=space[0], cache_salt=space[1])

    def found() -> list[int]:
        return [tree.cache.match_prefix(MatchPrefixParams(key=key(space))).device_prefix_len for space in spaces]

    for space in spaces:
        tree.cache.insert(InsertParams(key=key(space), value=tree.pool.alloc(len(tokens))))
        assert tree.core.differences() == []
    assert len(tree.runtime.world.nodes) == len(spaces) + 1
    assert found() == [48] * 5
    tree.cache.evict(EvictParams(num_tokens=20))  # cuts the oldest, which is of the default namespace
    tree.cache.evict(EvictParams(num_tokens=60))
    assert found() == [0, 16, 48, 48, 48]
    assert tree.core.differences() == [] and tree.bridge.live


@CORES
@pytest.mark.parametrize("big", [5, 2**31 - 1, 2**31, 2**40])
def test_tokens_of_any_size(core: str, big: int) -> None:
    """Ids of images are hashes, larger than a vocabulary."""
    tree = SglangTree(1, 256, core=core)
    first, second = (*blocks(0), big, *blocks(1)), (*blocks(0), big, *blocks(2))
    for tokens in (first, second, blocks(0, 5)):
        tree.insert(tokens)
        assert_mirror(tree)
    assert [v.sequence for v in tree.evict(4)] == [first]
    assert [tree.match(t) for t in (first, second, blocks(0, 5))] == [17, 33, 32]
    assert tree.match((*blocks(0), big + 1)) == 16 and tree.match((*blocks(0), big - 2**32)) == 16
    assert_mirror(tree)


# ---- faults ----


@CORES
def test_a_mirror_that_is_wrong_names_no_victim(core: str) -> None:
    tree = SglangTree(1, 256, core=core)
    for number in range(4):
        tree.insert(blocks(number))
    node = next(n for n in tree.runtime.world.nodes if n.parent is not None)
    tree.runtime.world.nodes.remove(node.id)
    tree.evict(20)
    assert not tree.bridge.live and tree.bridge.faults == {"mirror": 1}
    assert tree.pool.available_size() >= 256 - 48, "the core's own LRU went on"
    counters = tree.bridge.counters
    assert counters["core_calls"] == 1
    tree.insert(blocks(7, 8))
    tree.cache.sanity_check()
    tree.reset()
    assert tree.bridge.live and len(tree.runtime.world.nodes) == 1
    tree.insert(blocks(0, 1))
    tree.evict(20)
    assert tree.core.differences() == [] and counters["device_calls"] == 1


@CORES
@pytest.mark.parametrize("wrong", ["locked", "inner", "unknown"])
def test_a_victim_that_is_none_never_reaches_the_core(core: str, wrong: str, monkeypatch: Any) -> None:
    """The Rust core would panic, and serve no more."""
    tree = SglangTree(1, 256, core=core)
    tree.insert(blocks(0, 1, 2))
    tree.insert(blocks(0, 5))
    tree.insert(blocks(9))
    nodes = tree.runtime.world.nodes
    inner = next(n for n in nodes if n.children and n.parent is not None)
    lock = tree.lock(blocks(9))
    names = {"locked": next(n.id for n in nodes if n.locks), "inner": inner.id, "unknown": 10**6}
    if wrong == "unknown":
        stray = nodes.add(names[wrong], inner.id, 0, 0, 0.0, 0)
        assert nodes.held == 16 * 5 and stray.length == 0
    monkeypatch.setattr(tree.bridge, "victim", lambda: names[wrong])
    tree.evict(20)
    assert not tree.bridge.live and tree.bridge.faults == {"victim": 1}
    assert tree.bridge.counters["rescued_calls"] == 1
    tree.cache.sanity_check()
    assert tree.pool.available_size() >= 256 - 80 + 20
    tree.unlock(lock)


@CORES
@pytest.mark.parametrize("where", ["path_to", "_take_in", "_cut_off"])
def test_a_fault_while_the_mirror_is_kept_leaves_the_core_alone(core: str, where: str, monkeypatch: Any) -> None:
    tree = SglangTree(1, 256, core=core)
    tree.insert(blocks(0, 1, 2))

    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(tree.core, where, broken)
    assert tree.match(blocks(0, 7)) == BLOCK
    assert not tree.bridge.live and tree.bridge.faults == {"mirror": 1}
    monkeypatch.undo()
    tree.insert(blocks(4, 5))
    assert tree.match(blocks(4, 5)) == 2 * BLOCK
    tree.evict(100)
    tree.cache.sanity_check()
    assert tree.bridge.faults == {"mirror": 1}, "said once"


@CORES
@pytest.mark.parametrize("where", ["split", "add", "touch_path", "remove", "lock", "unlock"])
def test_a_fault_in_the_table_stays_in_the_bridge(core: str, where: str, monkeypatch: Any) -> None:
    tree = SglangTree(1, 256, core=core)
    tree.insert(blocks(0, 1, 2))
    held = tree.lock(blocks(0, 1, 2))

    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(tree.runtime.world.nodes, where, broken)
    arrive(tree, "r1", blocks(0, 7), "a", "s")
    assert tree.match(blocks(0, 7), "r1") == BLOCK
    tree.insert(blocks(4, 5), "r1")
    tree.unlock(tree.lock(blocks(4)))
    tree.evict(10)
    tree.unlock(held)
    assert not tree.bridge.live and sum(tree.bridge.faults.values()) == 1
    tree.cache.sanity_check()


@CORES
def test_requests_that_were_in_flight_at_a_fault_are_over_after_the_reset(core: str) -> None:
    tree = SglangTree(1, 256, core=core)
    arrive(tree, "r1", blocks(0), "a", "s")
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        tree.bridge.fail("mirror")
    tree.bridge.observe(Tick(5, 1.0))
    tree.reset()
    assert tree.bridge.live and not tree.runtime.requests
    (session,) = tree.runtime.world.sessions
    assert session.running == 0


@CORES
def test_a_fault_in_what_requests_say_is_for_good(core: str) -> None:
    tree = SglangTree(1, 256, core=core)
    tree.bridge.observe(object())  # type: ignore[arg-type]
    tree.reset()
    assert not tree.bridge.live
    tree.insert(blocks(0, 1))
    tree.evict(16)
    tree.cache.sanity_check()
