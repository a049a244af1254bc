"""The plan as a plot. matplotlib is optional, so it is imported only here, when a plot is asked for."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radix_policy.curves import Curve
from sglang_scout.plan_report import GIB, PlanError

_INK, _MUTED, _GRID, _LINE, _MARK = "#1d2733", "#66707d", "#e3e7ec", "#16806a", "#d8892b"
_POINTS = 200
_TICKS = 8


def check(path: Path) -> None:
    """PlanError where no plot could be written there: before the work, not after it."""
    if not path.parent.is_dir():
        raise PlanError(f"--plot {path}: cannot be written (no such folder: {path.parent})")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError("--plot needs matplotlib: pip install matplotlib") from None
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise PlanError(f"--plot {path}: cannot be written (no such format; known: {', '.join(sorted(kinds))})")


def plot(report: Mapping[str, Any], curve: Curve, path: Path) -> None:
    """Found share against size, device and host sizes marked; PNG (or what the name ends in), as `check` allowed it.

    PlanError in one line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    low, high = report["curve"][0]["tokens"], max(report["curve"][-1]["tokens"], report["curve"][0]["tokens"] + 1)
    sizes = sorted({round(low * (high / low) ** (i / _POINTS)) for i in range(_POINTS + 1)})
    prompt = max(report["prompt_tokens"], 1)
    fig = Figure(figsize=(6.4, 3.6), layout="constrained")
    ax = fig.add_subplot()
    ax.plot(sizes, [100 * found / prompt for found in curve.found(sizes)], color=_LINE, linewidth=1.8)
    ax.axvline(report["enough_tokens"], color=_LINE, linewidth=1, linestyle="--")
    ax.annotate(
        " memory pays up to here",
        (report["enough_tokens"], 0.03),
        xycoords=("data", "axes fraction"),
        color=_LINE,
        fontsize=8,
    )
    if report["device_tokens"] is not None:
        ax.axvline(report["device_tokens"], color=_INK, linewidth=1)
        ax.annotate(
            " device", (report["device_tokens"], 0.95), xycoords=("data", "axes fraction"), color=_INK, fontsize=8
        )
    hosts = [row for row in report["host"] if row["tokens"] >= low]
    if hosts:
        found = [100 * row["found_tokens"] / prompt for row in hosts]
        ax.plot([row["tokens"] for row in hosts], found, "o", color=_MARK, markersize=5, label="host sizes")
        ax.legend(frameon=False, fontsize=8, loc="lower right")
    ax.set_xscale("log")
    size = report["bytes_per_token"]
    ticks = [low * 2**i for i in range(math.ceil(math.log2(high / low)) + 1)]
    ax.set_xticks(ticks[:: -(-len(ticks) // _TICKS)])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: _short(tokens)))
    ax.minorticks_off()
    ax.set_xlabel("cache, tokens" + (f" ({size / 1024:,.1f} KiB each, per rank)" if size else ""), color=_MUTED)
    ax.set_ylabel("found, % of prompt tokens", color=_MUTED)
    ax.grid(axis="y", color=_GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if size:
        scale = (lambda tokens: tokens * (size / GIB), lambda gib: gib * (GIB / size))
        above = ax.secondary_xaxis("top", functions=scale)
        above.xaxis.set_major_formatter(FuncFormatter(lambda gib, _: f"{gib:g} GiB"))
    try:
        fig.savefig(path, dpi=130, metadata={"Software": None} if path.suffix.lower() == ".png" else None)
    except (OSError, ValueError) as error:
        raise PlanError(f"--plot {path}: cannot be written ({' '.join(str(error).split())})") from None


def _short(tokens: float) -> str:
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if tokens >= unit:
            return f"{tokens / unit:.3g}{letter}"
    return f"{tokens:.3g}"
