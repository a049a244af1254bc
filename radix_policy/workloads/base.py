"""The contract of a workload: sessions, each a fixed script of calls that a closed loop plays.

A slot (one of `concurrency`) takes the next session, waits `start_gap` seconds, then plays its calls in order: the
next call starts `gap` seconds after the previous one finished. Sessions of another lane (background traffic) have
slots of their own. Prompts and outputs are spans (radix_policy.prompts): an output's spans stand again in the later
prompts that contain it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radix_policy.prompts import Spans, span_tokens


@dataclass(frozen=True, slots=True)
class Call:
    """One model call."""

    agent: str
    prompt: Spans
    output: Spans  # the tokens that the model writes; at least one
    gap: float  # seconds of think and tool time before the call (for a session's first call: start_gap)
    prompt_tokens: int
    output_tokens: int
    anchor_tokens: int = 0  # tokens at the start of the prompt that belong to the agent's fixed anchor; 0 unknown


@dataclass(frozen=True, slots=True)
class SessionScript:
    """One session, in order. Nothing in it says that the last call is the last."""

    key: str
    calls: tuple[Call, ...]
    tagged: bool = True  # whether a client that tags would tag it (anonymous traffic would not)
    lane: int = 0  # each lane that occurs has `concurrency` slots of its own; a loop may also play all in one lane


@dataclass(frozen=True)
class Workload:
    """Sessions in the order in which slots take them, and what is true about them."""

    name: str
    sessions: tuple[SessionScript, ...]
    agents: tuple[str, ...] = ()
    seed: int | None = None
    transitions: Sequence[Sequence[float]] | None = None  # the generator's true rows, in the order of `agents`
    end_probability: Any = None  # the generator's true END law, for `informed`; None when it has none
    facts: Mapping[str, Any] = field(default_factory=dict)  # measured: R, prompt tokens, mean turns, source

    @property
    def largest(self) -> int:
        """F: prompt plus output tokens of the largest single request."""
        return max((c.prompt_tokens + c.output_tokens for s in self.sessions for c in s.calls), default=0)

    @property
    def lanes(self) -> tuple[tuple[SessionScript, ...], ...]:
        """The sessions of each lane, in order; one lane unless there is background traffic."""
        lanes = sorted({s.lane for s in self.sessions})
        return tuple(tuple(s for s in self.sessions if s.lane == lane) for lane in lanes)

    @property
    def requests(self) -> int:
        """Number of calls."""
        return sum(len(s.calls) for s in self.sessions)


class WorkloadError(ValueError):
    """A workload or trace cannot be used; one line that names the file and the line where that applies."""


def make_call(agent: str, prompt: Spans, output: Spans, gap: float, anchor_tokens: int = 0) -> Call:
    """A Call with its lengths counted; WorkloadError on an empty prompt or output."""
    prompt_tokens, output_tokens = span_tokens(prompt), span_tokens(output)
    if prompt_tokens < 1 or output_tokens < 1:
        raise WorkloadError(f"call of {agent!r}: prompt and output must hold at least one token")
    return Call(agent, prompt, output, gap, prompt_tokens, output_tokens, anchor_tokens)
