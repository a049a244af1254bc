"""`python -m benchmarks host`: what a host tier saves, by its size and by who may write to it, in the simulator.

Every point is one closed loop on two tiers: an admission mode, a size of the host tier, a number of sessions at a time
(A), a policy. Sizes are given in working sets as published, (A - 1) * mean prompt (EfficientAgent, section 4). A point
is one interleaving of many, and which one it is depends on every millisecond: differences below some 5 % are noise.
"""

import argparse
import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from benchmarks import traces
from benchmarks.measuring import measure_all
from benchmarks.results import Results, UsageError, check_sessions, table, whole, words
from benchmarks.simulate import MAX_CONCURRENCY, Source
from radix_policy.admission import MODES, AdmissionConfig, published_working_set
from radix_policy.config import ConfigError, build
from radix_policy.eviction import POLICIES
from radix_policy.hardware import OffloadCost
from radix_policy.runtime import Runtime
from radix_policy.simulator.engine import CHUNK
from radix_policy.simulator.run import parse_spec
from radix_policy.simulator.tiered_loop import HardwareCosts, TieredLoop
from radix_policy.working_set import ReuseCurve
from radix_policy.workloads import Workload, make
from sglang_scout import plan_hardware
from sglang_scout.plan_report import PlanError

CORES = ("rust", "python")
_TOKENS = ("computed_prefill_tokens", "written_tokens", "restored_tokens")


class Settings(NamedTuple):
    """What is the same for every point of a run."""

    device: str
    core: str
    page_size: int
    chunk: int
    identity: str
    cost: OffloadCost | None  # None: the simulator's own prefill, and restores that cost nothing

    def record(self) -> dict[str, Any]:
        """For the result file."""
        cost = None if self.cost is None else dataclasses.asdict(self.cost)
        return {**self._asdict(), "cost": cost}


class Point(NamedTuple):
    """One run."""

    source: Source
    policy: str
    mode: str
    size: str  # of the host tier, as asked for
    concurrency: int
    admission_chunk: int
    kappa: int
    theta: float

    def key(self) -> dict[str, Any]:
        """What tells the point from others in the result file."""
        named = self._asdict()
        return {**named.pop("source").label, **named}


