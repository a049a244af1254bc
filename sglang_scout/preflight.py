"""Every place of SGLang that the plug-in stands on, by name and signature, and what is not supported, by flag.

`problems()` is asked where SGLang constructs the policy: a missing seam refuses the start, by its name.
"""

import importlib.metadata
import inspect
import pkgutil
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from sglang_scout import hicache, scheduler

TESTED = ("0.5.23",)
SCHEDULER = "sglang.srt.managers.scheduler"


class Seam(NamedTuple):
    """One name of a module; `parameters` None: only its presence counts; `attributes`: names its code must mention."""

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    attributes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


class Finding(NamedTuple):
    """What a check of one seam found; `problem` None: as expected."""

    path: str
    problem: str | None


_S = "sglang.srt."
_REGISTRY = _S + "mem_cache.unified_cache.tree_core_registry"
_CORE = _S + "mem_cache.unified_cache.unified_tree_core"
_FULL = _S + "mem_cache.unified_cache.components.full"
_HOOKS = _S + "plugins.hook_registry"

# Needed in every process: the flag, and refusing early.
ARGUMENT_SEAMS = (
    Seam(_S + "arg_groups.choices", "add_radix_eviction_policy_choices"),
    Seam(_S + "arg_groups.choices", "RADIX_EVICTION_POLICY_CHOICES"),
    Seam(_S + "arg_groups.overrides", "declare_resolution", ("server_args", "source", "fields")),
    Seam(_S + "arg_groups.pipeline", "run_resolution_pipeline", ("server_args",)),
    Seam(_S + "server_args", "prepare_server_args", ("argv",)),
)

