"""Trees under one small set of verbs, so that one suite runs on SGLang's real cache and on the simulator.

A tree tells its Runtime what happens; `truth` is what the tree itself holds, for comparing with the Runtime's mirror.
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol
from unittest import mock

from radix_policy.events import PrefixMatched
from radix_policy.runtime import Runtime
from radix_policy.simulator.tree import SimTree, path_ids, spans_of

Tokens = tuple[int, ...]


class NodeTruth(NamedTuple):
    """A node as the tree sees it."""

    parent: int
    start: int
    length: int
    locks: int
    resident: bool
    stamp: float | None  # None where the mirror has a clock of its own
    counts: int | None  # SGLang's hit_count; None where the tree keeps none


class Victim(NamedTuple):
    """A leaf that was evicted: everything from the root to its end, and where it began."""

    sequence: Tokens
    start: int


class Inserted(NamedTuple):
    """What an insert did: the leaves that had to make room, and whether the sequence is in the tree now."""

    victims: list[Victim]
    done: bool


class Tree(Protocol):
    """A radix tree of `capacity` tokens with a Runtime that listens."""

    page_size: int
    capacity: int
    runtime: Runtime

    def insert(self, tokens: Tokens, rid: str | None = None) -> Inserted:
        """Insert the whole pages of the sequence, by that request; not done where locks leave no room."""
        ...

    def match(self, tokens: Tokens, rid: str | None = None) -> int:
        """Tokens found."""
        ...

    def lock(self, tokens: Tokens) -> Any:
        """Lock the longest cached prefix; the answer goes to `unlock`."""
        ...

    def unlock(self, held: Any) -> None: ...

    def evict(self, tokens: int) -> list[Victim]:
        """Free at least so many tokens if the tree can; the victims, first to last."""
        ...

    def reset(self) -> None: ...

    def root(self) -> int:
        """The root's id."""
        ...

    def truth(self) -> dict[int, NodeTruth]:
        """Every node but the root."""
        ...

    def leaves(self) -> set[int]:
        """The evictable leaves, as the tree itself keeps them."""
        ...

    def check(self) -> None:
        """The tree's own invariants."""
        ...


def assert_mirror(tree: Tree) -> None:
    """The Runtime's table is the tree: same nodes, places, locks, residence, stamps, counts and leaves."""
    tree.check()
    nodes, truth = tree.runtime.world.nodes, tree.truth()
    assert nodes.root is not None and nodes.root.id == tree.root()
    assert {n.id for n in nodes} == {*truth, nodes.root.id}
    for node_id, real in truth.items():
        node = nodes[node_id]
        assert node.parent is not None
        seen = NodeTruth(
            node.parent.id,
            node.start,
            node.length,
            node.locks,
            node.resident,
            None if real.stamp is None else node.stamp,
            None if real.counts is None else node.counts,
        )
        assert seen == real, node
        assert node.children == sum(t.resident for t in truth.values() if t.parent == node_id), node
    assert {n.id for n in nodes.leaves()} == tree.leaves()
    if isinstance(tree, SglangTree):
        assert tree.core.differences() == []
        assert tree.bridge is not None and tree.bridge.live
    if len(tree.runtime.index):  # an engine that keeps its own leaves leaves the index empty
        assert len(tree.runtime.index) == len(tree.leaves())


class SimulatedTree:
    """`radix_policy.simulator.tree.SimTree`."""

    def __init__(self, page_size: int = 1, capacity: int = 256, policy: str = "scout") -> None:
        self.page_size, self.capacity = page_size, capacity
        self.runtime = Runtime(policy, page_size=page_size)
        self.tree = SimTree(self.runtime, page_size)

    def insert(self, tokens: Tokens, rid: str | None = None) -> Inserted:
        whole = len(tokens) - len(tokens) % self.page_size
        victims = self.evict(self.tree.used + whole - self.capacity)
        if whole == 0 or self.tree.used + whole > self.capacity:
            return Inserted(victims, False)
        self.tree.insert(spans_of(tokens), len(tokens), rid=rid)
        return Inserted(victims, True)

    def match(self, tokens: Tokens, rid: str | None = None) -> int:
        found = self.tree.match(spans_of(tokens), len(tokens))
        if rid is not None:
            self.runtime.observe(PrefixMatched(rid, path_ids(found.node), found.tokens))
        return found.tokens

    def lock(self, tokens: Tokens) -> Any:
        node = self.tree.match(spans_of(tokens), len(tokens)).node
        self.tree.lock(node)
        return node

    def unlock(self, held: Any) -> None:
        self.tree.unlock(held)

    def evict(self, tokens: int) -> list[Victim]:
        victims: list[Victim] = []
        freed = 0
        with self.runtime.evicting() as drain:
            while freed < tokens:
                node = drain.next()
                if node is None:
                    break
                keep = node.length - self.runtime.policy.cut(node, tokens - freed, self.page_size)
                victims.append(Victim(self._sequence(node.id), node.start + keep))
                freed += self.tree.trim(node.id, keep) if keep else self.tree.evict(node.id)
        return victims

    def reset(self) -> None:
        self.tree.reset()

    def _sequence(self, node_id: int) -> Tokens:
        ids = path_ids(self.tree.nodes[node_id])
        return tuple(t for i in ids for first, count in self.tree.nodes[i].spans for t in range(first, first + count))

    def root(self) -> int:
        return self.tree.root.id

    def truth(self) -> dict[int, NodeTruth]:
        return {
            n.id: NodeTruth(n.parent.id, n.end - n.length, n.length, n.locks, True, n.stamp, None)
            for n in self.tree.nodes.values()
            if n.parent is not None
        }

    def leaves(self) -> set[int]:
        return {n.id for n in self.tree.nodes.values() if n.parent is not None and not n.children and not n.locks}

    def check(self) -> None:
        nodes = [n for n in self.tree.nodes.values() if n.parent is not None]
        assert self.tree.used == sum(n.length for n in nodes) <= self.capacity
        assert self.tree.protected == sum(n.length for n in nodes if n.locks)


