"""Policies against each other on real servers that this command starts itself, one after the other.

Same sessions, same seed, same pool. A point is one server: policy, pool size and concurrency; each gets a fresh server,
so that nothing learned or cached on one point helps another. At concurrency 1 every policy must have been asked the
same and have answered the same, token by token: a cache policy must never change an output.
"""

import argparse
import contextlib
import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import traces
from benchmarks.client import ServerGone
from benchmarks.measure import Options, PointResults, measure, run_stoppable
from benchmarks.playback import Played, Progress, first_difference, read_journal, take
from benchmarks.pool import Stopped, status_of
from benchmarks.replay import describe, point_table, remarks
from benchmarks.results import Results, UsageError, check_writable, progress, table
from benchmarks.sources import Source, add_options, load, parse_capacities, parse_concurrency, parse_tags
from launch.command import UsageError as LaunchUsageError
from launch.server import Server, ServerError, error_line
from launch.tiny_model import cached as tiny_model

MODELS = "out/models"  # where the tiny model is made when no model is given


@dataclass(frozen=True)
class Plan:
    """What to compare."""

    model_path: str
    policies: tuple[str, ...]
    capacities: tuple[int, ...]
    concurrencies: tuple[int, ...]
    options: Options
    extra_args: tuple[str, ...] = ()
    policy_configs: dict[str, str] = field(default_factory=dict)
    port: int | None = None
    log_folder: Path | None = None


class ServerFailed(RuntimeError):
    """A server did not start or went away; `status` is the exit status that this deserves."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def add_parser(sub: Any) -> None:
    """Options of `python -m benchmarks compare`."""
    parser = sub.add_parser("compare", help="starts servers itself, one per policy and pool size, and replays on each")
    parser.add_argument(
        "--policies", default="lru,scout", help="eviction policies (default: lru,scout); first: the base"
    )
    parser.add_argument(
        "--max-total-tokens",
        required=True,
        metavar="N,N",
        help="KV pool sizes in tokens, or 2F: F is the largest request",
    )
    add_options(parser)
    parser.add_argument("--concurrency", default="1", metavar="N,N", help="sessions at once (default: 1)")
    parser.add_argument("--model-path", metavar="M", help=f"default: the tiny model, made under {MODELS}")
    parser.add_argument("--server-args", default="", metavar="FLAGS", help="more SGLang flags, as one quoted string")
    parser.add_argument(
        "--policy-config",
        action="append",
        default=[],
        metavar="POLICY=JSON",
        help="--radix-eviction-policy-config of one policy; may be repeated",
    )
    parser.add_argument("--port", type=int, help="port of the servers (default: a free one)")
    parser.add_argument("--logs", metavar="DIR", help="keep the servers' logs here")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--json", metavar="OUT", help="result file; also makes the run resumable")
    parser.add_argument("--report", metavar="DIR", help="write an HTML report and plots there")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 done, 1 a server failed or the policies' outputs differ, 2 bad input, 130, 143."""
    policies = [p.strip() for p in args.policies.split(",") if p.strip()]
    if not policies or len(set(policies)) != len(policies):
        raise UsageError(f"--policies: different names separated by commas, not {args.policies!r}")
    concurrencies = parse_concurrency(args.concurrency)
    if args.port is not None and not 0 < args.port < 65536:
        raise UsageError(f"--port must be in 1..65535, not {args.port}")
    options = Options(
        concurrency=concurrencies[0],
        time_scale=args.time_scale,
        tags=parse_tags(args.tags),
        seed=args.seed,
        quiet=args.quiet,
    )
    configs = _policy_configs(args.policy_config, policies)
    model = args.model_path or str(tiny_model(MODELS))
    source = load(args, max(concurrencies), args.tokenizer or model)
    plan = Plan(
        model_path=model,
        policies=tuple(policies),
        capacities=parse_capacities(args.max_total_tokens, source.largest),
        concurrencies=tuple(concurrencies),
        options=options,
        extra_args=tuple(server_words(args.server_args)),
        policy_configs=configs,
        port=args.port,
        log_folder=Path(args.logs) if args.logs else None,
    )
    if args.report:
        check_writable(Path(args.report) / "report.html")
    settings = traces.digests([args.trace] if args.trace else [])
    results = PointResults("compare", args.argv, args.json, seed=args.seed, source=describe(source), settings=settings)
    status = guarded("compare", lambda: compare(plan, source, results), results)
    if status:
        return status
    print(render(results.points, policies[0]))
    print("\n" + outputs_line(results.document["outputs"]))
    print("time: " + ", ".join(f"{kind} {seconds:.0f} s" for kind, seconds in time_spent(results).items()))
    if args.report:
        from benchmarks.report import write_report

        print(f"\nreport: {write_report([results.document], Path(args.report))}")
    return 1 if results.document["outputs"]["different"] else 0


