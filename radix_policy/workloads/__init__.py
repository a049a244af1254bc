"""Workloads: the frozen generator, recorded traces, and the contract that both meet."""

from radix_policy.workloads.base import Call, SessionScript, Workload, WorkloadError, make_call
from radix_policy.workloads.catalogue import make
from radix_policy.workloads.materialise import materialise
from radix_policy.workloads.traces import read_trace

__all__ = ["Call", "SessionScript", "Workload", "WorkloadError", "make", "make_call", "materialise", "read_trace"]
