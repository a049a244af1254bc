"""SGLang's Python tree core, telling the Runtime everything that happens to it.

One thin override per place where `UnifiedTreeCore` (or its FULL component) changes structure, access stamps, locks or
residence; each runs SGLang's own code first and then tells. The mirror that comes of it is exact: same leaves, same
stamps, same lengths after every operation (tests/tree). What SGLang does is changed in one place, device eviction: the
index names the victims (`_hand_over`), and one that holds more than is needed is split first (`_trim`).

Only the FULL component is understood. What else a server may ask for and is not understood is refused at start, by the
name of the flag: see `unsupported` here and `preflight.unsupported_flags`.
"""

import logging
import sys
from collections.abc import Sequence
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import create_tree_core, resolve_tree_core_backend
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.utils import _EVICTION_POLICY_FACTORIES

from radix_policy.admission import AdmissionConfig
from radix_policy.warmup import WarmupConfig
from sglang_scout import config, hicache, preflight, scheduler, warmup_hooks, warmup_metrics
from sglang_scout.bridge import Bridge
from sglang_scout.curve import CurveConfig, OnlineCurve
from sglang_scout.mirrored import HOST_QUANTUM
from sglang_scout.strategy import STRATEGIES, Refused, building
from sglang_scout.warmup import Warmup

logger = logging.getLogger(__name__)

BACKEND = "scout"
_CORE_VARIABLE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
MENDS = 8  # times that the mirror is made anew from the tree after a fault, between two resets


class HostLeaves(set[Any]):
    """SGLang's set of the leaves of the host tier, telling the Bridge who comes and goes."""

    def __init__(self, bridge: Bridge) -> None:
        super().__init__()
        self.bridge = bridge
        bridge.host_reset()

    def add(self, node: Any) -> None:
        if node not in self:
            super().add(node)
            self.bridge.host_leaf(node.id)

    def discard(self, node: Any) -> None:
        if node in self:
            super().discard(node)
            self.bridge.host_leaf(node.id, False)


