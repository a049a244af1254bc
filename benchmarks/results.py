"""Result files of the benchmarks: one JSON document, written whole after every point, so that a stop loses nothing.

    {"kind", "command", "date", "seed", "versions", "machine", "complete", "points": [...], ...}

`command` is what made the file, without the options that do not change the figures (`--json`, `--jobs`) or must not be
told (`--api-key`); a second run of the same command finds the points that are already there and adds the missing ones.
`date`, `versions` and `machine` are the last run's; where other versions measured points before it, `earlier` holds
theirs, oldest first, each with its number of `points`.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("sglang-scout", "numpy", "sglang", "torch", "transformers")
NEUTRAL = ("--json", "--jobs", "--report", "--api-key")  # options with one value that do not change a figure
MAX_SESSIONS = 1_000_000
# What every point of a kind must have for its tables and reports.
_SERVED = ("policy", "capacity_tokens", "concurrency", "calls", "hit_rate", "computed_prefill_tokens", "ttft_ms")
REQUIRED = {
    "simulate": ("policy", "capacity_tokens", "concurrency", "hit_rate", "unserved_requests"),
    "warmup": ("workload", "policy", "concurrency", "factor", "mode", "seed", "hit_rate", "ttft_ms", "warmup"),
    **dict.fromkeys(("replay", "compare", "demo"), _SERVED),
}
NUMBERS = (
    *("capacity_tokens", "concurrency", "calls", "hit_rate", "prompt_tokens", "cached_tokens"),
    *("computed_prefill_tokens", "unserved_requests"),
)


class UsageError(ValueError):
    """The command cannot be carried out as given: one line for stderr, exit status 2."""


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that are installed, and the commit of this checkout when there is one."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    commit = _git("rev-parse", "--short=12", "HEAD")
    if commit:
        dirty = _git("status", "--porcelain", "--untracked-files=no")
        found["commit"] = commit + ("+changes" if dirty else "")
    return found


def machine() -> dict[str, Any]:
    """The machine in words: processor, cores that this process may use, memory in GiB, operating system."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "os": platform.platform(terse=True),
    }


def canonical_command(name: str, argv: Sequence[str]) -> str:
    """`python -m benchmarks NAME ...` without the options in NEUTRAL, as one shell line."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if skip:
            skip = False
        elif word in NEUTRAL:
            skip = True
        elif not word.startswith(tuple(option + "=" for option in NEUTRAL)):
            kept.append(word)
    return shlex.join(["python", "-m", "benchmarks", name, *kept])


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The document in a result file; UsageError when it is no result file."""
    if Path(path).is_fifo():
        raise UsageError(f"{path}: not a regular file")
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON ({error})") from None
    if not isinstance(document, dict) or not isinstance(document.get("points"), list):
        raise UsageError(f"{path}: JSON, but no result file (no list `points`)")
    check_points(path, document["points"], REQUIRED.get(str(document.get("kind")), ()))
    return document


def check_points(path: str | os.PathLike[str], points: Sequence[Any], required: Sequence[str]) -> None:
    """UsageError when one of the points in a file cannot be used."""
    for number, point in enumerate(points, 1):
        if not isinstance(point, dict):
            raise UsageError(f"{path}: point {number} is no object")
        for name in required:
            if name not in point:
                raise UsageError(f"{path}: point {number} has no {name!r}")
        for name in NUMBERS:
            if not isinstance(point.get(name, 0), int | float):
                raise UsageError(f"{path}: point {number}: {name!r} must be a number, not {point[name]!r}")