def guarded(command: str, work: Callable[[], int | None], results: Results) -> int:
    """Do the work; every expected way to fail is one line and an exit status, and leaves no server running.

    Returns the work's own status where it has one.
    """
    kept = f"; finished work is in {results.path}, the same command goes on from there" if results.path else ""
    try:
        return work() or 0
    except ServerFailed as error:
        text, status = str(error), error.status
    except ServerGone as error:
        text, status = str(error) + kept, 1
    except KeyboardInterrupt:
        text, status = "interrupted" + kept, 130
    except Stopped as error:
        text, status = str(error) + kept, status_of(error)
    progress(f"python -m benchmarks {command}: {text}")
    return status


def compare(plan: Plan, source: Source, results: PointResults) -> None:
    """Measure what is missing, check the outputs, finish the file."""
    order = [
        {**source.label, "policy": p, "policy_config": _config_object(plan, p), "capacity_tokens": c, "concurrency": n}
        for c in plan.capacities
        for n in plan.concurrencies
        for p in plan.policies
    ]
    check([wanted for wanted in order if not results.has(wanted)], plan)
    for wanted in order:
        if results.has(wanted):
            progress(f"{wanted['policy']}, {wanted['capacity_tokens']} tokens: already in {results.path}")
        else:
            _one(plan, source, results, wanted)
    results.document["outputs"] = check_outputs(results, source)
    results.finish(order)


def check(missing: Sequence[dict[str, Any]], plan: Plan) -> None:
    """UsageError for whatever can be seen to be wrong with any server before the first one starts."""
    for wanted in {point["policy"]: point for point in missing}.values():
        _server(plan, wanted)
    if missing and plan.log_folder is not None:
        check_writable(plan.log_folder / "server.log")


def _server(plan: Plan, wanted: dict[str, Any]) -> Server:
    policy, capacity, concurrency = wanted["policy"], wanted["capacity_tokens"], wanted["concurrency"]
    log = plan.log_folder / f"{policy}-{capacity}-c{concurrency}.log" if plan.log_folder is not None else None
    try:
        return Server(
            plan.model_path,
            policy,
            policy_config=plan.policy_configs.get(policy),
            max_total_tokens=capacity,
            extra_args=plan.extra_args,
            log_path=log,
            port=plan.port,
        )
    except LaunchUsageError as error:
        raise UsageError(str(error)) from None


def time_spent(results: PointResults) -> dict[str, float]:
    """Seconds by kind of work, over all points."""
    kinds = {"starting servers": "start_s", "replaying": "replay_s", "stopping servers": "stop_s"}
    return {kind: round(sum(p.get(name) or 0.0 for p in results.points), 1) for kind, name in kinds.items()}


def _one(plan: Plan, source: Source, results: PointResults, wanted: dict[str, Any]) -> None:
    policy, capacity, concurrency = wanted["policy"], wanted["capacity_tokens"], wanted["concurrency"]
    progress(f"starting a server: {policy}, {capacity} tokens")
    with running(_server(plan, wanted)) as server:
        extra = {"server_command": server.command.shell(), "start_s": round(server.start_seconds, 2)}
        begin = time.monotonic()
        options = replace(plan.options, concurrency=concurrency)
        journal = results.journal_path(wanted)
        # else a part was played on a server that is gone
        anew = not results.resumes or journal is None or not journal.exists()
        used = server.scheduler_cpu_s()
        run_stoppable(lambda: measure(server.url, source, options, results, extra))
        point = results.find(wanted)
        if point is None:
            raise ServerFailed(f"asked for {wanted}, but the server runs something else: {results.points[-1]}", 1)
        spent = server.scheduler_cpu_s()
        if anew and used is not None and spent is not None and point["calls"]:
            # the model's own computation too, which on a CPU is most of it
            point["scheduler_cpu_ms"] = round(1000 * (spent - used) / point["calls"], 3)
        point["replay_s"] = round(time.monotonic() - begin, 2)
        begin = time.monotonic()
    point["stop_s"] = round(time.monotonic() - begin, 2)
    results.save()


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """The server, started and always stopped; what goes wrong in between is told with the last word of its log."""
    try:
        server.start()
    except LaunchUsageError as error:
        raise UsageError(str(error)) from None
    except ServerError as error:
        raise ServerFailed(str(error), 2 if error.exit_code == 2 else 1) from None
    try:
        yield server
    except UsageError as error:  # the server was there a moment ago: it is no user's mistake
        raise ServerFailed(f"{error}: {_last_line(server)}", 1) from None
    except ServerGone as error:
        raise ServerGone(f"{error}: {_last_line(server)}") from None
    finally:
        server.stop()


def _last_line(server: Server) -> str:
    return error_line(server.log_tail(400).splitlines())


