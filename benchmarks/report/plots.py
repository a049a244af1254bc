"""Plots of benchmark results, each a matplotlib Figure. What they show is decided here, the page only places them."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Point = Mapping[str, Any]

INK, MUTED, GRID = "#1d2733", "#66707d", "#e3e7ec"
COLOURS = {"lru": "#8794a5", "cachescout": "#d8892b", "scout": "#16806a", "opt": "#1d2733"}
_MORE = ("#4a6fb5", "#a4518f", "#b0533c", "#6b8f2e", "#3d8fa6", "#7a5cc0")

_STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": "#b9c1cb",
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlecolor": INK,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "path",  # the page must look the same without the fonts of this machine
    "svg.hashsalt": "sglang-scout",
}


def colour(policy: str, policies: Sequence[str] = ()) -> str:
    """The policy's colour: fixed for the well-known ones, else by its place among the unknown ones."""
    if policy in COLOURS:
        return COLOURS[policy]
    unknown = [p for p in dict.fromkeys(policies) if p not in COLOURS]
    return _MORE[unknown.index(policy) % len(_MORE)] if policy in unknown else _MORE[0]


matplotlib.rcParams.update(_STYLE)


def figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def axes(fig: Figure, rows: int = 1, columns: int = 1) -> list[Axes]:
    """The subplots of a figure."""
    made = [fig.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for ax in made:
        ax.grid(axis="y", color=GRID, linewidth=0.8)
        ax.set_axisbelow(True)
    return made


def setting(point: Point) -> tuple[str, int, int]:
    """What a point shares with the points that it is compared with."""
    return (name(point), point["capacity_tokens"], point["concurrency"])


def name(point: Point) -> str:
    """Its workload or trace."""
    return str(point.get("workload") or point.get("trace") or "")


def label(point: Point) -> str:
    """Pool size and concurrency, in few words."""
    factor = point.get("capacity_F")
    pool = f"{point['capacity_tokens']:,} tokens" + (f" ({factor:.3g}F)" if factor else "")
    return f"{pool}, C={point['concurrency']}"


def by_setting(points: Sequence[Point]) -> dict[tuple[str, int, int], list[Point]]:
    """Points that differ by policy only, together."""
    groups: dict[tuple[str, int, int], list[Point]] = {}
    for point in points:
        groups.setdefault(setting(point), []).append(point)
    return groups


def hit_rates(points: Sequence[Point]) -> Figure:
    """Share of prompt tokens served from cache, by policy, one group of bars for each setting."""
    groups = by_setting(points)
    policies = list(dict.fromkeys(p["policy"] for p in points))
    fig = figure(max(4.2, 1.2 + 0.75 * len(policies) * len(groups)), 3.3)
    (ax,) = axes(fig)
    width = 0.8 / len(policies)
    for g, group in enumerate(groups.values()):
        for point in group:
            i = policies.index(point["policy"])
            x = g + (i - (len(policies) - 1) / 2) * width
            ax.bar(x, 100 * point["hit_rate"], 0.9 * width, color=colour(point["policy"], policies))
            ax.text(x, 100 * point["hit_rate"] + 1, f"{100 * point['hit_rate']:.1f}", ha="center", fontsize=9.5)
    ax.set_xticks(range(len(groups)), [label(group[0]) for group in groups.values()], color=INK)
    top = max(100 * p["hit_rate"] for p in points)
    ax.set_ylim(0, min(108, max(10.0, 1.18 * top)))
    ax.set_ylabel("% of prompt tokens")
    ax.set_title("Served from cache")
    _legend(ax, policies)
    return fig


def ttft(points: Sequence[Point]) -> Figure:
    """Time to first token by policy: mean, median, 99th percentile; one panel for each setting."""
    groups = by_setting(points)
    fig = figure(4.6 * len(groups), 3.3)
    panels = axes(fig, 1, len(groups))
    for ax, group in zip(panels, groups.values()):
        policies = [p["policy"] for p in group]
        width = 0.8 / len(policies)
        for i, point in enumerate(group):
            for j, statistic in enumerate(("mean", "p50", "p99")):
                value = point["ttft_ms"][statistic] or 0.0
                x = j + (i - (len(policies) - 1) / 2) * width
                ax.bar(x, value, 0.9 * width, color=colour(point["policy"], policies))
                ax.text(x, value, milliseconds(value), ha="center", va="bottom", fontsize=8.5)
        ax.set_xticks(range(3), ["mean", "median", "p99"], color=INK)
        ax.margins(y=0.15)
        ax.set_ylabel("ms")
        ax.set_title("Time to first token" + (f"\n{label(group[0])}" if len(groups) > 1 else ""))
        _legend(ax, policies)
    return fig


def ttft_distribution(points: Sequence[Point]) -> Figure:
    """Cumulative distribution of the time to first token, one panel for each setting."""
    groups = by_setting([p for p in points if p.get("ttft_samples_ms")])
    fig = figure(4.6 * len(groups), 3.3)
    for ax, group in zip(axes(fig, 1, len(groups)), groups.values()):
        policies = [p["policy"] for p in group]
        for point in group:
            samples = point["ttft_samples_ms"]
            share = [100 * (i + 1) / len(samples) for i in range(len(samples))]
            ax.step(
                [samples[0], *samples],
                [0, *share],
                where="post",
                color=colour(point["policy"], policies),
                linewidth=2,
                label=point["policy"],
            )
        ax.set_ylim(0, 101)
        ax.set_xscale("log")  # a hit and a miss differ by a factor, and one slow call must not squeeze the rest
        ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,g}"))
        ax.xaxis.set_minor_locator(ticker.NullLocator())
        ax.grid(axis="x", color=GRID, linewidth=0.8)
        ax.set_xlabel("time to first token, ms")
        ax.set_ylabel("% of calls at most this slow")
        ax.set_title("Distribution" + (f"\n{label(group[0])}" if len(groups) > 1 else ""))
        _legend(ax, policies, "lower right")
    return fig


