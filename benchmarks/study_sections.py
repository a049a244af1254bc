"""Sections of RESULTS.md that compare policies: the grid, traces, other workloads, cold start, where scout is no help.

Every sentence with a number in it is made from the number; what could be otherwise is not stated.
"""

from collections.abc import Sequence
from statistics import fmean

from benchmarks.simulate import GRID_WORKLOADS
from benchmarks.study_plan import (
    CEILING,
    CEILING_WHOLE,
    CURVE_AT,
    CURVE_POLICIES,
    CURVE_STEP,
    ELSEWHERE,
    ON_TRACES,
    ORDER,
    REST,
    TRACES,
    Place,
    Plan,
)
from benchmarks.study_plots import curve_places, curves
from benchmarks.study_tables import (
    Difference,
    Found,
    mean_and_interval,
    rate,
    several,
    signed,
    table,
    text_table,
    where,
)

RIVALS = (
    "lru",
    "lfu",
    "slru",
    "s3fifo",
    "gdsf",
    "ttl",
    "lhd",
    "lhd+trim",
    "kvflow",
    "kvflow+END",
    "cachescout",
    "scout",
)
BOUNDS = ("lru", "lru+trim", "scout-trim", "scout", CEILING_WHOLE, CEILING, "belady", "beladyP", "opt")
NO_HELP = 0.1  # points
NO_ROOM = 0.2  # points from lru to opt

POLICY_NOTES = {
    "lfu, slru": "SGLang's own",
    "s3fifo, gdsf, lhd": "published cache policies, on leaves",
    "ttl": "Continuum's time to live, as a rank",
    "kvflow": "steps to execution on the declared true graph; `+END`: and told which call is a session's last",
    "cachescout": "the published score",
    "scout": "this project's; `-trim`: whole leaves only",
    CEILING: "scout's formulas with the generator's true transition and END probabilities: a bound for learning",
    "belady, beladyP": "furthest next use on whole leaves, and with trimming: they see the future",
    "opt": "the offline optimum for the same order of requests; nothing can exceed it",
    "+trim": "the last victim is cut down to what is needed",
}


def grid(found: Found, plan: Plan, places: Sequence[Place]) -> list[str]:
    """The frozen grid."""
    places = list(places)
    first = [p for p in places if p.seed == plan.seeds[0]]
    seeds = sorted({p.seed for p in places})
    lines = [
        f"{several(len(first), 'point')} (topology, concurrency, capacity), seeds {', '.join(map(str, seeds))}. Each "
        "row is a mean over capacities and seeds. Policies marked ¹ ran on the first seed only.",
        "",
        *text_table(["policy", "what it is"], POLICY_NOTES.items()),
        "Rivals:",
        "",
        *_grid_table(found, places, first, RIVALS),
        "What trimming adds, and the bounds:",
        "",
        *_grid_table(found, places, first, BOUNDS),
        "Differences in points, with the 95 % confidence interval over seeds "
        f"(Student's t, {several(len(seeds), 'seed')}):",
        "",
    ]
    rows = []
    for name, group in _groups(places):
        own = [_by_seed(found, group, "scout", other) for other in ("lru", "lru+trim", CEILING, "opt")]
        spread = found.differences(group, "scout")
        rows.append([name, *map(mean_and_interval, own), signed(spread[0].points), signed(spread[-1].points)])
    total = [_by_seed(found, places, "scout", other) for other in ("lru", "lru+trim", CEILING, "opt")]
    spread = found.differences(places, "scout")
    rows.append(["**all**", *map(mean_and_interval, total), signed(spread[0].points), signed(spread[-1].points)])
    header = ["", "scout - lru", "scout - lru+trim", "scout - informed", "scout - opt", "least - lru", "most - lru"]
    lines += table(header, rows)
    gap = found.closed(places, "scout")
    ceiling = found.closed(places, CEILING)
    if gap is not None and ceiling:
        lines += [
            f"Of the gap from lru to opt, scout closes {gap:.1f} % with trimming and "
            f"{found.closed(places, 'scout-trim') or 0:.1f} % without; informed, which knows the law but not the "
            f"future, closes {ceiling:.1f} % with trimming. So {100 - ceiling:.1f} % of the gap is out of reach for "
            "these formulas however well they learn, "
            + (
                f"and learning costs {ceiling - gap:.1f} %."
                if ceiling > gap
                else f"and scout is {gap - ceiling:.1f} % above that."
            ),
            "",
        ]
    return lines


