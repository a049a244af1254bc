"""What is true about a workload, measured on its calls."""

from collections.abc import Iterable
from typing import Any

from radix_policy.transitions import TransitionCounts
from radix_policy.workloads.base import SessionScript


def measure(sessions: Iterable[SessionScript]) -> dict[str, Any]:
    """Counts, token sums, R (CacheScout eq. 2, over tagged sessions) and shares.

    `anchor_share` is anchor tokens over prompt tokens; tokens of the calls whose anchor is unknown count as not anchor.
    """
    sessions = list(sessions)
    calls = [c for s in sessions for c in s.calls]
    tagged = [s for s in sessions if s.tagged]
    turns = tagged or sessions
    prompt = sum(c.prompt_tokens for c in calls)
    return {
        "sessions": len(sessions),
        "calls": len(calls),
        "agents": len({c.agent for c in calls if c.agent}),
        "R": predictability([c.agent for c in s.calls] for s in tagged),
        "prompt_tokens": prompt,
        "output_tokens": sum(c.output_tokens for c in calls),
        "mean_prompt": prompt / len(calls) if calls else 0.0,
        "mean_turns": sum(len(s.calls) for s in turns) / len(turns) if turns else 0.0,
        "anchor_share": sum(c.anchor_tokens for c in calls) / prompt if prompt else 0.0,
        "largest": max((c.prompt_tokens + c.output_tokens for c in calls), default=0),
    }


def predictability(paths: Iterable[Iterable[str]]) -> float:
    """R over the transitions inside each path of agents; 0 when nothing is uncertain or seen."""
    ids: dict[str, int] = {}
    counts = TransitionCounts()
    for path in paths:
        previous = -1
        for agent in path:
            current = ids.setdefault(agent, len(ids))
            if previous >= 0:
                counts.add(previous, current)
            previous = current
    return counts.predictability()
