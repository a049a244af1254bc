"""Six-agent chats shaped like the papers' task sources.

The same agents and the same two likely successors everywhere; what differs is which of the two leads. Between two
profiles the edges where the leader changes differ by 27 to 47 points, so that a matrix learned on one predicts the
wrong agent on another.
"""

from radix_policy.workloads import topologies as topo
from radix_policy.workloads.generator import Group, Scale

# P(first preference) of planner, researcher, coder, reviewer, tester, judge; the second takes 0.93 less that.
_GSM8K = (0.80, 0.72, 0.80, 0.72, 0.80, 0.72)
_MTBENCH = (0.33, 0.45, 0.33, 0.72, 0.80, 0.72)
_GAIA = (0.80, 0.72, 0.80, 0.45, 0.33, 0.45)
_SWEBENCH = (0.33, 0.45, 0.33, 0.45, 0.33, 0.45)


def gsm8k() -> Group:
    """Short: a mathematical exchange of 6-10 turns, rarely a tool."""
    return Group("gsm8k", topo.preferring(_GSM8K), end=topo.uniform_turns(6, 10), tool_probability=0.1, tool_mean=1.0)


def mtbench() -> Group:
    """Two phases: after 5-8 turns the user asks a second question and the planner starts again (the rows hold inside a
    phase); 12-18 turns."""
    end = topo.uniform_turns(12, 18)
    return Group("mtbench", topo.preferring(_MTBENCH), end=end, tool_probability=0.05, tool_mean=1.0, follow_up=(5, 8))


def gaia() -> Group:
    """Tool-heavy: a tool before 7 calls in 10, 4 s on average, its result (160 tokens) in the conversation."""
    end = topo.uniform_turns(14, 26)
    return Group("gaia", topo.preferring(_GAIA), end=end, tool_probability=0.7, tool_mean=4.0, tool_tokens=160)


def swebench() -> Group:
    """Long: 30-56 turns, a long task, long messages and tool results."""
    scale = Scale("plain", task=300, message=100)
    end = topo.uniform_turns(30, 56)
    return Group(
        "swebench",
        topo.preferring(_SWEBENCH),
        scale=scale,
        end=end,
        tool_probability=0.5,
        tool_mean=3.0,
        tool_tokens=150,
    )
