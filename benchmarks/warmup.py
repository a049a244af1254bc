"""`python -m benchmarks warmup`: what warmup does to the time to first token and the hit rate, in the simulator.

Each point is one closed loop with `serial` service (one prefill after the other, warmups included): a workload, a
concurrency, a capacity, a seed, and warmup off, on, or ungated (on, without any condition but an idle server and a
missing anchor). The table shows the mean over the seeds; below it, by how much the mode differs from off, with the
standard error over the seeds where there are several.

With `--servers` the same on real servers: see benchmarks/warmup_servers.py.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from benchmarks.measuring import measure_all
from benchmarks.results import Results, UsageError, check_sessions, table, whole, words
from benchmarks.simulate import MAX_CONCURRENCY, _quantile
from radix_policy.config import rows
from radix_policy.eviction import POLICIES
from radix_policy.simulator import Loop, Outcome
from radix_policy.simulator.warm import UNGATED, WarmLoop
from radix_policy.warmup import WarmupConfig
from radix_policy.workloads import Workload, make

WORKLOADS = "pipeline,debate,selector,random"
POINTS = "1:1.3,1:2,1:8,4:3,4:6,4:16,16:8,16:16,16:48"  # concurrency:capacity in F: small, middle, ample
MODES = ("off", "on", "ungated")
IDENTITY = ("workload", "policy", "concurrency", "factor", "mode", "seed")
TIMES = ("mean", "p50", "p99")
MAX_FACTOR, MAX_SEEDS = 1e6, 1000
SIMULATOR_ONLY = ("--seeds", "--jobs")
SERVERS_ONLY = ("--rounds", "--time-scale", "--model-path", "--server-args")


class Point(NamedTuple):
    """One run."""

    workload: str
    policy: str
    concurrency: int
    factor: float  # capacity in F
    mode: str
    seed: int
    sessions: int | None

    def key(self) -> dict[str, Any]:
        """What tells the point from others in the result file."""
        found = self._asdict()
        return {name: found[name] for name in IDENTITY}


def add_parser(sub: Any) -> None:
    """Declare the command."""
    parser = sub.add_parser(
        "warmup",
        help="warmup off, on and ungated, in the simulator or on servers",
        description="Plays workloads in the simulator, or on servers, with warmup off, on and ungated; prints time to "
        f"first token and hit rate. Keys of warmup: {', '.join(name for name, *_ in rows(WarmupConfig))}.",
    )
    parser.add_argument("--workload", metavar="W,W", default=WORKLOADS, help=f"generated workloads ({WORKLOADS})")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="scout", help="eviction policy (default scout)")
    parser.add_argument("--points", metavar="C:N,..", default=POINTS, help=f"concurrency:capacity in F ({POINTS})")
    parser.add_argument("--modes", metavar="M,M", default=",".join(MODES), help="of off, on and ungated (all)")
    parser.add_argument("--seed", type=int, default=1, help="first seed of the workloads (default 1)")
    parser.add_argument("--seeds", type=int, metavar="K", help="so many seeds (default 1); not with --servers")
    parser.add_argument(
        "--sessions", type=int, metavar="K", help="only so many sessions (servers: one per slot, at least 2)"
    )
    parser.add_argument("--jobs", type=int, metavar="J", help="processes (default 1); not with --servers")
    parser.add_argument("--json", metavar="OUT", help="write the result file; a stopped run goes on from it")
    parser.add_argument("--servers", action="store_true", help="on real servers, which this starts")
    parser.add_argument(
        "--rounds", type=int, metavar="K", help="--servers: every mode so many times, in turn (default 3)"
    )
    parser.add_argument(
        "--time-scale", type=float, metavar="X", help="--servers: factor on pauses between calls (default 1)"
    )
    parser.add_argument("--model-path", metavar="M", help="--servers: default: the tiny model")
    parser.add_argument("--server-args", metavar="FLAGS", help="--servers: more SGLang flags, as one quoted string")


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    for option in SIMULATOR_ONLY if args.servers else SERVERS_ONLY:
        if getattr(args, option[2:].replace("-", "_")) is not None:
            raise UsageError(f"{option} is {'not for' if args.servers else 'only for'} --servers")
    if args.servers:
        return _on_servers(args)
    points = plan(args)
    results = Results("warmup", args.argv, args.json, seed=args.seed, identity=IDENTITY)
    stopped = measure_all(results, points, measure, jobs=1 if args.jobs is None else args.jobs, line=_line)
    if stopped is not None:
        return stopped
    print(report(results.points))
    return 0


def _on_servers(args: argparse.Namespace) -> int:
    try:
        from benchmarks import warmup_servers  # what it needs, the simulator does not
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--servers needs the Python package {error.name!r}: pip install 'sglang-scout[bench]'"
        ) from None
    return warmup_servers.run(args)


def _line(point: Point, figures: dict[str, Any]) -> str:
    what = f"{point.workload} C={point.concurrency} {point.factor:g}F seed {point.seed} {point.mode}"
    return f"{what}: {figures['ttft_ms']['mean']:.1f} ms, {100 * figures['hit_rate']:.2f} %"


def plan(args: argparse.Namespace) -> list[Point]:
    """Everything that will run, in order; UsageError or WorkloadError when it cannot."""
    seeds = 1 if args.seeds is None else args.seeds
    for option, value, high in (("--jobs", args.jobs, 4096), ("--seeds", seeds, MAX_SEEDS)):
        if value is not None and not 1 <= value <= high:
            raise UsageError(f"{option} must be in 1..{high}, not {value}")
    names, modes = named(args)
    return [
        Point(name, args.policy, concurrency, factor, mode, seed, args.sessions)
        for name in names
        for concurrency, factor in pairs(args.points)
        for seed in range(args.seed, args.seed + seeds)
        for mode in modes
    ]


def named(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The workloads and the modes; UsageError or WorkloadError when one is unknown, or the sessions are too many."""
    check_sessions(args.sessions)
    modes, names = words(args.modes), words(args.workload)
    if not modes or any(mode not in MODES for mode in modes):
        raise UsageError(f"--modes: some of {', '.join(MODES)}, not {args.modes!r}")
    if not names:
        raise UsageError("--workload names none")
    for name in names:
        make(name, seed=args.seed, sessions=1)
    return names, modes


