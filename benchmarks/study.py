"""`python -m benchmarks study`: everything through the simulator, then RESULTS.md from what came out.

Goes on where it stopped: a point that is in the result files and whose policy still has the same code is not run again.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pool import Stopped, status_of
from benchmarks.results import UsageError, canonical_command, check_writable, progress, words
from benchmarks.study_cost import POLICIES as COST_POLICIES
from benchmarks.study_cost import measure_cost
from benchmarks.study_foresight import POLICIES as FORESIGHT_POLICIES
from benchmarks.study_foresight import measure_foresight
from benchmarks.study_plan import PARTS, SEEDS, Plan, Point
from benchmarks.study_run import cores, run_points
from benchmarks.study_store import Store
from benchmarks.study_text import render
from radix_policy.simulator import parse_spec

_HERE = Path(__file__).resolve().parent
RESULTS = _HERE / "results"
TRACES = ("shared/traces", "../shared/traces")  # from the root of the checkout
SAVE_EVERY = 40  # points


def add_parser(sub: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """Declare the command."""
    parser = sub.add_parser(
        "study",
        help="every figure of RESULTS.md, in the simulator",
        description="Runs everything through the simulator and writes RESULTS.md. Parts: "
        + "; ".join(f"{name}: {text}" for name, text in PARTS.items())
        + ". Points whose policy has not changed since are not run again.",
    )
    parser.add_argument("--traces", metavar="DIR", help="recorded traces (default: shared/traces beside the checkout)")
    parser.add_argument("--out", metavar="DIR", help="folder of the result files (default: benchmarks/results)")
    parser.add_argument("--markdown", metavar="FILE", help="default: benchmarks/RESULTS.md, with --out: DIR/RESULTS.md")
    parser.add_argument("--quick", action="store_true", help="a small version of everything (default --out: out/study)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: the cores there are)")
    parser.add_argument("--only", metavar="PART,..", help=f"these parts only, of {', '.join(PARTS)}")
    parser.add_argument("--render", action="store_true", help="run nothing, write the text again")


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    plan = Plan(args.quick)
    parts = _parts(args.only)
    jobs = cores() if args.jobs is None else args.jobs
    if jobs < 1:
        raise UsageError(f"--jobs must be at least 1, not {jobs}")
    folder, markdown = _places(args)
    traces = _traces(args.traces)
    store = Store(folder, canonical_command("study", ["--quick"] if args.quick else []), args.quick)
    store.load(PARTS)
    if args.render and not store.headers:
        raise UsageError(f"{folder}: no result files of the study")
    if not args.render:
        check_writable(folder / f"{parts[0]}.json")
    check_writable(markdown)
    order = {point: i for i, point in enumerate(p for part in PARTS for p in plan.points(part))}
    if not args.render:
        if store.stale:
            progress(f"{store.stale:,} points were measured with other code and are run again")
        try:
            _run(store, plan, parts, traces, jobs, order)
        except (KeyboardInterrupt, Stopped) as stop:
            progress(f"stopped: what is done is kept in {folder}; the same command goes on from there")
            return status_of(stop)
        finally:
            store.save(order)
        if store.changed():
            progress("the code changed meanwhile: run the command again for figures of the present code")
    text = render(store, plan, markdown)
    try:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{markdown}: {error.strerror or error}") from None
    print(markdown)
    return 0


def _run(
    store: Store, plan: Plan, parts: Sequence[str], traces: Path | None, jobs: int, order: dict[Point, int]
) -> None:
    todo: dict[Point, str] = {}
    untraced = 0
    for part in parts:
        for point in plan.points(part):
            if point in store.points or point in todo:
                continue
            name = parse_spec(point.policy).name
            store.code(name)
            if point.place.is_trace and (traces is None or not (traces / point.place.source).is_file()):
                untraced += 1
                continue
            todo[point] = part
    if untraced:
        progress(f"{untraced:,} points need recorded traces that are not here (--traces DIR)")
    seen = {p.place: f["order"] for p, f in store.points.items() if "order" in f}
    listed = [(part, point) for point, part in todo.items()]
    for number, (part, point, measured) in enumerate(run_points(listed, traces, jobs), 1):
        known = seen.setdefault(point.place, measured.order)
        if known != measured.order:
            raise RuntimeError(f"{point}: saw another order of requests than the other policies")
        store.add(part, point, measured.figures, measured.seconds)
        if number % SAVE_EVERY == 0:
            store.save(order)
    measures: dict[str, tuple[Callable[[], dict[str, Any]], Sequence[str]]] = {
        "foresight": (lambda: measure_foresight(plan), FORESIGHT_POLICIES),
        "cost": (lambda: measure_cost(SEEDS[0], plan.quick), COST_POLICIES),
    }
    for part, (measure, names) in measures.items():
        if part in parts and store.figures(part) is None:
            began = time.process_time()
            figures = measure()
            store.add_figures(part, figures, names, time.process_time() - began)


def _parts(text: str | None) -> list[str]:
    if text is None:
        return list(PARTS)
    asked = words(text)
    unknown = [word for word in asked if word not in PARTS]
    if unknown or not asked:
        raise UsageError(f"--only: parts are {', '.join(PARTS)}, not {text!r}")
    return [part for part in PARTS if part in asked]


def _places(args: argparse.Namespace) -> tuple[Path, Path]:
    """Folder of the result files, and the text."""
    if args.out is not None:
        folder = Path(args.out)
    else:
        folder = _HERE.parent / "out" / "study" if args.quick else RESULTS
    if args.markdown is not None:
        return folder, Path(args.markdown)
    is_default = folder.resolve() == RESULTS
    return folder, _HERE / "RESULTS.md" if is_default else folder / "RESULTS.md"


def _traces(given: str | None) -> Path | None:
    if given is not None:
        if not Path(given).is_dir():
            raise UsageError(f"--traces {given}: no such folder")
        return Path(given)
    found = [_HERE.parent / name for name in TRACES if (_HERE.parent / name).is_dir()]
    return found[0] if found else None
