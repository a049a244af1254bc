"""SGLang's own tree in process: what insert, match, lock and evict cost on each core, stock and with the plug-in.

Importing this module imports SGLang and torch (some 20 s); no server and no model is started.
"""

import os
from array import array
from collections.abc import Iterator
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

from benchmarks.micro import LEAF_TOKENS, VICTIMS, Point, median_us
from benchmarks.results import progress

ANCHOR_TOKENS = 100
ANCHORS = 24
_PROBES = 100  # matches, locks or inserts in one repeat


class Unavailable(RuntimeError):
    """This core or policy cannot be measured here; why, in one line."""


def pairs(policies: list[str]) -> list[tuple[str, str]]:
    """(core, policy) in the order in which they are measured: stock first."""
    own = [p for p in policies if p != "lru"]
    return [("python", "lru"), ("rust", "lru"), *(("python", p) for p in own)]


def points(core: str, policy: str, leaf_counts: list[int], repeats: int) -> Iterator[Point]:
    """Costs at each number of leaves, each in a tree and a pool of its own, nearly full as in a busy server."""
    for leaves in leaf_counts:
        progress(f"micro: {core} core, {policy}, {leaves} leaves")
        tree = Tree(core, policy, leaves)
        tree.grow(leaves)
        for op, us in tree.measure(repeats):
            point = {"op": op, "core": core, "policy": policy, "leaves": leaves, "classes": tree.classes()}
            yield point | {"us": round(us, 2)} | ({"victims": VICTIMS} if op == "evict" else {})


class Tree:
    """A `UnifiedRadixCache` with a real allocator: anchors at the root, leaves of LEAF_TOKENS tokens below them."""

    def __init__(self, core: str, policy: str, leaves: int) -> None:
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
        self.core, self.policy = core, policy
        self.cache = self._build(params)
        self.leaves = 0
        self.serial = 0
        self.anchor_slots = [self._slots(ANCHOR_TOKENS) for _ in range(ANCHORS)]
        for anchor, slots in enumerate(self.anchor_slots):
            self.cache.insert(InsertParams(key=RadixKey(_anchor(anchor)), value=slots))

    def _build(self, params: CacheInitParams) -> Any:
        if self.policy == "lru":
            return UnifiedRadixCache(params)
        raise Unavailable("the plug-in's tree core is not part of this checkout yet")

    def classes(self) -> int:
        """Leaf classes of the policy; stock LRU is one."""
        return 1

    def grow(self, leaves: int) -> None:
        """Insert new leaves until there are this many."""
        while self.leaves < leaves:
            self.insert()

    def shrink(self, leaves: int) -> None:
        """Evict until no more than this many are left."""
        while self.leaves > leaves:
            self.evict()

    def insert(self) -> None:
        """One new leaf below an anchor that is there, as a finished request leaves it."""
        slots = torch.cat([self.anchor_slots[self.serial % ANCHORS], self._slots(LEAF_TOKENS)])
        key = RadixKey(_key(self.serial))
        self.cache.insert(InsertParams(key=key, value=slots, prev_prefix_len=ANCHOR_TOKENS))
        self.serial += 1
        self.leaves += 1

    def evict(self) -> None:
        """One eviction call for VICTIMS leaves' worth of tokens."""
        result = self.cache.evict(EvictParams(num_tokens=VICTIMS * LEAF_TOKENS))
        self.leaves -= result.num_tokens_evicted // LEAF_TOKENS

    def measure(self, repeats: int) -> Iterator[tuple[str, float]]:
        """(op, microseconds per operation) at the present size."""
        size = self.leaves
        yield "evict", median_us(self.evict, max(repeats, 9), 1, lambda: self.grow(size))
        self.grow(size)
        recent = [_key(self.serial - 1 - i) for i in range(_PROBES)]

        def match_all() -> None:
            for tokens in recent:
                self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

        yield "match", median_us(match_all, repeats, _PROBES)
        nodes = [self.cache.match_prefix(MatchPrefixParams(key=RadixKey(t))).last_device_node for t in recent]

        def lock_all() -> None:
            for node in nodes:
                self.cache.unlock(self.cache.lock(node))

        yield "lock", median_us(lock_all, repeats, _PROBES)

        def insert_all() -> None:
            for _ in range(_PROBES):
                self.insert()

        yield "insert", median_us(insert_all, repeats, _PROBES, lambda: self.shrink(size))
        self.shrink(size)
        self.grow(size)

    def _slots(self, tokens: int) -> torch.Tensor:
        slots = self.allocator.alloc(tokens)
        if slots is None:
            raise Unavailable("the pool of this measurement is too small")
        return slots


def _anchor(anchor: int) -> "array[int]":
    return array("q", range(anchor * ANCHOR_TOKENS, (anchor + 1) * ANCHOR_TOKENS))


def _key(serial: int) -> "array[int]":
    first = 1_000_000 + serial * LEAF_TOKENS
    return _anchor(serial % ANCHORS) + array("q", range(first, first + LEAF_TOKENS))
