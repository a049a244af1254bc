"""The SGLang-facing strategies: `get_priority(node)` is (score, last access, node id), smallest goes first.

SGLang only logs what a plug-in raises, but it does not start without an eviction strategy: so this constructor is where
a start is refused. It works only while our own tree core is being built (`building`): any other core or cache would
never ask Python for a priority, or never tell us what happens, and the server would silently run something else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

from sglang.srt.mem_cache.evict_policy import EvictionStrategy

from sglang_scout import preflight
from sglang_scout.bridge import Bridge, Priority

_building: ContextVar[Bridge | None] = ContextVar("_building", default=None)


class Refused(ValueError):
    """SGLang must not start with our policy here; the message is one line that says why and what to do."""


@contextmanager
def building(bridge: Bridge) -> Iterator[None]:
    """While it lasts, strategies that SGLang constructs belong to `bridge`."""
    token = _building.set(bridge)
    try:
        yield
    finally:
        _building.reset(token)


class ScoutStrategy(EvictionStrategy):
    """`--radix-eviction-policy scout`."""

    policy: ClassVar[str] = "scout"

    def __init__(self, **config: Any) -> None:
        """`config` was checked when the bridge was made; Refused outside our tree core."""
        bridge = _building.get()
        if bridge is None:
            missing = preflight.problems()
            why = "; ".join(missing) if missing else "another cache or tree core is being built than the plug-in's"
            raise Refused(f"sglang-scout: policy {self.policy!r} cannot run on SGLang {preflight.version()}: {why}")
        self.bridge = bridge

    def get_priority(self, node: Any) -> Priority:
        return self.bridge.priority(node)


class CacheScoutStrategy(ScoutStrategy):
    """`--radix-eviction-policy cachescout`."""

    policy = "cachescout"


STRATEGIES: dict[str, type[ScoutStrategy]] = {s.policy: s for s in (ScoutStrategy, CacheScoutStrategy)}
