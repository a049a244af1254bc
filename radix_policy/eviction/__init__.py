"""Eviction policies, one small file each, behind the interface in `base`."""

from radix_policy.eviction.base import EvictionPolicy, NoConfig
from radix_policy.eviction.cachescout import CacheScoutPolicy
from radix_policy.eviction.fifo import FifoPolicy
from radix_policy.eviction.gdsf import GdsfPolicy
from radix_policy.eviction.kvflow import KvflowPolicy
from radix_policy.eviction.lfu import LfuPolicy
from radix_policy.eviction.lhd import LhdPolicy
from radix_policy.eviction.lru import LruPolicy
from radix_policy.eviction.priority import PriorityPolicy
from radix_policy.eviction.s3fifo import S3FifoPolicy
from radix_policy.eviction.scout import ScoutPolicy
from radix_policy.eviction.slru import SlruPolicy
from radix_policy.eviction.tlru import TlruPolicy
from radix_policy.eviction.ttl import TtlPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {
    p.name: p
    for p in (
        LruPolicy,
        LfuPolicy,
        SlruPolicy,
        FifoPolicy,
        PriorityPolicy,
        TlruPolicy,
        LhdPolicy,
        S3FifoPolicy,
        GdsfPolicy,
        TtlPolicy,
        KvflowPolicy,
        CacheScoutPolicy,
        ScoutPolicy,
    )
}

__all__ = ["POLICIES", "CacheScoutPolicy", "EvictionPolicy", "LruPolicy", "NoConfig", "ScoutPolicy"]