class SglangTree:
    """The real `UnifiedRadixCache` with allocator and KV pool; `policy` lru is stock SGLang on that core.

    `core` None: what SGLang takes by itself. twin: its Python core behind the mirror that is made for the Rust core, so
    that the truth can be read. Of the Rust core `truth` and `leaves` are the mirror's own; what it can be asked is
    compared by `differences`.
    """

    def __init__(
        self,
        page_size: int = 1,
        capacity: int = 256,
        policy: str = "scout",
        core: str | None = "python",
        host_tokens: int = 0,
        config: dict[str, Any] | None = None,
        write_policy: str = "write_through",
    ) -> None:
        import torch
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        prepare()
        self.page_size, self.capacity = page_size, capacity
        flags: dict[str, Any] = {}
        if host_tokens:
            flags = {
                "enable_hierarchical_cache": True,
                "hicache_io_backend": "direct",
                "hicache_mem_layout": "layer_first" if page_size == 1 else "page_first_direct",
                "hicache_write_policy": write_policy,
                "hicache_ratio": host_tokens / capacity,
            }
        args = publish(page_size=page_size, **flags)
        pool = MHATokenToKVPool(
            size=capacity,
            page_size=page_size,
            dtype=torch.float32,
            head_num=1,
            head_dim=2,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        rows = ReqToTokenPool(size=4, max_context_len=4096, device="cpu", enable_memory_saver=False)
        if page_size == 1:
            self.pool = TokenToKVPoolAllocator(capacity, torch.float32, "cpu", pool, need_sort=False)
        else:
            self.pool = PagedTokenToKVPoolAllocator(capacity, page_size, torch.float32, "cpu", pool, need_sort=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=self.pool,
            page_size=page_size,
            eviction_policy=policy,
            eviction_policy_config=config,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="rust" if core == "twin" else core,
        )
        with twin() if core == "twin" else nullcontext():
            self.cache = UnifiedRadixCache(params)
        self.host = bool(host_tokens)
        self.lazy = False  # the host tier finishes nothing by itself: `settle` has to be called
        if self.host:
            self.cache.init_hicache(args, params)
            self.cache.load_back_threshold = 0
        self.core = self.cache.tree_core
        self.mirrored = hasattr(self.core, "begin_mirror")
        self.bridge = getattr(self.core, "scout", None)
        if self.bridge is not None:
            self.runtime = self.bridge.runtime
        self.victims: list[Victim] = []
        self.space: tuple[str | None, str | None] = (None, None)
        self._watch()

    def _watch(self) -> None:
        evict = self.core.evict_device_leaf
        shows_nodes = self.mirrored or hasattr(self.core, "evictable_device_leaves")  # the Rust core does not

        def watched(node_id: int, is_write_back: bool) -> Any:
            if shows_nodes and (self.bridge is None or self.bridge.live or not self.mirrored):
                sequence = self.sequence(node_id)
                self.victims.append(Victim(sequence, len(sequence) - self.length(node_id)))
            return evict(node_id, is_write_back)

        self.core.evict_device_leaf = watched

    def key(self, tokens: Sequence[int]) -> Any:
        """In the namespace `space`: (extra_key, cache_salt)."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens), extra_key=self.space[0], cache_salt=self.space[1])

    def insert(self, tokens: Tokens, rid: str | None = None) -> Inserted:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        whole = len(tokens) - len(tokens) % self.page_size
        victims = self.evict(whole - self.pool.available_size())
        if whole == 0 or self.pool.available_size() < whole:
            return Inserted(victims, False)
        if self.bridge is not None:
            self.bridge.inserting = rid
        self.cache.insert(InsertParams(key=self.key(tokens[:whole]), value=self.pool.alloc(whole)))
        if self.bridge is not None:
            self.bridge.inserting = None
        if not self.lazy:
            self.settle()
        return Inserted(victims, True)

    def lookup(self, tokens: Tokens, rid: str | None = None) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        req = None if rid is None else SimpleNamespace(rid=rid, session=None)
        return self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens), req=req))

    def match(self, tokens: Tokens, rid: str | None = None) -> int:
        return self.lookup(tokens, rid).device_prefix_len

    def lock(self, tokens: Tokens) -> Any:
        return self.cache.lock(self.lookup(tokens).last_device_node)

    def unlock(self, held: Any) -> None:
        self.cache.unlock(held)

    def evict(self, tokens: int) -> list[Victim]:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.victims.clear()
        if tokens > 0:
            self.cache.evict(EvictParams(num_tokens=tokens))
            if not self.lazy:
                self.settle()
        return list(self.victims)

    def settle(self) -> None:
        """Let the host tier finish what it began."""
        if self.host:
            self.cache.check_hicache_events()

    def load_back(self, tokens: Tokens) -> bool:
        """Bring what the host tier holds of the sequence back to the device."""
        found = self.lookup(tokens)
        if not found.host_hit_length:
            return False
        loaded = self.cache.load_back(found.best_match_node)
        self.cache.ready_to_load_host_cache()
        self.cache.loading_check()
        return loaded

    def prefetch(self, tokens: Tokens) -> None:
        """What storage is said to have of the sequence comes into the host tier, below what is in the tree."""
        found = self.lookup(tokens[: len(tokens) // 2])
        base, have = found.last_host_node, found.device_prefix_len + found.host_hit_length
        rest = tokens[have : len(tokens) - len(tokens) % self.page_size]
        if not rest or not (base == self.root() or self.core.is_write_back or self.core.is_backuped(base)):
            return
        pool = self.cache.cache_controller.mem_pool_host
        slots = pool.alloc(len(rest))
        if slots is None:
            return
        done = self.core.insert_host(base, self.key(rest), slots, ["h"] * (len(rest) // self.page_size))
        self.cache._apply_cache_actions(done.cache_actions)
        pool.free(slots if done.host_insert_dropped else slots[: done.prefix_len])

    def reset(self) -> None:
        self.settle()
        self.cache.reset()
        self.pool.clear()

    def length(self, node_id: int) -> int:
        """Tokens of the node itself."""
        if self.mirrored:
            return self.runtime.world.nodes[node_id].length
        return len(self.core.node_by_id(node_id).key)

    def sequence(self, node_id: int) -> Tokens:
        """All tokens from the root to the end of the node."""
        if self.mirrored:
            record = self.runtime.world.nodes[node_id]
            return tuple(self.core._key_to(record, record.length).token_ids)
        node, parts = self.core.node_by_id(node_id), []
        while node.parent is not None:
            parts.append(tuple(node.key.token_ids))
            node = node.parent
        return tuple(t for part in reversed(parts) for t in part)

    def nodes(self) -> list[Any]:
        """SGLang's nodes, the root left out, parents first."""
        found, stack = [], list(self.core.root_node.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found

    def root(self) -> int:
        return self.core.empty_match_result.best_match_node

    @property
    def is_opaque(self) -> bool:
        """Whether the core shows no nodes."""
        return not hasattr(self.core, "evictable_device_leaves")

    def truth(self) -> dict[int, NodeTruth]:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        if self.is_opaque:
            return {
                n.id: NodeTruth(n.parent.id, n.start, n.length, n.locks, n.resident, None, None)
                for n in self.runtime.world.nodes
                if n.parent is not None
            }

        ends = {self.core.root_node.id: 0}
        truth = {}
        for node in self.nodes():
            full = node.component_data[ComponentType.FULL]
            start = ends[node.parent.id]
            ends[node.id] = start + len(node.key)
            resident, stamp, counts = full.value is not None, node.last_access_time, node.hit_count
            if self.mirrored:
                if not resident:
                    continue
                stamp = counts = None
            truth[node.id] = NodeTruth(node.parent.id, start, len(node.key), full.lock_ref, resident, stamp, counts)
        return truth

    def leaves(self) -> set[int]:
        if self.is_opaque:
            return {node.id for node in self.runtime.world.nodes.leaves()}
        return {node.id for node in self.core.evictable_device_leaves}

    def check(self) -> None:
        if self.lazy:
            return  # SGLang's own check is for trees at rest
        self.cache.sanity_check()
        held = sum(t.length for t in self.truth().values() if t.resident)
        assert held + self.pool.available_size() == self.capacity


@contextmanager
def twin() -> Iterator[None]:
    """While it lasts, what is built on the Rust core is built on the Python core behind the same mirror."""
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

    from sglang_scout.mirrored import Mirrored

    class Twin(Mirrored, UnifiedTreeCore):
        def __init__(self, params: Any, components: Any, bridge: Any) -> None:
            super().__init__(replace(params, eviction_policy="lru", eviction_policy_config=None), components)
            self.begin_mirror(bridge)

    with mock.patch("sglang_scout.rust_tree.RustScoutCore", Twin):
        yield


_prepared = False


def prepare() -> None:
    """Load the plug-ins as SGLang would, and ours as in a process that builds trees; once."""
    global _prepared
    if _prepared:
        return
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_scout import plugin

    load_plugins()
    plugin.load(engine=True)
    HookRegistry.apply_hooks()
    _prepared = True


def publish(**flags: Any) -> Any:
    """Server arguments in effect for the caches that are built next."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    args = ServerArgs(model_path="dummy", device="cpu", **flags)
    set_global_server_args_for_scheduler(args)
    return args
