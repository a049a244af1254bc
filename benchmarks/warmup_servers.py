"""`python -m benchmarks warmup --servers`: warmup off, on and ungated on real servers, one after the other.

A run is one fresh server: a workload, a concurrency, a capacity, a mode, a round. A round plays every mode once, the
same sessions each time, and each round begins with another mode, so that a machine that changes its speed favours none.
Requests say agent and session, not which call is a session's last, as in the simulator.

Warmup works in the pauses between a session's calls. A CPU prefills much slower than a GPU, and the pauses are then too
short for its prefills; `--time-scale 3` or so makes the ratio of prefill to pause what it is on a GPU.

At concurrency 1 every mode and round of a place must have been asked the same and have answered the same.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from benchmarks.compare import MODELS, ServerFailed, guarded, outputs_line, running, server_words
from benchmarks.measure import Options, PointResults, run_stoppable
from benchmarks.measure import measure as measure_server
from benchmarks.measuring import measure_all
from benchmarks.replay import remarks
from benchmarks.results import Results, UsageError, progress, table
from benchmarks.sources import MAX_CONCURRENCY, check_time_scale, from_workload
from benchmarks.warmup import Block, Number, made, named, pairs
from launch.command import UsageError as LaunchUsageError
from launch.server import Server
from launch.tiny_model import cached as tiny_model
from radix_policy.simulator.warm import UNGATED
from sglang_scout.config import NAMES

IDENTITY = ("workload", "policy", "concurrency", "factor", "mode", "seed", "round")
PLACE = ("workload", "policy", "concurrency", "factor", "seed")
CONFIGS = {"off": None, "on": json.dumps({"warmup": True}), "ungated": json.dumps(dict(UNGATED))}
MAX_ROUNDS = 1000
FEWEST_SESSIONS = 2  # played when nobody says how many: what is learned of the first helps the second
MARGIN = 1.0  # percent, or hit points, beyond the noise, from which on a change is worth a word
FIGURES = (
    *("capacity_tokens", "time_scale", "tags", "sessions", "calls", "prompt_tokens", "cached_tokens", "hit_rate"),
    *("computed_prefill_tokens", "output_tokens", "ttft_ms", "turn_ms", "wall_s", "refused_calls", "refusals"),
    *("short_calls", "segments", "requests_digest", "digest", "session_digests", "server", "server_command", "start_s"),
)


class Run(NamedTuple):
    """One server."""

    workload: str
    policy: str
    concurrency: int
    factor: float  # capacity in F
    mode: str
    seed: int
    round: int
    sessions: int

    def key(self) -> dict[str, Any]:
        """What tells the run from others in the result file."""
        found = self._asdict()
        return {name: found[name] for name in IDENTITY}

    def __str__(self) -> str:
        return f"{self.workload} C={self.concurrency} {self.factor:g}F round {self.round} {self.mode}"


class Setting(NamedTuple):
    """What all runs have in common."""

    model_path: str
    extra_args: tuple[str, ...]
    time_scale: float


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 done, 1 a server failed or outputs differ, 2 bad input, 130, 143."""
    runs = plan(args)
    time_scale = 1.0 if args.time_scale is None else args.time_scale
    check_time_scale(time_scale)
    extra_args = tuple(server_words(args.server_args or ""))
    setting = Setting(args.model_path or str(tiny_model(MODELS)), extra_args, time_scale)
    for first in {r.mode: r for r in runs}.values():
        _server(first, setting, 4096)  # UsageError for what can be seen to be wrong before any server starts
    results = Results("warmup", args.argv, args.json, seed=args.seed, identity=IDENTITY)
    work = partial(measure_all, results, runs, measure, setting, jobs=1, line=_line)
    status = guarded("warmup", work, results)
    if status:
        return status
    outputs = results.document["outputs"] = check_outputs(results.points)
    results.save()
    print(report(results.points))
    print("\n" + outputs_line(outputs))
    return 1 if outputs["different"] else 0


def plan(args: argparse.Namespace) -> list[Run]:
    """Every run, in order; UsageError or WorkloadError when it cannot be."""
    rounds = 3 if args.rounds is None else args.rounds
    if not 1 <= rounds <= MAX_ROUNDS:
        raise UsageError(f"--rounds must be in 1..{MAX_ROUNDS}, not {rounds}")
    if args.policy not in NAMES:
        raise UsageError(f"--policy: warmup on servers is the plug-in's, so {' or '.join(NAMES)}, not {args.policy!r}")
    names, modes = named(args)
    places = pairs(args.points)
    if max(slots for slots, _ in places) > MAX_CONCURRENCY:
        raise UsageError(f"--points: on servers a concurrency of at most {MAX_CONCURRENCY}")
    return [
        Run(name, args.policy, slots, factor, mode, args.seed, number, args.sessions or max(slots, FEWEST_SESSIONS))
        for name in names
        for slots, factor in places
        for number in range(1, rounds + 1)
        for mode in rotated(modes, number)
    ]


