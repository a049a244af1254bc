"""`python -m benchmarks simulate`: hit rates in the simulator.

Every point is one run: a workload or trace, a policy, a capacity, a concurrency. With `fixed` service all policies of a
point see the same requests in the same order, and `opt` is what the best of all could have hit.
"""

import argparse
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import traces
from benchmarks.measuring import measure_all
from benchmarks.results import Results, UsageError, check_sessions, progress, table, whole, words
from radix_policy.config import ConfigError
from radix_policy.eviction import POLICIES
from radix_policy.runtime import Runtime
from radix_policy.simulator import IDENTITIES, SERVICES, Study, known_policies, parse_spec
from radix_policy.simulator.engine import CHUNK
from radix_policy.simulator.run import INFORMED, ORACLES, PINNED, require_law
from radix_policy.workloads import Workload, make

# The frozen grid of the evaluation: concurrency -> capacities in F
GRID_WORKLOADS = ("pipeline", "debate", "selector", "random")
GRID = {1: (1.15, 2, 4, 8), 4: (2, 4, 8, 16), 16: (4, 8, 16, 32), 64: (16, 32, 64, 128)}
MAX_CONCURRENCY = 4096


class Source(NamedTuple):
    """Where the sessions come from; what a worker needs to make them again."""

    workload: str | None
    trace: str | None
    seed: int
    sessions: int | None
    half: int | None

    @property
    def label(self) -> dict[str, str]:
        """The point's key that names it."""
        return {"workload": str(self.workload)} if self.trace is None else {"trace": Path(self.trace).name}


class Settings(NamedTuple):
    """What is the same for every point of a run."""

    identity: str
    service: str
    page_size: int
    chunk: int


class Point(NamedTuple):
    """One run."""

    source: Source
    policy: str
    capacity: str  # as asked for, e.g. 4F
    capacity_tokens: int
    concurrency: int

    def key(self) -> dict[str, Any]:
        """What tells the point from others in the result file."""
        return {
            **self.source.label,
            "policy": self.policy,
            "capacity": self.capacity,
            "capacity_tokens": self.capacity_tokens,
            "concurrency": self.concurrency,
        }


