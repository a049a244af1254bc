"""Points measured one after the other into a result file: what is there already is kept, a stop loses nothing."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from benchmarks.pool import Stopped, spread, status_of
from benchmarks.results import Results, progress


class Keyed(Protocol):
    """A point."""

    def key(self) -> dict[str, Any]:
        """What tells it from others in the result file."""
        ...


P = TypeVar("P", bound=Keyed)
Figures = dict[str, Any]


def measure_all(
    results: Results,
    points: Sequence[P],
    measure: Callable[..., Figures],
    *more: Any,
    jobs: int,
    line: Callable[[P, Figures], str],
) -> int | None:
    """`measure(point, *more)` of every point that `results` lacks; `line` is what is said of each to stderr.

    The exit status when the run was stopped; None when all points are there, in their order.
    """
    path = results.path
    todo = [point for point in points if not results.has(point.key())]
    if len(todo) < len(points):
        progress(f"{len(points) - len(todo)} of {len(points)} points are in {path} already")
    began = time.monotonic()
    try:
        measured = spread(todo, measure, *more, jobs=min(jobs, os.cpu_count() or 1))
        for done, (point, figures) in enumerate(measured, 1):
            results.add({**point.key(), **figures})
            progress(f"[{done}/{len(todo)}] {line(point, figures)}  ({time.monotonic() - began:.0f} s)")
    except (KeyboardInterrupt, Stopped) as stop:
        kept = f", kept in {path}" if path else ""
        progress(f"stopped: {len(results.points)} of {len(points)} points done{kept}")
        return status_of(stop)
    results.finish(point.key() for point in points)
    return None
