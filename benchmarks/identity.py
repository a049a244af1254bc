"""`python -m benchmarks identity`: how well agents and sessions are inferred from tokens, and what a mistake costs.

The first table compares the inferred identity of every call with the recorded one, with sessions interleaved as in the
closed loop. B-cubed, over calls: precision is the mean share of a call's inferred cluster that truly belongs with it,
over calls that got an identity; recall is the mean share of a call's true cluster that was put with it, over all calls
(an unknown one counts 0). Beside it: `pooled`, the F1 of agents when the unknown ones count as one agent, which is what
the runtime makes of them; `later`, the F1 of agents without the first quarter of the calls; `by thread`, the recall of
sessions if every agent's side of every session were found and none were linked: what is possible where agents share no
text, as in recorded traces, whose block ids differ behind different anchors. The second table is the simulator's hit
rate with tagged, inferred and scrambled identity.
"""

import argparse
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import traces
from benchmarks.results import Results, UsageError, check_sessions, progress, table, whole, words
from radix_policy.events import RequestArrived
from radix_policy.eviction import POLICIES
from radix_policy.identity import Identity
from radix_policy.runtime import Runtime
from radix_policy.simulator import Loop, Study, parse_spec
from radix_policy.workloads import Call, Workload, make

POINTS = "4:1.15,4:2,16:4,16:6"  # the pressure points of the recorded traces, concurrency:capacity in F
MAX_CONCURRENCY, MAX_FACTOR = 4096, 1e6
RUNS = (("lru", "tagged"), ("", "tagged"), ("", "inferred"), ("", "scrambled"))  # policy ("": as asked for), identity


class Score(NamedTuple):
    """One clustering against the truth."""

    precision: float
    recall: float
    unknown: float  # share of calls without an identity
    clusters: int
    truths: int

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        return 2 * self.precision * self.recall / (self.precision + self.recall) if self.precision else 0.0


def b_cubed(found: Sequence[Hashable | None], true: Sequence[Hashable]) -> Score:
    """B-cubed precision and recall of `found` (None: unknown) against `true`, call by call."""
    pairs = Counter((f, t) for f, t in zip(found, true) if f is not None)
    clusters = Counter(f for f in found if f is not None)
    truths = Counter(true)
    known = sum(clusters.values())
    precision = sum(n * n / clusters[f] for (f, _), n in pairs.items()) / known if known else 0.0
    recall = sum(n * n / truths[t] for (_, t), n in pairs.items()) / len(true) if true else 0.0
    unknown = 1 - known / len(true) if true else 0.0
    return Score(precision, recall, unknown, len(clusters), len(truths))


class Seen(NamedTuple):
    """One call as it was identified."""

    session: str  # the recorded one
    call: Call
    identity: Identity


def play(workload: Workload, concurrency: int, config: dict[str, Any] | None = None) -> list[Seen]:
    """Identify every call of the workload in the order of a closed loop, without tags and without memory pressure."""
    seen: list[Seen] = []
    loop = Loop(workload, "lru", capacity=1 << 50, concurrency=concurrency, identity="inferred", config=config)
    by_rid = dict(_calls(workload))
    resolve = loop.runtime.world.identifier.resolve
    observe = loop.runtime.observe
    answer: list[Identity] = []

    def resolving(*args: Any) -> Identity:
        answer.append(resolve(*args))
        return answer[-1]

    def observing(event: Any) -> None:
        observe(event)
        if isinstance(event, RequestArrived):
            session, call = by_rid[event.rid]
            seen.append(Seen(session, call, answer.pop()))

    loop.runtime.world.identifier.resolve = resolving  # type: ignore[method-assign, assignment]
    loop.runtime.observe = observing  # type: ignore[method-assign, assignment]
    loop.run()
    return seen


