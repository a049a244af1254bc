"""SGLang's own tree in process: what insert, match, lock and evict cost on each core, stock and with the plug-in.

Importing this module imports SGLang and torch (some 20 s); no server and no model is started.
"""

import os
from array import array
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read while SGLang is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from benchmarks.micro import EVICT_TOKENS, LEAF_TOKENS, Point, deep_bytes, median_us
from benchmarks.results import progress
from radix_policy.events import RequestArrived, Tag
from radix_policy.prompts import TokenPrompt

torch.set_num_threads(1)  # the time of one thread is what is measured
ANCHOR_TOKENS = 100
ANCHORS = 24
_TURNS = 12  # calls of a session
_CLASSES_UP_TO = 20_000
_PROBES = 100  # matches, locks or inserts in one repeat


class Unavailable(RuntimeError):
    """This core or policy cannot be measured here; why, in one line."""


def pairs(policies: list[str]) -> list[tuple[str, str]]:
    """(core, policy) in the order in which they are measured: stock first."""
    own = [p for p in policies if p != "lru"]
    return [("python", "lru"), ("rust", "lru"), *((core, p) for p in own for core in ("python", "rust"))]


def points(core: str, policy: str, leaf_counts: list[int], repeats: int, per_class: list[int]) -> Iterator[Point]:
    """Costs at each number of leaves, each in a tree and a pool of its own, nearly full as in a busy server.

    Where leaves have classes, eviction also with more of them in one (not in the largest trees, which take long to
    grow). It takes in all that a call costs: scores brought up to date, leaves filed, SGLang's own part. `evict` comes
    after as many requests as it takes to fill the tree again, `evict again` after one more such call.
    """
    for leaves in leaf_counts:
        more = [n for n in per_class if n > 1 and leaves <= _CLASSES_UP_TO]
        for each in [1] if policy == "lru" else [1, *more]:
            progress(f"micro: {core} core, {policy}, {leaves} leaves" + (f", {each} per class" if each > 1 else ""))
            tree = Tree(core, policy, leaves, each)
            tree.grow(leaves)
            for op, us in tree.measure(repeats, evict_only=each > 1):
                point = {"op": op, "core": core, "policy": policy, "leaves": leaves, "classes": tree.classes()}
                point["per_class"] = each
                yield point | {"us": round(us, 2)} | ({"tokens": EVICT_TOKENS} if op.startswith("evict") else {})
            if tree.bridge is not None:
                where = {"core": core, "policy": policy, "leaves": leaves, "classes": tree.classes(), "per_class": each}
                yield {"op": "memory", **where, **tree.memory()}
            if tree.bridge is not None and tree.bridge.faults:
                raise Unavailable(f"the plug-in counted faults: {tree.bridge.faults}")