def check_outputs(results: PointResults, source: Source) -> dict[str, Any]:
    """Whether all policies of a pool size were asked and answered the same at concurrency 1.

    {"checked": number of comparisons, "different": [one line each]}
    """
    checked, different = 0, []
    groups: dict[Any, list[dict[str, Any]]] = {}
    for point in results.points:
        if point["concurrency"] == 1 and source.lanes == 1 and not point.get("partial"):
            groups.setdefault(point["capacity_tokens"], []).append(point)
    for points in groups.values():
        for point in points[1:]:
            checked += 1
            if point["digest"] != points[0]["digest"]:
                different.append(_difference(results, points[0], point))
    return {"checked": checked, "different": different}


def _difference(results: PointResults, base: dict[str, Any], point: dict[str, Any]) -> str:
    text = f"{base['policy']} and {point['policy']} at {point['capacity_tokens']} tokens: "
    if base["calls"] != point["calls"]:
        text += f"{base['calls']} and {point['calls']} calls; "
    found = first_difference(_calls(results, base), _calls(results, point))
    if found is None:
        return text + f"digests {base['digest']} and {point['digest']}"
    call, how = found
    words = {"missing": "was not made", "request": "had another prompt", "output": "was answered with other tokens"}
    return text + f"session {call.session} call {call.call} ({call.agent}) {words[how]} under {point['policy']}"


def _calls(results: PointResults, point: dict[str, Any]) -> list[Played]:
    path, found = results.journal_path(point), Progress()
    if path is not None and path.exists():
        for record in read_journal(path)[1:]:
            take(record, found)
    return found.calls


# ---- output ----


def render(points: Sequence[dict[str, Any]], base: str) -> str:
    """The points side by side, then each policy against `base` in words: who wins, and by how much."""
    parts = [point_table(list(points))]
    rows = []
    for p, b in against(points, base):
        rows.append(
            [
                f"{p['policy']} vs {base}",
                p["capacity_tokens"],
                p["concurrency"],
                f"{100 * (p['hit_rate'] - b['hit_rate']):+.2f} pp",
                _ratio(p["computed_prefill_tokens"], b["computed_prefill_tokens"]),
                _ratio(p["ttft_ms"]["mean"], b["ttft_ms"]["mean"]),
                _ratio(p["ttft_ms"]["p99"], b["ttft_ms"]["p99"]),
                _ratio(p["turn_ms"]["mean"], b["turn_ms"]["mean"]),
                _ratio(p["turns_per_s"], b["turns_per_s"]),
                _ratio(p.get("scheduler_cpu_ms"), b.get("scheduler_cpu_ms")),
                verdict(p, b),
            ]
        )
    if rows:
        headers = [
            "",
            "capacity",
            "C",
            "hit",
            "computed",
            "TTFT mean",
            "TTFT p99",
            "turn mean",
            "turns/s",
            "sched. CPU",
            "verdict",
        ]
        parts.append(table(headers, rows))
    notes = [line for p in points for line in remarks(p)]
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def against(points: Sequence[dict[str, Any]], base: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(point, the base policy's point with the same pool and concurrency) for every other policy."""
    found = {(p["capacity_tokens"], p["concurrency"]): p for p in points if p["policy"] == base}
    pairs = [(p, found.get((p["capacity_tokens"], p["concurrency"]))) for p in points if p["policy"] != base]
    return [(p, b) for p, b in pairs if b is not None]


def verdict(point: dict[str, Any], base: dict[str, Any]) -> str:
    """Who computes less prefill, and by how much; within half a percent it is a tie."""
    own, other = point["computed_prefill_tokens"], base["computed_prefill_tokens"]
    if abs(own - other) <= 0.005 * max(own, other):
        return "tie"
    if own < other:
        return f"{point['policy']} wins: {100 * (1 - own / other):.1f} % less prefill"
    return f"{point['policy']} loses: {100 * (own / other - 1):.1f} % more prefill"


def outputs_line(outputs: dict[str, Any]) -> str:
    """What the check of outputs found."""
    if outputs["different"]:
        return "OUTPUTS DIFFER, which no cache policy may cause: " + "; ".join(outputs["different"])
    if outputs["checked"]:
        return f"outputs: identical in all {outputs['checked']} comparisons, request by request, token by token"
    return "outputs: not compared (only at concurrency 1 is the order of requests the same)"


def _ratio(own: float | None, other: float | None) -> str:
    return f"{own / other:.2f}x" if own is not None and other else "-"


def server_words(text: str) -> list[str]:
    """The flags in `--server-args`."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--server-args: {str(error).lower()}") from None


def _policy_configs(given: Sequence[str], policies: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in given:
        policy, equals, config = text.partition("=")
        if not equals or policy not in policies:
            raise UsageError(f"--policy-config: POLICY=JSON with one of {', '.join(policies)}, not {text!r}")
        found[policy] = config
    return found


def _config_object(plan: Plan, policy: str) -> Any:
    text = plan.policy_configs.get(policy)
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        raise UsageError(f"--policy-config {policy}: not JSON: {text}") from None
