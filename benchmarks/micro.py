"""Hot-path costs: what observing, scoring and choosing cost beside what the stock engine's own tree costs.

Every figure is the median over repeats in one run on one machine, so that rows can be compared with each other; `us`
is microseconds of CPU time of the one thread that works, which on an idle machine is the time that passes. `core`:
`none` is `radix_policy` alone (no tree), `python` and `rust` are SGLang's tree cores in process. Policy `lru` on a core
is stock SGLang.
"""

import argparse
import gc
import importlib.util
import statistics
import sys
import time
import types
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import Results, UsageError, check_writable, progress, read, table, whole, words
from radix_policy.events import Event, PrefixMatched, RequestArrived, RequestFinished, Tag, Tick
from radix_policy.eviction import POLICIES
from radix_policy.prompts import TokenPrompt
from radix_policy.runtime import Runtime

LEAVES = (1000, 10_000, 20_000, 100_000)
PER_CLASS = (1, 10, 100)  # leaves that share a class, where a policy has classes
AGENTS = 24  # CacheScout's largest table
VICTIMS = 4  # leaves lost per eviction call in `radix_policy` alone
LEAF_TOKENS = 50
EVICT_TOKENS = 64  # asked for per eviction call on SGLang's trees
NODE_LIMIT = 300  # bytes per tree node on top of SGLang's, its tokens left out
PROMPT_TOKENS = 2000
PATH_NODES = 16
# What the project promises (microseconds, bytes): shown beside the figures, never a test of speed.
TARGET_US = {"observe": 5.0, "observe_node": 1.0, "score": 1.0}
STATE_LIMIT = {"cachescout": 25 * 1024, "scout": 100 * 1024}

IDENTITY = ("op", "core", "policy", "leaves", "identity", "part", "per_class")

Point = dict[str, Any]


