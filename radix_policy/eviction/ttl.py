"""Continuum's time to live (arXiv:2511.02230) as a rank: leaves of sessions that may soon be back go last.

A session is pinned while a call of it runs and for `ttl` seconds after (Continuum derives the time from tool
durations; here it is given). Score: 1 while pinned, else 0; within both, LRU order. Nothing is ever locked: a policy
scores, it does not pin. The hard pin is `ttl-pin`, in the simulator only.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from radix_policy.config import key
from radix_policy.eviction.base import EvictionPolicy
from radix_policy.nodes import Node


@dataclass(frozen=True)
class TtlConfig:
    """Key of ttl."""

    ttl: float = key(6.0, "seconds for which a session is expected back", low=0, high=86400, unit="s")


class TtlPolicy(EvictionPolicy):
    """Expired sessions first."""

    name = "ttl"
    Config = TtlConfig

    def score(self, node: Node) -> float:
        session = self.world.sessions.get(node.session)
        if session is None or session.ended:
            return 0.0
        pinned = session.running or self.world.clock.seconds < session.finished_at + self.config.ttl
        return 1.0 if pinned else 0.0

    def class_of(self, node: Node) -> Hashable | None:
        return node.session