def rotated(modes: Sequence[str], number: int) -> list[str]:
    """The modes in the order of a round, counted from 1: each round begins with the next one."""
    first = (number - 1) % len(modes)
    return [*modes[first:], *modes[:first]]


def _server(one: Run, setting: Setting, capacity: int) -> Server:
    try:
        return Server(
            setting.model_path,
            one.policy,
            policy_config=CONFIGS[one.mode],
            max_total_tokens=capacity,
            extra_args=setting.extra_args,
        )
    except LaunchUsageError as error:
        raise UsageError(str(error)) from None


def measure(one: Run, setting: Setting) -> dict[str, Any]:
    """Play the run's sessions on a fresh server; ServerFailed or ServerGone when it does not last."""
    workload = made(one.workload, one.seed, one.sessions, one.concurrency >= 64)
    source = from_workload(workload, {"workload": one.workload})
    capacity = int(one.factor * source.largest)
    options = Options(concurrency=one.concurrency, time_scale=setting.time_scale, seed=one.seed, quiet=True)
    # No journal: what is learned goes with the server, so a run that was cut is played again from its start.
    scratch = PointResults("warmup", (), None)
    progress(f"starting a server: {one}, {capacity} tokens")
    with running(_server(one, setting, capacity)) as server:
        extra = {"server_command": server.command.shell(), "start_s": round(server.start_seconds, 2)}
        point = run_stoppable(lambda: measure_server(server.url, source, options, scratch, extra))
    if not point["calls"]:
        raise ServerFailed(f"{one}: no call was served; {'; '.join(point['refusals'])}", 1)
    if not 0 <= capacity - point["capacity_tokens"] < point["server"]["page_size"]:
        raise ServerFailed(f"{one}: asked for {capacity} tokens, the server has {point['capacity_tokens']}", 1)
    return {**{name: point[name] for name in FIGURES}, "lanes": source.lanes, **_plug_in(one, point)}


def _plug_in(one: Run, point: dict[str, Any]) -> dict[str, Any]:
    """What the plug-in says at the end of the run."""
    states = point.get("scout") or []
    if len(states) != 1:
        raise ServerFailed(f"{one}: {len(states)} schedulers show the state of the plug-in, not one", 1)
    (state,) = states
    warmup = state.get("warmup")
    if (warmup is None) != (one.mode == "off"):
        raise ServerFailed(f"{one}: the server runs with warmup {'off' if warmup is None else 'on'}", 1)
    found = {"faults": state.get("faults") or {}, "warmup": warmup}
    if warmup is not None and not warmup["on"]:
        raise ServerFailed(f"{one}: warmup switched itself off; faults: {found['faults']}", 1)
    if warmup is not None:
        found["longest_slice_s"] = warmup.get("longest_slice_s")
    return found


def _line(one: Run, point: dict[str, Any]) -> str:
    return f"{one}: {point['ttft_ms']['mean']:.1f} ms, {100 * point['hit_rate']:.2f} %"


# ---- outputs ----


