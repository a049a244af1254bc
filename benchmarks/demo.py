"""The demonstration: six agents of a travel desk on real SGLang servers on this machine, under LRU and under scout.

Real prompts (system text, tool schemas, examples), a real tokenizer and chat template, a tiny model made here. One
server per policy, the same sessions on each, a pool of three times the largest request: too small for the prompts of
all agents, so which one is dropped decides what must be computed again. Sized to take some five minutes on two cores.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.agents.text import TOPOLOGIES
from benchmarks.compare import MODELS, Plan, compare, guarded, outputs_line, render, time_spent
from benchmarks.measure import Options, PointResults
from benchmarks.replay import describe
from benchmarks.results import UsageError, canonical_command, progress, read
from benchmarks.sources import TEXT, Source, load, parse_capacities, parse_concurrency, parse_tags
from launch.tiny_model import cached as tiny_model

RESULT = "demo.json"


def add_parser(sub: Any) -> None:
    """Options of `python -m benchmarks demo`."""
    parser = sub.add_parser("demo", help="the six-agent workload on a real server under lru and scout, with a report")
    parser.add_argument("--out", default="out/demo", metavar="DIR", help="result, logs and report (default: out/demo)")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="selector", help="who calls whom (default: selector)")
    parser.add_argument("--policies", default="lru,scout", help="default: lru,scout")
    parser.add_argument("--sessions", type=int, default=4, metavar="K", help="sessions of 20 to 28 calls (default: 4)")
    parser.add_argument("--max-calls", type=int, metavar="M", help="only the first M calls")
    parser.add_argument("--max-total-tokens", default="3F", metavar="N", help="KV pool: tokens or 2F (default: 3F)")
    parser.add_argument("--concurrency", default="1", metavar="N", help="sessions at once (default: 1)")
    parser.add_argument("--time-scale", type=float, default=0.05, help="factor on think and tool times (default: 0.05)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model-path", metavar="M", help=f"default: the tiny model, made under {MODELS}")
    parser.add_argument("--port", type=int, help="port of the servers (default: a free one)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(workload=None, trace=None, tags="agent,session", tokenizer=None)


def run(args: argparse.Namespace) -> int:
    """Exit status as of `compare`."""
    begin = time.monotonic()
    args.workload = TEXT + args.topology
    policies = tuple(p.strip() for p in args.policies.split(",") if p.strip())
    if not policies or len(set(policies)) != len(policies):
        raise UsageError(f"--policies: different names separated by commas, not {args.policies!r}")
    concurrencies = parse_concurrency(args.concurrency)
    if args.port is not None and not 0 < args.port < 65536:
        raise UsageError(f"--port must be in 1..65535, not {args.port}")
    out = Path(args.out)
    spent: dict[str, float] = {}
    model = args.model_path or str(_timed(spent, "making the model", lambda: tiny_model(MODELS)))
    source = _timed(spent, "writing the prompts", lambda: load(args, max(concurrencies), model))
    plan = Plan(
        model_path=model,
        policies=policies,
        capacities=parse_capacities(args.max_total_tokens, source.largest),
        concurrencies=tuple(concurrencies),
        options=Options(
            concurrency=concurrencies[0],
            time_scale=args.time_scale,
            tags=parse_tags(args.tags),
            seed=args.seed,
            quiet=args.quiet,
        ),
        port=args.port,
        log_folder=out,
    )
    _forget(out / RESULT, args)
    print(introduction(source, plan), flush=True)
    results = PointResults("demo", args.argv, out / RESULT, seed=args.seed, source=describe(source))
    status = guarded("demo", lambda: compare(plan, source, results), results)
    if status:
        return status
    print("\n" + render(results.points, policies[0]))
    print("\n" + outputs_line(results.document["outputs"]))
    spent |= time_spent(results)
    results.document["seconds"] = {kind: round(seconds, 1) for kind, seconds in spent.items()}
    results.save()
    page = _timed(spent, "drawing the report", lambda: _report(results.document, out))
    spent["all of the demo"] = time.monotonic() - begin
    print("\nwhere the time went:")
    for kind, seconds in spent.items():
        print(f"{seconds:7.1f} s  {kind}")
    print(f"\nreport: {page}")
    return 1 if results.document["outputs"]["different"] else 0


def introduction(source: Source, plan: Plan) -> str:
    """What is about to happen, in a few lines."""
    pools = ", ".join(f"{c:,} tokens ({c / source.largest:.3g}F)" for c in plan.capacities)
    anchors = source.facts.get("anchor_tokens") or {}
    lines = [
        f"{source.name}: {len(source.agents)} agents, {source.sessions} sessions, {source.calls} calls",
        f"fixed prompt parts: {', '.join(f'{a} {n}' for a, n in anchors.items())} tokens; "
        f"largest request F = {source.largest:,} tokens",
        f"KV pool: {pools}; sessions at once: {', '.join(map(str, plan.concurrencies))}; policies: "
        + ", ".join(plan.policies),
    ]
    return "\n".join(lines)


def _report(document: dict[str, Any], out: Path) -> Path:
    from benchmarks.report import write_report

    return write_report([document], out, title="sglang-scout: the demonstration")


def _timed(spent: dict[str, float], kind: str, work: Callable[[], Any]) -> Any:
    begin = time.monotonic()
    done = work()
    spent[kind] = time.monotonic() - begin
    return done


def _forget(path: Path, args: argparse.Namespace) -> None:
    """A finished demo, or one with other options, is run anew; one that was stopped goes on."""
    try:
        if not path.exists():
            return
        document = read(path)
    except (OSError, UsageError):
        document = {}
    if document.get("complete") or document.get("command") != canonical_command("demo", args.argv):
        path.unlink(missing_ok=True)
    else:
        progress(f"going on with the demo that was stopped (remove {path} to start again)")