def add_parser(sub: Any) -> None:
    """Declare the command."""
    parser = sub.add_parser(
        "simulate",
        help="hit rates in the simulator",
        description="Plays workloads in the simulator under eviction policies and prints hit rates. "
        f"Policies: {', '.join(known_policies())}; +trim, -guard and the like add or remove an ingredient, "
        ":key=value sets a key, +END tells the policy when a session is over.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--workload", metavar="W", help="generated workloads, comma separated: pipeline, selector:large")
    what.add_argument("--trace", metavar="FILE", action="append", help="recorded trace; may be given more than once")
    what.add_argument("--grid", action="store_true", help="the frozen 64-point grid")
    parser.add_argument("--policies", required=True, metavar="P,P", help="policy names, comma separated")
    parser.add_argument(
        "--capacity", metavar="N,N", help="KV tokens, or times the largest request: 2F,4F,16F (default 4F)"
    )
    parser.add_argument("--concurrency", metavar="N,N", help="slots of the closed loop (default 4)")
    parser.add_argument("--points", metavar="C:N,..", help="concurrency:capacity pairs instead of their product")
    parser.add_argument("--seed", type=int, default=1, help="seed of the workload (default 1)")
    parser.add_argument("--sessions", type=int, metavar="K", help="only so many sessions")
    parser.add_argument("--half", type=int, choices=(1, 2), help="only this half of a trace's sessions")
    parser.add_argument("--identity", choices=IDENTITIES, default="tagged", help="what clients say (default tagged)")
    parser.add_argument("--page-size", type=int, default=1, metavar="P", help="tokens per page (default 1)")
    parser.add_argument(
        "--chunk", type=int, default=CHUNK, metavar="T", help=f"tokens per prefill chunk, 0: no limit (default {CHUNK})"
    )
    parser.add_argument(
        "--service",
        choices=SERVICES,
        default="fixed",
        help="fixed: one order for all policies; cost: prefill what missed, for time to first token; serial: one "
        "prefill at a time",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes (default 1)")
    parser.add_argument("--json", metavar="OUT", help="write the result file; a stopped run goes on from it")


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    settings, points = plan(args)
    names = sorted({key for point in points for key in point.source.label})
    results = Results(
        "simulate",
        args.argv,
        args.json,
        seed=args.seed,
        identity=(*names, "policy", "capacity_tokens", "concurrency"),
        settings=settings._asdict() | traces.digests(args.trace or ()),
    )
    _check(args.json, results.points)
    stopped = measure_all(results, points, measure, settings, jobs=args.jobs, line=_line)
    if stopped is not None:
        return stopped
    for where in _torn(results.points):
        progress(f"{where}: the policies did not see the same order of requests: a bug, the figures cannot be compared")
        return 1
    print(report(points, results.points, settings))
    return 0


def _line(point: Point, figures: dict[str, Any]) -> str:
    what = f"{_name(point.source)} C={point.concurrency} {point.capacity} {point.policy}"
    return f"{what}: {100 * figures['hit_rate']:.2f} %"


def plan(args: argparse.Namespace) -> tuple[Settings, list[Point]]:
    """Everything that will run, in order; UsageError, ConfigError or WorkloadError when it cannot."""
    for option, value, low in (
        ("--page-size", args.page_size, 1),
        ("--chunk", args.chunk, 0),
        ("--jobs", args.jobs, 1),
    ):
        if value < low:
            raise UsageError(f"{option} must be at least {low}, not {value}")
    check_sessions(args.sessions)
    settings = Settings(args.identity, args.service, args.page_size, args.chunk)
    policies = words(args.policies)
    if not policies:
        raise UsageError("--policies names none")
    for policy in policies:
        spec = parse_spec(policy)
        if spec.name in ORACLES and args.service != "fixed":
            raise UsageError(f"policy {policy!r} needs --service fixed: else there is no one order to be optimal for")
        if spec.name in POLICIES:
            Runtime(spec.name, spec.config)
    sources, pairs = _sources(args), _pairs(args)
    points = []
    for source in sources:
        for concurrency, capacity in pairs:
            workload = _workload(source, concurrency)
            tokens = _tokens(capacity, workload.largest)
            if any(parse_spec(policy).name == INFORMED for policy in policies):
                require_law(workload)
            points += [Point(source, policy, capacity, tokens, concurrency) for policy in policies]
    return settings, points


def report(points: Sequence[Point], found: Sequence[dict[str, Any]], settings: Settings) -> str:
    """Tables: policies by points, per workload; and how much of the gap from lru to opt each closes."""
    by_key = {_identity(p): p for p in found}
    blocks = []
    for source in dict.fromkeys(point.source for point in points):
        own = [point for point in points if point.source == source]
        columns = list(dict.fromkeys((p.concurrency, p.capacity) for p in own))
        cells = {(p.policy, p.concurrency, p.capacity): by_key[_identity(p.key())] for p in own}
        rows = []
        for policy in dict.fromkeys(p.policy for p in own):
            values = [cells[policy, *column] for column in columns]
            row = [policy, *(_Percent(v["hit_rate"]) for v in values)]
            if len(columns) > 1:
                row.append(_Percent(sum(v["hit_rate"] for v in values) / len(values)))
            if settings.service != "fixed":
                row += [_Ms(v["ttft_ms"]["mean"]) for v in values] + [_Ms(v["ttft_ms"]["p99"]) for v in values]
            rows.append(row)
        heads = [f"C={c} {n}" for c, n in columns]
        header = ["policy", *heads, *(["mean"] if len(columns) > 1 else [])]
        if settings.service != "fixed":
            header += [f"ttft {h}" for h in heads] + [f"p99 {h}" for h in heads]
        missing = sum(
            v["unserved_requests"]
            for v in {(p.concurrency, p.capacity): cells[p.policy, p.concurrency, p.capacity] for p in own}.values()
        )
        title = f"{_name(source)}: hit rate, % of prompt tokens"
        if missing:
            title += f" ({missing} requests larger than the capacity were not served)"
        blocks.append(title + "\n" + table(header, rows))
    closed = gap_closed(found)
    if closed:
        rows = [[policy, _Percent(share)] for policy, share in closed.items()]
        blocks.append("share of the gap from lru to opt that is closed, %\n" + table(["policy", "all points"], rows))
    return "\n\n".join(blocks)


def _check(path: str | None, found: Sequence[dict[str, Any]]) -> None:
    """UsageError when the file holds a policy that this version does not know."""
    for p in found:
        try:
            parse_spec(str(p["policy"]))
        except ConfigError as error:
            raise UsageError(f"{path}: {error}") from None


def _torn(found: Sequence[dict[str, Any]]) -> list[str]:
    """Places where the policies saw different orders; hard pins delay requests and are left out."""
    orders: dict[str, set[str]] = {}
    for p in found:
        if "order" in p and parse_spec(p["policy"]).name != PINNED:
            where = f"{p.get('workload') or p.get('trace')} C={p['concurrency']} {p['capacity_tokens']} tokens"
            orders.setdefault(where, set()).add(p["order"])
    return [where for where, seen in orders.items() if len(seen) > 1]


def gap_closed(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Per policy: sum of (policy - lru) over sum of (opt - lru), over the points where all three are known."""
    groups: dict[tuple[Any, ...], dict[str, float]] = {}
    for p in found:
        where = (p.get("workload"), p.get("trace"), p["capacity_tokens"], p["concurrency"])
        groups.setdefault(where, {})[p["policy"]] = p["hit_rate"]
    whole = [g for g in groups.values() if "lru" in g and "opt" in g]
    room = sum(g["opt"] - g["lru"] for g in whole)
    if room <= 0:
        return {}
    names = [n for n in dict.fromkeys(n for g in whole for n in g) if n not in ("lru", "opt")]
    names = [n for n in names if all(n in g for g in whole)]
    return {n: sum(g[n] - g["lru"] for g in whole) / room for n in names}


class _Percent(float):
    def __str__(self) -> str:
        return f"{100 * self:.2f}"


class _Ms(float):
    def __str__(self) -> str:
        return f"{self:.1f}"


# ---- running ----


def measure(point: Point, settings: Settings) -> dict[str, Any]:
    """Run one point."""
    outcome = _study(point.source, point.concurrency, settings.page_size, settings.chunk).run(
        point.policy,
        point.capacity_tokens,
        point.concurrency,
        identity=settings.identity,
        service=settings.service,
    )
    figures: dict[str, Any] = {
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "hit_rate": outcome.hit_rate,
        "requests": outcome.requests,
        "unserved_requests": outcome.unserved,
        "evicted_tokens": outcome.evicted_tokens,
        "simulated_seconds": round(outcome.seconds, 3),
    }
    if settings.service != "fixed":
        times = sorted(1000 * t for t in outcome.ttft) or [0.0]
        figures["ttft_ms"] = {
            "mean": round(sum(times) / len(times), 3),
            "p50": round(_quantile(times, 0.50), 3),
            "p99": round(_quantile(times, 0.99), 3),
        }
    else:
        figures["order"] = outcome.order
    return figures


def _quantile(ordered: Sequence[float], q: float) -> float:
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


# A few studies stay in memory: the points of one workload come in a row, and each keeps its orders and its plan.
@lru_cache(maxsize=4)
def _study(source: Source, concurrency: int, page_size: int, chunk: int) -> Study:
    return Study(_workload(source, concurrency), page_size, chunk)


def _workload(source: Source, concurrency: int) -> Workload:
    # a generated workload holds more sessions at concurrency 64
    return _made(source, concurrency >= 64 if source.trace is None else False)


@lru_cache(maxsize=8)
def _made(source: Source, many: bool) -> Workload:
    if source.trace is not None:
        return traces.read(source.trace, seed=source.seed, half=source.half, max_sessions=source.sessions)
    return make(str(source.workload), seed=source.seed, concurrency=64 if many else None, sessions=source.sessions)


# ---- reading the options ----


def _sources(args: argparse.Namespace) -> list[Source]:
    if args.half is not None and not args.trace:
        raise UsageError("--half is for --trace")
    if args.trace:
        return [Source(None, path, args.seed, args.sessions, args.half) for path in traces.distinct(args.trace)]
    names = GRID_WORKLOADS if args.grid else words(args.workload)
    if not names:
        raise UsageError("--workload names none")
    return [Source(name, None, args.seed, args.sessions, None) for name in names]


def _pairs(args: argparse.Namespace) -> list[tuple[int, str]]:
    if (args.grid or args.points is not None) and not (args.capacity is args.concurrency is None):
        raise UsageError("--grid and --points stand for --capacity and --concurrency: give one or the other")
    if args.points is not None:
        pairs = [part.strip().split(":") for part in args.points.split(",") if part.strip()]
        if not pairs or any(len(pair) != 2 for pair in pairs):
            raise UsageError(f"--points: CONCURRENCY:CAPACITY pairs, comma separated, not {args.points!r}")
        return list(dict.fromkeys((_slots(c, "--points"), n.strip()) for c, n in pairs))
    if args.grid:
        return [(c, f"{f:g}F") for c, fs in GRID.items() for f in fs]
    slots = [_slots(c, "--concurrency") for c in ("4" if args.concurrency is None else args.concurrency).split(",")]
    capacities = ("4F" if args.capacity is None else args.capacity).split(",")
    return list(dict.fromkeys((c, n.strip()) for c in slots for n in capacities))


def _slots(text: str, option: str) -> int:
    number = whole(text)
    if number is None or not 1 <= number <= MAX_CONCURRENCY:
        raise UsageError(f"{option}: concurrency is a whole number in 1..{MAX_CONCURRENCY}, not {text.strip()!r}")
    return number


def _tokens(text: str, largest: int) -> int:
    """Tokens of a capacity like 4096, 4096t or 1.5F."""
    unit = largest if text.endswith("F") else 1
    try:
        tokens = int(float(text[:-1] if text.endswith(("F", "t")) else text) * unit)
    except (ValueError, OverflowError):
        tokens = 0
    if tokens < 1:
        raise UsageError(f"capacity: tokens, or times the largest request (2F), more than 0; not {text!r}")
    return tokens


def _name(source: Source) -> str:
    return next(iter(source.label.values()))


def _identity(point: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(point.get(k) for k in ("workload", "trace", "policy", "capacity_tokens", "concurrency"))
