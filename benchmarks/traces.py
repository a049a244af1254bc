"""Recorded traces as a command's input: whatever is wrong with a file is one line that names it."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.results import UsageError
from radix_policy.workloads import Workload, WorkloadError, read_trace


def distinct(paths: Iterable[str]) -> list[str]:
    """Each file once; UsageError when one is no file, or when two could not be told apart: points hold the name."""
    found: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        if not Path(path).is_file():
            raise UsageError(f"{path}: {'not a file' if Path(path).exists() else 'no such file'}")
        other = found.setdefault(Path(path).name, path)
        if other != path:
            raise UsageError(f"{other} and {path}: two traces of the same name")
    return list(found.values())


def read(path: str | Path, **options: Any) -> Workload:
    """`read_trace`, with every way to fail a WorkloadError."""
    try:
        return read_trace(path, **options)
    except (OverflowError, RecursionError, UnicodeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise WorkloadError(f"{path}: a value in it is out of range ({type(error).__name__}: {reason})") from None


def digests(paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """{"traces": {file name: digest of its bytes}} for the settings of a result file; {} without a trace."""
    found = {}
    for path in paths:
        try:
            with open(path, "rb") as file:
                found[Path(path).name] = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}") from None
    return {"traces": found} if found else {}
