"""Numbers of the study as sections use them, and markdown tables."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from benchmarks.study_plan import Place, Point

# Student's t, 97.5 %, by degrees of freedom
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


class Difference(NamedTuple):
    """How far one policy is from another at a place, in points."""

    place: Place
    points: float

    def __str__(self) -> str:
        return f"{signed(self.points)} ({where(self.place)})"


class Found:
    """Hit rates by place, policy and identity, in percent."""

    def __init__(self, points: Mapping[Point, Mapping[str, Any]]) -> None:
        self.points = points

    def rate(self, place: Place, policy: str, identity: str = "tagged") -> float:
        """KeyError when it was not measured."""
        figures = self.points[Point(place, policy, identity)]
        return 100 * figures["cached_tokens"] / figures["prompt_tokens"] if figures["prompt_tokens"] else 0.0

    def has(self, place: Place, policy: str, identity: str = "tagged") -> bool:
        """Whether it was measured."""
        return Point(place, policy, identity) in self.points

    def mean(self, places: Sequence[Place], policy: str, identity: str = "tagged") -> float:
        """Over places, each counting the same."""
        return fmean(self.rate(p, policy, identity) for p in places)

    def differences(
        self,
        places: Iterable[Place],
        policy: str,
        other: str = "lru",
        identity: str = "tagged",
        other_identity: str = "",
    ) -> list[Difference]:
        """policy - other at every place, the lowest first; `lru` and other baselines are always tagged."""
        base = other_identity or "tagged"
        found = [Difference(p, self.rate(p, policy, identity) - self.rate(p, other, base)) for p in places]
        return sorted(found, key=lambda d: d.points)

    def closed(self, places: Sequence[Place], policy: str) -> float | None:
        """Sum of (policy - lru) over sum of (opt - lru), in percent; None when there is no gap."""
        room = sum(self.rate(p, "opt") - self.rate(p, "lru") for p in places)
        gain = sum(self.rate(p, policy) - self.rate(p, "lru") for p in places)
        return 100 * gain / room if room > 0 else None


def where(place: Place) -> str:
    """The place in words."""
    return f"{place.name} C={place.concurrency} {place.capacity}" + (
        f", seed {place.seed}" if place.seed != 100 else ""
    )


def signed(value: float) -> str:
    """A difference in points."""
    text = f"{value:+.2f}"
    return "0.00" if text in ("+0.00", "-0.00") else text


def rate(value: float) -> str:
    """A hit rate in percent."""
    return f"{value:.1f}"


def interval(values: Sequence[float]) -> float | None:
    """Half width of the 95 % confidence interval of the mean; None from one value."""
    if len(values) < 2:
        return None
    return _T.get(len(values) - 1, 1.96) * stdev(values) / len(values) ** 0.5


def mean_and_interval(values: Sequence[float]) -> str:
    """`+1.23 ± 0.45`."""
    half = interval(values)
    return signed(fmean(values)) + (f" ± {half:.2f}" if half is not None else "")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Markdown: first column to the left, the rest to the right, then an empty line."""
    marks = ["---", *(["---:"] * (len(header) - 1))]
    lines = [list(header), marks, *([str(cell) for cell in row] for row in rows)]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Markdown, every column to the left."""
    lines = [list(header), ["---"] * len(header), *([str(cell) for cell in row] for row in rows)]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def several(n: int, one: str, many: str = "") -> str:
    """`1 point`, `3 points`."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"