def pairs(text: str) -> list[tuple[int, float]]:
    """Concurrency and capacity in F; UsageError on anything else."""
    found = []
    for part in words(text):
        slots, _, size = part.partition(":")
        number = whole(slots)
        try:
            factor = float(size.removesuffix("F"))
        except ValueError:
            factor = 0.0
        if number is None or not 1 <= number <= MAX_CONCURRENCY or not 1 < factor <= MAX_FACTOR:
            raise UsageError(f"--points: CONCURRENCY:CAPACITY in F, above 1, as in {POINTS}, not {part!r}")
        found.append((number, factor))
    if not found:
        raise UsageError("--points names none")
    return found


def measure(point: Point) -> dict[str, Any]:
    """Run one point."""
    workload = made(point.workload, point.seed, point.sessions, point.concurrency >= 64)
    capacity = int(point.factor * workload.largest)
    outcome = play(workload, point.policy, point.mode, capacity, point.concurrency)
    times = sorted(1000 * t for t in outcome.ttft) or [0.0]
    return {
        "capacity_tokens": capacity,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "hit_rate": outcome.hit_rate,
        "requests": outcome.requests,
        "unserved_requests": outcome.unserved,
        "ttft_ms": {
            "mean": round(sum(times) / len(times), 3),
            "p50": round(_quantile(times, 0.50), 3),
            "p99": round(_quantile(times, 0.99), 3),
        },
        "warmup": outcome.snapshot.get("warmup"),
    }


def play(workload: Workload, policy: str, mode: str, capacity: int, concurrency: int) -> Outcome:
    """One closed loop."""
    if mode == "off":
        return Loop(workload, policy, capacity=capacity, concurrency=concurrency, service="serial").run()
    keys: Mapping[str, Any] = UNGATED if mode == "ungated" else {"warmup": True}
    return WarmLoop(workload, policy, capacity=capacity, concurrency=concurrency, warmup=keys).run()


@lru_cache(maxsize=8)
def made(name: str, seed: int, sessions: int | None, many: bool) -> Workload:
    """The workload of a point; `many`: its concurrency is 64 or more."""
    return make(name, seed=seed, concurrency=64 if many else None, sessions=sessions)


# ---- the tables ----


class Number(float):
    """Two decimals, with the error of the mean where there is one."""

    error: float | None = None

    def __str__(self) -> str:
        return f"{float(self):.2f}" + (f" ±{self.error:.2f}" if self.error is not None else "")


def _mean(values: Sequence[float]) -> Number:
    n = len(values)
    found = Number(sum(values) / n)
    if n > 1:
        found.error = math.sqrt(sum((v - found) ** 2 for v in values) / (n - 1) / n)
    return found


class Block(NamedTuple):
    """A table and what it shows."""

    title: str
    headers: list[str]
    rows: list[list[Any]]


def report(found: Sequence[dict[str, Any]]) -> str:
    """The tables as text."""
    return "\n\n".join(f"{block.title}\n{table(block.headers, block.rows)}" for block in blocks(found))


def blocks(found: Sequence[dict[str, Any]]) -> list[Block]:
    """One table of means, and one of differences from off in the same seed."""
    places: dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]] = {}
    for point in found:
        place = tuple(point[name] for name in ("workload", "policy", "concurrency", "factor"))
        places.setdefault(place, {}).setdefault(point["mode"], {})[point["seed"]] = point
    means, changes = [], []
    for (workload, _, concurrency, factor), modes in places.items():
        for mode, by_seed in modes.items():
            own = [*by_seed.values()]
            times = [_mean([p["ttft_ms"][name] for p in own]) for name in TIMES]
            hits = _mean([100 * p["hit_rate"] for p in own])
            head = [workload, concurrency, f"{factor:g}F", mode]
            means.append([*head, *times, hits, *_warmed(own)])
            off = modes.get("off", {})
            both = [(p, off[seed]) for seed, p in by_seed.items() if seed in off]
            if mode != "off" and both:
                relative = [_mean([100 * (a["ttft_ms"][n] / b["ttft_ms"][n] - 1) for a, b in both]) for n in TIMES]
                gain = _mean([100 * (a["hit_rate"] - b["hit_rate"]) for a, b in both])
                changes.append([*head, *relative, gain])
    names = ["workload", "C", "capacity", "warmup"]
    header = [*names, "ttft mean ms", "p50", "p99", "hit %", "warmed ktok", "useful %"]
    tables = [Block(f"mean over {len({p['seed'] for p in found})} seed(s)", header, means)]
    if changes:
        header = [*names, "ttft mean %", "p50 %", "p99 %", "hit points"]
        tables.append(Block("against warmup off, seed by seed", header, changes))
    return tables


def _warmed(own: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
    """Thousand tokens that warmups prefilled, per run, and the useful part of them in percent."""
    counts = [p["warmup"] for p in own if p["warmup"]]
    tokens, useful = sum(c["tokens"] for c in counts), sum(c["useful_tokens"] for c in counts)
    return Number(tokens / 1000 / len(own)), Number(100 * useful / tokens if tokens else 0.0)
