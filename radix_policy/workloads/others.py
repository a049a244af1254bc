"""Workloads that are no group chat: a long-context coding agent, and anonymous one-shot prompts."""

from collections.abc import Sequence

from radix_policy.prompts import Span
from radix_policy.workloads.base import Call, SessionScript, make_call
from radix_policy.workloads.draws import between, lognormal, stream, think_gap, tokens
from radix_policy.workloads.generator import START_GAP, TEMPLATE, content_base
from radix_policy.workloads.topologies import uniform_turns

SWE_ANCHOR: Span = (1 << 30, 6000)
SWE_END = uniform_turns(30, 56)
_SWE_FULL = 60_000  # tokens of the last prompt, about
_SHARED_SYSTEM: Span = ((1 << 30) + (1 << 20), 200)


def swe_sessions(name: str, seed: int, count: int) -> list[SessionScript]:
    """One agent that reads and edits: 30-56 calls whose prompts grow evenly to about 60,000 tokens.

    A call adds its output (a fifth of the growth) and a tool's result; tools take 3 s on average (sigma 1).
    """
    sessions = []
    for number in range(count):
        lengths, times = stream(seed, "swe", number, "lengths"), stream(seed, "swe", number, "times")
        calls: list[Call] = []
        turns = between(stream(seed, "swe", number, "route"), 30, 56)
        end, base = tokens(lengths, 300), content_base(seed, name, number)
        step = (_SWE_FULL - SWE_ANCHOR[1] - 300) / (turns - 1)
        for _ in range(turns):
            output = (base + end, tokens(lengths, 0.2 * step))
            gap = lognormal(times, 1.0, mean=3.0) if calls else START_GAP
            prompt = ((0, TEMPLATE), SWE_ANCHOR, (base, end))
            calls.append(make_call("coder", prompt, (output,), gap, TEMPLATE + SWE_ANCHOR[1]))
            end += output[1] + tokens(lengths, 0.8 * step)
        sessions.append(SessionScript(f"{name}-{seed}-{number}", tuple(calls)))
    return sessions


def polluted(scripts: Sequence[SessionScript], name: str, seed: int, shared_system: bool) -> list[SessionScript]:
    """The scripts, in their order, and as many anonymous one-shot prompts as they have calls, spread evenly.

    A one-shot is 200-1,500 tokens (after the 200 shared ones, if any) and waits as long as any other call, so that C
    extra slots play them at the rate at which C slots play the scripts, and both streams end at about the same time:
    lane 1 says so. A loop without lanes plays them in the same C slots; then about half of the slots hold a script.
    """
    sessions: list[SessionScript] = []
    number = 0
    for script in scripts:
        sessions.append(script)
        for _ in script.calls:
            lengths, times = stream(seed, "one-shot", number, "lengths"), stream(seed, "one-shot", number, "times")
            base, length = content_base(seed, name, "one-shot", number), between(lengths, 200, 1500)
            system = (_SHARED_SYSTEM,) if shared_system else ()
            prompt, output = ((0, TEMPLATE), *system, (base, length)), ((base + length, tokens(lengths, 40)),)
            call = make_call("", prompt, output, think_gap(times)[0])
            sessions.append(SessionScript(f"{name}-{seed}-anonymous-{number}", (call,), tagged=False, lane=1))
            number += 1
    return sessions
