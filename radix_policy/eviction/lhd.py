"""LHD (Beckmann et al., NSDI 2018): expected hits per token and access, learned by age and class.

    density(class, age) = P(hit before eviction | age) / E[remaining lifetime | age]

Age counts requests since the node was last used, in buckets of a quarter of an octave. A class is what is known of a
node without knowing who calls: output or prompt, and how often it was hit (0, 1, 2 or more). Hits and evictions are
counted per class and age, halved every `window` requests, and turned into densities. The paper divides by size; here a
hit on a node saves as many tokens as the node frees, so the size cancels. Unit: hits per request.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radix_policy.config import key
from radix_policy.eviction.base import EvictionPolicy
from radix_policy.nodes import Node

if TYPE_CHECKING:
    from radix_policy.runtime import Request, World

_BUCKETS = 80  # quarter octaves: ages up to 2^20 requests
_CLASSES = 6


def _bucket(age: int) -> int:
    return min(_BUCKETS - 1, int(4 * math.log2(age + 1)))


_WIDTH = [2 ** ((b + 1) / 4) - 2 ** (b / 4) for b in range(_BUCKETS)]  # requests per bucket


@dataclass(frozen=True)
class LhdConfig:
    """Key of lhd."""

    window: int = key(
        256, "requests between two refits; older evidence counts half", low=8, high=1000000, unit="requests"
    )


class LhdPolicy(EvictionPolicy):
    """Lowest hit density first. `node.state`: request number of the last use."""

    name = "lhd"
    Config = LhdConfig

    def __init__(self, world: "World", config: Any = None) -> None:
        super().__init__(world, config)
        self._now = 0
        self._hits = [[0.0] * _BUCKETS for _ in range(_CLASSES)]
        self._lost = [[0.0] * _BUCKETS for _ in range(_CLASSES)]
        # until there is evidence: the younger the better
        self._density = [[1.0 / 2 ** (b / 4) for b in range(_BUCKETS)] for _ in range(_CLASSES)]

    def on_match(self, request: "Request", path: Sequence[Node]) -> None:
        self._now += 1
        for node in path:
            self._hits[_kind(node)][_bucket(self._now - node.state)] += 1.0
            node.state = self._now
        if self._now % self.config.window == 0:
            self._refit()

    def on_insert(self, node: Node, request: "Request | None") -> None:
        node.state = self._now

    def on_evict(self, node: Node) -> None:
        self._lost[_kind(node)][_bucket(self._now - node.state)] += 1.0

    def score(self, node: Node) -> float:
        return self._density[_kind(node)][_bucket(self._now - node.state)]

    def _refit(self) -> None:
        for kind in range(_CLASSES):
            hits, lost = self._hits[kind], self._lost[kind]
            if sum(hits) + sum(lost) < 1.0:
                continue
            total_hits = total = life = 0.0
            for bucket in reversed(range(_BUCKETS)):
                total_hits += hits[bucket]
                total += hits[bucket] + lost[bucket]
                life += total * _WIDTH[bucket]
                self._density[kind][bucket] = total_hits / life if life > 0 else 0.0
                hits[bucket] *= 0.5
                lost[bucket] *= 0.5


def _kind(node: Node) -> int:
    return 3 * node.output + min(node.hits, 2)