# Needed where a tree is built.
ENGINE_SEAMS = (
    Seam(_S + "mem_cache.evict_policy", "EvictionStrategy.get_priority", ("self", "node")),
    Seam(_S + "mem_cache.utils", "_EVICTION_POLICY_FACTORIES"),
    Seam(_S + "mem_cache.utils", "get_eviction_strategy", ("eviction_policy", "config")),
    Seam(_REGISTRY, "register_tree_core_backend", ("name", "factory")),
    Seam(_REGISTRY, "get_tree_core_factory", ("name",)),
    Seam(_REGISTRY, "select_tree_core_backend", ("params",)),
    Seam(_REGISTRY, "create_tree_core", ("name", "params", "components")),
    Seam(
        _CORE,
        "UnifiedTreeNode.__init__",
        ("self", "tree_components", "priority"),
        (
            "id",
            "parent",
            "key",
            "last_access_time",
            "hit_count",
            "write_through_pending_id",
            "load_back_pending_id",
        ),
    ),
    Seam(_CORE, "UnifiedTreeCore.__init__", ("self", "params", "components"), ("eviction_strategy",)),
    Seam(
        _CORE,
        "UnifiedTreeCore.reset",
        ("self",),
        ("root_node", "evictable_device_leaves", "evictable_host_leaves", "_empty_match_result"),
    ),
    Seam(
        _CORE,
        "UnifiedTreeCore._add_new_node",
        ("self", "parent", "key", "value", "priority", "session_id", "rotation_base"),
    ),
    Seam(_CORE, "UnifiedTreeCore.insert_host", ("self", "node_id", "key", "host_value", "hash_value")),
    Seam(_CORE, "UnifiedTreeCore._split_node", ("self", "key", "child", "split_len")),
    Seam(_CORE, "UnifiedTreeCore._unregister_node", ("self", "node")),
    Seam(_CORE, "UnifiedTreeCore.match_prefix", ("self", "params")),
    Seam(
        _CORE,
        "UnifiedTreeCore._match_post_processor",
        (
            "self",
            "params",
            "value",
            "best_match_node",
            "best_match_device_node",
            "best_match_device_value_len",
            "full_kv_hit_length",
            "action",
            "last_visited_node_id",
            "device_validators",
        ),
    ),
    Seam(_CORE, "UnifiedTreeCore._touch_node", ("self", "node")),
    Seam(_CORE, "UnifiedTreeCore._inc_hit_count_and_check", ("self", "node")),
    Seam(
        _CORE,
        "UnifiedTreeCore._demote",
        ("self", "node", "tracker", "device_frees", "host_frees", "cache_actions"),
    ),
    Seam(_CORE, "UnifiedTreeCore._unevict_node_on_insert", ("self", "node", "fresh_value", "session_id")),
    Seam(
        _CORE,
        "UnifiedTreeCore.commit_load_back",
        ("self", "node_id", "device_indices", "kv_xfer", "comp_xfers"),
    ),
    Seam(_CORE, "UnifiedTreeCore.inc_lock_ref", ("self", "node_id", "skip_lock_components")),
    Seam(_CORE, "UnifiedTreeCore.dec_lock_ref", ("self", "node_id", "params", "skip_swa")),
    Seam(_CORE, "UnifiedTreeCore.inc_full_pin", ("self", "node_id")),
    Seam(_CORE, "UnifiedTreeCore.dec_full_pin", ("self", "node_id")),
    Seam(_CORE, "UnifiedTreeCore.evict_device_start", ("self", "component_type", "request_cnt")),
    Seam(_CORE, "UnifiedTreeCore.evict_device_next_node", ("self", "component_type", "tracker")),
    Seam(_CORE, "UnifiedTreeCore.evict_device_end", ("self", "component_type")),
    Seam(
        _FULL,
        "FullComponent._evict_device_start",
        ("self", "request_cnt"),
        ("_evict_device_heap", "_evict_device_last_node", "evictable_device_leaves"),
    ),
    Seam(
        _FULL,
        "FullComponent._evict_device_next_node",
        ("self", "tracker", "device_frees", "host_frees", "cache_actions"),
        ("_evict_device_heap", "_evict_device_last_node", "evictable_device_leaves"),
    ),
    Seam(_CORE, "UnifiedTreeCore.drive_host_eviction", ("self", "component_type", "num_tokens")),
    Seam(_CORE, "UnifiedTreeCore.node_by_id", ("self", "node_id")),
    Seam(
        _S + "mem_cache.unified_radix_cache", "UnifiedRadixCache._component_available_size", ("self", "component_type")
    ),
    Seam(
        _S + "managers.schedule_batch",
        "Req.__init__",
        None,
        (
            "rid",
            "origin_input_ids",
            "tokenizer",
            "output_ids",
            "sampling_params",
            "session_id",
            "extra_key",
            "cache_salt",
            "lora_id",
            "priority",
            "is_retracted",
            "to_finish",
            "finished_reason",
            "finished_len",
        ),
    ),
    Seam(_S + "managers.schedule_batch", "BaseFinishReason.to_json", ("self",)),
    Seam(_S + "constants", "HEALTH_CHECK_RID_PREFIX"),
    Seam(_S + "managers.schedule_policy", "touch_waiting_prefix", ("req", "tree_cache")),
    Seam(_S + "managers.schedule_policy", "WAITING_PREFIX_REFRESH_INTERVAL"),
    Seam(_S + "managers.schedule_policy", "WAITING_QUEUE_PREFIX_MATCH_MAX"),
    Seam(_S + "managers.schedule_policy", "CacheAwarePolicy"),
    Seam(_HOOKS, "HookRegistry.register", ("target", "hook", "hook_type", "source")),
    Seam(_HOOKS, "HookRegistry.apply_hooks", ()),
    Seam(_HOOKS, "HookRegistry._apply_target", ("target", "hooks")),
    Seam(_HOOKS, "HookRegistry._patched"),
    *(Seam(hook.module, hook.name, hook.parameters) for hook in scheduler.HOOKS + hicache.HOOKS),
)

SEAMS = ARGUMENT_SEAMS + ENGINE_SEAMS