def add_parser(sub: Any) -> None:
    """Declare the command."""
    parser = sub.add_parser(
        "host",
        help="the host tier in the simulator: admission modes and sizes",
        description="Plays a workload on a device with a host tier behind it (HiCache, write-through) and counts what "
        f"is computed, written and restored. Modes: {', '.join(MODES)}.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--workload", metavar="W", help="generated workload: swe, selector:large")
    what.add_argument("--trace", metavar="FILE", help="recorded trace")
    parser.add_argument("--modes", default=",".join(MODES), metavar="M,M", help="admission modes (default: all)")
    parser.add_argument(
        "--sizes",
        default="0.3,0.5,0.65,0.8,1,1.25,2,3",
        metavar="S,S",
        help="host tier, in working sets (A - 1) x mean prompt, or tokens with a t behind (default: eight sizes)",
    )
    parser.add_argument("--device", default="0.6", metavar="S", help="device pool, in the same units (default 0.6)")
    parser.add_argument("--concurrency", default="16", metavar="A,A", help="sessions at a time (default 16)")
    parser.add_argument("--policies", default="scout", metavar="P,P", help="eviction policies (default scout)")
    parser.add_argument(
        "--core",
        choices=CORES,
        default="rust",
        help="SGLang's tree core: the Rust one orders its host tier by LRU, Python's by the policy (default rust)",
    )
    parser.add_argument("--kappa", default="8", metavar="K,K", help="most new chunks under pressure (default 8)")
    parser.add_argument("--theta", default="0.95", metavar="X,X", help="share of the tier that is full (default 0.95)")
    parser.add_argument(
        "--admission-chunk", default="0", metavar="B,B", help="tokens per chunk of the rule, 0: mean prompt / 32"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the workload (default 1)")
    parser.add_argument("--sessions", type=int, metavar="K", help="only so many sessions")
    parser.add_argument("--identity", choices=("tagged", "inferred"), default="tagged", help="what clients say")
    parser.add_argument("--page-size", type=int, default=1, metavar="P", help="tokens per page (default 1)")
    parser.add_argument("--chunk", type=int, default=CHUNK, metavar="T", help=f"tokens per prefill chunk ({CHUNK})")
    plan_hardware.add_options(parser)
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes (default 1)")
    parser.add_argument("--json", metavar="OUT", help="write the result file; a stopped run goes on from it")


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    settings, points = plan(args)
    results = Results(
        "host",
        args.argv,
        args.json,
        seed=args.seed,
        identity=tuple(points[0].key()),
        settings=settings.record() | traces.digests([args.trace] if args.trace else ()),
    )
    stopped = measure_all(results, points, measure, settings, jobs=args.jobs, line=_line)
    if stopped is not None:
        return stopped
    print(report(points, results.points))
    return 0


def _line(point: Point, figures: dict[str, Any]) -> str:
    what = f"A={point.concurrency} {point.size} {point.policy} {point.mode}"
    return f"{what}: {figures['computed_prefill_tokens']:,} tokens computed"


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
    modes, policies, sizes = words(args.modes), words(args.policies), words(args.sizes)
    for mode in modes:
        if mode not in MODES:
            raise UsageError(f"--modes: no mode {mode!r}; known: {', '.join(MODES)}")
    for policy in policies:
        spec = parse_spec(policy)
        if spec.name not in POLICIES:
            raise UsageError(f"--policies: {policy!r} has no host tier: it knows the future, pins, or knows the law")
        Runtime(spec.name, spec.config)
    lists = {"--modes": modes, "--policies": policies, "--sizes": sizes}
    numbers = {
        "--concurrency": [_whole(text, "--concurrency", 2, MAX_CONCURRENCY) for text in words(args.concurrency)],
        "--admission-chunk": [_whole(text, "--admission-chunk", 0, 1 << 20) for text in words(args.admission_chunk)],
        "--kappa": [_whole(text, "--kappa", 0, 1 << 20) for text in words(args.kappa)],
    }
    thetas = [_share(text) for text in words(args.theta)]
    for option, given in (lists | numbers | {"--theta": thetas}).items():
        if not given:
            raise UsageError(f"{option} names none")
    if args.trace is not None:
        traces.distinct([args.trace])
    source = Source(args.workload, args.trace, args.seed, args.sessions, None)
    settings = Settings(args.device, args.core, args.page_size, args.chunk, args.identity, _cost(args))
    points = [
        Point(source, policy, mode, size, slots, b, kappa, theta)
        for slots in numbers["--concurrency"]
        for policy in policies
        for size in sizes
        for b in numbers["--admission-chunk"]
        for kappa in numbers["--kappa"]
        for theta in thetas
        for mode in modes
    ]
    for point in points:
        _sizes(point, settings)
    return settings, points


def report(points: Sequence[Point], found: Sequence[dict[str, Any]]) -> str:
    """Per concurrency and policy: what each mode computes, against the mode `none`, and what moves between tiers."""
    by_key = {_name(p): p for p in found}
    blocks = []
    for slots, policy in dict.fromkeys((p.concurrency, p.policy) for p in points):
        own = [p for p in points if (p.concurrency, p.policy) == (slots, policy)]
        rows = []
        for point in own:
            figures = by_key[_name(point.key())]
            plain = by_key.get(_name({**point.key(), "mode": "none"}))
            change = math.nan
            if plain is not None:
                change = figures["computed_prefill_tokens"] / max(plain["computed_prefill_tokens"], 1) - 1
            rows.append(
                [
                    _Text(point.size),
                    _Fixed(figures["gamma_h"]),
                    point.mode,
                    *([point.kappa, point.theta, point.admission_chunk] if _swept(points) else []),
                    *(_Thousands(figures[name]) for name in _TOKENS),
                    _Change(change),
                    figures["declined_requests"],
                    _Share(figures.get("declined_useless", math.nan)),
                    _Thousands(figures["makespan_s"]),
                ]
            )
        first = by_key[_name(own[0].key())]
        swept = ["kappa", "theta", "b"] if _swept(points) else []
        heads = [
            "size",
            "gamma_H",
            "mode",
            *swept,
            "computed",
            "written",
            "restored",
            "vs none",
            "declined",
            "useless",
            "seconds",
        ]
        blocks.append(
            f"A={slots}, {policy}: working set {first['working_set_tokens']:,} tokens, device "
            f"{first['capacity_tokens']:,} (gamma_G {first['gamma_g']:.2f}), {first['prompt_tokens']:,} prompt tokens\n"
            + table(heads, rows)
        )
    return "\n\n".join(blocks)


def _swept(points: Sequence[Point]) -> bool:
    return len({(p.kappa, p.theta, p.admission_chunk) for p in points}) > 1


def _name(point: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(
        point[k] for k in ("policy", "mode", "size", "concurrency", "admission_chunk", "kappa", "theta") if k in point
    )


class _Text(float):
    """A size as it was given, in a column of numbers."""

    def __new__(cls, text: str) -> "_Text":
        made = super().__new__(cls, float(text.rstrip("t")))
        made.text = text  # type: ignore[attr-defined]
        return made

    def __str__(self) -> str:
        return str(self.text)  # type: ignore[attr-defined]


class _Fixed(float):
    def __str__(self) -> str:
        return f"{self:.2f}"


class _Thousands(float):
    def __str__(self) -> str:
        return f"{self:,.0f}"


class _Change(float):
    def __str__(self) -> str:
        return "" if math.isnan(self) else f"{100 * self:+.1f} %"


class _Share(float):
    def __str__(self) -> str:
        return "" if math.isnan(self) else f"{100 * self:.0f} %"


# ---- running ----


def measure(point: Point, settings: Settings) -> dict[str, Any]:
    """Run one point."""
    workload = _workload(point.source)
    working_set, device, host = _sizes(point, settings)
    spec = parse_spec(point.policy)
    loop = TieredLoop(
        workload,
        spec.name,
        capacity=device,
        host_capacity=host,
        concurrency=point.concurrency,
        admission=_admission(point),
        config=spec.config,
        page_size=settings.page_size,
        chunk=settings.chunk,
        trims=spec.trims,
        ends=spec.ends,
        identity=settings.identity,
        forgets=settings.core == "rust",
        ordered=settings.core == "python",
        costs=None if settings.cost is None else HardwareCosts(settings.cost),
    )
    outcome = loop.run()
    engine = loop.engine
    return {
        "capacity_tokens": device,
        "host_tokens": host,
        "working_set_tokens": round(working_set),
        "gamma_g": round(point.concurrency * _mean_prompt(workload) / device, 4),
        "gamma_h": round(working_set / host, 4),
        "measured_working_set_tokens": round(engine.admission.reuse_distance),
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "hit_rate": outcome.hit_rate,
        "computed_prefill_tokens": outcome.prompt_tokens - outcome.cached_tokens,
        "written_tokens": engine.tree.written,
        "restored_tokens": engine.tree.restored,
        "refused_tokens": engine.tree.refused,
        "declined_requests": engine.declined_requests,
        **declined_reuse(workload, outcome.calls, engine.declines, host),
        "requests": outcome.requests,
        "unserved_requests": outcome.unserved,
        "makespan_s": round(outcome.seconds, 1),
    }


def declined_reuse(
    workload: Workload, order: Sequence[int], declines: Mapping[str, int], host_tokens: int
) -> dict[str, Any]:
    """How far away the next use of what was declined lies, against the tier (EfficientAgent, appendix D).

    `declined_useless`: share of the declined tokens that are used again only when as many others as the tier holds have
    been used, or never: those that Proposition 1 lets a tier decline for nothing. `declined_distance`: the median of
    those that are used again, in tiers.
    """
    if not declines:
        return {}
    calls = [call for session in workload.sessions for call in session.calls]
    curve = ReuseCurve()
    found: list[tuple[int, int]] = []  # (distance, tokens)
    total = 0
    for number in order:
        call, before = calls[number], len(curve.pieces)
        curve.call(call.prompt, call.prompt_tokens, call.output, call.output_tokens)
        if f"r{number}" in declines:
            total += call.prompt_tokens + call.output_tokens - 1 - declines[f"r{number}"]
        at = 0
        for (distance, tokens), use in zip(curve.pieces[before:], curve.users[before:]):
            kept = declines.get(f"r{order[use // 2]}")  # a call is two uses
            if kept is not None and at + tokens > kept:
                skip = max(kept - at, 0)
                found.append((distance + skip, tokens - skip))
            at += tokens
    again = sum(tokens for _, tokens in found)
    late = sum(tokens for distance, tokens in found if distance >= host_tokens)
    half, median = again / 2, None
    for distance, tokens in sorted(found):
        half -= tokens
        if half <= 0:
            median = round(distance / host_tokens, 3)
            break
    return {"declined_useless": round((total - again + late) / max(total, 1), 4), "declined_distance": median}


def _admission(point: Point) -> AdmissionConfig:
    keys = {
        "admission": point.mode,
        "admission_chunk": point.admission_chunk,
        "admission_kappa": point.kappa,
        "admission_theta": point.theta,
    }
    return build(keys, AdmissionConfig)[0]


def _cost(args: argparse.Namespace) -> OffloadCost | None:
    try:
        plan_hardware.check(args)
        return plan_hardware.cost_of(args, plan_hardware.model_of(args), args.tp or 1, None)
    except PlanError as error:
        raise UsageError(str(error)) from None


def _sizes(point: Point, settings: Settings) -> tuple[float, int, int]:
    """Tokens: of the published working set, of the device, of the host tier."""
    workload = _workload(point.source)
    working_set = published_working_set(point.concurrency, _mean_prompt(workload))
    device = _tokens(settings.device, working_set, "--device")
    if device <= workload.largest:
        raise UsageError(
            f"--device {settings.device} is {device:,} tokens at A={point.concurrency}: the largest call alone takes "
            f"{workload.largest:,}"
        )
    return working_set, device, _tokens(point.size, working_set, "--sizes")


@lru_cache(maxsize=4)
def _workload(source: Source) -> Workload:
    if source.trace is not None:
        return traces.read(source.trace, seed=source.seed, max_sessions=source.sessions)
    return make(str(source.workload), seed=source.seed, sessions=source.sessions)


def _mean_prompt(workload: Workload) -> float:
    prompts = [call.prompt_tokens for session in workload.sessions for call in session.calls]
    return sum(prompts) / max(len(prompts), 1)


# ---- reading the options ----


def _tokens(text: str, working_set: float, option: str) -> int:
    """Tokens of a size like 0.5 (working sets) or 300000t."""
    unit = 1.0 if text.endswith("t") else working_set
    try:
        tokens = float(text.removesuffix("t")) * unit
    except ValueError:
        tokens = math.nan
    if not 1 <= tokens <= 1e12:
        raise UsageError(f"{option}: working sets, or tokens with a t behind, more than 0; not {text!r}")
    return int(tokens)


def _whole(text: str, option: str, low: int, high: int) -> int:
    number = whole(text)
    if number is None or not low <= number <= high:
        raise UsageError(f"{option}: a whole number in {low}..{high}, not {text!r}")
    return number


def _share(text: str) -> float:
    try:
        (config,) = build({"admission_theta": float(text)}, AdmissionConfig)
    except (ValueError, ConfigError):
        raise UsageError(f"--theta: a number in 0..1, not {text!r}") from None
    return config.admission_theta
