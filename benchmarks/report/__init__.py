"""`python -m benchmarks report OUT...`: one HTML page and PNG plots from result files of any of the commands."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.sections import SECTIONS, closing
from benchmarks.results import UsageError, read

__all__ = ["add_parser", "run", "write_report"]


def add_parser(sub: Any) -> None:
    """Options of `python -m benchmarks report`."""
    parser = sub.add_parser("report", help="HTML and plots from result files")
    parser.add_argument("results", nargs="+", metavar="OUT", help="result files (JSON) of any of the commands")
    parser.add_argument("--report", metavar="DIR", help="folder of report.html and the plots (default: beside OUT)")
    parser.add_argument("--title", help="title of the page")


def run(args: argparse.Namespace) -> int:
    """Read, draw, write; prints where."""
    documents = [read(path) for path in args.results]
    for path, document in zip(args.results, documents):
        if document.get("kind") not in SECTIONS:
            raise UsageError(f"{path}: results of {document.get('kind')!r}, which this report does not know")
        if not document["points"]:
            raise UsageError(f"{path}: holds no points yet")
    first = Path(args.results[0])
    folder = Path(args.report) if args.report else first.with_name(first.stem + "-report")
    try:
        print(write_report(documents, folder, title=args.title))
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}") from None
    return 0


def write_report(documents: Sequence[dict[str, Any]], folder: Path, title: str | None = None) -> Path:
    """Write `folder`/report.html with its plots; returns the page's path."""
    from benchmarks.report.page import Page

    kinds = ", ".join(dict.fromkeys(str(d["kind"]) for d in documents))
    page = Page(title or f"sglang-scout: {kinds}", SUBTITLES.get(str(documents[0]["kind"]), ""), folder)
    for document in documents:
        SECTIONS[str(document["kind"])](page, document)
    closing(page, documents)
    return page.write()


_SERVED = (
    "The same sessions of agents, replayed on a real SGLang server under each eviction policy. Hit rates are the "
    "engine's own counters, times are the client's clock."
)
SUBTITLES = {
    "demo": _SERVED,
    "compare": _SERVED,
    "replay": _SERVED,
    "simulate": "Hit rates in the simulator, which runs the same policy code as the server plug-in.",
    "micro": "Costs of the hot path, stock SGLang and policies side by side in one run.",
    "host": "The host tier in the simulator.",
}
