"""RESULTS.md from the result files of the study, and nothing else."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import study_parts, study_sections
from benchmarks.study_cost import WHOLE
from benchmarks.study_foresight import foresight
from benchmarks.study_keys import has_guard
from benchmarks.study_plan import CEILING, IDENTITIES, PARTS, TRACES, Place, Plan, Point
from benchmarks.study_plots import capacity_plot, curve_places, time_plot
from benchmarks.study_store import Store
from benchmarks.study_tables import Found, several, signed, text_table

Section = Callable[[Found, Plan, Sequence[Place]], list[str]]

GAP_GRID, NEAR_INFORMED, GAP_TRACES = 75.0, 0.5, 65.0
LEAST = {"tagged": -0.2, "inferred": -1.0, "scrambled": -1.5, "scrambled-fresh": -1.5}  # points against lru
GUARD_COST, POLICY_US = 0.3, 150.0
SPEED = {"lru": 8000, "scout": 2000}


def render(store: Store, plan: Plan, markdown: Path) -> str:
    """The text; writes the plots beside the result files."""
    found = Found(store.points)
    ready = {part: _ready(store, plan, part) for part in PARTS}
    plots = store.folder
    link = Path(_relative(plots, markdown.parent))
    lines = _head(store, plan, link)
    lines += ["## Figures to reach", "", *_figures(store, found, plan, ready)]
    number = 0

    def section(
        title: str, part: str, write: Section, picture: str = "", places: Sequence[Place] | None = None
    ) -> None:
        nonlocal number
        number += 1
        lines.extend([f"## {number}. {title}", ""])
        own, missing = ready[part]
        own = own if places is None else [p for p in places if p in set(own)]
        if missing:
            lines.extend([_missing(part, missing), ""])
        if own or (part == "guard" and not has_guard()):
            lines.extend(write(found, plan, own))
            if picture:
                lines.extend([f"![{title}]({(link / picture).as_posix()})", ""])

    whole_grid = not ready["grid"][1]
    drawn = whole_grid and capacity_plot(found, plan, plots / "capacity.png")
    section("The 64-point grid", "grid", study_sections.grid, "capacity.png" if drawn else "")
    section("Recorded traces under pressure", "traces", study_sections.traces)
    section("Identity", "identity", study_parts.identity)
    section("The guard", "guard", study_parts.guard)
    section("Ingredients of scout", "ablation", study_parts.ablation)
    section("Numbers of scout", "sensitivity", study_parts.sensitivity)
    drawn = whole_grid and time_plot(found, plan, plots / "cold-start.png")
    picture = "cold-start.png" if drawn else ""
    section("Cold start", "grid", study_sections.cold, picture, curve_places(plan))
    section("Other workloads", "others", study_sections.others)
    number += 1
    lines += [f"## {number}. What is left to know", ""]
    lines += foresight(store.figures("foresight")) or [_missing("foresight", 1), ""]
    number += 1
    lines += [f"## {number}. Cost", ""]
    lines += study_parts.cost(store.figures("cost")) or [_missing("cost", 1), ""]
    number += 1
    lines += [f"## {number}. Where scout does not help", ""]
    places = [p for part in ("grid", "traces", "others") for p in ready[part][0]]
    lines += study_sections.no_help(found, plan, places) if places else [_missing("grid", 1), ""]
    return "\n".join(lines).rstrip() + "\n"


def _ready(store: Store, plan: Plan, part: str) -> tuple[list[Place], int]:
    """Places of a part with all their points, and how many lack some."""
    by_place: dict[Place, list[Point]] = {}
    for point in plan.points(part):
        by_place.setdefault(point.place, []).append(point)
    whole = [place for place, points in by_place.items() if all(p in store.points for p in points)]
    return whole, len(by_place) - len(whole)


def _missing(part: str, places: int) -> str:
    what = several(places, "place") + " of this part" if part not in ("foresight", "cost") else "This part"
    verb = "is" if places == 1 else "are"
    return f"*{what} {verb} not measured with the present code: `python -m benchmarks study --only {part}`.*"


def _relative(target: Path, base: Path) -> str:
    try:
        return target.resolve().relative_to(base.resolve()).as_posix()
    except ValueError:
        return target.resolve().as_posix()


def _head(store: Store, plan: Plan, link: Path) -> list[str]:
    headers = {part: store.headers[part] for part in PARTS if part in store.headers}
    latest = max(headers.values(), key=lambda h: str(h.get("date")), default={})
    machine, versions = latest.get("machine", {}), latest.get("versions", {})
    named = [f"{name} {version}" for name, version in versions.items() if name in ("python", "numpy", "sglang-scout")]
    total = sum(h.get("cpu_seconds", 0.0) for h in headers.values())
    command = str(latest.get("command", "python -m benchmarks study"))
    lines = [
        "# Results",
        "",
        f"Generated by `{command}` from the JSON in `{link.as_posix()}/`; not edited by hand. Simulator only: times "
        "on real servers come from `python -m benchmarks compare`.",
        "",
        f"- Machine: {machine.get('cpu', '?')}, {several(machine.get('cores') or 0, 'core')}, {machine.get('os', '?')}"
        f"; {', '.join(named)}. {several(round(total / 60), 'minute')} of CPU time in all.",
        f"- Seeds {', '.join(map(str, plan.seeds))}, which nothing was tuned on. F is the largest single request of a "
        "workload (prompt and output); C the number of sessions at a time. Page size 1.",
        "- Hit rate: cached prompt tokens over prompt tokens, in percent. A *point* is one percentage point. Service "
        "times do not depend on the cache, so every policy sees the same requests in the same order (checked), and "
        "`opt` is an upper bound.",
        "- Gap closed: sum of (policy - lru) over sum of (opt - lru).",
        "",
    ]
    if plan.quick:
        lines += ["**`--quick`: a small version of everything that only shows that it works.**", ""]
    rows = []
    for part, text in PARTS.items():
        header = headers.get(part)
        if header is not None:
            owned = store.owned(part)
            commit = header.get("versions", {}).get("commit", "")
            seconds = f"{header.get('cpu_seconds', 0.0):.0f} s"
            rows.append([text, f"{owned:,}" if owned else "", seconds, str(header.get("date"))[:16], commit])
    return [*lines, *study_parts.run_table(rows)]


def _figures(store: Store, found: Found, plan: Plan, ready: dict[str, tuple[list[Place], int]]) -> list[str]:
    """What was asked for, what came out."""
    rows: list[list[str]] = []

    def row(what: str, target: str, measured: str, met: bool | None) -> None:
        rows.append([what, target, measured, {True: "met", False: "**not met**", None: ""}[met]])

    places, _ = ready["grid"]
    if places:
        gap = found.closed(places, "scout") or 0.0
        behind = found.mean(places, CEILING) - found.mean(places, "scout")
        ceiling = found.closed(places, CEILING) or 0.0
        what = f"grid, gap closed with trimming (without: {found.closed(places, 'scout-trim') or 0.0:.1f} %)"
        row(what, f">= {GAP_GRID:g} %", f"{gap:.1f} %", gap >= GAP_GRID)
        row(
            f"or: grid, points behind informed (which itself closes {ceiling:.1f} %)",
            f"<= {NEAR_INFORMED:g}",
            f"{behind:.2f}",
            behind <= NEAR_INFORMED,
        )
    places, _ = ready["traces"]
    if places:
        tuned = {(name, half) for name, half, used in TRACES if used}
        held = [p for p in places if (p.source, p.half) not in tuned]
        for name, some in (("traces, all", places), ("traces, held out", held)):
            share = found.closed(some, "scout")
            if share is not None:
                row(f"{name}, gap closed", f">= {GAP_TRACES:g} %", f"{share:.1f} %", share >= GAP_TRACES)
    everywhere = [p for part in ("grid", "traces", "others") for p in ready[part][0]]
    if everywhere:
        worst = found.differences(everywhere, "scout")[0]
        row("worst point against lru, tagged (grid, traces, others)", f">= {LEAST['tagged']:g}", str(worst), None)
        rows[-1][3] = "met" if worst.points >= LEAST["tagged"] else "**not met**"
    places, _ = ready["identity"]
    if places:
        for kind in IDENTITIES[1:]:
            worst = found.differences(places, "scout", identity=kind)[0]
            row(f"worst point against lru, {kind}", f">= {LEAST[kind]:g}", str(worst), worst.points >= LEAST[kind])
    places, _ = ready["guard"]
    if places and has_guard():
        change = found.differences(places, "scout", "scout-guard")
        mean = -fmean(d.points for d in change)
        text = f"{signed(mean)} on average, at most {signed(-change[0].points)}"
        row("what the guard costs with tags", f"<= {GUARD_COST:g}", text, mean <= GUARD_COST)
    rows += _cost_rows(store.figures("cost"))
    if not rows:
        return ["Nothing is measured yet.", ""]
    return text_table(["figure", "target", "measured", ""], rows)


def _cost_rows(figures: dict[str, Any] | None) -> list[list[str]]:
    if figures is None:
        return []
    rows = []
    for name, least in SPEED.items():
        speed = figures["speed"]["requests_per_s"][name]
        met = "met" if speed >= least else "**not met**"
        rows.append([f"simulator, requests/s under {name}", f">= {least:,}", f"{speed:,}", met])
    runtime = figures["runtime"]
    where = f"per request at C={runtime['concurrency']}, {runtime['agents']} agents"
    lru = runtime["policies"]["lru"]["us_per_request"]
    for policy, how in (("scout", "with trimming"), (WHOLE, "without trimming")):
        us = runtime["policies"][policy]["us_per_request"]
        met = "met" if us - lru <= POLICY_US else "**not met**"
        measured = f"{us - lru:.0f} us ({us:.0f} with the {lru:.0f} that the runtime takes under lru)"
        rows.append([f"scout {where}, {how}", f"<= {POLICY_US:g} us", measured, met])
    return rows