def _grid_table(found: Found, places: list[Place], first: list[Place], policies: Sequence[str]) -> list[str]:
    shown = [p for p in policies if p in ORDER]
    rows: list[list[object]] = []
    for name, group in _groups(places):
        rows.append([name, *(rate(found.mean(_own(group, first, p), p)) for p in shown)])
    rows.append(["**mean**", *(rate(found.mean(_own(places, first, p), p)) for p in shown)])
    worst = [found.differences(_own(places, first, p), p)[0].points for p in shown]
    rows.append(["worst point - lru", *map(signed, worst)])
    shares = [found.closed(_own(places, first, p), p) for p in shown]
    rows.append(["gap closed, %", *("" if s is None else f"{s:.1f}" for s in shares)])
    return table(["", *(p + ("¹" if p in REST else "") for p in shown)], rows)


def _own(group: Sequence[Place], first: Sequence[Place], policy: str) -> list[Place]:
    """Where the policy ran."""
    return [p for p in group if p in first] if policy in REST else list(group)


def _groups(places: Sequence[Place]) -> list[tuple[str, list[Place]]]:
    """Topology by concurrency."""
    groups: dict[str, list[Place]] = {}
    for place in places:
        groups.setdefault(f"{place.source} C={place.concurrency}", []).append(place)
    return list(groups.items())


def _by_seed(found: Found, places: Sequence[Place], policy: str, other: str) -> list[float]:
    """Mean difference of each seed."""
    return [
        fmean(d.points for d in found.differences([p for p in places if p.seed == seed], policy, other))
        for seed in sorted({p.seed for p in places})
    ]


def traces(found: Found, plan: Plan, places: Sequence[Place]) -> list[str]:
    """Recorded traces."""
    tuned = {(name, half) for name, half, used in TRACES if used}
    groups: dict[tuple[str, int | None], list[Place]] = {}
    for place in places:
        groups.setdefault((place.source, place.half), []).append(place)
    held = [p for p in places if (p.source, p.half) not in tuned]
    seen = [p for p in places if (p.source, p.half) in tuned]
    points = ", ".join(dict.fromkeys(f"C={p.concurrency} {p.capacity}" for p in places))
    lines = [f"Means over the pressure points {points}; times that a trace lacks are drawn (seed {plan.seeds[0]}).", ""]
    rows: list[list[object]] = []
    for key, group in groups.items():
        use = "tuned on" if key in tuned else "held out"
        rows.append([group[0].name, use, *(rate(found.mean(group, p)) for p in ON_TRACES)])
    for name, some in (("**held out**", held), ("**tuned on**", seen), ("**all**", list(places))):
        if some:
            rows.append([name, "mean", *(rate(found.mean(some, p)) for p in ON_TRACES)])
            worst = [found.differences(some, p)[0].points for p in ON_TRACES]
            rows.append(["", "worst point - lru", *map(signed, worst)])
            shares = [found.closed(some, p) for p in ON_TRACES]
            rows.append(["", "gap closed, %", *("" if s is None else f"{s:.1f}" for s in shares)])
    lines += _two_words(table(["trace", "", *ON_TRACES], rows))
    lines += ["Point by point, in points of hit rate:", ""]
    rows = []
    for place in places:
        lru = found.rate(place, "lru")
        gains = [signed(found.rate(place, p) - lru) for p in ("lru+trim", "scout-trim", "scout", "opt")]
        share = found.closed([place], "scout")
        rows.append([where(place), rate(lru), *gains, "" if share is None else f"{share:.0f}"])
    header = ["", "lru, %", "lru+trim - lru", "scout-trim - lru", "scout - lru", "opt - lru", "gap closed, %"]
    return [*lines, *table(header, rows)]


def _two_words(lines: list[str]) -> list[str]:
    """A table whose second column holds text."""
    if len(lines) > 1:
        lines[1] = lines[1].replace("| ---: |", "| --- |", 1)
    return lines


def others(found: Found, plan: Plan, places: Sequence[Place]) -> list[str]:
    """Workloads beside the grid."""
    rows = []
    for place in places:
        rates = [rate(found.rate(place, p)) if found.has(place, p) else "" for p in ELSEWHERE]
        share = found.closed([place], "scout")
        gain = signed(found.rate(place, "scout") - found.rate(place, "lru"))
        rows.append([where(place), *rates, gain, "" if share is None else f"{share:.0f}"])
    worst = found.differences(places, "scout")[0]
    return [
        "`informed` is missing where no one law holds throughout. `chat` is anonymous traffic: nobody is tagged.",
        "",
        *table(["", *ELSEWHERE, "scout - lru", "gap closed, %"], rows),
        f"Worst against lru: {worst}.",
        "",
    ]