def add_parser(sub: Any) -> None:
    """Options of `python -m benchmarks micro`."""
    parser = sub.add_parser("micro", help="hot-path costs of the tree cores and policies")
    parser.add_argument("--leaves", default=",".join(map(str, LEAVES)), help="leaf counts, e.g. 1000,20000")
    parser.add_argument(
        "--per-class",
        default=",".join(map(str, PER_CLASS)),
        metavar="N",
        help="leaves per class for eviction on SGLang's tree, e.g. 1,100",
    )
    parser.add_argument("--policies", default="lru,cachescout,scout", help="default: lru,cachescout,scout")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each figure; the median counts")
    parser.add_argument("--no-engine", action="store_true", help="only radix_policy, without SGLang's tree cores")
    parser.add_argument("--json", metavar="OUT", help="result file")


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables, write the file."""
    leaves = _counts("--leaves", args.leaves, 500, 200_000)
    per_class = _counts("--per-class", args.per_class, 1, 10_000)
    policies = words(args.policies)
    if not policies:
        raise UsageError("--policies names none")
    for policy in policies:
        if policy not in POLICIES:
            raise UsageError(f"--policies: unknown policy {policy!r}; known: {', '.join(sorted(POLICIES))}")
    if not 1 <= args.repeats <= 1000:
        raise UsageError("--repeats must be in 1..1000")
    if args.json is not None:
        check_writable(args.json)
        _forget(args.json)
    results = Results("micro", args.argv, args.json, identity=IDENTITY)
    begin = time.perf_counter()
    for point in core_points(policies, leaves, args.repeats):
        results.add(point)
    from benchmarks.micro_parts import part_points

    for policy in policies:
        for point in part_points(policy, args.repeats):
            results.add(point)
    results.document["state_bytes"] = [state_point(policy) for policy in policies]
    spent = {"radix_policy": time.perf_counter() - begin}
    skipped = _engine(args, results, policies, leaves, per_class, spent)
    results.document["seconds"] = {k: round(v, 1) for k, v in spent.items()}
    results.finish()
    print(render(results.document))
    if skipped:
        print(f"\n{skipped}")
    print("\ntime: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent.items()))
    return 0


def _engine(
    args: argparse.Namespace,
    results: Results,
    policies: list[str],
    leaves: list[int],
    per_class: list[int],
    spent: dict[str, float],
) -> str:
    if args.no_engine:
        return "SGLang's tree cores: not asked for (--no-engine)"
    if importlib.util.find_spec("sglang") is None:
        return "SGLang's tree cores: skipped, sglang is not installed here"
    begin = time.perf_counter()
    progress("micro: importing SGLang (some 20 s)")
    try:
        from benchmarks import micro_engine
    except Exception as error:  # an engine that cannot be imported here must not cost the other figures
        return f"SGLang's tree cores: skipped, sglang does not import here ({type(error).__name__}: {error})"
    spent["importing SGLang"] = time.perf_counter() - begin
    begin = time.perf_counter()
    skipped = []
    for core, policy in micro_engine.pairs(policies):
        try:
            for point in micro_engine.points(core, policy, leaves, args.repeats, per_class):
                if point["op"] == "memory":
                    results.document.setdefault("node_bytes", []).append(point)
                else:
                    results.add(point)
        except micro_engine.Unavailable as error:
            skipped.append(f"{core} core, policy {policy}: skipped, {error}")
    spent["SGLang's tree cores"] = time.perf_counter() - begin
    return "\n".join(skipped)


def _forget(path: str) -> None:
    """Drop an earlier result: figures of two runs cannot be compared, so nothing is ever added to one."""
    if Path(path).exists():
        if read(path).get("kind") != "micro":
            raise UsageError(f"{path}: holds the results of another command")
        Path(path).unlink()


def _counts(option: str, text: str, low: int, high: int) -> list[int]:
    counts = sorted({whole(part) or 0 for part in text.split(",")})
    if counts[0] < low or counts[-1] > high:
        raise UsageError(f"{option}: whole numbers in {low}..{high}, separated by commas, not {text!r}")
    return counts


def median_us(
    action: Callable[[], None], repeats: int, per: int = 1, before: Callable[[], None] | None = None
) -> float:
    """Median microseconds of one of the `per` operations that `action` does; `before` is not timed."""
    taken = []
    gc.collect()
    gc.disable()  # a collection belongs to whoever made the garbage, and falls on a random repeat
    try:
        for _ in range(repeats):
            if before is not None:
                before()
            start = time.thread_time_ns()
            action()
            taken.append((time.thread_time_ns() - start) / 1e3 / per)
    finally:
        gc.enable()
    return statistics.median(taken)


# ---- radix_policy alone ----


class Populated:
    """A runtime that has seen `leaves` leaves: 24 agents' anchors, sessions of 12 calls, one leaf per call."""

    CALLS = 12

    def __init__(self, policy: str, leaves: int, *, index: bool = True, agents: int = AGENTS) -> None:
        self.agents = agents
        self.runtime = Runtime(policy, {"max_sessions": max(64, leaves // self.CALLS + 64)}, index=index)
        self.stamp = 0.0
        self.next_id = 1
        self.step = 0
        self.runtime.reset(0)
        self.anchors = [self._add(0, 500, 0, None) for _ in range(agents)]
        # The serial number of a call decides its session and agent: a ring with a skip, the same for every policy.
        self.calls = 0
        for _ in range(leaves):
            self.play()

    def play(self) -> None:
        """One whole call: arrive, match the anchor, insert a leaf, finish."""
        session, turn = divmod(self.calls, self.CALLS)
        agent = (turn * 5 + session) % self.agents
        self.calls += 1
        self.step += 10
        rid = f"r{self.calls}"
        runtime = self.runtime
        runtime.observe(Tick(self.step, self.step * 0.01))
        runtime.observe(RequestArrived(rid, _PROMPT, tag=Tag(f"agent{agent}", f"session{session}")))
        anchor = self.anchors[agent]
        runtime.locked(anchor)
        self.stamp += 1
        runtime.touched(anchor, self.stamp)
        runtime.observe(PrefixMatched(rid, (anchor,), 500))
        self._add(anchor, LEAF_TOKENS, 500, rid)
        runtime.unlocked(anchor)
        runtime.observe(RequestFinished(rid, LEAF_TOKENS))

    def _add(self, parent: int, length: int, start: int, rid: str | None) -> int:
        node = self.next_id
        self.next_id += 1
        self.stamp += 1
        self.runtime.added(node, parent, length, start, self.stamp, rid)
        return node


_PROMPT = TokenPrompt(array("q", range(PROMPT_TOKENS)))


def core_points(policies: list[str], leaves: list[int], repeats: int) -> Iterator[Point]:
    """Observe, score and evict in `radix_policy` alone."""
    for policy in policies:
        progress(f"micro: radix_policy, {policy}")
        populated = Populated(policy, 1000)
        for identity in ("tag", "tokens"):
            empty = _observe_us(populated, 0, identity, repeats)
            yield _point("observe", policy, populated, empty) | {"identity": identity, "path_nodes": 0}
        deep = _observe_us(populated, PATH_NODES, "tag", repeats)
        shallow = _observe_us(populated, 0, "tag", repeats)
        per_node = max(0.0, deep - shallow) / PATH_NODES
        yield _point("observe_node", policy, populated, per_node) | {"path_nodes": PATH_NODES}
        for count in leaves:
            populated = Populated(policy, count)
            nodes = list(populated.runtime.world.nodes.leaves())
            score, refresh = populated.runtime.policy.score, populated.runtime.policy.refresh

            def score_all(nodes: list[Any] = nodes, score: Any = score, refresh: Any = refresh) -> None:
                refresh()
                for node in nodes:
                    score(node)

            yield _point("score", policy, populated, median_us(score_all, repeats, len(nodes)))
            point = _point("evict", policy, populated, 0.0)
            yield point | {"us": round(_evict_us(populated, repeats), 3), "victims": VICTIMS}


def _observe_us(populated: Populated, path_nodes: int, identity: str, repeats: int) -> float:
    """One request, arrival to finish, whose match walks a chain of `path_nodes` nodes."""
    runtime = populated.runtime
    chain: list[int] = []
    for _ in range(path_nodes):
        chain.append(populated._add(chain[-1] if chain else 0, 8, 8 * len(chain), None))
    path = tuple(chain)
    if chain:
        runtime.locked(chain[-1])  # as in the engine: a matched path is locked while its request runs
    requests = 500
    serial = iter(range(10**9))
    batch: list[Event] = []

    def prepare() -> None:
        batch.clear()
        for _ in range(requests):
            n = next(serial)
            tag = Tag(f"agent{n % populated.agents}", f"live{n // 7 % 50}") if identity == "tag" else None
            rid = f"o{identity}{path_nodes}-{n}"
            batch.append(RequestArrived(rid, _PROMPT, tag=tag))
            batch.append(PrefixMatched(rid, path, 0))
            batch.append(RequestFinished(rid, 10))

    def observe_all() -> None:
        observe = runtime.observe
        for event in batch:
            observe(event)

    found = median_us(observe_all, max(repeats, 3), requests, prepare)
    if chain:
        runtime.unlocked(chain[-1])
        for node in reversed(chain):
            runtime.removed(node)
    return found


def _evict_us(populated: Populated, repeats: int) -> float:
    """One eviction call of VICTIMS leaves; what was lost is put back by as many new calls, untimed."""
    runtime = populated.runtime

    def evict() -> None:
        with runtime.evicting() as drain:
            for _ in range(VICTIMS):
                victim = drain.next()
                assert victim is not None
                runtime.removed(victim.id)

    def refill() -> None:
        while len(runtime.index) < before:
            populated.play()

    before = len(runtime.index)
    return median_us(evict, max(repeats, 9), 1, refill)


def _point(op: str, policy: str, populated: Populated, us: float) -> Point:
    index = populated.runtime.index
    return {
        "op": op,
        "core": "none",
        "policy": policy,
        "leaves": len(index),
        "classes": index.classes,
        "us": round(us, 3),
    }


# ---- state ----


def state_point(policy: str, agents: int = AGENTS) -> Point:
    """Bytes that are held after 100 sessions, without live sessions, requests in flight and tree nodes.

    `policy_bytes` is the policy's own learner, `world_bytes` what the runtime learns for every policy (transitions,
    ends, gaps), `identity_bytes` who is who: prompts of recent calls, most of all. The limit is on what is learned of
    agents: the policy's own for cachescout, whose chain is its own, else that and the world's.
    """
    populated = Populated(policy, 100 * Populated.CALLS, agents=agents)
    runtime = populated.runtime
    world = runtime.world
    runtime.policy.refresh()
    apart = [world, world.refile, runtime.index, runtime, runtime.requests, runtime.policy.config, _PROMPT]
    apart += [world.clock, world.nodes, world.sessions, *world.nodes, *world.sessions, _PROMPT.tokens]
    apart += [world.identifier.config, *runtime.policy.passing()]
    identity = deep_bytes([world.identifier], apart)
    learned = [v for k, v in vars(world).items() if k not in ("clock", "nodes", "sessions", "identifier")]
    shared = deep_bytes(learned, [*apart, world.identifier, runtime.policy])
    own = deep_bytes([runtime.policy], [*apart, world.identifier, *learned])
    counted = own if policy == "cachescout" else own + shared
    sizes = {"policy_bytes": own, "world_bytes": shared, "identity_bytes": identity}
    return {"policy": policy, "agents": agents, "bytes": counted, "limit": STATE_LIMIT.get(policy), **sizes}


def deep_bytes(roots: list[Any], apart: list[Any]) -> int:
    """Bytes of every object that can be reached from `roots`, except code, modules and what is listed in `apart`."""
    seen = {id(thing) for thing in apart}
    stack, total = list(roots), 0
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, _CODE):
            continue
        seen.add(id(thing))
        total += sys.getsizeof(thing)
        stack += gc.get_referents(thing)
    return total


_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.CodeType)


# ---- output ----


def render(document: dict[str, Any]) -> str:
    """The tables, with the ratio of each engine row to stock SGLang's on the same number of leaves."""
    points: list[Point] = document["points"]
    parts = []
    own = [p for p in points if p["core"] == "none" and p["op"] != "part"]
    rows = [
        [
            p["op"] + (f" ({p['identity']})" if "identity" in p else ""),
            p["policy"],
            p["leaves"],
            p["classes"],
            round(p["us"], 2),
            _target(p),
        ]
        for p in own
    ]
    parts.append(table(["radix_policy", "policy", "leaves", "classes", "us", "target"], rows))
    steps = list(dict.fromkeys(p["part"] for p in points if p["op"] == "part"))
    if steps:
        policies = list(dict.fromkeys(p["policy"] for p in points if p["op"] == "part"))
        us = {(p["part"], p["policy"]): p["us"] for p in points if p["op"] == "part"}
        rows = [[step, *(f"{us[step, policy]:.2f}" for policy in policies)] for step in steps]
        parts.append(table(["observe (tag), step by step, us", *policies], rows))
    engine = [p for p in points if p["core"] != "none"]
    if engine:
        stock = {(p["op"], p["core"], p["leaves"]): p["us"] for p in engine if p["policy"] == "lru"}
        rows = []
        for p in engine:
            base = [stock.get((p["op"], core, p["leaves"])) for core in ("python", "rust")]
            ratios = [f"{p['us'] / us:.2f}x" if us else "-" for us in base]
            small = next((q["us"] for q in engine if _same_line(q, p) and q["leaves"] == 1000), None)
            ratios.append(f"{p['us'] / small:.2f}x" if small else "-")
            rows.append([p["op"], p["core"], p["policy"], p["leaves"], p["classes"], round(p["us"], 2), *ratios])
        header = [
            "SGLang",
            "core",
            "policy",
            "leaves",
            "classes",
            "us",
            "vs python lru",
            "vs rust lru",
            "vs 1000 leaves",
        ]
        parts.append(table(header, rows))
    names = ("policy_bytes", "world_bytes", "identity_bytes", "bytes")
    rows = [
        [s["policy"], s["agents"], *(s[n] for n in names), _limit(s["bytes"], s["limit"])]
        for s in document.get("state_bytes", [])
    ]
    if rows:
        parts.append(table(["state", "agents", "learner", "world", "identity", "counted bytes", "limit"], rows))
    rows = [
        [
            n["core"],
            n["policy"],
            n["leaves"],
            n["classes"],
            *(round(n[k]) for k in ("nodes", "index", "shadow", "mirror", "bytes", "tokens")),
            _limit(n["bytes"], NODE_LIMIT),
        ]
        for n in document.get("node_bytes", [])
    ]
    if rows:
        head = ["bytes per node", "policy", "leaves", "classes", "node", "index", "shadow", "mirror", "sum", "tokens"]
        parts.append(table([*head, "limit"], rows))
    return "\n\n".join(parts)


def _same_line(a: Point, b: Point) -> bool:
    """Whether two points differ in their numbers of leaves only."""
    return all(a.get(k) == b.get(k) for k in ("op", "core", "policy", "per_class"))


def _target(point: Point) -> str:
    return _limit(point["us"], TARGET_US.get(point["op"]))


def _limit(value: float, limit: float | None) -> str:
    return "" if limit is None else f"<= {limit:g} " + ("ok" if value <= limit else "MISSED")