class Tree:
    """A `UnifiedRadixCache` with a real allocator: anchors at the root, leaves of LEAF_TOKENS tokens below them.

    `per_class` 1: sessions of 12 calls, each of another agent, so that no two leaves have a class in common. More:
    sessions of one agent, of four times as many calls: the leaves of the latest three have classes of their own, all
    others share one.
    """

    def __init__(self, core: str, policy: str, leaves: int, per_class: int = 1) -> None:
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))
        # Tight: freeing costs the allocator a copy of its whole free list, which is short in a server that must evict.
        room = (leaves + 2 * _PROBES) * LEAF_TOKENS + (ANCHORS + 4) * ANCHOR_TOKENS
        pool = MHATokenToKVPool(
            size=room,
            page_size=1,
            dtype=torch.float16,
            head_num=1,
            head_dim=2,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = TokenToKVPoolAllocator(room, torch.float16, "cpu", pool, need_sort=False)
        requests = ReqToTokenPool(size=4, max_context_len=256, device="cpu", enable_memory_saver=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
            eviction_policy=policy,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
        )
        self.core, self.policy, self.per_class = core, policy, per_class
        _load_plugins()
        self.cache = _build(params)
        self.bridge = getattr(self.cache.tree_core, "scout", None)  # the plug-in's link to its runtime
        self.leaves = 0
        self.owed = 0  # tokens evicted that make no whole leaf yet
        self.serial = 0
        self.anchor_slots = [self._slots(ANCHOR_TOKENS) for _ in range(ANCHORS)]
        for anchor, slots in enumerate(self.anchor_slots):
            self.cache.insert(InsertParams(key=RadixKey(_anchor(anchor)), value=slots))

    def classes(self) -> int:
        """Leaf classes of the policy; stock LRU is one."""
        if self.bridge is None:
            return 1
        runtime = self.bridge.runtime
        classes = [runtime.policy.class_of(node) for node in runtime.world.nodes.leaves()]
        return len({c for c in classes if c is not None}) + sum(c is None for c in classes)

    def grow(self, leaves: int) -> None:
        """Insert new leaves until there are this many."""
        while self.leaves < leaves:
            self.insert()

    def shrink(self, leaves: int) -> None:
        """Evict until no more than this many are left."""
        while self.leaves > leaves:
            self.evict()

    def insert(self) -> None:
        """One new leaf, as a finished request leaves it; its request arrives, is matched and finishes."""
        self.announce(self.serial)
        self.add()
        self.finish(self.serial - 1)

    def caller(self, serial: int) -> tuple[int, int]:
        """Agent and session of a leaf's call."""
        if self.per_class == 1:
            return serial % ANCHORS, serial // _TURNS
        session = serial // (4 * self.per_class)
        return session % ANCHORS, session

    def key(self, serial: int) -> "array[int]":
        """The tokens from the root to the end of a leaf."""
        first = 1_000_000 + serial * LEAF_TOKENS
        return _anchor(self.caller(serial)[0]) + array("q", range(first, first + LEAF_TOKENS))

    def announce(self, serial: int) -> None:
        """The request of the next leaf enters the engine: a call of a session, by one of the agents."""
        if self.bridge is None:
            return
        agent, session = self.caller(serial)
        tag = Tag(f"agent{agent}", f"session{session}")
        self.bridge.tick(10 * serial, 0.1 * serial)
        self.bridge.arrived(RequestArrived(str(serial), TokenPrompt(self.key(serial)), tag=tag))
        req = SimpleNamespace(rid=str(serial), session=None)
        self.cache.match_prefix(MatchPrefixParams(key=RadixKey(self.key(serial)), req=req))

    def add(self) -> None:
        """Insert the next leaf below an anchor that is there."""
        slots = torch.cat([self.anchor_slots[self.caller(self.serial)[0]], self._slots(LEAF_TOKENS)])
        key = RadixKey(self.key(self.serial))
        if self.bridge is not None:
            self.bridge.inserting = str(self.serial)
        self.cache.insert(InsertParams(key=key, value=slots, prev_prefix_len=ANCHOR_TOKENS))
        self.serial += 1
        self.leaves += 1

    def finish(self, serial: int) -> None:
        """The request of that leaf leaves the engine."""
        if self.bridge is not None:
            self.bridge.inserting = None
            self.bridge.finished(str(serial), LEAF_TOKENS, False, True)

    def evict(self) -> None:
        """One eviction call for EVICT_TOKENS tokens."""
        result = self.cache.evict(EvictParams(num_tokens=EVICT_TOKENS))
        self.owed += result.num_tokens_evicted
        self.leaves -= self.owed // LEAF_TOKENS
        self.owed %= LEAF_TOKENS

    def memory(self) -> dict[str, float]:
        """Bytes per tree node that the plug-in holds by node or leaf, of which `tokens` are the nodes' own tokens."""
        assert self.bridge is not None
        runtime = self.bridge.runtime
        table, policy, core = runtime.world.nodes, runtime.policy, self.cache.tree_core
        nodes, notes = list(table), [node.state for node in table]
        apart = [runtime, runtime.world, policy, core, self.bridge, runtime.world.sessions, *runtime.world.sessions]
        apart += [policy.config, runtime.requests, *(v for v in vars(policy).values() if hasattr(v, "config"))]
        shadow = policy.guard.passing() if hasattr(policy, "guard") else []
        keys, places = getattr(core, "_keys", {}), getattr(core, "_children", {})
        tokens = 4 * sum(node.length for node in nodes) if keys else 0
        parts = {
            "nodes": deep_bytes([table], [*apart, runtime.index]),
            "index": deep_bytes([runtime.index], [*apart, *nodes, *notes, table]),
            "shadow": deep_bytes(shadow, [*apart, *nodes, *notes, table]),
            "mirror": deep_bytes([keys, places], apart) - tokens,
        }
        each = {name: size / len(nodes) for name, size in parts.items()}
        return each | {"bytes": sum(each.values()), "tokens": tokens / len(nodes)}

    def measure(self, repeats: int, evict_only: bool = False) -> Iterator[tuple[str, float]]:
        """(op, microseconds per operation) at the present size."""
        size = self.leaves
        yield "evict", median_us(self.evict, max(repeats, 9), 1, lambda: self.grow(size))

        def one_before() -> None:
            self.grow(size)
            self.evict()

        yield "evict again", median_us(self.evict, max(repeats, 9), 1, one_before)
        self.grow(size)
        if evict_only:
            return
        recent = [self.key(self.serial - 1 - i) for i in range(_PROBES)]

        def match_all() -> None:
            for tokens in recent:
                self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

        yield "match", median_us(match_all, repeats, _PROBES)
        nodes = [self.cache.match_prefix(MatchPrefixParams(key=RadixKey(t))).last_device_node for t in recent]

        def lock_all() -> None:
            for node in nodes:
                self.cache.unlock(self.cache.lock(node))

        yield "lock", median_us(lock_all, repeats, _PROBES)

        def add_all() -> None:
            for _ in range(_PROBES):
                self.add()

        def next_requests() -> None:
            for serial in range(self.serial - _PROBES, self.serial):
                self.finish(serial)
            self.shrink(size)
            for serial in range(self.serial, self.serial + _PROBES):
                self.announce(serial)

        yield "insert", median_us(add_all, repeats, _PROBES, next_requests)

    def _slots(self, tokens: int) -> torch.Tensor:
        slots = self.allocator.alloc(tokens)
        if slots is None:
            raise Unavailable("the pool of this measurement is too small")
        return slots


@cache
def _load_plugins() -> None:
    """As SGLang does at start. Under a policy that is not the plug-in's, it leaves the tree alone."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    HookRegistry.apply_hooks()


def _build(params: CacheInitParams) -> Any:
    try:
        return UnifiedRadixCache(params)
    except Exception as error:  # whatever SGLang or the plug-in refuses with, a name that neither knows included
        raise Unavailable(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from None


def _anchor(anchor: int) -> "array[int]":
    return array("q", range(anchor * ANCHOR_TOKENS, (anchor + 1) * ANCHOR_TOKENS))
