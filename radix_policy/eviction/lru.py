"""LRU: SGLang's default. One class, in stamp order."""

from collections.abc import Hashable

from radix_policy.eviction.base import EvictionPolicy
from radix_policy.nodes import Node


class LruPolicy(EvictionPolicy):
    """Least recently accessed leaf first (SGLang `LRUStrategy`)."""

    name = "lru"

    def class_of(self, node: Node) -> Hashable | None:
        return 0
