"""Tail-optimised LRU: SGLang's `TLRUStrategy` (Zhang et al., arXiv:2510.15152).

A branch that once was L tokens deep, whose next prompt adds about `next_prompt_estimate` tokens, needs only
L + next_prompt_estimate - threshold tokens cached to prefill the rest within its latency target. A node that begins
past that budget is safe to lose (score -1) and goes before all others (score 0); within both, LRU order.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radix_policy.config import key
from radix_policy.eviction.base import EvictionPolicy
from radix_policy.nodes import Node

if TYPE_CHECKING:
    from radix_policy.runtime import Request


@dataclass(frozen=True)
class TlruConfig:
    """SGLang's keys by SGLang's names."""

    threshold: int = key(0, "tokens that may be prefilled within the latency target", low=0, unit="tokens")
    next_prompt_estimate: int = key(0, "tokens that a conversation's next prompt adds", low=0, unit="tokens")


class TlruPolicy(EvictionPolicy):
    """Tokens past a conversation's budget first. `node.state`: how deep its branch ever was, in tokens."""

    name = "tlru"
    Config = TlruConfig

    def on_insert(self, node: Node, request: "Request | None") -> None:
        depth = node.state = node.start + node.length
        above = node.parent
        while above is not None and above.parent is not None and above.state < depth:
            above.state = depth
            above = above.parent

    def score(self, node: Node) -> float:
        return -1.0 if self.class_of(node) else 0.0

    def class_of(self, node: Node) -> Hashable | None:
        if node.state is None:  # filed before `on_insert`
            return False
        budget = max(node.state + self.config.next_prompt_estimate - self.config.threshold, 0)
        return node.start >= budget
