"""SGLang's Rust tree core with a mirror in front of it: its inserts and matches, our victims."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore

from sglang_scout.bridge import Bridge
from sglang_scout.mirrored import Mirrored


class RustScoutCore(Mirrored, RustUnifiedTreeCore):
    """`RustUnifiedTreeCore` with a Bridge on it. The core's own order, where it is left to it, is LRU."""

    def __init__(self, params: Any, components: Any, bridge: Bridge) -> None:
        """`components` are of the Python core; the Rust core brings its own."""
        super().__init__(replace(params, eviction_policy="lru", eviction_policy_config=None))
        self.begin_mirror(bridge)

    def path_to(self, node_id: int) -> Sequence[tuple[Any, ...]]:
        path: Sequence[tuple[Any, ...]] = self._binding.collect_path_info([node_id])[0]
        return path

    def tokens_of(self, node_id: int) -> int:
        (tokens,) = self._binding.get_node_key_lengths([node_id])
        return int(tokens)