def check_writable(path: str | os.PathLike[str]) -> None:
    """UsageError when a file could not be written there: found now, not after hours of work."""
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            raise UsageError(f"{path}: not a regular file")
        if target.exists() and not os.access(target, os.W_OK):
            raise UsageError(f"{path}: cannot be written")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def write(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write the document so that a reader sees the old file or the new one, never half of one."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=target.name + ".", suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner reads
        os.replace(temporary, target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class Results:
    """One result file while a benchmark runs. `path=None` keeps everything in memory only."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        path: str | os.PathLike[str] | None,
        *,
        seed: int | None = None,
        identity: Sequence[str] = ("workload", "policy", "capacity_tokens", "concurrency"),
        **extra: Any,
    ) -> None:
        """`identity`: the keys of a point that tell it from the others. UsageError when the file is another run's."""
        self.path = path
        self._identity = tuple(identity)
        self.document: dict[str, Any] = {
            "kind": name,
            "command": canonical_command(name, argv),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seed": seed,
            "versions": versions(),
            "machine": machine(),
            **extra,
            "complete": False,
            "points": [],
        }
        if path is not None:
            check_writable(path)
            if Path(path).exists():
                self._go_on(path, read(path))
        self._done = {self._key(point) for point in self.document["points"]}

    def _go_on(self, path: str | os.PathLike[str], old: dict[str, Any]) -> None:
        """Take the points of an earlier run of the command, and keep what measured them."""
        if old.get("command") != self.document["command"]:
            raise UsageError(f"{path}: holds the results of another command: {old.get('command')}")
        for name, digest in _traces(self.document).items():
            if _traces(old).get(name, digest) != digest:
                raise UsageError(f"{path}: trace {name} is not the file that it was when these results were begun")
        self.document["points"] = old["points"]
        earlier = [entry for entry in old.get("earlier") or () if isinstance(entry, dict)]
        number = len(old["points"]) - sum(entry.get("points", 0) for entry in earlier)
        if number > 0 and old.get("versions") != self.document["versions"]:
            commit = (old.get("versions") or {}).get("commit", "another version")
            progress(f"{path}: keeps {number} points that were measured at commit {commit} on {old.get('date')}")
            earlier.append({name: old.get(name) for name in ("date", "versions", "machine")} | {"points": number})
        if earlier:
            self.document["earlier"] = earlier

    @property
    def points(self) -> list[dict[str, Any]]:
        """The points so far."""
        return self.document["points"]

    def has(self, point: Mapping[str, Any]) -> bool:
        """Whether a point with this one's identity is there."""
        return self._key(point) in self._done

    def add(self, point: Mapping[str, Any]) -> None:
        """Keep the point, on disk before this returns."""
        self.points.append(dict(point))
        self._done.add(self._key(point))
        self.save()

    def finish(self, order: Iterable[Mapping[str, Any]] = ()) -> None:
        """Mark the run complete; points are put into the order of the identities in `order` when it is given."""
        rank = {self._key(point): i for i, point in enumerate(order)}
        if rank:
            self.points.sort(key=lambda p: rank.get(self._key(p), len(rank)))
        self.document["complete"] = True
        self.save()

    def save(self) -> None:
        """Write the file, when there is one."""
        if self.path is not None:
            write(self.path, self.document)

    def _key(self, point: Mapping[str, Any]) -> str:
        return json.dumps([point.get(name) for name in self._identity])


def _traces(document: Mapping[str, Any]) -> dict[str, str]:
    settings = document.get("settings")
    found = settings.get("traces") if isinstance(settings, dict) else None
    return found if isinstance(found, dict) else {}


def words(text: str) -> list[str]:
    """What stands between commas, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def whole(text: str) -> int | None:
    """The whole number that the text is, in plain digits and of a sane length; None when it is none."""
    word = text.strip()
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 18 else None


def check_sessions(number: int | None) -> None:
    """UsageError when `--sessions` is out of range."""
    if number is not None and not 1 <= number <= MAX_SESSIONS:
        raise UsageError(f"--sessions must be in 1..{MAX_SESSIONS:,}, not {number}")


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns in plain text: text to the left, numbers to the right."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max([len(h), *(len(row[i]) for row in cells)]) for i, h in enumerate(headers)]
    numeric = [all(not isinstance(row[i], str) for row in rows) and bool(rows) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        parts = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric)]
        return "  ".join(parts).rstrip()

    return "\n".join([line(list(headers)), line(["-" * w for w in widths]), *(line(row) for row in cells)])


def progress(text: str) -> None:
    """One line to stderr, so that stdout stays the result."""
    print(text, file=sys.stderr, flush=True)


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None
