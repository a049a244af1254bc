"""Admission to HiCache's host tier (radix_policy/admission.py), at SGLang's own refusal path.

Under write-through SGLang writes every node that a request inserts to the host. `_execute_kv_backup` answers None where
the host has no room: SGLang then ends that chain of copies, takes no lock, and asks again when a later request inserts
over the same nodes. That is the answer here for what a declined request inserts, so a refusal is prefix-closed, touches
nothing, and is never final.

A warmup is a guess, and nobody's request: what it computes is not written, but by the request that comes for it.

Decided when the request's prompt is first looked up. Nothing is declined under write-back (which writes only what the
device loses), nor while a storage backend is attached (what does not get to the host would never get there), nor after
a fault of ours.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from radix_policy.admission import Admission, AdmissionConfig, Tier
from radix_policy.nodes import Node
from sglang_scout.bridge import Bridge
from sglang_scout.scheduler import Hook, bridge_of

logger = logging.getLogger(__name__)


class HostAdmission:
    """Who may write to the host tier of one cache. Called by the Bridge and by the hooks below; never raises."""

    def __init__(self, bridge: Bridge, cache: Any, config: AdmissionConfig) -> None:
        self.bridge = bridge
        self.cache = cache
        self.admission = Admission(bridge.runtime.world, config, bridge.runtime.world.page_size)
        self.declined: set[str] = set()  # requests in flight that may not write
        self.evicted = 0  # tokens that the host tier has lost
        self.refused = 0  # tokens that were not written
        self.broken = False
        self.always = config.admission == "none"  # everything is written

    @property
    def idle(self) -> bool:
        """Whether nothing may be declined now."""
        return self.broken or not self.bridge.live or bool(self.cache.is_write_back) or bool(self.cache.enable_storage)

    def tier(self) -> Tier:
        """The host tier as it stands."""
        pool = self.cache.cache_controller.mem_pool_host
        return Tier(pool.size, pool.size - pool.available_size(), self.evicted)

    def looked_up(self, rid: str, path: Sequence[int], tokens: int) -> None:
        """The request's prompt was looked up for the first time: `tokens` of it found, on the nodes of `path`."""
        if self.broken:
            return
        try:
            request = self.bridge.runtime.requests.get(rid)
            if request is None:
                return
            held = self._host_prefix(path, tokens)
            if not self.admission.admits(request, request.prompt_tokens, held, self.tier(), not self.idle):
                self.declined.add(rid)
        except Exception:
            self._break()

    def left(self, rid: str) -> None:
        """The request left the engine."""
        self.declined.discard(rid)

    def refuses(self, tokens: int) -> bool:
        """Whether so many tokens that are being inserted may not be written."""
        try:
            rid = self.bridge.inserting
            if rid not in self.declined and (self.always or rid not in self.bridge.own):
                return False
            if self.idle:
                return False
        except Exception:
            self._break()
            return False
        self.refused += tokens
        return True

    def snapshot(self) -> dict[str, Any]:
        """Counters, sizes in tokens; JSON-ready."""
        try:
            tier = self.tier()
        except Exception:
            self.bridge.count_fault("snapshot")
            tier = Tier(0, 0, self.evicted)
        return {
            **self.admission.snapshot(),
            "active": self.admission.config.admission != "none" and not self.idle,
            "capacity_tokens": tier.capacity,
            "used_tokens": tier.used,
            "evicted_tokens": tier.evicted,
            "refused_tokens": self.refused,
        }

    def _host_prefix(self, path: Sequence[int], tokens: int) -> int:
        """h: tokens of the longest prefix whose nodes all have a host copy; those below such a node have none."""
        nodes = self.bridge.runtime.world.nodes
        if not path or tokens > _end(nodes[path[-1]]):
            return tokens  # it ends on the host only, below what the mirror of the Rust core knows
        core = self.cache.tree_core
        return next((_end(nodes[node]) for node in reversed(path) if core.is_backuped(node)), 0)

    def _break(self) -> None:
        """Call inside `except`."""
        self.bridge.count_fault("admission")
        self.broken = True
        self.declined.clear()


def _end(node: Node) -> int:
    return node.start + node.length


# ---- hooks ----


def on_hicache(result: Any, cache: Any, server_args: Any, params: Any) -> None:
    """AFTER UnifiedRadixCache.init_hicache: the cache has a host tier now."""
    bridge = bridge_of(cache)
    if bridge is None or bridge.admission is None or cache.cache_controller is None:
        return
    try:
        host = HostAdmission(bridge, cache, bridge.admission)
        tier, mode = host.tier(), bridge.admission.admission
        bridge.host = host
    except Exception:
        bridge.count_fault("admission")
        return
    why = " (not under write-back)" if cache.is_write_back else ""
    logger.info("sglang-scout: host tier of %d tokens, admission %s%s", tier.capacity, mode, why)


def around_backup(
    original: Callable[..., Any], cache: Any, node_id: int, device_value: Any, comp_xfers: Any, sidecar_xfers: Any
) -> Any:
    """AROUND UnifiedRadixCache._execute_kv_backup: None where the inserting request may not write."""
    bridge = bridge_of(cache)
    if bridge is not None and bridge.host is not None and bridge.host.refuses(len(device_value)):
        return None
    return original(cache, node_id, device_value, comp_xfers, sidecar_xfers)


def on_host_evicted(result: Any, cache: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
    """AFTER UnifiedRadixCache.evict_host: `result` tokens were lost."""
    bridge = bridge_of(cache)
    if bridge is not None and bridge.host is not None:
        bridge.host.evicted += result


_CACHE = "sglang.srt.mem_cache.unified_radix_cache"

HOOKS = (
    Hook(_CACHE, "UnifiedRadixCache.init_hicache", "after", on_hicache, ("self", "server_args", "params")),
    Hook(
        _CACHE,
        "UnifiedRadixCache._execute_kv_backup",
        "around",
        around_backup,
        ("self", "node_id", "device_value", "comp_xfers", "sidecar_xfers"),
    ),
    Hook(_CACHE, "UnifiedRadixCache.evict_host", "after", on_host_evicted, ("self", "num_tokens", "component_type")),
)