def measure(seen: Sequence[Seen]) -> dict[str, Any]:
    """Scores of agents (calls with a recorded agent only), sessions and anchors, JSON-ready."""
    late = seen[len(seen) // 4 :]
    off = sorted(abs(s.identity.anchor_tokens - s.call.anchor_tokens) for s in late if s.call.anchor_tokens)
    sessions = [s.session for s in seen]
    threads = b_cubed([(s.session, s.call.agent) for s in seen], sessions)
    return {
        "calls": len(seen),
        "agent": _score(_agents(seen)),
        "agent_later": _score(_agents(late)),
        "agent_pooled": _score(_agents(seen, pool=True)),
        "session": _score(b_cubed([s.identity.session for s in seen], sessions)),
        "session_by_thread": threads.recall,
        "anchor_error_tokens": off[len(off) // 2] if off else None,
    }


def _agents(seen: Sequence[Seen], pool: bool = False) -> Score:
    named = [s for s in seen if s.call.agent]
    found = [s.identity.agent if s.identity.agent > 0 else (0 if pool else None) for s in named]
    return b_cubed(found, [s.call.agent for s in named])


def _score(score: Score) -> dict[str, Any]:
    return score._asdict() | {"f1": score.f1}


def add_parser(sub: Any) -> None:
    """Declare the command."""
    parser = sub.add_parser(
        "identity",
        help="inferred agents and sessions against the recorded ones, and the cost in hit rate",
        description="Compares what is inferred from tokens with what was recorded, and simulates what it costs.",
    )
    parser.add_argument("--workload", metavar="W,W", action="append", default=[], help="generated workloads")
    parser.add_argument("--trace", metavar="FILE", action="append", default=[], help="recorded trace; may be repeated")
    parser.add_argument("--points", default=POINTS, metavar="C:N,..", help=f"concurrency:capacity in F ({POINTS})")
    parser.add_argument("--policy", default="scout", help="the policy whose hit rate is compared (default scout)")
    parser.add_argument("--no-cost", action="store_true", help="scores only, no hit rates")
    parser.add_argument("--seed", type=int, default=1, help="seed of the workload (default 1)")
    parser.add_argument("--sessions", type=int, metavar="K", help="only so many sessions")
    parser.add_argument("--json", metavar="OUT", help="write the result file; a stopped run goes on from it")


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    pairs = _pairs(args.points)
    names = list(dict.fromkeys(name for given in args.workload for name in words(given)))
    if not names and not args.trace:
        raise UsageError("give --workload or --trace")
    check_sessions(args.sessions)
    spec = parse_spec(args.policy)
    if spec.name not in POLICIES or spec.name == "lru":
        raise UsageError(f"--policy: one that looks at identity, such as scout, not {args.policy!r}")
    Runtime(spec.name, spec.config)
    paths = traces.distinct(args.trace)
    sources = [("workload", name) for name in names] + [("trace", path) for path in paths]
    places = [(source, c) for source in sources for c in dict.fromkeys(c for c, _ in pairs)]
    workloads = {place: _workload(*place[0], args.seed, args.sessions, place[1]) for place in places}
    results = Results(
        "identity",
        args.argv,
        args.json,
        seed=args.seed,
        identity=("workload", "trace", "policy", "identity", "capacity_tokens", "concurrency"),
        settings=traces.digests(paths),
    )
    points = []
    for ((kind, name), concurrency), workload in workloads.items():
        label = {kind: name if kind == "workload" else Path(name).name}
        point = {**label, "concurrency": concurrency, "policy": None, "identity": "inferred"}
        points.append(point)
        if not results.has(point):
            results.add({**point, **measure(play(workload, concurrency))})
            progress(f"{name} C={concurrency}: identified")
        for factor in (f for c, f in pairs if c == concurrency and not args.no_cost):
            points += _cost(results, workload, label, args.policy, concurrency, factor)
    results.finish(points)
    print(report(results.points))
    return 0


def report(points: Sequence[dict[str, Any]]) -> str:
    """Two tables."""
    rows = []
    costs: dict[tuple[Any, ...], dict[str, float]] = {}
    for p in points:
        name = p.get("workload") or p.get("trace")
        if "agent" in p:
            agent, session, error = p["agent"], p["session"], p["anchor_error_tokens"]
            row = [name, p["concurrency"], p["calls"]]
            row += [f"{agent[k]:.3f}" for k in ("precision", "recall", "f1", "unknown")]
            row += [f"{agent['clusters']}/{agent['truths']}", f"{p['agent_later']['f1']:.3f}"]
            row += [f"{p['agent_pooled']['f1']:.3f}", "" if error is None else str(error)]
            row += [f"{session[k]:.3f}" for k in ("precision", "recall", "f1", "unknown")]
            rows.append([*row, f"{session['clusters']}/{session['truths']}", f"{p['session_by_thread']:.3f}"])
        else:
            key = (name, p["concurrency"], p["capacity_tokens"])
            column = "lru" if p["policy"] == "lru" else p["identity"]
            costs.setdefault(key, {})[column] = p["hit_rate"]
    heads = ["agent P", "R", "F1", "unknown", "ids/true", "later", "pooled", "anchor off"]
    heads += ["session P", "R", "F1", "unknown", "ids/true", "by thread"]
    text = table(["source", "C", "calls", *heads], rows)
    if costs:
        columns = ("lru", "tagged", "inferred", "scrambled")
        body = [[*key, *(f"{100 * found[c]:.2f}" for c in columns)] for key, found in costs.items()]
        text += "\n\n" + table(["source", "C", "capacity", *columns], body)
        means = [f"{100 * sum(f[c] for f in costs.values()) / len(costs):.2f}" for c in columns]
        text += "\nmean: " + ", ".join(f"{c} {m}" for c, m in zip(columns, means))
    return text


def _cost(
    results: Results, workload: Workload, label: dict[str, str], policy: str, concurrency: int, factor: float
) -> list[dict[str, Any]]:
    study = Study(workload)
    tokens = int(factor * workload.largest)
    points = []
    for name, identity in RUNS:
        point = {
            **label,
            "policy": name or policy,
            "identity": identity,
            "capacity_tokens": tokens,
            "concurrency": concurrency,
        }
        points.append(point)
        if results.has(point):
            continue
        outcome = study.run(name or policy, tokens, concurrency, identity=identity)
        figures = {
            "hit_rate": outcome.hit_rate,
            "prompt_tokens": outcome.prompt_tokens,
            "cached_tokens": outcome.cached_tokens,
        }
        results.add({**point, **figures})
        progress(f"{workload.name} C={concurrency} {factor:g}F {name or policy} {identity}: {outcome.hit_rate:.4f}")
    return points


def _calls(workload: Workload) -> Iterator[tuple[str, tuple[str, Call]]]:
    calls = ((session.key, call) for session in workload.sessions for call in session.calls)
    return ((f"r{number}", call) for number, call in enumerate(calls))


def _workload(kind: str, name: str, seed: int, sessions: int | None, concurrency: int) -> Workload:
    if kind == "trace":
        return _trace(name, seed, sessions)
    return make(name, seed=seed, concurrency=concurrency, sessions=sessions)


@lru_cache(maxsize=1)  # at every concurrency the same
def _trace(path: str, seed: int, sessions: int | None) -> Workload:
    return traces.read(path, seed=seed, max_sessions=sessions)


def _pairs(text: str) -> list[tuple[int, float]]:
    pairs = []
    for word in text.split(","):
        concurrency, _, factor = word.strip().partition(":")
        try:
            pair = whole(concurrency) or 0, float(factor)
        except ValueError:
            raise UsageError(f"--points: {word!r} is not CONCURRENCY:CAPACITY, e.g. 4:2") from None
        if not 1 <= pair[0] <= MAX_CONCURRENCY or not 0 < pair[1] <= MAX_FACTOR:
            raise UsageError(
                f"--points: {word!r}: a concurrency in 1..{MAX_CONCURRENCY} and a capacity in F up to {MAX_FACTOR:g}"
            )
        pairs.append(pair)
    return list(dict.fromkeys(pairs))