def by_agent(points: Sequence[Point], order: Sequence[str] = ()) -> Figure:
    """Hit rate of each agent's calls, by policy, in the first setting."""
    group = next(iter(by_setting(points).values()))
    policies = [p["policy"] for p in group]
    known = dict.fromkeys(a for p in group for a in p["agents"])
    agents = [*(a for a in order if a in known), *(a for a in known if a not in order)]
    fig = figure(max(5.4, 1.5 + 0.36 * len(agents) * len(policies)), 3.3)
    (ax,) = axes(fig)
    width = 0.8 / len(policies)
    for i, point in enumerate(group):
        rates = [_rate(point["agents"].get(a)) for a in agents]
        at = [j + (i - (len(policies) - 1) / 2) * width for j in range(len(agents))]
        ax.bar(at, rates, 0.9 * width, color=colour(point["policy"], policies))
    ax.set_xticks(range(len(agents)), [a or "(none)" for a in agents], color=INK, rotation=20 if len(agents) > 6 else 0)
    ax.set_ylim(0, 105)
    ax.set_ylabel("% of prompt tokens")
    ax.set_title("Served from cache, by agent")
    _legend(ax, policies)
    return fig


def matrices(agents: Sequence[str], true: Sequence[Sequence[float]] | None, learned: Mapping[str, Any]) -> Figure:
    """Who calls whom: the true transition rows beside what the server learned."""
    how = "Learned by the server" if learned.get("source") == "server" else "Learned (recomputed from the calls)"
    shown = [(how, learned["rows"])]
    if true is not None:
        shown.insert(0, ("True (the workload's own)", true))
    size = max(3.2, 0.55 * len(agents) + 1.2)
    fig = figure(size * len(shown) + 0.8, size)
    panels = axes(fig, 1, len(shown))
    image = None
    for ax, (title, rows) in zip(panels, shown):
        ax.grid(False)
        image = ax.imshow(rows, cmap=_shades(), vmin=0, vmax=1, aspect="equal")
        for i, row in enumerate(rows):
            for j, p in enumerate(row):
                if p >= 0.005 and len(agents) <= 12:
                    text = "1" if p > 0.995 else f"{p:.2f}".lstrip("0")
                    ax.text(j, i, text, ha="center", va="center", fontsize=8.5, color="white" if p > 0.55 else INK)
        ax.set_xticks(range(len(agents)), agents, rotation=40, ha="right", rotation_mode="anchor", fontsize=9)
        ax.set_yticks(range(len(agents)), agents, fontsize=9)
        ax.tick_params(length=0)
        ax.set_title(title)
        ax.set_xlabel("called next")
    panels[0].set_ylabel("called now")
    if image is not None:
        bar = fig.colorbar(image, ax=panels, shrink=0.75, pad=0.02)
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.ax.tick_params(colors=MUTED, labelsize=8)
    return fig


def capacity_curves(points: Sequence[Point]) -> Figure:
    """Simulated hit rate against capacity, one panel for each workload and concurrency."""
    panels: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        panels.setdefault((name(point), point["concurrency"]), []).append(point)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    fig = figure(4.6 * columns, 3.3 * rows)
    made = axes(fig, rows, columns)
    for ax in made[len(panels) :]:
        ax.set_visible(False)
    for ax, ((workload, concurrency), group) in zip(made, panels.items()):
        policies = list(dict.fromkeys(p["policy"] for p in group))
        for policy in policies:
            line = sorted((p["capacity_tokens"], 100 * p["hit_rate"]) for p in group if p["policy"] == policy)
            ax.plot(
                [x for x, _ in line],
                [y for _, y in line],
                color=colour(policy, policies),
                linestyle="--" if policy == "opt" else "-",
                marker="o",
                markersize=4,
                linewidth=1.8,
                label=policy,
            )
        _capacity_axis(ax, group)
        ax.set_ylabel("% of prompt tokens from cache")
        ax.set_title(f"{workload}, C={concurrency}")
        _legend(ax, policies)
    return fig


