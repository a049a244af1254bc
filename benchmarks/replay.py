"""A workload or a trace against a running SGLang server, in a closed loop: what is its cache worth?

Hit rates come from the engine's own counters, times from this client's clock. Warm-up requests are not counted and the
cache is flushed before the first call. With `--json OUT` every finished call is kept in `OUT`'s journal, so that a run
that was stopped (Ctrl-C, a kill) goes on at its first unfinished session when the same command is given again.
"""

import argparse
import asyncio
from typing import Any

from benchmarks import traces
from benchmarks.client import SILENCE_TIMEOUT_S, ServerGone
from benchmarks.measure import Options, PointResults, measure, model_of, run_stoppable
from benchmarks.pool import Stopped, status_of
from benchmarks.results import UsageError, progress, table
from benchmarks.sources import Source, add_options, load, needs_tokenizer, parse_concurrency, parse_tags


def add_parser(sub: Any) -> None:
    """Options of `python -m benchmarks replay`."""
    parser = sub.add_parser("replay", help="a workload or trace against a running server")
    parser.add_argument("--url", required=True, help="the server, e.g. http://127.0.0.1:30000")
    add_options(parser)
    parser.add_argument("--concurrency", default="1", metavar="N", help="sessions at once (default: 1)")
    parser.add_argument("--api-key", help="bearer key of the server")
    parser.add_argument(
        "--timeout",
        type=float,
        default=SILENCE_TIMEOUT_S,
        help="seconds without a byte before the server counts as gone",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--json", metavar="OUT", help="result file; also makes the run resumable")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 done, 1 the server went away (what was measured is kept), 2 it cannot be reached, 130, 143."""
    concurrency = parse_concurrency(args.concurrency)
    if len(concurrency) != 1:
        raise UsageError("--concurrency: one number; run the command once for each")
    if not args.url.startswith(("http://", "https://")):
        raise UsageError(f"--url: a URL such as http://127.0.0.1:30000, not {args.url!r}")
    if not args.timeout > 0:
        raise UsageError("--timeout must be above 0")
    options = Options(
        concurrency=concurrency[0],
        time_scale=args.time_scale,
        tags=parse_tags(args.tags),
        seed=args.seed,
        silence_timeout_s=args.timeout,
        api_key=args.api_key,
        quiet=args.quiet,
    )
    url = args.url.rstrip("/")
    tokenizer = args.tokenizer
    if needs_tokenizer(args) and tokenizer is None:
        tokenizer = asyncio.run(model_of(url, options))
    source = load(args, concurrency[0], tokenizer)
    settings = traces.digests([args.trace] if args.trace else [])
    results = PointResults("replay", args.argv, args.json, seed=args.seed, source=describe(source), settings=settings)
    try:
        point = run_stoppable(lambda: measure(url, source, options, results))
    except ServerGone as error:
        return _stopped(args, f"{error}; {_kept(results)}", 1)
    except KeyboardInterrupt:
        return _stopped(args, f"interrupted; {_kept(results)}", 130)
    except Stopped as error:
        return _stopped(args, f"{error}; {_kept(results)}", status_of(error))
    results.finish()
    if not point["calls"]:
        return _stopped(args, f"no call was served; {'; '.join(point['refusals'])}", 1)
    print(point_table([point]))
    for line in remarks(point):
        print(line)
    return 0


def describe(source: Source) -> dict[str, Any]:
    """The source for the result file: what it is, its size, its true transition rows."""
    rows = [[round(p, 6) for p in row] for row in source.transitions] if source.transitions is not None else None
    return {
        **source.label,
        "sessions": source.sessions,
        "calls": source.calls,
        "F": source.largest,
        "agents": list(source.agents),
        "transitions": rows,
        "facts": source.facts,
    }


def point_table(points: list[dict[str, Any]]) -> str:
    """The measured points side by side."""
    headers = [
        "policy",
        "capacity",
        "C",
        "calls",
        "hit %",
        "computed",
        "TTFT mean",
        "p50",
        "p99 ms",
        "turn mean",
        "turns/s",
    ]
    return table(headers, [_row(p) for p in points])


def _row(p: dict[str, Any]) -> list[Any]:
    times = [p["ttft_ms"]["mean"], p["ttft_ms"]["p50"], p["ttft_ms"]["p99"], p["turn_ms"]["mean"]]
    return [
        p["policy"] + ("*" if p.get("partial") else ""),
        p["capacity_tokens"],
        p["concurrency"],
        p["calls"],
        round(100 * p["hit_rate"], 2),
        p["computed_prefill_tokens"],
        *(round(t, 1) if t is not None else float("nan") for t in times),
        round(p["turns_per_s"], 3),
    ]


def remarks(point: dict[str, Any]) -> list[str]:
    """What a reader of the figures must know about how they came about."""
    lines = []
    if point.get("partial"):
        lines.append(f"{point['policy']}: partial, {point['sessions']} sessions finished")
    if point["refused_calls"]:
        reasons = "; ".join(f"{n} x {reason}" for reason, n in point["refusals"].items())
        lines.append(
            f"{point['policy']}: {point['refused_calls']} sessions were cut short by a refused call: {reasons}"
        )
    if point["short_calls"]:
        lines.append(f"{point['policy']}: {point['short_calls']} calls gave fewer tokens than asked for")
    if point["segments"] > 1:
        lines.append(f"{point['policy']}: run in {point['segments']} parts, each with a cold cache at its start")
    return lines


def _kept(results: PointResults) -> str:
    if results.path is None:
        return "nothing is kept without --json"
    done = sum(p["calls"] for p in results.points if p.get("partial"))
    return f"{done} finished calls are in {results.path}, marked partial; the same command goes on from there"


def _stopped(args: argparse.Namespace, text: str, status: int) -> int:
    progress(f"python -m benchmarks replay: {text}")
    return status