def check_outputs(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether all modes and rounds of a place were asked and answered the same at concurrency 1.

    {"checked": number of comparisons, "different": [one line each]}
    """
    checked, different = 0, []
    for place, own in _places(points).items():
        comparable = [p for p in own if p["concurrency"] == 1 and p["lanes"] == 1]
        for point in comparable[1:]:
            checked += 1
            if point["digest"] != comparable[0]["digest"]:
                different.append(f"{_name(place)}: {_difference(comparable[0], point)}")
    return {"checked": checked, "different": different}


def _difference(base: dict[str, Any], point: dict[str, Any]) -> str:
    what = "output" if point["requests_digest"] == base["requests_digest"] else "prompt or output"
    both = list(zip(base["session_digests"], point["session_digests"]))
    session = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
    first, second = (f"{p['mode']} in round {p['round']}" for p in (base, point))
    return f"{first} and {second}: another {what} in session {session}"


def _places(points: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for point in points:
        found.setdefault(tuple(point[name] for name in PLACE), []).append(point)
    return found


def _name(place: tuple[Any, ...]) -> str:
    return f"{place[0]} C={place[2]} {place[3]:g}F"


# ---- the tables ----


class Metric(NamedTuple):
    """One figure of a run."""

    name: str
    of: tuple[str, ...]  # keys of the point, one in the other
    scale: float = 1.0
    points: bool = False  # compared by difference, and more is better; else by ratio, and less is better

    def values(self, runs: Sequence[dict[str, Any]]) -> list[float]:
        """The figure in every run."""
        found = []
        for run in runs:
            value: Any = run
            for key in self.of:
                value = value[key]
            found.append(self.scale * value)
        return found

    def change(self, own: Sequence[dict[str, Any]], off: Sequence[dict[str, Any]]) -> Number:
        """From the median of off to the median of the mode; its error is half the range of the rounds of off."""
        theirs = self.values(off)
        base, half = median(theirs), (max(theirs) - min(theirs)) / 2
        now = median(self.values(own))
        if self.points:
            found = Number(now - base)
        else:
            found, half = Number(100 * (now / base - 1) if base else 0.0), 100 * half / base if base else 0.0
        found.error = half if len(theirs) > 1 else None
        return found

    def worse(self, change: Number) -> bool:
        """Whether the change is for the worse, by more than MARGIN beyond the noise."""
        return (-change if self.points else change) > (change.error or 0.0) + MARGIN


METRICS = (
    Metric("ttft mean", ("ttft_ms", "mean")),
    Metric("p50", ("ttft_ms", "p50")),
    Metric("p99", ("ttft_ms", "p99")),
    Metric("hit", ("hit_rate",), 100.0, points=True),
    Metric("computed", ("computed_prefill_tokens",), 0.001),
)


def report(points: Sequence[dict[str, Any]]) -> str:
    """The tables as text, where on is worse, and what to know about single runs."""
    parts = [f"{block.title}\n{table(block.headers, block.rows)}" for block in blocks(points)]
    return "\n\n".join([*parts, *remarks_on(points)])


def blocks(points: Sequence[dict[str, Any]]) -> list[Block]:
    """A table of medians, and one of changes against off."""
    medians: list[list[Any]] = []
    changes: list[list[Any]] = []
    for place, runs in _by_mode(points).items():
        for mode, own in runs.items():
            head = [place[0], place[2], f"{place[3]:g}F", mode]
            medians.append([*head, *(Number(median(m.values(own))) for m in METRICS), *_warmed(own)])
            if mode != "off" and "off" in runs:
                changes.append([*head, *(metric.change(own, runs["off"]) for metric in METRICS)])
    rounds = len({p["round"] for p in points})
    names = ["workload", "C", "capacity", "warmup"]
    header = [
        *names,
        "ttft mean ms",
        "p50",
        "p99",
        "hit %",
        "computed ktok",
        "warmed ktok",
        "useful %",
        "longest slice ms",
    ]
    found = [Block(f"median of {rounds} round(s)", header, medians)]
    if changes:
        noise = "±: half the range of the rounds of off" if rounds > 1 else "one round: the noise is unknown"
        header = [*names, "ttft mean %", "p50 %", "p99 %", "hit points", "computed %"]
        found.append(Block(f"against warmup off ({noise})", header, changes))
    return found


def remarks_on(points: Sequence[dict[str, Any]]) -> list[str]:
    """Where on is worse than off, and what a reader must know about single runs."""
    worse: list[str] = []
    compared = False
    for place, runs in _by_mode(points).items():
        if "on" in runs and "off" in runs:
            compared = True
            changes = [(metric, metric.change(runs["on"], runs["off"])) for metric in METRICS]
            bad = [f"{metric.name} {change:+.2f}" for metric, change in changes if metric.worse(change)]
            worse += [f"{_name(place)} ({', '.join(bad)})"] if bad else []
    found = []
    if compared:
        where = "; ".join(worse) or "none"
        found.append(f"worse with warmup on, by more than {MARGIN:g} % (or hit point) beyond the noise: {where}")
    notes = [line for p in points for line in _remarks(p)]
    return [*found, "\n".join(notes)] if notes else found


def _by_mode(points: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]]:
    found: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for place, own in _places(points).items():
        for point in own:
            found.setdefault(place, {}).setdefault(point["mode"], []).append(point)
    return found


def _warmed(own: Sequence[dict[str, Any]]) -> tuple[Number, Number, Number]:
    """Thousand tokens that warmups prefilled, and the useful part of them in percent: medians; the longest slice in ms,
    which is what a call can have waited at most."""
    counts = [p["warmup"] or {"tokens": 0, "useful_tokens": 0} for p in own]
    shares = [100 * c["useful_tokens"] / c["tokens"] if c["tokens"] else 0.0 for c in counts]
    longest = max(p.get("longest_slice_s") or 0.0 for p in own)
    return Number(median(c["tokens"] / 1000 for c in counts)), Number(median(shares)), Number(1000 * longest)


def _remarks(point: dict[str, Any]) -> list[str]:
    """What a reader of the figures must know about a run."""
    name = f"{_name(tuple(point[n] for n in PLACE))} round {point['round']} {point['mode']}"
    lines = remarks({**point, "policy": name})
    if point["faults"]:
        lines.append(f"{name}: faults of the plug-in: {point['faults']}")
    return lines