# Needed above the Rust tree core; where one is missing, the Python core is used.
_ADAPTER = _S + "mem_cache.rust_tree_core.adapter"
_SHAPES: dict[str, tuple[str, ...]] = {
    "reset": (),
    "match_prefix": ("params",),
    "begin_insert": ("params",),
    "resume_insert": (),
    "has_ongoing_insert": (),
    "collect_path_info": ("end_node_ids",),
    "inc_lock_ref": ("node_id", "skip_lock_components"),
    "dec_lock_ref": ("node_id", "params", "skip_swa"),
    "inc_full_pin": ("node_id",),
    "dec_full_pin": ("node_id",),
    "full_evictable_size": (),
    "full_protected_size": (),
    "evict_device_start": ("component_type", "request_cnt"),
    "evict_device_next_node": ("component_type", "tracker"),
    "evict_device_leaf": ("node_id", "is_write_back"),
    "evict_device_end": ("component_type",),
    "demote": ("node_id",),
    "drop_subtree_no_host": ("node_id",),
    "insert_host": ("node_id", "key", "host_value", "hash_value"),
    "is_backuped": ("node_id",),
    "is_full_device_evicted": ("node_id",),
    "match_full_device_prefix": ("key",),
    "build_load_back_spec": ("node_id", "req"),
    "build_storage_backup_spec": ("node_id", "pass_prefix_keys"),
    "commit_load_back": ("node_id", "device_indices", "kv_xfer", "comp_xfers"),
    "prefetch_anchor_info": ("node_id",),
}
RUST_SEAMS = (
    *(Seam(_ADAPTER, f"RustUnifiedTreeCore.{name}", ("self", *rest)) for name, rest in _SHAPES.items()),
    Seam(_ADAPTER, "RustUnifiedTreeCore.empty_match_result"),
    Seam(_ADAPTER, "bindings.RustUnifiedTreeCoreBinding.collect_path_info"),
    Seam(_ADAPTER, "bindings.RustUnifiedTreeCoreBinding.get_node_key_lengths"),
    Seam(_REGISTRY, "resolve_tree_core_backend", ("name", "params")),
)


def version() -> str:
    """The version of SGLang that is installed."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def inspect_seam(seam: Seam) -> Finding:
    """Look at one seam as it is in this process."""
    try:
        found = pkgutil.resolve_name(seam.path)
    except Exception as error:
        return Finding(seam.path, f"missing ({type(error).__name__}: {error})")
    if seam.parameters is not None:
        try:
            names = tuple(inspect.signature(found).parameters)
        except (TypeError, ValueError) as error:
            return Finding(seam.path, f"has no readable signature ({error})")
        if names != seam.parameters:
            return Finding(seam.path, f"takes ({', '.join(names)}), expected ({', '.join(seam.parameters)})")
    if seam.attributes:
        known = inspect.unwrap(found).__code__.co_names
        absent = [name for name in seam.attributes if name not in known]
        if absent:
            return Finding(seam.path, f"no longer sets {', '.join(absent)}")
    return Finding(seam.path, None)


def check(seams: Iterable[Seam] = SEAMS) -> list[Finding]:
    """Look at every seam."""
    return [inspect_seam(seam) for seam in seams]


def amiss(seams: Iterable[Seam]) -> list[str]:
    """Those of the seams that are not as expected, one text each."""
    return [f"{finding.path} {finding.problem}" for finding in check(seams) if finding.problem is not None]


def problems() -> list[str]:
    """The seams that are not as expected, one text each.

    In a process without a scheduler (a tree in a test, say) only the modules that it has imported are looked at.
    """
    everything = SCHEDULER in sys.modules
    return amiss(seam for seam in SEAMS if everything or seam.module in sys.modules)


def unsupported_flags(args: Any) -> str | None:
    """What the server was asked for that our policies do not understand yet, by flag; None when all is fine.

    `args` is SGLang's record of arguments, raw or resolved; what only the model decides is refused by the tree core.
    """
    algorithm = str(getattr(args, "speculative_algorithm", None) or "").upper()
    if getattr(args, "disaggregation_mode", "null") not in (None, "null"):
        return f"--disaggregation-mode {args.disaggregation_mode}"
    if getattr(args, "pp_size", 1) > 1:
        return f"--pp-size {args.pp_size}"
    if (getattr(args, "attn_dp_size", None) or 1) > 1:  # no CPU runs it, so that its ranks' agreement is not proven
        return f"--attn-dp-size {args.attn_dp_size}"
    if algorithm.startswith(("EAGLE", "NEXTN", "FROZEN_KV_MTP")):
        return f"--speculative-algorithm {algorithm}"
    for name in (
        "enable_session_radix_cache",
        "enable_dp_attention",  # the older name of the same
        "enable_lmcache",
        "enable_flexkv",
        "enable_unified_cache_external_linker",
    ):
        if getattr(args, name, False):
            return "--" + name.replace("_", "-")
    if getattr(args, "radix_cache_backend", None):
        return f"--radix-cache-backend {args.radix_cache_backend}"
    if getattr(args, "hicache_host_memory_mode", "cache") not in (None, "cache"):
        return f"--hicache-host-memory-mode {args.hicache_host_memory_mode}"
    return None