def micro_costs(points: Sequence[Point]) -> Figure:
    """Cost of each operation against the number of leaves, one line for each core and policy."""
    wanted = ("evict", "evict again", "score", "insert", "match", "lock")
    points = [p for p in points if p.get("per_class", 1) == 1]
    ops = [op for op in wanted if any(p["op"] == op and p["leaves"] for p in points)]
    columns = min(3, max(1, len(ops)))
    rows = max(1, -(-len(ops) // columns))
    fig = figure(4.4 * columns, 3.3 * rows)
    made = axes(fig, rows, columns)
    known: dict[str, Any] = {}  # lines by label, one legend for all
    for ax, op in zip(made, ops):
        own = [p for p in points if p["op"] == op]
        policies = list(dict.fromkeys(p["policy"] for p in own))
        for core, policy in sorted({(p["core"], p["policy"]) for p in own}, key=lambda k: (policies.index(k[1]), k[0])):
            line = sorted((p["leaves"], p["us"]) for p in own if p["core"] == core and p["policy"] == policy)
            where = {"none": "policy alone", "python": "Python core", "rust": "Rust core"}.get(core, core)
            ax.plot(
                [x for x, _ in line],
                [y for _, y in line],
                color=colour(policy, policies),
                linestyle={"none": ":", "rust": "--"}.get(core, "-"),
                marker="o",
                markersize=4,
                label=f"{policy}, {where}",
            )
        ax.set_xscale("log")
        ticks = sorted({p["leaves"] for p in own})
        ax.xaxis.set_minor_locator(ticker.NullLocator())
        ax.set_xticks(ticks, [f"{n // 1000}k" if n % 1000 == 0 else f"{n:,}" for n in ticks])
        if op.startswith("evict"):  # the others hardly depend on the tree's size, and differ by little
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:,g}"))
        else:
            ax.set_ylim(bottom=0)
            ax.margins(y=0.2)
        ax.set_xlabel("leaves")
        ax.set_ylabel("µs")
        ax.set_title(op + (" (a call)" if op.startswith("evict") else " (a leaf)" if op == "score" else ""))
        for drawn in ax.get_lines():
            known.setdefault(str(drawn.get_label()), drawn)
    for ax in made[len(ops) :]:
        ax.set_visible(False)
    if known:
        fig.legend([*known.values()], [*known], fontsize=8, loc="outside lower center", ncols=min(len(known), 3))
    return fig


def host_sizes(points: Sequence[Point]) -> Figure:
    """Prefill computed against the host tier's size, one line for each admission mode."""
    fig = figure(5.2, 3.3)
    (ax,) = axes(fig)
    modes = list(dict.fromkeys(str(p["mode"]) for p in points))
    for mode in modes:
        own = [p for p in points if p["mode"] == mode]
        ax.plot(
            range(len(own)),
            [p["computed_prefill_tokens"] / 1e6 for p in own],
            marker="o",
            label=mode,
            color=colour(mode, modes),
        )
    first = [p for p in points if p["mode"] == modes[0]]
    ax.set_xticks(range(len(first)), [str(p["size"]) for p in first])
    ax.set_xlabel("host tier size")
    ax.set_ylabel("million tokens computed")
    ax.set_title("Prefill computed by admission mode")
    ax.legend(fontsize=9)
    return fig


def milliseconds(value: float) -> str:
    """A time for a bar's head."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _rate(agent: Mapping[str, int] | None) -> float:
    return 100 * agent["cached_tokens"] / agent["prompt_tokens"] if agent and agent["prompt_tokens"] else 0.0


def _legend(ax: Axes, policies: Sequence[str], where: str = "best") -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour(p, policies), label=p) for p in dict.fromkeys(policies)]
    ax.legend(handles=handles, fontsize=9, loc=where)


def _shades() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("scout", ["#f4f7f9", "#8ec7b8", "#0f5f4e"])


def _capacity_axis(ax: Axes, points: Sequence[Point]) -> None:
    sizes = {p["capacity_tokens"]: str(p.get("capacity") or p["capacity_tokens"]) for p in points}
    ax.set_xscale("log")
    ax.xaxis.set_minor_locator(ticker.NullLocator())
    ax.set_xticks(sorted(sizes), [sizes[s] for s in sorted(sizes)])
    ax.set_xlabel("KV pool" + (" (F: largest request)" if any(s.endswith("F") for s in sizes.values()) else ", tokens"))
