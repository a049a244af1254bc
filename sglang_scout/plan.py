"""`sglang-scout plan --trace FILE`: how much cache a recorded workload can use, and how much host memory that is.

From the exact stack-distance curve of the calls (radix_policy/working_set.py), in the order in which `--concurrency`
sessions at a time play them. A size is that of the tier that holds most: the device's pool, or the host tier, in which
everything on the device has its copy, too (HiCache's write-through).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radix_policy.simulator import Study
from radix_policy.working_set import ReuseCurve, Stability, published_working_set, stability
from radix_policy.workloads import Workload, WorkloadError, read_trace

GAIN = 0.01  # of all prompt tokens: what is too little to buy memory for
FACTORS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # sizes shown, in largest calls
GIB = 1 << 30
_NAMED = 5  # sessions that break their own prefix


class PlanError(ValueError):
    """What was asked for cannot be planned; one line."""


def add_parser(commands: Any) -> None:
    """Options of `sglang-scout plan`."""
    parser = commands.add_parser("plan", help="from a recorded trace: how much cache pays, in tokens and GiB")
    parser.add_argument("--trace", required=True, metavar="FILE", help="gzip JSON lines, as the benchmarks read them")
    parser.add_argument("--concurrency", type=int, default=16, metavar="A", help="sessions at a time (default: 16)")
    parser.add_argument(
        "--bytes-per-token",
        type=int,
        metavar="B",
        help="KV bytes per token and rank: 2 x layers x KV heads per rank x head size x bytes per number",
    )
    parser.add_argument("--device-tokens", type=int, metavar="N", help="the server's pool (max_total_num_tokens)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The plan, JSON-ready; PlanError in one line."""
    for name, least in (("concurrency", 1), ("bytes_per_token", 1), ("device_tokens", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise PlanError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    if not Path(args.trace).is_file():
        raise PlanError(f"--trace {args.trace}: no such file")
    try:
        workload = read_trace(args.trace, seed=0)
    except (WorkloadError, OSError, OverflowError, RecursionError, UnicodeError) as error:
        raise PlanError(f"--trace: {' '.join(str(error).split())}") from None
    return plan(workload, args.concurrency, args.bytes_per_token, args.device_tokens)


def plan(
    workload: Workload, concurrency: int, bytes_per_token: int | None = None, device_tokens: int | None = None
) -> dict[str, Any]:
    """Curve, working sets, stability of prompts, and one line of advice."""
    calls = [call for session in workload.sessions for call in session.calls]
    everything = sum(call.prompt_tokens + call.output_tokens for call in calls)
    order = Study(workload).order(everything + 1, concurrency).calls  # nothing is evicted: only who comes when
    curve = ReuseCurve()
    for number in order:
        call = calls[number]
        curve.call(call.prompt, call.prompt_tokens, call.output, call.output_tokens)
    sizes = [int(factor * workload.largest) for factor in FACTORS]
    sizes = [size for size in sizes if size < curve.tokens] + [curve.tokens]
    if device_tokens is not None:
        sizes = sorted({*sizes, device_tokens})
    needs = sorted(need for need in curve.needs if need)
    kept = [stability(session) for session in workload.sessions]
    enough = max(curve.enough(GAIN), workload.largest)
    return {
        "calls": curve.calls,
        "sessions": len(workload.sessions),
        "prompt_tokens": curve.prompt_tokens,
        "reachable_tokens": curve.reachable,
        "largest_call": workload.largest,
        "bytes_per_token": bytes_per_token,
        "device_tokens": device_tokens,
        "curve": [
            {"tokens": size, "found_tokens": found, "computed_prefill_tokens": curve.prompt_tokens - found}
            for size, found in zip(sizes, curve.found(sizes))
        ],
        "working_set": {
            "published": round(published_working_set(concurrency, curve.prompt_tokens / max(curve.calls, 1))),
            "measured_median": needs[len(needs) // 2] if needs else 0,
            "measured_p90": needs[len(needs) * 9 // 10] if needs else 0,
        },
        "stability": _stability(kept),
        "enough_tokens": enough,
        "advice": _advice(enough, curve, bytes_per_token, device_tokens),
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


def _advice(enough: int, curve: ReuseCurve, bytes_per_token: int | None, device_tokens: int | None) -> str:
    if curve.reachable == 0:
        return "no prompt continues another one: no cache of any size helps"
    share = curve.found([enough])[0] / curve.prompt_tokens
    text = f"memory pays up to {enough:,} tokens ({share:.1%} found; more memory finds less than {GAIN:.0%} more)"
    if device_tokens is None:
        return text + "; --device-tokens says whether that needs a host tier"
    if enough <= device_tokens:
        return text + ", which the device's pool holds: a host tier adds little"
    text += ", a host tier of that size: --enable-hierarchical-cache"
    if bytes_per_token is None:
        return text + f" --hicache-ratio {enough / device_tokens:.2f}"
    return text + f" --hicache-size {-(-enough * bytes_per_token // 10**9)} (GB per rank)"


def lines(report: dict[str, Any]) -> list[str]:
    """The plan as text."""
    prompt, size = report["prompt_tokens"], report["bytes_per_token"]
    out = [
        f"{report['calls']:,} calls of {report['sessions']:,} sessions, {prompt:,} prompt tokens, the largest call "
        f"{report['largest_call']:,}; an endless cache finds {report['reachable_tokens'] / max(prompt, 1):.1%}",
        "",
        f"{'cache, tokens':>16} {'GiB/rank':>9} {'found':>7} {'computed prefill':>17}",
    ]
    for point in report["curve"]:
        mark = "  <- device" if point["tokens"] == report["device_tokens"] else ""
        gib = f"{point['tokens'] * size / GIB:.1f}" if size else "-"
        share = point["found_tokens"] / max(prompt, 1)
        out.append(f"{point['tokens']:>16,} {gib:>9} {share:>7.1%} {point['computed_prefill_tokens']:>17,}{mark}")
    sets, kept = report["working_set"], report["stability"]
    out += [
        "",
        f"working set: {sets['published']:,} tokens as published, (A - 1) x mean prompt; measured from call to call "
        f"{sets['measured_median']:,} (median), {sets['measured_p90']:,} (90 %)",
    ]
    if kept["kept"] is not None:
        out.append(
            f"prompts keep {kept['kept']:.1%} of themselves from the agent's last call, "
            f"{kept['kept_with_output']:.1%} with its output; {kept['broken_calls']:,} of {kept['calls']:,} calls "
            "rewrite what came before"
        )
    out += [
        f"  {s['session']}: {s['broken_calls']} of {s['calls']} calls, {s['lost_tokens']:,} tokens lost"
        for s in kept["sessions_that_break_their_prefix"]
    ]
    return [*out, "", report["advice"]]


def command(args: argparse.Namespace) -> int:
    """Print the plan; exit status."""
    report = run(args)
    print(json.dumps(report, indent=2) if args.json else "\n".join(lines(report)))
    return 0
