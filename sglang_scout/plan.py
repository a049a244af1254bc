"""`sglang-scout plan --trace FILE | --url U`: how much cache a workload can use, and how much host memory that is.

From the stack-distance curve of the calls: exact (radix_policy/working_set.py), or sampled (sampled_curve.py) with
`--sample N` and on a running server. A trace is played in the order in which `--concurrency` sessions at a time make
their calls; host tiers are also played on the simulated engine (simulator/tiers.py), one closed loop for each size: who
calls between two calls of a session depends on how long the others compute, so near the working set no curve of one
order tells what another size computes. What the numbers mean: plan_report.py.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radix_policy.curves import Curve
from radix_policy.sampled_curve import SampledCounts, SampledCurve, ids_of
from radix_policy.simulator import Study
from radix_policy.simulator.tiered_loop import HardwareCosts, TieredLoop
from radix_policy.working_set import ReuseCurve, Stability, stability
from radix_policy.workloads import Workload, WorkloadError, read_trace
from sglang_scout import plan_hardware, plan_plot, plan_server
from sglang_scout.plan_report import GIB, Deployment, PlanError, build, lines

__all__ = ["PlanError", "add_parser", "command", "plan", "run"]

CONCURRENCY = 16  # sessions at a time, where a trace's is not given
CHUNK = 16  # tokens, of a sampled trace
# of what is given as a whole number
_MOST = {
    "concurrency": 4096,
    "bytes_per_token": 10**9,
    "device_tokens": 10**12,
    "sample": 10**8,
    "page_size": 10**6,
}
_MOST_TOKENS = 10**15  # of a host tier
_NAMED = 5  # sessions that break their own prefix


def add_parser(commands: Any) -> None:
    """Options of `sglang-scout plan`."""
    parser = commands.add_parser("plan", help="from a trace or a running server: how much cache pays, tokens and GiB")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", help="gzip JSON lines, as the benchmarks read them")
    source.add_argument("--url", metavar="U", help="a running server with a policy of sglang-scout")
    parser.add_argument("--api-key", metavar="KEY", help="of that server")
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="A",
        help=f"sessions at a time (default: {CONCURRENCY} for a trace, unknown for a server)",
    )
    parser.add_argument("--sample", type=int, metavar="N", help="a sampled curve, from at most N chunks of the trace")
    parser.add_argument(
        "--page-size", type=int, metavar="N", help="of the server that a trace is planned for (default: 1)"
    )
    parser.add_argument("--device-tokens", type=int, metavar="N", help="the server's pool (max_total_num_tokens)")
    parser.add_argument("--host-tokens", metavar="N,N", help="host tiers to predict, in tokens")
    parser.add_argument("--host-gib", metavar="N,N", help="the same in GiB per rank")
    parser.add_argument(
        "--bytes-per-token",
        type=int,
        metavar="B",
        help="KV bytes per token and rank: 2 x layers x KV heads per rank x head size x bytes per number "
        "(default: the model's, or the server's)",
    )
    parser.add_argument("--no-play", action="store_true", help="host tiers by the curve alone: faster, less exact")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--plot", metavar="FILE.png", help="draw it, too (needs matplotlib)")
    plan_hardware.add_options(parser)


def run(args: argparse.Namespace) -> tuple[dict[str, Any], Curve]:
    """The plan, JSON-ready, and the curve; PlanError in one line."""
    for name in ("concurrency", "bytes_per_token", "device_tokens", "sample", "page_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise PlanError(f"{plan_hardware.flag(name)} must be at least 1, not {value}")
        if value is not None and value > _MOST[name]:
            raise PlanError(f"{plan_hardware.flag(name)} must be at most {_MOST[name]:,}")
    plan_hardware.check(args)
    if args.plot is not None:
        plan_plot.check(Path(args.plot))
    model = plan_hardware.model_of(args)
    hosts = (_sizes("--host-tokens", args.host_tokens, whole=True), _sizes("--host-gib", args.host_gib))
    if args.trace is not None and args.device_tokens is None and any(hosts):
        raise PlanError("--host-tokens and --host-gib need --device-tokens: what the device holds is not restored")
    running = None
    if args.url is not None:
        if args.sample is not None:
            raise PlanError("--sample is for --trace; a server's sample is set by its key curve_samples")
        if args.page_size is not None:
            raise PlanError("--page-size is for --trace; a server knows its own")
        running = plan_server.ask(args.url, args.api_key)
    ranks = args.tp or (running.ranks if running is not None else 1)
    size: float | None = args.bytes_per_token
    if size is None:
        size = model.kv_bytes(ranks) if model is not None else running.bytes_per_token if running is not None else None
    deployment = Deployment(
        concurrency=args.concurrency if running is not None else args.concurrency or CONCURRENCY,
        device_tokens=args.device_tokens or (running.device_tokens if running is not None else None),
        bytes_per_token=size,
        host_tokens=_host_tokens(*hosts, size) or ((running.host_tokens,) if running and running.host_tokens else ()),
        cost=plan_hardware.cost_of(args, model, ranks, size),
    )
    if running is not None:
        source = {"method": "server", "url": args.url, "sample": _sample(running.curve), "stability": None}
        return build(running.curve, deployment, source, running.curve.largest), running.curve
    workload, pages = _read(args.trace), args.page_size or 1
    report, curve = plan(workload, deployment, page_size=pages, samples=args.sample)
    if args.sample is None and not args.no_play:
        play(report["host"], workload, deployment, pages)
    return report, curve


def _read(trace: str) -> Workload:
    if not Path(trace).is_file():
        raise PlanError(f"--trace {trace}: no such file")
    try:
        return read_trace(trace, seed=0)
    except (WorkloadError, OSError, OverflowError, RecursionError, UnicodeError) as error:
        raise PlanError(f"--trace: {' '.join(str(error).split())}") from None


def _sizes(flag: str, text: str | None, whole: bool = False) -> tuple[float, ...]:
    try:
        sizes = tuple((int if whole else float)(part) for part in text.split(",")) if text is not None else ()
    except ValueError:
        sizes = (0,)
    if not all(0 < size < 1e15 for size in sizes):
        kind = "whole numbers" if whole else "finite numbers"
        raise PlanError(f"{flag} must be {kind} above 0, with commas between them, not {text!r}")
    return sizes


def _host_tokens(tokens: Sequence[float], gib: Sequence[float], size: float | None) -> tuple[int, ...]:
    if gib and size is None:
        raise PlanError("--host-gib needs --bytes-per-token, or the model's shape")
    sizes = {*map(int, tokens), *(int(n * GIB / size) for n in gib if size is not None)}
    if 0 in sizes:
        raise PlanError("--host-gib: smaller than one token")
    if sizes and max(sizes) > _MOST_TOKENS:
        raise PlanError(f"--host-tokens, --host-gib: at most {_MOST_TOKENS:,} tokens")
    return tuple(sorted(sizes))


def plan(
    workload: Workload, deployment: Deployment, *, page_size: int = 1, samples: int | None = None
) -> tuple[dict[str, Any], Curve]:
    """Curve, working sets, stability of prompts, and one line of advice for a trace; `samples`: None is exact."""
    calls = [call for session in workload.sessions for call in session.calls]
    everything = sum(call.prompt_tokens + call.output_tokens for call in calls) + page_size + 1
    concurrency = deployment.concurrency or CONCURRENCY
    # Who begins and ends when: in the device's pool, where calls wait for room, or one that never is too small.
    outcome = Study(workload, page_size=page_size).order(deployment.device_tokens or everything, concurrency)
    if not outcome.requests:
        asked = f"--device-tokens {deployment.device_tokens}, --page-size {page_size}"
        raise PlanError(f"{asked}: no call of the trace fits")
    events = [(event // 2, event % 2 == 1) for event in outcome.log[::2]]
    curve: Curve
    sample = None
    if samples is None:
        curve = exact = ReuseCurve(page_size)
        for number, ends in events:
            call = calls[number]
            if ends:
                exact.finish(number, call.prompt + call.output, call.prompt_tokens + call.output_tokens)
            else:
                exact.start(number, call.prompt, call.prompt_tokens)
    else:
        sampled = SampledCurve(-(-CHUNK // page_size) * page_size, samples)
        for number, ends in events:
            call = calls[number]
            if ends:
                sampled.finish(number, ids_of(call.prompt + call.output))
            else:
                sampled.start(number, ids_of(call.prompt))
        curve = counts = sampled.counts()
        sample = _sample(counts)
    source = {
        "method": "exact" if samples is None else "sampled",
        "sessions": len(workload.sessions),
        "calls_too_large": outcome.unserved,
        "sample": sample,
        "stability": _stability([stability(session) for session in workload.sessions]),
    }
    return build(curve, deployment, source, workload.largest), curve


def play(rows: list[dict[str, Any]], workload: Workload, deployment: Deployment, page_size: int = 1) -> None:
    """Add what a simulated engine with stock LRU and such a host tier computes and restores; a line each to stderr."""
    for number, row in enumerate(rows, 1):
        loop = TieredLoop(
            workload,
            "lru",
            capacity=deployment.device_tokens or 0,
            host_capacity=row["tokens"],
            concurrency=deployment.concurrency or CONCURRENCY,
            costs=None if deployment.cost is None else HardwareCosts(deployment.cost),
            page_size=page_size,
        )
        outcome = loop.run()
        row["played_computed_prefill_tokens"] = outcome.prompt_tokens - outcome.cached_tokens
        row["played_restored_tokens"] = loop.engine.tree.restored
        print(f"played {number} of {len(rows)} host tiers: {row['tokens']:,} tokens", file=sys.stderr, flush=True)


def _sample(counts: SampledCounts) -> dict[str, Any]:
    return {
        "chunk": counts.chunk,
        "entries": counts.entries,
        "rate": counts.rate,
        "depth_tokens": counts.depth,
    }


def _stability(kept: Sequence[Stability]) -> dict[str, Any]:
    tokens = sum(s.prompt_tokens for s in kept)
    breakers = sorted((s for s in kept if s.broken), key=lambda s: (-s.lost, s.session))
    return {
        "calls": sum(s.calls for s in kept),
        "kept": sum(s.kept for s in kept) / tokens if tokens else None,
        "kept_with_output": sum(s.kept_with_output for s in kept) / tokens if tokens else None,
        "broken_calls": sum(s.broken for s in kept),
        "sessions_that_break_their_prefix": [
            {"session": s.session, "broken_calls": s.broken, "calls": s.calls, "lost_tokens": s.lost}
            for s in breakers[:_NAMED]
        ],
    }


def command(args: argparse.Namespace) -> int:
    """Print the plan; exit status."""
    report, curve = run(args)
    if args.plot is not None:
        plan_plot.plot(report, curve, Path(args.plot))
    print(json.dumps(report, indent=2) if args.json else "\n".join(lines(report)))
    return 0
