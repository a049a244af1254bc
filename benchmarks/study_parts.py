"""Sections of RESULTS.md about scout itself: identity, guard, ingredients, numbers, cost."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.study_keys import has_guard, switches, variations
from benchmarks.study_plan import IDENTITIES, Place, Plan
from benchmarks.study_tables import Found, rate, signed, table, text_table

NOTABLE = 0.3  # points: a change of a number that moves the mean by more is worth a word


def split(places: Sequence[Place]) -> list[tuple[str, list[Place]]]:
    """Generated and recorded, those that there are."""
    made = [p for p in places if not p.is_trace]
    recorded = [p for p in places if p.is_trace]
    return [(name, some) for name, some in (("grid", made), ("traces", recorded)) if some]


def identity(found: Found, plan: Plan, places: Sequence[Place]) -> list[str]:
    """What wrong or missing identity costs."""
    rows: list[list[object]] = []
    groups: dict[str, list[Place]] = {}
    for place in places:
        groups.setdefault(place.name, []).append(place)
    for name, group in [*groups.items(), *((f"**{n}**", some) for n, some in split(places))]:
        row: list[object] = [name, rate(found.mean(group, "lru"))]
        for kind in IDENTITIES:
            spread = found.differences(group, "scout", identity=kind)
            row += [signed(fmean(d.points for d in spread)), signed(spread[0].points)]
        rows.append(row)
    header = ["", "lru, %"]
    for kind in IDENTITIES:
        header += [kind, "worst"]
    worst = [f"{kind} {found.differences(places, 'scout', identity=kind)[0]}" for kind in IDENTITIES]
    return [
        "scout against lru in points, mean and worst place, by what it is told. tagged: agent and session of every "
        "call; inferred: nothing, both are learned from tokens; scrambled: the agent, and one session id for all; "
        "scrambled-fresh: the agent, and a new session id for every call.",
        "",
        *table(header, rows),
        "Worst: " + "; ".join(worst) + ".",
        "",
    ]


def guard(found: Found, plan: Plan, places: Sequence[Place]) -> list[str]:
    """The guard on and off."""
    if not has_guard():
        return ["This version of scout has no guard.", ""]
    rows: list[list[object]] = []
    for kind in ("tagged", "scrambled"):
        for name, some in split(places):
            change = found.differences(some, "scout", "scout-guard", kind, kind)
            row: list[object] = [f"{kind}, {name}", rate(found.mean(some, "lru"))]
            row += [rate(found.mean(some, p, kind)) for p in ("scout-guard", "scout")]
            row += [signed(fmean(d.points for d in change)), signed(change[0].points), signed(change[-1].points)]
            row += [signed(found.differences(some, p, identity=kind)[0].points) for p in ("scout-guard", "scout")]
            rows.append(row)
    header = ["", "lru, %", "off, %", "on, %", "on - off", "worst", "best", "off: worst - lru", "on: worst - lru"]
    return table(header, rows)


def ablation(found: Found, plan: Plan, places: Sequence[Place]) -> list[str]:
    """Each ingredient removed."""
    groups = split(places)
    rows = []
    for policy, changed, doc in switches():
        row: list[object] = [f"`{changed}`", doc]
        lost = []
        for _, some in groups:
            change = [-d.points for d in found.differences(some, policy, "scout")]
            lost.append(fmean(change))
            row += [signed(fmean(change)), signed(max(change)), signed(found.differences(some, policy)[0].points)]
        rows.append((sum(lost), row))
    rows.sort(key=lambda r: -r[0])
    header = ["changed", "the key"]
    for name, _ in groups:
        header += [f"{name}: worth", "most", "worst - lru without"]
    base = ", ".join(f"{n} {found.differences(some, 'scout')[0].points:+.2f}" for n, some in groups)
    idle = [row[0] for total, row in rows if abs(total) < 0.05]
    lines = [
        "Points of hit rate that an ingredient is worth (scout as it is minus scout without it; below 0: better "
        f"without), mean and most over {', '.join(f'{len(some)} places of the {n}' for n, some in groups)}"
        f" (held-out traces), and the worst place against lru without it; as it is: {base}.",
        "",
        *_texts(table(header, (row for _, row in rows))),
    ]
    if idle:
        lines += [f"Worth less than 0.05 points here: {', '.join(map(str, idle))}.", ""]
    return lines


def _texts(lines: list[str]) -> list[str]:
    lines[1] = lines[1].replace("| ---: |", "| --- |", 1)
    return lines


def sensitivity(found: Found, plan: Plan, places: Sequence[Place]) -> list[str]:
    """Every number lower and higher."""
    groups = split(places)
    rows, notable = [], []
    moved: dict[str, bool] = {}
    for key, value, policy in variations():
        kind = "inferred" if key.part == "identity" else "tagged"
        row: list[object] = [f"`{key.name}`", f"{key.default:g}", f"{value:g}"]
        moved.setdefault(key.name, False)
        for name, some in groups:
            change = found.differences(some, policy, "scout", kind, kind)
            mean = fmean(d.points for d in change)
            moved[key.name] |= max(-change[0].points, change[-1].points) >= 0.005
            row += [signed(mean), signed(change[0].points), signed(change[-1].points)]
            if abs(mean) > NOTABLE:
                notable.append(f"`{key.name}` {value:g} {signed(mean)} ({name})")
        rows.append((key.name, row))
    idle = [f"`{name}`" for name, has in moved.items() if not has]
    header = ["key", "default", "value"]
    for name, _ in groups:
        header += [f"{name}: mean", "worst", "best"]
    counts = ", ".join(f"{len(some)} places of the {n}" for n, some in groups)
    say = f"Means move by more than {NOTABLE} points for: {'; '.join(notable)}." if notable else ""
    return [
        f"Change of the hit rate in points against the default, over {counts} (held-out traces). Keys of identity are "
        "changed with nothing tagged.",
        "",
        *table(header, (row for name, row in rows if moved[name])),
        *([f"No effect at any of these places: {', '.join(idle)}.", ""] if idle else []),
        say or f"No mean moves by more than {NOTABLE} points.",
        "",
    ]


def cost(figures: dict[str, Any] | None) -> list[str]:
    """Speed and size."""
    if figures is None:
        return []
    speed, runtime = figures["speed"], figures["runtime"]
    rows = [[name, f"{n:,}"] for name, n in speed["requests_per_s"].items()]
    lines = [
        f"Simulator, one process, {speed['workload']} C={speed['concurrency']} {speed['capacity']} (CPU time, the best "
        "run):",
        "",
        *table(["policy", "requests/s"], rows),
        f"The runtime alone, as an engine would call it: {runtime['requests']:,} requests of {runtime['workload']} "
        f"({runtime['agents']} agents) at C={runtime['concurrency']} {runtime['capacity']}, its calls recorded and "
        "repeated without the tree. `other state` is all that the runtime and the policy hold besides one record per "
        "tree node: agents, sessions, counts, tables, indexes.",
        "",
    ]
    rows = []
    for name, p in runtime["policies"].items():
        each = p["node_bytes"] / p["nodes"] if p["nodes"] else 0.0
        row = [name, f"{p['us_per_request']:.0f}", f"{p['events_per_request']:.0f}", f"{p['victims_per_request']:.2f}"]
        rows.append([*row, f"{p['nodes']:,}", f"{each:,.0f}", f"{p['other_bytes'] / 1024:,.0f}"])
    header = ["policy", "us/request", "events/request", "victims/request", "nodes", "bytes/node", "other state, KiB"]
    return [*lines, *table(header, rows)]


def run_table(rows: Sequence[Sequence[object]]) -> list[str]:
    """What was run when."""
    return text_table(["part", "points", "CPU time", "date", "commit"], rows)
