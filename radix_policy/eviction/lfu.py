"""LFU: SGLang's `LFUStrategy`. Score: inserts that passed the node (`hit_count`); equal counts in LRU order."""

from collections.abc import Hashable

from radix_policy.eviction.base import EvictionPolicy
from radix_policy.nodes import Node


class LfuPolicy(EvictionPolicy):
    """Least often inserted-over leaf first."""

    name = "lfu"

    def score(self, node: Node) -> float:
        return float(node.counts)

    def class_of(self, node: Node) -> Hashable | None:
        return node.counts
