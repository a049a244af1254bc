"""What a report says about each kind of result file."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import warmup as simulated_warmup
from benchmarks import warmup_servers
from benchmarks.report import plots
from benchmarks.report.page import Page

Document = dict[str, Any]


def served(page: Page, document: Document) -> None:
    """Results of demo, compare and replay: real servers."""
    points = [p for p in document["points"] if p.get("calls")]
    if not document.get("complete", True) or any(p.get("partial") for p in points):
        page.alarm("Partial results: the run was stopped before its end.")
    outputs = document.get("outputs") or {}
    for line in outputs.get("different", ()):
        page.alarm(f"Outputs differ, which no cache policy may cause: {line}")
    if not points:
        page.note("No finished calls.")
        return
    for group in plots.by_setting(points).values():
        page.cards(_cards(group, outputs))
    source = document.get("source") or {}
    page.heading("Results", _about(source, points[0]))
    page.table(
        [
            "policy",
            "KV pool",
            "C",
            "calls",
            "hit rate",
            "prefill computed",
            "TTFT mean",
            "p50",
            "p99",
            "turn mean",
            "turns/s",
        ],
        [_row(p) for p in points],
    )
    if document["kind"] == "demo":
        page.note(
            "The pool is small on purpose: it cannot hold the prompts of all agents, so something must go at almost "
            "every call. With room for everything no policy has anything to choose."
        )
    for line in _remarks(points):
        page.note(line)
    drawn = [("hit-rate", plots.hit_rates(points)), ("ttft", plots.ttft(points))]
    if any(p.get("ttft_samples_ms") for p in points):
        drawn.append(("ttft-distribution", plots.ttft_distribution(points)))
    if any(a for p in points for a in p.get("agents", {})):
        drawn.append(("hit-rate-by-agent", plots.by_agent(points, source.get("agents") or ())))
    page.plots(drawn)
    _matrices(page, source, points)
    _time(page, document, points)
    _servers(page, points)


def _cards(group: Sequence[Mapping[str, Any]], outputs: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    base = next((p for p in group if p["policy"] == "lru"), group[0])
    best = next((p for p in group if p["policy"] == "scout"), group[-1])
    where = plots.label(best)
    if best is base:
        return [
            (f"{100 * base['hit_rate']:.1f} %", f"of prompt tokens from cache ({base['policy']}, {where})", ""),
            (f"{plots.milliseconds(base['ttft_ms']['mean'] or 0)} ms", "mean time to first token", ""),
            (f"{base['turns_per_s']:.2f}", "turns per second", ""),
        ]
    points = 100 * (best["hit_rate"] - base["hit_rate"])
    cards = [
        (
            f"{100 * base['hit_rate']:.1f} → {100 * best['hit_rate']:.1f} %",
            f"of prompt tokens from cache, {base['policy']} → {best['policy']} ({where})",
            _kind(points),
        )
    ]
    for big, small in (
        ("computed_prefill_tokens", "prefill tokens computed"),
        ("ttft_ms", "mean time to first token"),
        ("turn_ms", "mean time of a turn"),
    ):
        own, other = (p[big]["mean"] if isinstance(p[big], Mapping) else p[big] for p in (best, base))
        if own is not None and other:
            change = 100 * (own / other - 1)
            cards.append((f"{change:+.0f} %".replace("-", "\N{MINUS SIGN}"), small, _kind(-change)))
    if outputs.get("checked") and not outputs.get("different"):
        cards.append(("identical", "outputs under all policies, token by token", "good"))
    return cards


def _kind(gain: float) -> str:
    return "good" if gain > 0.5 else "bad" if gain < -0.5 else ""


def _about(source: Mapping[str, Any], point: Mapping[str, Any]) -> str:
    facts = source.get("facts") or {}
    parts = [f"{plots.name(point)}: {source.get('sessions', point['sessions'])} sessions, {point['calls']} calls"]
    if source.get("F"):
        parts.append(f"largest request F = {source['F']:,} tokens")
    if facts.get("R") is not None:
        parts.append(f"predictability R = {facts['R']:.2f}")
    parts.append(f"think times x {point.get('time_scale', 1):g}")
    parts.append(
        f"requests tagged with {point.get('tags', '')}" if point.get("tags") != "none" else "requests untagged"
    )
    return "; ".join(parts) + ". C: sessions at once. TTFT: time to first token, ms."


def _row(p: Mapping[str, Any]) -> list[Any]:
    times = (p["ttft_ms"]["mean"], p["ttft_ms"]["p50"], p["ttft_ms"]["p99"], p["turn_ms"]["mean"])
    pool = f"{p['capacity_tokens']:,}" + (f" ({p['capacity_F']:.3g}F)" if p.get("capacity_F") else "")
    return [
        p["policy"] + (" (partial)" if p.get("partial") else ""),
        pool,
        p["concurrency"],
        p["calls"],
        f"{100 * p['hit_rate']:.2f} %",
        p["computed_prefill_tokens"],
        *(f"{t:,.0f}" if t is not None else "-" for t in times),
        p["turns_per_s"],
    ]


def _remarks(points: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for p in points:
        if p.get("refused_calls"):
            lines.append(f"{p['policy']}: {p['refused_calls']} sessions cut short by a refused call: {p['refusals']}")
        if p.get("segments", 1) > 1:
            lines.append(f"{p['policy']}: run in {p['segments']} parts, each with a cold cache at its start")
        for state in p.get("scout", ()):
            if state.get("faults"):
                lines.append(f"{p['policy']}: the plug-in counted faults: {state['faults']}")
    return lines


def _matrices(page: Page, source: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> None:
    found = [p for p in points if (p.get("learned") or {}).get("agents")]
    if not found:
        return
    point = next((p for p in found if p["policy"] == "scout"), found[-1])
    learned, agents, true = point["learned"], list(source.get("agents") or ()), source.get("transitions")
    how = {
        "server": "as the server's plug-in shows it",
        "recomputed": "recomputed with the plug-in's own code from the calls that the server saw",
    }
    note = f"Transition probabilities after {point['calls']} calls, {how.get(learned.get('source'), '')}"
    if learned.get("predictability") is not None:
        note += f"; predictability R = {learned['predictability']:.2f}"
    page.heading("Who is called next", note + ".")
    if agents and set(agents) <= set(learned["agents"]):
        order = [learned["agents"].index(a) for a in agents]
        rows = [[learned["rows"][i][j] for j in order] for i in order]
        learned = {**learned, "rows": rows}
    else:
        agents, true = list(learned["agents"]), None
    page.plots([("transitions", plots.matrices(agents, true, learned))])


def _time(page: Page, document: Document, points: Sequence[Mapping[str, Any]]) -> None:
    seconds: Mapping[str, float] = document.get("seconds") or {}
    rows: list[list[Any]] = [
        [
            f"{p['policy']}, {plots.label(p)}",
            f"{p.get('start_s') or 0:,.1f}" if p.get("start_s") else "-",
            f"{p['wall_s']:,.1f}",
        ]
        for p in points
    ]
    page.heading("Where the time went", "Seconds.")
    page.table(["server", "start", "replay"], rows)
    if seconds:
        page.note("All of it: " + ", ".join(f"{kind} {value:,.0f} s" for kind, value in seconds.items()) + ".")


def _servers(page: Page, points: Sequence[Mapping[str, Any]]) -> None:
    commands = [str(p.get("server_command") or (p.get("server") or {}).get("command") or "") for p in points]
    if any(commands):
        page.heading("Servers")
        page.code("\n\n".join(dict.fromkeys(c for c in commands if c)))


def simulated(page: Page, document: Document) -> None:
    """Results of simulate."""
    points = document["points"]
    page.heading("Simulated hit rates", "Share of prompt tokens served from cache; opt is the offline optimum.")
    page.plots([("simulated-hit-rate", plots.capacity_curves(points))])
    policies = list(dict.fromkeys(p["policy"] for p in points))
    rows = []
    for (workload, capacity, concurrency), group in plots.by_setting(points).items():
        rates = {p["policy"]: p["hit_rate"] for p in group}
        size = str(group[0].get("capacity") or f"{capacity:,}")
        cells = [f"{100 * rates[p]:.2f} %" if p in rates else "-" for p in policies]
        rows.append([workload, concurrency, size, *cells])
    page.table(["workload", "C", "capacity", *policies], rows)


def micro(page: Page, document: Document) -> None:
    """Results of micro."""
    points = document["points"]
    page.heading("Hot-path costs", "Median CPU time in microseconds; an evict call is for 64 tokens, leaves have 50.")
    page.plots([("micro", plots.micro_costs(points))])
    sizes = sorted({p["leaves"] for p in points})
    rows: dict[tuple[str, str, str], dict[int, float]] = {}
    for p in points:
        op = p["op"] + (f" ({p['identity']})" if p.get("identity") else "")
        rows.setdefault((op, p["core"], p["policy"]), {})[p["leaves"]] = p["us"]
    cells = [[*key, *(f"{us[n]:,.2f}" if n in us else "-" for n in sizes)] for key, us in rows.items()]
    page.table(["op", "core", "policy", *(f"{n:,} leaves" for n in sizes)], cells)
    states = document.get("state_bytes") or []
    if states:
        note = (
            "Bytes at 24 agents, without live sessions and tree nodes. Counted: the learner for cachescout, else all."
        )
        page.heading("Learned state", note)
        names = ("policy", "policy_bytes", "world_bytes", "identity_bytes", "bytes", "limit")
        headers = ["policy", "learner", "world", "identity", "counted", "limit"]
        page.table(headers, [[s.get(n) for n in names] for s in states])


def host(page: Page, document: Document) -> None:
    """Results of host."""
    points = document["points"]
    page.heading("Host tier")
    page.plots([("host", plots.host_sizes(points))])
    names = ("mode", "size", "computed_prefill_tokens", "written_tokens", "restored_tokens", "declined_requests")
    page.table([n.replace("_", " ") for n in names], [[p.get(n) for n in names] for p in points])


def warmup(page: Page, document: Document) -> None:
    """Results of warmup, in the simulator or on servers."""
    points = document["points"]
    servers = bool(points) and "round" in points[0]
    page.heading("Warmup", "On real servers." if servers else "In the simulator.")
    for block in (warmup_servers if servers else simulated_warmup).blocks(points):
        page.note(block.title)
        page.table(block.headers, [[str(v) if isinstance(v, float) else v for v in row] for row in block.rows])
    for line in warmup_servers.remarks_on(points) if servers else ():
        page.note(line)


def closing(page: Page, documents: Sequence[Document]) -> None:
    """How the figures came about: commands, versions, machine, date."""
    page.heading("How these figures came about")
    page.code("\n".join(str(d.get("command")) for d in documents))
    rows = []
    for document in documents:
        machine = document.get("machine") or {}
        rows += [
            ["date", str(document.get("date"))],
            ["seed", str(document.get("seed"))],
            ["machine", f"{machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('memory_gib')} GiB"],
            ["system", str(machine.get("os"))],
            ["versions", ", ".join(f"{k} {v}" for k, v in (document.get("versions") or {}).items())],
        ]
    page.table(["", ""], [[a, textwrap.shorten(b, 400)] for a, b in rows])


SECTIONS: dict[str, Callable[[Page, Document], None]] = {
    "replay": served,
    "compare": served,
    "demo": served,
    "simulate": simulated,
    "micro": micro,
    "host": host,
    "warmup": warmup,
}
