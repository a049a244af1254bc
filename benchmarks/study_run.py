"""Running points of the study: one at a time, in this process or in several, with progress and time left."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pool import spread
from benchmarks.results import progress
from benchmarks.study_plan import CURVE_STEP, Point
from benchmarks.traces import read
from radix_policy.simulator import Outcome, Study
from radix_policy.workloads import Workload, make

SAY_EVERY = 5.0  # seconds between two lines of progress
_CALLS = {"coding": 8.0, "tau": 3.4, "ag2": 2.1, "magentic": 1.0, "swe": 0.5, "chat.jsonl.gz": 5.0}  # by trace
_WEIGHT = {"scout": 5.0, "informed": 4.0, "opt": 0.2}  # time of a run, in those of lru


class Measured(NamedTuple):
    """One point's figures, what it took, and the order that it saw."""

    figures: dict[str, Any]
    seconds: float
    order: str


def measure(point: Point, traces: Path | None) -> Measured:
    """Run one point."""
    began = time.process_time()
    place = point.place
    study = _study(place.source, place.concurrency >= 64, place.seed, place.half, place.sessions, traces)
    tokens = int(float(place.capacity.rstrip("F")) * study.workload.largest)
    outcome = study.run(point.policy, tokens, place.concurrency, identity=point.identity)
    figures: dict[str, Any] = {
        "capacity_tokens": tokens,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "hit_rate": round(outcome.hit_rate, 6),
    }
    if outcome.unserved:
        figures["unserved_requests"] = outcome.unserved
    if point.policy == "lru":
        figures |= {"requests": outcome.requests, "order": outcome.order}
    if point.has_curve:
        figures["cached_by_time"] = _steps(outcome.cached)
        if point.policy == "lru":
            figures["prompts_by_time"] = _steps(outcome.prompts)
    return Measured(figures, time.process_time() - began, outcome.order)


def _steps(values: Sequence[int]) -> list[int]:
    """Sums over CURVE_STEP calls each; what is left over is dropped."""
    return [sum(values[i : i + CURVE_STEP]) for i in range(0, len(values) - CURVE_STEP + 1, CURVE_STEP)]


@lru_cache(maxsize=3)
def _study(
    source: str, many: bool, seed: int, half: int | None, sessions: int | None, traces: Path | None
) -> "Remembering":
    return Remembering(workload(source, many, seed, half, sessions, traces))


def workload(
    source: str, many: bool, seed: int, half: int | None, sessions: int | None, traces: Path | None
) -> Workload:
    """The sessions of a place; `many`: at concurrency 64 a generated workload has more of them."""
    if source.endswith(".gz"):
        assert traces is not None
        return read(traces / source, seed=seed, half=half, max_sessions=sessions)
    return make(source, seed=seed, concurrency=64 if many else None, sessions=sessions)


class Remembering(Study):
    """A Study that keeps few orders: a long run must not keep the logs of every point."""

    def order(self, capacity: int, concurrency: int) -> Outcome:
        while len(self._orders) > 2:
            self._orders.pop(next(iter(self._orders)))
        return super().order(capacity, concurrency)


def run_points(
    todo: Sequence[tuple[str, Point]], traces: Path | None, jobs: int
) -> Iterator[tuple[str, Point, Measured]]:
    """(part, point, figures) as they come."""
    clock = _Clock(todo)
    parts = {point: part for part, point in todo}
    for point, measured in spread(list(parts), measure, traces, jobs=jobs):
        clock.done(parts[point], point, measured)
        yield parts[point], point, measured


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _weight(point: Point) -> float:
    """About how long a run takes, in runs of lru over 1,200 calls."""
    place = point.place
    calls = _CALLS.get(place.source.split("_")[0], 3.2 if place.concurrency >= 64 else 1.0)
    policy = point.policy
    return calls * next((w for name, w in _WEIGHT.items() if policy.startswith(name)), 1.0)


class _Clock:
    def __init__(self, todo: Sequence[tuple[str, Point]]) -> None:
        self._all = len(todo)
        self._left = sum(_weight(point) for _, point in todo)
        self._ran = 0.0
        self._number = 0
        self._began = self._said = time.monotonic()

    def done(self, part: str, point: Point, measured: Measured) -> None:
        weight, now = _weight(point), time.monotonic()
        self._number += 1
        self._ran += weight
        self._left -= weight
        if now - self._said < SAY_EVERY and self._number < self._all:
            return
        self._said = now
        left = (now - self._began) * self._left / self._ran
        place = point.place
        what = f"{place.name} C={place.concurrency} {place.capacity} {point.policy}"
        if point.identity != "tagged":
            what += f" {point.identity}"
        rate = f"{100 * measured.figures['hit_rate']:.2f} %"
        progress(f"[{self._number}/{self._all}] {part}: {what}: {rate}; {_minutes(left)} left")
        sys.stderr.flush()


def _minutes(seconds: float) -> str:
    return f"{max(seconds, 0):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
