"""Checked registration of hooks: SGLang itself only logs a traceback when a hook's target has gone."""

import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

logger = logging.getLogger(__name__)


def missing_parts(target: str, parameters: Iterable[str] = ()) -> str | None:
    """What keeps a hook on dotted path ``target`` from working, in words; None when all is there.

    ``parameters`` are the names that the target's signature must have, in the order in which the hook relies on them.
    """
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        return f"{target} is not there ({error})"
    try:
        names = list(inspect.signature(found).parameters)
    except (TypeError, ValueError) as error:
        return f"{target} has no readable signature ({error})"
    absent = [name for name in parameters if name not in names]
    return f"{target} no longer takes {', '.join(absent)}" if absent else None


def around(target: str, hook: Callable[..., Any], *, parameters: Iterable[str], purpose: str) -> bool:
    """Register ``hook`` AROUND ``target`` if the target is there with these parameters.

    Otherwise log one error that names the target and what will not work (``purpose``), and return False.
    """
    problem = missing_parts(target, parameters)
    if problem is not None:
        logger.error("sglang-scout CPU engine: %s; without it: %s", problem, purpose)
        return False
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType.AROUND)
    return True
