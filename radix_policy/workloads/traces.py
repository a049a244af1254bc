"""Recorded traces (gzip JSON lines, block ids instead of text) as workloads.

A block id stands for the whole prefix up to and including its block, so block id b becomes the tokens b * block_size
and on, and two prompts share a prefix exactly as far as their ids agree. In most files blocks go on over the output:
the block that the prompt ends in then holds the prompt's tail and the output's first tokens, and both take their ids
from it, so that a later prompt with this block finds prompt and output again. In others the last block is the prompt's
partial tail and nothing is known of outputs. Tokens that no block covers belong to one call alone.
"""

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from radix_policy.prompts import Span, Spans, cut, span_tokens
from radix_policy.workloads.base import Call, SessionScript, Workload, WorkloadError, make_call
from radix_policy.workloads.draws import stream, think_gap
from radix_policy.workloads.facts import measure, predictability
from radix_policy.workloads.records import Record, records

START_GAP = 0.5  # mean seconds between a slot becoming free and a session's first call (arrivals are Poisson)
_SESSION_IDS = 1 << 40  # room for the token ids of one session whose block ids are its own
_PRIVATE, _CALL_IDS = 1 << 62, 1 << 24  # tokens of one call alone: first id, room per line of the file


def read_trace(
    path: str | Path,
    *,
    seed: int,
    half: int | None = None,
    max_sessions: int | None = None,
    max_calls: int | None = None,
    max_gap: float | None = None,
) -> Workload:
    """The trace as a workload; WorkloadError (one line, with file and line number) when it cannot be used.

    Sessions stand in the order of their first call. `half`: 1 or 2, that half of the sessions only. `max_sessions`,
    `max_calls`: the first so many (the last session may be cut). `max_gap`: seconds, cap of recorded gaps.
    """
    if half not in (None, 1, 2):
        raise WorkloadError(f"half must be 1 or 2, got {half!r}")
    for option, limit in (("max_sessions", max_sessions), ("max_calls", max_calls)):
        if limit is not None and limit < 1:
            raise WorkloadError(f"{option} must be at least 1, got {limit}")
    everything = list(records(path))
    by_session: dict[int | str, list[Record]] = {}
    for record in everything:
        by_session.setdefault(record.session, []).append(record)
    if not by_session:
        raise WorkloadError(f"{path}: no calls in the file")
    keys = list(by_session)
    if half is not None:
        middle = (len(keys) + 1) // 2
        keys = keys[:middle] if half == 1 else keys[middle:]
    notes = _Notes(over_output=not any(_covered(r) > (r.input_len or 0) + r.output_len for r in everything))
    scripts: list[SessionScript] = []
    left = max_calls if max_calls is not None else sum(map(len, by_session.values()))
    for key in keys[:max_sessions]:
        calls = _calls(by_session[key], stream(seed, "trace", key), max_gap, notes)[:left]
        if calls:
            scripts.append(SessionScript(f"{Path(path).name.split('.')[0]}-{key}", calls, any(c.agent for c in calls)))
            left -= len(calls)
        if left <= 0:
            break
    kept = tuple(scripts)
    agents = tuple(dict.fromkeys(c.agent for s in kept for c in s.calls if c.agent))
    recorded = ([r.agent for r in by_session[k] if r.agent] for k in keys[:max_sessions])
    facts = measure(kept) | notes.facts() | {"R_recorded": predictability(recorded), "shared_share": _shared(kept)}
    return Workload(Path(path).name.split(".")[0], kept, agents, seed, facts=facts)


@dataclass
class _Notes:
    """Peculiarities met while reading."""

    over_output: bool  # whether blocks go on over the output; else a block past the prompt's end is its partial tail
    missing_prompts: int = 0  # calls whose prompt was not recorded: left out, their time kept in the next gap
    backward_times: int = 0  # calls that start before the one written before them
    step_restarts: int = 0  # steps that do not grow inside a session; the file's order is kept
    overlaps: int = 0  # calls that started before the previous one had finished (sub-agents): they follow at once
    blocks_over_output: int = 0  # calls whose blocks go on over the output
    times: set[str] = field(default_factory=set)

    def facts(self) -> dict[str, Any]:
        names = ("missing_prompts", "backward_times", "step_restarts", "overlaps", "blocks_over_output")
        return {n: getattr(self, n) for n in names} | {"times": "+".join(sorted(self.times))}


def _calls(recorded: list[Record], rng: Random, max_gap: float | None, notes: _Notes) -> tuple[Call, ...]:
    calls: list[Call] = []
    finished, before = 0.0, recorded[0]
    for record in recorded:
        if record is not before:
            notes.step_restarts += record.step <= before.step
            notes.backward_times += record.t is not None and before.t is not None and record.t < before.t
        before = record
        drawn = think_gap(rng)[0]
        if record.t is None:
            gap = record.think_s if record.think_s is not None else drawn
            notes.times.add("drawn" if record.think_s is None else "recorded")
        else:
            gap = record.t - finished
            notes.overlaps += bool(calls) and gap < 0
            finished = max(finished, record.t + record.service_s)
            notes.times.add("recorded")
        if record.input_len is None:
            notes.missing_prompts += 1
            continue
        if not calls:
            gap = rng.expovariate(1 / START_GAP)
        elif max_gap is not None:
            gap = min(gap, max_gap)
        prompt, output = _spans(record, notes.over_output)
        notes.blocks_over_output += notes.over_output and _covered(record) > record.input_len
        calls.append(make_call(record.agent, prompt, output, max(gap, 0.0), min(record.fixed, record.input_len)))
    return tuple(calls)


def _covered(record: Record) -> int:
    """Tokens that the blocks stand for."""
    return record.block_size * sum(count for _, count in record.blocks)


def _spans(record: Record, over_output: bool) -> tuple[Spans, Spans]:
    size, length, total = record.block_size, record.input_len or 0, (record.input_len or 0) + record.output_len
    offset = 0 if record.own_ids is None else (1 + record.own_ids) * _SESSION_IDS
    known: list[Span] = [(offset + first * size, count * size) for first, count in record.blocks]
    spans = cut(known, 0, total if over_output else length)
    if (rest := total - span_tokens(spans)) > 0:
        spans.append((_PRIVATE + record.line * _CALL_IDS, rest))
    return tuple(cut(spans, 0, length)), tuple(cut(spans, length, total))


def _shared(sessions: tuple[SessionScript, ...]) -> float:
    """Share of prompt tokens that an endless cache would have held, sessions one after the other."""
    seen, shared, total = _Ids(), 0, 0
    for session in sessions:
        for call in session.calls:
            for first, count in call.prompt:
                shared += seen.add(first, first + count)
            for first, count in call.output:
                seen.add(first, first + count)
            total += call.prompt_tokens
    return shared / total if total else 0.0


class _Ids:
    """A set of ids as sorted disjoint ranges."""

    def __init__(self) -> None:
        self.starts, self.stops = array("q"), array("q")

    def add(self, start: int, stop: int) -> int:
        """Put [start, stop) in; how many of them were there already."""
        low = bisect_left(self.stops, start)
        high, had, first, last = low, 0, start, stop
        while high < len(self.starts) and self.starts[high] <= stop:
            had += max(0, min(stop, self.stops[high]) - max(start, self.starts[high]))
            first, last = min(first, self.starts[high]), max(last, self.stops[high])
            high += 1
        self.starts[low:high], self.stops[low:high] = array("q", [first]), array("q", [last])
        return had
