"""The simulator: SGLang's radix tree and memory in a closed loop of agents, driving the same runtime as the plugin."""

from radix_policy.simulator.engine import CHUNK, Engine, OutOfMemory, Run
from radix_policy.simulator.loop import IDENTITIES, SERVICES, Loop, Outcome, call_numbers
from radix_policy.simulator.run import Spec, Study, known_policies, parse_spec, simulate
from radix_policy.simulator.tree import SimTree, spans_of

__all__ = [
    "CHUNK",
    "IDENTITIES",
    "SERVICES",
    "Engine",
    "Loop",
    "OutOfMemory",
    "Outcome",
    "Run",
    "SimTree",
    "Spec",
    "Study",
    "call_numbers",
    "known_policies",
    "parse_spec",
    "simulate",
    "spans_of",
]
