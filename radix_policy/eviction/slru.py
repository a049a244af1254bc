"""Segmented LRU: SGLang's `SLRUStrategy`. Score: 1 for a protected leaf, 0 on probation; each segment in LRU order."""

from collections.abc import Hashable
from dataclasses import dataclass

from radix_policy.config import key
from radix_policy.eviction.base import EvictionPolicy
from radix_policy.nodes import Node


@dataclass(frozen=True)
class SlruConfig:
    """SGLang's key by SGLang's name."""

    protected_threshold: int = key(2, "inserts that must pass a node before it is protected", low=1, unit="inserts")


class SlruPolicy(EvictionPolicy):
    """Leaves that fewer than `protected_threshold` inserts passed go first."""

    name = "slru"
    Config = SlruConfig

    def score(self, node: Node) -> float:
        return 1.0 if node.counts >= self.config.protected_threshold else 0.0

    def class_of(self, node: Node) -> Hashable | None:
        return node.counts >= self.config.protected_threshold
