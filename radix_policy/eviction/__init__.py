"""Eviction policies, one small file each, behind the interface in `base`."""

from radix_policy.eviction.base import EvictionPolicy, NoConfig
from radix_policy.eviction.cachescout import CacheScoutPolicy
from radix_policy.eviction.lru import LruPolicy
from radix_policy.eviction.scout import ScoutPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {p.name: p for p in (LruPolicy, CacheScoutPolicy, ScoutPolicy)}

__all__ = ["POLICIES", "CacheScoutPolicy", "EvictionPolicy", "LruPolicy", "NoConfig", "ScoutPolicy"]