def cold(found: Found, plan: Plan, places: Sequence[Place]) -> list[str]:
    """Hit rate over time."""
    places = [p for p in curve_places(plan) if p in set(places)]
    if not places:
        return ["Not measured.", ""]
    rates = curves(found, places)
    rows = []
    for i in range(len(rates["lru"])):
        values = [rates[p][i] for p in CURVE_POLICIES]
        room = values[3] - values[0]
        share = f"{100 * (values[1] - values[0]) / room:.0f}" if room > 0.5 else ""
        rows.append([f"{CURVE_STEP * i + 1}-{CURVE_STEP * (i + 1)}", *map(rate, values), share])
    concurrency, capacity = CURVE_AT
    lines = [
        f"All topologies and seeds together at C={concurrency} {capacity}; a run starts with an empty cache and "
        "nothing learned.",
        "",
        *table(["calls", "lru", "scout", "informed", "opt", "gap closed by scout, %"], rows),
    ]
    behind = [a - b for a, b in zip(rates[CEILING], rates["scout"])]
    if len(behind) > 4:
        fourth = len(behind) // 4
        early, late = fmean(behind[:fourth]), fmean(behind[-fourth:])
        lines += [
            f"Behind informed by {signed(early)} points in the first quarter of the run and by {signed(late)} in the "
            "last.",
            "",
        ]
    return lines


def no_help(found: Found, plan: Plan, places: Sequence[Place]) -> list[str]:
    """Where scout is below lru, no better than it, or far from the optimum."""
    gains = _over_seeds(found, places, "scout", "lru")
    room = {_seedless(d.place): d.points for d in _over_seeds(found, places, "opt", "lru")}
    below = [d for d in gains if d.points < 0]
    level = [d for d in gains if 0 <= d.points < NO_HELP]
    idle = [d for d in level if room[_seedless(d.place)] < NO_ROOM]
    missed = [d for d in level if d not in idle]
    lines = [
        f"Over {several(len(gains), 'place')} of sections 1, 2 and 8 (means over seeds where there are several), scout "
        f"is below lru at {len(below)}, above it by less than {NO_HELP} points at {len(level)}, and above it by more "
        f"at {len(gains) - len(below) - len(level)}. At {len(idle)} of the {len(level)} there is nothing to gain: opt "
        f"itself is less than {NO_ROOM} points above lru, since (nearly) everything fits.",
        "",
    ]
    if below:
        lines += ["Below lru:", "", *_room_table(below, room)]
    if missed:
        lines += [f"No help (less than {NO_HELP} points) although there is something to gain:", ""]
        lines += _room_table(missed, room)
    far = _over_seeds(found, places, "scout", "opt")[:12]
    lines += ["Furthest from opt:", ""]
    lines += table(["", "scout - opt", "scout - lru"], [_far_row(d, gains) for d in far])
    groups: dict[str, list[Difference]] = {}
    for d in _over_seeds(found, places, "scout", "opt"):
        groups.setdefault(d.place.name, []).append(d)
    means = sorted((fmean(d.points for d in group), name) for name, group in groups.items())
    lines += ["By source, mean distance to opt: " + ", ".join(f"{n} {signed(m)}" for m, n in means) + ".", ""]
    lines += _against_rivals(found, places)
    return lines


def _far_row(d: Difference, gains: list[Difference]) -> list[str]:
    gain = next(g.points for g in gains if _seedless(g.place) == _seedless(d.place))
    return [where(d.place), signed(d.points), signed(gain)]


def _room_table(some: list[Difference], room: dict[Place, float]) -> list[str]:
    return table(
        ["", "scout - lru", "opt - lru"],
        [[where(d.place), signed(d.points), signed(room[_seedless(d.place)])] for d in some],
    )


def _against_rivals(found: Found, places: Sequence[Place]) -> list[str]:
    """Where another online policy is better."""
    lines = []
    for rival in ("lru+trim", "lhd+trim", "kvflow+END"):
        some = [p for p in places if found.has(p, rival)]
        worse = [d for d in _over_seeds(found, some, "scout", rival) if d.points < -NO_HELP]
        if not worse:
            lines.append(f"- {rival} is nowhere more than {NO_HELP} points better than scout.")
            continue
        shown = "; ".join(f"{where(d.place)} by {-d.points:.2f}" for d in worse[:8])
        more = f" and {len(worse) - 8} more" if len(worse) > 8 else ""
        lines.append(f"- {rival} is better than scout at {several(len(worse), 'place')}: {shown}{more}.")
    return [*lines, ""]


def _seedless(place: Place) -> Place:
    return place._replace(seed=100)


def _over_seeds(found: Found, places: Sequence[Place], policy: str, other: str) -> list[Difference]:
    """Differences, seeds of one place averaged, lowest first."""
    groups: dict[Place, list[float]] = {}
    for d in found.differences(places, policy, other):
        groups.setdefault(_seedless(d.place), []).append(d.points)
    return sorted((Difference(p, fmean(values)) for p, values in groups.items()), key=lambda d: d.points)


def is_grid(place: Place) -> bool:
    """Whether the place belongs to the grid's topologies."""
    return place.source in GRID_WORKLOADS
