"""One line of a recorded trace, checked."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radix_policy.workloads.base import WorkloadError

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Record:
    """A recorded model call."""

    line: int  # in the file, from 1
    session: int | str
    step: int
    agent: str  # "" where the call is anonymous
    t: float | None  # seconds, start of the call
    service_s: float  # seconds from start to finish; a nominal figure where none was recorded
    think_s: float | None  # seconds between the previous call's finish and this call
    blocks: tuple[tuple[int, int], ...]  # runs of block ids: (first, count)
    block_size: int  # tokens
    own_ids: int | None  # number of the session where block ids are its own; None: ids hold for the whole file
    input_len: int | None  # tokens; None: the prompt was not recorded
    output_len: int  # tokens
    fixed: int  # tokens of the leading system message and tool definitions; 0 unknown


def records(path: str | Path) -> Iterator[Record]:
    """The file's calls in order; WorkloadError with file and line on anything that cannot be used."""
    numbers: dict[int | str, int] = {}
    size = 0
    for line, text in _lines(Path(path)):
        where = f"{path}:{line}"
        try:
            row = json.loads(text)
        except ValueError as error:
            raise WorkloadError(f"{where}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise WorkloadError(f"{where}: expected an object, got {_kind(row)}")
        record = _record(row, line, where, numbers)
        if size and record.block_size != size:
            raise WorkloadError(f"{where}: block_size {record.block_size} differs from {size} before it")
        size = record.block_size
        yield record


def nominal_service(input_len: int, output_len: int) -> float:
    """Seconds that the workload spec gives a call: 10 ms, prefill of 30 % of the prompt, 10 ms per output token."""
    first = 0.7 * input_len
    prefill = 1e-4 * ((input_len - first) + (input_len**2 - first**2) / (2 * 30_500))
    return 0.01 + prefill + 0.01 * output_len


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    line = 0
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            for line, data in enumerate(gzip.GzipFile(fileobj=raw) if zipped else raw, 1):
                if data.strip():
                    yield line, data.decode()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise WorkloadError(f"{path}:{line + 1}: gzip file truncated or damaged ({error})") from None
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}:{line}: not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read ({error.strerror or error})") from None


def _record(row: Mapping[str, Any], line: int, where: str, numbers: dict[int | str, int]) -> Record:
    size = _int(row, "block_size", where, low=1)
    output = _int(row, "output_len", where, low=1)
    blocks = _blocks(row, where)
    length = None if row.get("input_len", _MISSING) is None and not blocks else _int(row, "input_len", where, low=1)
    covered = size * sum(count for _, count in blocks)
    if length is not None and covered <= length - size:
        raise WorkloadError(f"{where}: blocks_rle covers {covered} of {length} prompt tokens")
    session = _get(row, "session", where, (int, str))
    scope = _get(row, "block_scope", where, (str, type(None)), None)
    if scope not in (None, "session"):
        raise WorkloadError(f"{where}: field 'block_scope': got {scope!r}, allowed: 'session' or absent")
    number = numbers.setdefault(session, len(numbers))
    api_s = _seconds(row, "api_s", where)
    fixed = [_get(row, name, where, (int, type(None)), 0) or 0 for name in ("sys_len", "tool_tokens", "system_tokens")]
    return Record(
        line,
        session,
        _int(row, "step", where, low=0),
        _get(row, "agent", where, (str, type(None))) or "",
        _seconds(row, "t", where, required=True),
        api_s if api_s is not None else nominal_service(length or 0, output),
        _seconds(row, "think_s", where),
        blocks,
        size,
        number if scope else None,
        length,
        output,
        max(0, sum(fixed)),
    )


def _blocks(row: Mapping[str, Any], where: str) -> tuple[tuple[int, int], ...]:
    runs = _get(row, "blocks_rle", where, (list,))
    for run in runs:
        good = (
            isinstance(run, list) and len(run) == 2 and all(isinstance(x, int) and not isinstance(x, bool) for x in run)
        )
        if not good or not 0 <= run[0] < 1 << 30 or not 1 <= run[1] < 1 << 30:
            raise WorkloadError(f"{where}: field 'blocks_rle': got {run!r}, allowed: [first id >= 0, count >= 1]")
    return tuple((first, count) for first, count in runs)


def _get(row: Mapping[str, Any], name: str, where: str, kinds: tuple[type, ...], default: Any = _MISSING) -> Any:
    value = row.get(name, default)
    if value is _MISSING:
        raise WorkloadError(f"{where}: field {name!r} is missing")
    if not isinstance(value, kinds) or isinstance(value, bool):
        allowed = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise WorkloadError(f"{where}: field {name!r}: got {_kind(value)}, allowed: {allowed}")
    return value


def _int(row: Mapping[str, Any], name: str, where: str, low: int) -> int:
    value: int = _get(row, name, where, (int,))
    if value < low:
        raise WorkloadError(f"{where}: field {name!r}: got {value}, allowed: >= {low}")
    return value


def _seconds(row: Mapping[str, Any], name: str, where: str, required: bool = False) -> float | None:
    value = _get(row, name, where, (int, float, type(None)), *(() if required else (None,)))
    if value is not None and not abs(value) < float("inf"):
        raise WorkloadError(f"{where}: field {name!r}: got {value}, allowed: a finite number or null")
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
