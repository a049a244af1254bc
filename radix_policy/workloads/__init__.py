"""Workloads: the frozen generator, recorded traces, and the contract that both meet."""

from radix_policy.workloads.base import Call, SessionScript, Workload, WorkloadError, make_call

__all__ = ["Call", "SessionScript", "Workload", "WorkloadError", "make_call"]