class ScoutTreeCore(UnifiedTreeCore):
    """`UnifiedTreeCore` with a Bridge on it."""

    evictable_device_leaves: set[Any]
    evictable_host_leaves: set[Any]

    def __init__(self, params: Any, components: Any, bridge: Bridge) -> None:
        self.scout = bridge
        self._mended = 0
        self._asked = 0  # tokens that the device eviction call in progress is to free
        self._trimming: float | None = None  # last access of the leaf whose tail is being cut off
        self._after_trim: list[Any] = []  # cache actions of a split that SGLang has not seen yet
        with building(bridge):
            super().__init__(params, components)

    def reset(self) -> None:
        super().reset()
        self._mended = 0
        self.scout.reset(self.root_node.id)
        self.evictable_host_leaves = HostLeaves(self.scout)

    def _mend(self) -> None:
        """After a fault: mirror the tree as it stands. Whose the nodes are is forgotten until they are used again."""
        self._mended += 1
        scout, table = self.scout, self.scout.runtime.world.nodes
        scout.reset(self.root_node.id)
        stack = [*self.root_node.children.values()]
        while stack:
            node = stack.pop()
            full = node.component_data[ComponentType.FULL]
            scout.added(node.id, node.parent.id, len(node.key), node.last_access_time, on_host=full.value is None)
            # a lock is on the whole path: those that no child has end here
            below = sum(child.component_data[ComponentType.FULL].lock_ref for child in node.children.values())
            for _ in range(full.lock_ref - below):
                scout.locked(node.id)
            if scout.live:
                table[node.id].counts = node.hit_count
            stack.extend(node.children.values())
        scout.host_reset()
        for node in self.evictable_host_leaves:
            scout.host_leaf(node.id)
        if scout.live:
            logger.warning("sglang-scout: the mirror of the tree was made anew, %d nodes", len(table) - 1)

    # ---- structure ----

    def _add_new_node(self, parent: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        node = super()._add_new_node(parent, key, *args, **kwargs)
        self.scout.added(node.id, parent.id, len(node.key), node.last_access_time)
        return node

    def insert_host(self, node_id: int, *args: Any, **kwargs: Any) -> Any:
        result = super().insert_host(node_id, *args, **kwargs)
        made = result.inserted_host_node
        if made is not None and made not in self.scout.runtime.world.nodes:
            node = self.node_by_id(made)
            self.scout.added(made, node.parent.id, len(node.key), node.last_access_time, on_host=True)
            if node in self.evictable_host_leaves:
                self.scout.host_leaf(made)
        return result

    def _split_node(self, key: Any, child: Any, split_len: int) -> Any:
        made = super()._split_node(key, child, split_len)
        prefix = made[0]
        if self._trimming is not None:
            prefix.last_access_time = child.last_access_time = self._trimming  # a trim is no access
        self.scout.split(prefix.id, child.id, split_len, prefix.last_access_time, child.last_access_time)
        if child in self.evictable_host_leaves:
            self.scout.host_leaf(child.id)
        return made

    def _unregister_node(self, node: Any) -> None:
        super()._unregister_node(node)
        self.scout.removed(node.id)

    # ---- access ----

    def match_prefix(self, params: Any) -> Any:
        result = super().match_prefix(params)
        if params.req is not None and result is self._empty_match_result:  # shorter than a page: nothing was walked
            self.scout.matched(params.req.rid, (), 0, 0)
        return result

    def _match_post_processor(self, params: Any, value: Any, best_match_node: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._match_post_processor(params, value, best_match_node, *args, **kwargs)
        node, root = best_match_node, self.root_node
        path = []
        while node is not root:
            path.append((node.id, node.last_access_time))
            node = node.parent
        self.scout.walked(path)
        if params.req is not None and self.scout.is_unmatched(params.req.rid):
            ids = [node_id for node_id, _ in reversed(path)]
            self.scout.matched(params.req.rid, ids, result.full_kv_hit_length, result.device_prefix_len)
        if best_match_node in self.evictable_host_leaves:
            self.scout.host_leaf(best_match_node.id)  # its stamp is another now, maybe its owner too
        return result

    def _touch_node(self, node: Any) -> None:
        super()._touch_node(node)
        if node is not self.root_node:
            self.scout.walked(((node.id, node.last_access_time),))
            if node in self.evictable_host_leaves:
                self.scout.host_leaf(node.id)

    def _inc_hit_count_and_check(self, node: Any) -> bool:
        before = node.hit_count
        backup = super()._inc_hit_count_and_check(node)
        if node.hit_count != before:
            self.scout.counted(node.id)
        return backup

    # ---- residence ----

    def _demote(self, node: Any, *args: Any, **kwargs: Any) -> None:
        super()._demote(node, *args, **kwargs)
        self.scout.demoted(node.id)

    def _unevict_node_on_insert(self, node: Any, *args: Any, **kwargs: Any) -> None:
        super()._unevict_node_on_insert(node, *args, **kwargs)
        self.scout.restored(node.id)

    def commit_load_back(self, node_id: int, device_indices: Any, kv_xfer: Any, comp_xfers: Any) -> Any:
        actions = super().commit_load_back(node_id, device_indices, kv_xfer, comp_xfers)
        self.scout.counters["load_backs"] += 1
        for loaded in kv_xfer.nodes_to_load or ():
            self.scout.restored(loaded)
        return actions

    # ---- locks ----

    def inc_lock_ref(self, node_id: int, skip_lock_components: Sequence[Any] = ()) -> Any:
        result = super().inc_lock_ref(node_id, skip_lock_components)
        if ComponentType.FULL not in skip_lock_components:
            self.scout.locked(node_id)
        return result

    def dec_lock_ref(self, node_id: int, params: Any, skip_swa: bool = False) -> Any:
        result = super().dec_lock_ref(node_id, params, skip_swa)
        if ComponentType.FULL not in params.skipped_lock_components:
            self.scout.unlocked(node_id)
        return result

    def inc_full_pin(self, node_id: int) -> None:
        super().inc_full_pin(node_id)
        self.scout.locked(node_id)

    def dec_full_pin(self, node_id: int) -> None:
        super().dec_full_pin(node_id)
        self.scout.unlocked(node_id)

    # ---- eviction ----

    def evict_device_start(self, component_type: Any, request_cnt: int) -> None:
        self._asked = request_cnt
        self._after_trim = []
        if not self.scout.live and self.scout.mendable and self._mended < MENDS:
            self._mend()
            if self._mended == MENDS:
                logger.warning("sglang-scout: that was the last time before the tree is reset")
        if not self.scout.begin_walk():
            self.scout.begin_call(self.evictable_device_leaves, "device_calls")
            super().evict_device_start(component_type, request_cnt)
            return
        # SGLang's walk would score every leaf. It begins on none, and is handed one victim at a time by the index.
        leaves, self.evictable_device_leaves = self.evictable_device_leaves, set()
        try:
            super().evict_device_start(component_type, request_cnt)
        finally:
            self.evictable_device_leaves = leaves

    def evict_device_next_node(self, component_type: Any, tracker: Any) -> Any:
        if self.scout.walking:
            self._hand_over(component_type)
        result = super().evict_device_next_node(component_type, tracker)
        if self._after_trim:
            result.cache_actions.extend(self._after_trim)
            self._after_trim = []
        return result

    def _hand_over(self, component_type: Any) -> None:
        """Put the index's next victim where SGLang's walk looks; where that fails, every leaf, as SGLang does."""
        walk = self.components_by_type[component_type]
        walk._evict_device_last_node = None  # or the walk would add its parent by itself
        walk._evict_device_heap = []
        victim = self.scout.victim()
        if victim is not None:
            node = self._known(victim)
            if node in self.evictable_device_leaves:
                self._trim(node)
                walk._evict_device_heap = [(0.0, node)]
                return
        if victim is not None or (self.scout.walking and self.evictable_device_leaves):
            self.scout.mistaken(victim)
        if not self.scout.walking:
            self.scout.begin_call(self.evictable_device_leaves, "rescued_calls")
            walk._evict_device_start(self._asked)

    def _known(self, node_id: int) -> Any:
        """The node, or None where SGLang knows none of that id."""
        try:
            return self.node_by_id(node_id)
        except KeyError:
            return None

    def _trim(self, leaf: Any) -> None:
        """Cut a victim that holds more than is needed: `leaf` stays the victim and keeps only what is to go.

        Its head becomes a node of its own, as old as the leaf was. A leaf that is being copied to or from the host is
        left whole.
        """
        if leaf.write_through_pending_id is not None or leaf.load_back_pending_id is not None:
            return
        drop = self.scout.cut(leaf.id, HOST_QUANTUM if leaf.backuped or self.is_write_back else 0)
        if drop is None:
            return
        self._trimming = leaf.last_access_time
        try:
            _, action = self._split_node(leaf.key, leaf, len(leaf.key) - drop)
        finally:
            self._trimming = None
        self.scout.counters["trims"] += 1
        if action is not None:
            self._after_trim.append(action)

    def evict_device_end(self, component_type: Any) -> None:
        super().evict_device_end(component_type)
        if self.scout.walking:
            self.scout.end_walk()
        else:
            self.scout.end_call()
        if self.scout.checks:
            self.scout.compare(self.differences)

    def drive_host_eviction(self, component_type: Any, num_tokens: int) -> Any:
        leaves, chosen = self.evictable_host_leaves, self.scout.host_victims(num_tokens)
        few = None if chosen is None else {self._known(victim) for victim in chosen}
        if few is None or not few <= leaves:
            self.scout.begin_call(leaves, "host_calls")
            try:
                return super().drive_host_eviction(component_type, num_tokens)
            finally:
                self.scout.end_call()
        # SGLang's walk would score every leaf. It is shown those that hold enough, and what becomes one on the way.
        self.scout.begin_call(few, "host_calls")
        self.evictable_host_leaves = shown = {*few}
        try:
            return super().drive_host_eviction(component_type, num_tokens)
        finally:
            self.evictable_host_leaves = leaves
            for node in few - shown:
                leaves.discard(node)
            for node in shown - few:
                leaves.add(node)
            self.scout.end_call()

    def differences(self) -> list[str]:
        """Where the mirror is not the tree, a line for each; a diagnosis, at O(nodes)."""
        table = self.scout.runtime.world.nodes
        stack, seen, found = [self.root_node], 0, []
        while stack:
            node = stack.pop()
            seen += 1
            stack.extend(node.children.values())
            record = table.get(node.id)
            if record is None:
                found.append(f"node {node.id} is not mirrored")
            elif node is not self.root_node:
                full = node.component_data[ComponentType.FULL]
                real = (node.parent.id, len(node.key), full.lock_ref, full.value is not None, node.last_access_time)
                ours = (record.parent and record.parent.id, record.length, record.locks, record.resident, record.stamp)
                if real != ours or node.hit_count != record.counts:
                    found.append(f"node {node.id}: tree {(*real, node.hit_count)}, mirror {(*ours, record.counts)}")
                if table.is_leaf(record) != (node in self.evictable_device_leaves):
                    found.append(f"node {node.id}: evictable in one of the two only")
        if len(table) != seen:
            found.append(f"{seen} nodes in the tree, {len(table)} in the mirror")
        return found


def _asked(params: Any) -> tuple[str | None, str]:
    """The core that was asked for, and by what; None: nobody asked."""
    if params.tree_core_backend is None and envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.is_set():
        return envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.get(), _CORE_VARIABLE
    return params.tree_core_backend, "CacheInitParams.tree_core_backend"


def select(result: str, params: Any) -> str | None:
    """AFTER hook on `select_tree_core_backend`: our core for our policies, SGLang's answer for everything else."""
    if not config.is_ours(params.eviction_policy) or params.disable:
        return None
    asked, by = _asked(params)
    if asked not in (None, "", "python", "rust", BACKEND):
        raise Refused(
            f"sglang-scout: {config.FLAG} {params.eviction_policy} runs on SGLang's Rust and Python tree cores; "
            f"remove {by}={asked}, or choose another policy"
        )
    return BACKEND


def unsupported(params: Any, components: Any) -> str | None:
    """What in the cache's parameters our tree core does not understand, in words; None when all is fine."""
    others = sorted(component.name for component in components if component is not ComponentType.FULL)
    if others:
        return f"models with tree components beside FULL ({', '.join(others)}: sliding window or Mamba state)"
    if params.component_registry_override:
        return "custom tree components"
    if params.is_eagle:
        return "--speculative-algorithm EAGLE and its kin (bigram keys)"
    if params.enable_session_radix_cache:
        return "--enable-session-radix-cache"
    if params.pp_size > 1:
        return "--pp-size > 1"
    return None


def make_core(params: Any, components: Any) -> Any:
    """Factory of the tree core backend `scout`. Refused when a seam is missing, ConfigError when the config is bad."""
    if not config.is_ours(params.eviction_policy):
        # A disabled cache asks for LRU under the backend that was selected; so does SGLANG_..._BACKEND=scout alone.
        return create_tree_core("rust", params, components)
    missing = preflight.problems()
    if missing:
        raise Refused(f"sglang-scout cannot run on SGLang {preflight.version()}: {'; '.join(missing)}")
    odd = unsupported(params, components)
    if odd is not None:
        raise Refused(f"sglang-scout: {config.FLAG} {params.eviction_policy} does not support {odd} yet")
    known = _EVICTION_POLICY_FACTORIES.get(params.eviction_policy.lower())
    if known is not STRATEGIES[params.eviction_policy.lower()]:
        raise Refused(
            f"sglang-scout: policy {params.eviction_policy!r} is {getattr(known, '__module__', '')}."
            f"{getattr(known, '__qualname__', known)}, another plug-in's, not sglang-scout's; remove one of the two"
        )
    given = (params.eviction_policy, params.eviction_policy_config)
    curve, warm = config.make_part(CurveConfig, *given), config.make_part(WarmupConfig, *given)
    bridge = Bridge(
        config.make_runtime(*given, params.page_size),
        config.make_part(AdmissionConfig, *given),
        OnlineCurve(curve, params.page_size) if curve.curve else None,
    )
    if warm.warmup:
        missing = warmup_hooks.problems(warmup_metrics.SEAMS) if preflight.SCHEDULER in sys.modules else []
        if missing:
            raise Refused(f"sglang-scout: no warmup on SGLang {preflight.version()}: {'; '.join(missing)}")
        Warmup(warm, bridge)
    # where Rust cannot be used SGLang logs why
    kind = "python" if _asked(params)[0] == "python" else resolve_tree_core_backend("rust", params)
    if kind == "rust":
        odd_seams = preflight.amiss(preflight.RUST_SEAMS)
        if odd_seams:
            kind = "python"
            logger.warning("sglang-scout: not on SGLang's Rust tree core: %s", "; ".join(odd_seams))
    core: Any
    if kind == "rust":
        from sglang_scout.rust_tree import RustScoutCore

        core = RustScoutCore(params, components, bridge)
    else:
        core = ScoutTreeCore(params, components, bridge)
    logger.info("sglang-scout: policy %s on SGLang's %s tree core", params.eviction_policy, kind.capitalize())
    unhooked = scheduler.install(
        scheduler.HOOKS + hicache.HOOKS + (warmup_hooks.HOOKS + warmup_metrics.HOOKS if warm.warmup else ())
    )
    if unhooked:
        raise Refused(f"sglang-scout: SGLang {preflight.version()} did not take the hook on {', '.join(unhooked)}")
    return core
