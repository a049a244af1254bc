"""The few plots of the study."""

from pathlib import Path

from benchmarks.report.plots import axes, colour, figure
from benchmarks.simulate import GRID
from benchmarks.study_plan import CURVE_AT, CURVE_POLICIES, CURVE_STEP, Place, Plan, Point
from benchmarks.study_tables import Found

SHOWN = ("lru", "cachescout", "lhd+trim", "scout", "opt")


def capacity_plot(found: Found, plan: Plan, path: Path) -> bool:
    """Hit rate against capacity, a row of panels per concurrency, a panel per topology; False when nothing is there."""
    places = plan.grid_places()
    shown = [c for c in (4, 16) if len({p.capacity for p in places if p.concurrency == c}) > 1]
    names = list(dict.fromkeys(p.source for p in places))
    if not shown:
        return False
    fig = figure(2.9 * len(names), 2.5 * len(shown))
    panels = iter(axes(fig, len(shown), len(names)))
    for concurrency in shown:
        for name in names:
            ax = next(panels)
            own = [p for p in places if (p.source, p.concurrency) == (name, concurrency)]
            factors = [f for f in GRID[concurrency] if any(p.capacity == f"{f:g}F" for p in own)]
            for policy in SHOWN:
                rates = [found.mean([p for p in own if p.capacity == f"{f:g}F"], policy) for f in factors]
                style = {"linestyle": "--", "linewidth": 1.3} if policy == "opt" else {"linewidth": 1.8}
                ax.plot(factors, rates, marker="o", markersize=3, color=colour(policy, SHOWN), label=policy, **style)
            ax.set_xscale("log", base=2)
            ax.set_xticks(factors, [f"{f:g}F" for f in factors])
            ax.minorticks_off()
            ax.set_title(f"{name}, C={concurrency}", fontsize=9.5)
            if name == names[0]:
                ax.set_ylabel("hit rate, %")
    fig.axes[0].legend(fontsize=8, loc="lower right")
    _save(fig, path)
    return True


def curves(found: Found, places: list[Place]) -> dict[str, list[float]]:
    """Hit rate of each step of calls, %, all places together; as many steps as the shortest run has."""
    prompts = [found.points[Point(p, "lru")]["prompts_by_time"] for p in places]
    length = min(map(len, prompts), default=0)
    whole = [sum(run[i] for run in prompts) for i in range(length)]
    result = {}
    for policy in CURVE_POLICIES:
        cached = [found.points[Point(p, policy)]["cached_by_time"] for p in places]
        result[policy] = [100 * sum(run[i] for run in cached) / whole[i] for i in range(length)]
    return result


def curve_places(plan: Plan) -> list[Place]:
    """Where the hit rate over time is kept."""
    return [p for p in plan.grid_places() if (p.concurrency, p.capacity) == CURVE_AT]


def time_plot(found: Found, plan: Plan, path: Path) -> bool:
    """Hit rate over time; False when nothing is there."""
    rates = curves(found, curve_places(plan))
    if not rates or not rates["lru"]:
        return False
    fig = figure(6.0, 2.9)
    (ax,) = axes(fig)
    for policy, values in rates.items():
        x = [CURVE_STEP * (i + 1) for i in range(len(values))]
        style = {"linestyle": "--", "linewidth": 1.3} if policy == "opt" else {"linewidth": 1.8}
        ax.plot(x, values, color=colour(policy, CURVE_POLICIES), label=policy, **style)
    ax.set_xlabel("calls so far")
    ax.set_ylabel("hit rate, %")
    ax.legend(fontsize=8, loc="lower right")
    _save(fig, path)
    return True


def _save(fig: object, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110, metadata={"Software": None})  # type: ignore[attr-defined]
