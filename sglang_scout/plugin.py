"""Entry point `scout` of `sglang.srt.plugins`: SGLang calls `load` early in each of its processes.

What `load` does everywhere: make the policies' names legal, and check their config as soon as it is known. What it does
where trees are built (the scheduler): register the strategies and the tree core, and one hook on the choice of a core,
which runs once per cache. The hooks on hot paths come only with a tree core of ours (`scheduler.install`), so under any
other policy SGLang runs as if the plug-in were not there.

With SGLANG_SCOUT_DISABLE=1 the names stay legal and mean plain LRU on SGLang's default core.
"""

import logging
import sys
from typing import Any

from radix_policy.config import ConfigError
from sglang_scout import config, headers, preflight

logger = logging.getLogger(__name__)

SOURCE = "sglang-scout"
_ENGINE_MODULES = ("sglang.srt.managers.scheduler", "sglang.srt.mem_cache.unified_radix_cache")


def load(engine: bool | None = None) -> None:
    """Register everything that this process needs; calling it again changes nothing.

    `engine` None: a process that has imported the scheduler or the tree builds trees. The others are spared those
    imports: importing them in the HTTP process would import prometheus_client before SGLang sets it up.
    """
    from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES, add_radix_eviction_policy_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_radix_eviction_policy_choices([name for name in config.NAMES if name not in RADIX_EVICTION_POLICY_CHOICES])
    _once(HookRegistry, "sglang.srt.arg_groups.pipeline.run_resolution_pipeline", before_resolution, HookType.BEFORE)
    _once(HookRegistry, "sglang.srt.server_args.prepare_server_args", after_command_line, HookType.AFTER)
    if any(module in sys.modules for module in _ENGINE_MODULES) if engine is None else engine:
        load_engine()
    headers.register_hooks()


def load_engine() -> None:
    """The part of `load` for processes that build trees."""
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import get_tree_core_factory, register_tree_core_backend
    from sglang.srt.mem_cache.utils import _EVICTION_POLICY_FACTORIES as factories
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if config.disabled():
        from sglang.srt.mem_cache.evict_policy import LRUStrategy

        for name in config.NAMES:
            factories.setdefault(name, lambda **_: LRUStrategy())
        return
    from sglang_scout import tree
    from sglang_scout.strategy import STRATEGIES

    for name, strategy in STRATEGIES.items():
        factories.setdefault(name, strategy)
    if get_tree_core_factory(tree.BACKEND) is None:
        register_tree_core_backend(tree.BACKEND, tree.make_core)
    registry = "sglang.srt.mem_cache.unified_cache.tree_core_registry."
    _once(HookRegistry, registry + "select_tree_core_backend", tree.select, HookType.AFTER)


def _once(registry: Any, target: str, function: Any, kind: Any) -> None:
    """Register the hook unless it is; SGLang applies it when all plug-ins are loaded."""
    if all(known is not function for _, known, _ in registry._hooks.get(target, ())):
        registry.register(target, function, kind)


# ---- arguments ----


def refusal(args: Any) -> str | None:
    """Why the server must not start with these arguments, in one line; None when it may."""
    policy = getattr(args, "radix_eviction_policy", None)
    if not config.is_ours(policy) or config.disabled():
        return None
    try:
        config.check(policy, getattr(args, "radix_eviction_policy_config", None))
    except ConfigError as error:
        return str(error)
    odd = preflight.unsupported_flags(args)
    return None if odd is None else f"{config.FLAG} {policy} does not support {odd} yet"


def after_command_line(result: Any, argv: Any) -> None:
    """AFTER prepare_server_args: a command line that cannot work ends in one line, before any model is loaded."""
    why = refusal(result)
    if why is not None:
        print(f"{SOURCE}: error: {why}", file=sys.stderr, flush=True)
        raise SystemExit(2)


def before_resolution(server_args: Any) -> None:
    """BEFORE run_resolution_pipeline: the same for servers that code starts; and the kill switch."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    policy = getattr(server_args, "radix_eviction_policy", None)
    if not config.is_ours(policy):
        return
    if config.disabled():
        logger.warning("%s is set: %s %s means plain LRU on SGLang's default core", config.DISABLE, config.FLAG, policy)
        declare_resolution(server_args, SOURCE, radix_eviction_policy="lru", radix_eviction_policy_config=None)
        return
    why = refusal(server_args)
    if why is not None:
        raise ConfigError(f"{SOURCE}: {why}")
